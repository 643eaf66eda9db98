"""What is wrong of a run, by the oracle: a sentence for each difference."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dev.check.oracle import (
    ALLOWED_ULPS,
    HALF_DTYPES,
    HALF_LOST_SHARE,
    LOST_ELSE,
    Oracle,
    Seen,
    parts,
)


def differences(got: Seen, oracle: Oracle) -> list[str]:
    """Every way in which `got` is not what eager shows, in words; empty when it is right."""
    want = oracle.eager
    out = []
    if list(got.values) != list(want.values):
        return [f"results {', '.join(got.values)} instead of {', '.join(want.values)}"]
    for name, e in want.values.items():
        problem = difference(name, got.values[name], e, oracle)
        if problem is not None and isinstance(e, Tensor) and oracle.contiguous is not None:
            other = oracle.contiguous.eager.values[name]
            problem = difference(name, got.values[name], other, oracle.contiguous)
        if problem is not None:
            out.append(f"{name}: {problem}")
    for name, s in want.strides.items():
        others = [p for p in out if p.startswith(f"{name}:") and ", first at" not in p]
        if got.strides.get(name) != s and not others:  # elements may differ besides
            out.append(f"{name}: strides {got.strides.get(name)} instead of {s}")
    for name in dict.fromkeys([*want.shared, *got.shared]):
        a, b = got.shared.get(name, "has its own memory"), want.shared.get(name)
        b = "has its own memory" if b is None else b
        if a != b:
            out.append(f"{name}: {a}, in eager {b}")
    return out


MISSING_GRADIENT = "zeros where eager has no gradient"


ZERO_SIGN = "zeros of another sign"


def difference(name: str, g: Any, e: Any, oracle: Oracle) -> str | None:
    if e is None and isinstance(g, Tensor) and not bool(g.any()):
        return MISSING_GRADIENT
    if not isinstance(e, Tensor) or not isinstance(g, Tensor):
        same = type(g) is type(e) and (g == e or (g != g and e != e))
        return None if same else f"{g!r} instead of {e!r}"
    if (g.shape, g.dtype, g.device.type) != (e.shape, e.dtype, e.device.type):
        return f"{g.dtype} {list(g.shape)} on {g.device} instead of {e.dtype} {list(e.shape)}"
    if e.layout != torch.strided:
        return None if torch.equal(g.to_dense(), e.to_dense()) else "other elements (sparse)"
    if e.numel() == 0:
        return None
    if not (e.dtype.is_floating_point or e.dtype.is_complex):
        return whole_difference(name, g, e, oracle)
    return real_difference(name, g, e, oracle) or sign_difference(name, g, e, oracle)


def sign_difference(name: str, g: Tensor, e: Tensor, oracle: Oracle) -> str | None:
    """Zeros of the other sign, where the operators define it: eager has it in float64, too, and in
    runs that differ by rounding, in which a sum in another order or an underflow would show."""
    a, b = parts(g), parts(e)
    bad = (a == 0) & (b == 0) & (a.signbit() != b.signbit())
    if not bool(bad.any()):
        return None
    if oracle.like(oracle.exact, name) is None:
        return None  # nothing tells
    for other in chain((oracle.exact,), (seen for seen, _ in oracle.further())):
        x = oracle.like(other, name)
        if x is not None:
            z = parts(x)
            bad &= (z == 0) & (z.signbit() == b.signbit())
        if not bool(bad.any()):
            break
    return f"{ZERO_SIGN}: {words(bad, g, e, None)}" if bool(bad.any()) else None


def whole_difference(name: str, g: Tensor, e: Tensor, oracle: Oracle) -> str | None:
    """Integers and truth values are eager's, except where rounding decides: there they are among
    what runs that differ by rounding give, or close by."""
    bad = g != e
    if not bool(bad.any()):
        return None
    got, low = g.double(), e.double()
    high = low
    for other in chain((oracle.exact,), (seen for seen, _ in oracle.further())):
        x = oracle.like(other, name)
        if x is not None:
            low, high = torch.minimum(low, x.double()), torch.maximum(high, x.double())
            slack = (high - low) / 2
            bad = ((got < low - slack) | (got > high + slack)) & (g != e)
        if not bool(bad.any()):
            break
    return words(bad, g, e, None) if bool(bad.any()) else None


def real_difference(name: str, g: Tensor, e: Tensor, oracle: Oracle) -> str | None:
    real = e.real.dtype if e.dtype.is_complex else e.dtype
    eps = torch.finfo(real).eps
    tiny = torch.finfo(real).tiny
    a, b = parts(g), parts(e)
    level = float(b[b.isfinite()].abs().mean()) if bool(b.isfinite().any()) else 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    # A quarter of what float64 may allow further down: most results end here.
    near = (a - b).abs() <= eps * (b.abs() + level / 4) + tiny
    if bool((same | near).all()):
        return None
    wide = oracle.like(oracle.exact, name)
    x = b if wide is None else parts(wide)
    off = (a - x).abs()
    # Where float64 has a number, eager's NaN is no measure (in vectors, its GELU of inf).
    finite = x.isfinite() & a.isfinite()
    known = finite & b.isfinite()
    if wide is None:  # nothing to measure by: close as torch's own tests ask
        scale = 1e-2 if real in HALF_DTYPES else 1e4 * eps
        allowed = scale * (b.abs() + level)
        bad = ~(same | (known & (off <= allowed)))
    else:
        rounded = parts(wide.to(e.dtype))
        # Beyond the dtype's range (or in it, where eager left it on the way) float64 is right too.
        same |= (a == rounded) | (a.isnan() & rounded.isnan())
        own = torch.where(known, (b - x).abs(), torch.zeros_like(x))
        level = float(x[known].abs().mean()) if bool(known.any()) else 0.0
        error = float(own.max())
        lost = error > HALF_LOST_SHARE.get(real, LOST_ELSE) * level + tiny
        if lost:  # some of eager's elements are wrong by far (rounding decides): not a measure
            error = 4 * float(own.flatten().kthvalue(max(1, int(0.9 * own.numel()))).values)
        # Nothing is wider than float64: eager's own error there, of which twice is allowed, is
        # unknown. Terms of about 1 may cancel in it (the ends of a window).
        units = ALLOWED_ULPS
        if wide.dtype == e.dtype:
            units, tiny = 8 * ALLOWED_ULPS, eps
        allowed = 2 * error + units * eps * (x.abs() + level) + tiny
        # Where float64 has no number and eager has one, that is the measure.
        beside = (a - b).abs() <= ALLOWED_ULPS * eps * (b.abs() + level) + tiny
        same |= beside & b.isfinite() & ~x.isfinite()
        bad = ~(same | (finite & (off <= allowed)))
        if lost:
            bad &= ~((a - b).abs() <= allowed) & ~(known & (off <= 2 * own + allowed))
    if not bool(bad.any()):
        return None
    spread = torch.zeros_like(x)
    first = len(oracle.others)
    for k, (other, like_wide) in enumerate(oracle.further(), start=1):
        y = oracle.like(other, name)
        if y is None or (wide is None and like_wide):
            continue
        z = parts(y)
        base = x if like_wide else b
        jumped = z.isfinite() != base.isfinite()
        # Infinities of either sign and NaN, too, are what such a run has.
        jumped |= ~z.isfinite() & ~base.isfinite() & ((a == z) | (a.isnan() & z.isnan()))
        change = torch.where(z.isfinite() & base.isfinite(), (z - base).abs(), 0.0)
        # The largest of many runs is about twice that of the first few.
        spread = torch.maximum(spread, (8 if k <= first else 4) * change)
        bad &= ~jumped
        if k >= first:
            some = spread[known]
            typical = float(some.mean()) if some.numel() else 0.0
            bad &= ~(finite & (off <= allowed + torch.clamp(spread, min=typical)))
            if not bool(bad.any()):
                return None
    return words(bad, g, e, wide)


def coarser(got: Seen, oracle: Oracle) -> list[str]:
    """Floating results whose error against float64, in the root mean square, is more than twice
    eager's and a unit in the last place. Where eager's own is so large that rounding has decided
    something, nothing is said."""
    out = []
    for name, e in oracle.eager.values.items():
        wide = oracle.like(oracle.exact, name) if isinstance(e, Tensor) else None
        if wide is None or wide.dtype == e.dtype or e.layout != torch.strided:
            continue
        g, b, x = parts(got.values[name]), parts(e), parts(wide)
        known = g.isfinite() & b.isfinite() & x.isfinite()
        if not bool(known.any()):
            continue
        mine, own, size = (float(t[known].square().mean().sqrt()) for t in (g - x, b - x, x))
        real = e.real.dtype if e.dtype.is_complex else e.dtype
        lost = own > HALF_LOST_SHARE.get(real, LOST_ELSE) * size
        if not lost and mine > 2 * own + torch.finfo(real).eps * size + torch.finfo(real).tiny:
            out.append(f"{name}: root mean square error {mine:.3g}, eager's {own:.3g}")
    return out


def words(bad: Tensor, g: Tensor, e: Tensor, x: Tensor | None) -> str:
    """Where and by how much."""
    while bad.dim() > g.dim():
        bad = bad.any(-1)
    at = tuple(int(i) for i in bad.nonzero()[0])
    exact = "" if x is None else f", exactly {x[at].item()}"
    return (
        f"{int(bad.sum())} of {g.numel()} elements, first at {list(at)}: "
        f"{g[at].item()} instead of {e[at].item()}{exact}"
    )
