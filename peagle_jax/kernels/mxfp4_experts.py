"""Products of a few rows with MXFP4 weights of the experts in use, unpacked in registers.

Rows come in blocks of one expert each. A warpgroup makes 64 output features of one block: the
expert's packed weights stream through a ring of slots in shared memory by TMA, become bfloat16 in
registers, just where `mma.sync` wants its left operand, and meet the rows as the right one. The
rows of a block are the product's columns, so that a block of 8 wastes nothing, and no warp unpacks
a weight that another has unpacked.

Layout. A 32-bit word holds 8 codes of consecutive inputs. A register of the left operand holds two
bfloat16 numbers, and code j of a word's low half and code j of its high half are unpacked together
into one, by 32-bit shifts and masks: so four operands come from a word, for j = 0 to 3, which meet
the inputs j, j + 4, j + 8 and so on. The rows are split into these four planes beforehand.

Tiling. Grid (out / 64, blocks), blocks innermost: two blocks of one expert run at the same time and
the second finds its weights in the L2 cache. A step takes up to 320 inputs (160 bytes of a row of
weights); 4 slots of 10 KiB weights and 5 KiB rows (for 8 of them) leave room for three warpgroups
per multiprocessor. Scales, which TMA cannot copy (their rows have 90 bytes in GPT-OSS), are read
into registers a step ahead.

Bound. Bytes: `17/32 in out` for each expert in use; the rows, `2 in N blocks` bytes, are read by
every tile, from L2, and `4 out N blocks` are written. FLOPs: `2 in out N` for each block. With 8
rows these are 30 FLOPs per byte, where an H200 could make 200: memory bounds it, as long as the
unpacking keeps up. That is 2.5 instructions per weight (two shifts and two masks for a pair of
codes, a product with the scale), 3.1 with all else. At 4.8 TB/s a multiprocessor of an H200 gets
37 weights per cycle, and issues for 128 lanes, 64 of them on integers: the integer units are busy
for 1.25 times as long as the memory. Both are reckoned from the compiled code, not measured.

Float32 rows are three bfloat16 rows each, which their sum is exactly; so products are exact and
sums are float32, as in XLA's float32 products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from peagle_jax.kernels.mosaic import Interpret, filled, interpreter, mma, swizzled

TILE = 64  # output features of a warpgroup
WORDS = 8  # 32-bit words, 64 weights, of one product: 16 inputs of each plane
MAX_STEP_WORDS = 40
MAX_STAGES, RING_BYTES = 4, 96 << 10
# The codes' exponents are 126 too low, those of the results 30: so weights are normal numbers
# for scales from 2**-95 to 2**31.
LIFT = 126
LEFT_OUT = 30
HIGHEST_SCALE = 254 - (LIFT - LEFT_OUT)

_WIDE, _HALF, _SUM = map(jnp.dtype, (jnp.uint32, jnp.bfloat16, jnp.float32))
LEFT, RIGHT = plgpu.Layout.MMA_LHS(_HALF), plgpu.Layout.MMA_RHS(_HALF)
SUMS = plgpu.Layout.MMA_ACC(_HALF)
WORD = plgpu.Layout.MMA_LHS(_WIDE)  # a lane's words are its pairs of numbers in LEFT
ROW = WORD.reduce(1)

Ref = Any  # of Pallas, whose types are private


def mxfp4_supports(features: int, inputs: int) -> bool:
    """Returns whether the kernel takes weights `[..., features, inputs]`."""
    return features % TILE == 0 and inputs % (8 * WORDS) == 0


@functools.partial(jax.jit, static_argnames="interpret")
def mxfp4_product(
    rows: jax.Array,
    experts: jax.Array,
    used: jax.Array,
    blocks: jax.Array,
    scales: jax.Array,
    interpret: Interpret = False,
) -> jax.Array:
    """Returns the product of every block of rows with its expert's weights.

    Args:
      rows: `[B, N, in]`, bfloat16 or float32, N a multiple of 8; `in` a multiple of 64.
      experts: `[B]` int32, of each block; equal ones beside each other read memory once.
      used: `[]` int32; blocks from this one on are not computed and their result is undefined.
      blocks: `[E, out, in / 32, 16]` uint8, codes of E2M1, the even input's in the low bits; `out`
        is a multiple of 64.
      scales: `[E, out, in / 32]` uint8, exponents of E8M0 biased by 127, from 32 to 158.
      interpret: run on a CPU.

    Returns:
      `[B, N, out]` float32.
    """
    if rows.dtype == jnp.float32:
        parts = jnp.concatenate(_thirds(rows), axis=1)  # [B, 3 N, in]
        out = mxfp4_product(parts, experts, used, blocks, scales, interpret)
        return jnp.sum(out.reshape(out.shape[0], 3, -1, out.shape[2]), axis=1)
    count, size, inputs = rows.shape
    features = blocks.shape[1]
    if not mxfp4_supports(features, inputs) or size % 8:
        raise ValueError(f"no MXFP4 kernel for rows {rows.shape} and weights {blocks.shape}")
    words = lax.bitcast_convert_type(blocks.reshape(*blocks.shape[:2], -1, 4), jnp.uint32)
    planes = rows.reshape(count, size, inputs // 4, 4).transpose(0, 3, 1, 2)
    planes = planes.reshape(count, 4 * size, inputs // 4)
    pairs = lax.bitcast_convert_type(scales.reshape(*scales.shape[:2], -1, 2), jnp.uint16)

    step = max(s for s in range(WORDS, MAX_STEP_WORDS + 1, WORDS) if inputs // 8 % s == 0)
    stages = min(MAX_STAGES, max(2, RING_BYTES // (4 * step * (TILE + 4 * size))))
    kernel = plgpu.kernel(
        functools.partial(_kernel, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((count, features, size), jnp.float32),
        scratch_types=[
            plgpu.SMEM((stages, TILE, step), _WIDE, transforms=swizzled(WORDS, _WIDE)),
            plgpu.SMEM((stages, 4 * size, 2 * step), _HALF, transforms=swizzled(2 * WORDS, _HALF)),
            plgpu.SMEM((TILE, size), jnp.float32, transforms=swizzled(8, _SUM)),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ],
        grid=(features // TILE, count),
        grid_names=("tile", "block"),
        # Explicit layouts: inference finds none for a column of scales.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter(interpret),
    )
    out = kernel(planes, words, pairs, experts, used.reshape(1))
    return out.transpose(0, 2, 1)


def _thirds(rows: jax.Array) -> list[jax.Array]:
    """Returns three bfloat16 arrays whose sum is a float32 array."""
    parts = []
    for _ in range(3):
        # XLA would take the two conversions for none.
        parts.append(lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7))
        rows = rows - parts[-1]
    return [part.astype(_HALF) for part in parts]


def _kernel(
    planes: Ref,  # [B, 4 N, in / 4] bfloat16
    words: Ref,  # [E, out, in / 8] uint32
    pairs: Ref,  # [E, out, in / 64] uint16, two scales each
    experts: Ref,  # [B]
    used: Ref,  # [1]
    out: Ref,  # [B, out, N] float32
    word_slots: Ref,  # [stages, 64, step]
    row_slots: Ref,  # [stages, 4 N, 2 step]
    sums: Ref,  # [64, N]
    arrived: Ref,
    *,
    interpret: Interpret,
) -> None:
    tile, block = lax.axis_index("tile"), lax.axis_index("block")
    (stages, _, step), size = word_slots.shape, out.shape[2]
    steps, products = words.shape[2] // step, step // WORDS
    features = pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)

    @pl.when(block < used[0])
    def _used() -> None:
        expert = experts[block]

        def fetch(i: jax.Array, slot: jax.Array | int) -> None:
            some = pl.ds(pl.multiple_of(i * step, step), step)
            plgpu.copy_gmem_to_smem(
                words.at[expert, features, some], word_slots.at[slot], arrived.at[slot]
            )
            some = pl.ds(pl.multiple_of(i * 2 * step, 2 * step), 2 * step)
            plgpu.copy_gmem_to_smem(planes.at[block, :, some], row_slots.at[slot], arrived.at[slot])

        def scales(i: jax.Array) -> tuple[jax.Array, ...]:  # of a step, [64] for each product
            return tuple(
                plgpu.load(
                    pairs.at[expert, features, i * products + k], layout=ROW, optimized=False
                )
                for k in range(products)
            )

        for i in range(min(stages, steps)):
            fetch(jnp.int32(i), i)
        second = plgpu.broadcasted_iota(jnp.int32, (TILE, WORDS), 1, layout=WORD) >= WORDS // 2

        def body(
            i: jax.Array, carry: tuple[jax.Array, tuple[jax.Array, ...]]
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            acc, exponents = carry
            coming = scales(jnp.minimum(i + 1, steps - 1))  # a step ahead: they come from afar
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(arrived.at[slot])
            for k in range(products):
                some = word_slots.at[slot, :, pl.ds(k * WORDS, WORDS)]
                packed = plgpu.load(some, layout=WORD, optimized=False)  # [64, 8]
                both = exponents[k].astype(jnp.uint32)
                factor = jnp.where(second, _factors(both >> 8), _factors(both & 0xFF))
                for j in range(4):
                    weights = _weights(_codes(packed, j), factor, interpret)
                    inputs = row_slots.at[
                        slot, pl.ds(j * size, size), pl.ds(k * 2 * WORDS, 2 * WORDS)
                    ].T
                    taken = plgpu.load(inputs, layout=RIGHT, optimized=False)  # [16, N]
                    acc = mma(acc, weights, taken, interpret)
            plgpu.commit_smem()  # every warp has read the slot

            @pl.when(i + stages < steps)
            def _refill() -> None:
                fetch(i + stages, slot)

            return acc, coming

        carry = filled((TILE, size), 0, SUMS), scales(jnp.int32(0))
        acc, _ = lax.fori_loop(0, steps, body, carry)
        sums[...] = acc * 2.0**LEFT_OUT
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, out.at[block, features])
        plgpu.wait_smem_to_gmem(0)


def _factors(exponents: jax.Array) -> jax.Array:
    """Returns scales `[64]` twice in every word as bfloat16, `[64, 8]` uint32."""
    twice = (jnp.minimum(exponents, HIGHEST_SCALE) + (LIFT - LEFT_OUT)) * 0x00800080
    return plgpu.layout_cast(lax.broadcast_in_dim(twice, (TILE, WORDS), [0]), WORD)


def _codes(packed: jax.Array, j: int) -> jax.Array:
    """Returns codes j and j + 4 of every word as the bits of two bfloat16 numbers.

    A code is a sign, two bits of exponent and one of mantissa; so they stay, but the exponent is
    not biased by 1: it is 126 too low. What a shift brings over from the other half is masked.
    """
    sign = packed << (12 - 4 * j) if j < 3 else packed
    magnitude = packed << (6 - 4 * j) if j < 2 else packed >> (4 * j - 6)
    return (sign & jnp.uint32(0x80008000)) | (magnitude & jnp.uint32(0x01C001C0))


def _weights(codes: jax.Array, factor: jax.Array, interpret: Interpret) -> jax.Array:
    """Returns the products of pairs of bfloat16 numbers, each pair in a word: `[64, 8]` -> 16.

    Pallas has no cast of one word to two numbers, and a CPU takes numbers below 2**-126 for 0.
    """
    if interpret:
        return _interpreted_weights(codes, factor)

    @plgpu.inline_mgpu(
        arg_types=(WORD, WORD),
        return_type=plgpu.ShapeDtypeStruct((TILE, 2 * WORDS), _HALF, layout=LEFT),
    )
    def multiplied(
        _: Any, codes: mgpu.FragmentedArray, factor: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        return _as_pairs(codes) * _as_pairs(factor)

    return multiplied(codes, factor)


def _as_pairs(words: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Returns the same registers as an array of twice the columns, two of them in each."""
    pairs = LEFT.to_mgpu()
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = words.registers.copy()
    for place, register in enumerate(registers.flat):
        registers.flat[place] = mgpu.utils.bitcast(register, pair)
    registers = registers.reshape(pairs.registers_shape((TILE, 2 * WORDS)))
    return mgpu.FragmentedArray(_registers=registers, _layout=pairs, _is_signed=None)


def _interpreted_weights(codes: jax.Array, factor: jax.Array) -> jax.Array:
    def halves(words: jax.Array) -> jax.Array:
        return jnp.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(TILE, 2 * WORDS)

    codes, factor = halves(codes), halves(factor)
    magnitude = lax.bitcast_convert_type(((codes & 0x01C0) + 0x3F00) << 16, jnp.float32)
    magnitude = jnp.minimum(magnitude, 2 * magnitude - 1)  # 0 and 0.5 instead of 0.5 and 0.75
    value = jnp.where(codes >> 15 == 1, -magnitude, magnitude)
    scale = lax.bitcast_convert_type(factor << 16, jnp.float32)
    return (value * (scale * 2.0**-LIFT)).astype(_HALF)
