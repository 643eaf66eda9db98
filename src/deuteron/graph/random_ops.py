"""Random numbers as functions of a seed: the operators, their fake results and their reference
implementation.

    deuteron::seed(device) -> i64[]                draws from torch's generator of that device
    deuteron::rand(seed, stream, size, dtype)      uniform on [0, 1), f32 or f64
    deuteron::randn(seed, stream, size, dtype)     standard normal, f32 or f64
    deuteron::randint64(seed, stream, low, high, size)   i64, low <= x < high

`rand`, `randn` and `randint64` are pure: element i (row-major, in `size`) is Philox-4x32-10
(Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with counter
(i, stream) and key seed, each 64 bits as two words, low word first; of the f32 uniform numbers four
share a counter, (i // 4, stream). With the resulting words x0..x3:

    rand f32    (x[i % 4] >> 8) * 2**-24
    rand f64    (x0 << 20 | x1 >> 12) * 2**-52
    randn f32   sqrt(-2 ln u) cos(2 pi v),  u = ((x0 >> 8) + 1) * 2**-24 in (0, 1],
                v = (x1 >> 8) * 2**-24
    randn f64   the same with u = 1 - (x0 << 20 | x1 >> 12) * 2**-52,
                v = (x2 << 20 | x3 >> 12) * 2**-52
    randint64   low + below(x1 << 32 | x0, high - low)

Uniform numbers and integers are equal bit by bit in every implementation; normal ones to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORD_MASK = 0xFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10

_library = torch.library.Library("deuteron", "DEF")
_library.define("seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("rand(Tensor seed, int stream, SymInt[] size, ScalarType dtype) -> Tensor")
_library.define("randn(Tensor seed, int stream, SymInt[] size, ScalarType dtype) -> Tensor")
_library.define(
    "randint64(Tensor seed, int stream, SymInt low, SymInt high, SymInt[] size) -> Tensor"
)


def philox(seed: Tensor, stream: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words (as i64 in [0, 2**32)) of elements 0..count-1."""
    element = torch.arange(count, dtype=torch.int64, device=seed.device)
    c0, c1 = element & WORD_MASK, (element >> 32) & WORD_MASK
    c2, c3 = (
        torch.full_like(c0, stream & WORD_MASK),
        torch.full_like(c0, (stream >> 32) & WORD_MASK),
    )
    k0, k1 = seed & WORD_MASK, (seed >> 32) & WORD_MASK
    for _ in range(PHILOX_ROUNDS):
        # A product of two 32-bit words wraps in i64, with the right 64 bits: both halves are exact.
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD_MASK) ^ c1 ^ k0,
            p1 & WORD_MASK,
            ((p0 >> 32) & WORD_MASK) ^ c3 ^ k1,
            p0 & WORD_MASK,
        )
        k0, k1 = (k0 + PHILOX_W0) & WORD_MASK, (k1 + PHILOX_W1) & WORD_MASK
    return c0, c1, c2, c3


def _wide(high: Tensor, low: Tensor) -> Tensor:
    """52 bits of two words as a number in [0, 1)."""
    return ((high << 20) | (low >> 12)).to(torch.float64) * 2.0**-52


def _seed(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def _rand(seed: Tensor, stream: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(size)
    if dtype == torch.float64:
        x0, x1, _, _ = philox(seed, stream, count)
        return _wide(x0, x1).view(size)
    words = torch.stack(philox(seed, stream, -(-count // 4)), -1).view(-1)[:count]
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(size)


def _randn(seed: Tensor, stream: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    x0, x1, x2, x3 = philox(seed, stream, math.prod(size))
    if dtype == torch.float64:
        u, v = 1.0 - _wide(x0, x1), _wide(x2, x3)
    else:
        u = ((x0 >> 8) + 1).to(torch.float32) * 2.0**-24
        v = (x1 >> 8).to(torch.float32) * 2.0**-24
    return (torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)).view(size)


def _randint64(seed: Tensor, stream: int, low: int, high: int, size: Sequence[int]) -> Tensor:
    x0, x1, _, _ = philox(seed, stream, math.prod(size))
    return (low + below((x1 << 32) | x0, high - low)).view(size)


# Up to this many numbers 63 bits modulo them are even enough: to 2^-23.
MAX_PLAIN_MODULUS = 2**40


def below(bits: Tensor, n: int) -> Tensor:
    """Random 64 bits (i64, its sign a bit like others) as i64, modulo 0 < n < 2**64. As of eager's
    numbers some are a little likelier: those that are counted once more by 2**64 (up to
    `MAX_PLAIN_MODULUS` numbers: by 2**63)."""
    lowest = -(2**63)

    def wrapped(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    def reduced(x: Tensor) -> Tensor:
        return torch.where((x ^ lowest) >= wrapped(n ^ 2**63), x - wrapped(n), x)

    if n <= MAX_PLAIN_MODULUS:
        return (bits & (2**63 - 1)) % n
    if n & (n - 1) == 0:
        return bits & (n - 1)
    if n > 2**63:
        return reduced(bits)
    half = (bits >> 1) & (2**63 - 1)
    return reduced(half % n * 2 + (bits & 1))


def _seed_fake(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _sized_fake(seed: Tensor, stream: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=seed.device)


def _randint64_fake(seed: Tensor, stream: int, low: int, high: int, size: Sequence[int]) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=seed.device)


_library.impl("seed", _seed, "CompositeExplicitAutograd")
_library.impl("rand", _rand, "CompositeExplicitAutograd")
_library.impl("randn", _randn, "CompositeExplicitAutograd")
_library.impl("randint64", _randint64, "CompositeExplicitAutograd")
torch.library.register_fake("deuteron::seed", _seed_fake, lib=_library)
torch.library.register_fake("deuteron::rand", _sized_fake, lib=_library)
torch.library.register_fake("deuteron::randn", _sized_fake, lib=_library)
torch.library.register_fake("deuteron::randint64", _randint64_fake, lib=_library)

SEED = torch.ops.deuteron.seed.default
RAND = torch.ops.deuteron.rand.default
RANDN = torch.ops.deuteron.randn.default
RANDINT64 = torch.ops.deuteron.randint64.default
