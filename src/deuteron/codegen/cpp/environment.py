"""The environment of a C++ nest: the machine, the emitter, what threads share; loops around a body,
and stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.emit import Emitter
from deuteron.codegen.cpp.reductions import combine
from deuteron.codegen.loops import (
    Loops,
    Write,
    all_indices,
)
from deuteron.ir.index import Axis, Div, Index, determined, hint, product
from deuteron.ir.operations import HALF

ROW_SCOPE = Axis(
    "row", 1
)  # provided by the scope of one row: what depends on a reduction's result is not hoisted out of it

FEW_STEPS = (2, 3, 4)  # steps of a loop that are written out


@dataclass(frozen=True)
class Machine:
    """What the generator must know of the CPU. Bytes are per core."""

    threads: int
    l2_bytes: int
    l3_bytes: int = 0  # of all cores; 0 where there is none


@dataclass
class Env:
    """The environment of one nest."""

    loops: Loops
    em: Emitter
    machine: Machine
    threaded: bool  # inside a parallel region
    shared: list[str] = field(
        default_factory=list
    )  # declarations that all threads of the region share
    nontemporal: frozenset[str] = frozenset()  # tensors with non-temporal stores
    nontemporal_tiles: frozenset[str] = frozenset()  # those stored so in tiles
    unrolled: bool = (
        False  # whether stores hold the reductions of the nest, which come before all stores
    )

    def extent(self, axis: Axis | Index) -> str:
        """C text of a size, which may stand in a product or a difference."""
        text = self.em.index(axis.extent if isinstance(axis, Axis) else axis, 0)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def share(self, name: str, kind: str, count: int) -> None:
        """Declares an array that all threads see, in memory of its own that the calling thread
        keeps.
        """
        self.em.used.add("d_shared")
        memory = f"d_shared<{len(self.shared)}>({count}LL * sizeof({kind}))"
        self.shared.append(f"{kind}* const {name} = ({kind}*){memory};")

    def omp_for(self, collapse: int, nowait: bool = True) -> list[str]:
        if not self.threaded:
            return []
        both = f" collapse({collapse})" if collapse > 1 else ""
        return [f"#pragma omp for{both} schedule(static){' nowait' if nowait else ''}"]


def size(axes: Sequence[Axis]) -> int:
    return hint(product(a.extent for a in axes))


def parallel_loops(
    env: Env,
    axes: Sequence[Axis],
    extra: Sequence[tuple[str, str]],
    inner: Callable[[], None],
    interleaved: bool = False,
) -> None:
    """Nested loops over `axes` (outermost first) and `extra` (name, count), shared among threads;
    `inner` fills them.

    Only as many loops are collapsed as the threads need, so that addresses can be hoisted between
    the others. Where they are `interleaved`, those are one loop (`interleaved_loop`).
    """
    em, need = env.em, 16 * env.machine.threads
    count, have = 0, 1
    if extra:
        count = len(axes)
    else:
        while count < len(axes) and have < need:
            have *= max(1, hint(axes[count].extent))
            count += 1
    outer, rest = axes[:count], axes[count:]
    heads = [(em.name_axis(a), env.extent(a)) for a in outer] + list(extra)
    with em.inside(*outer) as scope:
        serial_loops(env, rest, inner)
    text = [f"for (long long {n} = 0; {n} < {e}; ++{n})" for n, e in heads]
    if not text:
        once = "#pragma omp single nowait"
        env.em.scope.add(*([once] if env.threaded else []))
        env.em.scope.loop("", scope.lines)
        return
    if interleaved:
        interleaved_loop(env, heads, scope.lines)
        return
    env.em.scope.add(*env.omp_for(len(text)), *text[:-1])
    env.em.scope.loop(text[-1], scope.lines)


def interleaved_loop(env: Env, heads: Sequence[tuple[str, str]], lines: Sequence[str]) -> None:
    """One loop over all of `heads` (name, count), which takes a step in each of several ranges."""
    em = env.em
    em.used |= {"d_interleaved", "d_reads_stall"}
    step, steps, at = em.fresh("t"), em.fresh("steps"), em.fresh("at")
    em.scope.add(f"const long long {steps} = {' * '.join(n for _, n in heads)};")
    position = [f"const long long {at} = d_interleaved<d_interleaved_ranges>({step}, {steps});"]
    left = at
    for name, n in reversed(heads[1:]):
        position.append(f"const long long {name} = {left} % {n};")
        left = f"{left} / {n}"
    position.append(f"const long long {heads[0][0]} = {left};")
    em.scope.add(*env.omp_for(1))
    em.scope.loop(f"for (long long {step} = 0; {step} < {steps}; ++{step})", [*position, *lines])


def apart(loops: Loops, axis: Axis) -> list[str]:
    """The pragma that writes the few steps of a loop out where positions are divided that depend on
    it: each step reads a window of its own, which the compiler then knows. The gradient of a max
    pool, 3x3 with a stride of 2, 4x16x16x16 channels last: 372 us, 160 so."""
    count = axis.extent.value
    atoms = (a for i in all_indices(loops) for a in i.atoms())
    divided = (a for a in atoms if isinstance(a, Div) and axis in a.num.axes())
    return [f"#pragma GCC unroll {count}"] if count in FEW_STEPS and any(divided) else []


def serial_loops(
    env: Env, axes: Sequence[Axis], inner: Callable[[], None], pragma: Sequence[str] = ()
) -> None:
    """Nested loops over `axes` in the thread that comes by, each behind `pragma`."""
    if not axes:
        inner()
        return
    axis, em = axes[0], env.em
    name = em.name_axis(axis)
    with em.inside(axis) as scope:
        serial_loops(env, axes[1:], inner, pragma)
    em.scope.add(*(pragma or apart(env.loops, axis)))
    em.scope.loop(f"for (long long {name} = 0; {name} < {env.extent(axis)}; ++{name})", scope.lines)


def write_store(env: Env, w: Write, target: str | None = None) -> None:
    """Writes one store at the current point (or to `place`)."""
    em = env.em
    cast = w.dtype in HALF and w.accumulate is None and w.value.op == "cast"
    at_once = cast and w.value.args[0].dtype == "f32"
    value = em.value(w.value.args[0] if at_once else w.value)
    mask = em.value(w.mask) if w.mask is not None else None
    if target is None:
        target = f"{em.tensors[w.tensor]}[{em.index(w.address)}]"
    if w.accumulate is not None:
        old = scalars.from_memory(target, w.dtype, em.used)
        value = combine(w.accumulate, w.dtype, old, value, em.used)
    stored = scalars.rounded_to_memory if at_once else scalars.to_memory
    line = f"{target} = {stored(value, w.dtype, em.used)};"
    if em.guard is not None:
        mask = em.guard if mask is None else f"{em.guard} & {mask}"
    em.scope.add(f"if ({mask}) {line}" if mask is not None else line)


def ordered_conflicts(loops: Loops) -> set[Axis]:
    """Axes along which two points may store to the same element: run in order, by one thread."""
    out: set[Axis] = set()
    for p in loops.statements:
        if isinstance(p, Write):
            domain = {*loops.parallel, *(loops.reduced if p.level == "point" else ())}
            if p.scattered or p.accumulate is not None:
                out |= domain - determined(p.address)
            else:  # whoever computes all elements of a tensor computes each once
                out |= {a for a in domain if a not in p.address.axes()}
    return out
