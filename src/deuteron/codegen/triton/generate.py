"""One Triton function per kernel, with what is needed to build and launch it.

In: `schedule.kernel.Kernel` and the device. Out: `TritonKernel`: the text of a Python module whose
function `name` is the kernel.

Nothing here needs a GPU, Triton or torch. The text is deterministic. Several nests become functions
of their own, which the kernel calls by ranges of program numbers (Triton inlines them).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.base.options import Options
from deuteron.base.text import one_line, plain_name
from deuteron.codegen.checks import with_checks
from deuteron.codegen.loops import SPLIT, Loops, prepare
from deuteron.codegen.triton.access_statistics import power, size
from deuteron.codegen.triton.alignment_classes import split_by_alignment
from deuteron.codegen.triton.cooperative import FLAGS_PARAM
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.nests import Names, write_nest
from deuteron.codegen.triton.point_tiles import TileConfig
from deuteron.codegen.triton.predicated_loads import predicate_loads
from deuteron.codegen.triton.scalars import POINTER_TYPES
from deuteron.codegen.triton.scanning import flag_count_text, scan_tiling
from deuteron.codegen.triton.tiling import Tiling, choose, cross_row_reductions, most_stages
from deuteron.codegen.triton.unroll import unroll_short_reductions
from deuteron.codegen.triton.unroll_and_jam import unroll_and_jam
from deuteron.ir.expr import own_indices
from deuteron.ir.index import Div, Index, MinMax, Mod, Sym, atom, bound, is_nonneg, product
from deuteron.ir.program import Layout
from deuteron.schedule.columns import split_registers
from deuteron.schedule.kernel import Kernel

# An index may pass the end of its tensor by a block before its mask is applied.
MAX_INT32_INDEX = 2**31 - 2**20

# A constexpr: whether all tensors' addresses are multiples of 16.
ALIGNED_CONSTEXPR = "ALIGNED"

# Counts the programs that are done, in kernels with barriers.
COUNTER_PARAM = "counter_ptr"

MODULE_HEADER = """import triton
import triton.language as tl

from deuteron.codegen.triton import libm
"""


@dataclass(frozen=True)
class Config:
    """Values of the constexprs, and launch parameters."""

    constexprs: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 1
    registers: int = 0  # of a thread at most; 0: the compiler's choice


@dataclass(frozen=True)
class TritonKernel:
    """A kernel's source and launch description.

    args         ("tensor", name), ("size", Sym), ("counter", "") or ("flags", ""), in the order of
                 `params`, their names in the function; the counter is an int32 that is 0 before and
                 after a launch; for the flags see `codegen.triton.exchange`
    types        Triton types of `params` ("*fp32", "i32"); sizes are "i64" with 64-bit indices
    aligned      params that may be declared divisible by 16 (pointers in bytes): all pointers, and
                 sizes whose hint is. Who launches checks it, and builds without the attribute where
                 it does not hold
    grid_source  Python expression over names of sizes and of constexprs; number of programs, 0
                 where there is nothing to do
    wide_source  Python expression over names of sizes: whether 32-bit indices overflow. None where
                 the sizes are known
    configs      candidates; the first is the heuristic choice
    flag_count_source
                 Python expression over names of sizes and of constexprs; flags by which programs of
                 a scan tell one another results, on one stream; None where the kernel has none, or
                 those of cooperative rows only
    programs_per_row
                 programs that share a row and must run at the same time. Where there are more than
                 one, any multiple of it is a valid number of programs, the grid's is the most
    cluster      whether the programs of a row are a cluster, with `CLUSTER_BYTES` more shared
                 memory
    """

    name: str
    source: str
    args: tuple[tuple[str, str | Sym], ...]
    params: tuple[str, ...]
    types: tuple[str, ...]
    constexprs: tuple[str, ...]
    configs: tuple[Config, ...]
    grid_source: str
    aligned: tuple[str, ...]
    wide_source: str | None = None
    flag_count_source: str | None = None
    debug: bool = False  # build with debug=True (and sanitize_overflow=False): it asserts
    programs_per_row: int = 1
    cluster: bool = False
    fp_fusion: bool = False  # eager rounds after each multiplication, and so does the kernel

    def signature(self, wide: bool = False) -> dict[str, str]:
        """Parameter -> Triton type, constexprs included; `wide` for sizes that make 32-bit indices
        overflow.
        """
        types = ["i64" if wide and t == "i32" else t for t in self.types]
        return dict(zip(self.params, types, strict=True)) | dict.fromkeys(
            self.constexprs, "constexpr"
        )

    def constants(self, config: Config, wide: bool = False, aligned: bool = True) -> dict[str, int]:
        """Constexpr -> value; `aligned`: whether all `aligned` params are multiples of 16."""
        flags = {"INDEX_BITS": 64 if wide else 32, ALIGNED_CONSTEXPR: int(aligned)}
        own = {n: value for n, value in flags.items() if n in self.constexprs}
        return dict(config.constexprs) | own

    def grid(self, config: Config, sizes: Mapping[str, int]) -> int:
        """Number of programs for these sizes (by symbol name)."""
        return _evaluated(self.grid_source, config, sizes)

    def flag_count(self, sizes: Mapping[str, int]) -> int:
        """Flags that a launch needs for these sizes, in any configuration."""
        if self.flag_count_source is None:
            return 0
        return max(_evaluated(self.flag_count_source, c, sizes) for c in self.configs)

    def is_wide(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes need the 64-bit variant."""
        return self.wide_source is not None and bool(
            eval(self.wide_source, {"min": min, "max": max}, dict(sizes))
        )


