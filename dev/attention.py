"""Writes docs/attention.md: how rules make one kernel of attention, with what the compiler prints.

    python -m dev.attention           # writes the file
    python -m dev.attention --check   # exit status 1 where it would write something else

In: docs/attention.in.md, whose {{names}} are keys of `artifacts`. Plans and Triton text are for an
H100 (`tests.schedule.planning`; none is needed), C++ for the two cores of `dev.architecture`.
Tensors and axes have the names of `TENSORS` and `AXES`; nothing else of what is printed is changed.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

from deuteron.backend import deuteron_backend
from deuteron.base.device import DeviceSpec, named_gpu
from deuteron.codegen.triton.generate import generate
from deuteron.ir.nest import Nest, Reduce, roots
from deuteron.ir.printer import layout_text, print_program
from deuteron.ir.program import Compute, Extern, Layout, Program
from deuteron.schedule.closure import closure
from deuteron.schedule.cover import tilings
from deuteron.schedule.kernel import Kernel
from deuteron.schedule.loop_passes import cut_off, passes
from deuteron.schedule.online import Rescaled
from deuteron.schedule.printer import nest_lines, statements
from deuteron.schedule.tiling import Tiling
from deuteron.tools.tile_data import tile_classes
from deuteron.tools.words import amount
from dev import ROOT
from dev.architecture import filled, two_cores, write
from tests.schedule.planning import Plan, planned, trained

DOCUMENT = ROOT / "docs" / "attention.md"
TEMPLATE = ROOT / "docs" / "attention.in.md"
SHAPE = 16, 2048, 128  # heads, places, width
# What the page calls tensors, and results of reductions.
TENSORS = {
    "primals_2": "q", "primals_1": "k", "primals_3": "v", "tangents_1": "dout",
    "bmm": "scores", "amax": "top", "sum_1": "total", "bmm_1": "out", "sum_dim_int_list": "delta",
    "bmm_sum": "s", "amax_sum": "m", "sum_1_sum": "l", "bmm_1_sum": "o",
    "bmm_3_sum": "dp", "bmm_2_sum": "sum_v", "bmm_4_sum": "sum_k", "bmm_5_sum": "sum_q",
    "bmm_2": "dv", "bmm_4": "dk_t", "bmm_5": "dq",
    "_to_copy": "x", "_to_copy_1": "p",
    "_to_copy_default": "dout32", "_to_copy_default_1": "out32", "mul_tensor": "both",
}  # fmt: skip
# And axes: those along a dimension of an input.
AXES = {
    ("primals_2", 0): "h", ("primals_2", 1): "i", ("primals_2", 2): "d",
    ("primals_1", 1): "j", ("primals_3", 1): "j", ("primals_3", 2): "e", ("tangents_1", 2): "e",
}  # fmt: skip


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) * 0.125
    i = torch.arange(q.shape[-2])
    scores = scores.masked_fill(i[:, None] < i, float("-inf"))
    return torch.softmax(scores, -1) @ v


def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i = torch.arange(q.shape[-2])
    hidden = (i[:, None] < i) | (i[:, None] - i >= 256)
    return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf")), -1) @ v


def no_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def running(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(-2, -1)).cumsum(-1), -1) @ v


def loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.t(), target)


# -- text ------------------------------------------------------------------------------------------


def named(text: str, nest: Nest | None = None) -> str:
    """With the page's names."""
    axes: dict[str, str] = {}
    for e in (e for s in nest.statements for e in roots(s)) if nest is not None else ():
        for tensor, index, _ in (n.attr for n in e.loads()):
            for d, place in enumerate(index):
                if (name := AXES.get((tensor, d))) is not None:
                    axes.update((a.name, name) for a in place.axes())
    return re.sub(r"[A-Za-z_]\w*", lambda m: axes.get(m[0], TENSORS.get(m[0], m[0])), text)


