"""Random numbers of generated Triton kernels (called by way of `libm`): Philox-4x32-10 and uniform
numbers of its words. `deuteron.graph.random_ops` says which number an element gets.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(seed, stream, element):
    """Philox-4x32-10 (Salmon et al., 2011): counter (element, stream), key seed; 64 bits each, low
    word first.

    The four words; see deuteron.graph.random_ops for the numbers made of them.
    """
    element = element.to(tl.int64)
    zero = element * 0
    seed = seed + zero
    c0 = (element & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((element >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((zero + stream) & 0xFFFFFFFF).to(tl.uint32)
    c3 = (((zero + stream) >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        n0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        n2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        c0 = n0
        c2 = n2
        k0 = ((k0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def unit_f64(a, b):
    """53 bits of two words, as f64 in [0, 1)."""
    word = (a.to(tl.int64) << 20) | (b >> 12).to(tl.int64)
    return word.to(tl.float64) * 2.220446049250313e-16


@triton.jit
def rand(seed, stream, quarter, word):
    """Four elements share a counter: element % 4 is the word."""
    a, b, c, d = philox(seed, stream, quarter)
    word = word.to(tl.int32)
    a = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    return (a >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def rand_lanes(seed, stream, row, start, block: tl.constexpr, rank: tl.constexpr):
    """Those of `block` neighbours from element 4 * row + start on, each counter used once."""
    words = _words(seed, stream, row, start, block, rank)
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def rand_below(
    seed, stream, row, start, block: tl.constexpr, rank: tl.constexpr, END: tl.constexpr
):
    """Whether they are below END 2^-24."""
    words = _words(seed, stream, row, start, block, rank)
    return words < tl.full([], END * 256, tl.uint32)


@triton.jit
def _words(seed, stream, row, start, block: tl.constexpr, rank: tl.constexpr):
    lanes = tl.arange(0, block // 4)
    if rank == 2:
        lanes = lanes[None, :]
    a, b, c, d = philox(seed, stream, row + (start // 4 + lanes))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def rand64(seed, stream, element):
    a, b, c, d = philox(seed, stream, element)
    return unit_f64(a, b)


@triton.jit
def rand_bits(seed, stream, element):
    """64 random bits: the first two words."""
    a, b, c, d = philox(seed, stream, element)
    return (b.to(tl.int64) << 32) | a.to(tl.int64)