def _evaluated(source: str, config: Config, sizes: Mapping[str, int]) -> int:
    names = {**sizes, **dict(config.constexprs)}
    return int(eval(source, {"min": min, "max": max}, names))


def generate(kernel: Kernel, spec: DeviceSpec, options: Options | None = None) -> TritonKernel:
    """The Triton function of a kernel."""
    layouts = dict(kernel.reads) | dict(kernel.writes)
    name = f"triton_{kernel.name}"
    pointers = _pointer_names(layouts)
    checked = options is None or options.bounds_check
    nests = [
        unroll_and_jam(
            unroll_short_reductions(
                predicate_loads(prepare(with_checks(n, layouts, checked), layouts))
            ),
            spec,
        )
        for n in kernel.nests
    ]
    first = kernel.barriers[0] if kernel.barriers else len(nests)
    if first == 1:
        nests[0] = split_by_alignment(nests[0], spec)
    tilings = [
        choose(n, spec, cooperative=first == 1 and k == 0) for k, n in enumerate(nests[:first])
    ]
    if first == 1:
        tilings[0] = scan_tiling(nests[0], spec) or tilings[0]
    tilings = sharing(tilings)
    # The one program that runs a tail has large tiles: there is no device to occupy.
    warps = max(f.candidates[0].num_warps for f in tilings)
    tilings += [choose(n, spec, tail_warps=warps) for n in nests[first:]]
    programs_per_row = tilings[0].programs_per_row
    symbols = _symbols(nests, layouts)
    static, wide_source, wide = _width(nests, layouts)
    index_type = ("tl.int64" if wide else "tl.int32") if static else "INDEX"
    flags = [] if static else ["INDEX_BITS"]
    flags += [ALIGNED_CONSTEXPR] * any(f.misaligned is not None for f in tilings)
    blocks = [_block_names(f, i if len(tilings) > 1 else None) for i, f in enumerate(tilings)]
    stages = ["STAGES"] if any(f.has_loops for f in tilings) else []
    float8 = "_native" if (spec.capability or (0, 0)) >= (8, 9) else ""
    limits = {}
    if options is not None and options.check_accesses:
        limits = {n: (lay.extent() + lay.offset, kernel.name) for n, lay in layouts.items()}
    common = (pointers, index_type, layouts, "STAGES", float8, limits, kernel.overwrites)
    averages = options is None or options.precision == "float32"
    names = [
        Names(b, *common, kernel.retain_in_l2 and programs_per_row == 1, averages) for b in blocks
    ]
    written = [
        write_nest(n, f, own, itertools.count())
        for n, f, own in zip(nests, tilings, names, strict=True)
    ]
    bodies = [lines for lines, _ in written]
    if not static:
        choice = "INDEX: tl.constexpr = tl.int64 if INDEX_BITS == 64 else tl.int32"
        bodies = [[choice, *b] for b in bodies]
    params = [*pointers.values(), *(size_name(s) for s in symbols)]
    waits = tilings[0].exchanges
    params += [COUNTER_PARAM] * bool(kernel.barriers) + [FLAGS_PARAM] * waits
    constexprs = [v for b in blocks for v in b.values()] + stages + flags
    source = _source(name, kernel, tilings, blocks, bodies, params, constexprs, layouts, pointers)
    sizes = "i64" if static and wide else "i32"
    counter = bool(kernel.barriers)
    return TritonKernel(
        name=name,
        source=source,
        args=(
            *(("tensor", n) for n in layouts),
            *(("size", s) for s in symbols),
            *([("counter", "")] * counter),
            *([("flags", "")] * waits),
        ),
        params=tuple(params),
        types=(
            *(POINTER_TYPES[lay.dtype] for lay in layouts.values()),
            *(sizes for _ in symbols),
            *(["*i32"] * counter),
            *(["*i64"] * waits),
        ),
        constexprs=tuple(constexprs),
        configs=_configs(tilings, blocks, nests, spec),
        grid_source=_grids(tilings, blocks, nests, _main(kernel)),
        aligned=(
            *pointers.values(),
            *(size_name(s) for s in symbols if s.hint and s.hint % 16 == 0),
        ),
        wide_source=wide_source,
        debug=any(asserts for _, asserts in written),
        flag_count_source=_flag_count(tilings[0], blocks[0], nests[0]),
        programs_per_row=programs_per_row,
        cluster=tilings[0].cluster,
    )


