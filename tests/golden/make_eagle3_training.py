"""Write the golden losses and gradients of EAGLE-3 training, by the published speculators package.

Each ``tests/golden/oracle_eagle3/<name>/`` holds a tiny random head in the speculators layout
(weights are bfloat16 numbers) and a ``golden.npz``, computed in float32 by the package's training
pass. The packed row, its document ids and loss mask, the features and the target's states are the
``in.*`` of a ``pack.npz`` under ``oracle/``; S is its length, T the steps. Its second document
begins with two rows that are not supervised, so with three steps the package charges nothing that
looks into another document. The target's norm and head are those of the same folder. Keys:

    ttt_step_loss_decay []  what step t's loss is multiplied by, to the power of t
    elem [T, S]             KL divergence of step t's row a from the target's answer of row a + t,
                            where there is one in the packed row, else 0
    step_loss [T]           of each step, with its decay
    loss []                 the sum of these
    full_acc_sum [T]        rows that were right in all steps so far
    full_acc_total [T]      rows charged
    grad.<parameter>        of the loss; the package lets neither the embedding nor lm_head train,
                            the gradient of lm_head is told all the same

Run it in the environment that the head of ``make_drafters.py`` describes:

    /tmp/speculators/bin/python tests/golden/make_eagle3_training.py
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager, resolve_loss_config
from speculators.models.eagle3 import core
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HERE = Path(__file__).resolve().parent
STEPS, HIDDEN, VOCAB = 3, 64, 160
FITTING = 25  # updates before anything is recorded, so that the head is right here and there
MAX_NPZ_KB = 300


@dataclass(frozen=True)
class Case:
    """One head and how it is trained.

    Attributes:
        name: directory below ``oracle_eagle3/``
        source: directory below ``oracle/`` that the row and the target's head come from
        seed: of the head
        decay: of the steps' losses
        decoder: fields of the decoder's config, beside the common ones
        flags: norm options of the head, in the package's spelling
        reduced: whether it has the draft vocabulary of the source's head, or all tokens
    """

    name: str
    source: str
    seed: int
    decay: float
    decoder: LlamaConfig
    flags: dict[str, bool] = field(default_factory=dict)
    reduced: bool = False


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attn_implementation": "sdpa",  # the only one with padding and a backward pass on CPU
}

CASES = (
    Case(
        name="llama",
        source="llama_reduced",
        seed=1,
        decay=0.8,
        decoder=LlamaConfig(
            num_hidden_layers=1,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            **COMMON,
        ),
        flags={"norm_before_residual": True},
        reduced=True,
    ),
    Case(
        name="qwen3",
        source="qwen3_sliding_fcnorm_fullvocab",
        seed=2,
        decay=1.0,
        decoder=Qwen3Config(
            num_hidden_layers=2,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            **COMMON,
        ),
        flags={"norm_before_residual": False, "fc_norm": True, "norm_output": True},
    ),
)


def main() -> None:
    """Write all golden files and print what was written."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for case in CASES:
        model = build_model(case)
        fit(case, model)
        arrays = record(case, model)
        directory = HERE / "oracle_eagle3" / case.name
        save_checkpoint(model, directory)
        np.savez_compressed(directory / "golden.npz", **arrays)
        kilobytes = (directory / "golden.npz").stat().st_size / 1000
        assert kilobytes < MAX_NPZ_KB
        print(f"{case.name}: {kilobytes:.0f} KB, loss {arrays['loss']}, {arrays['full_acc_sum']}")


def build_model(case: Case) -> core.Eagle3DraftModel:
    """Build the head with all parameters drawn from its seed, and the target's head beside it."""
    source = load_file(HERE / "oracle" / case.source / "draft" / "model.safetensors")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=case.decoder,
        draft_vocab_size=len(source["d2t"]) if case.reduced else VOCAB,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **case.flags,
    )
    model = core.Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(case.seed)
    with np.load(HERE / "oracle" / case.source / "target_head.npz") as target, torch.no_grad():
        norm, lm_head = torch.tensor(target["norm"]), torch.tensor(target["lm_head"])
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name.split(".")[-2] or name.startswith("fc_norm.")
            drawn = 1 + 0.3 * noise if is_norm else 0.15 * noise
            parameter.copy_(drawn.bfloat16())
        if case.reduced:
            model.load_vocab_mappings(source["t2d"].bool(), source["d2t"])
            lm_head = lm_head[source["t2d"].bool()]
        model.verifier_norm.weight.copy_(norm)
        model.verifier_lm_head.weight.copy_(lm_head)
        # As the package does it, but with some noise, so that it is not just the target's.
        model.lm_head.weight.copy_((lm_head + 0.1 * model.lm_head.weight).bfloat16())
    model.lm_head.weight.requires_grad_(True)
    return model


def packed_row(case: Case) -> dict[str, torch.Tensor]:
    """The package's batch of one packed row."""
    with np.load(HERE / "oracle" / case.source / "pack.npz") as pack:
        return {key[3:]: torch.tensor(pack[key])[None] for key in pack.files if key[:3] == "in."}


def fit(case: Case, model: core.Eagle3DraftModel) -> None:
    """Train the head a little on the row, and round its weights to bfloat16 numbers again."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(FITTING):
        optimizer.zero_grad()
        forward(case, model)[0].backward()
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())


def forward(
    case: Case, model: core.Eagle3DraftModel
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The package's training pass: the loss and the metrics."""
    _, loss, metrics = model(
        **packed_row(case),
        ttt_steps=STEPS,
        ttt_step_loss_decay=case.decay,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return loss, metrics


def record(case: Case, model: core.Eagle3DraftModel) -> dict[str, np.ndarray]:
    """Run the training pass forwards and backwards."""
    length = packed_row(case)["input_ids"].shape[1]
    elements = np.zeros((STEPS, length), np.float32)
    compute_metrics = core.compute_metrics

    def save_elements(
        logits: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        step = args[2]
        each = eager.kl_div_loss(logits[:, : length - step], targets[:, step:])
        elements[step, : length - step] = each[0].detach().numpy()
        return compute_metrics(logits, targets, *args, **kwargs)

    with mock.patch.object(core, "compute_metrics", save_elements):
        loss, metrics = forward(case, model)
    loss.backward()
    slopes = {
        f"grad.{name}": parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }

    def by_step(name: str) -> np.ndarray:
        return np.array([metrics[name.format(step)].item() for step in range(STEPS)], np.float32)

    return slopes | {
        "ttt_step_loss_decay": np.float32(case.decay),
        "elem": elements,
        "step_loss": by_step("loss_{}_sum"),
        "loss": loss.detach().numpy(),
        "full_acc_sum": by_step("full_acc_{}_sum"),
        "full_acc_total": by_step("full_acc_{}_total"),
    }


def save_checkpoint(model: core.Eagle3DraftModel, directory: Path) -> None:
    """Save ``model`` as a directory in the speculators layout, replacing an older one."""
    shutil.rmtree(directory, ignore_errors=True)
    model.bfloat16().save_pretrained(directory)
    for file in directory.iterdir():
        if file.name in ("config.json", "model.safetensors"):
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        else:
            file.unlink()  # a copy of the package's config.py


if __name__ == "__main__":
    main()
