"""One Triton function per kernel, with what is needed to build and launch it.

In: `schedule.kernel.Kernel` and the device. Out: `TritonKernel`: the text of a Python module whose
function `name` is the kernel.

Nothing here needs a GPU, Triton or torch. The text is deterministic. Several nests become functions
of their own, which the kernel calls by ranges of program numbers (Triton inlines them).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.base.text import plain_name
from deuteron.codegen.checks import with_checks
from deuteron.codegen.loops import Loops, prepare
from deuteron.codegen.triton.access_statistics import size
from deuteron.codegen.triton.contraction import contraction_kernel
from deuteron.codegen.triton.cooperative import FLAGS_PARAM, may_share_rows
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.joined import split_columns
from deuteron.codegen.triton.kernel import ALIGNED_CONSTEXPR, Box, Config, TritonKernel
from deuteron.codegen.triton.nests import Names, write_nest
from deuteron.codegen.triton.point_tiles import TileConfig
from deuteron.codegen.triton.scalars import POINTER_TYPES
from deuteron.codegen.triton.scanning import scan_tiling
from deuteron.codegen.triton.sizes import (
    aligned_sizes,
    all_indices,
    flag_count,
    grids_text,
    index_width,
    python_text,
    symbols_of,
)
from deuteron.codegen.triton.source import INDEX_CHOICE, function_text
from deuteron.codegen.triton.tiling import Tiling, choose, cross_row_reductions, most_stages
from deuteron.codegen.triton.unroll import unroll_short_reductions
from deuteron.codegen.triton.unroll_and_jam import unroll_and_jam
from deuteron.codegen.verify import loops_text, verify_loops
from deuteron.ir.index import Sym
from deuteron.ir.program import Layout
from deuteron.ir.verify import error
from deuteron.ir.verify_expr import Fault
from deuteron.schedule.columns import split_registers
from deuteron.schedule.kernel import Kernel, Nest
from deuteron.schedule.printer import kernel_lines
from deuteron.schedule.programs import power

# -- artifacts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A kernel to be written for a device."""

    kernel: Kernel
    spec: DeviceSpec

    @property
    def name(self) -> str:
        return f"triton_{self.kernel.name}"

    @property
    def layouts(self) -> dict[str, Layout]:
        """The kernel's tensors in the order of its arguments."""
        return dict(self.kernel.reads) | dict(self.kernel.writes)


@dataclass(frozen=True)
class Checked(Task):
    nests: tuple[Nest, ...]


@dataclass(frozen=True)
class Looped(Checked):
    loops: tuple[Loops, ...]


@dataclass(frozen=True)
class Tiled(Looped):
    """The tiling of each nest, and the names of its block sizes in the text."""

    tilings: tuple[Tiling, ...]
    blocks: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Measured(Tiled):
    """The sizes that the kernel takes, and how wide its indices are: `static` where that is known
    before a call, `wide` where it is 64 bits, `wide_source` a test of the sizes where it is not
    known."""

    symbols: tuple[Sym, ...]
    static: bool
    wide_source: str | None
    wide: bool


@dataclass(frozen=True)
class Written(Measured):
    """The parameter of each tensor; lines of each nest; whether one asserts."""

    pointers: dict[str, str]
    bodies: tuple[list[str], ...]
    asserts: bool


# -- the passes ------------------------------------------------------------------------------------


def check_indices(task: Task, context: Context) -> Checked:
    """Indices that are loaded go through checks."""
    layouts, wanted = task.layouts, context.options.bounds_check
    nests = (with_checks(n, layouts, wanted) for n in task.kernel.nests)
    return extended(Checked, task, nests=tuple(nests))


def make_loops(task: Checked, context: Context) -> Looped:
    """Linear addresses and canonical axes."""
    layouts = task.layouts
    return extended(Looped, task, loops=tuple(prepare(n, layouts) for n in task.nests))


def with_unrolled_reductions(task: Looped, context: Context) -> Looped:
    """Reductions over few points become expressions."""
    return replace(task, loops=tuple(map(unroll_short_reductions, task.loops)))


