"""What is known of numbers only when the program runs, and what must hold of them.

In: calls whose results data decides (`nonzero`, `item`), and the program's assertions
(``torch._check``, ``aten._assert_scalar``). Out: where the emitted module reads each such number,
and `Check`s, which it evaluates as soon as the numbers are known, before any kernel that uses them.

Torch believes the program: where that asserts that a size that data decides is 4, or that of
another tensor, every later shape says so. So each number has a name of its own here (that of the
binding), and what torch has put in its place becomes a check, as do its range and what else torch
has deferred to the run.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_unflatten

from deuteron.base.text import one_line
from deuteron.ir.index import Sym, atom
from deuteron.ir.program import Check, names_in
from deuteron.lower import numbers
from deuteron.lower.core import LowerContext, source_line

# Beyond this no size of a tensor is; torch's ranges end there by themselves.
MAX_TENSOR_SIZE = 2**62
# How Dynamo describes an assertion without a message of the user's.
DEFAULT_MESSAGE = "Runtime assertion failed for expression"


def bind(
    ctx: LowerContext, node: fx.Node, leaves: list[Any], spec: Any, names: list[str | None]
) -> list[Sym | None]:
    """For each result of a call the number that it tells, if it is one; dimensions that results
    tell go to `LowerContext.sized`, what must hold of both to `LowerContext.checks`."""
    sizes: list[Sym | None] = [None] * len(leaves)
    places = tree_unflatten(list(range(len(leaves))), spec)
    for raw, path in (node.meta.get("unbacked_bindings") or {}).items():
        where, rest = places, list(path)
        while rest and not isinstance(where, int):
            key = rest.pop(0)
            where = where[getattr(key, "idx", getattr(key, "key", None))]
        k = where
        method, dim, divisor = _steps(rest)
        if method not in ("", "size"):
            continue
        env = _environment(ctx, leaves[k])
        name = _named(ctx, raw, env)
        sym = _symbol(ctx, env, name, raw)
        if method == "":
            sizes[k] = sym
            ctx.number_text[node] = name
        else:
            tensor = names[k]
            assert tensor is not None
            if divisor is None:
                ctx.sized[sym] = (tensor, dim)
                ctx.dims[tensor, dim] = name
            else:
                whole = Sym(f"{name}_whole", 0)
                ctx.sized[whole] = (tensor, dim)
                ctx.dims[tensor, dim] = whole.name
                ctx.symbols.computed[name] = (sym, f"{whole.name} // {divisor}")
        ctx.sourced.add(name)
        believed(ctx, node, raw, name, env)
    for k, fake in enumerate(leaves):  # what torch names no binding for
        if isinstance(fake, torch.SymInt) and sizes[k] is None and node.target is not None:
            e = fake.node.expr
            if e.is_Symbol and is_unbacked(e.name) and e.name not in ctx.sourced:
                sizes[k] = ctx.symbols.symbol(e)
                ctx.sourced.add(e.name)
        name_of = names[k]
        if name_of is not None:
            _declare(ctx, fake, name_of)
    return sizes


def given(
    ctx: LowerContext, node: fx.Node, x: Any, own: bool, dim: int | None = None
) -> str | None:
    """The name of the input number that `x` is, where torch has put another expression in its
    place: a size that Dynamo does not guard on (``mark_unbacked``). `own`: whether torch's
    expression is made of that same number. None where there is nothing to name."""
    raw = getattr(x.node, "_expr", None) if isinstance(x, torch.SymInt) else None
    if raw is None or not getattr(raw, "is_Symbol", False) or not is_unbacked(raw.name):
        return None
    env = x.node.shape_env
    if own or raw.name in ctx.sourced or env.replacements.get(raw) is None:
        return None
    name = _named(ctx, raw, env)
    ctx.sourced.add(name)
    if dim is not None:
        ctx.dims[node.name, dim] = name
    believed(ctx, node, raw, name, env)
    return name


def sourced(ctx: LowerContext, name: str) -> None:
    """Inputs tell the size."""
    ctx.sourced.add(name)
    if not is_unbacked(name):
        ctx.guarded.add(name)


def solved(ctx: LowerContext, node: fx.Node, dims: list[Any]) -> list[tuple[Sym, int]]:
    """Sizes that no input tells by itself: where torch has put ``2 * s`` in the place of a
    dimension (which is asserted to be twice a number that data decides), the dimension tells s.
    `dims`: the shape of an input. Out: for each size found the symbol of the whole dimension, and
    which one that is."""
    out: list[tuple[Sym, int]] = []
    for d, n in enumerate(dims):
        e = n.node.expr if isinstance(n, torch.SymInt) else None
        free = [s for s in e.free_symbols if s.name not in ctx.sourced] if e is not None else []
        if e is None or len(free) != 1 or e == free[0]:
            continue
        factor, rest = e.coeff(free[0]), e - e.coeff(free[0]) * free[0]
        if not factor.is_Integer or factor <= 0 or free[0] in rest.free_symbols:
            continue
        name = free[0].name
        whole = Sym(f"{name}_whole", 0)
        text = f"(({whole.name} - ({numbers.of_sympy(rest)})) // {int(factor)})"
        ctx.symbols.computed[name] = (ctx.symbols.symbol(free[0]), text)
        ctx.sourced.add(name)
        add(ctx, f"({whole.name} == {numbers.of_sympy(e)})", "", source_line(node), node)
        out.append((whole, d))
    return out


def believed(ctx: LowerContext, node: fx.Node, raw: Any, name: str, env: Any) -> None:
    """Checks of what torch takes for granted of a number: what it has put in its place, its range,
    and what it has deferred."""
    where = source_line(node)
    if env is None:
        return
    e = env.replace(raw)
    symbol = sympy.Symbol(name, integer=True)
    if not (e.is_Symbol and e.name == name):
        add(ctx, f"({name} == {numbers.of_sympy(e)})", "", where, node)
    ranges = [env.var_to_range.get(s) for s in dict.fromkeys((raw, e)) if s.is_Symbol]
    for r in (r for r in ranges if r is not None):
        sized = name in {s.name for s in ctx.sized}
        if r.lower.is_Integer and r.lower > (0 if sized else -MAX_TENSOR_SIZE):
            add(ctx, f"({name} >= {int(r.lower)})", "", where, node)
        if r.upper.is_Integer and r.upper < MAX_TENSOR_SIZE:
            add(ctx, f"({name} <= {int(r.upper)})", "", where, node)
    for s in dict.fromkeys((raw, e, symbol)):
        for deferred in getattr(env, "deferred_runtime_asserts", {}).get(s, ()):
            held = env.replace(deferred.expr) if hasattr(env, "replace") else deferred.expr
            if held != sympy.true and held != sympy.false:
                add(ctx, numbers.of_sympy(held), "", where, node)


def add(ctx: LowerContext, condition: str, message: str, where: str, node: fx.Node) -> None:
    """The first with a condition has the program's words, if it has any."""
    order = (0 if message and not message.startswith(DEFAULT_MESSAGE) else 1, len(ctx.checks))
    ctx.checks.append((order, node, Check(condition, message, where)))


