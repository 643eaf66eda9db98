"""Random index expressions beside what they must mean: trees of Python integers' operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from deuteron.ir.index import Axis, Index, Sym, atom, const, floordiv, maximum, minimum, mod

# Sizes with different knowledge: none, at least 1, at least 2, possibly negative.
SYMS = (Sym("n"), Sym("m", 1), Sym("k", 2, 7), Sym("d", -2))
N, M, K = (atom(s) for s in SYMS[:3])
AXES = (
    Axis("i", 3), Axis("j", N), Axis("u", M * 2), Axis("v", K - 1), Axis("w", 1),
    Axis("x", maximum(0, N - 2)), Axis("y", minimum(N, 3)), Axis("z", floordiv(K + 1, 2)),
)  # fmt: skip
Tree = tuple[Any, ...]


def leaves() -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.sampled_from(AXES).map(lambda a: ("atom", a)),
        st.sampled_from(SYMS).map(lambda s: ("atom", s)),
        st.integers(-9, 9).map(lambda c: ("const", c)),
    )


# What divides: constants, and sizes that are at least 1.
divisors = st.one_of(
    st.integers(1, 6).map(lambda c: ("const", c)),
    st.sampled_from(SYMS[1:3]).map(lambda s: ("atom", s)),
    st.sampled_from(SYMS[1:3]).map(lambda s: ("mul", ("const", 2), ("atom", s))),
)


def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(st.sampled_from(("add", "sub", "mul", "min", "max")), inner, inner),
        st.tuples(st.just("mul"), inner, divisors),
        st.tuples(st.sampled_from(("floordiv", "mod")), inner, divisors),
    )


trees = st.recursive(leaves(), grow, max_leaves=6)

_BUILD = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "floordiv": floordiv, "mod": mod, "min": minimum, "max": maximum,
}  # fmt: skip
_MEAN = {
    **_BUILD, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "min": min, "max": max,
}  # fmt: skip


def build(tree: Tree) -> Index:
    """The tree by index algebra."""
    if tree[0] == "atom":
        return atom(tree[1])
    if tree[0] == "const":
        return const(tree[1])
    return _BUILD[tree[0]](build(tree[1]), build(tree[2]))


def meaning(tree: Tree, env: Mapping[str, int]) -> int:
    """The tree by Python's integers."""
    if tree[0] == "atom":
        return env[tree[1].name]
    if tree[0] == "const":
        return tree[1]
    return _MEAN[tree[0]](meaning(tree[1], env), meaning(tree[2], env))


def tree_axes(tree: Tree) -> set[Axis]:
    if tree[0] == "atom":
        return {tree[1]} if isinstance(tree[1], Axis) else set()
    return set() if tree[0] == "const" else tree_axes(tree[1]) | tree_axes(tree[2])


def _extent(axis: Axis, sizes: Mapping[str, int]) -> int:
    n, m, k = sizes["n"], sizes["m"], sizes["k"]
    extents = {
        "i": 3, "j": n, "u": 2 * m, "v": k - 1, "w": 1, "x": max(0, n - 2), "y": min(n, 3),
        "z": (k + 1) // 2,
    }  # fmt: skip
    return extents[axis.name]


def valuations(axes: set[Axis], width: int = 3) -> Iterator[dict[str, int]]:
    """Every value of `axes` for sizes from their lowest on, and one larger set of sizes."""
    names = [s.name for s in SYMS]
    small = itertools.product(*(range(s.low, s.low + width) for s in SYMS))
    sizes = itertools.chain(small, [(5, 4, 6, 3), (4, 1, 5, -1)])
    order = sorted(axes, key=lambda a: a.name)
    for values in sizes:
        env = dict(zip(names, values))
        ranges = [range(_extent(a, env)) for a in order]
        for point in itertools.islice(itertools.product(*ranges), 200):
            yield {**env, **{a.name: p for a, p in zip(order, point)}}