def with_unrolled_axes(task: Looped, context: Context) -> Looped:
    """Short parallel axes are walked by each lane."""
    return replace(task, loops=tuple(unroll_and_jam(n, task.spec) for n in task.loops))


def cut_columns(task: Looped, context: Context) -> Looped:
    """Sums of the columns of joined tensors are a nest for each part."""
    return replace(task, loops=tuple(part for n in task.loops for part in split_columns(n)))


def choose_tiling(task: Looped, context: Context) -> Tiled:
    """How a program's tile covers each nest: shape, warps, stages."""
    nests, spec = task.loops, task.spec
    over, alone = (task.kernel.overwrites, task.kernel.overwritten), len(nests) == 1
    tilings = [choose(n, spec, cooperative=alone and may_share_rows(n, *over)) for n in nests]
    if alone:
        tilings[0] = scan_tiling(nests[0], spec) or tilings[0]
    tilings = sharing(tilings)
    blocks = [_block_names(f, i if len(tilings) > 1 else None) for i, f in enumerate(tilings)]
    return extended(Tiled, task, tilings=tuple(tilings), blocks=tuple(blocks))


def measure_indices(task: Tiled, context: Context) -> Measured:
    """Which sizes the kernel takes; whether 32 bits hold its indices."""
    indices = all_indices(task.loops)
    symbols = symbols_of(indices, task.layouts)
    static, wide_source, wide = index_width(indices, task.layouts)
    return extended(
        Measured, task, symbols=symbols, static=static, wide_source=wide_source, wide=wide
    )


def write_nests(task: Measured, context: Context) -> Written:
    """The lines of every nest."""
    kernel, layouts, options = task.kernel, task.layouts, context.options
    index_type = ("tl.int64" if task.wide else "tl.int32") if task.static else "INDEX"
    float8 = "_native" if (task.spec.capability or (0, 0)) >= (8, 9) else ""
    limits = {}
    if options.check_accesses:
        limits = {n: (lay.extent() + lay.offset, kernel.name) for n, lay in layouts.items()}
    pointers = _pointer_names(layouts)
    common = (pointers, index_type, layouts, "STAGES", float8, limits)
    rest = (kernel.overwrites, kernel.overwritten, options.precision == "float32")
    names = [Names(b, *common, *rest) for b in task.blocks]
    written = [
        write_nest(n, f, own, itertools.count())
        for n, f, own in zip(task.loops, task.tilings, names, strict=True)
    ]
    bodies = [lines for lines, _ in written]
    if not task.static:
        bodies = [[INDEX_CHOICE, *b] for b in bodies]
    asserts = any(asserts for _, asserts in written)
    return extended(Written, task, pointers=pointers, bodies=tuple(bodies), asserts=asserts)


def write_function(task: Written, context: Context) -> TritonKernel:
    """The function around them, its arguments, configurations and grid."""
    kernel, layouts, tilings, blocks = task.kernel, task.layouts, task.tilings, task.blocks
    pointers, symbols = task.pointers, task.symbols
    flags = [] if task.static else ["INDEX_BITS"]
    flags += [ALIGNED_CONSTEXPR] * any(f.misaligned is not None for f in tilings)
    stages = ["STAGES"] if any(f.has_loops for f in tilings) else []
    params = [*pointers.values(), *(size_name(s) for s in symbols)]
    waits = tilings[0].exchanges
    params += [FLAGS_PARAM] * waits
    constexprs = [v for b in blocks for v in b.values()] + stages + flags
    sizes = "i64" if task.static and task.wide else "i32"
    return TritonKernel(
        name=task.name,
        source=function_text(
            *(task.name, kernel, task.loops, tilings, blocks, task.bodies),
            *(params, constexprs, layouts, pointers),
        ),
        args=(
            *(("tensor", n) for n in layouts),
            *(("size", s) for s in symbols),
            *([("flags", "")] * waits),
        ),
        params=tuple(params),
        types=(
            *(POINTER_TYPES[lay.dtype] for lay in layouts.values()),
            *(sizes for _ in symbols),
            *(["*i64"] * waits),
        ),
        constexprs=tuple(constexprs),
        configs=_configs(tilings, blocks, task.loops, task.spec),
        grid_source=grids_text(tilings, blocks, task.loops),
        aligned=(*pointers.values(), *aligned_sizes(symbols)),
        wide_source=task.wide_source,
        debug=task.asserts,
        flag_count_source=flag_count(tilings[0], blocks[0], task.loops[0]),
        programs_per_row=tilings[0].programs_per_row,
        cluster=tilings[0].cluster,
    )


