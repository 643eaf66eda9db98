"""Triton text of rows that several programs share: who holds what, and the exchange of reductions.

Cooperating programs hold a block of the same row each and walk over the same rows. Each publishes
what it reduces of its block. Before anyone uses a reduction it collects what all have published, in
the order of their ranks, so that results repeat bit for bit. Reductions that do not need one
another are published first and collected together; so are reductions that need others by a rule of
`schedule.online`: each block's result is one relative to the block's own maximum or mean. Of a scan
a program publishes what its block reduces to, and adds what comes before it to the block's own
scan.

Flags are used in turn by four rounds: who publishes round k + 4 has collected round k + 2, so that
all have published that, and had collected round k before.
"""

from __future__ import annotations

from collections.abc import Collection

from deuteron.base.cluster import EXCHANGE_ROUNDS
from deuteron.codegen.loops import Loops, Write, roots_of, unique_nodes
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.reductions import (
    bind,
    clean,
    full,
    identity,
    masked_value,
    paired,
    power_text,
    reduce_rows,
    scan_result,
    uses,
)
from deuteron.codegen.triton.scalars import reduction_step
from deuteron.codegen.triton.scope import R
from deuteron.codegen.triton.tiling import Tiling
from deuteron.ir.expr import Expr
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.online import Chain, Products, Rescaled, Rule
from deuteron.schedule.programs import power

# Flags of a launch: the number of programs that are done, the last tag used, then each row group's.
FIRST_FLAG = 16
FLAGS_PARAM = "flags_ptr"
WARP = 32


