"""One C++ function per kernel, and one translation unit per graph.

In: `schedule.kernel.Kernel` and the machine. Out: `CppKernel`, the text of

    extern "C" void cpp_<kernel.name>(void** ptrs, const long long* sizes)

`ptrs` follow `args`, `sizes` follow `sizes`. The translation unit includes no headers. Compile it
with `FLAGS`; tensors of different dtypes may share memory, hence ``-fno-strict-aliasing``, and a
product and a sum round separately, as in eager, hence ``-ffp-contract=off``. Two pointers may be
equal when the memory planner reuses an operand that dies in the kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deuteron.base.device import DeviceSpec
from deuteron.base.options import Options
from deuteron.base.passes import Context, Pass, Table, extended, run_passes
from deuteron.base.text import one_line, plain_name
from deuteron.codegen.checks import with_checks
from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.axes import flops_of, vector_axis
from deuteron.codegen.cpp.bounds import BOUNDS_ERROR, checked_pointer
from deuteron.codegen.cpp.columns import write_columns
from deuteron.codegen.cpp.emit import Emitter, alias_name, size_name
from deuteron.codegen.cpp.environment import Env, Machine, size
from deuteron.codegen.cpp.joined import split_index_sets
from deuteron.codegen.cpp.nontemporal import nontemporal_tensors
from deuteron.codegen.cpp.points import write_points
from deuteron.codegen.cpp.row_nests import write_row_split, write_rows
from deuteron.codegen.cpp.support import helpers, support
from deuteron.codegen.cpp.tile_text import Printer
from deuteron.codegen.cpp.unroll import unroll, worth_unrolling
from deuteron.codegen.loops import Loops, Write, prepare, unique_nodes
from deuteron.codegen.lowering import Tiles, lower_nest
from deuteron.codegen.precision import erf_of_one_plus, inexact
from deuteron.codegen.verify import loops_text, verify_loops
from deuteron.ir.expr import Expr, children, index_value
from deuteron.ir.index import Sym, fits_int
from deuteron.ir.program import Layout
from deuteron.schedule.kernel import Kernel, Nest, Reduce, Scan
from deuteron.schedule.printer import kernel_lines

KERNEL_CXX_FLAGS = (
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    # It hoists what the vectoriser has dealt with, and then g++ 12 needs the square of the time:
    # 15 s for 63 sines in a loop, 1.1 s without; the code is as fast (14 programs within 3 %).
    "-fno-gcse",
    # It makes a choice of comparisons of a comparison of choices; g++ 12 has no vectors for that
    # (clamp and cast to int8 3.4 times, max-pooling 2.1 times as fast without; others within 3 %).
    "-fno-tree-pre",
    # It copies the statement that reports an index that is out of range into the branches of a
    # choice. g++ 12 then reads what the lanes of a vector have reported from beyond its array:
    # indices in range were refused. Without it clamp and cast to int8 take two thirds of the time,
    # 19 other programs the same within 3 %, or less.
    "-fno-thread-jumps",
    # The address of a load under a mask that it moves out of a loop then counts with the loop
    # (g++ 12; random program 54005219). 59 programs take 1.01 of the time without.
    "-fno-ivopts",
    # It takes two steps of a loop over lanes at once, and then has no registers for accumulators:
    # they go through memory (AVX2, sums of rows of 1024 take 0.95 of the time without, layer norm
    # 0.98, softmax and the gradients of RMS norm the same within 1 %).
    "-fno-loop-unroll-and-jam",
    # It makes memcpy of loops, and numbers of 512 bits of what that copies. Where one is known, of
    # equal elements and zeros behind them, g++ 12 loads equal elements alone (random program
    # 64008433). 18 programs take 1.02 of the time without.
    "-fno-tree-loop-distribute-patterns",
    "-std=c++17",
    "-fPIC",
    "-shared",
)
# One core of an EPYC with AVX-512, data in its caches: x + 1 of 32 K floats takes 1.3 us
# (200 KB/us; a third of that from L3), exp of 16 K floats 3.4 us (12 FLOPs each).
CORE_BYTES_PER_US = 100e3
CORE_FLOPS_PER_US = 50e3
# FLOPs of one iteration of a loop from which `D_DENSE` pays (AVX2, time with it: GELU with tanh
# 0.86, binary cross-entropy 0.79, eight activations 0.79, two exponentials per iteration 0.96; of
# lighter ones softmax 1.05, quantization to float8 1.14).
MIN_DENSE_FLOPS = 24.0
# Where threads begin to pay: the 32 K additions above take as long on two threads as on one. A
# region of many threads costs more.
PARALLEL_US = 1.5
PARALLEL_US_PER_THREAD = 0.1


@dataclass(frozen=True)
class CppKernel:
    """The C++ of one kernel. `used` are the prelude's and support functions that it calls.

    Where `checks`, the unit has ``extern "C" int cpp_index_error``, which a kernel sets to 1 (and
    nobody resets) when an index that it loaded is out of range; it then went on with index 0.
    """

    name: str
    source: str
    args: tuple[tuple[str, str], ...]
    sizes: tuple[Sym, ...]
    used: frozenset[str]
    checks_indices: bool = False  # whether it may set `cpp_index_error`

    @property
    def checks_accesses(self) -> bool:
        """Whether every access is checked, and reported in the unit's `cpp_bounds_error`."""
        return "d_checked" in self.used