# -- what checks and prints their artifacts --------------------------------------------------------


def verify_looped(task: Looped, guilty: str) -> None:
    verify_loops(task.kernel, task.loops, guilty)


def verify_tiled(task: Tiled, guilty: str) -> None:
    """Blocks are powers of 2, a nest has candidates, warps are powers of 2."""
    for k, tiling in enumerate(task.tilings):
        sizes = [n for c in tiling.candidates for n in (c.num_warps, *(n for _, n in c.sizes))]
        if not sizes or any(n < 1 or n & (n - 1) for n in sizes):
            fault = Fault("tiles", f"sizes and warps are {sizes}")
            raise error(fault, f"nest {k} of {task.kernel.name}", task.kernel.origins, guilty)


def verify_source(code: TritonKernel, guilty: str) -> None:
    """The text is a program of Python's, and has as many types as parameters."""
    try:
        ast.parse(code.source)
        if not len(code.params) == len(code.types) == len(code.args):
            raise Fault("parameters", f"{code.params} are of types {code.types}")
    except SyntaxError as e:
        raise error(Fault("syntax", str(e)), code.name, (), guilty) from None
    except Fault as fault:
        raise error(fault, code.name, (), guilty) from None


def checked_text(task: Checked) -> str:
    return "\n".join(kernel_lines(replace(task.kernel, nests=task.nests)))


def looped_text(task: Looped) -> str:
    return loops_text(task.kernel, task.loops)


def tiled_text(task: Tiled) -> str:
    return "\n".join(f"{task.name}, nest {k}: {f}" for k, f in enumerate(task.tilings))


def measured_text(task: Measured) -> str:
    width = (
        "64 bits" if task.wide else "32 bits" if task.static else f"64 bits if {task.wide_source}"
    )
    return f"{task.name}: sizes {list(task.symbols)}, indices of {width}"


def written_text(task: Written) -> str:
    return "\n\n".join("\n".join((f"# {task.name}", *lines)) for lines in task.bodies)


def source_text(code: TritonKernel) -> str:
    return code.source


TRITON: Table = (
    Pass("index checks", check_indices, "the loops that are made of it are verified", checked_text),
    Pass("loops", make_loops, verify_looped, looped_text),
    Pass("unroll", with_unrolled_reductions, verify_looped, looped_text),
    Pass("unroll and jam", with_unrolled_axes, verify_looped, looped_text),
    Pass("index sets", cut_columns, verify_looped, looped_text),
    Pass("tiling", choose_tiling, verify_tiled, tiled_text),
    Pass(
        "index width", measure_indices, "a test of each call's sizes is all it gives", measured_text
    ),
    Pass("nests", write_nests, "the function that is made of it is verified", written_text),
    Pass("function", write_function, verify_source, source_text),
)


def generate(kernel: Kernel, spec: DeviceSpec, context: Context | None = None) -> TritonKernel:
    """The Triton function of a kernel."""
    return write_kernel(Task(kernel, spec), context or Context())


def write_kernel(task: Task, context: Context) -> TritonKernel:
    """The Triton function of a kernel."""
    if task.kernel.contraction is not None:
        return contraction_kernel(task.kernel)
    code: TritonKernel = run_passes(TRITON, task, context)
    return code