def sharing(tilings: Sequence[Tiling]) -> list[Tiling]:
    """The tilings of nests that share a kernel, and so the number of warps: where that is more than
    a nest asked for whose tile is cut freely, the tile is larger, so that a thread has as much.
    H100, gradient of GELU with its bias (8192 x 3072, bf16) beside a sum that wants 8 warps: 8
    elements of a thread 116 us, the limit is 70."""
    count = max(len(f.candidates) for f in tilings)
    every = [[f.candidates[min(k, len(f.candidates) - 1)] for k in range(count)] for f in tilings]
    warps = [max(c.num_warps for c in configs) for configs in zip(*every, strict=True)]
    return [
        replace(f, candidates=tuple(_grown(f, c, w) for c, w in zip(configs, warps, strict=True)))
        for f, configs in zip(tilings, every, strict=True)
    ]


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


# -- sizes -----------------------------------------------------------------------------------------


def _all_indices(nests: Iterable[Loops]) -> list[Index]:
    """Every index that a kernel computes: addresses, index values, extents of its axes, and what
    those divide, compare and choose from. (Sums may wrap around and come back, these may not.)"""
    found: dict[Index, None] = {}
    for n in nests:
        for root in n.roots():
            for node in root.walk():
                found.update(dict.fromkeys(own_indices(node)))
                if node.op == "check":
                    found[node.attr] = None
        found.update(dict.fromkeys(n.addresses()))
        found.update(dict.fromkeys(a.extent for a in (*n.parallel, *n.reduced)))
        found[product(a.extent for a in n.parallel)] = None
        found[product(a.extent for a in n.reduced)] = None
    for i in list(found):
        for a in i.atoms():
            if isinstance(a, (Div, Mod)):
                found[a.num] = found[a.den] = None
            elif isinstance(a, MinMax):
                found[a.a] = found[a.b] = None
    return list(found)


def _symbols(nests: Iterable[Loops], layouts: Mapping[str, Layout]) -> tuple[Sym, ...]:
    """The sizes that indices depend on, and those that tell how wide indices are."""
    found: set[Sym] = set()
    for i in _all_indices(nests):
        found |= i.syms()
    for lay in layouts.values():
        found |= (lay.extent() + lay.offset).syms()
    return tuple(sorted(found))


def _width(nests: Sequence[Loops], layouts: Mapping[str, Layout]) -> tuple[bool, str | None, bool]:
    """(whether the sizes are known, Python test for 64-bit indices where not, whether they are
    needed where known).
    """
    ends: dict[Index, None] = {}
    for lay in layouts.values():
        ends[lay.extent() + lay.offset] = None
    for i in _all_indices(nests):
        if SPLIT in i.axes():  # within the tensor of partial results, which is a layout
            continue
        top, low = bound(i, True), bound(i, False)
        if top is not None:
            ends[top] = None
        if low is not None and not is_nonneg(low):
            ends[-low] = None
        if top is None:  # what it loads is within some tensor, what it is multiplied by need not be
            ends.update((atom(s), None) for s in i.syms())
    known = [e.value for e in ends if e.value is not None]
    unknown = [e for e in ends if e.value is None]
    if any(v > MAX_INT32_INDEX for v in known):
        return True, None, True
    if not unknown:
        return True, None, False
    tests = sorted({f"{python_text(e)} > {MAX_INT32_INDEX}" for e in unknown})
    return False, " or ".join(tests), False


