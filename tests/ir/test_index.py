"""Index algebra means what Python's integers mean, and what it claims about ranges is true."""

from __future__ import annotations

import functools
import itertools
import math
import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deuteron.ir.division import _plainly_nonneg
from deuteron.ir.expr import Expr, load
from deuteron.ir.index import (
    Axis,
    Div,
    Index,
    Mod,
    Sym,
    Value,
    as_index,
    atom,
    bound,
    const,
    determined,
    divide_exact,
    evaluate,
    fits,
    floordiv,
    hint,
    in_range,
    is_nonneg,
    maximum,
    minimum,
    mod,
    product,
    substitute,
)
from deuteron.ir.ranges import interval
from tests.ir.trees import AXES, SYMS, Tree, build, divisors, meaning, tree_axes, trees, valuations

quick = settings(max_examples=250, deadline=None)
n, m = atom(Sym("n")), atom(Sym("m", 1))
_AXIS: Tree = ("atom", AXES[1])
# Trees that chance seldom draws; each is the only sure way to one answer of the algebra.
remainder_of_remainder: Tree = ("mod", ("mod", _AXIS, ("const", 6)), ("const", 3))
product_of_unknown_signs: Tree = ("mul", ("atom", SYMS[3]), _AXIS)
squared: Tree = ("mul", _AXIS, _AXIS)
inside_a_quotient: Tree = ("floordiv", _AXIS, ("const", 2))


@quick
@given(trees)
@example(remainder_of_remainder)
def test_simplified_index_has_the_same_value(tree: Tree) -> None:
    index = build(tree)
    for env in valuations(tree_axes(tree), 2):
        assert evaluate(index, env) == meaning(tree, env), f"{index!r} at {env}"


@quick
@given(trees)
def test_proof_of_nonneg_holds_everywhere(tree: Tree) -> None:
    index = build(tree)
    if is_nonneg(index):
        for env in valuations(tree_axes(tree)):
            assert meaning(tree, env) >= 0, f"{index!r} at {env}"


@quick
@given(trees, trees)
def test_in_range_holds_everywhere(tree: Tree, extent: Tree) -> None:
    index, end = build(tree), build(extent)
    if in_range(index, end):
        for env in valuations(tree_axes(tree) | tree_axes(extent)):
            assert 0 <= meaning(tree, env) < meaning(extent, env), f"{index!r} < {end!r} at {env}"


