"""Write heads as `peagle-convert to-hf` exports them, and what the published package makes of them.

Each ``tests/golden/exports/<name>/`` is what the command wrote in the speculators layout for a tiny
random head, which the package itself had made and saved, and a ``golden.npz`` that the package
computed from the exported directory: one pass over R rows under a causal mask, in float32.

    ids [R]                 token id of each row
    fc_in [R, F]            features before any norm
    positions [R]           rotary position
    mask [R, R]             whether a row (first axis) attends to a row (second axis)
    logits [R, D]           logits over the draft vocabulary

The script also checks that the package's head before the export and the one that it loads from the
exported directory give the same logits, bit for bit.

The environment is that of ``make_drafters.py``; the command is that of another one, peagle_jax's:

    /tmp/speculators/bin/python tests/golden/make_exports.py .venv/bin/peagle-convert
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from make_drafters import COMMON_DECODER, GOLDEN_DIR, REPOSITORY, VOCAB, draw_parameter, record
from safetensors.numpy import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

TARGET = "tests/golden/targets/llama_gqa"
ROWS, MASK_ID = 12, 95
BOUNDARIES = [1, 2, 3]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Head:
    """One tiny random head.

    Attributes:
        name: directory below ``exports/``
        seed: of everything random
        parallel: P-EAGLE, else EAGLE-3
        decoder: config of the decoder
        draft_vocab: size of the draft vocabulary
        flags: norm options, in the package's spelling
    """

    name: str
    seed: int
    parallel: bool
    decoder: LlamaConfig | Qwen3Config
    draft_vocab: int
    flags: dict[str, bool]


HEADS = (
    Head(
        name="peagle",
        seed=1,
        parallel=True,
        draft_vocab=48,
        flags={"norm_before_fc": True},
        decoder=LlamaConfig(
            **COMMON_DECODER,
            num_hidden_layers=2,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 20.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    Head(
        name="eagle3",
        seed=2,
        parallel=False,
        draft_vocab=VOCAB,
        flags={"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        decoder=Qwen3Config(
            **COMMON_DECODER,
            num_hidden_layers=1,
            intermediate_size=24,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        ),
    ),
)


def main() -> None:
    """Write all exports and print how large they are."""
    disable_progress_bar()
    logger.disable("speculators")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    command = str(Path(sys.argv[1]).absolute())
    with torch.inference_mode(), contextlib.chdir(REPOSITORY):
        for head in HEADS:
            write_export(head, command)


def write_export(head: Head, command: str) -> None:
    """Write the directory of a head."""
    model = build_model(head)
    rng = np.random.default_rng(head.seed)
    ids = rng.integers(0, VOCAB, ROWS)
    features = rng.standard_normal((ROWS, model.fc.in_features), np.float32)
    before = forward(model, ids, features)

    directory = GOLDEN_DIR / "exports" / head.name
    shutil.rmtree(directory, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        saved, native = Path(folder, "saved"), Path(folder, "native")
        model.save_pretrained(saved)
        convert = [command, "to-native", str(saved), str(native)]
        subprocess.run(convert, check=True)
        export = [command, "to-hf", str(native), str(directory)]
        subprocess.run([*export, "--format", "speculators", "--target", TARGET], check=True)

    model_class = type(model)
    config = model_class.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = COMMON_DECODER["attn_implementation"]
    loaded = model_class.from_pretrained(directory, config=config).eval()
    state = loaded.state_dict()
    for name, value in load_file(directory / "model.safetensors").items():
        assert np.array_equal(state[name].numpy(), value), f"{head.name}: {name} was not loaded"
    after = forward(loaded, ids, features)
    assert np.array_equal(before["logits"], after["logits"]), f"{head.name}: logits changed"

    arrays = {key: after[key] for key in ("ids", "positions", "mask", "logits")}
    np.savez_compressed(directory / "golden.npz", fc_in=features, **arrays)
    kilobytes = sum(file.stat().st_size for file in directory.iterdir()) / 1000
    print(f"exports/{head.name}/: {kilobytes:.0f} KB, logits of {after['logits'].std():.1f}")


def build_model(head: Head) -> Eagle3DraftModel:
    """Build the head with all parameters drawn from its seed."""
    config_class = PEagleSpeculatorConfig if head.parallel else Eagle3SpeculatorConfig
    config = config_class(
        transformer_layer_config=head.decoder,
        draft_vocab_size=head.draft_vocab,
        eagle_aux_hidden_state_layer_ids=BOUNDARIES,
        speculators_config=SpeculatorsConfig(
            algorithm=config_class.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=7)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(TARGET),
        ),
        **({"mask_token_id": MASK_ID} if head.parallel else {}),
        **head.flags,
    )
    model = (core.PEagleDraftModel if head.parallel else Eagle3DraftModel)(config).eval()
    generator = torch.Generator().manual_seed(head.seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter.shape, generator))
    if head.draft_vocab < VOCAB:
        chosen = torch.randperm(VOCAB, generator=generator)[: head.draft_vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(head.draft_vocab))
    return model


def forward(model: Eagle3DraftModel, ids: np.ndarray, features: np.ndarray) -> Arrays:
    """One pass of the package's model: every row is a real one, and sees those before it."""
    arrays: Arrays = {}
    options: dict[str, Any] = {"ttt_steps": 1}
    if isinstance(model, core.PEagleDraftModel):
        # One depth, of which nothing is dropped: the first row of every group.
        options = {"num_depths": 1, "loss_config": resolve_loss_config("kl_div", "eager")}
        options["verifier_last_hidden_states"] = torch.zeros(1, ROWS, model.hidden_size)
    with record(model, arrays):
        model(
            hidden_states=torch.from_numpy(features)[None],
            input_ids=torch.from_numpy(ids)[None],
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            **options,
        )
    assert np.array_equal(arrays["mask"], np.tri(ROWS, dtype=bool))
    return arrays


if __name__ == "__main__":
    main()
