"""Reference executor of kernels: what one launch means, computed by torch.

In: a `Kernel`, tensors by name, sizes by name. The kernel's results are written into the given
tensors. Tests and the run-time self-check compare generated kernels with it. Everything is read
before anything is written, as a kernel's stores only overwrite what their own point has read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deuteron.ir.index import Axis, evaluate
from deuteron.ir.nest import run_nest as contracted
from deuteron.ir.reference import Evaluator, Range, blocks, bound_axes, longest, points, write
from deuteron.ir.reference_ops import reduce, scan
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan, Store

Pending = tuple[str, list[Tensor], Tensor, str | None, Tensor | None]


def run_kernel(kernel: Kernel, tensors: dict[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Executes `kernel`. `tensors` has each tensor that it reads or writes, in its logical
    shape."""
    if kernel.contraction is not None:
        stored = list(contracted(kernel.contraction[0], tensors, sizes, kernel.device))
        for name, at, value in stored:
            write(name, tensors[name], at, value, None, None)
    for part in kernel.nests_between_barriers():
        results: list[Pending] = []
        for nest in part:
            results += run_nest(nest, tensors, sizes, kernel.device)
        for name, at, value, accumulate, mask in results:
            write(name, tensors[name], at, value, accumulate, mask)


def run_nest(
    nest: Nest, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], device: str
) -> list[Pending]:
    """What the nest stores: tensor, positions, values, how, and where."""
    inner = bound_axes(nest.exprs())
    axes = (*nest.parallel, *nest.reduced, *inner)
    out: list[Pending] = []
    known = longest(nest.exprs(), sizes, tensors, device)
    for split, ranges in _splits(nest, (*nest.reduced, *inner), sizes, known):
        if known:
            ranges |= longest(nest.exprs(), sizes, tensors, device, ranges)
        ev = Evaluator(axes, sizes, tensors, device, ranges)
        for s in nest.stmts:
            if isinstance(s, Reduce) and s.partial:
                out.append(_partial(s, nest, ev, split))
            elif isinstance(s, Reduce):
                full = ev.spread(ev.value(s.body), nest.reduced_axes(s))
                dims = [ev.dims[a] for a in nest.reduced_axes(s)]
                ev.locals[s.name] = reduce(s.kind, full, dims, s.body.dtype)
            elif isinstance(s, Scan):
                (axis,) = nest.reduced
                ev.locals[s.name] = scan(
                    s.kind, ev.spread(ev.value(s.body), (axis,)), ev.dims[axis]
                )
            else:
                out.append(_stored(s, nest, ev))
    return out


def _splits(
    nest: Nest, whole: tuple[Axis, ...], sizes: Mapping[str, int], known: Mapping[Axis, Range]
) -> list[tuple[int, dict[Axis, Range]]]:
    """The parts in which the nest is computed: splits' rows, or blocks of its parallel axes."""
    if nest.row_split is None:
        return [(0, r) for r in blocks(nest.parallel, whole, sizes, known)]
    axis, count = nest.row_split
    n = evaluate(axis.extent, sizes)
    step = -(-n // count)
    return [(k, {axis: (min(n, k * step), min(n, (k + 1) * step))}) for k in range(count)]


def _partial(s: Reduce, nest: Nest, ev: Evaluator, split: int) -> Pending:
    """One split's reduction over its rows, for row `split` of the tensor ``[count,
    *reduced]``."""
    full = ev.spread(ev.value(s.body), (*nest.parallel, *nest.reduced))
    value = reduce(s.kind, full, [ev.dims[a] for a in nest.parallel], s.body.dtype)
    at = [torch.full_like(value, split, dtype=torch.int64)]
    at += [ev.index(a.index).expand(value.shape) for a in nest.reduced]
    return s.name, at, value, None, None


def _stored(s: Store, nest: Nest, ev: Evaluator) -> Pending:
    value, at, mask = points(ev, nest.loops(s.level), s.value, s.index, s.mask)
    return s.tensor, at, value, s.accumulate, mask


__all__ = ["run_kernel", "run_nest"]
