"""Numbers that eager converts to the dtype of a tensor of whole numbers, before it computes.

In: the rules by which operators are traced. Out: the same, behind a check that raises eager's error
where a number does not fit; and rules of operators in which eager drops a fraction first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from deuteron.capture.refusals import Refused

Rule = Callable[..., Any]

# Operator -> where its numbers are that eager converts to the dtype of the first tensor, or to the
# one that is asked for: one too large for it is an error, not another number. `CUT` ones may have
# fractions, which are dropped; with the others these promote.
CUT: dict[str, tuple[int | str, ...]] = {
    "aten.masked_fill.Scalar": (2,),
    "aten.index_fill.int_Scalar": (3,),
    "aten.scatter.value": (3,),
    "aten.scatter.value_reduce": (3,),
    "aten.constant_pad_nd.default": (2,),
    "aten.fill.Scalar": (1,),
    "aten.full.default": (1,),
    "aten.full_like.default": (1,),
    "aten.new_full.default": (2,),
    "aten.scalar_tensor.default": (0,),  # numbers of `where`
    "aten.linspace.default": (0, 1),
    "aten.addcmul.default": ("value",),
    "prims.fma.default": (1,),  # of `addcmul_`
    **{f"aten.{n}.default": ("alpha", "beta") for n in ("addmm", "addmv", "addbmm", "baddbmm")},
}
CONVERTED: dict[str, tuple[int | str, ...]] = {
    "aten.clamp.default": (1, 2, "min", "max"),
    "aten.clamp_min.default": (1,),
    "aten.clamp_max.default": (1,),
    "aten.hardtanh.default": (1, 2, "min_val", "max_val"),
    "aten.threshold.default": (1, 2),
    **CUT,
    "aten.addr.default": ("alpha", "beta"),
    "aten.add.Tensor": ("alpha",),
    "aten.sub.Tensor": ("alpha",),
    "aten.rsub.Tensor": ("alpha",),
}
NEGATED = ("aten.sub.Tensor", "aten.rsub.Tensor")  # what they convert is -alpha


def as_eager_converts(target: Any, rule: Rule | None) -> Rule:
    """`rule`, behind a check that raises what eager raises where a number does not fit."""
    name = str(target)
    places = CONVERTED[name]
    kinds = (int, float) if name in CUT else (int,)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first: Tensor | None = next((a for a in args if isinstance(a, Tensor)), None)
        dtype = kwargs.get("dtype") or (first.dtype if first is not None else None)
        whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        used = name != "aten.constant_pad_nd.default" or grows(args[1])
        if whole and used and dtype is not torch.bool:
            given: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
            numbers = [given[p] for p in places if type(given.get(p)) in kinds]
            if any(not fits(-n if name in NEGATED else n, dtype) for n in numbers):
                raise Refused(f"value cannot be converted to type {dtype} without overflow")
        return NotImplemented if rule is None else rule(*args, **kwargs)

    return wrapped if rule is None else wraps(rule)(wrapped)


def grows(pads: Sequence[Any]) -> bool:
    """Whether a padding is known to add elements: eager fills nothing where all are taken away."""
    return any(type(n) is int and n > 0 for n in pads)


def fits(number: float, dtype: torch.dtype) -> bool:
    """Whether eager converts a number to a dtype of whole numbers: to those without a sign also
    what is whole, negative and not too large."""
    limits = torch.iinfo(dtype)
    wraps_around = limits.min == 0 and isinstance(number, int)
    return (-limits.max if wraps_around else limits.min) <= number <= limits.max


def linspace(rule: Rule) -> Rule:
    """Eager's ends and steps of whole numbers: the ends are cut first. Torch's rule cuts only the
    results."""

    @wraps(rule)
    def wrapped(start: Any, end: Any, steps: int, *, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None or dtype.is_floating_point or dtype.is_complex or not steps > 1:
            return rule(start, end, steps, dtype=dtype, **kwargs)
        ends = [x.to(dtype) if isinstance(x, Tensor) else int(x) for x in (start, end)]
        if dtype == torch.uint8:  # -1 is 255
            ends = [x if isinstance(x, Tensor) else x % 256 for x in ends]
        place = torch.arange(steps, dtype=torch.int64, **kwargs)
        wide = torch.float64 if place.device.type == "cpu" else torch.float32
        first, last = (torch.as_tensor(x, device=place.device).to(wide) for x in ends)
        step = (last - first) / (steps - 1)
        rising, falling = first + step * place, last - step * (steps - 1 - place)
        return torch.where(place < steps // 2, rising, falling).to(dtype)

    return wrapped


def multiplied_and_added(a: Tensor, b: Any, c: Tensor) -> Tensor:
    """What Dynamo makes of `addcmul_`: among whole numbers eager drops a number's fraction."""
    whole = not c.dtype.is_floating_point and not c.dtype.is_complex
    return c + a * int(b) if whole and isinstance(b, (int, float)) else NotImplemented


RULES: dict[str, Rule] = {"prims.fma.default": multiplied_and_added}


__all__ = ["CONVERTED", "RULES", "as_eager_converts", "linspace"]
