"""Triton text of reductions: accumulators of a loop, their update, and what becomes of them at its
end.

An accumulator has an element for every element of the tile: each lane reduces its own share of a
row, and the lanes are combined once after the loop (so a sum of n elements rounds about n / lanes +
log(lanes) times, like eager's). Masked elements never enter: an update is selected by the mask.

A maximum with sums that are rescaled with it takes `group` elements at a time, which one thread has
(neighbours): one exponential moves the sums to the new maximum, and each element costs one more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deuteron.base.text import plain_name
from deuteron.codegen.loops import CrossRowReduce, Statement
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.emit import Emitter
from deuteron.codegen.triton.row_passes import RowPass
from deuteron.codegen.triton.scalars import reduction_step
from deuteron.codegen.triton.scope import FULL, R
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, own_indices
from deuteron.ir.index import Value
from deuteron.ir.operations import REDUCTIONS
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.online import Centered, Moment, Products, Rescaled


def identity(kind: str, dtype: str) -> str:
    return scalars.literal(REDUCTIONS[kind].identity(dtype), dtype)


def constant(shape: str, kind: str, dtype: str) -> str:
    return f"tl.full({shape}, {identity(kind, dtype)}, {scalars.TRITON_TYPES[dtype]})"


def full(em: Emitter, text: str, have: frozenset[str], dtype: str) -> str:
    """A value in the shape of the whole tile."""
    if have >= em.whole:
        return text
    return f"tl.broadcast_to({text}, {em.shape(em.whole)})"


def reduce_rows(em: Emitter, reductions: Sequence[Reduce]) -> list[str]:
    """One reduction of a row that is in registers, or two sums of a dtype; returns their
    variables."""
    texts = [_reduced(em, f) for f in reductions]
    names = [em.fresh(f"{clean(f.name)}_") for f in reductions]
    kind = reductions[0].kind if len(reductions) == 1 else "sum_two"
    if kind.startswith("arg"):
        texts.append(f"tl.broadcast_to(rindex, {em.shape(FULL)})")
    position = ".to(tl.int64)" if kind.startswith("arg") else ""
    if em.rank > 2:
        (f,), text = reductions, f"libm.reduce_{kind}({texts[0]}, 2)"
        em.scope.add(f"{names[0]} = {text if f.grouped else f'libm.reduce_{kind}({text}, 1)'}")
        return names
    em.scope.add(f"{', '.join(names)} = libm.reduce_{kind}({', '.join(texts)}){position}")
    return names


def paired(f: Reduce, later: Sequence[Statement]) -> list[Reduce]:
    """A reduction, and the next one where both are sums that need nothing of one another: threads
    wait for each other once."""
    g = next((p for p in later if isinstance(p, (Reduce, Scan))), None)
    if not isinstance(g, Reduce) or {f.kind, g.kind} != {"sum"} or f.grouped or g.grouped:
        return [f]
    return [f] if f.body.dtype != g.body.dtype or uses(g.body, {f.name}) else [f, g]


def uses(root: Expr, names: Collection[str]) -> bool:
    """Whether a value needs results of these names."""
    if not names:
        return False
    for node in root.walk():
        places = (a for i in own_indices(node) for a in i.atoms() if isinstance(a, Value))
        if node.op == "load" and node.attr[0] in names or any(uses(a.expr, names) for a in places):
            return True
    return False


def _reduced(em: Emitter, f: Reduce) -> str:
    """What is reduced, neutral where it is masked."""
    dtype = f.body.dtype
    text = full(em, em.value(f.body), em.deps(f.body), dtype)
    mask = "" if f.grouped else em.mask(em.along)  # groups are whole
    if mask:
        text = f"tl.where({mask}, {text}, {identity(f.kind, dtype)})"
    if dtype not in ("f32", "f64", "i32", "i64", "bool") or (mask and dtype in ("f64",)):
        text = f"{text}.to({scalars.TRITON_TYPES[dtype]})"
    return text


def step(em: Emitter, f: Reduce | CrossRowReduce, name: str) -> str:
    """An accumulator with one more value. The product of a sum of products is not rounded."""
    body = f.body
    if f.kind == "sum" and body.dtype == "f32" and body.op == "mul":
        a, b = map(em.value, body.args)
        return f"tl.fma({a}, {b}, {name})"
    return reduction_step(f.kind, body.dtype, name, em.value(body))


def power_text(rule: Rescaled, difference: str) -> str:
    """The exponential of a scaled difference; the device's own, see `precision`."""
    fast = "_fast" if rule.power.dtype == "f32" else ""
    factor = "" if rule.scale == 1 else f" * {rule.scale!r}"
    return f"libm.{rule.power.op}{fast}({difference}{factor})"