class CooperativeRows:
    """The exchanges of one nest; `first` is the Triton text of the number of the row group:
    the programs that share rows."""

    first = "row_group"

    def __init__(self, tiling: Tiling, em: Emitter, loops: Loops) -> None:
        self.count, self.em, self.cluster = tiling.programs_per_row, em, int(tiling.cluster)
        blocks = tiling.candidates[0]
        self.each = blocks.of("r") // (WARP * blocks.num_warps)  # elements of a thread
        row = frozenset(em.dims) - {"r"}
        chain = Chain(lambda e: em.deps(e) <= row)
        self.reductions = {p.name: p for p in loops.statements if isinstance(p, (Reduce, Scan))}
        for f in self.reductions.values():
            chain.add(f)
        self.sums: dict[str, str] = {}  # sum of squares -> the sum of the same elements
        self.rules: dict[str, Rule] = {}
        for name, rule in chain.rules.items():
            if isinstance(rule, Products) and rule.square:
                reductions = (f for f in self.reductions.values() if isinstance(f, Reduce))
                same = [f for f in reductions if f.kind == "sum" and f.body is rule.x]
                if same:
                    self.rules[name], self.sums[name] = rule, same[0].name
            elif isinstance(rule, Rescaled):
                self.rules[name] = rule  # others wait for what they need
        self.exchange_numbers = {name: k for k, name in enumerate(self.reductions)}
        self.local: dict[str, str] = {}
        self.scanned: dict[str, str] = {}  # scans of this program's block
        self.waiting: list[Reduce | Scan] = []
        # The exponentials of a block, and the number that makes them those of the row.
        self.powers: dict[str, tuple[str, str]] = {}

    def _roots(self, f: Reduce) -> list[Expr]:
        """What a program computes of its elements for a reduction."""
        rule = self.rules.get(f.name)
        if isinstance(rule, Rescaled):
            return [] if rule.factor is None else [rule.factor]
        return [rule.x if isinstance(rule, Products) else f.body]

    def begin(self) -> None:
        begin_cooperative(self.em, self.count, len(self.exchange_numbers), self.cluster)

    def end(self, rounds: str) -> None:
        """`rounds`: text of a number that no row group's exchanges exceed."""
        self.em.scope.add(f"libm.end_exchange({FLAGS_PARAM}, last_tag, {rounds}, {self.cluster})")

    def reduce_all(self) -> None:
        """Reduces this program's block of the row and publishes the results; sums that need nothing
        of one another two at a time."""
        todo = list(self.reductions.values())
        while todo:
            f, *rest = todo
            if isinstance(f, Scan):
                self.scan(f)
                todo = rest
                continue
            pair = paired(f, rest)
            if len(pair) == 1 or any(p.name in self.rules for p in pair):
                self.reduce(f)
                todo = rest
                continue
            self.await_for(*(p.body for p in pair))
            for p, name in zip(pair, reduce_rows(self.em, pair), strict=True):
                self.local[p.name] = name
                self._publish(p, name)
            self.waiting += pair
            todo = rest[1:]

    def reduce(self, f: Reduce) -> None:
        em, rule = self.em, self.rules.get(f.name)
        if rule is not None:
            self.await_for(*self._roots(f))
        partner = rule.maximum if isinstance(rule, Rescaled) else self.sums.get(f.name)
        if rule is not None and partner not in {w.name for w in self.waiting}:
            del self.rules[f.name]  # that is complete by now, and the reduction as written can run
            rule = None
        if isinstance(rule, Rescaled):
            self._publish(f, self._rescaled(f, rule))
        elif isinstance(rule, Products):
            away, m2, mask = em.fresh("away"), em.fresh("m2_"), em.mask(R)
            value = full(em, em.value(rule.x), em.deps(rule.x), f.body.dtype)
            size = f"tl.minimum(rnumel - roffset, {em.dims['r'].block})"
            if em.rotation is not None:
                size = em.rotation.sizes("roffset", em.dims["r"].block)
            mean = f"{self.local[self.sums[f.name]]} / tl.maximum({size}, 1)"
            em.scope.add(f"{away} = {value} - {mean}")
            if mask:
                em.scope.add(f"{away} = tl.where({mask}, {away}, 0.0)")
            em.scope.add(f"{m2} = libm.reduce_sum({away} * {away})")
            self._publish(f, m2)
        else:
            self.await_for(f.body)
            (self.local[f.name],) = reduce_rows(em, [f])
            self._publish(f, self.local[f.name])
        self.waiting.append(f)

    def scan(self, f: Scan) -> None:
        em, block, own = self.em, self.em.fresh("block"), self.em.fresh("own")
        self.await_for(f.body)
        value = masked_value(em, f.kind, f.body, em.mask(R))
        em.scope.add(f"{block} = {value}")
        self._publish(f, f"libm.reduce_{f.kind}({block})")
        em.scope.add(f"{own} = libm.scan_{f.kind}({block})")
        self.scanned[f.name] = own
        self.waiting.append(f)

    def _rescaled(self, f: Reduce, rule: Rescaled) -> str:
        """The sum of this block, relative to the block's maximum."""
        em, dtype = self.em, f.body.dtype
        mask, safe, below, terms = em.mask(R), *map(em.fresh, ("safe", "below", "e"))
        maximum, lowest = self.local[rule.maximum], identity("max", dtype)
        value = full(em, em.value(rule.element), em.deps(rule.element), dtype)
        if mask:
            value = f"tl.where({mask}, {value}, {lowest})"
        em.scope.add(
            f"{safe} = tl.where({maximum} == {lowest}, 0.0, {maximum})",
            f"{below} = {value} - {safe}",
            f"{terms} = {power_text(rule, below)}",
        )
        if rule.factor is None:
            self.powers[f.name] = terms, maximum
        else:
            weight = full(em, em.value(rule.factor), em.deps(rule.factor), dtype)
            em.scope.add(f"{terms} = tl.where({terms} == 0, 0.0, {terms} * {weight})")
        name = em.fresh(f"{clean(f.name)}_")
        em.scope.add(f"{name} = libm.reduce_sum({terms})")
        return name

    def _publish(self, f: Reduce | Scan, name: str) -> None:
        which = (
            f"flags, {self.exchange_numbers[f.name]}, {len(self.exchange_numbers)}, {self.count}"
        )
        self.em.scope.add(f"libm.publish({which}, {name}, tag, {self.cluster})")

    def await_for(self, *roots: Expr) -> None:
        """Collects what is waiting if the roots use any of it."""
        names = {f.name for f in self.waiting}
        if any(uses(root, names) for root in roots):
            self.await_all()

    def await_all(self) -> None:
        em = self.em
        numbers = self._collect()
        tops: dict[str, str] = {}
        for f in self.waiting:
            if isinstance(f, Scan):
                neutral = identity(f.kind, f.body.dtype)
                values = f'{numbers[f.name]}, rank, {neutral}, "{f.kind}"'
                start, name = em.fresh("start"), em.fresh(f"{clean(f.name)}_")
                em.scope.add(
                    f"{start} = libm.exclusive_prefix({values})",
                    f"{name} = {reduction_step(f.kind, f.body.dtype, start, self.scanned[f.name])}",
                )
                em.scope.texts[scan_result(f)] = name
                continue
            rule, out, one = self.rules.get(f.name), *(em.fresh(f"{clean(f.name)}_") for _ in "ab")
            if isinstance(rule, Rescaled):
                lanes = numbers[rule.maximum]
                scale = power_text(rule, f"libm.difference({lanes}, {tops[rule.maximum]})")
                em.scope.add(f"{one} = libm.combine_sum({numbers[f.name]} * {scale})")
            elif isinstance(rule, Products):
                block, room, sizes = em.dims["r"].block, self._room, em.fresh("sizes")
                parts = f"{numbers[self.sums[f.name]]}, {numbers[f.name]}, {sizes}, rnumel"
                each = f"libm.block_sizes(rnumel, {block}, {self.count}, {room})"
                if em.rotation is not None:
                    each = em.rotation.sizes(f"tl.arange(0, {room}) * {block}", block)
                em.scope.add(
                    f"{sizes} = {each}",
                    f"{one}_mean, {one} = libm.combine_moments({parts})",
                )
            else:
                em.scope.add(f"{one} = libm.combine_{f.kind}({numbers[f.name]})")
                tops[f.name] = one
            em.scope.add(f"{out} = tl.full([1, 1], {one}, {one}.dtype)")
            if isinstance(rule, Rescaled) and rule.plain:
                self._keep_powers(f, rule, tops[rule.maximum])
                em.scope.add(f"{out} = libm.online_finish({out}, {tops[rule.maximum]})")
            elif isinstance(rule, Rescaled):
                e = power_text(rule, f"({tops[rule.maximum]} - {em.value(rule.shift)})")
                weighted = "" if rule.factor is None else "_weighted"
                done = f"libm.online_shifted{weighted}({out}, {tops[rule.maximum]}, {e})"
                em.scope.add(f"{out} = {done}")
            elif isinstance(rule, Products):
                away = f"({one}_mean - {em.value(rule.a)})"
                em.scope.add(f"{out} = {out} + rnumel * {away} * {away}")
            bind(em, f, out)
        self.waiting.clear()

    def _keep_powers(self, f: Reduce, rule: Rescaled, top: str) -> None:
        """What comes later and needs the row's exponentials gets them from the block's by one
        product, where their last bits do not matter. H200: two exponentials of each element of a
        softmax take more than half of the time that its memory takes."""
        em = self.em
        if f.name in self.powers and rule.power in em.inexact.approximate:
            (terms, maximum), name = self.powers[f.name], em.fresh("power")
            scale = power_text(rule, f"libm.difference({maximum}, {top})")
            em.scope.add(f"{name} = {terms} * {scale}")
            em.scope.texts[rule.power] = name

    @property
    def _room(self) -> int:
        return max(WARP, power(self.count))

    def _collect(self) -> dict[str, str]:
        """What all programs have published of the reductions that wait, a number in each lane."""
        em = self.em
        numbers: dict[str, str] = {}
        for k in range(0, len(self.waiting), 2):
            pair = self.waiting[k : k + 2]
            names = [em.fresh("collected") for _ in pair]
            both = "collect_two" if len(pair) == 2 else "collect"
            which = ", ".join(str(self.exchange_numbers[f.name]) for f in pair)
            tail = f"{len(self.exchange_numbers)}, {self.count}, tag, {self.cluster}, {self._room}"
            em.scope.add(f"{', '.join(names)} = libm.{both}(flags, {which}, {tail})")
            for f, name in zip(pair, names, strict=True):
                like = f"tl.full([], 0, {scalars.TRITON_TYPES[f.body.dtype]})"
                neutral = identity(f.kind, f.body.dtype)
                em.scope.add(f"{name} = libm.collected({name}, {like}, {neutral}, {self.count})")
                numbers[f.name] = name
        return numbers


