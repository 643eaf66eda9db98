"""The meaning of scalar operations, reductions, scans and random numbers, as torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deuteron.ir.operations import REDUCTIONS, SCALAR_OPS

TO_TORCH: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}


def divided(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Division with remainder; by an integer zero, the quotient is 0 and the remainder is `a`."""
    zero = None if a.dtype.is_floating_point else b == 0
    if zero is not None:
        b = torch.where(zero, torch.ones_like(b), b)
    if kind in ("floordiv", "truncdiv"):
        out = torch.div(a, b, rounding_mode=kind[:5])
        return out if zero is None else torch.where(zero, torch.zeros_like(out), out)
    out = (torch.fmod if kind == "fmod" else torch.remainder)(a, b)
    return out if zero is None else torch.where(zero, a.expand_as(out), out)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (
        (a.double() * b.double() + c.double()).to(a.dtype)
        if a.dtype != torch.float64
        else a * b + c
    )


_SPECIAL = ("i0", "i0e", "i1", "i1e", "ndtri")
_OTHERS = {"sub", "div", "floordiv", "truncdiv", "fmod", "remainder", "lshift", "rshift", "fma"}


_TABLE: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in SCALAR_OPS.keys() - _OTHERS - {*_SPECIAL}},
    **{name: getattr(torch.special, name) for name in _SPECIAL},
    "sub": lambda a, b: torch.logical_xor(a, b) if a.dtype == torch.bool else a - b,
    "div": torch.true_divide,
    "floordiv": lambda a, b: divided("floordiv", a, b),
    "truncdiv": lambda a, b: divided("truncdiv", a, b),
    "fmod": lambda a, b: divided("fmod", a, b),
    "remainder": lambda a, b: divided("remainder", a, b),
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "fma": _fma,
}


_HALVES = (torch.float16, torch.bfloat16)


def scalar_op(name: str, args: Sequence[Tensor]) -> Tensor:
    """One operation of `SCALAR_OPS`; half types compute in f32, as ATen's kernels do, for the
    caller to round.
    """
    if name != "nextafter" and any(a.dtype in _HALVES for a in args):
        args = [a.float() if a.dtype in _HALVES else a for a in args]
    return _TABLE[name](*args)


def _wide(x: Tensor) -> torch.dtype:
    """What sums and products accumulate in."""
    return torch.float64 if x.dtype.is_floating_point else x.dtype


def reduce(kind: str, x: Tensor, dims: Sequence[int], dtype: str) -> Tensor:
    """`x` reduced over `dims`, which stay with size 1. The result has the reduction's dtype."""
    out_dtype = torch.int64 if kind.startswith("arg") else x.dtype
    if any(x.shape[d] == 0 for d in dims):
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        value = 0 if kind.startswith("arg") else REDUCTIONS[kind].identity(dtype)
        return torch.full(shape, value, dtype=out_dtype, device=x.device)
    if not dims:
        return torch.zeros_like(x, dtype=out_dtype) if kind.startswith("arg") else x
    if kind.startswith("arg"):
        assert len(dims) == 1, f"{kind} is along one axis"
        x = x.to(torch.uint8) if x.dtype == torch.bool else x
        if kind == "argmax_last_nan" and x.dtype.is_floating_point:
            last = x.shape[dims[0]] - 1 - x.isnan().int().flip(dims[0]).argmax(dims[0], True)
            return torch.where(x.isnan().any(dims[0], True), last, x.argmax(dims[0], True))
        return (torch.argmin if kind == "argmin" else torch.argmax)(x, dims[0], keepdim=True)
    if kind in ("any", "all") or x.dtype == torch.bool:
        every = REDUCTIONS[kind].scalar_op in ("logical_and", "minimum", "mul")
        x = x.to(torch.bool)
        for d in dims:
            x = torch.all(x, dim=d, keepdim=True) if every else torch.any(x, dim=d, keepdim=True)
        return x.to(out_dtype)
    if kind == "sum":
        return torch.sum(x, dim=list(dims), keepdim=True, dtype=_wide(x)).to(out_dtype)
    if kind == "prod":
        for d in dims:
            x = torch.prod(x, dim=d, keepdim=True, dtype=_wide(x))
        return x.to(out_dtype)
    return (torch.amax if kind == "max" else torch.amin)(x, dim=list(dims), keepdim=True)


def scan(kind: str, x: Tensor, dim: int) -> Tensor:
    """The inclusive scan of `x` along `dim`, in its dtype."""
    if x.dtype == torch.bool:
        return scan(kind, x.to(torch.uint8), dim).ne(0)
    if kind == "sum":
        return torch.cumsum(x, dim, dtype=_wide(x)).to(x.dtype)
    if kind == "prod":
        return torch.cumprod(x, dim, dtype=_wide(x)).to(x.dtype)
    if x.numel() == 0:
        return x
    return (torch.cummax if kind == "max" else torch.cummin)(x, dim).values


_WORD = 0xFFFFFFFF


def philox(seed: Tensor, stream: int, element: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10's four words, as i64 in ``[0, 2**32)``.

    Counter = (low and high word of `element`, low and high word of `stream`), key = low and high
    word of `seed` (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
    2011).
    """
    c0, c1 = element & _WORD, (element >> 32) & _WORD
    c2, c3 = torch.full_like(c0, stream & _WORD), torch.full_like(c0, (stream >> 32) & _WORD)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # The product of two 32-bit words has the right 64 bits in i64, though its sign may be
        # wrong.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, ((p0 >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = p1 & _WORD, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def random_values(dist: str, seed: Tensor, stream: int, element: Tensor, dtype: str) -> Tensor:
    """Element `element` of a stream: "rand" on [0, 1), "randn" (Box and Muller), or 64
    "rand_bits".
    """
    if dist == "rand" and dtype != "f64":  # four elements share a counter
        words = torch.stack(philox(seed, stream, element >> 2))
        x = words.gather(0, (element & 3).expand(words.shape[1:])[None])[0]
        return ((x >> 8).to(torch.float32) * 2.0**-24).to(TO_TORCH[dtype])
    x0, x1, x2, x3 = philox(seed, stream, element)
    if dist == "rand_bits":
        return (x1 << 32) | x0
    if dtype == "f64":
        u = ((x0 << 20) | (x1 >> 12)).to(torch.float64) * 2.0**-52
        if dist == "rand":
            return u
        u, v = 1.0 - u, ((x2 << 20) | (x3 >> 12)).to(torch.float64) * 2.0**-52
    else:
        u = ((x0 >> 8) + 1).to(torch.float32) * 2.0**-24
        v = (x1 >> 8).to(torch.float32) * 2.0**-24
    assert dist == "randn", f"no distribution {dist!r}"
    return (torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2.0 * math.pi * v)).to(TO_TORCH[dtype])
