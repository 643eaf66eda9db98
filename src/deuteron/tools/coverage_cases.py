"""What `deuteron coverage` runs: PyTorch's own samples of every operator, in several forms.

In: an entry of torch's `op_db`, a dtype, a part. Out: `Case`s: a function of flat tensors, with the
same function in float64. Parts are the columns of the table:

    forward    every sample, as torch gives it
    backward   every sample, inputs require gradients
    inplace    the in-place variant, on inputs of the graph
    method     the method variant
    layouts    the first samples, inputs permuted, with steps, expanded, and without elements
    dynamic    the first samples, all sizes symbolic
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from deuteron.tools.oracle import WIDE

PARTS = ("forward", "backward", "inplace", "method", "layouts", "dynamic")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "complex64")
MORE = ("int16", "int8", "uint8", "complex128")  # where they are asked for
# Samples of the parts that repeat what `forward` has shown.
FEW = {"inplace": 8, "method": 3, "layouts": 5, "dynamic": 4}
ELEMENTS = 1 << 18  # of a sample's tensors in all; larger ones are left out


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
                flat[i] = WIDE.get(x, x)
        args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs

    def run(self, tensors: list[Tensor]) -> Any:
        args, kwargs = self.arguments(tensors)
        return self.op(*args, **kwargs)

    def wide(self, tensors: list[Tensor]) -> Any:
        args, kwargs = self.arguments(tensors, wide=True)
        return self.op(*args, **kwargs)


class Unsuitable(Exception):
    """A sample that is not run, with the reason."""


def entries() -> dict[str, Any]:
    """Name -> entry of `op_db`."""
    from torch.testing._internal.common_methods_invocations import op_db

    out: dict[str, Any] = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        while name in out:
            name += "'"
        out[name] = op
    return out


def applies(op: Any, dtype: torch.dtype, part: str, device: str) -> bool:
    """Whether eager has the part."""
    if dtype not in op.supported_dtypes(device) or NO_OPERATORS.match(op.name):
        return False
    if part == "backward":
        return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes(device)
    if part == "inplace":
        return op.inplace_variant is not None
    if part == "method":
        return op.method_variant is not None
    return True


def cases(op: Any, dtype: torch.dtype, part: str, device: str, most: int) -> Iterator[Case]:
    """At most `most` cases (0: all), spread evenly over the samples."""
    samples = list(op.sample_inputs(device, dtype, requires_grad=part == "backward"))
    if part in FEW:
        samples = samples[: min(FEW[part], most) if most else 4 * FEW[part]]
    elif most and len(samples) > most:
        samples = [samples[i * len(samples) // most] for i in range(most)]
    call = {"inplace": op.inplace_variant, "method": op.method_variant}.get(part, op.op)
    assert call is not None
    for k, s in enumerate(samples):
        tree = ([s.input, *s.args], dict(s.kwargs))
        case = Case(f"{part} sample {k}", call, tree, tensors_of(tree))
        if sum(t.numel() for t in case.tensors) > ELEMENTS:
            continue
        if part == "layouts":
            yield from forms(case)
        else:
            yield case


def tensors_of(tree: Any) -> tuple[Tensor, ...]:
    return tuple(x for x in tree_flatten(tree)[0] if isinstance(x, Tensor))


def suitable(case: Case) -> None:
    """Raises `Unsuitable`."""
    for t in case.tensors:
        if t.layout != torch.strided:
            raise Unsuitable(f"sparse input ({t.layout})")
        if t.is_quantized or t.is_nested:
            raise Unsuitable("quantized or nested input")


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


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the fewest axes it takes
    "permuted": (permuted, 2),
    "stepped": (stepped, 1),
    "expanded": (expanded, 1),
    "shifted": (shifted, 0),
    "empty": (emptied, 1),
}


# Functions that are no operators: torch's capture calls them with fake tensors, whose memory they
# read.
NO_OPERATORS = re.compile(r"^jiterator_")

OTHER_VALUES = ("expanded", "empty")


def whole_numbers(case: Case) -> bool:
    return any(not (t.is_floating_point() or t.is_complex()) for t in case.tensors)


def forms(case: Case) -> Iterator[Case]:
    """The case with other strides, offsets and sizes of its tensors.

    Positions and counts keep their values beside floating numbers, and where a size is promised:
    eager does not check all of them.
    """
    promised = "output_size" in case.tree[1]
    floats = any(t.is_floating_point() or t.is_complex() for t in case.tensors)
    for form, (change, axes) in FORMS.items():
        changed = []
        for t in case.tensors:
            fits = t.layout == torch.strided and t.dim() >= axes
            if form in OTHER_VALUES:
                counts = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
                fits = fits and not promised and not (floats and counts and form == "expanded")
            fits = fits and (t.numel() > 0 or form == "empty")
            changed.append(change(t.detach().resolve_conj()) if fits else t)
        if any(a is not b for a, b in zip(changed, case.tensors)):
            args, kwargs = case.arguments(changed)
            tree = (list(args), kwargs)
            other = form in OTHER_VALUES
            yield Case(f"{case.name} {form}", case.op, tree, tuple(changed), other)


def chosen(pattern: str, names: list[str]) -> list[str]:
    """Names that a regular expression finds, in order."""

    found = re.compile(pattern)
    return [n for n in names if found.search(n)]