# -- artifacts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A kernel to be written. `machine` decides tile sizes and whether rows are shared among
    threads; `checked`: loaded indices are checked; `again`: results that later steps read;
    `accesses`: every access is checked; `averages`: see `precision.inexact`."""

    kernel: Kernel
    machine: Machine
    checked: bool = True
    again: frozenset[str] = frozenset()
    accesses: bool = False
    averages: bool = True

    @property
    def layouts(self) -> dict[str, Layout]:
        """The kernel's tensors in the order of its arguments."""
        return dict(self.kernel.reads) | dict(self.kernel.writes)


@dataclass(frozen=True, kw_only=True)
class Checked(Task):
    nests: tuple[Nest, ...]


@dataclass(frozen=True, kw_only=True)
class Looped(Checked):
    loops: tuple[Loops, ...]


@dataclass(frozen=True, kw_only=True)
class Threaded(Looped):
    """`threaded`: whether threads share the work, if that is enough at the sizes of a call (which
    are known before where the kernel is `fixed`)."""

    threaded: bool
    fixed: bool


@dataclass(frozen=True, kw_only=True)
class Stored(Threaded):
    """Tensors that are written past the caches, everywhere or where they go in tiles."""

    nontemporal: frozenset[str]
    nontemporal_tiles: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Cut(Stored):
    """Each nest in pieces."""

    pieces: tuple[tuple[Loops, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Written(Cut):
    """Lines of the nests. `pointers`: the variable of each tensor's address; `aliases`: how many
    names that has; `shared`: declarations that all threads share; `used`: functions that are
    called; `numbers` count on."""

    pointers: dict[str, str]
    aliases: dict[str, int]
    body: tuple[str, ...]
    shared: tuple[str, ...]
    used: frozenset[str]
    dense: bool
    checks: bool
    numbers: Iterator[int]


# -- the passes ------------------------------------------------------------------------------------


def check_indices(task: Task, context: Context) -> Checked:
    """Indices that are loaded go through checks."""
    kernel, layouts = task.kernel, task.layouts
    assert not any(n.group_axes for n in kernel.nests), "rows have no groups on a CPU"
    nests = (with_checks(_with_loop(n), layouts, task.checked, index_value) for n in kernel.nests)
    return extended(Checked, task, nests=tuple(nests))


def make_loops(task: Checked, context: Context) -> Looped:
    """Linear addresses and canonical axes."""
    layouts = task.layouts
    return extended(Looped, task, loops=tuple(prepare(n, layouts) for n in task.nests))


def share_among_threads(task: Looped, context: Context) -> Threaded:
    """Threads share what takes longer than to wake them."""
    estimate = sum(estimated_us(n) for n in task.loops)
    if task.kernel.contraction is not None:
        estimate = task.kernel.predicted_us * task.machine.threads
    fixed = not _symbols(task.kernel)
    enough = estimate > _least_us(task.machine) or not fixed
    return extended(Threaded, task, threaded=task.machine.threads > 1 and enough, fixed=fixed)


def store_past_caches(task: Threaded, context: Context) -> Stored:
    """Results that no cache holds until they are read."""
    points = tiles = frozenset[str]()
    if not task.accesses:
        points, tiles = (
            nontemporal_tensors(task.kernel, task.machine, task.again, t) for t in (False, True)
        )
    return extended(Stored, task, nontemporal=points, nontemporal_tiles=tiles)


def cut_loops(task: Stored, context: Context) -> Cut:
    """Loops are cut where conditions on them change."""
    return extended(Cut, task, pieces=tuple(tuple(split_index_sets(n)) for n in task.loops))


def write_nests(task: Cut, context: Context) -> Written:
    """The lines of every nest."""
    pointers = {n: f"p{i}_" + plain_name(n)[:40] for i, n in enumerate(task.layouts)}
    used: set[str] = {"d_checked"} if task.accesses else set()
    numbers = itertools.count()
    shared: list[str] = []
    body: list[str] = []
    checks = dense = False
    names = dict.fromkeys(task.layouts, 1)
    for k, (piece, loops) in ((k, x) for k, n in enumerate(task.pieces) for x in enumerate(n)):
        if k in task.kernel.barriers and task.threaded and not piece:
            body.append("#pragma omp barrier")
        em = Emitter(pointers, used, numbers)
        em.maxima = {
            p.name: {p.body} for p in loops.statements if isinstance(p, Reduce) and p.kind == "max"
        }
        em.approximate = inexact(loops, lambda e: False, task.averages).approximate
        em.reused_curves, em.erf_plus_one = _reused_curves(loops), _erf_plus_one(loops)
        em.wide = not all(fits_int(a.extent) for a in (*loops.parallel, *loops.reduced))
        past = (task.nontemporal, task.nontemporal_tiles)
        env = Env(loops, em, task.machine, task.threaded, shared, *past)
        write_nest(env)
        names |= {n: max(names[n], len(places)) for n, places in em.masked.items()}
        inside = env.em.chain[0].lines
        dense |= em.dearest >= MIN_DENSE_FLOPS
        if "d_nontemporal" in used:
            inside.append("d_nontemporal_end();")
        if env.em.checked:
            inside = ["int bad = 0;", *inside, "if (bad) cpp_index_error = bad;"]
            checks = True
        body += ["{", *("  " + s for s in inside), "}"]
    if task.kernel.contraction is not None:
        nest, tiling = task.kernel.contraction
        tiles = Tiles(whole=False, powers=False, reciprocals=False, quarters=False)
        code = lower_nest(nest, tiling, task.layouts, tiles)
        body = Printer(tiling, pointers, used, not task.accesses).print(code, task.threaded)
    return extended(
        Written,
        task,
        pointers=pointers,
        aliases=names,
        body=tuple(body),
        shared=tuple(shared),
        used=frozenset(used | ({"D_DENSE"} if dense else set())),
        dense=dense,
        checks=checks,
        numbers=numbers,
    )


def write_function(task: Written, context: Context) -> CppKernel:
    """The function around them: arguments, sizes, the threads' region."""
    kernel, layouts, accesses = task.kernel, task.layouts, task.accesses
    pointers, used = task.pointers, set(task.used)
    written = {n for n, _ in kernel.writes}
    how = "D_DENSE " if task.dense else ""
    lines = [f'extern "C" {how}void cpp_{kernel.name}(void** ptrs, const long long* sizes) {{']
    symbols = _symbols(kernel)
    taken = [f"  const long long {size_name(s)} = sizes[{i}];" for i, s in enumerate(symbols)]
    lines += taken if accesses else []
    for i, (name, lay) in enumerate(layouts.items()):
        kind = ("" if name in written else "const ") + scalars.MEMORY_TYPES[lay.dtype]
        made = f"{kind}* const {pointers[name]} = ({kind}*)ptrs[{i}];"
        if accesses:
            count = Emitter({}, used, task.numbers)._sum(lay.extent() + lay.offset)
            made = checked_pointer(
                i, name, lay, pointers[name], name in written, kernel.name, count
            )
        lines.append(f"  {made}  {_comment(f'{name}: {_layout_text(lay)}')}")
        for number in range(1, task.aliases[name]):
            other = alias_name(pointers[name], number)
            same = pointers[name] if accesses else f"d_alias({pointers[name]})"
            lines.append(f"  const auto {other} = {same};")
            used |= set() if accesses else {"d_alias"}
    lines += [] if accesses else taken
    lines += ["  " + s for s in task.shared]
    if task.threaded:
        guard = "" if task.fixed else f" if({_work_text(task)})"
        lines += [f"  #pragma omp parallel{guard}", "  {", *("    " + s for s in task.body), "  }"]
    else:
        lines += ["  " + s for s in task.body]
    lines.append("}")
    return CppKernel(
        kernel.name,
        "\n".join([*_comments(kernel), *lines]),
        tuple(("tensor", n) for n in layouts),
        symbols,
        frozenset(used),
        task.checks,
    )


def verify_looped(task: Looped, guilty: str) -> None:
    verify_loops(task.kernel, task.loops, guilty)


def verify_cut(task: Cut, guilty: str) -> None:
    verify_loops(task.kernel, (x for pieces in task.pieces for x in pieces), guilty)


def checked_text(task: Checked) -> str:
    kernel = replace(task.kernel, nests=task.nests)
    return "\n".join(kernel_lines(kernel))


def looped_text(task: Looped) -> str:
    return loops_text(task.kernel, task.loops)


def threaded_text(task: Threaded) -> str:
    return f"{task.kernel.name}: {task.machine.threads if task.threaded else 1} threads"


def stored_text(task: Stored) -> str:
    past, tiles = ", ".join(sorted(task.nontemporal)), ", ".join(sorted(task.nontemporal_tiles))
    return f"{task.kernel.name}: past the caches {past or 'nothing'}; in tiles {tiles or 'nothing'}"


def cut_text(task: Cut) -> str:
    lines = (
        f"nest {k}, piece {number}:\n{loops_text(task.kernel, [piece])}"
        for k, pieces in enumerate(task.pieces)
        for number, piece in enumerate(pieces)
    )
    return "\n".join(lines)


def written_text(task: Written) -> str:
    return "\n".join((f"// {task.kernel.name}", *task.shared, *task.body))


def source_text(code: CppKernel) -> str:
    return code.source


COMPILED = "the C++ compiler reads the text"
CPP: Table = (
    Pass("index checks", check_indices, "the loops that are made of it are verified", checked_text),
    Pass("loops", make_loops, verify_looped, looped_text),
    Pass("threads", share_among_threads, "either choice is right", threaded_text),
    Pass("non-temporal stores", store_past_caches, "either choice is right", stored_text),
    Pass("index sets", cut_loops, verify_cut, cut_text),
    Pass("nests", write_nests, COMPILED, written_text),
    Pass("function", write_function, COMPILED, source_text),
)


def generate(
    kernel: Kernel,
    spec: DeviceSpec,
    context: Context | None = None,
    again: frozenset[str] = frozenset(),
) -> CppKernel:
    """The C++ function of a kernel for a CPU. `again` are results that later steps read."""
    context = context or Context()
    return write_kernel(task_of(kernel, spec, context.options, again), context)


def task_of(
    kernel: Kernel, spec: DeviceSpec, options: Options, again: frozenset[str] = frozenset()
) -> Task:
    """What is to be written for a CPU, with these options."""
    machine = Machine(options.threads or spec.cores, spec.l2, spec.l3)
    checked, accesses = options.bounds_check, options.check_accesses
    return Task(kernel, machine, checked, again, accesses, options.precision == "float32")


def write_kernel(task: Task, context: Context) -> CppKernel:
    """The C++ function of a kernel."""
    code: CppKernel = run_passes(CPP, task, context)
    return code


def translation_unit(kernels: Sequence[CppKernel]) -> str:
    """All kernels of a graph as one source without includes."""
    from deuteron.codegen.cpp.prelude import prelude

    used: set[str] = set().union(*(k.used for k in kernels))
    head = (
        ['extern "C" { int cpp_index_error = 0; }']
        if any(k.checks_indices for k in kernels)
        else []
    )
    head += [BOUNDS_ERROR] if "d_checked" in used else []
    return "\n".join(
        [*head, prelude(used - helpers().keys()), support(used), *(k.source for k in kernels), ""]
    )


def _reused_curves(loops: Loops) -> frozenset[Expr]:
    """Exponentials and tangents that are used more than once."""
    roots, curves = loops.roots(), ("exp", "tanh")
    users = Counter(c for n in unique_nodes(roots) for c in children(n) if c.op in curves)
    users.update(r for r in roots if r.op in curves)
    return frozenset(e for e, count in users.items() if count > 1)


def _erf_plus_one(loops: Loops) -> frozenset[Expr]:
    """Error functions of which only ``1 + erf(x)`` is used."""
    roots = loops.roots()
    users = [(c, n) for n in unique_nodes(roots) for c in children(n) if c.op == "erf"]
    others = {c for c, n in users if erf_of_one_plus(n) is not c} | set(roots)
    return frozenset(c for c, _ in users if c.dtype == "f32" and c not in others)


def write_nest(env: Env) -> None:
    """Chooses the vector axis and with it the way the nest is written."""
    loops = env.loops
    reductions = any(isinstance(p, (Reduce, Scan)) for p in loops.statements)
    if loops.row_split is not None:
        v = vector_axis(loops, loops.reduced)
        assert v is not None
        write_row_split(env, v)
        return
    if not reductions and not any(
        isinstance(p, Write) and p.level == "row" for p in loops.statements
    ):
        env.loops = replace(loops, parallel=(*loops.parallel, *loops.reduced), reduced=())
        write_points(env)
        return
    if worth_unrolling(loops):
        env.loops, env.unrolled = unroll(loops), True
        write_points(env)
        return
    v = vector_axis(loops, (*loops.parallel, *loops.reduced))
    assert v is not None
    if v in loops.reduced:
        write_rows(env, v)
    else:
        write_columns(env, v)


def _with_loop(nest: Nest) -> Nest:
    """A reduction over no axes gets one of extent 1, so that every reduction has a loop."""
    from deuteron.ir.index import Axis, const

    if nest.reduced or not any(isinstance(s, (Reduce, Scan)) for s in nest.stmts):
        return nest
    return replace(nest, reduced=(Axis("single", const(1)),))


def estimated_us(loops: Loops) -> float:
    """Time of one core at hinted sizes; decides only whether threads pay."""
    points = size((*loops.parallel, *loops.reduced))
    bytes_each = sum(a.itemsize for a in loops.accesses)
    return points * (bytes_each / CORE_BYTES_PER_US + flops_of(loops.nodes) / CORE_FLOPS_PER_US)


def _least_us(machine: Machine) -> float:
    return PARALLEL_US + PARALLEL_US_PER_THREAD * machine.threads


def _work_text(task: Threaded) -> str:
    """C text: whether the work at the actual sizes pays for threads."""
    em = Emitter({}, set(), itertools.count())
    work = []
    if task.kernel.contraction is not None:
        axes = task.kernel.contraction[0].axes
        work.append((axes, task.kernel.predicted_us * task.machine.threads / max(1, size(axes))))
    for n in task.loops:
        each = (
            sum(a.itemsize for a in n.accesses) / CORE_BYTES_PER_US
            + flops_of(n.nodes) / CORE_FLOPS_PER_US
        )
        work.append(((*n.parallel, *n.reduced), each))
    parts = []
    for axes, each in work:
        total = "*".join(f"(double)({em._sum(a.extent)})" for a in axes) or "1.0"
        parts.append(f"{total}*{each:.3g}")
    return f"{' + '.join(parts)} > {_least_us(task.machine)}"


def _symbols(kernel: Kernel) -> tuple[Sym, ...]:
    symbols: set[Sym] = set()
    for _, lay in (*kernel.reads, *kernel.writes):
        for i in (*lay.shape, *lay.strides, lay.offset):
            symbols |= i.syms()
    if kernel.contraction is not None:
        symbols |= kernel.contraction[0].syms()
    for nest in kernel.nests:
        for a in (*nest.parallel, *nest.reduced):
            symbols |= a.extent.syms()
        for e in nest.exprs():
            for i in e.indices():
                symbols |= i.syms()
        for s in nest.stmts:
            for i in getattr(s, "index", ()):
                symbols |= i.syms()
    return tuple(sorted(symbols))


def _layout_text(lay: Layout) -> str:
    return f"{lay.dtype}{list(lay.shape)} strides {list(lay.strides)}"


def _comment(text: str) -> str:
    """A comment to the end of the line. A backslash there would draw the next line into it; in old
    C++ so would its trigraph."""
    return "// " + one_line(text).replace("\\", "/").replace("??/", "? ?/")


def _comments(kernel: Kernel) -> list[str]:
    """What the kernel is, where it comes from, what it moves and computes."""
    out = [
        f"// {kernel.name}: {kernel.bytes} bytes, {kernel.flops:.0f} FLOPs, "
        f"{kernel.predicted_us:.1f} us predicted"
    ]
    for o in kernel.origins:
        where = f"  {o.line}" if o.line else ""
        out.append(_comment(f"  {o.node} = {o.op}{where}"))
    return out
