"""The parts of an emitted module, put together.

In: the lines of ``call`` and what they refer to (`Body`), generated kernels. Out: `EmittedModule`:
the module's text, with the kernels' sources before ``call`` and, behind it, what makes the module a
program of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from deuteron.codegen.cpp.kernels import CppKernel, translation_unit
from deuteron.codegen.launch_groups import OPENMP_DECLARATIONS, Launches, LaunchGroup
from deuteron.codegen.products import Product
from deuteron.codegen.text import dtype_text, long_string, wrapped
from deuteron.codegen.triton.generate import Box, Config, TritonKernel
from deuteron.ir.index import Sym, hint
from deuteron.ir.program import Input, Program

SUPPORT_NAMES = (
    *(
        "HOOKS_SEEN",
        "address_array",
        "as_dtype",
        "assign_offsets",
        "cache_layout",
        "checked_result",
        "convolve",
        "empty",
        "empty_cpu",
        "empty_cuda",
        "empty_small",
        "enter_device",
        "exact_count",
        "fail_assertion",
        "keeps_graph",
        "leave_device",
        "leaves",
        "look_for_hooks",
    ),
    *("size_array", "stream", "threads", "view", "with_strides"),
)
KernelCode = CppKernel | TritonKernel


@dataclass(frozen=True)
class EmittedModule:
    """The module's text, the C++ translation unit of its CPU kernels ("" without any), and what the
    text refers to by name and does not define: `launch_groups` are C++ functions of the unit,
    `sequences` GPU kernels, `products` matrix products with their devices, `objects` values that
    have no text."""

    text: str
    unit: str
    launch_groups: tuple[str, ...]
    sequences: tuple[Launches, ...]
    objects: dict[str, Any]
    products: dict[str, tuple[Product, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a module is asked to be: its first line, lines about it, the threads of CPU kernels (0:
    as many as torch uses), whether each kernel's results are compared with the reference, which
    matrix products (of a device) are made without ATen, whether it is an inference, forward or
    backward, and whether ``clock`` is called around each step."""

    title: str
    about: tuple[str, ...] = ()
    threads: int = 0
    watch: bool = False
    products: Callable[[Product, str], bool] = lambda product, device: False
    phase: str = "inference"
    clock: bool = False


@dataclass(frozen=True)
class Body:
    """What was written step by step. `head`: lines before ``call``; `layout`: the function that
    places tensors for given sizes; `lines`: those of ``call``; `constants` are among `objects`."""

    head: list[str]
    layout: list[str]
    lines: list[str]
    launch_groups: list[LaunchGroup]
    sequences: list[Launches]
    objects: dict[str, Any]
    constants: dict[str, torch.Tensor]
    gpus: tuple[str, ...]
    products: dict[str, tuple[Product, str]]


def assemble(
    body: Body, unit: str, program: Program, kernels: dict[str, KernelCode], request: Request
) -> EmittedModule:
    """The module. `unit`: the C++ of its kernels (`translation`)."""
    launch_groups = tuple(s.name for s in body.launch_groups)
    bound = [*launch_groups, *(q.name for q in body.sequences), *body.products, *body.objects]
    about = "set by who loads this module: " + ", ".join(bound)
    text = [
        long_string("\n".join([request.title, "", *request.about, ""])),
        *("", "import math", "", "import torch", ""),
        *wrapped("from deuteron.runtime.support import (", SUPPORT_NAMES, ")"),
        "",
        *kernel_sources(unit, kernels),
        *body.head,
        *(textwrap.wrap(about, 98, initial_indent="# ", subsequent_indent="# ") if bound else []),
        *("", "", *body.layout, *call_function(body), "", ""),
        *standalone_main(body, program, kernels, launch_groups),
    ]
    sequences = tuple(body.sequences)
    return EmittedModule(
        "\n".join(text), unit, launch_groups, sequences, body.objects, body.products
    )


def translation(body: Body, kernels: dict[str, KernelCode], threads: int) -> str:
    """The C++ of all CPU kernels, those that share code once."""
    cpp = {k.name: k for k in kernels.values() if isinstance(k, CppKernel)}
    if not cpp:
        return ""
    functions = [x for s in body.launch_groups for x in s.function(threads)]
    openmp = [OPENMP_DECLARATIONS] if threads else []
    return "\n".join([translation_unit(list(cpp.values())), *openmp, *functions, ""])


def call_function(body: Body) -> list[str]:
    """The function ``call``; kernels of a GPU run with their device as the current one."""
    lines = [f"    {x}" for x in body.lines]
    if not body.gpus:
        return ["def call(args):", *lines]
    return [
        *("def run(args):", *lines, "", ""),
        "def call(args):",
        f"    before = enter_device({torch.device(body.gpus[0]).index or 0})",
        "    try:",
        "        return run(args)",
        "    finally:",
        "        leave_device(before)",
    ]


