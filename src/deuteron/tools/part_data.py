"""One compiled part (a forward, a backward, an inference graph) as plain values for reports.

In: a `tools.observe.Part`. Out: a dictionary of numbers, strings, lists and dictionaries; the keys
are those of `tools.report_data`. Times are microseconds, sizes bytes, at hinted sizes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from deuteron.base.device import DeviceSpec
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.graph.repeat import Repeat
from deuteron.ir.index import atom, hint
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.printer import layout_text
from deuteron.ir.program import Extern, Input, Layout, ViewArg
from deuteron.schedule.kernel import Kernel, Step
from deuteron.schedule.printer import call_lines, kernel_lines
from deuteron.schedule.profit import elements
from deuteron.schedule.uncertain import uncertain
from deuteron.tools.chains import WAIT, live
from deuteron.tools.gpu_facts import gpu_facts
from deuteron.tools.names import Place, op_name, place_of
from deuteron.tools.observe import Captured, Part
from deuteron.tools.tile_data import tile_data

Data = dict[str, Any]
NAMES = re.compile(r"(?<![\w.'])[A-Za-z_]\w*(?![\w(])")
# Decisions with lists of their own, or that say nothing to a user.
SHOWN_ELSEWHERE = ("fuse", "inline", "save", "recompute", "product", "graph cache")
# What of a GPU's limit a library call reaches. H100, GPT-2's training step, 171 calls, attention
# among them: measured times are off by 12 % (f32) and 20 % (bf16) in the median.
REACHED = 0.75
# Operators that torch's counter of operations does not know, and those with their arguments.
COUNTED_AS = {
    torch.ops.aten._addmm_activation: torch.ops.aten.addmm,
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
FX_UNITS = {"f64": "f64", "bf16": "bf16", "f16": "f16", "i8": "int8"}


class PartData:
    """Builds the dictionary: `data`."""

    def __init__(self, graph: Captured, part: Part, sources: dict[str, str]) -> None:
        self.graph, self.part, self.sources = graph, part, sources
        self.id = part.id
        self.loaded = part.loaded
        self.nodes: dict[str, fx.Node] = {n.name: n for n in self.loaded.graph.graph.nodes}
        self.places: dict[Place, int] = {}
        self.layouts = self.loaded.schedule.layouts | self.loaded.program.layouts()
        self.node_of = self._node_of()
        self.chosen = {  # products that somebody had to choose for
            d["first"]: d for d in part.record.of("decision") if d["subject"] == "product"
        }

    def _node_of(self) -> dict[str, str]:
        """Tensor -> the node that it comes from."""
        known = {}
        for d in self.loaded.program.defs:
            names = d.names if isinstance(d, Extern) else (d.name,)
            for o in getattr(d, "origins", ())[-1:]:
                known.update({n: o.node for n in names if n})
        return known

    # -- names ------------------------------------------------------------------------------------
    def place(self, node: str) -> int:
        """The number of a node's place; -1 where nothing is known of it."""
        n = self.nodes.get(node)
        where = place_of(n) if n is not None else Place()
        if where == Place():
            return -1
        return self.places.setdefault(where, len(self.places))

    def input_name(self, position: int, fallback: str) -> str:
        """What the user calls an input of the part."""
        nodes = [n for n in self.nodes.values() if n.op == "placeholder"]
        node = nodes[position] if position < len(nodes) else None
        known = self.described(node.meta.get("desc")) if node is not None else None
        if known is None and node is not None and node.meta.get("desc") is None:
            return self.label(node.name)
        return known or fallback

    def described(self, desc: Any) -> str | None:
        """What the user calls what AOTAutograd describes so; None where that is not known."""
        kind = type(desc).__name__
        target, idx = getattr(desc, "target", None), getattr(desc, "idx", None)
        if isinstance(target, str):
            return target
        if kind == "PlainAOTInput" and idx is not None and idx < len(self.graph.inputs):
            return self.graph.inputs[idx]
        if kind == "TangentAOTInput":
            of = getattr(getattr(desc, "output", None), "idx", 0)
            return f"gradient of result {of}"
        if kind == "GradAOTOutput":
            of = self.described(desc.grad_of)
            return of and f"gradient of {of}"
        return None

    def gradients(self) -> dict[str, str]:
        """The tensors that are gradients of what the user has given, by name."""
        (node,) = (n for n in self.nodes.values() if n.op == "output")
        descs = node.meta.get("desc") or ()
        found = {
            o.tensor: self.described(d)
            for o, d in zip(self.loaded.program.outputs, descs)
            if o.tensor is not None and type(d).__name__ == "GradAOTOutput"
        }
        return {n: text for n, text in found.items() if text}

    def label(self, name: str) -> str:
        """A tensor or node as the user may know it: "layers.0.norm: rsqrt"."""
        n = self.nodes.get(self.node_of.get(name, name))
        if n is None:
            return name
        where = place_of(n)
        op = op_name(n.target) if n.op == "call_function" else n.name
        if n.op == "call_function" and op == "getitem" and isinstance(n.args[0], fx.Node):
            op = op_name(n.args[0].target)
        place = where.module or where.where()
        return f"{place}: {op}" if place else op

    # -- the whole --------------------------------------------------------------------------------
    def data(self) -> Data:
        record = self.part.record
        steps = [self.step(k, s) for k, s in enumerate(self.loaded.schedule.steps)]
        last = {(d["first"], d["second"]): d for d in decisions(record, "fuse")}  # the last counts
        refused = [self.refusal(d) for d in last.values() if not d["accepted"]]
        calls = [n for n in self.nodes.values() if n.op == "call_function"]
        operations = sum(op_name(n.target) != "getitem" for n in calls)
        tensors = self.tensors(steps)
        return {
            "id": self.id,
            "graph": self.graph.number,
            "phase": self.part.phase,
            "operations": operations,
            "recomputed": sum(self.is_recomputed(n) for n in calls),
            "steps": steps,
            "tensors": tensors,
            "memory": live(tensors, [0] * len(steps)) | {
                "inputs": sum(t["bytes"] for t in tensors.values() if t["kind"] == "input")
            },
            "refusals": refused,
            "saved": [self.decided(d) for d in decisions(record, "save")],
            "again": [self.decided(d) for d in decisions(record, "recompute")],
            "decisions": [self.decided(d) for d in record.of("decision")
                          if d["subject"] not in SHOWN_ELSEWHERE],
            "merges": sum(d["accepted"] for d in decisions(record, "fuse")),
            "unordered": list({(e["what"], e["reason"]): dict(e)
                               for e in record.of("unordered")}.values()),
            "fallbacks": [dict(e) for e in record.of("fallback")],
            "stages": [[e["name"], e["seconds"]] for e in record.of("stage")],
            "passes": [[e["stage"], e["name"], e["seconds"]] for e in record.of("pass")],
            "first_call_s": self.part.first_call_s,
            "places": [place_data(p) for p in self.places],
            **self.totals(steps),
        }  # fmt: skip

    def totals(self, steps: list[Data]) -> Data:
        """Sums over the steps. `least_bytes`: what the part must move at least, its inputs that
        are read and its results, each once."""
        given = {d.name for d in self.loaded.program.defs if isinstance(d, Input)}
        made = {o.tensor for o in self.loaded.program.outputs if o.tensor is not None}
        least = sum(self.touched(n) for n in given)
        least += sum(self.bytes(n) for n in made - given)
        out: Data = {"least_bytes": least}
        for name in ("bytes", "flops", "limit_us", "predicted_us"):
            out[name] = sum(s[name] for s in steps)
        timed = [s["measured_us"] for s in steps if s["measured_us"] is not None]
        out["measured_us"] = sum(timed) if timed else None
        kinds = Counter(s["kind"] for s in steps)
        return out | {"kernels": kinds["kernel"], "library_calls": kinds["library"]}

    def touched(self, name: str) -> int:
        """Bytes of a tensor that somebody reads: all, or as many as the loops have points."""
        most, found = self.bytes(name), 0
        each = ITEMSIZE[self.layouts[name].dtype]
        for s in self.loaded.schedule.steps:
            if isinstance(s, Extern):
                found += most if name in views_in((s.args, tuple(v for _, v in s.kwargs))) else 0
            elif name in dict(s.reads):
                loads = [n for nest in s.nests for e in nest.exprs() for n in e.loads()]
                read = [each * elements(n.attr[1]) for n in loads if n.attr[0] == name]
                found += sum(read) if read else most  # a place that is loaded
        return min(most, found)

    def is_recomputed(self, n: fx.Node) -> bool:
        """Whether the backward does again what the forward has done."""
        tag = n.meta.get("partitioner_tag")
        return self.part.phase == "backward" and tag == "is_forward" and n.op == "call_function"

    # -- steps ------------------------------------------------------------------------------------
    def step(self, k: int, s: Step) -> Data:
        common: Data = self.kernel(s) if isinstance(s, Kernel) else self.call(s)
        ops: list[Data] = [
            {"node": o.node, "op": op_name(o.op), "place": self.place(o.node),
             "again": o.node in self.nodes and self.is_recomputed(self.nodes[o.node])}
            for o in s.origins
        ]  # fmt: skip
        spec = self.part.context.spec(common["device"])
        memory = spec.memory_us(common["bytes"])
        compute = spec.compute_us(common["flops"], common["unit"])
        measured = self.part.us.get(k)
        time: float = measured if measured is not None else common["predicted_us"]
        limit = max(memory, compute)
        return {
            "id": f"{self.id}.{k}",
            **common,
            "ops": ops,
            "places": list(dict.fromkeys(o["place"] for o in ops if o["place"] >= 0)),
            "memory_us": memory,
            "limit_us": limit,
            "limit": "memory" if memory >= compute else "compute",
            "measured_us": measured,
            "us": time,
            "lost_us": max(0.0, time - limit),
            "share": min(1.0, limit / time) if time > 0 else 1.0,
        }

    def kernel(self, k: Kernel) -> Data:
        code = self.loaded.kernels[k.name]
        self.sources.setdefault(code.name, code.source)
        reads, writes = [n for n, _ in k.reads], [n for n, _ in k.writes]
        configs: list[str] = []
        facts: Data = {}
        if isinstance(code, TritonKernel):
            for c in code.configs:
                blocks = ", ".join(f"{n} {v}" for n, v in c.constexprs)
                configs.append(f"{blocks}; {c.num_warps} warps, {c.num_stages} stages".strip("; "))
            sizes = {s.name: hint(atom(s)) for s, _ in self.loaded.program.sizes}
            facts = gpu_facts(code, self.loaded.variants.get((code.name, k.device)), sizes)
        return {
            "kind": "kernel",
            "name": ("cpp_" if k.device == "cpu" else "triton_") + k.name,
            "device": k.device,
            "bytes": k.bytes,
            "flops": k.flops,
            "unit": k.unit,
            "predicted_us": k.predicted_us,
            "reads": reads,
            "writes": writes,
            "nest": "\n".join(kernel_lines(k, self.layouts)[1:]),
            "source": code.name,
            "language": "Triton" if isinstance(code, TritonKernel) else "C++",
            "configs": configs,
            "hardware": facts,
            "tiles": tile_data(k, self.layouts, self.part.context.spec(k.device)),
            "chunks": None,
            "reason": "",
            "uncertain": uncertain(k, self.part.context.spec(k.device)),
            "product": next((product_data(self.chosen[o.node], called=False)
                             for o in k.origins if o.node in self.chosen), None),
        }  # fmt: skip

    def call(self, e: Extern) -> Data:
        results = [n for n in e.names if n]
        reads = list(dict.fromkeys(views_in((e.args, tuple(v for _, v in e.kwargs)))))
        device = self.layouts[results[0] if results else reads[0]].device if results or reads else (
            "cpu"
        )  # fmt: skip
        node = self.nodes.get(e.origins[0].node) if e.origins else None
        idle = e.is_view or e.op == WAIT
        moved = 0 if idle else sum(self.bytes(n) for n in (*reads, *results, *e.mutates))
        flops = 0 if e.is_view or node is None else flops_of(node)
        repeated = node.target if node and isinstance(node.target, Repeat) else None
        lay = self.layouts.get(results[0]) if results else None
        unit = FX_UNITS.get(lay.dtype, "f32") if lay is not None else "f32"
        spec: DeviceSpec = self.part.context.spec(device)
        chosen = self.chosen.get(e.origins[0].node) if e.origins else None
        limit = max(spec.memory_us(moved), spec.compute_us(flops, unit))
        predicted = spec.launch_us + limit / REACHED
        if chosen and spec.kind == "cpu":  # those figures were measured, for each shape
            predicted = chosen["library_us"]
        return {
            "kind": "view" if e.is_view else "library",
            "name": e.op,
            "device": device,
            "bytes": moved,
            "flops": flops,
            "unit": unit,
            "predicted_us": 0.0 if idle else predicted,
            "reads": reads,
            "writes": results + [n for n in e.mutates if n not in results],
            "nest": "\n".join(call_lines(e)),
            "source": "",
            "language": "",
            "configs": [],
            "hardware": {},
            "tiles": None,
            "chunks": chunks(repeated) if repeated else None,
            "uncertain": "",
            "reason": "its rows run in chunks (option chunk_mib)" if repeated else e.reason,
            "product": product_data(chosen, called=True) if chosen else None,
        }

    def bytes(self, name: str) -> int:
        lay = self.layouts.get(name)
        return lay.nbytes_hint if lay is not None else 0

    # -- tensors and memory -----------------------------------------------------------------------
    def tensors(self, steps: list[Data]) -> dict[str, Data]:
        """What lies in memory: names, bytes, from which step to which."""
        program = self.loaded.program
        out: dict[str, Data] = {}
        for d in program.defs:
            if isinstance(d, Input):
                label = self.input_name(d.position, d.name)
                out[d.name] = tensor_data(d.layout, label, "input", 0, len(steps) - 1)
        results = {o.tensor for o in program.outputs if o.tensor is not None}
        gradients = self.gradients()
        placed = {e["name"]: e for e in self.part.record.of("buffer")}
        root = self.loaded.plan.home
        for k, s in enumerate(steps):
            for n in (*s["writes"], *s["reads"]):
                if n in out:
                    out[n]["last"] = max(out[n]["last"], k)
                elif n in self.layouts:
                    kind = "result" if n in results else "between"
                    out[n] = tensor_data(
                        self.layouts[n], gradients.get(n) or self.label(n), kind, k, k
                    )
                    home = root.get(n, n)
                    if home != n:
                        out[n]["in"] = home
        for n, t in out.items():
            if t["kind"] == "result":
                t["last"] = max(len(steps) - 1, 0)
            if n in placed:
                t["place"] = placed[n]["place"]
        return out

    # -- decisions --------------------------------------------------------------------------------
    def refusal(self, d: Mapping[str, Any]) -> Data:
        first, second = str(d["first"]), str(d["second"])
        return {
            "first": first, "second": second,
            "first_label": self.label(first), "second_label": self.label(second),
            "first_node": self.node_of.get(first, first),
            "second_node": self.node_of.get(second, second),
            "reason": d["reason"], "detail": self.worded(str(d["detail"])),
            "bytes": d["bytes"], "us": d["us"],
        }  # fmt: skip

    def worded(self, detail: str) -> str:
        """A detail with labels for the names of tensors."""
        return NAMES.sub(lambda m: self.label(m[0]) if m[0] in self.node_of else m[0], detail)

    def decided(self, d: Mapping[str, Any]) -> Data:
        """A decision, with the user's words for what it is about."""
        plain = {k: v for k, v in d.items() if k != "kind"}
        usual = {"first": "", "second": "", "reason": "", "detail": "", "bytes": 0, "us": 0.0}
        first = str(d.get("first", ""))
        detail = self.worded(str(d.get("detail", "")))
        ends = self.refusal(usual | plain) if d["subject"] == "contract" else {}
        return (
            usual | plain | ends | {"label": self.label(first) if first else "", "detail": detail}
        )