def may_share_rows(loops: Loops, overwrites: Collection[str], overwritten: Collection[str]) -> bool:
    """Whether no program needs what another overwrites. What a row has one of, all of its programs
    read and one stores: only that one may use what lay there (running statistics do)."""
    kept = [p for p in loops.statements if isinstance(p, Write) and p.level == "row"]
    lost = {w.address for w in kept if w.tensor in overwrites}
    others = (e for p in loops.statements if p not in kept for e in roots_of(p))
    return not any(
        n.op == "load" and n.attr[0] in overwritten and n.attr[1] and n.attr[1][0] in lost
        for n in unique_nodes(others)
    )


def begin_cooperative(em: Emitter, count: int, reductions: int, cluster: int) -> None:
    """The first thing of a program: its rank in its row group, of so many programs that
    exchange so many reductions in a round, and where its block of a row begins."""
    wide = "" if em.index_type == "tl.int32" else f".to({em.index_type})"
    flags = EXCHANGE_ROUNDS * count * reductions  # of a row group
    em.scope.add(
        f"row_group = (pid // {count}){wide}",
        f"row_groups = (tl.num_programs(0) // {count}){wide}",
        f"rank = pid % {count}",
        f"roffset = rank{wide} * {em.dims['r'].block}",
        f"flags = {FLAGS_PARAM} + {FIRST_FLAG} + (pid // {count}) * {flags}",
        f"last_tag = libm.begin_exchange({FLAGS_PARAM}, {cluster}, {reductions})",
        "tag = last_tag + 1",
    )


__all__ = ["FIRST_FLAG", "FLAGS_PARAM", "CooperativeRows", "begin_cooperative", "may_share_rows"]
