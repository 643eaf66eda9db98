"""Tile code as Triton text.

In: what `codegen.lowering` made, the tiling, names of pointers. Out: lines of a function's body. It
chooses nothing: blocks, warps and stages are the tiling's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deuteron.base.text import plain_name
from deuteron.codegen.tile_code import Code, Let, Loop, Value, Write
from deuteron.codegen.triton import scalars
from deuteron.codegen.triton.emit import size_name
from deuteron.codegen.triton.source import size_text
from deuteron.ir.index import Axis, Div, Index, MinMax, Mod, Sym, fits_int, is_nonneg
from deuteron.ir.operations import FLOATS, REDUCTIONS
from deuteron.schedule.boxes import Box
from deuteron.schedule.tiling import Dim, Tiling

# In few instructions, where a contraction's rounded factors decide the error.
FAST = {f: f"{f}_fast" for f in ("exp", "exp2", "sigmoid", "tanh", "erfc")}
PRECISIONS = {"f32": ', input_precision="ieee"', "tf32": ', input_precision="tf32"'}
# Neighbouring blocks of the last dimension but one, that programs take one after the other, so
# that they share what they read by the L2.
RASTER = 8


class Printer:
    def __init__(
        self, tiling: Tiling, pointers: Mapping[str, str], index_type: str, fast: bool
    ) -> None:
        self.fast, self.wide = fast, index_type != "tl.int32"
        self.boxes: dict[tuple[str, Box], str] = {}  # tensors that the copy engine moves
        self.tiling, self.pointers, self.index_type = tiling, pointers, index_type
        self.dims = {d.name: d for d in tiling.dims}
        self.lines: list[str] = []
        self.indent = ""

    def print(self, code: Sequence[Code]) -> list[str]:
        self.programs()
        self.block(code)
        return self.lines

    def add(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def programs(self) -> None:
        """Which blocks a program has: of the two inner dimensions in narrow columns."""
        grid = [d for d in self.tiling.dims if d.mode == "grid"]
        tiled = [d for d in grid if d.block > 1]
        if self.tiling.persistent:
            total = " * ".join(self.count(d) for d in grid)
            fixed = all(d.size.value is not None for d in grid)
            step = self.tiling.grid() if fixed else "tl.num_programs(0)"
            self.add(f"for tile in tl.range(pid, {total}, {step}, flatten=True):")
            self.indent += "    "
        self.add(f"rest = {'tile' if self.tiling.persistent else 'pid'}")
        if len(tiled) == 2:
            rows, columns = tiled
            each, both = (f"{n} * {self.count(columns)}" for n in (RASTER, self.count(rows)))
            self.add(f"inside = rest % ({both})")
            self.add(f"rest = rest // ({both})")
            self.add(f"first = inside // ({each}) * {RASTER}")
            self.add(f"high = tl.minimum({self.count(rows)} - first, {RASTER})")
            self.add(f"{rows.name}_at = (first + inside % ({each}) % high) * {rows.block}")
            self.add(f"{columns.name}_at = inside % ({each}) // high * {columns.block}")
        else:
            for d in tiled:
                self.add(f"{d.name}_at = rest % {self.count(d)} * {d.block}")
                self.add(f"rest = rest // {self.count(d)}")
        for d in reversed([d for d in grid if d.block == 1]):
            self.add(f"{d.name}_at = rest % {self.count(d)}")
            self.add(f"rest = rest // {self.count(d)}")
        for d in self.tiling.dims:
            if d.mode == "whole":
                self.add(f"{d.name}_at = 0")
            if d.mode != "loop":
                self.places(d.name)

    def count(self, d: Dim) -> str:
        """The text of how many blocks a dimension has."""
        if d.size.value is not None:
            return str(d.count)
        text = size_text(d.size)
        return text if d.block == 1 else f"tl.cdiv({text}, {d.block})"

    def places(self, name: str) -> None:
        d = self.dims[name]
        if d.block == 1:
            self.add(f"{name} = tl.full([], {name}_at, {self.index_type})")
        else:
            self.add(f"{name} = ({name}_at + tl.arange(0, {d.block})).to({self.index_type})")

    def block(self, code: Sequence[Code]) -> None:
        for c in code:
            if isinstance(c, Let) and c.kind == "put":
                self.put(c)
            elif isinstance(c, Let):
                self.add(f"{c.value.name} = {self.let(c)}")
            elif isinstance(c, Write):
                dims = tuple(d for d in self.dims if d in {*c.address.dims, *c.value.dims})
                pointer = f"{self.pointers[c.tensor]} + {self.full(c.address, dims)}"
                mask = f", {self.spread(c.mask, dims)}" if c.mask is not None else ""
                self.add(f"tl.store({pointer}, {self.spread(c.value, dims)}{mask})")
            else:
                self.loop(c)

    def put(self, c: Let) -> None:
        (name, box), (given, *corner) = c.attr, c.args
        value = self.spread(given, dims := self.in_order(box.dims))
        if len(given.dims) < len(dims):
            value = f"tl.broadcast_to({value}, {self.shape(dims)})"
        text = self.turned(value, dims, box.dims)
        if len(box.dims) < len(box.block):
            text = f"tl.reshape({text}, {list(box.block)})"
        self.add(f"{self.boxed(name, box)}.store({self.corner(corner)}, {text})")

    def fetch(self, c: Let) -> str:
        name, box = c.attr
        text = f"{self.boxed(name, box)}.load({self.corner(c.args)})"
        if len(box.dims) < len(box.block):
            text += f".reshape({self.shape(box.dims)})"
        return self.turned(text, box.dims, c.value.dims)

    def boxed(self, tensor: str, box: Box) -> str:
        """The name of what describes a box."""
        return self.boxes.setdefault((tensor, box), f"b{len(self.boxes)}_{plain_name(tensor)}")

    def corner(self, at: Sequence[Value]) -> str:
        wide = ".to(tl.int32)" if self.wide else ""
        return f"[{', '.join(v.name + wide for v in at)}]"

    def in_order(self, dims: Sequence[str]) -> tuple[str, ...]:
        return tuple(d for d in self.dims if d in dims)

    def turned(self, text: str, dims: Sequence[str], wanted: Sequence[str]) -> str:
        """The text of a tile over `dims` as one over the same in another order."""
        order = [list(dims).index(d) for d in wanted]
        return text if order == sorted(order) else f"tl.permute({text}, {order})"

    def loop(self, loop: Loop) -> None:
        d = self.dims[loop.dim]
        start, stop = "0", size_text(d.size)
        if loop.start is not None:
            start = f"{self.place(loop.start, d)} // {d.block} * {d.block}"
        if loop.stop is not None:
            stop = self.place(loop.stop, d)
        span = f"{start}, {stop}, {d.block}"
        self.add(f"for {d.name}_at in tl.range({span}, num_stages=STAGES):")
        before, self.indent = self.indent, self.indent + "    "
        self.places(d.name)
        self.block(loop.body)
        for variable, following in loop.carried:
            self.add(f"{variable.name} = {following.name}")
        self.indent = before

    def place(self, v: Value, d: Dim) -> str:
        """A place of a dimension, or the one behind the last; also of numbers that are loaded."""
        text = f"tl.minimum(tl.maximum({v.name}, 0), {size_text(d.size)})"
        return f"{text}.to(tl.int32)" if v.dtype == "i64" else text

    # -- values ------------------------------------------------------------------------------------

    def spread(self, v: Value, dims: Sequence[str]) -> str:
        """The text of a value that broadcasts against one over `dims`."""
        if not v.dims or tuple(v.dims) == tuple(dims):
            return v.name
        return f"{v.name}[{', '.join(':' if d in v.dims else 'None' for d in dims)}]"

    def full(self, v: Value, dims: Sequence[str]) -> str:
        """The same with all elements, in parentheses."""
        if tuple(v.dims) == tuple(dims):
            return f"({v.name})"
        return f"({self.spread(v, dims)} + tl.zeros({self.shape(dims)}, {self.index_type}))"

    def shape(self, dims: Sequence[str]) -> str:
        return f"[{', '.join(str(self.dims[d].block) for d in dims)}]"

    def let(self, c: Let) -> str:
        dims = c.value.dims
        args = [self.spread(a, dims) for a in c.args]
        match c.kind:
            case "place":
                name, between, below, extent = c.attr
                text = self.base(self.dims[name], bool(dims), between)
                text = text if below.value == 1 else f"{text} // {size_text(below)}"
                return text if extent is None else f"({text}) % {size_text(extent)}"
            case "edge":
                name, last = c.attr
                d = self.dims[name]
                end = f"tl.minimum({name}_at + {d.block}, {size_text(d.size)}) - 1"
                return end if last else f"{name}_at"
            case "inside":
                return f"{c.attr} < {size_text(self.dims[c.attr].size)}"
            case "index":
                return self.index(c, args)
            case "load":
                return self.load(c)
            case "fetch":
                return self.fetch(c)
            case "literal":
                return scalars.literal(c.attr, c.value.dtype, typed=True)
            case "full":
                number = scalars.literal(c.attr, c.value.dtype)
                return (
                    f"tl.full({self.shape(dims)}, {number}, {scalars.TRITON_TYPES[c.value.dtype]})"
                )
            case "random":
                return self.random(c)
            case "cast":
                return scalars.convert(args[0], c.attr, c.value.dtype)
            case "spread":
                return f"tl.broadcast_to({args[0]}, {self.shape(dims)})"
            case "reduce":
                return self.reduce(c)
            case "dot":
                return self.dot(c)
        assert c.kind == "op", c.kind
        operand = c.args[-1].dtype
        if self.fast and operand == "f32" and c.attr == "div":
            return f"({args[0]} / {args[1]})"  # within 2 in the last place
        if self.fast and operand == "f32" and c.attr in FAST:
            return f"libm.{FAST[c.attr]}({', '.join(args)})"
        return scalars.operation(c.attr, c.value.dtype, args, operand)

    def base(self, d: Dim, inside: bool, between: bool) -> str:
        """The text of a dimension's places: of the first one of a block where they are alike within
        it; of those of the first block where all blocks are alike."""
        if d.block == 1 or (inside and between):
            return d.name
        if inside:
            return f"tl.arange(0, {d.block}).to({self.index_type})"
        return f"tl.full([], {d.name}_at, {self.index_type})"

    def index(self, c: Let, args: Sequence[str]) -> str:
        index, values = c.attr
        if c.value.dtype == "i64" and not fits_int(index):
            args = [f"{a}.to(tl.int64)" for a in args]
        names = dict(zip(values, args, strict=True))
        text = self.sum(index, names)
        if c.value.dtype == "i64":
            return f"({text}).to(tl.int64)" if args else f"tl.full([], {text}, tl.int64)"
        return text

    def sum(self, index: Index, names: Mapping[Axis, str]) -> str:
        return scalars.index_sum(index, lambda a: self.atom(a, names))

    def atom(self, a: object, names: Mapping[Axis, str]) -> str:
        if isinstance(a, Axis):
            return names[a]
        if isinstance(a, Sym):
            return size_name(a)
        if isinstance(a, MinMax):
            return f"tl.{a.kind}imum({self.sum(a.a, names)}, {self.sum(a.b, names)})"
        assert isinstance(a, (Div, Mod)), a
        num, den = f"({self.sum(a.num, names)})", f"({self.sum(a.den, names)})"
        if is_nonneg(a.num):
            return f"({num} {'//' if isinstance(a, Div) else '%'} {den})"
        return f"libm.index_{'div' if isinstance(a, Div) else 'mod'}({num}, {den})"

    def load(self, c: Let) -> str:
        name, fill = c.attr
        dims = c.value.dims
        pointer = f"{self.pointers[name]} + {self.full(c.args[0], dims)}"
        if len(c.args) == 1:
            return f"tl.load({pointer})"
        other = scalars.literal(fill, "i8" if c.value.dtype == "bool" else c.value.dtype)
        return f"tl.load({pointer}, {self.spread(c.args[1], dims)}, other={other})"

    def random(self, c: Let) -> str:
        (dist, stream, along), (seed, element) = c.attr, c.args
        dist, _, end = dist.partition("<")
        if along is not None:
            rows = tuple(d for d in c.value.dims if d != along)
            at = self.spread(element, (*rows, along))
            block, rank = self.dims[along].block, len(c.value.dims)
            place = f"{seed.name}, {stream}, {at}, {along}_at, {block}, {rank}"
            text = f"libm.rand_below({place}, {end})" if end else f"libm.rand_lanes({place})"
            return self.turned(text, (*rows, along), c.value.dims)
        at = self.spread(element, c.value.dims)
        wide = "64" if c.value.dtype == "f64" else ""
        if (dist, wide) == ("rand", ""):
            at = f"{at} // 4, {at} % 4"
        less = f" < {int(end) / 2**24}" if end else ""
        return f"libm.{dist}{wide}({seed.name}, {stream}, {at}){less}"

    def reduce(self, c: Let) -> str:
        kind, over = c.attr
        text, dims = c.args[0].name, list(c.args[0].dims)
        step = REDUCTIONS[kind].scalar_op
        assert step is not None, kind
        for d in over:
            axis = dims.index(d)
            dims.remove(d)
            if kind == "sum":
                text = f"tl.sum({text}, {axis})"
            elif kind == "max" and c.value.dtype in FLOATS:
                text = f"tl.reduce({text}, {axis}, libm.max_combine)"
            elif kind == "min" and c.value.dtype in FLOATS:
                text = f"tl.reduce({text}, {axis}, libm.min_combine)"
            else:
                text = f"libm.reduce_{kind}({text}, {axis}).reshape({self.shape(dims)})"
        return text

    def dot(self, c: Let) -> str:
        m, k, n, operands = c.attr
        how = PRECISIONS.get(operands, "")
        a, b, total = c.args
        left = a.name if a.dims == (m, k) else f"tl.trans({a.name})"
        right = b.name if b.dims == (k, n) else f"tl.trans({b.name})"
        if total.dims == (m, n):
            return f"tl.dot({left}, {right}, {total.name}{how})"
        return f"tl.trans(tl.dot({left}, {right}, tl.trans({total.name}){how}))"


__all__ = ["Printer"]
