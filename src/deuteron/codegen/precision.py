"""Where a GPU's fast exponential, and division by a reciprocal, are as good as exact ones.

In: `Loops`. Out: the f32 nodes whose relative error may be a few 2^-24 times their argument, since
nothing shows it:

    rounded   every use goes through products, quotients, choices, sums, differences and the log1p
              of what is at most 1 only to a rounding to a half type or an 8-bit one, which is 2^-12
              at the finest
    one more  of erf, only ``1 + erf(x)``, whose error is at most 4 2^-23
    terms     exp(b - m) in a sum over b, m the maximum of b (`schedule.online`): an argument of -d
              has an error of d 2^-24, its exponential e^-d times that, which is at most 0.4 2^-24
              of the sum's largest term
    averaged  the same uses only to sums in f32 of which all uses are such (option precision
              "float32"; else every such sum counts as the next one)
    summed    the same uses only to a sum in f32: of quotients, whose error of 2^-23 is to the sum
              as it is to the terms; and of exponentials of what is itself rounded, which have an
              error of that size in any case

What the exact ones cost is more than memory takes (softmax of bf16, 16384 columns, H200: 1.95 times
the time of a copy).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deuteron.codegen.loops import CrossRowReduce, Loops, Write, roots_of
from deuteron.ir.expr import Expr, children
from deuteron.ir.operations import FLOAT8, HALF
from deuteron.schedule.kernel import Reduce, Scan
from deuteron.schedule.online import Chain, Rescaled, RowLevel

APPROXIMABLE = ("exp", "exp2", "sigmoid", "tanh", "div", "erf", "sqrt", "reciprocal")
ERROR_CARRYING = ("mul", "div", "neg", "abs", "where", "add", "sub", "sqrt", "reciprocal")


@dataclass(frozen=True)
class Inexact:
    """`approximate`: nodes of `APPROXIMABLE` whose error nothing shows. `exponentials`: to the
    error function of x, ``exp(-x * x)``, where that is computed in any case. `fused`: sums of a
    product and something else, of which the product need not be rounded."""

    approximate: frozenset[Expr] = frozenset()
    exponentials: Mapping[Expr, Expr] = field(default_factory=dict)
    fused: frozenset[Expr] = frozenset()


def inexact(loops: Loops, row_level: RowLevel, averages: bool = False) -> Inexact:
    """`averages`: sums whose own uses end in roundings to a half are no results."""
    chain = Chain(row_level)
    shown: set[Expr] = set()  # roots whose errors are seen
    sums: set[Expr] = set()
    totals: dict[str, Expr] = {}  # sums by their registers' names
    order: dict[Expr, None] = {}
    for p in loops.statements:
        if isinstance(p, (Reduce, Scan)):
            chain.add(p)
        terms = isinstance(p, Reduce) and isinstance(chain.rules.get(p.name), Rescaled)
        body = p.body if isinstance(p, (Reduce, CrossRowReduce)) and p.kind == "sum" else None
        for root in roots_of(p):
            order.update(dict.fromkeys(root.walk()))
            if not terms:
                (sums if root is body and root.dtype == "f32" else shown).add(root)
            if averages and isinstance(p, Reduce) and root is body and root in sums:
                totals[p.name] = root
        if isinstance(p, Write) and p.value.dtype == "f32":
            shown.update((p.value, *p.others))
    down = sorted(order, key=lambda n: n.id, reverse=True)  # users before arguments
    sums, positive = _results(down, shown, sums, totals)
    strict, strict_but_sums = _strict(down, shown | sums, positive), _strict(down, shown, positive)
    for n in order:
        strict.update(c for c in children(n) if c.op == "erf" and not erf_of_one_plus(n))
    candidates = [n for n in order if n.op in APPROXIMABLE and n.dtype == "f32"]
    only_sums = [n for n in candidates if n in strict and n not in strict_but_sums]
    return Inexact(
        frozenset(n for n in candidates if n not in strict)
        | frozenset(filter(_may_err_in_sums, only_sums)),
        _exponentials([n for n in order if n.dtype == "f32"]),
        _fused(order, strict_but_sums | _compared(loops, order)),
    )


def _compared(loops: Loops, order: Iterable[Expr]) -> set[Expr]:
    """What decides which element is the largest, or which of two is: another kernel, where it has
    other users, must find the same one."""
    reductions = [p for p in loops.statements if isinstance(p, (Reduce, CrossRowReduce, Scan))]
    roots = [p.body for p in reductions if p.kind != "sum"]
    roots += [a for n in order if n.dtype == "bool" for a in n.args]
    return {n for root in dict.fromkeys(roots) for n in root.walk()}


def softmax_sums(loops: Loops, row_level: RowLevel) -> frozenset[str]:
    """Sums of exp(b - m), m the maximum of b: at least 1, and a number of elements at most."""
    chain, names = Chain(row_level), set()
    for p in loops.statements:
        if isinstance(p, (Reduce, Scan)):
            chain.add(p)
            rule = chain.rules.get(p.name)
            if isinstance(rule, Rescaled) and rule.plain and rule.factor is None:
                names.add(p.name)
    return frozenset(names)


def _fused(order: Iterable[Expr], shown: set[Expr]) -> frozenset[Expr]:
    """Not sums of two products: where they are as large, the rounding of one would be all of it."""
    users = Counter(c for n in order for c in children(n))
    sums = []
    for n in order:
        if n.op in ("add", "sub") and n.dtype == "f32" and n not in shown:
            products = [a for a in n.args if is_product(a)]
            if len(products) == 1 and users[products[0]] == 1 and products[0].op == "mul":
                sums.append(n)
    return frozenset(sums)


def is_product(n: Expr) -> bool:
    return n.op == "mul" or n.op in ("neg", "div") and n.args[0].op in ("mul", "neg", "div")


def _exponentials(order: list[Expr]) -> dict[Expr, Expr]:
    exponentials: dict[Expr, Expr] = {}
    powers = {s[0]: (n, s[1]) for n in order if n.op == "exp" and (s := _square(n.args[0]))}
    for n in order:
        if n.op == "erf":
            factors, scale = _product(n.args[0])  # none of a number
            power, least = powers.get(factors[0], (n, 0.0)) if len(factors) == 1 else (n, 0.0)
            if abs(least + scale * scale) < 2.0**-22 * scale * scale:
                exponentials[n] = power
    return exponentials


def _square(n: Expr) -> tuple[Expr, float] | None:
    """The x and the number of which ``x * x * number`` is the value."""
    factors, scale = _product(n)
    return (factors[0], scale) if len(factors) == 2 and factors[0] is factors[1] else None


def _product(n: Expr, depth: int = 3) -> tuple[list[Expr], float]:
    """Factors of an f32 product, and the product of those that are numbers."""
    if n.op == "mul" and depth:
        (left, a), (right, b) = (_product(x, depth - 1) for x in n.args)
        return left + right, a * b
    if n.op == "neg" and depth:
        factors, scale = _product(n.args[0], depth - 1)
        return factors, -scale
    return ([], float(n.attr)) if n.op == "literal" else ([n], 1.0)


def _strict(
    down: list[Expr], roots: set[Expr], positive: frozenset[str] | None = None
) -> set[Expr]:
    """The roots, and all whose errors they may show. `positive`: registers without a sign."""
    strict = set(roots)
    for n in down:
        for k, c in enumerate(children(n)):
            if c.dtype == "f32" and not _keeps_error_small(n, k, strict, positive):
                strict.add(c)
    return strict


def _results(
    down: list[Expr], shown: set[Expr], sums: set[Expr], totals: dict[str, Expr]
) -> tuple[set[Expr], frozenset[str] | None]:
    """Those of the sums whose errors are seen: not where all uses of the total, those in other such
    sums too, end in a rounding to a half. And the totals that are no negative numbers."""
    if not totals:
        return sums, None
    positive = frozenset(n for n, body in totals.items() if not_negative(body, frozenset()))
    seen = sums - set(totals.values())
    while True:
        strict = _strict(down, shown | seen, positive)
        shows = {n.attr[0] for n in strict if n.op == "load"}
        more = {body for name, body in totals.items() if name in shows} - seen
        if not more:
            return seen, positive
        seen |= more


def _may_err_in_sums(n: Expr) -> bool:
    rounded = n.args[0].op in ("add", "sub", "mul", "div", "fma")
    return n.op in ("div", "sqrt", "reciprocal", "erf") or rounded


def gelu_factors(n: Expr) -> tuple[Expr | None, Expr] | None:
    """(y, erf) of ``y * 0.5 * (1 + erf(x))``, None for a y of 1."""
    if n.op != "mul" or n.dtype != "f32":
        return None
    for more, other in (n.args, n.args[::-1]):
        erf = erf_of_one_plus(more)
        if erf is None:
            continue
        if other.op == "literal" and other.attr == 0.5:
            return None, erf
        for y, half in (other.args, other.args[::-1]) if other.op == "mul" else ():
            if half.op == "literal" and half.attr == 0.5:
                return y, erf
    return None


def scaled_factor(n: Expr) -> tuple[Expr, float]:
    """The factor that is no number, and the number; (n, 1) where there are others."""
    factors, scale = _product(n)
    return (factors[0], scale) if len(factors) == 1 else (n, 1.0)


def log1p_of_unit(n: Expr) -> bool:
    """Whether it is the log1p of the exponential of what is no positive number."""
    if n.op != "log1p" or n.dtype != "f32" or n.args[0].op not in ("exp", "exp2"):
        return False
    power = n.args[0].args[0]
    return power.op == "neg" and not_negative(power.args[0])


def erf_of_one_plus(n: Expr) -> Expr | None:
    """The second term of ``1 + erf(x)``."""
    if n.op == "add":
        for one, erf in (n.args, n.args[::-1]):
            if one.op == "literal" and one.attr == 1.0 and erf.op == "erf":
                return erf
    return None


def _keeps_error_small(
    user: Expr, position: int, strict: set[Expr], positive: frozenset[str] | None = None
) -> bool:
    """Whether an error of an argument is at most an error of the same size of a node that may have
    it."""
    if user.op == "cast":
        return user.dtype in (*HALF, *FLOAT8) or (user.dtype == "f32" and user not in strict)
    if user in strict:
        return False
    if log1p_of_unit(user):
        return True  # its slope is less than what it makes over its argument
    if user.op == "sqrt" or user.op == "reciprocal" or user.op == "div" and position == 1:
        # What is left of a difference would be all there is.
        return _is_no_difference(user.args[position], positive)
    if user.op == "rsqrt":
        return positive is not None and _is_no_difference(user.args[0], positive)
    return user.op in ERROR_CARRYING and (user.op != "where" or position > 0)


def _is_no_difference(n: Expr, positive: frozenset[str] | None = None) -> bool:
    """No difference: a sum only of what is known to be no negative number."""
    if n.op == "add":
        return all(not_negative(a, positive) for a in n.args)
    return n.op != "sub"


def not_negative(n: Expr, positive: frozenset[str] | None = None) -> bool:
    """`positive`: registers that are known to be so; where given, more is looked into."""
    if n.op in ("add", "mul") or n.op == "div" and positive is not None:
        square = positive is not None and n.op == "mul" and n.args[0] is n.args[1]
        return square or all(not_negative(a, positive) for a in n.args)
    if n.op == "cast":
        return not_negative(n.args[0], positive)
    if n.op == "load":
        return positive is not None and n.attr[0] in positive
    return n.op in ("exp", "exp2", "sigmoid", "abs", "sqrt") or n.op == "literal" and n.attr >= 0


def at_least_one(n: Expr) -> bool:
    """Whether it is 1 and what is no negative number: no reciprocal of it needs a scale."""
    ones = [a.op == "literal" and a.attr >= 1.0 for a in n.args] if n.op == "add" else []
    return any(ones) and all(map(not_negative, n.args))


__all__ = [
    "Inexact",
    "at_least_one",
    "gelu_factors",
    "inexact",
    "log1p_of_unit",
    "not_negative",
    "erf_of_one_plus",
    "scaled_factor",
    "softmax_sums",
]
