"""Reads the text of `ir.printer` back: the program is equal to the one that was printed.

In: text, and what text cannot hold (constants by name or digest, callables, objects by key). Out: a
`Program`. Nothing is simplified: expressions and indices are built as they are written. Errors are
`SyntaxError` with the line.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

import torch

from deuteron.ir.expr import FACTOR, UNROUNDED, Expr, literal
from deuteron.ir.index import Atom, Axis, Div, Index, MinMax, Mod, Sym, Value, atom, const
from deuteron.ir.operations import COMPARISONS, DTYPES
from deuteron.ir.printer import INFIX
from deuteron.ir.program import (
    Check,
    Compute,
    Constant,
    Def,
    Extern,
    Given,
    Input,
    Layout,
    Origin,
    Output,
    Program,
    ViewArg,
    contiguous_strides,
)

_BINARY: dict[type, str] = dict(
    zip(
        (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
        INFIX,
    )
)
_DISTRIBUTIONS = ("rand", "randn", "rand_bits")


def parse_program(
    text: str,
    constants: Mapping[str, Any] | None = None,
    callables: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Program:
    """The program that `print_program` printed. `objects` are arguments of calls, by key."""
    return _Reader(text, dict(objects or {})).program(dict(constants or {}), dict(callables or {}))


class _Reader:
    def __init__(self, text: str, objects: dict[str, Any]) -> None:
        self.lines = text.splitlines()
        self.objects = objects
        self.tree = ast.parse(text)
        self.syms: dict[str, Sym] = {}
        self.axes: dict[str, Axis] = {}
        self.lets: dict[str, Expr] = {}
        self.layouts: dict[str, Layout] = {}
        self.defs: list[Def] = []
        self.outputs: list[Output] = []
        self.sizes: list[tuple[Sym, Any]] = []
        self.checks: list[Check] = []
        self.num_inputs = 0

    def fail(self, node: ast.AST, why: str) -> SyntaxError:
        line = getattr(node, "lineno", 0)
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        return SyntaxError(f"line {line}: {why}: {text}")

    def program(self, constants: dict[str, Any], callables: dict[str, Any]) -> Program:
        last = 0
        for node in self.tree.body:
            origins = self.origins(last, node.lineno - 1)
            last = node.end_lineno or node.lineno
            if isinstance(node, ast.FunctionDef):
                self.compute(node, origins)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assignment(node.targets[0].id, node.value)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self.statement(node.value, origins)
            else:
                raise self.fail(node, "not a definition")
        return Program(
            tuple(self.defs),
            tuple(self.outputs),
            tuple(self.sizes),
            constants,
            callables,
            self.num_inputs,
            checks=tuple(self.checks),
        )

    def origins(self, start: int, end: int) -> tuple[Origin, ...]:
        """The origins in the lines ``start .. end - 1`` (from 0)."""
        stripped = (x.strip() for x in self.lines[start:end])
        parts = (x[3:].split(" | ", 2) for x in stripped if x.startswith("#: "))
        return tuple(Origin(p[0], p[1], p[2] if len(p) > 2 else "") for p in parts)

    # -- statements --------------------------------------------------------------------------------

    def assignment(self, name: str, value: ast.expr) -> None:
        kind, args, _ = self.called(value)
        if kind == "size":
            low, hint = ast.literal_eval(args[0]), ast.literal_eval(args[1])
            sym = self.syms[name] = Sym(name, low, hint)
            if len(args) > 2:
                self.sizes.append((sym, ast.literal_eval(args[2])))
            return
        layout = self.layout(args[1])
        first = ast.literal_eval(args[0])
        self.layouts[name] = layout
        if kind not in ("input", "constant"):
            raise self.fail(value, f"no definition {kind!r}")
        self.defs.append(
            Input(name, layout, first) if kind == "input" else Constant(name, layout, first)
        )

    def statement(self, node: ast.Call, origins: tuple[Origin, ...]) -> None:
        kind, args, kwargs = self.called(node)
        if kind == "program":
            self.num_inputs = ast.literal_eval(kwargs["num_inputs"])
        elif kind == "output":
            self.output(args, kwargs)
        elif kind == "check":
            self.checks.append(Check(*map(ast.literal_eval, args)))
        elif kind == "call":
            self.call(args, kwargs, origins)
        else:
            raise self.fail(node, f"no statement {kind!r}")

    def called(self, node: ast.expr) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self.fail(node, "not a call by name")
        return node.func.id, node.args, {k.arg: k.value for k in node.keywords if k.arg is not None}

    def output(self, args: list[ast.expr], kwargs: dict[str, ast.expr]) -> None:
        tensor = ast.literal_eval(args[0])
        if tensor is None:
            self.outputs.append(Output(None, value=self.value(args[1])))
            return
        dtype = ast.literal_eval(kwargs["dtype"]) if "dtype" in kwargs else None
        shape, strides = self.indices(args[1]), self.indices(args[2])
        at, distinct = self.index(args[3]), "distinct" in kwargs
        self.outputs.append(Output(tensor, shape, strides, at, dtype=dtype, distinct=distinct))

    def call(
        self, args: list[ast.expr], kwargs: dict[str, ast.expr], origins: tuple[Origin, ...]
    ) -> None:
        sizes: list[Sym | None] = []
        for s in self.elements(kwargs.get("sizes")):
            if isinstance(s, ast.Constant):
                sizes.append(None)
                continue
            low, hint, name = (ast.literal_eval(x) for x in self.called(s)[1])
            sizes.append(Sym(name, low, hint))
            self.syms[name] = Sym(name, low, hint)
        names: list[str | None] = []
        layouts: list[Layout | None] = []
        for r in self.elements(kwargs.get("results")):
            parts = [None, None] if isinstance(r, ast.Constant) else self.called(r)[1]
            names.append(None if parts[0] is None else ast.literal_eval(parts[0]))
            empty = parts[1] is None or isinstance(parts[1], ast.Constant)
            layouts.append(None if empty else self.layout(parts[1]))  # type: ignore[arg-type]
        self.layouts.update({n: lay for n, lay in zip(names, layouts) if n and lay})
        plain = {
            k: ast.literal_eval(kwargs[k])
            for k in ("mutates", "aliases", "reason", "impure")
            if k in kwargs
        }
        self.defs.append(
            Extern(
                tuple(names), ast.literal_eval(args[0]), self.value(args[1]),
                self.value(kwargs["kwargs"]) if "kwargs" in kwargs else (), tuple(layouts),
                sizes=tuple(sizes), origins=origins, **plain,
            )
        )  # fmt: skip

    def elements(self, node: ast.expr | None) -> list[ast.expr]:
        if node is None:
            return []
        if not isinstance(node, (ast.Tuple, ast.List)):
            raise self.fail(node, "not a tuple")
        return node.elts

    def value(self, node: ast.expr) -> Any:
        """An argument of a library call."""
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [self.value(x) for x in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Attribute):  # torch.float32
            return getattr(torch, node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return getattr(torch, node.func.attr)(*(ast.literal_eval(a) for a in node.args))
        if isinstance(node, ast.Call):
            kind, args, _ = self.called(node)
            if kind == "at":
                return self.index(args[0])
            if kind == "view":
                shape, strides = self.indices(args[1]), self.indices(args[2])
                return ViewArg(ast.literal_eval(args[0]), shape, strides, self.index(args[3]))
            if kind == "given":
                return Given(ast.literal_eval(args[0]))
            if kind == "opaque":
                return self.objects[ast.literal_eval(args[0])]
        return number(node)

    def layout(self, node: ast.expr) -> Layout:
        marks: dict[str, list[ast.expr]] = {}
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            marks[node.func.attr] = node.args
            node = node.func.value
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            raise self.fail(node, "not a layout")
        shape = tuple(self.index(i) for i in self.places(node))
        strides = contiguous_strides(shape)
        if "strides" in marks:
            strides = tuple(self.index(i) for i in marks["strides"])
        offset = self.index(marks["offset"][0]) if "offset" in marks else const(0)
        device = ast.literal_eval(marks["on"][0]) if "on" in marks else "cpu"
        return Layout(shape, strides, node.value.id, device, offset)

    # -- computations ------------------------------------------------------------------------------

    def compute(self, node: ast.FunctionDef, origins: tuple[Origin, ...]) -> None:
        self.axes, self.lets = {}, {}
        a = node.args
        outer = [Axis(x.arg, self.index(n)) for x, n in zip(a.args, a.defaults)]
        inner = [Axis(x.arg, self.index(n)) for x, n in zip(a.kwonlyargs, a.kw_defaults) if n]
        self.axes = {x.name: x for x in (*outer, *inner)}
        if node.returns is None:
            raise self.fail(node, "no layout")
        layout = self.layout(node.returns)
        for s in node.body[:-1]:
            if not isinstance(s, ast.Assign) or not isinstance(s.targets[0], ast.Name):
                raise self.fail(s, "not a named part")
            self.lets[s.targets[0].id] = self.expr(s.value)
        last = node.body[-1]
        if not isinstance(last, ast.Return) or last.value is None:
            raise self.fail(last, "not a result")
        stored = last.value
        is_store = isinstance(stored, ast.Call) and getattr(stored.func, "id", "") == "store"
        if is_store:
            self.defs.append(self.store(node.name, tuple(outer), layout, origins, stored))
        else:
            body = self.expr(stored)
            self.defs.append(Compute(node.name, tuple(outer), body, layout, origins=origins))
        self.layouts[node.name] = layout

    def store(
        self,
        name: str,
        axes: tuple[Axis, ...],
        layout: Layout,
        origins: tuple[Origin, ...],
        node: ast.expr,
    ) -> Compute:
        _, args, kwargs = self.called(node)
        place = args[0]
        if not isinstance(place, ast.Subscript) or not isinstance(place.value, ast.Name):
            raise self.fail(node, "not a place")
        everywhere = isinstance(place.slice, ast.Constant) and place.slice.value is ...
        index = None if everywhere else tuple(self.index(i) for i in self.places(place))
        accumulate = ast.literal_eval(kwargs["accumulate"]) if "accumulate" in kwargs else None
        mask = self.expr(kwargs["mask"]) if "mask" in kwargs else None
        target = None if place.value.id == "own" else place.value.id
        value, unique = self.expr(args[1]), "unique" in kwargs
        return Compute(name, axes, value, layout, target, index, accumulate, origins, mask, unique)

    def places(self, node: ast.Subscript) -> list[ast.expr]:
        return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]

    # -- indices -----------------------------------------------------------------------------------

    def indices(self, node: ast.expr) -> tuple[Index, ...]:
        return tuple(self.index(i) for i in self.elements(node))

    def index(self, node: ast.expr) -> Index:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return const(node.value)
        if isinstance(node, ast.Name):
            named: Atom | None = self.axes.get(node.id) or self.syms.get(node.id)
            if named is None:
                raise self.fail(node, f"no axis or size {node.id!r}")
            return atom(named)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.index(node.operand)
        if isinstance(node, ast.BinOp):
            a, b = self.index(node.left), self.index(node.right)
            if isinstance(node.op, ast.Mult):
                return a * b
            if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
                return atom(Div(a, b) if isinstance(node.op, ast.FloorDiv) else Mod(a, b))
            if isinstance(node.op, (ast.Add, ast.Sub)):
                total = dict(a.terms)
                for m, c in (b if isinstance(node.op, ast.Add) else -b).terms:
                    total[m] = total.get(m, 0) + c
                return Index(total)
        if isinstance(node, ast.Call):
            kind, args, _ = self.called(node)
            if kind in ("min", "max"):
                return atom(MinMax(kind, self.index(args[0]), self.index(args[1])))
            if kind == "val":
                return atom(Value(self.expr(args[0])))
        raise self.fail(node, "not an index")

    # -- expressions -------------------------------------------------------------------------------

    def expr(self, node: ast.expr) -> Expr:
        if isinstance(node, ast.Name) and node.id in self.lets:
            return self.lets[node.id]
        if is_number(node):
            value = number(node)
            return literal(value, {bool: "bool", int: "i64", float: "f32"}[type(value)])
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            a, b = self.expr(node.left), self.expr(node.right)
            return Expr(_BINARY[type(node.op)], b.dtype, (a, b))
        if isinstance(node, ast.Compare):
            a, b = self.expr(node.left), self.expr(node.comparators[0])
            return Expr(_BINARY[type(node.ops[0])], "bool", (a, b))
        if isinstance(node, ast.Subscript):
            return self.load(node)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                return self.marked_load(node)
            return self.operation(node)
        raise self.fail(node, "not an expression")

    def load(self, node: ast.Subscript, dtype: str | None = None) -> Expr:
        if not isinstance(node.value, ast.Name):
            raise self.fail(node, "not a tensor")
        name = node.value.id
        if dtype is None:
            if name not in self.layouts:
                raise self.fail(node, f"no tensor {name!r}")
            dtype = self.layouts[name].dtype
        return Expr(
            "load", dtype, (), (name, tuple(self.index(i) for i in self.places(node)), None)
        )

    def marked_load(self, node: ast.Call) -> Expr:
        """``x[i].read(dtype).where(mask, fill)``, either part optional."""
        assert isinstance(node.func, ast.Attribute)
        inner = node.func.value
        if node.func.attr == "read" and isinstance(inner, ast.Subscript):
            return self.load(inner, ast.literal_eval(node.args[0]))
        if node.func.attr != "where":
            raise self.fail(node, f"no mark {node.func.attr!r}")
        x = self.expr(inner)
        fill = literal(number(node.args[1]), x.dtype).attr
        return Expr("load", x.dtype, (self.expr(node.args[0]),), (*x.attr[:2], fill))

    def operation(self, node: ast.Call) -> Expr:
        marks: list[ast.expr] = []
        func = node.func
        if isinstance(func, ast.Subscript):
            marks, func = self.places(func), func.value
        if not isinstance(func, ast.Name):
            raise self.fail(node, "not an operation")
        name = func.id
        if name == "at":
            return Expr("index", "i64", (), self.index(node.args[0]))
        if name in DTYPES:
            return self.cast_or_literal(name, node.args[0])
        dtype = ast.literal_eval(marks[0]) if marks and isinstance(marks[0], ast.Constant) else None
        if name in _DISTRIBUTIONS:
            stream, element = ast.literal_eval(node.args[1]), self.index(node.args[2])
            seed = self.expr(node.args[0])
            return Expr("random", dtype or "f32", (seed,), (name, stream, element))
        if name == "check":
            args = tuple(self.expr(a) for a in (node.args[0], *node.args[2:]))
            return Expr("check", "i64", args, self.index(node.args[1]))
        args = tuple(self.expr(a) for a in node.args)
        if name == "cast" and dtype is not None:
            return Expr("cast", dtype, args)
        if name in (UNROUNDED, FACTOR):
            return Expr("cast", "f32", args, name)
        kind = name.partition("_")
        if kind[0] in ("reduce", "scan") and marks:
            axes = tuple(self.axis(m) for m in marks)
            attr = (kind[2], axes if kind[0] == "reduce" else axes[0])
            out = "i64" if kind[2].startswith("arg") else args[0].dtype
            return Expr(kind[0], out, args, attr)
        return Expr(name, dtype or ("bool" if name in COMPARISONS else args[-1].dtype), args)

    def axis(self, node: ast.expr) -> Axis:
        if isinstance(node, ast.Name) and node.id in self.axes:
            return self.axes[node.id]
        raise self.fail(node, "not an axis")

    def cast_or_literal(self, dtype: str, node: ast.expr) -> Expr:
        """A number in a dtype is a literal of it (casts of literals are printed in another way)."""
        if not is_number(node):
            return Expr("cast", dtype, (self.expr(node),))
        return literal(number(node), dtype)


def is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    if isinstance(node, ast.Name):
        return node.id in ("inf", "nan")
    return isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float))


def number(node: ast.expr) -> Any:
    """A Python value: numbers with ``inf`` and ``nan``, strings, None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -number(node.operand)
    if isinstance(node, ast.Name):
        return {"inf": math.inf, "nan": math.nan}[node.id]
    return ast.literal_eval(node)


__all__ = ["parse_program"]
