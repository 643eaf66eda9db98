"""Nests of rows: each row by one thread, rows that threads share in splits, row splits."""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.emit import smaller
from deuteron.codegen.cpp.environment import (
    ROW_SCOPE,
    Env,
    parallel_loops,
    serial_loops,
    size,
    write_store,
)
from deuteron.codegen.cpp.reductions import FLUSH_ADDITIONS, Accumulator
from deuteron.codegen.cpp.row_passes import RowPass
from deuteron.codegen.cpp.rows import Rows, interleaves_rows, row_bytes
from deuteron.codegen.loops import (
    SPLIT,
    CrossRowReduce,
    outermost_first,
)
from deuteron.ir.index import Axis, hint

MAX_SPLITS = 64  # most splits of a shared row


MIN_SPLIT_OPS = 16384  # least element operations of a split (about 2 us)


def split_counts(env: Env, axis: Axis, ops: int, round_to: int, least: int = 1) -> tuple[str, str]:
    """C names of the split length along `axis` (`least` or longer) and of the number of splits,
    from sizes alone."""
    em = env.em
    least = max(least, round_to, -(-MIN_SPLIT_OPS // max(1, ops)) // round_to * round_to)
    n = env.extent(axis)
    length, count = em.fresh("len"), em.fresh("splits")
    em.chain[0].add(
        f"const long long {length}_0 = (({n} + {MAX_SPLITS - 1}) / {MAX_SPLITS} + {round_to - 1})"
        f" / {round_to} * {round_to};",
        f"const long long {length} = {length}_0 > {least} ? {length}_0 : {least};",
        f"const long long {count} = ({n} + {length} - 1) / {length};",
    )
    return length, count


def write_rows(env: Env, v: Axis) -> None:
    """Writes the nest with lanes along the reduced axis `v`."""
    loops = env.loops
    cache = env.machine.l2_bytes // 2
    rows = Rows(env, v, cache, row_bytes(loops) > cache)
    parallel = outermost_first(loops, loops.parallel)
    work = size(loops.reduced)
    conflict = [a for a in parallel if a in rows.conflicts]
    free = [a for a in parallel if a not in rows.conflicts]
    has_scan = any(q.scans for q in rows.plan.passes)
    shared_row = rows.conflicts.isdisjoint(loops.reduced) and not has_scan
    if (
        env.threaded
        and size(free) < 2 * env.machine.threads
        and work >= 4 * MIN_SPLIT_OPS
        and shared_row
    ):
        write_shared_rows(env, v, parallel)
        return
    prelude = rows.allocate()
    env.em.scope.add(*prelude)

    rows.step = next(reversed(free + conflict), None)
    interleaved = not conflict and interleaves_rows(env, free)
    parallel_loops(env, free, [], lambda: serial_loops(env, conflict, rows.row), interleaved)


def write_shared_rows(env: Env, v: Axis, parallel: Sequence[Axis]) -> None:
    """All threads work on each row; see the module's docstring."""
    em, loops = env.em, env.loops
    cached = env.machine.threads * env.machine.l2_bytes // 2
    rows = Rows(env, v, 0, row_bytes(loops) > cached)
    axis = rows.outer[0] if rows.outer else v
    per_step = size([a for a in loops.reduced if a != axis])
    length, count = split_counts(env, axis, per_step, 64 if axis == v else 1)

    def row() -> None:
        with em.inside(ROW_SCOPE) as scope:
            for k, p in enumerate(rows.plan.passes):
                shared_pass(env, rows, k, p, axis, length, count)
            if rows.plan.row_writes:
                for w in rows.plan.row_writes:
                    em.value(w.value)  # every thread has read what the stores may overwrite
                scope.add("#pragma omp barrier", "#pragma omp single")
                with em.inside() as stores:
                    for w in rows.plan.row_writes:
                        write_store(env, w)
                scope.loop("", stores.lines)
            elif parallel:
                scope.add("#pragma omp barrier")
        em.scope.add(*scope.lines)

    serial_loops(env, parallel, row)


def shared_pass(
    env: Env, rows: Rows, k: int, p: RowPass, axis: Axis, length: str, count: str
) -> None:
    em = env.em
    if p.rules:
        rows.online(p).in_splits(rows.walker(k), length, count, MAX_SPLITS)
        return
    accs = {
        f.name: Accumulator(em.fresh("f"), f.kind, f.body.dtype, em.used, em.wide)
        for f in p.reductions
    }
    c = em.fresh("c")
    for a in accs.values():
        kind = "double" if a.flushed else scalars.REGISTER_TYPES[a.dtype]
        env.shared.append(f"alignas(64) {kind} {a.name}_p[{MAX_SPLITS}];")
        if a.positional:
            env.shared.append(f"alignas(64) long long {a.name}_pi[{MAX_SPLITS}];")
    with em.inside() as scope:
        low, high = em.fresh("lo"), em.fresh("hi")
        scope.add(
            f"const long long {low} = {c} * {length};",
            f"const long long {high} = {smaller(f'{low} + {length}', env.extent(axis))};",
        )
        lanes = rows.start(p, accs)
        rows.walk(p, k, accs, lanes, (axis, low, high))
        for a in accs.values():
            scope.add(*a.finish(lanes))
            scope.add(
                f"{a.name}_p[{c}] = {a.name}_{'d' if a.flushed else 'b' if a.positional else 'r'};"
            )
            if a.positional:
                scope.add(f"{a.name}_pi[{c}] = {a.name}_r;")
    em.scope.add("#pragma omp for schedule(static)")
    em.scope.loop(f"for (long long {c} = 0; {c} < {count}; ++{c})", scope.lines)
    for f in p.reductions:
        em.scope.add(*accs[f.name].gather(count))
        rows.bind(f.name, accs[f.name])


def write_row_split(env: Env, v: Axis) -> None:
    """Rows in splits, one thread each; cross-row reductions of a thread go to its own row of the
    partial results.
    """
    em, loops = env.em, env.loops
    assert loops.row_split is not None
    axis, count = loops.row_split
    rows = Rows(env, v, env.machine.l2_bytes // 4)
    others = outermost_first(loops, [a for a in loops.parallel if a != axis])
    cols = [p for p in loops.statements if isinstance(p, CrossRowReduce)]
    split = em.name_axis(SPLIT)
    low, high, row_name = em.fresh("lo"), em.fresh("hi"), em.name_axis(axis)
    rows_each = -(-hint(axis.extent) // count) * size(others)
    known = all(a.extent.value is not None for a in others)
    two_level = rows_each > 4 * FLUSH_ADDITIONS or axis.extent.value is None or not known
    em.scope.add(*rows.allocate())
    accs: list[tuple[CrossRowReduce, Accumulator]] = []
    n = env.extent(rows.row_size)
    total = ["0"]
    scratch = em.fresh("cols")
    for p in cols:
        a = Accumulator(em.fresh("col"), p.kind, p.body.dtype, em.used, em.wide)
        accs.append((p, a))
        rows.columns[p.name] = a.name
        em.scope.add(f"{a.type}* const {a.name} = ({a.type}*)({scratch} + ({' + '.join(total)}));")
        total.append(f"({n} * (long long)sizeof({a.type}) + 63) / 64 * 64")
        if a.flushed and two_level:
            em.scope.add(
                f"double* const {a.name}_d = (double*)({scratch} + ({' + '.join(total)}));"
            )
            total.append(f"({n} * 8LL + 63) / 64 * 64")
    where = len(em.scope.lines) - sum(1 + (a.flushed and two_level) for _, a in accs)
    em.used.add("d_scratch_columns")
    em.scope.lines.insert(where, f"char* const {scratch} = d_scratch_columns({' + '.join(total)});")
    rows_per_split = env.extent((axis.extent + (count - 1)) // count)
    with em.inside(SPLIT) as outer:
        outer.add(
            f"const long long {low} = {split} * {rows_per_split};",
            f"const long long {high} = {smaller(f'{low} + {rows_per_split}', env.extent(axis))};",
        )
        for _, a in accs:
            double = f" {a.name}_d[l] = 0;" if a.flushed and two_level else ""
            outer.add(
                f"for (long long l = 0; l < {n}; ++l) {{ {a.name}[l] = {a.identity};{double} }}"
            )
        with em.inside(axis) as scope:
            rows.step = others[-1] if others else axis
            flush = [s for _, a in accs if two_level for s in a.flush_lanes(n)]
            if flush and not known:  # how many rows go to one step of the worker is seen then
                counter = em.fresh("n")
                outer.add(f"int {counter} = 0;")
                flush = [f"{counter} = 0;", *flush]

            def row() -> None:
                rows.row()
                if flush and not known:
                    em.scope.loop(f"if (++{counter} == {FLUSH_ADDITIONS * 2})", flush)

            serial_loops(env, others, row)
            if flush and known:
                every = max(1, FLUSH_ADDITIONS * 2 // size(others))
                scope.loop(f"if (({row_name} - {low}) % {every} == {every - 1})", flush)
        outer.loop(
            f"for (long long {row_name} = {low}; {row_name} < {high}; ++{row_name})", scope.lines
        )
        for p, a in accs:
            if two_level:
                outer.add(*a.flush_lanes(n))
            value = f"({a.type}){a.name}_d" if a.flushed and two_level else a.name
            store_columns(env, rows, p, value)
    em.scope.add(*env.omp_for(1))
    em.scope.loop(f"for (long long {split} = 0; {split} < {count}; ++{split})", outer.lines)


def store_columns(env: Env, rows: Rows, p: CrossRowReduce, array: str) -> None:
    """Copies one thread's column results to memory."""
    em = env.em
    v = rows.v

    def innermost() -> None:
        name = em.name_axis(v)
        with em.inside(v) as scope:
            value = f"{array}[{em.index(rows.linear)}]"
            cell = f"{em.tensors[p.tensor]}[{em.index(p.address)}]"
            scope.add(f"{cell} = {scalars.to_memory(value, p.body.dtype, em.used)};")
        em.scope.add("#pragma omp simd")
        em.scope.loop(
            f"for (long long {name} = 0; {name} < {env.extent(v)}; ++{name})", scope.lines
        )

    serial_loops(env, rows.outer, innermost)