def asserted(ctx: LowerContext, node: fx.Node) -> None:
    """An assertion of the program's, in its words."""
    name, where = str(node.target), source_line(node)
    if name.startswith("aten._assert_scalar"):
        condition, message = (*node.args, *node.kwargs.values())[:2]
        if not isinstance(condition, fx.Node):
            if condition:
                ctx.settled.append((node, str(message)))
                return
        try:
            source = numbers.text(ctx, condition)
        except numbers.NoText:
            return
        if _guarded(ctx, source):
            return
        add(ctx, source, str(message), where, node)
    elif name.startswith("aten.sym_constrain_range"):
        size, *ends = node.args
        low, high = (node.kwargs.get(k) for k in ("min", "max"))
        low, high = (ends[0] if ends else low), (ends[1] if ends[1:] else high)
        if name.startswith("aten.sym_constrain_range_for_size") and low is None:
            low = 0
        source = numbers.text(ctx, size)
        if _guarded(ctx, source):
            return
        said = f"Invalid value range for the size: it is not between [{low}, {high}]"
        if low is not None:
            add(ctx, f"({source} >= {low})", said, where, node)
        if high is not None:
            add(ctx, f"({source} <= {high})", said, where, node)


def _guarded(ctx: LowerContext, source: str) -> bool:
    """Whether Dynamo guards on all that an assertion is about."""
    return names_in(source) <= ctx.guarded


