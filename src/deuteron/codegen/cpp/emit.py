"""Writes values of an expression DAG as C++ constants, each at the outermost loop level where it
can be computed.

In: expressions with linear addresses (`loops.Loops`). Out: lines of C++ in a chain of `Scope`s,
one per loop level (`codegen.placing`). Addresses are hoisted in the same way, by terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import frexp, prod

from deuteron.base.text import plain_name
from deuteron.codegen import placing
from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.axes import flops_of
from deuteron.codegen.cpp.reductions import Accumulator
from deuteron.codegen.placing import Placing
from deuteron.codegen.precision import log1p_of_unit, not_negative
from deuteron.ir.divisors import is_divisor
from deuteron.ir.expr import Expr, children
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, Value, fits_int, hint, is_nonneg
from deuteron.ir.operations import COMPARISONS, FLOATS, INTS

ROUNDING_OPS = ("round", "floor", "ceil", "trunc")
BELOW_I64 = ("i32", "i16", "i8", "u8")
# Operations that gain nothing by `D_DENSE`: choices (max-pooling takes 1.12 of the time with it),
# and erf, a chain with no division (GELU 1.00; behind a layer norm, whose reductions are light,
# 1.05).
NOT_DENSE = COMPARISONS | {"where", "maximum", "minimum", "fmax", "fmin", "erf"}
MIN_DIVISIONS = 256  # divisions by the same number, for which it pays to compute its reciprocal


class Scope(placing.Scope[Axis]):
    """One loop level, which gives the axes that are loop variables in it."""

    __slots__ = ("checked", "divisors", "flops", "sums")

    def __init__(self, given: frozenset[Axis]) -> None:
        super().__init__(given)
        self.checked = False  # whether its lines report indices that are out of range
        self.sums: dict[Index, str] = {}
        self.divisors: dict[Expr, str] = {}  # what `d_div_by` needs of them
        self.flops = 0.0  # of one iteration, without those of the scopes inside

    def loop(self, head: str, body: Iterable[str]) -> None:
        """Appends ``head { body }``."""
        self.lines.append(f"{head} {{")
        self.lines.extend("  " + line for line in body)
        self.lines.append("}")


class Emitter(Placing[Axis, Scope]):
    """The state of writing one nest: the chain of scopes, C names, and the prelude functions used
    so far.
    """

    kind = Scope

    def __init__(self, tensors: Mapping[str, str], used: set[str], numbers: Iterator[int]) -> None:
        super().__init__(numbers)
        self.tensors = tensors  # tensor -> C pointer name
        self.used = used
        self.axis_text: dict[Axis, str] = {}
        self.checked = False  # whether anything reports to `bad`
        self.dearest = 0.0  # most FLOPs of a scope, as far as order matters for them
        self.wide = False  # whether positions along the loops may need 64 bits
        self.fast_calls: frozenset[Expr] = frozenset()  # those with small arguments
        self.approximate: frozenset[Expr] = frozenset()  # see `precision`
        self.maxima: dict[str, set[Expr]] = {}  # the nest's maxima, and of what they are
        self.reused_curves: frozenset[Expr] = frozenset()  # exponentials, tangents of several uses
        self.erf_plus_one: frozenset[Expr] = frozenset()  # erf of which only 1 + erf is used
        # In scopes from `guard_level` on, lanes where `guard` is false are off.
        self.guard: str | None = None
        self.guard_level = 0
        self.masked: dict[str, list[Index]] = {}  # tensor -> what is loaded of it under masks
        self.buffered: dict[
            Expr, str
        ] = {}  # values of an earlier pass -> their row buffers' elements

    def carry_over(self, moved: Mapping[Expr, Expr]) -> None:
        """What is known of nodes is known of those that stand for them where a loop is cut, unless
        these stand for others too."""

        def images(known: Collection[Expr]) -> set[Expr]:
            return {moved[n] for n in known if n in moved}

        self.reused_curves |= images(self.reused_curves)
        others = [images(moved.keys() - known) for known in (self.approximate, self.erf_plus_one)]
        self.approximate = (self.approximate | images(self.approximate)) - others[0]
        self.erf_plus_one = (self.erf_plus_one | images(self.erf_plus_one)) - others[1]
        for bodies in self.maxima.values():
            bodies |= images(bodies)

    def name_axis(self, axis: Axis, text: str | None = None) -> str:
        """Gives an axis its C text; a new variable name unless `text` is given."""
        if text is None:
            clean = plain_name(axis.name).replace("_", "")[:12]
            text = self.fresh(f"i_{clean}_" if clean else "i_")
        self.axis_text[axis] = text
        return text

    # -- values ------------------------------------------------------------------------------------

    def bound_dep(self, axis: Axis) -> Axis:
        return axis

    def add_deps_of_axis(self, axis: Axis, out: set[Axis]) -> None:
        out.add(axis)

    def literal(self, node: Expr) -> str:
        return scalars.literal(node.attr, node.dtype)

    def needed(self, node: Expr) -> Sequence[Expr]:
        return () if node in self.buffered or node.op == "reduce" else children(node)

    def define(self, node: Expr) -> None:
        at = self.level(self.deps(node))
        scope = self.chain[at]
        if node.op == "check":
            self._check(node, scope)
            return
        if node.op == "reduce" and node not in self.buffered:
            self._reduce(node, at)
            return
        if node in self.buffered:
            kind = scalars.REGISTER_TYPES[node.dtype]
            text = self.guarded(self.buffered[node], node.dtype, at)
        else:
            kind, text = self._text(node, at)
            if node.op not in NOT_DENSE:
                scope.flops += flops_of((node,))
                self.dearest = max(self.dearest, scope.flops)
        name = self.fresh("t")
        scope.add(f"const {kind} {name} = {text};")
        scope.texts[node] = name

    def _reduce(self, node: Expr, at: int) -> None:
        """A reduction inside an expression: a serial loop at its level (sums of floats in
        double)."""
        kind, axes = node.attr
        wide = not all(fits_int(x.extent) for x in axes)
        acc = Accumulator(self.fresh("f"), kind, node.args[0].dtype, self.used, wide)
        outer, self.chain = self.chain, self.chain[: at + 1]
        self.scope.add(*acc.declare("1"))
        heads = []
        for a in axes:
            name, n = self.name_axis(a), self.index(a.extent, 0)
            heads.append(f"for (long long {name} = 0; {name} < {n}; ++{name})")
        with self.inside(*axes) as scope:
            scope.add(*acc.update("0", self.value(node.args[0]), self.axis_text[axes[0]]))
            scope.add(*acc.flush(1))
        self.scope.add(*heads[:-1])
        self.scope.loop(heads[-1], scope.lines)
        self.scope.add(*acc.finish(1))
        self.scope.texts[node] = f"{acc.name}_r"
        self.scope.checked |= scope.checked
        self.chain = outer

    def _check(self, node: Expr, scope: Scope) -> None:
        """Reports an index that is out of range, or a divisor that is 0, in `bad`, and goes on with
        0."""
        value, extent = self.value(node.args[0]), self.index(node.attr, 0)
        outside = f"((unsigned long long){value} >= (unsigned long long)({extent}))"
        mask = f" & {self.value(node.args[1])}" if len(node.args) > 1 else ""
        if self.is_guarded(next(k for k, x in enumerate(self.chain) if x is scope)):
            mask += f" & {self.guard}"
        name = self.fresh("t")
        which = 2 if is_divisor(node) else 1  # bits that `runtime.launch` reads
        seen = f"{outside}{mask}" if which == 1 else f"({outside}{mask}) << 1"
        scope.add(f"bad |= {seen};", f"const long long {name} = {outside} ? 0 : {value};")
        scope.texts[node] = name
        scope.checked = self.checked = True

    def simd(self, scope: Scope) -> str:
        """The pragma of a vector loop with the scope's lines."""
        return "#pragma omp simd" + (" reduction(|:bad)" if scope.checked else "")

    def _text(self, node: Expr, at: int) -> tuple[str, str]:
        kind = scalars.REGISTER_TYPES[node.dtype]
        args = [self.value(a) for a in node.args]
        if node.op == "load":
            name, idx, fill = node.attr
            assert name in self.tensors, f"result {name!r} is used before it is computed"
            masked = bool(args) or self.is_guarded(at)
            pointer = self.masked_pointer(name, idx[0]) if masked else self.tensors[name]
            text = scalars.from_memory(
                f"{pointer}[{self.index(idx[0], at)}]", node.dtype, self.used
            )
            if args:
                mask = f"({self.guard} & {args[0]})" if self.is_guarded(at) else args[0]
                return kind, f"{mask} ? {text} : {scalars.literal(fill, node.dtype)}"
            return kind, self.guarded(text, node.dtype, at)
        if node.op == "index":
            return ("int" if fits_int(node.attr) else kind), self.index(node.attr, at)
        if node.op == "cast":
            source = node.args[0].dtype
            whole = node.args[0].args[0] if is_integer_round_trip(node) else None
            if whole is not None and (whole.dtype, source, node.dtype) == ("f32", "i64", "f32"):
                self.used.add("d_truncated")
                return kind, f"d_truncated({self.value(whole)})"
            if whole is not None:
                # GCC takes a float made whole and floating again for trunc(x), which is -0.0 where
                # the integer is 0.
                self.used.add("d_opaque")
                args = [f"d_opaque({args[0]})"]
            if source == "f32" and node.dtype in BELOW_I64 and is_clamped(node.args[0]):
                return kind, f"({kind})(int){args[0]}"  # one instruction, which fits
            return kind, scalars.convert(args[0], source, node.dtype, self.used)
        if node.op in COMPARISONS and all(map(is_small, node.args)):  # as many lanes as of floats
            args = [f"(int){a}" for a in args]
        if node.op == "truncdiv" and node.dtype in INTS and node.args[1].op == "literal":
            if node.args[1].attr > 0:  # nothing to trap: vectors divide by multiplying
                return kind, f"({kind})({args[0]} / {args[1]})"
        if node in self.fast_calls:
            self.used |= scalars.FAST_HELPERS
            return kind, f"d_{node.op}_small({args[0]})"
        if node.op == "exp" and node.dtype == "f32" and self.is_not_positive(node.args[0]):
            self.used.add("d_exp_nonpositive")
            return kind, f"d_exp_nonpositive({args[0]})"
        if node in self.erf_plus_one:
            self.used.add("d_erf_for_one_plus")
            return kind, f"d_erf_for_one_plus({args[0]})"
        if log1p_of_unit(node):
            self.used.add("d_log1p_unit")
            return kind, f"d_log1p_unit({args[0]})"
        if node.op == "add" and node.dtype == "f32":
            curve = curve_plus_one(node)
            if curve is not None and curve not in self.reused_curves:  # the compiler shares those
                name = f"d_one_plus_{curve.op}"
                self.used.add(name)
                return kind, f"{name}({self.value(curve.args[0])})"
        if node.op in ("maximum", "minimum") and node.dtype in FLOATS:
            # One instruction: what the comparison with NaN leaves is the other argument.
            for limit, x, text in zip(node.args, reversed(node.args), reversed(args), strict=True):
                if limit.op == "literal" and limit.attr == limit.attr and x.op != "literal":
                    c, sign = scalars.literal(limit.attr, node.dtype), "<>"[node.op == "maximum"]
                    return kind, f"({c} {sign} {text} ? {c} : {text})"
        if node.op == "div" and node.dtype == "f32":
            divisor = self._divisor(node, at)
            if divisor is not None:
                name = "d_div_by_fast" if node in self.approximate else "d_div_by"
                self.used.add(name)
                return kind, f"{name}({args[0]}, {divisor})"
        if node.op == "random":
            dist, stream, element = node.attr
            name = f"d_{dist}64" if node.dtype == "f64" else f"d_{dist}"
            self.used.add(name)
            return kind, f"{name}({args[0]}, {stream}, {self.index(element, at)})"
        return kind, scalars.operation(node.op, node.dtype, args, node.args[-1].dtype, self.used)

    def masked_pointer(self, name: str, index: Index) -> str:
        """The pointer for a load under a mask; each place has its own, see `alias_name`."""
        places = self.masked.setdefault(name, [])
        if index not in places:
            places.append(index)
        return alias_name(self.tensors[name], places.index(index))

    def _divisor(self, node: Expr, at: int) -> str | None:
        """What `d_div_by` needs of a divisor that serves many elements."""
        a, b = node.args
        if a.op == "literal" or b.op == "literal" and abs(frexp(b.attr)[0]) == 0.5:
            return None  # a multiplication
        home = next((k for k, scope in enumerate(self.chain) if b in scope.texts), 0)
        home = max(home, self.level(self.deps(b)))  # a text may hold a lane of a loop inside
        inner = self.deps(node) - self.chain[home].given
        if home >= at or prod(hint(x.extent) for x in inner) < MIN_DIVISIONS:
            return None
        scope, text = self.chain[home], self.value(b)
        if b not in scope.divisors:
            names = [self.fresh(stem) for stem in ("by", "inverse", "scale")]
            by, inverse, scale = names
            scope.add(
                f"const float {scale} = d_divisor_scale({text}), {by} = {text} * {scale}, "
                f"{inverse} = 1.0f / {by};"
            )
            scope.divisors[b] = ", ".join(names)
            self.used.add("d_divisor_scale")
        return scope.divisors[b]

    def is_not_positive(self, e: Expr) -> bool:
        """Whether it is the difference of a row's element from the row's maximum, or the negative
        of what is no negative number."""
        if e.op == "neg":
            return not_negative(e.args[0])
        if e.op != "sub" or e.args[1].op != "load":
            return False
        return e.args[0] in self.maxima.get(e.args[1].attr[0], ())

    def is_guarded(self, at: int) -> bool:
        return self.guard is not None and at >= self.guard_level

    def guarded(self, text: str, dtype: str, at: int) -> str:
        """A read from memory, not done on lanes that are off."""
        if not self.is_guarded(at):
            return text
        return f"{self.guard} ? {text} : {scalars.zero(dtype)}"

    # -- indices ---------------------------------------------------------------------------------
    # ------------------

    def index(self, index: Index, at: int | None = None) -> str:
        """The text of an index; the parts that outer scopes know become their variables."""
        at = len(self.chain) - 1 if at is None else at
        levels: dict[int, dict[tuple, int]] = {}
        for m, c in index.terms:
            deps = frozenset(x for a in m for x in self.index_deps(Index({(a,): 1})))
            levels.setdefault(min(at, self.level(deps)), {})[m] = c
        carried: str | None = None
        total: dict[tuple, int] = {}
        for k in sorted(levels):
            terms = levels[k]
            total.update(terms)
            scope = self.chain[k]
            own = Index(terms)
            if k == at:
                rest = self._sum(own)
                return rest if carried is None else f"{carried} + {rest}"
            key = Index(total)
            name = scope.sums.get(key)
            if name is None:
                text = self._sum(own) if carried is None else f"{carried} + {self._sum(own)}"
                if own.value is not None or (
                    len(own.terms) == 1 and carried is None and text.isidentifier()
                ):
                    name = text  # a constant or a plain variable needs no name
                else:
                    name = self.fresh("a")
                    scope.add(f"const long long {name} = {text};")
                scope.sums[key] = name
            carried = name
        return carried if carried is not None else "0"

    def _sum(self, index: Index) -> str:
        parts: list[str] = []
        for m, c in reversed(index.terms):
            factors = [self.atom(a) for a in m]
            if not factors:
                text = str(abs(c)) if abs(c) < 2**31 else f"{abs(c)}LL"
            else:
                if abs(c) != 1:
                    factors.append(f"{abs(c)}LL")
                text = "*".join(factors)
            sign = "-" if c < 0 else "+"
            parts.append(f" {sign} {text}" if parts else ("-" + text if c < 0 else text))
        return "".join(parts) or "0"

    def atom(self, a: object) -> str:
        if isinstance(a, Axis):
            return self.axis_text[a]
        if isinstance(a, Sym):
            return size_name(a)
        if isinstance(a, Value):
            if is_made_of_bools(a.expr):
                # As the offset of a vector gather, GCC 12 takes a bool that was widened for its
                # mask of bits, and reads elsewhere.
                self.used.add("d_opaque")
                return f"d_opaque((long long){self.value(a.expr)})"
            return f"(long long){self.value(a.expr)}"
        if isinstance(a, MinMax):
            x, y = f"({self._sum(a.a)})", f"({self._sum(a.b)})"
            return f"({x} {'<' if a.kind == 'min' else '>'} {y} ? {x} : {y})"
        assert isinstance(a, (Div, Mod))
        sign = "/" if isinstance(a, Div) else "%"
        num, den = f"({self._sum(a.num)})", f"({self._sum(a.den)})"
        if is_nonneg(a.num):
            if fits_int(a.num) and fits_int(a.den):
                return f"(long long)((unsigned){num} {sign} (unsigned){den})"
            return f"(long long)((unsigned long long){num} {sign} (unsigned long long){den})"
        name = "d_index_div" if isinstance(a, Div) else "d_index_mod"
        self.used.add(name)
        return f"{name}({num}, {den})"