def nest_text(nest: Nest) -> str:
    extents: dict[str, str] = {}
    for a in nest.axes:
        extents.setdefault(named(a.name, nest), f"{a.extent!r}")
    head = ", ".join(f"{name} < {extent}" for name, extent in extents.items())
    return "\n".join([f"for {head}:", *(f"    {named(s, nest)}" for s in statements(nest))])


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """`head`: titles, with : behind those of numbers."""
    titles = head.split("|")
    rule = "|".join("---:" if t.endswith(":") else "---" for t in titles)
    body = ("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join([f"| {' | '.join(t.removesuffix(':') for t in titles)} |", f"|{rule}|", *body])


def region(program: Program) -> dict[str, Compute]:
    """All computations, those of products too."""
    found: dict[str, Compute] = {}
    for d in program.defs:
        steps = d.product if isinstance(d, Extern) else (d,) if isinstance(d, Compute) else ()
        found.update((c.name, replace(c, origins=())) for c in steps)
    return found


def definitions(program: Program, names: Iterable[str]) -> str:
    """Some of the computations, as a program prints them."""
    computes, wanted = region(program), set(names)
    inputs = tuple(d for d in program.defs if not isinstance(d, (Compute, Extern)))
    text = print_program(replace(program, defs=(*inputs, *computes.values()), outputs=()))
    parts = re.split(r"\n(?=def )", text.rstrip())[1:]
    return named("\n".join(p for p in parts if p[4 : p.index("(")] in wanted))


# -- what the compiler says ------------------------------------------------------------------------


def readers(computes: dict[str, Compute], tensor: str) -> str:
    """Who reads a tensor, and where."""
    rows = []
    for c in computes.values():
        for n in c.body.loads():
            if n.attr[0] == tensor:
                at = ", ".join(repr(i) for i in n.attr[1])
                over = ", ".join(repr(a) for a in (c.body.attr[1] if c.is_reduction else ()))
                rows.append((f"`{named(c.name)}`", f"`{named(tensor)}[{at}]`", over or "–"))
    return table("reader|reads|reduces over", rows)


def rules(nest: Nest, tiling: Tiling) -> str:
    """In which pass over the keys each reduction runs, and by which rule."""
    (loop,) = [d for d in tiling.dims if d.mode == "loop"]
    chain, of = passes(nest, loop.axes)
    rows = []
    for s in of:
        if isinstance(s, Reduce):
            rule = chain.rules.get(s.name)
            how = "needs no other reduction"
            if isinstance(rule, Rescaled):
                factor = "1" if rule.factor is None else repr(rule.factor)
                how = f"rescaled: e = exp(x - {rule.maximum}), f(e) = e × {factor}"
            rows.append((f"`{named(s.name)}`", of[s] + 1, named(how, nest)))
    return table("reduction|pass|rule", rows)


def bounds(nest: Nest, tiling: Tiling) -> str:
    (loop,) = [d for d in tiling.dims if d.mode == "loop"]
    chain, of = passes(nest, loop.axes)
    cut, _ = cut_off(nest, loop.axes, [s for s in of if isinstance(s, Reduce)], chain)
    lines = (f"{b.axis!r} {'<' if b.upper else '>='} {b.index!r}" for b in cut)
    return named("\n".join(lines), nest)


def classes(plans: dict[str, Plan]) -> str:
    rows = []
    for name, plan in plans.items():
        nest, tiling = contraction(plan.contractions[0])
        (loop,) = [d for d in tiling.dims if d.mode == "loop"]
        found = tile_classes(nest, tiling, loop)
        at = f"{found['rows'] or 'all'} × {found['block']}"
        rows.append((name, at, *(found[k] for k in ("full", "partial", "skipped"))))
    return table("mask|rows × keys of a tile|full:|partial:|skipped:", rows)


def weighed(kernel: Kernel, layouts: dict[str, Layout], spec: DeviceSpec) -> str:
    nest, tiling = contraction(kernel)
    found = tilings(spec).candidates(nest, layouts, spec)
    rows = [
        (f"`{t}`", f"{e.us:.1f}", amount(e.bytes, "B"), "taken" if t == tiling else "")
        for t, e in (*found[:4], found[-1])
    ]
    return f"{len(found)} tilings; the best four and the worst:\n\n" + table(
        "tiling|us, predicted:|bytes:|", rows
    )


def contraction(kernel: Kernel) -> tuple[Nest, Tiling]:
    assert kernel.contraction is not None
    return kernel.contraction


def saved(plan: Plan) -> str:
    """What the partition kept of the forward, and what it computes again."""
    layouts = plan.programs[0].layouts()
    rows = []
    for d in plan.records[0].of("decision"):
        if d["subject"] in ("save", "recompute"):
            name, again = str(d["first"]), d["subject"] == "recompute"
            text = layout_text(layouts[name])
            rows.append((f"`{named(name)}`", f"`{text}`", amount(d["bytes"], "B"),
                         "computed again" if again else "saved", d["reason"]))  # fmt: skip
    return table("tensor|type|bytes:||why", rows)


def backward_schedule(plan: Plan, layouts: dict[str, Layout]) -> str:
    """Each kernel of the backward with what it does."""
    parts = []
    for k in plan.schedules[1].steps:
        assert isinstance(k, Kernel)
        writes = ", ".join(f"`{named(n)}`" for n, _ in k.writes)
        if k.contraction is None:
            text = named("\n".join(line for n in k.nests for line in nest_lines(n, layouts)))
            parts.append(f"Writes {writes}, {k.predicted_us:.1f} us predicted:\n\n```\n{text}\n```")
        else:
            nest, tiling = k.contraction
            text = f"# {tiling}\n{nest_text(nest)}"
            loops = ", ".join(named(repr(a), nest) for d in tiling.dims for a in d.axes
                              if d.mode == "loop")  # fmt: skip
            parts.append(
                f"Writes {writes}, {k.predicted_us:.1f} us predicted, a loop over `{loops}` "
                f"(`{bounds(nest, tiling)}`):\n\n```\n{text}\n```"
            )
    return "\n\n".join(parts)


# -- code ------------------------------------------------------------------------------------------


def excerpt(text: str, first: str) -> str:
    """The loop that begins with `first`: the line, and those that are further in."""
    lines = text.splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip().startswith(first))
    margin = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while len(lines[end]) - len(lines[end].lstrip()) > margin or lines[end].strip()[:1] == "#":
        end += 1
    return "\n".join(line[margin:] for line in lines[start:end])