def python_text(index: Index, name: Callable[[Sym], str] = lambda s: s.name) -> str:
    """An index of sizes as a Python expression over their names."""
    parts = []
    for m, c in index.terms:
        factors = [_python_atom(a, name) for a in m]
        parts.append("*".join([str(c), *factors] if c != 1 or not factors else factors))
    return "(" + (" + ".join(parts) or "0") + ")"


def _python_atom(a: object, name: Callable[[Sym], str]) -> str:
    if isinstance(a, Sym):
        return name(a)
    if isinstance(a, MinMax):
        return f"{a.kind}({python_text(a.a, name)}, {python_text(a.b, name)})"
    assert isinstance(a, (Div, Mod)), f"{a!r} is no size"
    sign = "//" if isinstance(a, Div) else "%"
    return f"({python_text(a.num, name)} {sign} {python_text(a.den, name)})"


def _blocks_text(count: Index, block: str) -> str:
    return f"-(-{python_text(count)} // {block})"


def _grids(
    tilings: Sequence[Tiling],
    blocks: Sequence[Mapping[str, str]],
    nests: Sequence[Loops],
    main: int,
) -> str:
    """Programs of the nests that run first. Where others follow there is always one, which runs
    them: the first ones may have nothing to do."""
    first = list(zip(tilings, blocks, nests, strict=True))[:main]
    text = " + ".join(_grid(f, b, n) for f, b, n in first)
    return text if main == len(nests) else f"max(1, {text})"


def _flag_count(tiling: Tiling, blocks: Mapping[str, str], nest: Loops) -> str | None:
    if tiling.kind != "scan":
        return None
    rows, length = (python_text(product(a.extent for a in axes)) for _, axes in tiling.dims)
    return flag_count_text(nest, tiling, rows, length, blocks["r"])


def _grid(tiling: Tiling, blocks: Mapping[str, str], nest: Loops) -> str:
    """Python text of the number of programs of a nest."""
    counts = {d: product(a.extent for a in axes) for d, axes in tiling.dims}
    if tiling.kind == "points":
        each = [_blocks_text(counts[d], b) for d, b in blocks.items()]
        rows = (
            [python_text(product(a.extent for a in tiling.program_axes))]
            if tiling.program_axes
            else []
        )
        text = " * ".join([*rows, *each])
        return text if tiling.serial_blocks == 1 else f"-(-({text}) // {tiling.serial_blocks})"
    per_row = f"{tiling.programs_per_row} * " if tiling.programs_per_row > 1 else ""
    if tiling.kind == "scan":
        return f"{python_text(counts['x'])} * {_blocks_text(counts['r'], blocks['r'])}"
    if tiling.kind == "rows":
        return per_row + _blocks_text(counts["x"], blocks["x"])
    assert nest.row_split is not None
    return (
        f"{nest.row_split[1]} * {_blocks_text(counts['r'], blocks['r'])}"
        if tiling.tiled
        else f"{per_row}{nest.row_split[1]}"
    )


# -- text ------------------------------------------------------------------------------------------


def _source(
    name: str,
    kernel: Kernel,
    tilings: Sequence[Tiling],
    blocks: Sequence[Mapping[str, str]],
    bodies: Sequence[list[str]],
    params: list[str],
    constexprs: list[str],
    layouts: Mapping[str, Layout],
    pointers: Mapping[str, str],
) -> str:
    lines = [MODULE_HEADER]
    signature = ", ".join([*params, *(f"{c}: tl.constexpr" for c in constexprs)])
    notes = _comments(kernel, layouts, pointers)
    if len(bodies) == 1:
        pid = "tl.program_id(0)"
        if kernel.reverse and not tilings[0].exchanges:
            pid = "tl.num_programs(0) - 1 - tl.program_id(0)"
        lines += [*_function(name, signature, [*notes, f"pid = {pid}", *bodies[0]])]
        return "\n".join([*lines, ""])
    calls, start = [], []
    for i, body in enumerate(bodies):
        lines += [*_function(f"_{name}_{i}", f"pid, {signature}", body), "", ""]
        start.append(f"blocks{i}")
        calls.append(_call(i, name, [*params, *constexprs]))
    main = [*notes, "pid = tl.program_id(0)"]
    for i, (tiling, names) in enumerate(zip(tilings, blocks, strict=True)):
        main.append(f"blocks{i} = {_programs(tiling, names, kernel, i)}")
    side_by_side = calls[: _main(kernel)]
    for i, call in enumerate(side_by_side):
        before = " + ".join(start[:i])
        last = i == len(side_by_side) - 1
        head = "if" if i == 0 else "elif"
        first = f"pid - ({before})" if before else "pid"
        if len(side_by_side) == 1:
            text = call.replace("PID", "pid")
            guarded = tilings[0].kind == "scan"  # without rows there is no block to enter
            main += ["if pid < blocks0:", f"    {text}"] if guarded else [text]
            break
        main += [
            "else:" if last else f"{head} pid < {' + '.join(start[: i + 1])}:",
            "    " + call.replace("PID", first),
        ]
    main += _tail(kernel, calls)
    return "\n".join([*lines, *_function(name, signature, main), ""])