def clean(name: str) -> str:
    out = plain_name(name)
    return out if out[:1].isalpha() else f"f_{out}"


class Accumulators:
    """The reductions of one pass over a row in blocks."""

    def __init__(self, em: Emitter, p: RowPass) -> None:
        self.em, self.merged = em, p.merged
        self.walked = "roffset"  # text of how many elements of a row the blocks before have
        self.ascending = True  # whether blocks come in the order of their elements
        self.reductions = [f for f in p.statements if isinstance(f, Reduce)]
        self.names = {f.name: em.fresh(f"{clean(f.name)}_") for f in self.reductions}
        self.sums: dict[str, list[str]] = {}  # maximum -> sums that are rescaled with it
        for name, rule in p.merged.items():
            if isinstance(rule, Rescaled):
                self.sums.setdefault(rule.maximum, []).append(name)
        # sum of exponentials that a moment needs -> what it was before the current block
        self.before = {r.total: "" for r in p.merged.values() if isinstance(r, Moment)}
        # (moment, maximum of its exponents) -> accumulator
        self.moments = {
            (name, top): em.fresh(f"{clean(name)}_")
            for name, rule in p.merged.items()
            for top in (rule.slopes if isinstance(rule, Moment) else ())
        }
        # sum of differences -> what keeps the mean, or the sum, of the same elements
        self.means: dict[str, str] = {}
        squares = {r.x: n for n, r in p.merged.items() if isinstance(r, Products) and r.square}
        for name, rule in p.merged.items():
            if isinstance(rule, Centered):
                self.means[name] = squares.setdefault(rule.x, name)
        # maximum -> elements less the new maximum, and the old one less it, in the current block
        self.steps: dict[str, tuple[str, str]] = {}

    def declare(self) -> None:
        em, shape = self.em, self.em.shape(FULL)
        for f in self.reductions:
            name, dtype = self.names[f.name], f.body.dtype
            rule = self.merged.get(f.name)
            if isinstance(rule, Centered) and self.means[f.name] != f.name:
                continue
            if isinstance(rule, Products):
                means = ("mean",) if rule.square else ("mean", "other")
                zeros = f"tl.zeros({shape}, {scalars.TRITON_TYPES[dtype]})"
                em.scope.add(*(f"{name}_{what} = {zeros}" for what in (*means, "m2")))
            elif isinstance(rule, Moment):
                zeros = constant(self.lanes, f.kind, dtype)
                em.scope.add(*(f"{self.moments[f.name, top]} = {zeros}" for top in rule.slopes))
            elif f.name in self.sums or isinstance(rule, Rescaled):
                em.scope.add(f"{name} = {constant(self.lanes, f.kind, dtype)}")
            else:
                em.scope.add(f"{name} = {constant(shape, f.kind, dtype)}")
            if f.kind.startswith("arg"):
                # A lane whose elements are all the lowest has none that is larger than that: then
                # the row's first is the place, unless another lane has a larger one.
                first = f"tl.arange(0, {em.dims['r'].block})[None, :].to({em.index_type})"
                em.scope.add(f"{name}_at = tl.broadcast_to({first}, {shape})")

    @property
    def lanes(self) -> str:
        """The shape of accumulators that take groups."""
        x, r = (self.em.dims[d].block for d in ("x", "r"))
        return f"[{x}, {r} // {self.em.lane_elements}]"

    def groups(self, text: str, have: frozenset[str], dtype: str) -> str:
        """A value of the tile by lanes and the elements that each takes."""
        x, r = (self.em.dims[d].block for d in ("x", "r"))
        shape = f"[{x}, {r} // {self.em.lane_elements}, {self.em.lane_elements}]"
        return f"tl.reshape({full(self.em, text, have, dtype)}, {shape})"

    def update(self, f: Reduce) -> None:
        """One block of the row; the scope is the loop's."""
        em, name, rule = self.em, self.names[f.name], self.merged.get(f.name)
        if isinstance(rule, Rescaled):
            below, fell = self.steps[rule.maximum]
            terms = self._power(rule, below)
            if rule.factor is not None:
                weight = self.groups(em.value(rule.factor), em.deps(rule.factor), f.body.dtype)
                terms = self._weighted(terms, weight, rule)
            e = self._power(rule, fell)
            if f.name in self.before:
                self.before[f.name] = em.fresh("before")
                em.scope.add(f"{self.before[f.name]} = {name}")
            em.scope.add(f"{name} = {name} * {e} + tl.sum({terms}, 2)")
        elif isinstance(rule, Moment):
            for top in rule.slopes:
                self._moment(rule, top, self.moments[f.name, top])
        elif isinstance(rule, Products):
            self._products(f, rule, name)
        elif isinstance(rule, Centered):
            if self.means[f.name] == f.name:
                self._assign({name: f"{name} + {em.value(rule.x)}"})
        elif f.kind.startswith("arg"):
            value, at = em.fresh("v"), em.fresh("i")
            place = f"tl.broadcast_to(rindex, {em.shape(FULL)})"
            pair = f"{name}, {name}_at, {em.value(f.body)}, {place}"
            order = "step" if self.ascending else "combine"
            em.scope.add(f"{value}, {at} = libm.{f.kind}_{order}({pair})")
            self._assign({name: value, f"{name}_at": at})
        elif f.name in self.sums:
            self._maximum(f, name)
        else:
            self._assign({name: step(em, f, name)})

    def _maximum(self, f: Reduce, name: str) -> None:
        """A maximum with which sums are rescaled. As long as it is minus infinity 0 is subtracted,
        so that minus infinity (what is masked, too) adds exp(-inf) = 0.
        """
        em, dtype = self.em, f.body.dtype
        value = full(em, em.value(f.body), em.deps(f.body), dtype)
        mask = em.mask(R)
        if mask:
            value = f"tl.where({mask}, {value}, {identity('max', dtype)})"
        items, new, safe = em.fresh("items"), em.fresh("top"), em.fresh("safe")
        below, fell = em.fresh("below"), em.fresh("fell")
        em.scope.add(
            f"{items} = {self.groups(value, FULL, dtype)}",
            f"{new} = libm.maximum({name}, tl.reduce({items}, 2, libm.max_combine))",
            f"{safe} = tl.where({new} == {identity('max', dtype)}, 0.0, {new})",
            f"{below} = {items} - {safe}[:, :, None]",
            f"{fell} = {name} - {safe}",
            f"{name} = {new}",
        )
        self.steps[f.name] = (below, fell)

    def _moment(self, rule: Moment, top: str, name: str) -> None:
        """A sum of exponentials times differences from a maximum, which fall by as much as that
        rises. Where there were none so far (or e^-inf times -inf, no number) nothing falls."""
        em, total = self.em, self._rescaled(rule.total)
        e, scale = (self._power(total, d) for d in self.steps[total.maximum])
        below, fell = self.steps[top]
        terms, mask = f"{e} * {below}", em.mask(R)
        if mask:
            terms = f"tl.where({self.groups(mask, R, 'bool')}, {terms}, 0.0)"
        fell = f"tl.where({fell} == {identity('max', total.power.dtype)}, 0.0, {fell})"
        old = f"{scale} * ({name} + {fell} * {self.before[rule.total]})"
        em.scope.add(f"{name} = {old} + tl.sum({terms}, 2)")

    def _weighted(self, terms: str, weight: str, rule: Rescaled) -> str:
        """Terms with factors; what is masked has none."""
        if not self.em.mask(R):
            return f"{terms} * {weight}"
        return f"tl.where({terms} == 0, 0.0, {terms} * {weight})"

    def _power(self, rule: Rescaled, difference: str) -> str:
        """The exponential of a difference, written once."""
        em = self.em
        key = (rule.power.op, rule.scale, difference)
        if key not in em.scope.sums:
            em.scope.sums[key] = em.fresh("e")
            em.scope.add(f"{em.scope.sums[key]} = {power_text(rule, difference)}")
        return em.scope.sums[key]

    def _assign(self, new: dict[str, str]) -> None:
        mask = self.em.mask(R)
        for name, text in new.items():
            self.em.scope.add(
                f"{name} = tl.where({mask}, {text}, {name})" if mask else f"{name} = {text}"
            )

    def _products(self, f: Reduce, rule: Products, name: str) -> None:
        em, kind = self.em, scalars.TRITON_TYPES[f.body.dtype]
        value = em.value(rule.x)
        if "share" not in em.scope.sums:
            block = em.dims["r"].block
            count = f"(tl.full([], 1, tl.int32) + {self.walked} // {block})"
            if self.counted and em.dims["r"].masked:
                count = "(rcount + 1)"
            em.scope.add(f"share = 1.0 / {count}.to({kind})")
            em.scope.sums["share"] = "share"
        mean, m2 = em.fresh("mean"), em.fresh("m2_")
        if rule.square:
            old = f"{name}_mean, {name}_m2, {value}"
            em.scope.add(f"{mean}, {m2} = libm.welford_step({old}, share)")
            self._assign({f"{name}_mean": mean, f"{name}_m2": m2})
            return
        other = em.fresh("other")
        old = f"{name}_mean, {name}_other, {name}_m2, {value}, {em.value(rule.y)}"
        em.scope.add(f"{mean}, {other}, {m2} = libm.products_step({old}, share)")
        self._assign({f"{name}_mean": mean, f"{name}_other": other, f"{name}_m2": m2})

    def finish(self) -> None:
        """Combines the lanes; binds each reduction's result in the current scope."""
        em = self.em
        for f in self.reductions:
            name, rule = self.names[f.name], self.merged.get(f.name)
            if rule is not None:
                continue
            out = em.fresh(f"{clean(f.name)}_")
            if f.kind.startswith("arg"):
                em.scope.add(f"{out} = libm.reduce_{f.kind}({name}, {name}_at).to(tl.int64)")
            else:
                em.scope.add(f"{out} = libm.reduce_{f.kind}({name})")
            if f.name in self.sums:
                self._finish_rescaled(f, name, out)
            else:
                bind(em, f, out)
        for f in self.reductions:  # in order: the center of one may need another
            rule = self.merged.get(f.name)
            if isinstance(rule, Products):
                self._finish_products(f, rule, self.names[f.name])
            elif isinstance(rule, Centered):
                self._finish_centered(f, rule)
            elif isinstance(rule, Moment):
                self._finish_moment(f, rule)

    def _finish_rescaled(self, f: Reduce, lanes: str, row: str) -> None:
        """The sums that were rescaled with the maximum `row`."""
        em = self.em
        sums = [s for s in self.reductions if s.name in self.sums[f.name]]
        names = {s.name: em.fresh(f"{clean(s.name)}_") for s in sums}
        for s in sums:
            scale = self._power(self._rescaled(s.name), f"libm.difference({lanes}, {row})")
            em.scope.add(f"{names[s.name]} = libm.reduce_sum({self.names[s.name]} * {scale})")
        bind(em, f, row)
        for s in sums:
            rule, total = self._rescaled(s.name), names[s.name]
            if rule.plain:
                em.scope.add(f"{total} = libm.online_finish({total}, {row})")
            else:
                shift = em.value(rule.shift)
                e = self._power(rule, f"({row} - {shift})")
                weighted = "" if rule.factor is None else "_weighted"
                em.scope.add(f"{total} = libm.online_shifted{weighted}({total}, {row}, {e})")
            bind(em, s, total)

    def _finish_moment(self, f: Reduce, rule: Moment) -> None:
        em, total = self.em, self._rescaled(rule.total)
        row = {g.name: em.value(result(g)) for g in self.reductions if g.name not in self.merged}
        scale = self._power(
            total, f"libm.difference({self.names[total.maximum]}, {row[total.maximum]})"
        )
        (whole,) = (em.value(result(g)) for g in self.reductions if g.name == rule.total)
        terms = [f"{em.value(rule.at)} * {whole}"]
        for top, slope in rule.slopes.items():
            lanes, moment = self.names[top], em.fresh("moment")
            away = (
                f"tl.where({lanes} == {identity('max', f.body.dtype)}, 0.0, {lanes} - {row[top]})"
            )
            each = f"{self.moments[f.name, top]} + {away} * {self.names[rule.total]}"
            em.scope.add(f"{moment} = libm.reduce_sum({scale} * ({each}))")
            terms.append(f"{em.value(slope)} * {moment}")
        by, out = em.value(E.op("exp", rule.shift)), em.fresh(f"{clean(f.name)}_")
        em.scope.add(f"{out} = {by} * ({' + '.join(terms)})")
        bind(em, f, out)

    def _rescaled(self, name: str) -> Rescaled:
        rule = self.merged[name]
        assert isinstance(rule, Rescaled)
        return rule

    def _count(self, dtype: str) -> str:
        """The number of elements that each lane has reduced."""
        em, block = self.em, self.em.dims["r"].block
        key = ("lanes", dtype)
        if self.counted:
            return f"rcount.to({scalars.TRITON_TYPES[dtype]})"
        if key not in em.scope.sums:
            em.scope.sums[key] = name = em.fresh("count")
            each = f"(rnumel - tl.arange(0, {block})[None, :] + {block} - 1) // {block}"
            em.scope.add(f"{name} = tl.maximum({each}, 0).to({scalars.TRITON_TYPES[dtype]})")
        return em.scope.sums[key]

    @property
    def counted(self) -> Sequence[str]:
        """What counts the elements of each lane where the last lanes are not those that have one
        less; at the end of a block."""
        moments = any(isinstance(rule, (Products, Centered)) for rule in self.merged.values())
        return ["rcount += rmask"] if moments and self.em.rotation is not None else []

    def ends(self) -> None:
        """Before the blocks of which some lanes have no element."""
        if self.counted:
            shape, block = self.em.shape(FULL), self.em.dims["r"].block
            self.em.scope.add(f"rcount = tl.zeros({shape}, tl.int32) + rwhole // {block}")

    def _finish_centered(self, f: Reduce, rule: Centered) -> None:
        em, home = self.em, self.means[f.name]
        count, name, a = self._count(f.body.dtype), self.names[home], em.value(rule.a)
        if isinstance(self.merged[home], Centered):  # of few elements; minus infinity stays that
            self._lanes_sum(f, f"{name} - {count} * {a}")
        else:
            self._lanes_sum(f, f"{count} * ({name}_mean - {a})")

    def _finish_products(self, f: Reduce, rule: Products, name: str) -> None:
        """Each lane's sum about its means, moved to the center of the row."""
        em, count = self.em, self._count(f.body.dtype)
        far = f"({name}_mean - {em.value(rule.a)})"
        other = far if rule.square else f"({name}_other - {em.value(rule.b)})"
        self._lanes_sum(f, f"{name}_m2 + {count} * {far} * {other}")

    def _lanes_sum(self, f: Reduce, text: str) -> None:
        out = self.em.fresh(f"{clean(f.name)}_")
        self.em.scope.add(f"{out} = libm.reduce_sum({text})")
        bind(self.em, f, out)


def result(f: Reduce) -> Expr:
    """The expression by which others refer to a reduction's result."""
    return Expr("load", "i64" if f.kind.startswith("arg") else f.body.dtype, (), (f.name, (), None))


def scan_result(p: Scan) -> Expr:
    return Expr("load", p.body.dtype, (), (p.name, (), None))


def masked_value(em: Emitter, kind: str, body: Expr, mask: str) -> str:
    """A value in the shape of the tile, neutral where the mask is false."""
    text = full(em, em.value(body), em.deps(body), body.dtype)
    return f"tl.where({mask}, {text}, {identity(kind, body.dtype)})" if mask else text


def bind(em: Emitter, f: Reduce, text: str) -> None:
    em.scope.texts[result(f)] = text