def compiled(
    f: Callable[..., torch.Tensor], args: list[torch.Tensor], chunk_mib: int = 64
) -> dict[str, str]:
    """The debug folder of a program for the CPU: file -> text; with gradients where they are asked
    for."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"debug_dir": folder, "cache_dir": f"{folder}/cache", "chunk_mib": chunk_mib}
        torch._dynamo.reset()
        with patch("deuteron.base.passes.device_spec_for", two_cores):
            y = torch.compile(f, backend=deuteron_backend, options=options)(*args)
            if y.requires_grad:
                y.backward()
        return {
            f"{p.parent.name.partition('_')[0]}/{p.name}": p.read_text()
            for p in Path(folder).glob("*_*/*.*")
        }


def steps_of(schedule: str) -> str:
    """One line for each kernel and library call: what it writes."""
    lines = []
    for step in re.split(r"^(?=kernel |call\()", schedule, flags=re.MULTILINE)[1:]:
        called = re.match(r"call\(\s*'([\w.]+)'", step)
        made = re.findall(r"result\('(\w+)', (\w+\[.*?\])\)|writes (\w+): (\S.*)", step)
        name = f"call {called[1]}" if called else step.partition(" on ")[0]
        lines.append(f"{name}: " + ", ".join(f"{a or c}: {b or d}" for a, b, c, d in made))
    return "\n".join(lines)


def artifacts() -> dict[str, str]:
    """Name -> text for the template."""
    spec = named_gpu("H100")
    assert spec is not None
    heads = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in range(3)]
    plan = trained(attention, *heads, run=False)
    program, backward = plan.programs
    layouts = [p.layouts() | s.layouts for p, s in zip(plan.programs, plan.schedules, strict=True)]
    computes = region(program)
    nest, tiling = contraction(plan.contractions[0])
    first = closure(computes, ["amax"])
    assert isinstance(first, Nest)
    plain = {"causal": plan}
    with torch.no_grad():
        refused = planned(running, *(h.detach() for h in heads), run=False).decisions(False)
        for f in (window, no_mask):
            plain[f.__name__.replace("_", " ")] = planned(
                f, *(h.detach() for h in heads), run=False
            )
    on_cpu = compiled(attention, [torch.randn(4, 2048, 64) for _ in range(3)])
    rows = [torch.randn(n, 64, requires_grad=True) for n in (2048, 8192)]
    chunks = compiled(loss, [*rows, torch.randint(0, 8192, (2048,))], chunk_mib=16)
    (note,) = re.findall(r'"(2048 rows in [^"]*)"', chunks["captured/record.json"])
    return {
        "attention": inspect.getsource(attention).rstrip(),
        "loss": inspect.getsource(loss).rstrip(),
        "program": definitions(program, computes),
        "readers": readers(computes, "_to_copy"),
        "refused": "\n".join(dict.fromkeys(f"{d['reason']}: {d['detail']}" for d in refused)),
        "first": nest_text(first),
        "nest": nest_text(nest),
        "rules": rules(nest, tiling),
        "bounds": bounds(nest, tiling),
        "classes": classes(plain),
        "tilings": weighed(plan.contractions[0], layouts[0], spec),
        "triton": named(excerpt(generate(plan.contractions[0], spec).source, "for ")),
        "cpp": excerpt(on_cpu["inference/kernels.txt"], "for (int j_at"),
        "saved": saved(plan),
        "delta": definitions(backward, ["mul_tensor", "sum_dim_int_list"]),
        "backward": backward_schedule(plan, layouts[1]),
        "chunks": note,
        "chunk_forward": steps_of(chunks["forward/schedule.txt"]),
        "chunk": steps_of(chunks["chunk/schedule.txt"]),
        "chunk_backward": steps_of(chunks["backward/schedule.txt"]),
    }


def main() -> None:
    made = artifacts()
    write(DOCUMENT, filled(TEMPLATE, lambda match: made[match[1]]))


if __name__ == "__main__":
    main()
