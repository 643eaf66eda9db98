"""The self-check: each kernel's results against the reference executor, on the same inputs.

In: the program, its kernels as scheduled and as generated. Out: `Watcher.watch`, which the emitted
module calls before each launch and whose result it calls after it. Four things are checked of each
kernel: that what it reads is still what was written there (the memory plan), that its results are
those of the kernel's own loops (the code generators), those of the program's definitions (the
schedule), and those of the traced graph, run by ATen (rewrites and lowering). The first wrong
kernel raises `VerifyError` and leaves a folder from which it runs alone. What the call returns is
compared with the traced graph's outputs (views and strides of results are in no kernel).

How much a result may differ is found out, not fixed: floating inputs, and what the reference
computes of them, are moved by a unit in the last place (`runtime.rounding`). What that does to the
reference's results is what rounding may do to the kernel's.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from deuteron.base.errors import VerifyError
from deuteron.base.memo import MEMO
from deuteron.base.options import Options
from deuteron.codegen.assemble import KernelCode, triton_fields
from deuteron.codegen.cpp.kernels import CppKernel, translation_unit
from deuteron.ir.program import Compute, Extern, Input, Program, tensors_read
from deuteron.ir.reference import compute
from deuteron.lower.unrounded import fully_unrounded
from deuteron.memory.lifetimes import overwritable
from deuteron.runtime.fx_interpreter import FxInterpreter, UnknownValue
from deuteron.runtime.rounding import Roundings, moved
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.printer import kernel_lines
from deuteron.schedule.reference import run_kernel

# Relative errors that are always allowed, in units in the last place: vector functions are within
# 4 ulp, and sums are taken in another order.
ALLOWED_ULPS = 64
# The reference's own change under numbers that moved by an ulp may be exceeded this many times.
NOISE_MARGIN = 8.0
HALF_TYPES = (torch.float16, torch.bfloat16)
COMPARED_TYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
# What is said of a kernel, by the stage that it tells against.
GUILT_TEXT = {
    "generate": "gives a wrong result",
    "schedule": "does not compute what the program says",
    "memory": "reads what was overwritten",
    "lower": "does not compute what was traced",
}
# What ATen does in another order than the loops of a program may round differently at each of many
# steps: the change under moved numbers may be exceeded more often, and more units are allowed.
ATEN_ULPS = 1024
ATEN_NOISE_MARGIN = 32.0


@dataclass(frozen=True)
class Difference:
    """Where a result is wrong, in words and numbers."""

    tensor: str
    wrong: int
    total: int
    at: tuple[int, ...]
    got: Any
    want: Any

    def __str__(self) -> str:
        return (
            f"{self.tensor}{list(self.at)} is {self.got}, the reference says {self.want}; "
            f"{self.wrong} of {self.total} elements differ"
        )


def copy(t: Tensor) -> Tensor:
    """A copy with the same strides, as far as the elements reach."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return out.copy_(t) if 0 not in t.stride() or t.numel() < 2 else t.clone()


def compare(
    name: str,
    got: Tensor,
    want: Tensor,
    other: Tensor,
    most: float = ALLOWED_ULPS,
    margin: float = NOISE_MARGIN,
    slack: float = 0.0,
) -> Difference | None:
    """How `got` is not `want`; `other` is what roundings make of it. Elements may differ by
    `most` units in the last place, and by `margin` times that change, or times `slack` if that is
    more; of integers, so many elements may be others."""
    if got.numel() == 0:
        return None
    if not want.dtype.is_floating_point:
        bad = got != want
        spare = int((other != want).sum()) + int(slack)  # decided by rounding
    else:
        a, b, c = got.double(), want.double(), other.double()
        eps = torch.finfo(want.dtype).eps
        finite = b.isfinite() & c.isfinite()
        scale = float(b[finite].abs().mean()) if bool(finite.any()) else 0.0
        noise = max(slack, float((c - b)[finite].abs().max()) if bool(finite.any()) else 0.0)
        ulps = most / 32 if want.dtype in HALF_TYPES else most
        allowed = ulps * eps * (b.abs() + scale) + margin * noise
        bad = ~((a - b).abs() <= allowed) & (a != b) & ~(a.isnan() & b.isnan())
        spare = int((b.isfinite() != c.isfinite()).sum())
    wrong = int(bad.sum())
    if wrong <= spare:
        return None
    at = tuple(int(i) for i in bad.nonzero()[0])
    return Difference(name, wrong, got.numel(), at, got[at].item(), want[at].item())


