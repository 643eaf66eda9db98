"""A backend that runs the Triton kernels of a program under Triton's interpreter, on the CPU.

In: what Dynamo captured, of tensors on the CPU. Out: a callable. Graphs are captured, lowered and
scheduled as ever, the latter for a GPU by name, and each kernel's Triton text is interpreted;
library calls run through ATen. There is no memory plan: every tensor has memory of its own.

The process must have been started with ``TRITON_INTERPRET=1``: Triton reads it when it is imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, fx

from deuteron.backend import deuteron_backend
from deuteron.base.device import DeviceSpec, named_gpu
from deuteron.base.errors import DeuteronError
from deuteron.base.passes import Context
from deuteron.capture.stages import Part
from deuteron.codegen.triton.generate import TritonKernel, generate
from deuteron.ir.index import Sym
from deuteron.ir.program import Constant, Extern, Input, Program
from deuteron.ir.reference import Execution, allocate
from deuteron.pipeline import compiled
from deuteron.runtime.build_triton import module
from deuteron.runtime.launch_cuda import FLAGS_PER_STREAM
from deuteron.runtime.support import AccessError, IndexOutOfRange
from deuteron.runtime.verify import Watcher
from deuteron.schedule.kernel import Kernel, Schedule
from dev.check.concurrent import together
from dev.check.quick import by_halves, quicken

INTERPRETED_GPU = "H200"


@cache
def gpu() -> DeviceSpec:
    """The device whose cost model decides."""
    import triton

    if not triton.knobs.runtime.interpret:
        raise DeuteronError(
            "Triton's interpreter is off in this process", hint="start it with TRITON_INTERPRET=1"
        )
    from triton.runtime import interpreter

    quicken()
    by_halves()
    interpreter.InterpreterBuilder.create_splat = splat
    interpreter.InterpreterBuilder.create_fma = fused
    interpreter.InterpreterBuilder.create_dot = multiplied
    interpreter.ReduceOps.sum = summed
    interpreter._convert_float = partial(converted, interpreter._convert_float)
    spec = named_gpu(INTERPRETED_GPU)
    assert spec is not None
    return spec


def splat(self: Any, block: Any, number: Any) -> Any:
    """A block of one number. Triton's own makes numbers of truth values: it goes by the dtype of
    what was compared."""
    data = numpy.asarray(number.data)
    return type(number)(
        numpy.full(block.shape, data.reshape(-1)[0], data.dtype), number.dtype.scalar
    )


def fused(self: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once, as on GPUs. Triton's own rounds the product, too."""
    kind = c.data.dtype
    with numpy.errstate(all="ignore"):
        out = a.data.astype(numpy.float64) * b.data + c.data  # a product of f32 is exact in f64
        return type(c)(out.astype(kind), c.dtype.scalar)


def multiplied(self: Any, a: Any, b: Any, c: Any, *how: Any) -> Any:
    """``a @ b + c`` of tensor cores. Triton's own multiplies the bits of bfloat16."""
    factors = [
        (x.data.astype(numpy.uint32) << 16).view(numpy.float32) if x.dtype.is_bf16() else x.data
        for x in (a, b)
    ]
    kind = c.data.dtype
    out = numpy.matmul(*(x.astype(numpy.float64) for x in factors)) + c.data
    return type(c)(out.astype(kind), c.dtype.scalar)


def summed(self: Any, block: Any) -> Any:
    """A sum of negative zeros is one, as on GPUs. Triton's own begins at a positive zero."""
    data = block.handle.data
    start = data.dtype.type(-0.0)
    out = numpy.sum(data, axis=self.axis, keepdims=self.keep_dims, initial=start)
    return self.to_tensor(out, block.dtype)


