"""How published checkpoints of targets name, shape and order their tensors.

    hub       as on the Hugging Face Hub. Qwen3-MoE has three tensors for every expert, GPT-OSS
              one for all experts: MXFP4 codes and scales, or plain weights with the input axis
              first. GPT-OSS alternates the rows of gate and up.
    fused     Qwen3-MoE as transformers 5 may save it again: one tensor for all experts, the rows
              of gate before those of up.
    original  GPT-OSS as OpenAI publishes it, in the folder `original` of the same repositories.

The other families have the Hub's layout alone.
"""

from collections.abc import Iterator
from typing import Literal

from peagle_jax.config import MoEConfig, TargetConfig
from peagle_jax.convert.plan import Slot, attention_slots, mlp_slots
from peagle_jax.models.quantized import BLOCK, BLOCK_BYTES

Layout = Literal["hub", "fused", "original"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def target_slots(config: TargetConfig, layout: Layout = "hub") -> dict[str, Slot]:
    """Returns every tensor of a target and where it goes in the native arrays.

    The way back: `slot.view(array).reshape(slot.shape)` is the tensor.

    Args:
      config: the architecture.
      layout: "hub" for every family; "fused" for Qwen3-MoE alone, "original" for GPT-OSS alone.
    """
    if layout == "original":
        return dict(_original_slots(config))
    table = (config.vocab_size, config.hidden_size)
    slots = {
        EMBEDDING: Slot("embedding", table),
        "model.norm.weight": Slot("final_norm.weight", (config.hidden_size,)),
    }
    for i in range(config.num_layers):
        source, native = f"model.layers.{i}", f"layers.{i}"
        slots |= attention_slots(source, native, config, config.hidden_size)
        if config.moe is None or not config.moe.layers[i]:
            slots |= mlp_slots(source, native, config)
        elif config.family == "gpt_oss":
            slots |= _gpt_oss_slots(f"{source}.mlp", f"{native}.mlp", config, config.moe)
        else:
            experts = _fused_experts if layout == "fused" else _single_experts
            router = (config.moe.num_experts, config.hidden_size)
            slots[f"{source}.mlp.gate.weight"] = Slot(f"{native}.mlp.router", router)
            slots |= experts(f"{source}.mlp.experts", f"{native}.mlp", config, config.moe)
    if not config.tie_word_embeddings:
        slots[HEAD] = Slot("lm_head", table)
    return slots


def _single_experts(
    source: str, native: str, config: TargetConfig, moe: MoEConfig
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of Qwen3-MoE's experts, each with tensors of its own."""
    hidden, inner = config.hidden_size, moe.intermediate_size
    for e in range(moe.num_experts):
        for name, start in (("gate", 0), ("up", inner)):
            slot = Slot(f"{native}.gate_up", (inner, hidden), start, expert=e)
            yield f"{source}.{e}.{name}_proj.weight", slot
        yield f"{source}.{e}.down_proj.weight", Slot(f"{native}.down", (hidden, inner), expert=e)


def _fused_experts(
    source: str, native: str, config: TargetConfig, moe: MoEConfig
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of Qwen3-MoE's experts where one tensor stacks them all."""
    experts, hidden, inner = moe.num_experts, config.hidden_size, moe.intermediate_size
    yield f"{source}.gate_up_proj", Slot(f"{native}.gate_up", (experts, 2 * inner, hidden))
    yield f"{source}.down_proj", Slot(f"{native}.down", (experts, hidden, inner))


def _gpt_oss_slots(
    source: str, native: str, config: TargetConfig, moe: MoEConfig
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of GPT-OSS's router and experts."""
    count, hidden = moe.num_experts, config.hidden_size
    yield f"{source}.router.weight", Slot(f"{native}.router", (count, hidden))
    yield f"{source}.router.bias", Slot(f"{native}.router_bias", (count,))
    for part, rows, columns in _expert_products(config, moe):
        weight, to, alternate = f"{source}.experts.{part}_proj", f"{native}.{part}", part != "down"
        if moe.weights == "mxfp4":
            yield from _mxfp4_slots(
                f"{weight}_blocks", f"{weight}_scales", to, (rows, columns), moe
            )
        else:
            yield weight, Slot(to, (count, columns, rows), interleaved=alternate, input_first=True)
        yield f"{weight}_bias", Slot(f"{to}_bias", (count, rows), interleaved=alternate)


def _original_slots(config: TargetConfig) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of GPT-OSS in OpenAI's naming."""
    moe = config.moe
    assert moe is not None
    count, hidden = moe.num_experts, config.hidden_size
    table = (config.vocab_size, hidden)
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    fused = queries + 2 * keys
    yield "embedding.weight", Slot("embedding", table)
    yield "norm.scale", Slot("final_norm.weight", (hidden,))
    yield "unembedding.weight", Slot("lm_head", table)
    for i in range(config.num_layers):
        source, native = f"block.{i}.attn", f"layers.{i}.attention"
        yield f"{source}.norm.scale", Slot(f"{native}_norm.weight", (hidden,))
        yield f"{source}.qkv.weight", Slot(f"{native}.qkv", (fused, hidden))
        yield f"{source}.qkv.bias", Slot(f"{native}.qkv_bias", (fused,))
        yield f"{source}.out.weight", Slot(f"{native}.out", (hidden, queries))
        yield f"{source}.out.bias", Slot(f"{native}.out_bias", (hidden,))
        yield f"{source}.sinks", Slot(f"{native}.sinks", (config.num_heads,))
        source, native = f"block.{i}.mlp", f"layers.{i}.mlp"
        yield f"{source}.norm.scale", Slot(f"{native}_norm.weight", (hidden,))
        yield f"{source}.gate.weight", Slot(f"{native}.router", (count, hidden))
        yield f"{source}.gate.bias", Slot(f"{native}.router_bias", (count,))
        for number, (part, rows, columns) in enumerate(_expert_products(config, moe), 1):
            name, to = f"{source}.mlp{number}", f"{native}.{part}"
            blocks, scales = (f"{name}_weight.{kind}" for kind in ("blocks", "scales"))
            yield from _mxfp4_slots(blocks, scales, to, (rows, columns), moe)
            bias = Slot(f"{to}_bias", (count, rows), interleaved=part != "down")
            yield f"{name}_bias", bias


def _expert_products(config: TargetConfig, moe: MoEConfig) -> tuple[tuple[str, int, int], ...]:
    """Returns name, outputs and inputs of the two products of an expert."""
    hidden, inner = config.hidden_size, moe.intermediate_size
    return ("gate_up", 2 * inner, hidden), ("down", hidden, inner)


def _mxfp4_slots(
    blocks: str, scales: str, native: str, weight: tuple[int, int], moe: MoEConfig
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of all experts' packed weights `[out, in]`, which stay as they are."""
    rows, columns = weight
    shape = (moe.num_experts, rows, columns // BLOCK)
    alternate = native.endswith("gate_up")
    yield blocks, Slot(f"{native}.blocks", (*shape, BLOCK_BYTES), interleaved=alternate)
    yield scales, Slot(f"{native}.scales", shape, interleaved=alternate)
