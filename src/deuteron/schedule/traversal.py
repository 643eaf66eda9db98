"""Traversal order and cache retention: from which end a GPU's kernel goes through memory, and what
the L2 keeps of it.

In: steps in execution order. Out: the same, of which some kernels begin at the end
(`Kernel.reverse`): where what they read is larger than the L2 and the step before has just read or
written it from its begin, the last part of it is still there. H200, us: softmax of 16 rows of
4194304 (bf16, in parts) 107, so 103. Of some the L2 is to
keep what they read (`Kernel.retain_in_l2`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deuteron.base.device import DeviceSpec
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import Extern, Layout, tensors_read
from deuteron.schedule.kernel import Kernel, Step
from deuteron.schedule.profit import bytes_of

# A tensor counts from so much of the L2 on; so many L2s of other bytes later little of it is left.
MIN_TENSOR_SHARE, MAX_BYTES_BETWEEN = 0.25, 0.5


def with_traversal(
    steps: Sequence[Step], layouts: Mapping[str, Layout], specs: Mapping[str, DeviceSpec]
) -> list[Step]:
    """The steps, with kernels that go the other way than those before them."""
    out: list[Step] = []
    last: dict[str, tuple[float, bool]] = {}  # tensor -> bytes moved until then, which way
    moved = 0.0
    calls = any(isinstance(s, Extern) for s in steps)
    for step in steps:
        if isinstance(step, Kernel):
            spec, touched = specs[step.device], [n for n, _ in (*step.reads, *step.writes)]
            walks = not any(n.row_split is not None for n in step.nests)  # else splits, all at once
            walks &= step.contraction is None
            if spec.kind == "cuda" and walks and step.bytes > spec.l2:
                step = replace(step, reverse=_backwards(step, last, moved, layouts, spec))
            if not calls and retains_in_l2(step, spec):
                step = replace(step, retain_in_l2=True)
            back, moved = step.reverse, moved + step.bytes
        else:
            listed = [n for n in (*tensors_read(step), *step.names) if n is not None]
            touched = [n for n in listed if layouts[n].dtype in ITEMSIZE]
            walks, back = True, False
            moved += sum(bytes_of(layouts[n]) for n in touched)
        for n in touched:
            last.pop(n, None)
            if walks:
                last[n] = moved, back
        out.append(step)
    return out


def retains_in_l2(kernel: Kernel, spec: DeviceSpec) -> bool:
    """Whether what a kernel that stores elements reads once is marked to stay in the L2, so that
    the L2 gives up what was stored first: in kernels that move more than it holds, where nothing of
    either is there for the next kernel; not in programs that call libraries, which have other use
    for it. H200, us without and with that: softmax, 32768 rows of 8192, bf16, 258 and 249,
    standardized rows of 4096, f32, 260 and 249, running sums 131 and 126, gradient of a mean square
    92 and 88, copies into other places 128 and 126. (What is only read takes longer with it: 66 and
    70; in cooperative rows softmax of rows of 32768 288 and 291. What is stored marked to go first:
    no gain.)"""
    new = spec.kind == "cuda" and (spec.capability or (0, 0)) >= (9, 0)
    return new and kernel.bytes > 1.5 * spec.l2


def _backwards(
    kernel: Kernel,
    last: Mapping[str, tuple[float, bool]],
    moved: float,
    layouts: Mapping[str, Layout],
    spec: DeviceSpec,
) -> bool:
    """Whether more of what is left in the L2 is at the end."""
    gain = 0.0
    for name, _ in kernel.reads:
        size, (then, back) = bytes_of(layouts[name]), last.get(name, (-1e30, False))
        if size >= MIN_TENSOR_SHARE * spec.l2 and moved - then <= MAX_BYTES_BETWEEN * spec.l2:
            gain += -size if back else size
    return gain > 0


__all__ = ["with_traversal"]