def widened(t: Tensor, like: Tensor) -> Tensor:
    """A result of which one place was computed along dimensions on which all are the same
    (`schedule.narrow`), at all of them."""
    alike = t.dim() == like.dim() and all(n in (1, m) for n, m in zip(t.shape, like.shape))
    return t.expand(like.shape) if alike else t


def comparable(t: Tensor) -> bool:
    """Whether elements have an order and a difference, as those that kernels make have."""
    return t.layout == torch.strided and t.dtype in COMPARED_TYPES


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are the same ones."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Meaning:
    """What the program says of each tensor, from what was found right so far in one call."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.computes = {d.name: d for d in program.computes()}
        self.called = {
            n for d in program.defs if isinstance(d, Extern) for n in d.names if n is not None
        }
        self.known = {d.name: copy(args[d.position]) for d in program.defs if isinstance(d, Input)}
        self.known |= program.constants
        self.args = [copy(x) if isinstance(x, Tensor) else x for x in args]
        self.wide = fully_unrounded(program)
        self.slack: dict[str, float] = {}  # tensor -> see `compare`

    def note(self, name: str, t: Tensor) -> None:
        """A result that is right, or what a library call gave."""
        self.known[name] = copy(t)

    def spread(self, name: str, want: Tensor, sizes: Mapping[str, int]) -> float:
        """How far a tensor, which is `want`, may go where halves are read before they are rounded:
        the largest change, or the number of integers that change."""
        if not self.wide:
            return 0.0
        got = self.of(name, sizes, {}, self.unrounded, self.wide)
        assert got is not None
        if not want.dtype.is_floating_point:
            self.slack[name] = float((got != want).sum())
        else:
            change = (got.double() - want.double()).abs()
            change = change[change.isfinite()]
            self.slack[name] = float(change.max()) if change.numel() else 0.0
        return self.slack[name]

    def unrounded(self, name: str, t: Tensor) -> Tensor:
        d = self.wide.get(name)
        return t.float() if d is not None and d.layout.dtype == "f32" else t

    def of(
        self,
        name: str,
        sizes: Mapping[str, int],
        made: dict[str, Tensor],
        change: Callable[[str, Tensor], Tensor] = lambda _, t: t,
        computes: Mapping[str, Compute] | None = None,
    ) -> Tensor | None:
        """The value of a tensor; None where it needs a call's result that no kernel has read.
        `made`: what has been computed so far, of known tensors after a `change`."""
        computes = self.computes if computes is None else computes
        todo = [name]
        while todo:
            d = computes.get(todo[-1])
            if todo[-1] in made:
                todo.pop()
                continue
            if todo[-1] in self.known:
                made[todo[-1]] = change(todo[-1], self.known[todo[-1]])
                continue
            if d is None:
                return None
            missing = [n for n in tensors_read(d) if n not in made]
            if d.target is not None and d.target not in made:
                missing.append(d.target)
            if missing:
                todo += missing
                continue
            if d.target is not None:  # it is overwritten: the old value stays known by its name
                old = made[d.target]
                made[d.target] = copy(old)
                compute(d, made, sizes)
                made[d.target] = old
            else:
                compute(d, made, sizes)
            todo.pop()
        return made[name]


class Watcher:
    """The kernels of one graph."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        generated: Mapping[str, KernelCode],
        options: Options,
        program: Program,
        traced: FxInterpreter | None = None,
    ) -> None:
        self.kernels = {k.name: k for k in kernels}
        self.generated, self.options = generated, options
        # Names say which value is meant, unless library calls change tensors in place.
        changed = any(isinstance(d, Extern) and d.mutates for d in program.defs)
        self.program = None if changed else program
        self.owners: dict[str, str] = {}  # tensor -> the one in whose memory it is written
        for d in program.computes():
            if d.target is not None:
                self.owners[d.name] = self.owners.get(d.target, d.target)
        self.nodes = program.nodes
        self.traced = traced
        if traced is not None:
            traced.name(program.nodes)
        self.meaning: Meaning | None = None

    def around(self, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The graph's callable, each call of which starts with its own inputs."""

        def watched(args: list[Any]) -> Any:
            with MEMO.compiling():
                self.meaning = Meaning(self.program, args) if self.program is not None else None
                try:
                    results = call(args)
                    self.check_returned(results)
                    return results
                finally:
                    self.meaning = None

        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched

    def watch(
        self, name: str, tensors: dict[str, Tensor], sizes: dict[str, int]
    ) -> Callable[[], None]:
        """Keeps a kernel's operands; the result, called after it ran, compares."""
        kernel = self.kernels[name]
        given = self.copies(tensors)
        meaning = self.meaning
        if meaning is not None:
            self.check_inputs(kernel, meaning, given, sizes)

        def check() -> None:
            want, other = self.copies(given), self.copies(given, moved)
            try:
                run_kernel(kernel, want, sizes)
                with Roundings():
                    run_kernel(kernel, other, sizes)
            except IndexError:
                return  # the program's own indices are out of range; it raises by itself
            for n, _ in kernel.writes:
                difference = compare(n, tensors[n], want[n], other[n])
                if difference is not None:
                    guilty = "memory" if self.overlaid(kernel, tensors) else "generate"
                    self.fail(kernel, difference, given, want, sizes, guilty)
            if meaning is not None:
                self.check_meaning(kernel, meaning, tensors, given, sizes)

        return check

    def copies(
        self, tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = lambda t: t
    ) -> dict[str, Tensor]:
        """Copies, of which those share memory that the program writes in one another's."""
        made: dict[str, Tensor] = {}
        for n, t in tensors.items():
            owner = self.owners.get(n, n)
            if owner not in made:
                made[owner] = change(copy(t))
        return {n: made[self.owners.get(n, n)] for n in tensors}

    def check_inputs(
        self, kernel: Kernel, meaning: Meaning, given: dict[str, Tensor], sizes: dict[str, int]
    ) -> None:
        """What the kernel reads is what was written there."""
        written = {n for n, _ in kernel.writes}
        for n, _ in kernel.reads:
            known = meaning.known.get(n)
            if known is None:
                if n in meaning.called:
                    meaning.note(n, given[n])
            elif n not in written and not same_elements(given[n], known):
                bad = (given[n] != known) & ~((given[n] != given[n]) & (known != known))
                at = tuple(int(i) for i in bad.nonzero()[0])
                difference = Difference(
                    n, int(bad.sum()), bad.numel(), at, given[n][at].item(), known[at].item()
                )
                self.fail(kernel, difference, given, {**given, n: known}, sizes, "memory")

    def check_meaning(
        self,
        kernel: Kernel,
        meaning: Meaning,
        tensors: dict[str, Tensor],
        given: dict[str, Tensor],
        sizes: dict[str, int],
    ) -> None:
        """The kernel's results are those of the program's definitions."""
        written = [n for n, _ in kernel.writes if n in meaning.computes]
        gone = {meaning.computes[n].target for n in written}  # overwritten by the kernel itself
        names = [n for n in written if n not in gone]
        whole = {n: tensors[n] for n in names}
        right: dict[str, Tensor] = {}
        rounded: dict[str, Tensor] = {}
        for n in names:
            want = meaning.of(n, sizes, right)
            if want is None:
                continue
            with Roundings():
                other = meaning.of(n, sizes, rounded, lambda _, t: moved(t))
            assert other is not None
            slack = meaning.spread(n, want, sizes)
            whole[n] = widened(tensors[n], want)
            difference = compare(n, whole[n], want, other, slack=slack)
            if difference is not None:
                self.fail(kernel, difference, given, {**given, n: want}, sizes, "schedule")
        for n in names:
            difference = self.as_traced(n, whole[n], meaning)
            if difference is not None:
                self.fail(kernel, difference, given, {**given, n: tensors[n]}, sizes, "lower")
        for n in names:
            meaning.note(n, whole[n])

    def as_traced(self, name: str, got: Tensor, meaning: Meaning) -> Difference | None:
        """How a tensor is not what the traced graph says, as far as that can be computed."""
        node = self.nodes.get(name, "")
        if self.traced is None or node not in self.traced.nodes:
            return None
        slack = meaning.slack.get(name, 0.0)
        return self.against(name, got, self.traced.nodes[node], meaning, slack)

    def against(
        self, name: str, got: Tensor, node: fx.Node, meaning: Meaning, slack: float
    ) -> Difference | None:
        assert self.traced is not None
        try:
            with torch.no_grad():
                want = self.traced.value(node, meaning.args, meaning.known)
                with Roundings():
                    other = self.traced.value(node, meaning.args, meaning.known, moved)
        except UnknownValue:
            return None
        if got.shape != want.shape or got.dtype != want.dtype:
            return Difference(name, 1, 1, (), (got.shape, got.dtype), (want.shape, want.dtype))
        if not comparable(want):
            return None
        return compare(name, got, want, other, ATEN_ULPS, ATEN_NOISE_MARGIN, slack)

    def check_returned(self, results: Sequence[Any]) -> None:
        """What the call returns is what the traced graph says."""
        if self.meaning is None or self.traced is None:
            return
        for k, (got, node) in enumerate(zip(results, self.traced.outputs, strict=True)):
            if not isinstance(got, Tensor) or not isinstance(node, fx.Node):
                continue
            assert self.program is not None
            slack = self.meaning.slack.get(self.program.outputs[k].tensor or "", 0.0)
            difference = self.against(f"output {k}", got, node, self.meaning, slack)
            if difference is not None:
                kernel = self.writer(k)
                by = f"kernel {self.generated[kernel.name].name} wrote it; " if kernel else ""
                raise VerifyError(
                    f"the call returns what was not traced: {by}{difference}",
                    hint="this is a bug of Deuteron; please report it with the program",
                    where=next((o.line for o in kernel.origins if o.line), "") if kernel else "",
                    invariant="a call's results are the traced graph's",
                    node=kernel.name if kernel else f"output {k}",
                    guilty="lower",
                )

    def writer(self, output: int) -> Kernel | None:
        """The kernel that wrote a result's memory."""
        assert self.program is not None
        tensor = self.program.outputs[output].tensor
        return next((k for k in self.kernels.values() if tensor in dict(k.writes)), None)

    def fail(
        self,
        kernel: Kernel,
        difference: Difference,
        given: dict[str, Tensor],
        want: dict[str, Tensor],
        sizes: dict[str, int],
        guilty: str,
    ) -> None:
        folder = self.folder(kernel.name)
        generated = self.generated[kernel.name]
        save(folder, kernel, generated, given, want, sizes)
        where = next((o.line for o in kernel.origins if o.line), "")
        command = shlex.join([sys.executable, "-m", "deuteron.runtime.standalone", str(folder)])
        raise VerifyError(
            f"kernel {generated.name} {GUILT_TEXT[guilty]}: {difference}",
            hint=f"its source and inputs are in {folder}; alone: {command}",
            where=where,
            invariant="a kernel's results are the reference executor's",
            node=kernel.name,
            guilty=guilty,
        )

    def overlaid(self, kernel: Kernel, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a result lies over another, or over an operand that the kernel may not
        overwrite."""
        layouts = dict((*kernel.reads, *kernel.writes))
        written = {n for n, _ in kernel.writes}
        for w in written:
            for n in layouts.keys() - {w}:
                (a, b), (c, d) = extent(tensors[w]), extent(tensors[n])
                shared = self.owners.get(w, w) == self.owners.get(n, n)
                over = a < d and c < b and not shared
                if over and (n in written or not overwritable(kernel, w, n, layouts)):
                    return True
        return False

    def folder(self, name: str) -> Path:
        if self.options.debug_dir is None:
            return Path(tempfile.mkdtemp(prefix="deuteron-wrong-"))
        root = Path(self.options.debug_dir)
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"wrong_{name[:60]}_", dir=root))


def extent(t: Tensor) -> tuple[int, int]:
    """The first address and the one after the last."""
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (size * t.itemsize if t.numel() else 0)


def save(
    folder: Path,
    kernel: Kernel,
    generated: KernelCode,
    given: dict[str, Tensor],
    want: dict[str, Tensor],
    sizes: dict[str, int],
) -> None:
    """What `alone` needs to run the kernel by itself and compare."""
    written = [n for n, _ in kernel.writes]
    torch.save(
        {"given": given, "want": {n: want[n] for n in written}},
        folder / "tensors.pt",
    )
    (folder / "kernel.txt").write_text("\n".join(kernel_lines(kernel)) + "\n", encoding="utf-8")
    about: dict[str, Any] = {"sizes": sizes, "device": kernel.device}
    if isinstance(generated, CppKernel):
        (folder / "kernel.cpp").write_text(translation_unit([generated]), encoding="utf-8")
        about |= {
            "name": generated.name,
            "args": [n for _, n in generated.args],
            "symbols": [s.name for s in generated.sizes],
        }
    else:
        (folder / "kernel.py").write_text(generated.source, encoding="utf-8")
        about |= {"triton": triton_fields(generated)}
    (folder / "about.json").write_text(json.dumps(about, indent=1))


__all__ = ["Difference", "Watcher", "compare"]
