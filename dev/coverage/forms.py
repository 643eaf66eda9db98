"""The forms in which `python -m dev coverage` runs a sample of torch's: what is changed in its
call.

In: a `Case` as torch gives it. Out: cases with other arguments.

    layouts    tensors permuted, with steps, expanded, behind an offset, without elements
    numbers    as it is, and with other numbers among the arguments
    lists      numbers, and lists of equal numbers, as lists of one element
    mixed      every second tensor of another dtype
    zeros      elements that are zeros of both signs; these, infinities and NaN
    chains     pointwise operators before and after it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dev.check.oracle import WIDE_DTYPES


@dataclass(frozen=True)
class Case:
    """One call: the function, its arguments (a tree whose tensors are `tensors`, in order)."""

    name: str
    op: Callable[..., Any]
    tree: tuple[list[Any], dict[str, Any]]
    tensors: tuple[Tensor, ...]
    changed: bool = False  # elements are not those of torch's own sample

    def arguments(
        self, tensors: list[Tensor], wide: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with other tensors in their places."""
        flat, spec = tree_flatten(self.tree)
        rest = iter(tensors)
        for i, x in enumerate(flat):
            if isinstance(x, Tensor):
                flat[i] = next(rest)
            elif wide and isinstance(x, torch.dtype):
                flat[i] = WIDE_DTYPES.get(x, x)
        args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs

    def of(self, form: str, tensors: list[Tensor], changed: bool = True) -> Case:
        """The same call of other tensors."""
        args, kwargs = self.arguments(tensors)
        tree = (list(args), kwargs)
        return Case(f"{self.name} {form}", self.op, tree, tuple(tensors), changed)

    def run(self, tensors: list[Tensor]) -> Any:
        args, kwargs = self.arguments(tensors)
        return self.op(*args, **kwargs)

    def wide(self, tensors: list[Tensor]) -> Any:
        args, kwargs = self.arguments(tensors, wide=True)
        return self.op(*args, **kwargs)


def tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(x for x in tree_flatten(tree)[0] if isinstance(x, Tensor))


# -- layouts ---------------------------------------------------------------------------------------
def permuted(t: Tensor) -> Tensor:
    """The same elements, the first axis fastest."""
    order = list(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def stepped(t: Tensor) -> Tensor:
    """The same elements, every second of a longer row, not from its beginning."""
    room = torch.zeros((*t.shape[:-1], 2 * t.shape[-1] + 1), dtype=t.dtype, device=t.device)
    room[..., 1::2] = t
    return room[..., 1::2]


def expanded(t: Tensor) -> Tensor:
    """The first slice along the longest axis, repeated without copies."""
    d = max(range(t.dim()), key=lambda k: t.shape[k])
    return t.narrow(d, 0, 1).clone().expand_as(t)


def shifted(t: Tensor) -> Tensor:
    """The same elements behind an odd offset."""
    room = torch.zeros(t.numel() + 3, dtype=t.dtype, device=t.device)
    return room[3:].view(t.shape).copy_(t)


def emptied(t: Tensor) -> Tensor:
    return t[:0]


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the fewest axes it takes
    "permuted": (permuted, 2),
    "stepped": (stepped, 1),
    "expanded": (expanded, 1),
    "shifted": (shifted, 0),
    "empty": (emptied, 1),
}


OTHER_VALUES = ("expanded", "empty")


def whole_numbers(case: Case) -> bool:
    return any(not (t.is_floating_point() or t.is_complex()) for t in case.tensors)