def curve_plus_one(node: Expr) -> Expr | None:
    """The exponential in ``1 + exp(x)``, the tangent in ``1 + tanh(x)``."""
    for one, curve in (node.args, node.args[::-1]):
        if one.op == "literal" and one.attr == 1.0 and curve.op in ("exp", "tanh"):
            return curve
    return None


def is_small(node: Expr) -> bool:
    """Whether a position is proven to fit a 32-bit int: one that is computed, a constant, or one
    that was loaded and is checked against an extent that fits."""
    if node.op == "literal":
        return node.dtype == "i64" and abs(node.attr) < 2**31
    return node.op in ("index", "check") and fits_int(node.attr)


def is_clamped(node: Expr) -> bool:
    """Whether a float is between two constants that a 32-bit int holds, or NaN."""
    bounded = set()
    while node.op in ("minimum", "maximum", *ROUNDING_OPS):
        if node.op not in ROUNDING_OPS:
            limits = [a for a in node.args if a.op == "literal" and abs(a.attr) <= 2.0**30]
            if not limits:
                return False
            bounded.add(node.op)
        if len(bounded) == 2:
            return True
        node = next((a for a in node.args if a.op != "literal"), node.args[0])
    return False


def is_integer_round_trip(node: Expr) -> bool:
    """Whether a cast gives a floating number of an integer that was one."""
    source = node.args[0]
    while source.op == "cast" and source.dtype in INTS:
        source = source.args[0]
    return node.dtype in FLOATS and node.args[0].dtype in INTS and source.dtype in FLOATS