def checks(ctx: LowerContext, defined: set[str]) -> tuple[Check, ...]:
    """All checks, each condition once: first those with words of the program's."""
    order = {n: k for k, n in enumerate(ctx.node.graph.nodes)} if ctx.node is not None else {}
    out: dict[str, Check] = {}
    for _, node, c in sorted(ctx.checks, key=lambda x: x[0]):
        if c.condition in out or c.condition in ("True", "(True)"):
            continue
        missing = names_in(c.condition) - defined
        if missing:
            ctx.record.add(
                "unchecked", condition=c.condition, reason=f"nothing tells {sorted(missing)}"
            )
            continue
        message = c.message
        if not message or message.startswith(DEFAULT_MESSAGE):
            message = _words(ctx, node, order) or _plain(c.condition)
        out[c.condition] = Check(c.condition, message, c.where)
    return tuple(out.values())


def _words(ctx: LowerContext, node: fx.Node, order: dict[fx.Node, int]) -> str:
    """What the program says in assertions that torch takes for granted by now, of the number that
    `node` tells: those up to the next that tells one."""
    start = order.get(node, -1)
    if node.op == "call_function" and not node.meta.get("unbacked_bindings"):
        return ""
    ends = [k for n, k in order.items() if k > start and n.meta.get("unbacked_bindings")]
    end = min(ends, default=len(order))
    said = [m for n, m in ctx.settled if start < order.get(n, -1) < end]
    own = [m for m in said if not m.startswith(DEFAULT_MESSAGE)]
    return own[0] if own else ""


def _plain(condition: str) -> str:
    shown = condition[1:-1] if condition.startswith("(") and condition.endswith(")") else condition
    return f"{DEFAULT_MESSAGE} {one_line(shown)}"


def _steps(rest: list[Any]) -> tuple[str, int, Any]:
    """(method, dimension, divisor) of the path from a result to a number."""
    method, dim, divisor = "", 0, None
    for key in rest:
        if hasattr(key, "name"):
            method = key.name
        elif hasattr(key, "idx"):
            dim = key.idx
        elif hasattr(key, "divisor"):
            divisor = key.divisor
    return method, dim, divisor


def _environment(ctx: LowerContext, x: Any) -> Any:
    """Torch's table of symbols, from a result that holds some."""
    shape_env = ctx.symbols.shape_env
    for n in (*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,):
        node = getattr(n, "node", None)
        shape_env = shape_env or getattr(node, "shape_env", None)
    ctx.symbols.shape_env = shape_env
    return shape_env


def _named(ctx: LowerContext, raw: Any, env: Any) -> str:
    """The number's name: that by which torch knows it, or, where it has put something else in its
    place that is known already or is no single number, the binding's own."""
    e = env.replace(raw) if env is not None else raw
    if e.is_Symbol and e.name not in ctx.sourced:
        return str(e.name)
    return str(raw.name)


def _symbol(ctx: LowerContext, env: Any, name: str, raw: Any) -> Sym:
    e = env.replace(raw) if env is not None else raw
    return ctx.symbols.symbol(e if e.is_Symbol and e.name == name else raw)


def _declare(ctx: LowerContext, fake: torch.Tensor, name: str) -> None:
    """Dimensions that only the result itself tells."""
    for d, n in enumerate(ctx.shape_of(fake)):
        for s in n.syms():
            if n is atom(s) and is_unbacked(s.name) and s.name not in ctx.sourced:
                ctx.sized[s] = (name, d)
                ctx.sourced.add(s.name)


def is_unbacked(name: str) -> bool:
    """Whether a size is known only at run time, from results."""
    return name.startswith("u")


__all__ = ["asserted", "bind", "checks", "given", "solved", "sourced"]
