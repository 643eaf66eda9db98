"""`deuteron.explain(fn, *args)`: compiles a call and tells what was decided, as text and as data.

In: a function or module and its arguments. Out: an `Explanation`. The call leaves nothing behind:
gradients go to no `.grad`, buffers and the random state are as before.
"""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo
from torch.utils._pytree import tree_leaves

from deuteron.backend import collecting, deuteron_backend
from deuteron.base.observing import observed_by
from deuteron.base.record import Record
from deuteron.base.text import one_line
from deuteron.tools import explain_text
from deuteron.tools.measuring import distinct, interleaved, others_of, peak_bytes
from deuteron.tools.observe import Observations
from deuteron.tools.report_data import (
    GraphBreak,
    Report,
    breaks_of,
    frames_of,
    report_data,
)
from deuteron.tools.target import owners
from deuteron.tools.why import why

# Calls whose steps are timed, at least and at most, while this many seconds are not over; and
# rounds of whole calls at least, for about as long. Seconds for steps of which a call still finds
# the sum of least times shorter by more than this share.
LEAST_CALLS, MOST_CALLS, SECONDS, LEAST_ROUNDS = 2, 12, 1.0, 0
PATIENCE, STEADY = 5.0, 0.05
# Times that a call is compiled again before it is timed.
MOST_VERSIONS = 3


def printable(text: str) -> str:
    """The text without what a terminal would obey: names of files and modules may hold anything."""
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