# --------------------------------------------------------------------------------------- helpers
def decisions(record: Any, subject: str) -> list[Data]:
    return [d for d in record.of("decision") if d["subject"] == subject]


def product_data(d: Mapping[str, Any], called: bool) -> Data:
    """Who could multiply, with the estimate of each for the product alone; none of them was chosen
    where it is in a kernel with what surrounds it. `along`: whether each operand is contiguous
    along the sum."""
    us = {"generated": d["generated_us"], "library": d["library_us"]}
    who = "library" if called else "generated" if d["accepted"] else ""
    return {
        "shape": str(d["detail"]).partition(":")[0],
        "along": d["along"],
        "candidates": [
            {"who": k, "us": v, "chosen": k == who} for k, v in us.items() if v is not None
        ],
    }


def chunks(repeat: Repeat) -> Data:
    """The rows of a step that runs in chunks, and its bodies: the part of each, and how often it
    runs in a call."""
    whole = repeat.rows // repeat.chunk
    bodies = (
        (getattr(call, "part", None), whole if size == repeat.chunk else 1)
        for size, call in repeat.compiled.items()
    )
    return {
        "rows": repeat.rows,
        "chunk": repeat.chunk,
        "count": repeat.chunks,
        "bodies": [{"part": part.id, "times": n} for part, n in bodies if part is not None],
    }