@quick
@given(trees, divisors, divisors)
def test_flattened_and_split_again(tree: Tree, a: Tree, b: Tree) -> None:
    """Reshapes there and back give the same values; the remainder is in range of its extent."""
    index, d, e = build(tree), build(a), build(b)
    there = index * d + index % d
    back = (index // d) * d + index % d
    twice = (index // (d * e)) * (d * e) + (index // d) % e * d + index % d
    inside = (index // (d * e)) * (d * e) + index % (d * e) // d * d + index % d
    for env in valuations(tree_axes(tree), 2):
        x, y = meaning(tree, env), meaning(a, env)
        assert evaluate(there, env) == x * y + x % y
        assert evaluate(back, env) == x == evaluate(twice, env) == evaluate(inside, env)


@pytest.mark.parametrize("sizes", [(9, 6), (9, 3, 2), (3, 3, 3, 2), (2, 4, 5, 3), (4, 3, 9)])
@pytest.mark.parametrize(("step", "width"), [(1, 2), (2, 3), (3, 2), (4, 5), (6, 7)])
def test_windows_of_a_tensor_that_was_flattened(
    sizes: tuple[int, ...], step: int, width: int
) -> None:
    """One address of its elements, not a division for each dimension."""
    starts = (math.prod(sizes) - width) // step + 1
    flat = Axis("start", starts).index * step + Axis("place", width).index
    address = const(0)
    for d, n in enumerate(sizes):
        inner = math.prod(sizes[d + 1 :])
        address = address + (flat // inner) % n * inner
    assert address is flat


@quick
@given(st.lists(st.tuples(st.one_of(st.integers(-9, 9), trees), trees), min_size=1, max_size=4))
@example([(1, ("atom", AXES[0])), (3, ("atom", AXES[6])), (0, ("const", 1))])
@example([(2, ("atom", AXES[0])), (5, ("atom", AXES[0]))])
@example([(1, ("atom", AXES[0])), (3, ("atom", AXES[6])), (3, ("atom", AXES[1]))])
@example([(1, ("atom", AXES[0])), (2, ("atom", AXES[1])), (3, ("atom", AXES[6]))])
@example([(1, ("atom", AXES[0])), (-3, ("atom", AXES[6])), (9, inside_a_quotient)])
@example([(1, squared)])
def test_determined_axes_are_those_of_equal_numbers(sums: list[tuple[int | Tree, Tree]]) -> None:
    parts: list[Tree] = [
        ("mul", ("const", c) if isinstance(c, int) else c, tree) for c, tree in sums
    ]
    tree = functools.reduce(lambda a, b: ("add", a, b), parts)
    proven = determined(build(tree))
    axes = sorted(tree_axes(tree), key=lambda a: a.name)
    assert proven <= set(axes)
    seen: dict[tuple[int, ...], dict[str, int]] = {}
    for env in valuations(set(axes), 2):
        key = (meaning(tree, env), *(env[s.name] for s in SYMS))
        other = seen.setdefault(key, env)
        assert all(env[a.name] == other[a.name] for a in proven), f"{tree} at {env} and {other}"


@quick
@given(trees)
@example(product_of_unknown_signs)
def test_bounds_hold(tree: Tree) -> None:
    index = build(tree)
    low, high = bound(index, False), bound(index, True)
    for env in valuations(tree_axes(tree)):
        value = meaning(tree, env)
        if low is not None:
            assert evaluate(low, env) <= value, f"{low!r} <= {index!r} at {env}"
        if high is not None:
            assert value <= evaluate(high, env), f"{index!r} <= {high!r} at {env}"


@quick
@given(trees)
@example(product_of_unknown_signs)
@example(inside_a_quotient)
def test_intervals_hold(tree: Tree) -> None:
    index = build(tree)
    limits = interval(index)
    for env in valuations(tree_axes(tree)) if limits is not None else ():
        assert limits[0] <= meaning(tree, env) <= limits[1], f"{index!r} in {limits} at {env}"


def test_what_stays_in_64_bits() -> None:
    """A size is below 2^31, a number that may be negative may be any."""
    count, size, any_number = Axis("c", 6).index, Axis("r", n).index, atom(Sym("k", -(2**63)))
    inside = [count * 2**60, count * 2**40 - size * 7, size * m, count // 2 * 2**61, count % 2 + n]
    inside += [const(2**63 - 1), minimum(size, 100) * 2**56]
    outside = [count * 2**61, count * 2**60 + 2**62, size * m * 5, n * n * n, any_number + 1]
    outside += [const(2**63), count * any_number, count * -(2**61), count * 2**61 - 2**62]
    assert all(fits(i) for i in inside) and not any(fits(i) for i in outside)


@quick
@given(trees, st.sampled_from(AXES), trees)
def test_substitute_is_evaluation_with_another_value(tree: Tree, axis: Axis, new: Tree) -> None:
    index, other = build(tree), build(new)
    moved = substitute(index, {axis: other})
    for env in valuations(tree_axes(tree) | tree_axes(new), 2):
        at = meaning(new, env)
        limit = evaluate(axis.extent, env)
        if 0 <= at < limit:  # elsewhere the index was simplified for values that the axis has not
            assert evaluate(moved, env) == meaning(tree, {**env, axis.name: at})


@quick
@given(trees, trees)
def test_divide_exact_multiplies_back(tree: Tree, den: Tree) -> None:
    a, b = build(tree), build(den)
    if b.value == 0:
        return
    q = divide_exact(a, b)
    if q is not None:
        for env in valuations(tree_axes(tree) | tree_axes(den), 2):
            assert evaluate(q, env) * meaning(den, env) == meaning(tree, env)
    back = divide_exact(a * b, b)
    assert len(b.terms) != 1 or back is a
    assert divide_exact(a, 1) is a


@quick
@given(trees, st.sampled_from(AXES))
@example(squared, AXES[1])
@example(inside_a_quotient, AXES[1])
def test_coefficient_is_the_slope(tree: Tree, axis: Axis) -> None:
    index = build(tree)
    slope = index.coefficient(axis)
    if slope is None:
        return
    assert axis not in slope.atoms()
    for env in valuations(tree_axes(tree) | {axis}, 2):
        if env[axis.name]:
            before = {**env, axis.name: env[axis.name] - 1}
            assert evaluate(index, env) - evaluate(index, before) == evaluate(slope, env)


@quick
@given(trees)
def test_equal_text_is_the_same_object(tree: Tree) -> None:
    index = build(tree)
    assert build(tree) is index
    assert Index(dict(reversed(index.terms))) is index
    assert pickle.loads(pickle.dumps(index)) is index
    names = {s.name: k + 3 for k, s in enumerate(SYMS)} | {a.name: k for k, a in enumerate(AXES)}
    assert eval(repr(index), {"min": min, "max": max}, dict(names)) == evaluate(index, names)


@quick
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 60), st.integers(-7, 7))
def test_digits_of_a_mixed_radix_number(radices: list[int], den: int, shift: int) -> None:
    """Numbers whose digits are axes, as reshapes make them: terms with common factors."""
    axes = [Axis(f"d{k}", r) for k, r in enumerate(radices)]
    number = const(shift)
    for a in axes:
        number = number * a.extent + a.index
    quotient, rest = floordiv(number, den), mod(number, den)
    for digits in itertools.product(*(range(r) for r in radices)):
        env = {a.name: d for a, d in zip(axes, digits)}
        value = shift
        for r, d in zip(radices, digits):
            value = value * r + d
        assert (evaluate(quotient, env), evaluate(rest, env)) == divmod(value, den)


def test_facts_of_one_symbol_do_not_serve_another_of_its_name() -> None:
    sure, unsure = atom(Sym("s0", 2)), atom(Sym("s0"))
    assert is_nonneg(sure - 2)
    assert not is_nonneg(unsure - 2)
    assert not is_nonneg(atom(Sym("s0", -5)))
    assert Axis("i", sure) is not Axis("i", unsure)
    assert hint(atom(Sym("s0", 2, 7))) == 7 and hint(atom(Sym("s0", 2, 9))) == 9


i, j, k = Axis("i", n), Axis("j", 64), Axis("k", m)
I, J, K = i.index, j.index, k.index


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ((I * 64 + J) // 64, I),
        ((I * 64 + J) % 64, J),
        ((I * m + K) // m, I),
        ((I * m + K) % m, K),
        ((I // 8) * 8 + I % 8, I),
        ((I // m) * m + I % m, I),
        ((I // 8) * 8 + (I % 8) // 2 * 2 + I % 2, I),
        (I % (m * 4) // m * m + I % m, I % (m * 4)),
        ((I % 6) // 4 * 4 + I % 4, (I % 6) // 4 * 4 + I % 4),
        ((I // 8) // 4, I // 32),
        ((I * 6 + 3) // 9, (I * 2 + 1) // 3),
        ((I * 6 + 2) // 9, (I * 2) // 3),
        ((I % 64) % 8, I % 8),
        ((I * 8) % 64, I % 8 * 8),
        ((n * m - 1) // m, n - 1),
        ((n * m - 1) % m, m - 1),
        ((J + 128) // 64, const(2)),
        ((J - 64) // 64, const(-1)),
        (minimum(J, 64), J),
        (maximum(J - 64, 0), const(0)),
        (product([n, m, 2]), n * m * 2),
        (as_index(3) - 3, const(0)),
    ],
)
def test_simplifies(got: Index, expected: Index) -> None:
    assert got is expected, f"{got!r} is not {expected!r}"


def _axis(extent: Index) -> Index:
    return Axis("a", extent).index


@pytest.mark.parametrize(
    ("index", "extent"),
    [
        (I * 64 + J, n * 64),
        (I * m + K, n * m),
        (_axis(n * m) // m, n),
        (_axis(n * m) % m, m),
        (n - 1 - I, n),
        (_axis((n + 1) // 2) * 2, n),  # every second element
        (_axis(n // 2) * 2 + 1, n),
        (_axis(maximum(0, n - 5)) + 5, n),  # a slice from 5 on
        (_axis(minimum(n, 5)), n),
        (_axis(minimum(n, 5)), const(5)),
        (_axis((n + 63) // 64) % 64, const(64)),
        (minimum(I + 3, n - 1), n),
        (J // 8 + J % 8 * 8, const(64)),
        (_axis(n * 4) // 4 * 4 + 3, n * 4),
    ],
)
def test_proves_in_range(index: Index, extent: Index) -> None:
    assert in_range(index, extent)


@pytest.mark.parametrize(
    ("index", "extent"),
    [(I + 1, n), (I - 1, n), (J, const(63)), (const(0), n), (_axis(n + 1), n), (J * 2, const(64)),
     (maximum(I, 5), n), (I * J, n * 64 - 200)],
)  # fmt: skip
def test_does_not_prove_what_is_false(index: Index, extent: Index) -> None:
    assert not in_range(index, extent)


def test_determines() -> None:
    row = Axis("row", n)
    place = atom(Value(load("idx", (row.index,), "i64")))  # of any size
    inside = atom(Value(Expr("check", "i64", (load("idx", (row.index,), "i64"),), n)))
    u, v = Axis("u", n).index, Axis("v", 64).index
    both = determined(place * 64 + J)
    assert both == {j}, "rows at loaded places, whole"
    assert determined(place * m + K) == {k}
    assert determined(J * n + inside) == {j} and not determined(J * n + place)
    assert determined(I * 64 + J) == {i, j} and determined(I * m + K) == {i, k}
    assert determined(u * (m * 64) + K * 64 + v) == {Axis("u", n), k, Axis("v", 64)}
    assert determined(place * (m * 64) + inside * 64 + J) == {j}
    assert determined(maximum(J - 1, 0)) == determined(J // 2) == determined(I * I) == set()
    assert determined(I + J) == determined(I * 63 + J) == set()
    assert determined(n - 1 - I) == {i}
    d = atom(Sym("d", -2))  # of unknown sign: what it weighs has no known reach
    assert not determined(J + d * I + (d * (n - 1) - 64) * K)


def test_division_by_what_is_not_positive_is_an_error() -> None:
    for bad in (0, -3):
        with pytest.raises(ZeroDivisionError):
            floordiv(n, bad)
        with pytest.raises(ZeroDivisionError):
            mod(n, bad)


# -- forms that the trees do not have --------------------------------------------------------------

sums = st.sampled_from(
    [n + 1, m + 1, m + atom(Sym("k", 2, 7)), m * 2 + 1, m * m + m, n * m + 1, m + n * 3 + 2]
)


@quick
@given(trees, sums)
def test_divisors_of_several_terms(tree: Tree, den: Index) -> None:
    """Exact multiples leave nothing, everything else what Python says."""
    index = build(tree)
    made = {k: f(index, den) for k, f in (("q", floordiv), ("r", mod))}
    both = floordiv(index * den, den), mod(index * den, den)
    exact = divide_exact(index * den, den)
    for env in valuations(tree_axes(tree), 2):
        x, d = meaning(tree, env), evaluate(den, env)
        assert (evaluate(made["q"], env), evaluate(made["r"], env)) == divmod(x, d)
        assert (evaluate(both[0], env), evaluate(both[1], env)) == (x, 0)
        assert exact is None or evaluate(exact, env) == x


@quick
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=14), sums)
def test_long_division_ends(coefficients: list[int], den: Index) -> None:
    """Of polynomials of any degree: the quotient, or None after a handful of steps."""
    number = const(0)
    for c in coefficients:
        number = number * n + c
    for quotient in (divide_exact(number, n - 1), divide_exact(number, den)):
        by = n - 1 if quotient is divide_exact(number, n - 1) else den
        for size in range(2, 6):
            env = {"n": size, "m": size + 1, "k": size + 2}
            if quotient is not None:
                assert evaluate(quotient, env) * evaluate(by, env) == evaluate(number, env)
    powers = const(0)
    for _ in range(12):
        powers = powers * n + 1
    assert divide_exact(powers * (n - 1), n - 1) is None  # too long, and given up


@quick
@given(trees)
def test_divisors_that_may_be_zero(tree: Tree) -> None:
    """Where the divisor is 0 nothing is said; elsewhere multiples of it leave nothing."""
    index = build(tree)
    quotient, rest = floordiv(index * n, n), mod(index * n, n)
    for env in valuations(tree_axes(tree), 2):
        if env["n"] > 0:
            assert (evaluate(quotient, env), evaluate(rest, env)) == (meaning(tree, env), 0)
    assert floordiv(const(0), n) is const(0)


def test_atoms_that_are_plainly_nonneg() -> None:
    loaded = Value(load("ids", (const(0),), "i64"))
    known = [
        (Axis("i", 3), True),
        (Mod(n, const(4)), True),
        (loaded, False),
        (Sym("d", -2), False),
        (Sym("n"), True),
        (Div(n, const(2)), True),
        (Div(atom(Sym("d", -2)), const(2)), False),
    ]
    for a, expected in known:
        assert _plainly_nonneg(a) is expected


@quick
@given(trees, st.sampled_from(AXES), st.integers(0, 2))
def test_substitution_reaches_loaded_values(tree: Tree, axis: Axis, at: int) -> None:
    index = build(tree)
    made = atom(Value(load("ids", (index,), "i64"))) * 3 + axis.index
    moved = substitute(made, {axis: const(at)})
    inner = substitute(index, {axis: const(at)})
    assert moved is atom(Value(load("ids", (inner,), "i64"))) * 3 + at