@dataclass(repr=False)
class Explanation:
    """What was compiled and why so.

    ``print(explanation)`` is short and sorted by time; `full` has every kernel and decision; `why`
    answers a question; `data` is everything as plain values (`tools.report_data.Report`), `to_json`
    the same as text. `graphs` are the compiler's own Records.
    """

    data: Report
    graphs: list[Record] = field(default_factory=list)

    # -- what is in it --------------------------------------------------------------------------
    @property
    def headline(self) -> str:
        """Operations, kernels, bytes and time in one line."""
        return self.data["headline"]

    @property
    def breaks(self) -> list[GraphBreak]:
        """Where Dynamo broke the graph, each place once, with file and line."""
        return self.data["breaks"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Kernels and library calls of all parts, the longest first."""
        steps = [s for p in self.data["parts"] for s in p["steps"] if s["kind"] != "view"]
        return sorted(steps, key=lambda s: -s["us"])

    @property
    def refusals(self) -> list[dict[str, Any]]:
        """Pairs of operations that share no kernel although they share a tensor."""
        return [r for p in self.data["parts"] for r in p["refusals"]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All entries of a kind (see `base.record`), of all graphs."""
        return [entry for record in self.graphs for entry in record.of(kind)]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """Entries "kernel" of the Records, in order of execution."""
        return self.of("kernel")

    @property
    def library_calls(self) -> list[dict[str, Any]]:
        """Entries "library" of the Records: operators that are called, and why."""
        return self.of("library")

    @property
    def fallbacks(self) -> list[dict[str, Any]]:
        """Entries "fallback" of the Records: graphs that run through ATen, and why."""
        return self.of("fallback")

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Entries "decision" of the Records: everything that a pass accepted or refused."""
        return self.of("decision")

    # -- as text and data -----------------------------------------------------------------------
    def why(self, first: str, second: str) -> str:
        """Why two things share a kernel, or do not, in a sentence. A thing is a module's path
        ("layers.0.norm"), an operation ("softmax"), a line ("model.py:12") or a kernel's name."""
        return why(self.data, first, second)

    def full(self) -> str:
        """Every kernel, library call and decision."""
        return printable(explain_text.full(self.data))

    def to_dict(self) -> Report:
        """`data`."""
        return self.data

    def to_json(self) -> str:
        """`data` as JSON: ``{"schema": "deuteron.report", "version": 1, ...}``."""
        return json.dumps(self.data, indent=1, default=str)

    def save(self, path: str) -> None:
        """Writes the report as one HTML file, and beside it the same as JSON."""
        from deuteron.tools.report_file import write

        write(self.data, path)

    def __str__(self) -> str:
        return printable(explain_text.short(self.data))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """What notebooks show: the headline, and the text behind a fold."""
        return (
            f"<details open><summary><b>{html.escape(self.headline)}</b></summary>"
            f"<pre>{html.escape(explain_text.body(self.data))}</pre></details>"
        )


# ----------------------------------------------------------------------------------- running


def explain(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    measure: bool = False,
    name: str = "",
    progress: Callable[[str], None] = lambda what: None,
    **kwargs: Any,
) -> Explanation:
    """Compiles ``fn(*args, **kwargs)`` anew, runs it once and tells what was compiled, and why so.

    `backward`: compile the backward too; None: when some output requires grad; False: inference.
    `measure`: run it some ten times more, and eager beside it, and tell the times of every kernel.
    A compiled module is explained by what it was compiled from. `name`: what the report calls it;
    `progress` is told what is being done.
    """
    fn = getattr(fn, "_orig_mod", fn)
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    seen = Observations()
    begun = dynamo.get_compilation_metrics(), len(dynamo.graph_break_reasons)
    times: dict[str, Any] = {}
    with unchanged(fn, args, kwargs):
        with collecting() as graphs, observed_by(seen):
            # A code object of its own: nothing that was compiled before is found or displaced.
            compiled = torch.compile(
                distinct(fn, "explained"),
                backend=deuteron_backend,
                dynamic=dynamic,
                options=dict(options) if options else None,
            )
            progress("compiling")
            run(compiled, fn, args, kwargs, backward)
            if measure:
                graphs = settled(lambda: run(compiled, fn, args, kwargs, backward), seen, graphs)
        if measure:
            with others_of(times):
                progress("timing each kernel")
                time_steps(lambda: run(compiled, fn, args, kwargs, backward), seen)
                progress("timing calls")
                times |= timed(compiled, fn, args, kwargs, backward)
    title = name or getattr(fn, "__name__", type(fn).__name__)
    # Dynamo keeps the last 64.
    known = {id(m) for m in begun[0]}
    new = [m for m in dynamo.get_compilation_metrics() if id(m) not in known]
    frames = frames_of(new, title)
    breaks = breaks_of(dynamo.graph_break_reasons[begun[1] :])
    progress("writing down")
    return Explanation(report_data(seen, graphs, title, breaks, frames, **times), graphs)


def time_steps(call: Callable[[], Any], seen: Observations) -> None:
    """Calls whose steps are timed, until that is enough."""
    begin, sums = perf_counter(), list[float]()
    seen.policy.on = True
    while not enough(sums, perf_counter() - begin):
        call()
        sums.append(sum(us for _, p in seen.parts for us in p.us.values()))
    seen.policy.on = False


def enough(sums: Sequence[float], seconds: float) -> bool:
    """Whether steps were timed often enough: `sums` of what all took at least, after each call.
    Other programs stop a thread for longer than a step takes; while calls still find steps that are
    faster, more of them are needed."""
    if len(sums) < LEAST_CALLS or len(sums) >= MOST_CALLS:
        return len(sums) >= MOST_CALLS
    faster = sums[-1] < (1 - STEADY) * sums[-2]
    return seconds >= (PATIENCE if faster else SECONDS)


def settled(call: Callable[[], Any], seen: Observations, graphs: list[Record]) -> list[Record]:
    """Calls until nothing more is compiled: a call may change what its own guards look at (a model
    that notes in its configuration what it was given). Graphs that later calls do not use are
    dropped, with their Records; why they were compiled again stays in the frames."""
    for _ in range(MOST_VERSIONS):
        known = len(seen.graphs)
        before = {id(p): p.calls for _, p in seen.parts}
        call()
        if len(seen.graphs) == known:
            break
    gone: set[int] = set()
    for g in list(seen.graphs):
        if all(p.calls == before.get(id(p), 0) for p in g.parts):
            seen.graphs = [x for x in seen.graphs if x is not g]
            gone |= {id(p.record) for p in g.parts}
    return [r for r in graphs if id(r) not in gone]


def run(call: Any, fn: Any, args: Any, kwargs: Any, backward: bool | None) -> Any:
    """One call, with its backward where there is one (or was asked for: else `ValueError`). With
    `backward` False it is inference: nothing is kept for a backward."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and backward is not False):
        out = call(*args, **kwargs)
    roots = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t for t in inputs_of(fn, args, kwargs) if t.requires_grad and t.is_leaf]
    if backward and not (roots and leaves):
        raise ValueError("there is no backward: no output depends on a tensor that requires grad")
    if roots and leaves and backward is not False:
        grads = [torch.ones_like(t) for t in roots]
        return out, torch.autograd.grad(roots, leaves, grads, allow_unused=True)
    return out


def timed(compiled: Any, fn: Any, args: Any, kwargs: Any, backward: bool | None) -> dict[str, Any]:
    """Whole calls: ours and eager's, in turn; the most memory of ours."""
    on_gpu = any(t.is_cuda for t in inputs_of(fn, args, kwargs))
    device = "cuda" if on_gpu else "cpu"

    def ours() -> Any:
        return run(compiled, fn, args, kwargs, backward)

    def eager() -> Any:
        return run(fn, fn, args, kwargs, backward)

    times = interleaved([ours, eager], SECONDS, device, LEAST_ROUNDS)
    medians = [statistics.median(t) * 1e6 for t in times]
    return {
        "call_us": medians[0],
        "eager_us": medians[1],
        "peak_bytes": peak_bytes(ours, device),
    }


def inputs_of(fn: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that the call can reach: arguments, and what the function names outside of itself."""
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    for owner in owners(fn).values():
        inputs += owner.parameters() if isinstance(owner, nn.Module) else [owner]
    return list({id(t): t for t in inputs}.values())


@contextmanager
def unchanged(fn: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Puts back buffers, the values of arguments, and the random state."""
    modules = [o for o in owners(fn).values() if isinstance(o, nn.Module)]
    buffers = [b for m in modules for b in m.buffers()]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)] + buffers
    copies = [(t, t._version, t.detach().clone()) for t in tensors]
    devices = list({t.device for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for t, version, value in copies:
            if t._version != version:
                t.detach().copy_(value)


__all__ = ["Explanation", "explain", "inputs_of", "run", "unchanged"]
