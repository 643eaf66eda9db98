"""Families of programs: a name, and for a shape and a dtype a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dev.bench.cases import Program, Spec

Shape = tuple[int, ...]


FAMILIES: dict[str, Callable[[Shape, str], Program]] = {}


def family(f: Callable[[Shape, str], Program]) -> Callable[[Shape, str], Program]:
    FAMILIES[f.__name__] = f
    return f


def x(shape: Shape, dtype: str, **more: Any) -> Spec:
    return Spec(tuple(shape), dtype, grad=True, **more)


def weight(n: int, dtype: str) -> Spec:
    return Spec((n,), dtype, grad=True, scale=0.2, shift=1.0)


def ids(high: int, *shape: int) -> Spec:
    return Spec(shape, "i64", high=high)
