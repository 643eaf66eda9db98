"""A compiled graph as data: what loading it needs, and nothing that only compiling it needed.

In: what `codegen` made of a graph. Out: an `Artifact`, which becomes a callable (`load`) in this
process, or JSON (`to_json`, `from_json`) and a callable in another one. There is no other way to
load: a graph that was compiled a moment ago and one that a cache kept differ in nothing.
"""

from __future__ import annotations

import base64
import itertools
import marshal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import CodeType
from typing import Any

import torch

from deuteron.base.options import Options
from deuteron.base.record import Record
from deuteron.codegen.assemble import EmittedModule, triton_fields, triton_kernel
from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS
from deuteron.codegen.launch_groups import Launches
from deuteron.codegen.products import Product, Side
from deuteron.codegen.triton.generate import TritonKernel
from deuteron.graph.repeat import Repeat, Result
from deuteron.runtime import build_cpp
from deuteron.runtime.cuda_graphs import with_cuda_graphs
from deuteron.runtime.launch import Call
from deuteron.runtime.launch import load as load_module
from deuteron.runtime.launch_blas import multiply
from deuteron.runtime.launch_cuda import KernelVariants, Launcher
from deuteron.runtime.recordable import Recordable

# Bytes of constants that are kept with a graph; one with more is compiled by every process.
MAX_CONSTANT_BYTES = 1 << 20
_NUMBERS = itertools.count()


def next_number() -> int:
    """The number of a graph in this process."""
    return next(_NUMBERS)


@dataclass(frozen=True)
class Artifact:
    """`triton`: the kernels that the sequences name; `recordable`: what a CUDA graph of it would
    be, where one was asked for; `code`: the module's text, compiled, where a cache had that."""

    phase: str
    emitted: EmittedModule
    triton: dict[str, TritonKernel]
    recordable: Recordable | None = None
    code: CodeType | None = None

    def why_not_stored(self) -> str:
        """Why this has no text; empty if it has."""
        size = 0
        for name, value in self.emitted.objects.items():
            if isinstance(value, Repeat):
                inner = [a.why_not_stored() if a else "a chunk" for a in value.artifacts.values()]
                if any(inner):
                    return next(filter(None, inner))
                continue
            if type(value) is not torch.Tensor or value.layout != torch.strided:
                return f"{name} is a {type(value).__name__}"
            size += value.untyped_storage().nbytes()
        return f"{size} bytes of constants" if size > MAX_CONSTANT_BYTES else ""

    def to_json(self, path: str) -> dict[str, Any]:
        """`path`: what tracebacks call the module. Its code is this Python's."""
        e = self.emitted
        code = marshal.dumps(compile(e.text, path, "exec"))
        repeated = [(n, x) for n, x in e.objects.items() if isinstance(x, Repeat)]
        steps = {n: _repeat_to_json(x, path) for n, x in repeated}
        return {
            "phase": self.phase,
            "text": e.text,
            "code": base64.b64encode(code).decode(),
            "unit": e.unit,
            "launch_groups": e.launch_groups,
            "sequences": [asdict(q) for q in e.sequences],
            "products": {n: [asdict(p), device] for n, (p, device) in e.products.items()},
            "constants": {n: _tensor_to_json(t) for n, t in e.objects.items() if n not in steps},
            "steps": steps,
            "triton": {n: [triton_fields(k), k.source] for n, k in self.triton.items()},
            "recordable": self.recordable and asdict(self.recordable),
        }

    @staticmethod
    def from_json(known: Mapping[str, Any]) -> Artifact:
        emitted = EmittedModule(
            known["text"],
            known["unit"],
            tuple(known["launch_groups"]),
            tuple(Launches(**_frozen(q)) for q in known["sequences"]),
            {n: _tensor_from_json(t) for n, t in known["constants"].items()}
            | {n: _repeat_from_json(x) for n, x in known["steps"].items()},
            {n: (_product(p), device) for n, (p, device) in known["products"].items()},
        )
        triton = {n: triton_kernel(about, text) for n, (about, text) in known["triton"].items()}
        recordable = known["recordable"] and Recordable(**_frozen(known["recordable"]))
        code = marshal.loads(base64.b64decode(known["code"]))
        return Artifact(known["phase"], emitted, triton, recordable, code)

    def load(
        self,
        options: Options,
        record: Record,
        path: str = "",
        library: build_cpp.Build | None = None,
        variants: dict[tuple[str, str], KernelVariants] | None = None,
        extra: Mapping[str, Any] | None = None,
        around: Callable[[Call], Call] | None = None,
    ) -> Call:
        """The callable. `path`: what tracebacks call a module whose text is not compiled yet;
        `library`, `variants`: builds that have been started; `extra`: what the module finds under
        these names, a launcher's too; `around`: wraps its ``call``."""
        e = self.emitted
        if e.unit and library is None:
            library = build_cpp.submit(e.unit, KERNEL_CXX_FLAGS, options)
        given = dict(extra or {})
        built = {} if variants is None else variants
        for q in e.sequences:
            if q.name not in given:
                kernels = [self.triton[n] for n in q.kernels]
                given[q.name] = Launcher(
                    kernels, q.operands, q.sizes, q.device, options, built, record
                )
        for name, (product, device) in e.products.items():
            if name not in given:
                given[name] = multiply(product, device, options)
        for step in e.objects.values():
            if isinstance(step, Repeat):
                for count, artifact in step.artifacts.items():
                    if count not in step.compiled:
                        step.compiled[count] = artifact.load(options, record, path)
        code = self.code or compile(e.text, path, "exec")
        call = load_module(e, library, given, code)
        if around is not None:
            call = around(call)
        if self.recordable is not None:
            call = with_cuda_graphs(call, self.recordable, e, self.phase, options, record)
        return call


def _repeat_to_json(step: Repeat, path: str) -> dict[str, Any]:
    results = [
        [r.kind, list(r.shape), str(r.dtype).removeprefix("torch."), str(r.device)]
        for r in step.results
    ]
    return {
        "rows": step.rows,
        "chunk": step.chunk,
        "along": list(step.along),
        "results": results,
        "bodies": {str(count): a.to_json(path) for count, a in step.artifacts.items()},
    }


def _repeat_from_json(known: Mapping[str, Any]) -> Repeat:
    results = tuple(
        Result(kind, tuple(shape), getattr(torch, dtype), torch.device(device))
        for kind, shape, dtype, device in known["results"]
    )
    step = Repeat(known["rows"], known["chunk"], tuple(known["along"]), results, {})
    step.artifacts.update({int(n): Artifact.from_json(a) for n, a in known["bodies"].items()})
    return step


def _frozen(known: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with tuples for JSON's lists."""

    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    return {name: tuples(x) for name, x in known.items()}


def _product(known: Mapping[str, Any]) -> Product:
    sides = {name: Side(**known[name]) for name in ("a", "b", "out")}
    return Product(**{**known, **sides})


def _tensor_to_json(t: torch.Tensor) -> dict[str, Any]:
    whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    return {
        "bytes": base64.b64encode(bytes(whole.cpu().tolist())).decode(),
        "dtype": str(t.dtype).removeprefix("torch."),
        "device": str(t.device),
        "place": [list(t.shape), list(t.stride()), t.storage_offset()],
    }


def _tensor_from_json(known: Mapping[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(known["bytes"]))
    dtype = getattr(torch, known["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.to(known["device"]).as_strided(*known["place"])


__all__ = ["Artifact", "next_number"]
