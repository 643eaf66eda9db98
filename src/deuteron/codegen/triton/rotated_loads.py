"""Device functions for misaligned rows (`misaligned`), for `libm`, under whose name generated
kernels call them.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.codegen.triton.fast import INTERPRETED


@triton.jit
def rotated_sizes(at, count, ring, rotation, BLOCK: tl.constexpr):
    """How many of the `BLOCK` lanes from `at` have an element of a row."""
    first = tl.minimum(tl.maximum(count - rotation - at, 0), BLOCK)
    last = tl.minimum(at + BLOCK, ring) - tl.maximum(at, ring - rotation)
    return (first + tl.maximum(last, 0)).to(tl.float32)


@triton.jit
def rotated_load(
    pointer, start, count, ring, rotation, index, mask,
    BLOCK: tl.constexpr, ENDS: tl.constexpr, ALIGNED: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """The elements `index`, of 2 bytes, of a row that begins at a multiple of 16 bytes, in a block
    of rotated lanes: whole vectors, of which a lane's has parts of two neighbours. `ENDS`:
    whether the block has lanes without an element, and a `mask`."""
    if not ALIGNED:
        if ENDS:
            return tl.load(pointer + index, mask, other=0, eviction_policy=POLICY)
        else:
            return tl.load(pointer + index, eviction_policy=POLICY)
    else:
        # In words of 32 bits, of which a vector has 4.
        words, end = ring // 2, (count + 7) // 8 * 4
        at = start // 2 + tl.arange(0, BLOCK // 2)[None, :] + rotation // 8 * 4
        source = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
        if ENDS:
            some = start // 2 + tl.arange(0, BLOCK // 2)[None, :] < words
            at = tl.where(at >= words, at - words, at)
            behind = tl.where(at + 4 >= words, at + 4 - words, at + 4)
            a = tl.load(source + at, some & (at < end), other=0, eviction_policy=POLICY)
            b = tl.load(source + behind, some & (behind < end), other=0, eviction_policy=POLICY)
        else:
            behind = (
                at + (rotation % 8 > 0).to(tl.int32) * 4
            )  # where nothing is needed of it: not read
            a = tl.load(source + at, eviction_policy=POLICY)
            b = tl.load(source + behind, eviction_policy=POLICY)
        a0, a1, a2, a3 = _words(a)
        b0, b1, b2, b3 = _words(b)
        far, near, half = rotation & 4 > 0, rotation & 2 > 0, rotation % 2 * 16
        a0, a1 = tl.where(far, a2, a0), tl.where(far, a3, a1)
        a2, a3 = tl.where(far, b0, a2), tl.where(far, b1, a3)
        b0, b1 = tl.where(far, b2, b0), tl.where(far, b3, b1)
        a0, a1 = tl.where(near, a1, a0), tl.where(near, a2, a1)
        a2, a3, b0 = tl.where(near, a3, a2), tl.where(near, b0, a3), tl.where(near, b1, b0)
        a0, a1, a2 = _halves(a0, a1, half), _halves(a1, a2, half), _halves(a2, a3, half)
        a3 = _halves(a3, b0, half)
        values = tl.join(tl.join(a0, a2), tl.join(a1, a3))
        values = tl.join(values.to(tl.int16), (values >> 16).to(tl.int16))
        values = tl.reshape(values, [values.shape[0], BLOCK])
        return values.to(pointer.dtype.scalar.element_ty, bitcast=True)


@triton.jit
def _words(x):
    """The first, second, third and fourth of every four."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _halves(low, high, bits):
    """Two words moved down by so many bits, at most 31; the lower one."""
    if INTERPRETED:
        both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
        return (both >> bits.to(tl.int64)).to(tl.int32)
    return tl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, bits],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