@lru_cache(maxsize=1 << 14)
def is_made_of_bools(expr: Expr) -> bool:
    """Whether an integer is made of truth values: one widened, or a choice of two constants."""
    return any(
        (n.op == "cast" and n.args[0].dtype == "bool")
        or (n.op == "where" and all(a.op == "literal" for a in n.args[1:]))
        for n in expr.walk()
        if n.dtype != "bool"
    )


def smaller(a: str, b: str) -> str:
    """C text of the smaller of two integers."""
    return str(min(int(a), int(b))) if a.isdigit() and b.isdigit() else f"({a} < {b} ? {a} : {b})"


def difference(a: str, b: str) -> str:
    """C text of ``max(a - b, 0)``."""
    if a.isdigit() and b.isdigit():
        return str(max(int(a) - int(b), 0))
    return a if b == "0" else "0" if a == "0" else f"({a} > {b} ? {a} - {b} : 0)"


def alias_name(pointer: str, number: int) -> str:
    """A name of the same address. By several g++ does not see that loads lie side by side: up to
    13.2 (12.3) it makes vectors of such loads, if they have one mask, and forgets which element
    goes where (its bug 114375)."""
    return f"{pointer}_{number}" if number else pointer


def size_name(symbol: Sym) -> str:
    return f"s_{plain_name(symbol.name)}"