def sharing(tilings: Sequence[Tiling]) -> list[Tiling]:
    """The tilings of nests that share a kernel, and so the number of warps. Rows of a split have
    the warps that they asked for, since more of them reduce its tile together; other nests have
    smaller blocks then. Else it is the most: where a nest asked for fewer whose tile is cut freely,
    the tile is larger, so that a thread has as much.

    H100, gradient of GELU with its bias (8192 x 3072, bf16) beside a sum that wants 8 warps: 8
    elements of a thread 116 us, the limit is 70. H200, backward of layer norm (bf16) beside a sum
    of columns that wants 8: 4096 x 768, of 4 warps, 75 us, with 4 warps 21; 6272 x 128, of 1 warp,
    27, without the sum 4.7.
    """
    own = any(f.kind == "row_split" and not f.tiled for f in tilings)
    out: list[list[TileConfig]] = [[] for _ in tilings]
    for k in range(max(len(f.candidates) for f in tilings)):
        pairs = [(f, f.candidates[min(k, len(f.candidates) - 1)]) for f in tilings]
        warps = max(
            c.num_warps for f, c in pairs if not own or f.kind == "row_split" and not f.tiled
        )
        while any(_cut(f, c, warps).per_thread > max(32, c.per_thread) for f, c in pairs):
            warps *= 2
        for made, (f, c) in zip(out, pairs, strict=True):
            made.append(_grown(f, _cut(f, c, warps), warps))
    return [replace(f, candidates=tuple(made)) for f, made in zip(tilings, out, strict=True)]


def _cut(tiling: Tiling, blocks: TileConfig, warps: int) -> TileConfig:
    """At most so many warps: loops' or rows' blocks are smaller, but for 4 elements of a thread."""
    if blocks.num_warps <= warps:
        return blocks
    name = "r" if tiling.kind == "rows" and not tiling.persistent else tiling.dims[0][0]
    kept = max(blocks.elements * warps // blocks.num_warps, min(blocks.elements, 128 * warps))
    small = max(1, blocks.of(name) * kept // blocks.elements)
    sizes = tuple((d, small if d == name else n) for d, n in blocks.sizes)
    return replace(blocks, sizes=sizes, num_warps=warps)


def _grown(tiling: Tiling, blocks: TileConfig, warps: int) -> TileConfig:
    free = {"points": not tiling.program_axes, "row_split": tiling.tiled}.get(tiling.kind, False)
    if not free or warps <= blocks.num_warps:
        return blocks
    name, axes = tiling.dims[-1]
    most = max(blocks.of(name), power(size(axes)))
    wide = min(blocks.of(name) * warps // blocks.num_warps, most)
    sizes = tuple((d, wide if d == name else n) for d, n in blocks.sizes)
    return replace(blocks, sizes=sizes, num_warps=warps)


def _pointer_names(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """A readable parameter name for each tensor."""
    out: dict[str, str] = {}
    for name in layouts:
        text = plain_name(name)[:48]
        text = f"{text}_ptr" if text[:1].isalpha() else f"t{text}_ptr"
        out[name] = text if text not in out.values() else f"{text}{len(out)}"
    return out


def _block_names(tiling: Tiling, number: int | None) -> dict[str, str]:
    tail = "" if number is None else f"_{number}"
    return {d: f"{d.upper()}BLOCK{tail}" for d, _ in tiling.dims}


def _configs(
    tilings: Sequence[Tiling],
    blocks: Sequence[Mapping[str, str]],
    nests: Sequence[Loops],
    spec: DeviceSpec,
) -> tuple[Config, ...]:
    out = []
    for k in range(max(len(f.candidates) for f in tilings)):
        configs: list[TileConfig] = [f.candidates[min(k, len(f.candidates) - 1)] for f in tilings]
        values = [
            (names[d], n) for names, c in zip(blocks, configs, strict=True) for d, n in c.sizes
        ]
        deepest = [
            most_stages(n, c, spec) for n, f, c in zip(nests, tilings, configs) if f.has_loops
        ]
        stages = min((max(c.stages for c in configs), *deepest))
        if any(f.has_loops for f in tilings):
            values.append(("STAGES", stages))
        warps = max(c.num_warps for c in configs)
        most = max(c.registers for c in configs)
        splits = [
            n.row_split[1] for n in nests if n.row_split is not None and cross_row_reductions(n)
        ]
        if splits:
            most = split_registers(max(splits), warps, spec)
        out.append(Config(tuple(values), warps, stages, most))
    return tuple(dict.fromkeys(out))


__all__ = ["Box", "Config", "TritonKernel", "generate", "python_text"]
