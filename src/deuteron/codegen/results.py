"""What library calls return, compared with what the program was compiled for.

In: an `Extern` and its place in the schedule. Out: lines of the emitted module that look at each
result before anything of ours reads it. Torch's rule for the result (its fake kernel) is a claim of
whoever wrote it: kernels address memory by its sizes and strides. The comparison takes 0.25 us per
result, 0.12 where all is fixed (`is_fixed`): then sizes and dtypes are looked at in the first call
only. `runtime.results.checked_result` takes what differs: other strides are copied to the traced
ones, other sizes, another dtype or device are an error that names the operator.

Not looked at: views of arguments by ATen's operators, which compute sizes and strides only, and
what is handed on whole to library calls (quantized and sparse tensors, states of cuDNN).
"""

from __future__ import annotations

from typing import Any

import torch

from deuteron.codegen.text import dtype_text, sizes_text
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Extern, Layout, Output, Program, ViewArg
from deuteron.ir.verify import views
from deuteron.schedule.kernel import Schedule

KNOWN_NAMESPACES = ("aten.", "prims.", "deuteron.")
VARYING_RESULTS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
FIRST_CALL = "FIRST_CALL"  # the module's list that is empty after its first call


def relied_on(program: Program, schedule: Schedule) -> frozenset[str]:
    """Tensors whose layout the program itself makes use of: kernels read them, calls and callers
    get a part of them, or callers get what an operator of the user's has made."""
    names: set[str] = set()
    makers: dict[str, Extern] = {}
    for step in schedule.steps:
        if not isinstance(step, Extern):
            names.update(n for n, _ in (*step.reads, *step.writes))
            continue
        makers.update((n, step) for n in step.names if n is not None)
        names.update(n for n in step.aliases if n is not None)
        for v in views((step.args, tuple(v for _, v in step.kwargs))):
            if not is_whole_tensor(v, schedule.layouts[v.tensor]):
                names.add(v.tensor)
    for o in program.outputs:
        if o.tensor is None:
            continue
        call = makers.get(o.tensor)
        if (
            not is_whole_tensor(o, schedule.layouts[o.tensor])
            or call is not None
            and not is_known_operator(call)
        ):
            names.add(o.tensor)
    # What is written into, or seen through, another's memory.
    owners = {n: schedule.aliases.get(n, n) for n in names}
    return frozenset((*names, *owners.values()))


def is_known_operator(d: Extern) -> bool:
    """Whether the operator is torch's own, or one of ours."""
    return d.op.startswith(KNOWN_NAMESPACES)


def is_fixed(d: Extern) -> bool:
    """Whether results have the sizes and the dtype of the first call in every call: ATen's own
    operators, but for those that it marks as depending on data, compute them of the arguments'
    sizes, strides and dtypes, which are fixed. (Strides depend on settings, as cuDNN's, too.)"""
    fixed = all(
        i.value is not None
        for v in views((d.args, tuple(v for _, v in d.kwargs)))
        for i in (*v.shape, *v.strides)
    )
    results = (lay for lay in d.layouts if lay is not None)
    fixed = fixed and all(i.value is not None for r in results for i in (*r.shape, *r.strides))
    if not fixed or any(d.sizes) or not d.op.startswith(("aten.", "prims.")):
        return False
    operator: Any = torch.ops
    for part in d.op.split("."):
        operator = getattr(operator, part, None)
    quantized = any(lay is not None and lay.dtype == "quantized" for lay in d.layouts)
    return not quantized and not VARYING_RESULTS.intersection(
        getattr(operator, "tags", VARYING_RESULTS)
    )


def is_whole_tensor(v: ViewArg | Output, lay: Layout) -> bool:
    if v.shape != lay.shape or v.offset.value != 0:
        return False
    return all(
        a is b or n.value == 1 for a, b, n in zip(v.strides, lay.strides, v.shape, strict=True)
    )


def is_compared(d: Extern, k: int) -> bool:
    """Whether result k is compared at all."""
    lay = d.layouts[k]
    if d.names[k] is None or lay is None or lay.dtype not in ITEMSIZE or lay.dtype == "quantized":
        return False
    return not (d.aliases and d.aliases[k] is not None and is_known_operator(d))


def comparison(d: Extern, k: int, v: str, used: bool) -> list[str]:
    """The lines for result k, in variable `v`; `used`: whether the program relies on it."""
    lay = d.layouts[k]
    assert lay is not None
    shape, strides, dtype = sizes_text(lay.shape), sizes_text(lay.strides), dtype_text(lay.dtype)
    if is_fixed(d):
        tests = [f"{v} is None", FIRST_CALL]
    else:
        tests = [f"{v} is None", f"{v}.shape != {shape}", f"{v}.dtype is not {dtype}"]
    if not is_known_operator(d):
        kind, _, number = lay.device.partition(":")
        there = f"not {v}.is_cpu" if kind == "cpu" else f"{v}.get_device() != {int(number or 0)}"
        tests += [f"{v}.layout is not torch.strided", there, f"{v}.is_neg()"]
    tests += [f"{v}.stride() != {strides}"]
    where = next((o.line for o in d.origins if o.line), "")
    own = not (d.aliases and d.aliases[k] is not None)
    claim = f"({shape}, {strides}, {dtype}, {lay.device!r})"
    about = f"{d.op!r}, {where!r}, {k}, {used}, {own}"
    return [f"if {' or '.join(tests)}:", f"    {v} = checked_result({v}, {claim}, {about})"]


__all__ = ["FIRST_CALL", "KNOWN_NAMESPACES", "comparison", "is_compared", "relied_on"]