def layouts(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """The case with other strides, offsets and sizes of its tensors.

    Positions and counts keep their values beside floating numbers, and where a size is promised:
    eager does not check all of them.
    """
    promised = "output_size" in case.tree[1]
    floats = any(t.is_floating_point() or t.is_complex() for t in case.tensors)
    for form, (change, axes) in LAYOUTS.items():
        changed = []
        for t in case.tensors:
            fits = t.layout == torch.strided and t.dim() >= axes
            if form in OTHER_VALUES:
                counts = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
                fits = fits and not promised and not (floats and counts and form == "expanded")
            fits = fits and (t.numel() > 0 or form == "empty")
            changed.append(change(t.detach().resolve_conj()) if fits else t)
        if any(a is not b for a, b in zip(changed, case.tensors)):
            yield case.of(form, changed, form in OTHER_VALUES)


# -- numbers ---------------------------------------------------------------------------------------
def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def numbers(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """The case and, if there are numbers among its arguments, the same with others. Numbers that
    eager does not take are not changed."""
    yield case
    flat, spec = tree_flatten(case.tree)
    if not any(is_number(x) for x in flat):
        return
    other = [x + 1 if type(x) is int else x * 1.25 + 0.5 if type(x) is float else x for x in flat]
    only_floats = [x if type(x) is int else y for x, y in zip(flat, other)]
    for some in (other, only_floats):
        if any(a is not b for a, b in zip(flat, some)):
            changed = replace(
                case, name=f"{case.name}, other numbers", tree=tree_unflatten(some, spec)
            )
            if accepted(changed):
                yield changed
                return


def accepted(case: Case) -> bool:
    """Whether eager runs the case."""
    try:
        case.run([t.detach().clone() for t in case.tensors])
    except Exception:  # noqa: BLE001 - whatever eager says
        return False
    return True


def lists(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """One case per argument that eager takes as a list of one element, too."""
    args, kwargs = case.tree
    places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    for key, x in places:
        one: Any = None
        if is_number(x):
            one = [x]
        elif isinstance(x, (list, tuple)) and x and all(is_number(y) and y == x[0] for y in x):
            one = [x[0]]
        if one is None or (isinstance(key, int) and key == 0):
            continue
        some_args, some = list(args), dict(kwargs)
        if isinstance(key, int):
            some_args[key] = one
        else:
            some[key] = one
        changed = replace(case, name=f"{case.name}, {key}={one}", tree=(some_args, some))
        if accepted(changed):
            yield changed


# -- dtypes ----------------------------------------------------------------------------------------
MIXED_WITH: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.bfloat16, torch.float64, torch.int64),
    torch.float16: (torch.bfloat16, torch.float32, torch.bool),
    torch.int32: (torch.float32, torch.int64, torch.uint8),
}


def mixed(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """Every second tensor of the sample's dtype has another."""
    mine = [i for i, t in enumerate(case.tensors) if t.dtype == dtype]
    if len(mine) < 2 or any(t.layout != torch.strided for t in case.tensors):
        return
    for other in MIXED_WITH.get(dtype, ()):
        tensors = [t.to(other) if i in mine[1::2] else t for i, t in enumerate(case.tensors)]
        yield case.of(str(other).removeprefix("torch."), tensors)


# -- elements --------------------------------------------------------------------------------------
SPECIAL_VALUES = {
    "zeros": (0.0, -0.0),
    "infinities": (0.0, -0.0, torch.inf, -torch.inf, torch.nan),
}


def zeros(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """About half of the elements of floating tensors are special ones."""
    for form, special in SPECIAL_VALUES.items():
        changed = [
            sprinkled(t, special, seed)
            if t.is_floating_point() and t.layout == torch.strided and t.numel()
            else t
            for seed, t in enumerate(case.tensors)
        ]
        if any(a is not b for a, b in zip(changed, case.tensors)):
            yield case.of(form, changed)


def sprinkled(t: Tensor, special: tuple[float, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, 2 * len(special), t.shape, generator=generator).to(t.device)
    out = t.detach().clone()
    for i, x in enumerate(special):
        out = torch.where(which == i, torch.full_like(out, x), out)
    return out


# -- chains ----------------------------------------------------------------------------------------
def chains(case: Case, dtype: torch.dtype) -> Iterator[Case]:
    """Operators that round come before and after it, in the same kernel where it is fused."""
    if any(t.is_floating_point() for t in case.tensors):
        yield replace(case, name=f"{case.name} in a chain", op=chained(case.op))


def chained(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return each(after, op(*each(before, args), **each(before, kwargs)))

    return call


def before(t: Tensor) -> Tensor:
    """About the same number, so that it stays in the operator's domain."""
    return t * 0.75 + t * 0.25


def after(t: Tensor) -> Tensor:
    return (t * 1.25 + t.tanh()) * 0.5


def each(f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`f` of the floating tensors in a tree."""
    if isinstance(x, Tensor):
        return f(x) if x.is_floating_point() and x.layout == torch.strided else x
    if isinstance(x, dict):
        return {k: each(f, v) for k, v in x.items()}
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return [each(f, v) for v in x]
    return x


FORMS: dict[str, Callable[[Case, torch.dtype], Iterator[Case]]] = {
    "layouts": layouts,
    "numbers": numbers,
    "lists": lists,
    "mixed": mixed,
    "zeros": zeros,
    "chains": chains,
}