def tensor_data(lay: Layout, label: str, kind: str, first: int, last: int) -> Data:
    return {
        "label": label,
        "layout": layout_text(lay),
        "bytes": lay.nbytes_hint,
        "kind": kind,
        "first": first,
        "last": last,
    }


def place_data(p: Place) -> Data:
    return {"module": p.module, "class": p.kind, "file": p.file, "line": p.line, "code": p.code}


def views_in(x: Any) -> Iterable[str]:
    """The tensors among a call's arguments."""
    if isinstance(x, ViewArg):
        yield x.tensor
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from views_in(y)


def sizes(x: Any) -> Any:
    """Shapes of plain numbers in the stead of tensors."""
    if isinstance(x, torch.Tensor):
        return torch.Size([n if isinstance(n, int) else (n.node.hint or 1) for n in x.shape])
    if isinstance(x, (tuple, list)):
        return type(x)(map(sizes, x))
    return x


def flops_of(node: fx.Node) -> float:
    """Of a library call, as torch's own counter has them; 0 for operators that it does not know."""
    if isinstance(node.target, Repeat):
        repeated = node.target
        body = repeated.bodies[repeated.chunk].graph.nodes
        return sum(map(flops_of, body)) * repeated.rows / repeated.chunk
    packet = getattr(node.target, "_overloadpacket", None)
    packet = COUNTED_AS.get(packet, packet)
    count = flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: sizes(n.meta.get("val")))
    if packet is torch.ops.aten.addmm:
        kwargs = {}
    try:
        total = float(count(*args, **kwargs, out_val=sizes(node.meta.get("val"))))
    except (TypeError, AssertionError, ValueError, IndexError):  # its formula is for other forms
        return 0
    return total * visible(node.target, args, kwargs)


def visible(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The share of its scores that a call of attention needs: those that `is_causal` leaves."""
    names = [a.name for a in op._schema.arguments] if hasattr(op, "_schema") else []
    given: Data = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("is_causal") or "query" not in given:
        return 1.0
    queries, keys = given["query"][-2], given["key"][-2]
    seen = min(queries, keys)
    return (seen * (seen + 1) / 2 + (queries - seen) * keys) / (queries * keys)


__all__ = ["PartData"]
