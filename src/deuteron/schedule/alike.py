"""What follows from computations, whatever they and their tensors are called.

In: computations in order of execution. Out: the same with canonical axes and with names numbered
in the order in which they appear, equal for alike parts of a model: what follows from those is
reckoned once (`contract`). `restored` gives what was found the names of one of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from deuteron.base.memo import MEMO
from deuteron.ir import expr as E
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis
from deuteron.ir.nest import Cut, Nest, Reduce, Statement
from deuteron.ir.program import Compute
from deuteron.schedule.normalize import canonical

Naming = Callable[[str], str]
Points = tuple[tuple[Axis, ...], Expr]
_CANONICAL: dict[Points, Points] = MEMO.answers()
_RENAMED: dict[tuple[Expr, tuple[str, ...]], Expr] = MEMO.answers()


def numbered(computes: Iterable[Compute]) -> tuple[tuple[Compute, ...], dict[str, str]]:
    """Alike computations under equal names ("%0", "%1", ...); which names these stand for."""
    names: dict[str, str] = {}

    def number(name: str) -> str:
        return names.setdefault(name, f"%{len(names)}")

    def under_number(c: Compute) -> Compute:
        known = _CANONICAL.get((c.axes, c.body))
        if known is None:
            plain = canonical(c)
            known = _CANONICAL[c.axes, c.body] = plain.axes, plain.body
        axes, body = known
        return replace(c, axes=axes, body=renamed(body, number), name=number(c.name), origins=())

    return tuple(map(under_number, computes)), names


def renamed(root: Expr, naming: Naming) -> Expr:
    loads = root.loads()
    key = root, tuple(naming(n.attr[0]) for n in loads)
    if key not in _RENAMED:
        _RENAMED[key] = _renamed(root, dict(zip(loads, key[1], strict=True)))
    return _RENAMED[key]


def _renamed(root: Expr, names: Mapping[Expr, str]) -> Expr:
    done: dict[Expr, Expr] = {}
    for node in root.walk():
        new = E.rebuild(node, tuple(done[a] for a in node.args), {}, done)
        if new.op == "load":
            new = Expr("load", new.dtype, new.args, (names[node], *new.attr[1:]))
        done[node] = new
    return done[root]


def restored(nest: Nest, naming: Naming) -> Nest:
    def under_name(s: Statement) -> Statement:
        if isinstance(s, Reduce):
            return replace(s, name=naming(s.name), body=renamed(s.body, naming))
        return replace(s, tensor=naming(s.tensor), value=renamed(s.value, naming))

    def under_names(c: Cut) -> Cut:
        return replace(c, hidden=renamed(c.hidden, naming), end=renamed(c.end, naming))

    statements, cuts = map(under_name, nest.statements), map(under_names, nest.cuts)
    return Nest(nest.axes, tuple(statements), tuple(cuts))


def restored_text(text: str, naming: Naming) -> str:
    return re.sub(r"%\d+", lambda number: naming(number[0]), text)


__all__ = ["Naming", "numbered", "restored", "restored_text"]
