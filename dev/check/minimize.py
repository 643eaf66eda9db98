"""Cuts a failing program down to a small one that fails in the same way.

In: a `Straight` program and its failure, or a file (`python -m dev minimize FILE`). Out: the same,
smaller. Each attempt is a program that eager runs; it is kept when the failure is still there.
Attempts, from coarse to fine: fewer results, fewer lines (what a removed line made becomes an
input, with eager's value), an operand in place of a result, plainer inputs, smaller sizes, fewer
ways of running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dev.check.oracle import copies
from dev.check.test_cases import (
    Failure,
    How,
    Line,
    Loaded,
    Straight,
    Unusable,
    check,
    file_text,
    load,
    straight,
    wide_function,
)


def reduced(
    p: Straight, how: How, failure: Failure, seconds: float = 120.0
) -> tuple[Straight, Failure, How]:
    """The smallest program found in `seconds`, its failure, and how it is run."""
    return Reducer(p, how, failure, seconds).run()


class Reducer:
    def __init__(self, p: Straight, how: How, failure: Failure, seconds: float) -> None:
        self.p, self.how, self.failure = p, how, failure
        self.end = time.perf_counter() + seconds
        self.first = failure
        self.tried: set[str] = set()

    def run(self) -> tuple[Straight, Failure, How]:
        passes = (
            self.results,
            self.lines,
            self.operands,
            self.ways,
            self.plainer,
            self.sizes,
            self.unread,
        )
        while True:
            before = self.signature(self.p, self.how)
            for p in passes:
                p()
            if self.signature(self.p, self.how) == before or self.late():
                return self.p, self.failure, self.how

    def late(self) -> bool:
        return time.perf_counter() > self.end

    def signature(self, p: Straight, how: How) -> str:
        forms = [
            (n, [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in ts])
            for n, ts in p.inputs.items()
        ]
        return f"{p.text()}{forms}{how}"

    def attempt(self, p: Straight, how: How | None = None) -> bool:
        """Takes over `p` where it still fails."""
        how = how or self.how
        key = self.signature(p, how)
        if key in self.tried or self.late():
            return False
        self.tried.add(key)
        try:
            now = p.check(how)
        except (Unusable, SyntaxError):
            return False
        if not self.first.like(now):
            return False
        assert now is not None
        self.p, self.how, self.failure = p, how, now
        return True

    # -- passes -----------------------------------------------------------------------------------
    def results(self) -> None:
        """One result, or all but one."""
        if len(self.p.outputs) > 1:
            for o in self.p.outputs:
                if self.attempt(without_dead(replace(self.p, outputs=(o,)))):
                    return
            for o in self.p.outputs:
                rest = tuple(x for x in self.p.outputs if x != o)
                if rest:
                    self.attempt(replace(self.p, outputs=rest))
        self.attempt(without_dead(self.p))
        for k in range(len(self.p.lines) - 1, 0, -1):  # a value on the way as the result
            target = self.p.lines[k - 1].target if k <= len(self.p.lines) else None
            if target is not None and len(self.p.outputs) == 1:
                self.attempt(replace(self.p, lines=self.p.lines[:k], outputs=(target,)))

    def lines(self) -> None:
        """Fewer lines: halves, quarters, ..., one."""
        size = max(1, len(self.p.lines) // 2)
        while not self.late():
            k = 0
            while k < len(self.p.lines):
                if not self.attempt(without_lines(self.p, k, k + size)):
                    k += size
            if size == 1:
                return
            size //= 2

    def operands(self) -> None:
        """A result replaced by one of its operands, of the same form."""
        k = 0
        while k < len(self.p.lines) and not self.late():
            for p in with_operands(self.p, k):
                if self.attempt(p):
                    break
            k += 1

    def ways(self) -> None:
        """Without backward, with fixed sizes, with fewer sets of inputs."""
        count = len(next(iter(self.p.inputs.values()), ()))
        for k in range(count if count > 1 else 0):
            one = replace(self.p, inputs={n: (ts[k],) for n, ts in self.p.inputs.items()})
            if self.attempt(one):
                break
        if self.how.backward:
            self.attempt(changed(self.p, no_grad), replace(self.how, backward=False))
        if self.how.dynamic:
            self.attempt(self.p, replace(self.how, dynamic=False))

    def plainer(self) -> None:
        """Each input dense, without gradient, ones; then drawn where it is large."""
        for name in self.p.inputs:
            for f in (dense, no_grad, ones):
                self.attempt(changed(self.p, f, name))

    def sizes(self) -> None:
        """A size of the inputs cut, everywhere that it occurs."""
        extents = {n for ts in self.p.inputs.values() for t in ts for n in t.shape if n > 1}
        for n in sorted(extents, reverse=True):
            for m in dict.fromkeys((1, 2, 3, n // 2)):
                if 0 < m < n and self.attempt(changed(self.p, partial(cut, n=n, m=m))):
                    break

    def unread(self) -> None:
        """Inputs that no line reads."""
        used = set(self.p.outputs).union(*(x.words() for x in self.p.lines))
        read = {n: ts for n, ts in self.p.inputs.items() if n in used}
        if read and len(read) < len(self.p.inputs):
            self.attempt(replace(self.p, inputs=read))


# -- smaller programs ------------------------------------------------------------------------------
def without_dead(p: Straight) -> Straight:
    """Without the lines that no result needs; writes count as needed by what they name."""
    needed, lines = set(p.outputs), []
    for x in reversed(p.lines):
        if x.target is None or x.target in needed:
            needed |= x.words()
            lines.append(x)
    return replace(p, lines=tuple(reversed(lines)))


def values(p: Straight) -> list[dict[str, Any]]:
    """What eager computes: each line's value right after it, in each set of inputs."""
    out = []
    for given in p.sets():
        space = p.space()
        torch.manual_seed(0)
        space.update(zip(p.inputs, copies(given)))
        made: dict[str, Any] = {}
        for x in p.lines:
            exec(str(x), space)
            if x.target is not None:
                v = space[x.target]
                made[x.target] = v.detach().clone() if isinstance(v, Tensor) else v
        out.append(made)
    return out