def _main(kernel: Kernel) -> int:
    """The number of nests before the first barrier."""
    return kernel.barriers[0] if kernel.barriers else len(kernel.nests)


def _tail(kernel: Kernel, calls: Sequence[str]) -> list[str]:
    """What the program that finishes last does: all programs of the nests behind barriers, one
    after the other. The counter is 0 before and after the kernel."""
    if not kernel.barriers:
        return []
    out = [
        "tl.debug_barrier()",
        f'ticket = tl.atomic_add({COUNTER_PARAM}, 1, sem="acq_rel", scope="gpu")',
        "if ticket == tl.num_programs(0) - 1:",
        f"    tl.store({COUNTER_PARAM}, 0)",
    ]
    for i in range(kernel.barriers[0], len(calls)):
        if i in kernel.barriers[1:]:
            out.append("    tl.debug_barrier()")
        out += [f"    for p{i} in range(blocks{i}):", "        " + calls[i].replace("PID", f"p{i}")]
    return out


def _call(i: int, name: str, args: list[str]) -> str:
    return f"_{name}_{i}(PID, {', '.join(args)})"


def _programs(tiling: Tiling, blocks: Mapping[str, str], kernel: Kernel, i: int) -> str:
    """Triton text of the number of programs of a nest."""
    counts = {d: product(a.extent for a in axes) for d, axes in tiling.dims}

    def cut(d: str) -> str:
        return f"tl.cdiv({_size_text(counts[d])}, {blocks[d]})"

    if tiling.kind == "points":
        rows = (
            [_size_text(product(a.extent for a in tiling.program_axes))]
            if tiling.program_axes
            else []
        )
        text = " * ".join([*rows, *(cut(d) for d in blocks)])
        return text if tiling.serial_blocks == 1 else f"tl.cdiv({text}, {tiling.serial_blocks})"
    if tiling.kind == "scan":
        return f"{_size_text(counts['x'])} * {cut('r')}"
    if tiling.kind == "rows":
        return cut("x")
    row_split = kernel.nests[i].row_split
    assert row_split is not None
    return f"{row_split[1]} * {cut('r')}" if tiling.tiled else str(row_split[1])


def _size_text(index: Index) -> str:
    text = python_text(index, size_name)
    return text.strip("()") if text.strip("()").isdigit() else text


def _function(name: str, signature: str, body: Iterable[str]) -> list[str]:
    return ["@triton.jit", f"def {name}({signature}):", *(f"    {line}" for line in body)]


def _comments(
    kernel: Kernel, layouts: Mapping[str, Layout], pointers: Mapping[str, str]
) -> list[str]:
    """What the kernel is, where it comes from, what it moves and computes."""
    out = [
        f"# {kernel.bytes} bytes, {kernel.flops:.0f} FLOPs, {kernel.predicted_us:.1f} us predicted"
    ]
    written, read = dict(kernel.writes), dict(kernel.reads)
    for n, lay in layouts.items():
        use = "in, out" if n in written and n in read else "out" if n in written else "in"
        layout = one_line(f"{lay.dtype}{list(lay.shape)} strides {list(lay.strides)}")
        out.append(f"#   {pointers[n]} ({use}): {layout}")
    for o in kernel.origins:
        where = f"  {o.line}" if o.line else ""
        out.append("#   " + one_line(f"{o.node} = {o.op}{where}"))
    return out


__all__ = ["Config", "TritonKernel", "generate", "python_text"]
