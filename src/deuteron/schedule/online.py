"""The algebra of dependent reductions: rules by which a reduction that needs an earlier reduction
over the same axes runs in one pass with it.

In: reductions in order, as statements of a nest. Out: for each reduction the pass over the reduced
axes in which it runs, and the `Rule` that lets it run before the reduction that it needs is
complete. Everything is derived from the form of the bodies; no operator is known here.

    row        form                                    partial results of part k, and their merger
    rescaled   s = sum f(e), f linear in               m_k = max b,  s_k = sum f(exp(c (b - r_k)))
               e = exp(c (b - r)) (or exp2), r a       with r_k = R(m_k);
               function R of m = max b, c > 0 a        s = sum_k s_k exp(c (r_k - r))
               constant
    products   s = sum (x - a) (y - b), a and b        n_k elements with means X_k and Y_k,
               constant in a row (Chan, Golub,         C_k = sum (x - X_k) (y - Y_k);
               LeVeque 1979; x = y: a sum of           s = sum_k C_k + n_k (X_k - a) (Y_k - b)
               squares)
    centered   s = sum (x - a), a constant in a row    n_k elements with mean X_k or sum S_k;
               (also x - b - a)                        s = sum_k n_k (X_k - a) = sum_k S_k - n_k a
    moment     s = sum exp(u + q) (a + c v) beside     S_k as in the first row,
               S = sum exp(u), u = b - m, also of      T_k = sum exp(b - m_k) (d - n_k);
               several v = d - n, n = max d; q, a      T = sum_k exp(m_k - m) (T_k + (n_k - n) S_k),
               and c constant in a row                 s = exp(q) (a S + c T)

All hold for any division of a row into parts: blocks of a loop, lanes, threads, programs. What the
partial results are reduced with needs no complete reduction, so one pass over memory is enough. A
target may choose its own parts (`codegen`), the scheduler makes parts that are programs of their
own (`split`).

Centers that are rounded. Where elements are far from 0, X_k is; with R_k = sum (x - X_k), 0 but for
that, and likewise for y, the third row also adds (Y_k - b) R_k and (X_k - a) of y's (`recenter`).

Exceptional rows. A part whose maximum is minus infinity takes 0 for r_k, so that each of its terms
is exp(-inf) = 0; a sum of 0 is not scaled (0 times infinity). Where r itself is infinite every term
of the row is exp(inf - inf): the sum is r - r, no number, as eager's is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deuteron.ir import expr as E
from deuteron.ir.expr import Expr, children
from deuteron.schedule.kernel import Reduce, Scan

EXPONENTIALS = ("exp", "exp2")
RowLevel = Callable[[Expr], bool]


@dataclass(frozen=True)
class Rescaled:
    """``sum f(power)``, `power` = exp or exp2 of ``scale * (element - shift)``, where `shift` is a
    function of the reduction `maximum` over `element`, and f is linear; `factor` is f(1), or None
    where f is the identity. `plain`: the shift is the maximum itself.
    """

    maximum: str
    power: Expr
    element: Expr
    shift: Expr
    scale: float
    factor: Expr | None
    plain: bool


@dataclass(frozen=True)
class Products:
    """``sum (x - a) (y - b)``; `a` and `b` are constant in a row and may need reductions of the
    same pass."""

    x: Expr
    a: Expr
    y: Expr
    b: Expr

    @property
    def square(self) -> bool:
        return self.x is self.y and self.a is self.b


@dataclass(frozen=True)
class Centered:
    """``sum (x - a)``; `a` is constant in a row and may need reductions of the same pass."""

    x: Expr
    a: Expr


@dataclass(frozen=True)
class Moment:
    """``sum exp(u + shift) (at + sum of slope v)``, where `total` is the reduction ``sum exp(u)``.
    u and each v are elements less their maximum, which `slopes` names; `shift`, `at` and the slopes
    are constant in a row and may need reductions of the same pass."""

    total: str
    shift: Expr
    at: Expr
    slopes: dict[str, Expr]


Rule = Rescaled | Products


class Chain:
    """Reductions and scans in order of dependence. `row_level(e)`: whether e is constant along the
    reduced axes (registers of reductions are). `merging` False: no rule is used; `centering`: the
    third one too; `moments`: the fourth.
    """

    def __init__(
        self,
        row_level: RowLevel,
        merging: bool = True,
        centering: bool = False,
        moments: bool = False,
    ) -> None:
        self.row_level, self.merging = row_level, merging
        self.centering, self.moments = centering, moments
        self.reductions: dict[str, Reduce] = {}
        self.ready: dict[str, int] = {}  # result -> first pass that may use it
        self.rules: dict[str, Rule] = {}
        self.centers: dict[str, Centered] = {}
        self.weighted: dict[str, Moment] = {}

    def need(self, *roots: Expr) -> int:
        """The first pass in which the values can be computed."""
        memo: dict[Expr, int] = {}
        for root in roots:
            for node in root.walk():
                if node in memo:
                    continue
                out = max((memo[c] for c in children(node)), default=0)
                if node.op == "load":
                    out = max(out, self.ready.get(node.attr[0], 0))
                memo[node] = out
        return max((memo[r] for r in roots), default=0)

    def add(self, part: Reduce | Scan) -> int:
        """The pass in which the reduction or scan runs."""
        k = self.need(part.body)
        if isinstance(part, Scan):
            self.ready[part.name] = k
            return k
        rule = self.rule(part, k) if k and self.merging else None
        if rule is not None:
            self.rules[part.name] = rule
        elif k and self.centering and (center := self._centered(part, k)) is not None:
            self.centers[part.name] = center
        elif k and self.moments and (moment := self._moment(part, k)) is not None:
            self.weighted[part.name] = moment
        k -= any(part.name in table for table in (self.rules, self.centers, self.weighted))
        self.reductions[part.name] = part
        self.ready[part.name] = k + 1
        return k

    def rule(self, f: Reduce, k: int) -> Rule | None:
        """The rule by which a reduction that needs reductions of pass k - 1 can run in that
        pass."""
        if f.kind != "sum" or f.grouped or f.body.dtype not in ("f32", "f64"):
            return None
        return self._rescaled(f.body, k) or self._products(f.body, k)

    def _rescaled(self, body: Expr, k: int) -> Rescaled | None:
        late = [n for n in body.walk() if n.op in EXPONENTIALS and self.need(n) >= k]
        for power in late:
            parts = self._power(power, k)
            if parts is None:
                continue
            maximum, element, shift, scale = parts
            factor = linear(body, power)
            if factor is None or self.need(factor) >= k or body.dtype != power.dtype:
                continue
            plain = holds(shift, self.reductions[maximum])
            rest = None if factor.op == "literal" and factor.attr == 1 else factor
            return Rescaled(maximum, power, element, shift, scale, rest, plain)
        return None

    def _power(self, power: Expr, k: int) -> tuple[str, Expr, Expr, float] | None:
        """(maximum, element, shift, scale) of an exponential of a scaled difference."""
        inner, scale = scaled(power.args[0])
        if inner.op != "sub" or not scale > 0:
            return None
        element, shift = inner.args
        if not self.row_level(shift) or self.need(element) >= k:
            return None
        common, a = scaled(element)
        other, b = scaled(shift)
        names = {n.attr[0] for n in shift.loads() if self.ready.get(n.attr[0], 0) >= k}
        reduction = self.reductions.get(next(iter(names))) if len(names) == 1 else None
        if reduction is None or reduction.kind != "max" or reduction.body.dtype != power.dtype:
            return None
        if same_values(element, reduction.body):
            return reduction.name, element, shift, scale
        if a == b and a > 0 and same_values(common, reduction.body):  # exp2(c x - c m)
            return reduction.name, common, other, scale * a
        return None

    def _products(self, body: Expr, k: int) -> Products | None:
        if body.op != "mul":
            return None
        sides = []
        for d in body.args:
            if d.op != "sub":
                return None
            x, a = d.args
            if self.row_level(x):  # (a - x) (b - y)
                x, a = a, x
            if not self.row_level(a) or self.row_level(x) or self.need(x) >= k:
                return None
            sides.append((x, a, d.args[0] is x))
        (x, a, up), (y, b, also) = sides
        return Products(x, a, y, b) if up is also else None

    def _centered(self, f: Reduce, k: int) -> Centered | None:
        if f.kind != "sum" or f.body.op != "sub" or f.body.dtype not in ("f32", "f64"):
            return None
        x, a = f.body.args
        while x.op == "sub" and self.row_level(x.args[1]):  # (x - b) - a
            x, a = x.args[0], E.op("add", x.args[1], a)
        varies = not self.row_level(x) and self.row_level(a)
        return Centered(x, a) if varies and self.need(x) < k else None

    def _moment(self, f: Reduce, k: int) -> Moment | None:
        if f.kind != "sum" or f.grouped or f.body.dtype != "f32":
            return None
        totals: dict[Expr, str] = {}  # of exponentials, by their exponents
        for name, rule in self.rules.items():
            body = self.reductions[name].body
            if not isinstance(rule, Rescaled) or rule.power is not body or self.ready[name] != k:
                continue
            if rule.plain and rule.scale == 1 and (body.op, body.dtype) == ("exp", "f32"):
                totals[body.args[0]] = name
        for power in (n for n in f.body.walk() if n.op == "exp"):
            factor = linear(f.body, power)
            inner = self.affine(power.args[0], totals) if factor is not None else None
            outer = self.affine(factor, totals) if factor is not None else None
            if inner is None or outer is None or not outer[1]:
                continue
            ((total, slope),) = inner[1].items() if len(inner[1]) == 1 else ((None, None),)
            if total is None or slope is not E.literal(1, "f32"):
                continue
            if self.need(inner[0], outer[0], *outer[1].values()) <= k:
                tops = {self._top(name): c for name, c in outer[1].items()}
                if len(tops) == len(outer[1]):
                    return Moment(total, inner[0], outer[0], tops)
        return None

    def _top(self, total: str) -> str:
        rule = self.rules[total]
        assert isinstance(rule, Rescaled)
        return rule.maximum

    def affine(self, e: Expr, bases: dict[Expr, str]) -> tuple[Expr, dict[str, Expr]] | None:
        """(a, c) where ``e = a + sum of c[name] base``, constant in a row; None where it is not
        (known to be)."""
        if e in bases:
            return E.literal(0, e.dtype), {bases[e]: E.literal(1, e.dtype)}
        if self.row_level(e):
            return e, {}
        parts = [p for p in (self.affine(x, bases) for x in e.args) if p is not None]
        if e.op not in ("add", "sub", "mul", "div", "neg") or len(parts) < len(e.args):
            return None
        (a, c), (b, d) = parts[0], parts[-1]
        if e.op in ("add", "sub"):
            none = E.literal(0, e.dtype)
            slopes = {n: _sum(e.op, c.get(n, none), d.get(n, none)) for n in {**c, **d}}
            return _sum(e.op, a, b), slopes
        if e.op == "neg":
            b, d = E.literal(-1, e.dtype), {}
        elif e.op == "div":
            b = E.op("div", E.literal(1, e.dtype), b)
        elif not c:
            a, c, b, d = b, d, a, c
        return None if d else (_product(a, b), {n: _product(x, b) for n, x in c.items()})


def _sum(kind: str, a: Expr, b: Expr) -> Expr:
    if _zero(b) is not None:
        return a
    if _zero(a) is not None:
        return b if kind == "add" else E.op("neg", b)
    return E.op(kind, a, b)


def _product(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if x.op == "literal" and x.attr in (0, 1):
            return x if x.attr == 0 else y
    return E.op("mul", a, b)


def scaled(e: Expr) -> tuple[Expr, float]:
    """(inner, constant): ``e = inner * constant``."""
    scale = 1.0
    while e.op in ("mul", "div") and any(a.op == "literal" for a in e.args):
        a, b = e.args
        if e.op == "mul" and a.op == "literal":
            a, b = b, a
        if b.op != "literal" or a.op == "literal" or not b.attr:
            break
        scale = scale * b.attr if e.op == "mul" else scale / b.attr
        e = a
    return e, scale


def bare(e: Expr) -> Expr:
    """`e` without conversions to dtypes that hold each of its values."""
    while e.op == "cast" and exact(e.args[0].dtype, e.dtype):
        e = e.args[0]
    return e


def exact(source: str, target: str) -> bool:
    """Whether a conversion between these floating dtypes changes no value."""
    wide = {"f16": ("f16", "f32", "f64"), "bf16": ("bf16", "f32", "f64"), "f32": ("f32", "f64")}
    return target in wide.get(source, (source,))


def same_values(a: Expr, b: Expr) -> bool:
    """Whether two expressions have the same values, whatever dtype they are in."""
    return bare(a) is bare(b)


def holds(e: Expr, reduction: Reduce) -> bool:
    """Whether `e` is the reduction's value. An extreme element is an element: no conversion to a
    dtype that holds the elements rounds it.
    """
    values = bare(reduction.body).dtype
    while e.op == "cast" and exact(values, e.dtype):
        e = e.args[0]
    return e.op == "load" and e.attr[0] == reduction.name


def linear(body: Expr, x: Expr) -> Expr | None:
    """f(1) where ``body = f(x)`` with f linear; None where it is not (known to be) so."""
    memo: dict[Expr, Expr | None] = {}
    inside = {x}
    for n in body.walk():
        if any(c in inside for c in children(n)):
            inside.add(n)

    def visit(n: Expr) -> Expr | None:
        if n is x:
            return E.literal(1, n.dtype)
        if n not in inside:
            return None
        if n in memo:
            return memo[n]
        memo[n] = None
        args = n.args
        with_x = [a in inside for a in args]
        out: Expr | None = None
        if n.op == "mul" and sum(with_x) == 1:
            k = with_x.index(True)
            f = visit(args[k])
            if f is not None:
                rest = args[1 - k]
                out = rest if f.op == "literal" and f.attr == 1 else E.op("mul", f, rest)
        elif n.op == "div" and with_x == [True, False]:
            f = visit(args[0])
            out = None if f is None else E.op("div", f, args[1])
        elif n.op == "neg":
            f = visit(args[0])
            out = None if f is None else E.op("neg", f)
        elif n.op in ("add", "sub") and all(with_x):
            fs = [visit(a) for a in args]
            out = None if None in fs else E.op(n.op, *(f for f in fs if f is not None))
        elif n.op == "where" and not with_x[0]:
            fs = [visit(a) if w else _zero(a) for a, w in zip(args[1:], with_x[1:])]
            out = None if None in fs else E.op("where", args[0], *(f for f in fs if f is not None))
        elif n.op == "cast" and exact(args[0].dtype, n.dtype):
            f = visit(args[0])
            out = None if f is None else E.cast(f, n.dtype)
        memo[n] = out
        return out

    return visit(body) if x in inside else None


def _zero(e: Expr) -> Expr | None:
    return e if e.op == "literal" and e.attr == 0 else None


# -- merging partial results, as expressions -------------------------------------------------------
def local_shift(rule: Rescaled, part: Expr) -> Expr:
    """r_k: the shift of a part whose maximum is `part`."""
    table = {n: part for n in rule.shift.loads() if n.attr[0] == rule.maximum}
    shift = rule.shift.substitute({}, table)
    low = E.literal(float("-inf"), part.dtype)
    return E.op("where", E.op("eq", part, low), E.literal(0, shift.dtype), shift)


def local_body(rule: Rescaled, body: Expr, shift: Expr) -> Expr:
    """The body of the sum with another shift."""
    power = power_of(rule, E.op("sub", rule.element, shift))
    return body.substitute({}, {rule.power: power})


def power_of(rule: Rescaled, difference: Expr) -> Expr:
    """``exp(scale * difference)``, or exp2."""
    if rule.scale != 1:
        difference = E.op("mul", difference, E.literal(rule.scale, difference.dtype))
    return E.op(rule.power.op, difference)


def rescale(rule: Rescaled, total: Expr, local: Expr, shift: Expr) -> Expr:
    """What the sum `total` of a part with shift `local` adds to a row with shift `shift`."""
    zero = E.literal(0, total.dtype)
    weight = E.cast(power_of(rule, E.op("sub", local, shift)), total.dtype)
    nothing = E.cast(E.op("sub", shift, shift), total.dtype)
    return E.op("where", E.op("eq", total, zero), nothing, E.op("mul", total, weight))


def recenter(total: Expr, n: Expr, far: Sequence[Expr], rest: Sequence[Expr]) -> Expr:
    """What a part of `n` elements, whose sum of products about (x, y) is `total`, adds to the sum
    about (a, b): `far` is (x - a, y - b), `rest` the sums of the elements' differences from x and
    from y.
    """
    (dx, dy), (rx, ry) = far, rest
    cross = E.op("add", E.op("mul", dy, rx), E.op("mul", dx, ry))
    return E.op("add", total, E.op("add", cross, E.op("mul", n, E.op("mul", dx, dy))))


__all__ = [
    "Centered",
    "Chain",
    "Moment",
    "Products",
    "Rescaled",
    "Rule",
    "linear",
    "local_body",
    "local_shift",
    "power_of",
    "recenter",
    "rescale",
]