def kernel_sources(unit: str, kernels: dict[str, KernelCode]) -> Iterator[str]:
    if unit:
        yield f"CPP = {long_string(chr(10) + unit)}"
        yield ""
    for k in {k.name: k for k in kernels.values() if isinstance(k, TritonKernel)}.values():
        yield f"{k.name}_source = {long_string(chr(10) + k.source)}"
        yield ""


def standalone_main(
    body: Body, program: Program, kernels: dict[str, KernelCode], launch_groups: Sequence[str]
) -> Iterator[str]:
    """What makes the module a program of its own."""
    triton = {n: k for n, k in kernels.items() if isinstance(k, TritonKernel)}
    yield 'if __name__ == "__main__":'
    if triton:
        yield "    from deuteron.codegen.triton.generate import Box, Config, TritonKernel"
        yield "    from deuteron.ir.index import Sym"
    if body.products:
        yield "    from deuteron.codegen.products import Product, Side"
    yield "    from deuteron.runtime import standalone"
    yield ""
    yield "    standalone.main("
    yield "        globals(),"
    yield "        inputs=["
    yield from (f"            {x}," for x in examples(program))
    yield "        ],"
    yield "        constants={"
    for name, t in body.constants.items():
        about = f"{tuple(t.shape)}, {tuple(t.stride())}, {t.dtype}, {str(t.device)!r}"
        yield f"            {name!r}: ({about}),"
    yield "        },"
    yield f"        missing={[n for n in body.objects if n not in body.constants]!r},"
    yield f"        launch_groups={list(launch_groups)!r},"
    yield "        sequences=["
    for q in body.sequences:
        yield "            ("
        yield f"                {q.name!r}, {q.device!r}, {q.operands!r}, {q.sizes!r},"
        yield "                ["
        yield from (f"                    {triton_text(triton[n])}," for n in q.kernels)
        yield "                ],"
        yield "            ),"
    yield "        ],"
    if body.products:
        yield "        products={"
        yield from (f"            {n!r}: {what!r}," for n, what in body.products.items())
        yield "        },"
    yield "    )"
    yield ""


def examples(program: Program) -> Iterator[str]:
    """For each argument the shape, strides, dtype and device of a tensor, or a number, or None."""
    for d in inputs_of(program):
        if isinstance(d, Input):
            lay = d.layout
            shape = tuple(hint(n) for n in lay.shape)
            strides = tuple(hint(n) for n in lay.strides)
            yield f"({shape}, {strides}, {dtype_text(lay.dtype)}, {lay.device!r})"
        else:
            yield repr(d)


def triton_text(k: TritonKernel) -> str:
    """The kernel as an expression; its source is a variable of the module."""
    parts = []
    for f in fields(k):
        value = getattr(k, f.name)
        text = f"{k.name}_source" if f.name == "source" else repr(value)
        if f.name == "args":
            text = "".join(f"({kind!r}, {argument_text(what)}), " for kind, what in value)
            text = f"({text})"
        parts.append(f"{f.name}={text}")
    return f"TritonKernel({', '.join(parts)})"


def argument_text(x: str | Sym) -> str:
    return repr(x) if isinstance(x, str) else f"Sym({x.name!r}, {x.low!r}, {x.hint!r})"


def inputs_of(program: Program) -> Iterable[Input | int | None]:
    """Each argument of ``call``: a tensor's definition, the hint of a size, or None."""
    out: list[Input | int | None] = [None] * program.num_inputs
    for d in program.defs:
        if isinstance(d, Input):
            out[d.position] = d
    for s, (kind, where, _) in program.sizes:
        if kind == "int":
            out[where] = s.hint or 0
    return out


def triton_fields(k: TritonKernel) -> dict[str, Any]:
    """A kernel without its source, as plain values that JSON holds."""
    out = {f.name: getattr(k, f.name) for f in fields(k) if f.name != "source"}
    args = [[kind, w if isinstance(w, str) else [w.name, w.low, w.hint]] for kind, w in k.args]
    configs = [[c.constexprs, c.num_warps, c.num_stages, c.registers] for c in k.configs]
    return {**out, "args": args, "configs": configs}


def triton_kernel(known: dict[str, Any], source: str) -> TritonKernel:
    """The kernel of `triton_fields`."""

    def frozen(x: Any) -> Any:
        return tuple(frozen(y) for y in x) if isinstance(x, list) else x

    values = {name: frozen(x) for name, x in known.items()}
    values["args"] = tuple(
        (kind, w if isinstance(w, str) else Sym(*w)) for kind, w in known["args"]
    )
    values["configs"] = tuple(Config(*frozen(c)) for c in known["configs"])
    values["boxes"] = tuple(Box(*b) for b in values["boxes"])
    return TritonKernel(source=source, **values)


__all__ = [
    "SUPPORT_NAMES",
    "Body",
    "EmittedModule",
    "KernelCode",
    "Request",
    "assemble",
    "translation",
    "triton_fields",
    "triton_kernel",
]
