"""`deuteron.explain(fn, *args)`: compiles a call and tells what was decided, as text and as data.

In: a function or module and its arguments. Out: an `Explanation`, a view of the Records that the
compilation of the forward and the backward wrote. The call leaves nothing behind: gradients go to
no `.grad`, buffers and the random state are as before.
"""

from __future__ import annotations

import json
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deuteron.backend import collecting, deuteron_backend
from deuteron.base.record import Record
from deuteron.tools.measuring import distinct


@dataclass
class Explanation:
    """What was compiled, in the order in which it was compiled."""

    graphs: list[Record] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All entries of a kind (see `base.record`), of all graphs."""
        return [entry for record in self.graphs for entry in record.of(kind)]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return self.of("kernel")

    @property
    def library_calls(self) -> list[dict[str, Any]]:
        return self.of("library")

    @property
    def fallbacks(self) -> list[dict[str, Any]]:
        return self.of("fallback")

    @property
    def decisions(self) -> list[dict[str, Any]]:
        return self.of("decision")

    def to_dict(self) -> dict[str, Any]:
        return {"graphs": [r.entries for r in self.graphs], "graph_breaks": self.breaks}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, default=str)

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graphs compiled, {len(self.breaks)} graph breaks"]
        lines += [f"  graph break: {reason}" for reason in self.breaks]
        for record in self.graphs:
            lines += ["", *graph_lines(record)]
        return "\n".join(lines)


# -------------------------------------------------------------------------------------- text


def amount(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def graph_lines(record: Record) -> Iterator[str]:
    about = next(iter(record.of("graph")), {})
    kernels, library = record.of("kernel"), record.of("library")
    predicted = sum(k.get("predicted_us", 0.0) for k in kernels)
    moved = sum(k.get("bytes", 0) for k in kernels)
    yield (
        f"{about.get('phase', 'graph')}: {about.get('nodes', '?')} nodes -> {len(kernels)} kernels "
        f"({amount(moved, 'B')}, predicted {predicted:.1f} us), {len(library)} library calls"
    )
    for kernel in kernels:
        yield from kernel_lines(kernel)
    yield from library_lines(library)
    yield from decision_lines(record.of("decision"))
    for entry in record.of("unordered"):
        yield f"  may differ from run to run: {entry['what']}: {entry['reason']}"
        for line in lines_of(entry):
            yield f"    from {line}"
    for entry in record.of("fallback"):
        yield f"  fallback: {entry.get('what', '')}: {entry.get('reason', '')}"


def kernel_lines(kernel: Mapping[str, Any]) -> Iterator[str]:
    size, work = amount(kernel.get("bytes", 0), "B"), amount(kernel.get("flops", 0), "FLOP")
    predicted = kernel.get("predicted_us", 0.0)
    yield f"  kernel {kernel['name']}: {size}, {work}, predicted {predicted:.1f} us"
    ops = Counter(map(str, kernel.get("ops", ())))
    if ops:
        yield "    " + ", ".join(f"{op} x{n}" if n > 1 else op for op, n in ops.items())
    for line in lines_of(kernel):
        yield f"    from {line}"


def lines_of(entry: Mapping[str, Any]) -> list[str]:
    """The user's source lines, each once."""
    lines = []
    for origin in entry.get("origins", ()):
        line = origin.get("line", "") if isinstance(origin, Mapping) else str(origin)
        if line and line not in lines:
            lines.append(line)
    return lines


def library_lines(library: list[dict[str, Any]]) -> Iterator[str]:
    """Calls of one op for one reason as one line."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in library:
        groups[str(entry.get("op", "")), str(entry.get("reason", ""))] += lines_of(entry)
    counts = Counter((str(e.get("op", "")), str(e.get("reason", ""))) for e in library)
    for (op, reason), lines in groups.items():
        times = f" x{counts[op, reason]}" if counts[op, reason] > 1 else ""
        yield f"  library {op}{times}: {reason}"
        for line in dict.fromkeys(lines):
            yield f"    from {line}"


def decision_lines(decisions: list[dict[str, Any]]) -> Iterator[str]:
    """By subject; what was accepted, then what was refused and why."""
    subjects = dict.fromkeys(str(d.get("subject", "")) for d in decisions)
    for subject in subjects:
        for accepted in (True, False):
            matching = [
                d
                for d in decisions
                if d.get("subject") == subject and bool(d.get("accepted")) is accepted
            ]
            if not matching:
                continue
            yield f"  {subject}: {len(matching)} {'accepted' if accepted else 'refused'}"
            for d in matching:
                yield f"    {decision_line(d)}"


def decision_line(d: Mapping[str, Any]) -> str:
    pair = " + ".join(str(d[k]) for k in ("first", "second") if d.get(k))
    text = f"{pair}: {d.get('reason', '')}"
    if d.get("detail"):
        text += f" ({d['detail']})"
    stake = [amount(d["bytes"], "B")] if d.get("bytes") else []
    stake += [f"{d['us']:.2f} us"] if d.get("us") else []
    return text + (f" [{', '.join(stake)}]" if stake else "")


# ----------------------------------------------------------------------------------- running


def explain(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compiles ``fn(*args, **kwargs)`` anew and runs it once.

    `backward`: compile the backward too; None: when some output requires grad. A compiled module
    is explained by what it was compiled from.
    """
    fn = getattr(fn, "_orig_mod", fn)
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    with collecting() as graphs, graph_breaks() as breaks, unchanged(fn, args, kwargs):
        # A code object of its own: nothing that was compiled before is found or displaced.
        call = torch.compile(
            distinct(fn, "explained"), backend=deuteron_backend, dynamic=dynamic, options=options
        )
        out = call(*args, **kwargs)
        roots = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [t for t in inputs_of(fn, args, kwargs) if t.requires_grad and t.is_leaf]
        if backward and not (roots and leaves):
            raise ValueError(
                "there is no backward: no output depends on a tensor that requires grad"
            )
        if roots and leaves and backward is not False:
            torch.autograd.grad(
                roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True
            )
    return Explanation(graphs, breaks)


def inputs_of(fn: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the call can reach: arguments, and the parameters of modules."""
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    owners = [fn, getattr(fn, "__self__", None)]
    owners += [c.cell_contents for c in getattr(fn, "__closure__", None) or () if has_value(c)]
    for owner in owners:
        if isinstance(owner, nn.Module):
            inputs += owner.parameters()
        elif isinstance(owner, Tensor):
            inputs.append(owner)
    return list({id(t): t for t in inputs}.values())


def has_value(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


@contextmanager
def unchanged(fn: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Puts back buffers, the values of arguments, and the random state."""
    owners = [fn, getattr(fn, "__self__", None)]
    buffers = [b for o in owners if isinstance(o, nn.Module) for b in o.buffers()]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)] + buffers
    copies = [(t, t._version, t.detach().clone()) for t in tensors]
    devices = list({t.device for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for t, version, value in copies:
            if t._version != version:
                t.detach().copy_(value)


@contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Collects the reasons of the graph breaks that happen inside."""
    from torch._dynamo.utils import counters

    before = Counter(counters["graph_break"])
    breaks: list[str] = []
    yield breaks
    for reason, times in counters["graph_break"].items():
        # Dynamo goes on with hints and its own context.
        short = " ".join(str(reason).split(" Hint:")[0].split("\n  Hint:")[0].split())
        breaks += [short] * (times - before[reason])