def converted(others: Callable[..., Any], given: Any, kind: Any, to: Any, mode: Any) -> Any:
    """Numbers of another floating type, as bits. Triton's own (`others`) cuts what a GPU rounds to
    bfloat16, and takes bits from bfloat16's subnormal numbers."""
    if kind.is_bf16() and to.is_fp32():
        return given.astype(numpy.uint32) << 16
    if not (kind.is_fp32() and to.is_bf16()):
        return others(given, kind, to, mode)
    rounded = torch.from_numpy(numpy.array(given, numpy.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(numpy.uint16)


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Where kernels' text is while this process runs: Triton reads it from files."""
    return tempfile.TemporaryDirectory(prefix="deuteron-interpreted-")


def loaded(kernel: TritonKernel) -> Callable[..., Any]:
    """The function of a kernel, to be launched as ``f[grid](...)``."""
    quicken()
    path = Path(tempfile.mkdtemp(dir=folder().name)) / f"{kernel.name}.py"
    path.write_text(kernel.source, encoding="utf-8")
    return getattr(module(path), kernel.name)


def compile_interpreted(part: Part, context: Context) -> Callable[[list[Any]], Sequence[Any]]:
    """Takes the place of `pipeline.compile_graph`."""
    context = replace(context, like=gpu().kind, specs=lambda device: gpu())
    made = compiled("rewrite", "schedule", part, context)
    options, program, plan, traced = context.options, made.program, made.schedule, made.traced
    kernels = {k.name: generate(k, gpu(), context) for k in plan.steps if isinstance(k, Kernel)}
    functions = {name: loaded(k) for name, k in kernels.items()}
    steps = [s for s in plan.steps if isinstance(s, Kernel)]
    watcher = Watcher(steps, kernels, options, program, traced) if options.verify else None

    def call(args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        args.clear()
        with torch.no_grad():
            return run(program, plan, kernels, functions, inputs, watcher)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call if watcher is None else watcher.around(call)


def run(
    program: Program,
    plan: Schedule,
    kernels: Mapping[str, TritonKernel],
    functions: Mapping[str, Any],
    inputs: Sequence[Any],
    watcher: Watcher | None = None,
) -> list[Any]:
    """One call: the steps of the schedule, in order; the watcher checks each kernel."""
    run = Execution(program, inputs)
    for d in program.defs:
        if isinstance(d, (Input, Constant)):
            run.define(d)
    for step in plan.steps:
        if isinstance(step, Extern):
            run.define(step)
            continue
        for name, layout in step.writes:
            if name in plan.aliases:
                run.tensors[name] = run.tensors[plan.aliases[name]]
            elif name not in run.tensors:
                run.tensors[name] = unset(allocate(layout, run.sizes))
        check = None
        if watcher is not None:
            own = {n: run.tensors[n] for n in dict((*step.reads, *step.writes))}
            check = watcher.watch(step.name, own, run.sizes)
        launch(kernels[step.name], functions[step.name], run.tensors, run.sizes)
        if check is not None:
            check()
    return [run.output(o) for o in program.outputs]


def unset(t: Tensor) -> Tensor:
    """`t` with values that show where nothing was written."""
    if t.dtype.is_floating_point:
        return t.fill_(float("nan"))
    return t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max // 3)


def readable(t: Tensor) -> Tensor:
    """As kernels see a tensor: 8-bit floats are bytes."""
    return t.view(torch.uint8) if t.is_floating_point() and t.itemsize == 1 else t


def of_64_bits(number: int) -> Any:
    """A size as a kernel for large tensors is given it; the interpreter would make 32 bits of it,
    where it fits them."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(numpy.array([number], dtype=numpy.int64), tl.int64), tl.int64)


def boxes(kernel: TritonKernel, tensors: Sequence[Tensor]) -> list[Any]:
    """What describes the boxes of a kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    out = []
    for b in kernel.boxes:
        t = tensors[b.tensor]
        start = t.as_strided((1,), (1,), b.offset // t.itemsize)
        out.append(TensorDescriptor(start, list(b.extents), list(b.strides), list(b.block)))
    return out


def asserting(wanted: bool) -> None:
    """Whether the interpreter heeds assertions in kernels, which it usually skips."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, debug=wanted, sanitize_overflow=False)


def launch(
    kernel: TritonKernel, function: Any, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> None:
    """Interprets a kernel, every program of its grid. It has only the sizes that it names, as when
    it is launched."""
    own = [what for kind, what in kernel.args if kind == "size" and isinstance(what, Sym)]
    sizes = {s.name: sizes[s.name] for s in own}
    config = kernel.configs[0]
    grid = kernel.grid(config, sizes)
    if grid == 0:
        return
    wide = kernel.is_wide(sizes)
    flags = torch.zeros(max(FLAGS_PER_STREAM, kernel.flag_count(sizes)), dtype=torch.int64)
    given: list[Any] = []
    for kind, what in kernel.args:
        if kind == "tensor":
            given.append(readable(tensors[str(what)]))
        elif kind == "size":
            assert isinstance(what, Sym)
            given.append(of_64_bits(sizes[what.name]) if wide else sizes[what.name])
        elif kind != "box":
            given.append(flags)
    aligned = all(t.data_ptr() % 16 == 0 for t in given if isinstance(t, Tensor))
    given += boxes(kernel, given) if aligned else []
    constants = kernel.constants(config, wide, aligned)
    asserting(kernel.debug)
    try:
        if kernel.programs_per_row > 1:  # few row groups: each program is a thread
            few = min(grid, 2 * kernel.programs_per_row)
            together(function, few, *given, **constants)
        else:
            function[(grid,)](*given, **constants)
    except Exception as e:
        if " outside tensor " in str(e):
            raise AccessError(str(e.__cause__ or e)) from e
        if "index out of range" in str(e) or isinstance(e.__cause__, AssertionError):
            raise IndexOutOfRange("index out of range") from e
        raise


def interpreted(gm: fx.GraphModule, example_inputs: Sequence[Any], **asked: Any) -> Any:
    """The backend, for ``torch.compile(backend=interpreted)``."""
    return deuteron_backend(gm, example_inputs, runner=compile_interpreted, **asked)


__all__ = ["compile_interpreted", "interpreted"]