def without_lines(p: Straight, start: int, stop: int) -> Straight:
    """Without some lines. What they made and others read becomes an input."""
    rest = (*p.lines[:start], *p.lines[stop:])
    used = set(p.outputs).union(*(x.words() for x in rest)) if rest else set(p.outputs)
    lost = [x.target for x in p.lines[start:stop] if x.target is not None]
    lost = [t for t in dict.fromkeys(lost) if t in used]
    outputs = tuple(o for o in p.outputs if o not in lost) or p.outputs
    used = set(outputs).union(*(x.words() for x in rest)) if rest else set(outputs)
    lost = [t for t in lost if t in used]
    inputs = dict(p.inputs)
    if lost:
        try:
            known = values(p)
        except Exception:  # noqa: BLE001 - eager does not run it line by line: no smaller program
            return p
        for t in lost:
            row = [v[t] for v in known]
            if all(isinstance(x, Tensor) for x in row):
                inputs[t] = tuple(row)
    return replace(p, inputs=inputs, lines=rest, outputs=outputs)


def with_operands(p: Straight, k: int) -> Iterator[Straight]:
    """Programs in which a line's result is one of its operands."""
    line = p.lines[k]
    if line.target is None:
        return
    for name in sorted(line.words()):
        if name in p.inputs or any(x.target == name for x in p.lines[:k]):
            if line.text != name:
                yield replace(p, lines=(*p.lines[:k], Line(name, line.target), *p.lines[k + 1 :]))


def changed(p: Straight, f: Callable[[Tensor], Tensor], name: str | None = None) -> Straight:
    """With `f` of one input, or of all."""
    return replace(
        p,
        inputs={
            n: tuple(f(t) for t in ts) if name in (None, n) else ts for n, ts in p.inputs.items()
        },
    )


def dense(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)


def no_grad(t: Tensor) -> Tensor:
    return copies([t], grad=False)[0]


def ones(t: Tensor) -> Tensor:
    return copies([t], torch.ones_like)[0]


def cut(t: Tensor, n: int, m: int) -> Tensor:
    """With the first `m` of each axis of `n` elements."""
    out = t.detach()
    for d, size in enumerate(t.shape):
        if size == n:
            out = out.narrow(d, 0, m)
    return out if out is t else out.clone().requires_grad_(t.requires_grad)


# -- files -----------------------------------------------------------------------------------------
def captured(case: Loaded) -> Straight:
    """Any function as a straight program: what Dynamo makes of it, for its first inputs."""
    graphs: list[tuple[Any, list[Any]]] = []

    def keep(gm: Any, inputs: list[Any]) -> Any:
        graphs.append((gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    given = copies(case.sets[0])
    torch.compile(case.fn, backend=keep, fullgraph=True, dynamic=False)(*given)
    if len(graphs) != 1:
        raise Unusable(f"Dynamo makes {len(graphs)} graphs of it")
    gm, real = graphs[0]
    inputs: dict[str, Any] = {}
    for node, x in zip((n for n in gm.graph.nodes if n.op == "placeholder"), real):
        inputs[str(node.target)] = x
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if not isinstance(value, Tensor):
                raise Unusable(f"the graph holds {node.target}, a {type(value).__name__}")
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                made = gm.graph.placeholder(node.name + "_input")
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            inputs = {str(made.target): value, **inputs}
    code = gm.graph.python_code("self")
    source = "\n".join(x for x in code.src.splitlines() if not x.strip().startswith("#"))
    source = source.replace("def forward(self, ", "def fn(").replace("def forward(self", "def fn(")
    imports = tuple(import_text(n, v) for n, v in code.globals.items() if n != "torch")
    order = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [inputs[str(n)] for n in order]
    p = straight(source.strip(), [tensors])
    if p is None:
        raise Unusable("Dynamo's graph is no straight program")
    return replace(p, imports=tuple(x for x in imports if x))


def import_text(name: str, value: Any) -> str:
    """An import that defines a name of FX's code."""
    if name in ("inf", "nan"):
        return f"from math import {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if type(value).__name__ == "module":
        return f"import {own} as {name}"
    if module in ("builtins", None) or own is None:
        return f"from torch import {name}" if hasattr(torch, name) else ""
    return f"from {module} import {own} as {name}"


def run_minimize(path: Path, out: Path, seconds: float, backend: str | None) -> int:
    """The command. Exit status 1 when the file does not fail, 0 when `out` is written."""
    case = load(path, backend)
    failure = check(case.fn, wide_function(case), case.sets, case.how)
    if failure is None:
        print(f"{path} does not fail")
        return 1
    print(failure)
    p = straight(case.source, case.sets)
    if p is None or not failure.like(p.check(case.how)):
        p = captured(case)
        again = p.check(case.how)
        if not failure.like(again):
            print(f"as Dynamo's graph it fails otherwise: {again}")
            return 1
    small, failure, how = reduced(p, case.how, failure, seconds)
    text = file_text(small, how, f"Cut down from {path.name}\n{failure}")
    out.write_text(text, encoding="utf-8")
    print(f"{len(p.lines)} lines cut down to {len(small.lines)}, in {out}:\n\n{text}")
    return 0


__all__ = ["Reducer", "reduced", "run_minimize"]
