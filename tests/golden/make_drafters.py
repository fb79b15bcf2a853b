"""Write the golden values of draft heads, computed by the published speculators package.

Everything is computed in float32, and every random number has a seed, so a second run writes the
same bytes again. Each ``tests/golden/drafters/<name>/`` is a tiny random head in the speculators
layout, made for a target in ``tests/golden/targets/``, with a ``golden.npz`` beside the weights.
Tokens and features are those of sequence 0 in the target's ``golden.npz``.

P-EAGLE heads: one draft step, a chain of K depths after a context of C rows, n = C + K - 1 rows:

    ids [n]                 token id of each row: the target's token j + 1 in row j, then mask ids
    fc_in [n, F]            features before any norm: the target's at token j, then mask_hidden
    positions [n]           rotary position
    mask [n, n]             whether a row (first axis) attends to a row (second axis)
    fc_out [n, H]           output of fc
    layer<i>_out [n, H]     residual stream after layer i
    logits [n, D]           logits over the draft vocabulary
    read_rows [K]           the rows that draft: the last of the context and the masks
    draft_target_ids [K]    their best ids, as ids of the target

EAGLE-3 heads (``eagle3_*``): K drafts, one after another, after a context of n rows:

    tokens [n]              token id of each row: the target's token p + 1 in row p
    features [n, F]         the target's features at token p, before any norm
    positions [n]           rotary position of row p, which is p
    prefill_logits [n, D]   logits over the draft vocabulary of these rows, run causally
    step_logits [K, D]      logits that give draft k; those of draft 0 are the last of the prefill
    step_states [K, H]      the state of the same row, as it is fed back to give draft k + 1
    draft_target_ids [K]    the best ids of step_logits, as ids of the target

The prefill's last row, n - 1, is step 0: its logits give draft 0. Step k > 0 is one row of its own
at position n - 1 + k, with draft k - 1 as its token (an id of the target: d2t added) and
``step_states[k - 1]`` in place of what fc returns, so no norm before fc and no fc touch it again.
It attends to the n rows of the prefill, to the rows of steps 1 to k - 1, and to itself. K drafts so
take K - 1 rows after the prefill, and nothing has read ``step_states[K - 1]``.

A row's state x is the whole residual stream after the last layer, attention and MLP added, before
the final norm; its logits are always lm_head(norm(x)). Fed back is x itself, or with
``norm_output`` (EAGLE-3.1) norm(x), the very input of lm_head. In the row that takes it, it is the
hidden half of layer 0: hidden_norm applies to it, and the residual starts from it, or with
``norm_before_residual`` from hidden_norm of it. vLLM orders it alike: the blocks of its
``llama_eagle3.py`` keep the MLP's output and the residual apart, the final norm adds them up and
returns both norm(x) and x (``hidden_prenorm``), the first for the logits, the second as the state
to feed back; since its PR 42764 that is the first again where ``norm_output`` is set.

The package has no inference, but steps like these are inside its training pass: see
``draft_chain``. That pass counts positions from 1 by default, vLLM from 0, as here; rotary
embeddings are relative, so this changes no value.

The package has no head narrower or wider than its target, though its config has a key for that:
``target_hidden_size`` is stored but never read, fc, mask_hidden and the norms before fc follow the
head's own width. So ``wide`` is the package's model with fc and mask_hidden replaced by ones of the
target's width; its forward pass runs unchanged, but ``from_pretrained`` cannot load the directory.

A forward pass in NumPy, written apart from the package, takes the same rows and the saved
directory. It agrees with all values, and shows that leaving out any option changes the logits. For
an EAGLE-3 head it runs once per draft, over the prefill's rows and those of all steps so far.

Make the environment once and run (paths are examples); torchvision and torchaudio must go, because
their builds for CUDA keep transformers from being imported beside a torch for the CPU:

    python3.11 -m venv /tmp/speculators
    /tmp/speculators/bin/pip install torch==2.13.0
    /tmp/speculators/bin/pip install speculators==0.9.0 torch==2.13.0 transformers==5.19.0
    /tmp/speculators/bin/pip uninstall -y torchvision torchaudio
    /tmp/speculators/bin/python tests/golden/make_drafters.py
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from loguru import logger
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

GOLDEN_DIR = Path(__file__).resolve().parent
REPOSITORY = GOLDEN_DIR.parents[1]

VOCAB, TARGET_HIDDEN, MASK_ID = 96, 32, 95
DEPTHS, CONTEXT = 5, 24
ROWS = CONTEXT + DEPTHS - 1
MAX_DIRECTORY_KB = 150

# Between the package and NumPy in float64.
TOLERANCE = 1e-4

# A head is only accepted within these bounds; another seed is the way out.
MIN_GAP = 0.1
MIN_LOGIT_STD = 1.0
MIN_DISTINCT_DRAFTS = DEPTHS
MIN_OPTION_CHANGE = 0.1

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class TinyDrafter:
    """One tiny random head.

    Attributes:
        name: directory below ``drafters/``
        target: directory below ``targets/``
        seed: of everything random
        boundaries: where the head reads the target's residual stream
        decoder: fields of the decoder's config, beside the common ones
        draft_vocab: size of the draft vocabulary
        flags: norm options of the head, in the package's spelling
        qwen3: whether the decoder is Qwen3's and not Llama's
        eagle3: whether it is an EAGLE-3 head, which drafts one token per pass, and not P-EAGLE's
        options: what must change the logits when left out, see ``leave_out``
    """

    name: str
    target: str
    seed: int
    boundaries: tuple[int, ...]
    decoder: dict[str, Any]
    draft_vocab: int = VOCAB
    flags: dict[str, bool] = field(default_factory=dict)
    qwen3: bool = False
    eagle3: bool = False
    options: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Where it is written."""
        return GOLDEN_DIR / "drafters" / self.name

    @property
    def features(self) -> int:
        """Width of the features."""
        return len(self.boundaries) * TARGET_HIDDEN

    @property
    def wide(self) -> bool:
        """Whether its width is not its target's, which the package does not have."""
        return self.decoder.get("hidden_size", TARGET_HIDDEN) != TARGET_HIDDEN


@dataclass(frozen=True)
class Row:
    """One line of the final table."""

    name: str
    kilobytes: float
    gap: float
    error: float
    drafts: list[int]


COMMON_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": TARGET_HIDDEN,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}

TINY_DRAFTERS = (
    TinyDrafter(
        name="norm_before_fc",
        target="llama_gqa",
        seed=72,
        boundaries=(1, 2, 3),
        draft_vocab=48,
        flags={"norm_before_fc": True, "norm_before_residual": True},
        options=("norm_before_fc", "norm_before_residual"),
        decoder={
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    TinyDrafter(
        name="two_aux",
        target="llama_biases",
        seed=115,
        boundaries=(1, 3),
        options=tuple(f"{part}_proj.bias" for part in ("q", "k", "v", "o", "gate", "up", "down")),
        decoder={
            "num_hidden_layers": 1,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    # The last boundary is the one after the target's last layer. Of the four rotary frequencies
    # llama3 scaling keeps the first, blends the second, and divides the others by the factor.
    TinyDrafter(
        name="wide",
        target="llama_gqa",
        seed=44,
        boundaries=(2, 3, 4),
        draft_vocab=48,
        options=("rope_scaling",),
        decoder={
            "num_hidden_layers": 2,
            "hidden_size": 48,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 20.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    TinyDrafter(
        name="qwen3_fc_norm",
        target="qwen3",
        seed=106,
        boundaries=(1, 2, 4),
        flags={"fc_norm": True},
        qwen3=True,
        options=("fc_norm", "q_norm.weight", "k_norm.weight"),
        decoder={
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    # norm_before_residual is what the package's training and vLLM take unless told otherwise.
    TinyDrafter(
        name="eagle3_llama",
        target="llama_gqa",
        seed=81,
        boundaries=(1, 2, 3),
        draft_vocab=48,
        flags={"norm_before_residual": True},
        eagle3=True,
        options=("norm_before_residual", "norm_output"),
        decoder={
            "num_hidden_layers": 1,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    TinyDrafter(
        name="eagle3_qwen3",
        target="qwen3",
        seed=12,
        boundaries=(1, 2, 4),
        flags={"fc_norm": True, "norm_output": True},
        qwen3=True,
        eagle3=True,
        options=(
            "fc_norm",
            "norm_before_residual",
            "norm_output",
            "q_norm.weight",
            "k_norm.weight",
        ),
        decoder={
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
)


def main() -> None:
    """Write all golden files and print what was written."""
    disable_progress_bar()
    logger.disable("speculators")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    # The package finds the target by the path in the config, which is relative.
    with torch.inference_mode(), contextlib.chdir(REPOSITORY):
        rows = [write_tiny_drafter(drafter) for drafter in TINY_DRAFTERS]
    print_table(rows)


def write_tiny_drafter(drafter: TinyDrafter) -> Row:
    """Write the checkpoint directory of a head and its ``golden.npz``."""
    ids, features = read_target(drafter)
    model = build_model(drafter)
    arrays = draft(model, ids, features)
    save_checkpoint(model, drafter.directory)
    check_reload(drafter, arrays, ids, features)
    error = check_against_numpy(drafter, arrays)

    logits = draft_logits(arrays, arrays)
    best = np.sort(logits)[:, -2:]
    gap = float((best[:, 1] - best[:, 0]).min())
    drafts = arrays["draft_target_ids"].tolist()
    assert gap > MIN_GAP, f"{drafter.name}: gap {gap:.1e}, choose another seed"
    assert len(set(drafts)) >= MIN_DISTINCT_DRAFTS, f"{drafter.name}: drafts {drafts}"
    every = arrays["prefill_logits"] if drafter.eagle3 else arrays["logits"]
    assert every.std() > MIN_LOGIT_STD, f"{drafter.name}: logits are nearly uniform"

    np.savez_compressed(drafter.directory / "golden.npz", **arrays)
    kilobytes = sum(file.stat().st_size for file in drafter.directory.iterdir()) / 1000
    assert kilobytes < MAX_DIRECTORY_KB, f"{drafter.name} takes {kilobytes:.0f} KB"
    return Row(f"drafters/{drafter.name}/", kilobytes, gap, error, drafts)


def read_target(drafter: TinyDrafter) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and features of the context, token ids one ahead of the features."""
    with np.load(GOLDEN_DIR / "targets" / drafter.target / "golden.npz") as golden:
        ids = golden["ids"][0, 1 : CONTEXT + 1]
        states = [golden[f"boundary_{b}"][:CONTEXT] for b in drafter.boundaries]
    return ids, np.concatenate(states, axis=1)


def draft_logits(arrays: Arrays, golden: Arrays) -> np.ndarray:
    """The logits of the K drafts, where ``golden`` says which rows draft."""
    if "step_logits" in arrays:
        return arrays["step_logits"]
    return arrays["logits"][golden["read_rows"]]


# The package's side


def build_model(drafter: TinyDrafter) -> Eagle3DraftModel:
    """Build the head with all parameters drawn anew from its seed."""
    config_class = Qwen3Config if drafter.qwen3 else LlamaConfig
    decoder = config_class(**COMMON_DECODER | drafter.decoder)
    model_class, head_class, algorithm = (
        (Eagle3DraftModel, Eagle3SpeculatorConfig, "eagle3")
        if drafter.eagle3
        else (core.PEagleDraftModel, PEagleSpeculatorConfig, "peagle")
    )
    config = head_class(
        transformer_layer_config=decoder,
        draft_vocab_size=drafter.draft_vocab,
        target_hidden_size=TARGET_HIDDEN if drafter.wide else None,
        eagle_aux_hidden_state_layer_ids=list(drafter.boundaries),
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(f"tests/golden/targets/{drafter.target}"),
        ),
        **({} if drafter.eagle3 else {"mask_token_id": MASK_ID}),
        **drafter.flags,
    )
    model = model_class(config).eval()
    if drafter.wide:
        model.fc = torch.nn.Linear(drafter.features, decoder.hidden_size, bias=False)
        model.mask_hidden = torch.nn.Parameter(torch.empty(1, 1, drafter.features))

    generator = torch.Generator().manual_seed(drafter.seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter.shape, generator))
    if drafter.draft_vocab < VOCAB:
        chosen = torch.randperm(VOCAB, generator=generator)[: drafter.draft_vocab].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(drafter.draft_vocab))
    return model


def draw_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw one parameter, wide enough for uneven attention and uneven logits."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5 + 0.3 * noise
    if name.endswith("norm.weight") or name.startswith("fc_norm."):
        return 1.0 + 0.3 * noise
    if name == "mask_hidden":
        return noise
    if name.endswith("bias"):
        return 0.5 * noise
    return 0.25 * noise


def draft(model: Eagle3DraftModel, ids: np.ndarray, features: np.ndarray) -> Arrays:
    """The golden values of a head of either kind."""
    if isinstance(model, core.PEagleDraftModel):
        return draft_step(model, ids, features)
    return draft_chain(model, ids, features)


def draft_step(model: core.PEagleDraftModel, ids: np.ndarray, features: np.ndarray) -> Arrays:
    """One draft step through the package's training pass, which has no pass for inference.

    The pass draws its rows at random. In place of that draw it gets the rows of one draft step:
    the context as depth 0, and the deeper depths of the chain that starts at the last row.
    """
    deeper = torch.arange(1, DEPTHS)
    anchor = torch.cat([torch.arange(CONTEXT), torch.full_like(deeper, CONTEXT - 1)])
    depth = torch.cat([torch.zeros(CONTEXT, dtype=torch.long), deeper])

    arrays: Arrays = {}
    with (
        record(model, arrays),
        mock.patch.object(core, "generate_cod_sample_indices", return_value=(anchor, depth)),
    ):
        model(
            hidden_states=padded(features),
            input_ids=padded(ids).long(),
            document_ids=torch.zeros(1, ROWS, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, ROWS, model.hidden_size),
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=DEPTHS,
        )

    mask_features = np.broadcast_to(model.mask_hidden[0].numpy(), (len(deeper), features.shape[1]))
    read_rows = np.arange(CONTEXT - 1, ROWS, dtype=np.int32)
    drafts = to_target_ids(model, arrays["logits"][read_rows].argmax(-1))
    arrays["fc_in"] = np.concatenate([features, mask_features])
    arrays["read_rows"] = read_rows
    arrays["draft_target_ids"] = drafts.astype(np.int32)

    assert np.array_equal(arrays["ids"], [*ids, *[MASK_ID] * len(deeper)])
    assert np.array_equal(arrays["positions"], np.arange(ROWS))
    assert np.array_equal(arrays["mask"], np.tri(ROWS, dtype=bool))
    return arrays


def draft_chain(model: Eagle3DraftModel, ids: np.ndarray, features: np.ndarray) -> Arrays:
    """K drafts through the package's training pass (training-time test), which is left as it is.

    That pass takes all its rows through one step after another. In step t > 0 the hidden input of
    row p is the state that step t - 1 left in row p, its token is the one given for row p + t, its
    position p + t, and it sees rows 0 to p of step 0 and row p of the later steps. For the last
    row of the context this is drafting, once its drafts are given as the tokens of the K - 1 rows
    after it, whose features nothing reads. Pass k tells draft k, given those before it, and the
    last pass has given all values. One step more than K shows the state that the K-th leaves.
    """
    last = CONTEXT - 1
    drafts = np.zeros(0, np.int32)
    for k in range(DEPTHS):
        steps: list[Arrays] = []
        with record_steps(model, steps):
            best = model(
                hidden_states=padded(features),
                input_ids=padded(np.concatenate([ids, drafts])).long(),
                document_ids=torch.zeros(1, ROWS, dtype=torch.long),
                position_ids=torch.arange(ROWS)[None],
                ttt_steps=DEPTHS + 1,
            )
        drafts = np.append(drafts, to_target_ids(model, best[k][0, last].numpy()))

    prefill, *_ = steps
    assert np.array_equal(prefill["ids"][:CONTEXT], ids)
    assert np.array_equal(prefill["positions"], np.arange(ROWS))
    assert np.array_equal(prefill["mask"], np.tri(ROWS, dtype=bool))
    for k in range(1, DEPTHS):
        rows = [*range(CONTEXT), *(ROWS * step + last for step in range(1, k + 1))]
        assert np.array_equal(np.flatnonzero(steps[k]["mask"][last]), rows)
        assert steps[k]["ids"][last] == drafts[k - 1]
        assert steps[k]["positions"][last] == last + k
    return {
        "tokens": ids,
        "features": features,
        "positions": prefill["positions"][:CONTEXT],
        "prefill_logits": prefill["logits"][:CONTEXT],
        "step_logits": np.stack([step["logits"][last] for step in steps[:DEPTHS]]),
        "step_states": np.stack([step["hidden"][last] for step in steps[1:]]),
        "draft_target_ids": drafts.astype(np.int32),
    }


def to_target_ids(model: Eagle3DraftModel, drafts: np.ndarray) -> np.ndarray:
    """Ids of the target for ids of the draft vocabulary."""
    return drafts if model.d2t is None else drafts + model.d2t.numpy()[drafts]


def padded(rows: np.ndarray) -> torch.Tensor:
    """A batch of one, with zeros in the rows after those given, where nothing is read."""
    out = np.zeros((1, ROWS, *rows.shape[1:]), rows.dtype)
    out[0, : len(rows)] = rows
    return torch.from_numpy(out)


@contextlib.contextmanager
def record(model: core.PEagleDraftModel, into: Arrays) -> Iterator[None]:
    """Put what the head's modules see and return into arrays."""

    def save_inputs(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        into["positions"] = kwargs["position_ids"][0].numpy().astype(np.int32)
        into["mask"] = kwargs["attention_mask"][0, 0].numpy()

    def save_ids(_module: Any, args: tuple[torch.Tensor]) -> None:
        into["ids"] = args[0][0].numpy().astype(np.int32)

    def save_output(name: str) -> Any:
        return lambda _module, _args, output: into.update({name: output[0].numpy()})

    outputs = {"fc_out": model.fc, "logits": model.lm_head}
    outputs |= {f"layer{i}_out": layer for i, layer in enumerate(model.layers)}
    handles = [
        model.embed_tokens.register_forward_pre_hook(save_ids),
        model.layers[0].register_forward_pre_hook(save_inputs, with_kwargs=True),
        *(module.register_forward_hook(save_output(name)) for name, module in outputs.items()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def record_steps(model: Eagle3DraftModel, into: list[Arrays]) -> Iterator[None]:
    """Put what layer 0 takes, and the logits, into one dictionary per step."""

    def save_inputs(_module: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> None:
        into[-1]["hidden"] = args[0][0, :, model.hidden_size :].numpy()
        into[-1]["positions"] = kwargs["position_ids"][0].numpy().astype(np.int32)
        into[-1]["mask"] = kwargs["attention_mask"][0, 0].numpy()

    def save_ids(_module: Any, args: tuple[torch.Tensor]) -> None:
        into.append({"ids": args[0][0].numpy().astype(np.int32)})

    def save_logits(_module: Any, _args: Any, output: torch.Tensor) -> None:
        into[-1]["logits"] = output[0].numpy()

    handles = [
        model.embed_tokens.register_forward_pre_hook(save_ids),  # first in every step
        model.layers[0].register_forward_pre_hook(save_inputs, with_kwargs=True),
        model.lm_head.register_forward_hook(save_logits),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def save_checkpoint(model: Eagle3DraftModel, directory: Path) -> None:
    """Save ``model`` as a directory in the speculators layout, replacing an older one."""
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    for file in directory.iterdir():
        if file.name in ("config.json", "model.safetensors"):
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        else:
            file.unlink()  # a copy of the package's config.py


# Checks


def check_reload(
    drafter: TinyDrafter, arrays: Arrays, ids: np.ndarray, features: np.ndarray
) -> None:
    """Check that the package loads the directory to the same head, where it can load it."""
    if drafter.wide:
        return
    model_class = Eagle3DraftModel if drafter.eagle3 else core.PEagleDraftModel
    config = model_class.config_class.from_pretrained(drafter.directory)
    config.transformer_layer_config._attn_implementation = COMMON_DECODER["attn_implementation"]
    model = model_class.from_pretrained(drafter.directory, config=config).eval()
    for name, value in draft(model, ids, features).items():
        assert np.array_equal(value, arrays[name]), f"{drafter.name}: loading changed {name}"


def check_against_numpy(drafter: TinyDrafter, arrays: Arrays) -> float:
    """Compare with NumPy, with and without each option, and return the largest difference."""
    config = json.loads((drafter.directory / "config.json").read_text())
    tensors = load_file(drafter.directory / "model.safetensors")
    numpy_draft = numpy_chain if drafter.eagle3 else numpy_forward
    expected = numpy_draft(config, tensors, arrays)
    error = max(float(np.abs(expected[name] - arrays[name]).max()) for name in expected)
    assert error < TOLERANCE, f"{drafter.name}: NumPy differs by {error:.1e}"
    for option in drafter.options:
        without = numpy_draft(*leave_out(option, config, tensors), arrays)
        change = np.abs(draft_logits(without, arrays) - draft_logits(arrays, arrays)).mean()
        assert change > MIN_OPTION_CHANGE, f"{drafter.name}: {option} changes only {change:.1e}"
    return error


def leave_out(
    option: str, config: dict[str, Any], tensors: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """The same head without an option: a flag, rotary scaling, or tensors by their ending.

    A flag that is off is turned on.
    """
    config = copy.deepcopy(config)
    if option in config:
        config[option] = not config[option]
    elif option == "rope_scaling":
        config["transformer_layer_config"]["rope_parameters"]["rope_type"] = "default"
    else:
        tensors = {name: value for name, value in tensors.items() if not name.endswith(option)}
    return config, tensors


def numpy_chain(config: dict[str, Any], tensors: Arrays, golden: Arrays) -> Arrays:
    """Drafting of an EAGLE-3 head in float64, fed with the golden drafts and its own states."""
    ids, states = golden["tokens"], np.zeros((0, TARGET_HIDDEN))
    logits: list[np.ndarray] = []
    drafts: list[int] = []
    for k in range(DEPTHS):
        rows = CONTEXT + k
        out = numpy_forward(
            config,
            tensors,
            {
                "ids": np.concatenate([ids, golden["draft_target_ids"][:k]]),
                "fc_in": golden["features"],
                "fed_back": states,
                "positions": np.arange(rows),
                "mask": np.tri(rows, dtype=bool),
                "read_rows": np.array([rows - 1]),
            },
        )
        logits.append(out["logits"][-1])
        states = np.concatenate([states, out["state"][-1:]])
        drafts.extend(out["draft_target_ids"])
    return {
        "prefill_logits": out["logits"][:CONTEXT],
        "step_logits": np.stack(logits),
        "step_states": states,
        "draft_target_ids": np.array(drafts),
    }


def numpy_forward(config: dict[str, Any], tensors: Arrays, step: Arrays) -> Arrays:
    """The head's forward pass in float64; states fed back make further rows of an EAGLE-3 head."""
    decoder = config["transformer_layer_config"]
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    out: Arrays = {}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + decoder["rms_norm_eps"])
        return x / scale * weights[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        split = x.reshape(len(x), -1, decoder["head_dim"])
        return norm(split, name) if f"{name}.weight" in weights else split

    def attention(x: np.ndarray, name: str) -> np.ndarray:
        query = rotate(heads(linear(x, f"{name}.q_proj"), f"{name}.q_norm"), angles)
        key = rotate(heads(linear(x, f"{name}.k_proj"), f"{name}.k_norm"), angles)
        value = heads(linear(x, f"{name}.v_proj"), "")
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat(groups, axis=1), value.repeat(groups, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(decoder["head_dim"])
        scores = np.where(step["mask"], scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, value).reshape(len(x), -1)
        return linear(mixed, f"{name}.o_proj")

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        gate = linear(x, f"{name}.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(x, f"{name}.up_proj")
        return linear(gated, f"{name}.down_proj")

    angles = step["positions"][:, None, None] * frequencies(decoder)
    features = step["fc_in"].astype(np.float64)
    if config["norm_before_fc"]:
        features = norm(features, "input_norm")
    if config["fc_norm"]:
        chunks = np.split(features, len(config["eagle_aux_hidden_state_layer_ids"]), axis=1)
        features = np.concatenate([norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], axis=1)
    h = out["fc_out"] = linear(features, "fc")
    if "fed_back" in step:
        h = np.concatenate([h, step["fed_back"]])

    for i in range(decoder["num_hidden_layers"]):
        name = f"layers.{i}"
        if i == 0:
            embedded = norm(weights["embed_tokens.weight"][step["ids"]], f"{name}.input_layernorm")
            normed = norm(h, f"{name}.hidden_norm")
            x = np.concatenate([embedded, normed], axis=1)
            h = normed if config["norm_before_residual"] else h
        else:
            x = norm(h, f"{name}.input_layernorm")
        h = h + attention(x, f"{name}.self_attn")
        h = h + mlp(norm(h, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        out[f"layer{i}_out"] = h

    normed = norm(h, "norm")
    if "fed_back" in step:
        out["state"] = normed if config["norm_output"] else h
    out["logits"] = linear(normed, "lm_head")
    best = out["logits"][step["read_rows"]].argmax(-1)
    out["draft_target_ids"] = best + tensors["d2t"][best] if "d2t" in tensors else best
    return out


def frequencies(decoder: dict[str, Any]) -> np.ndarray:
    """Rotary frequencies, plain or with llama3 scaling."""
    rope, size = decoder["rope_parameters"], decoder["head_dim"]
    plain = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    if rope["rope_type"] == "default":
        return plain
    assert rope["rope_type"] == "llama3"
    turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rope["factor"]


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotary embedding of the two halves of each head."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def print_table(rows: list[Row]) -> None:
    """Print what was written."""
    print(f"{'written':<26}{'KB':>8}{'min gap':>10}{'NumPy':>10}  drafts")
    for row in rows:
        numbers = f"{row.kilobytes:>8.1f}{row.gap:>10.1e}{row.error:>10.1e}"
        print(f"{row.name:<26}{numbers}  {row.drafts}")


if __name__ == "__main__":
    main()
