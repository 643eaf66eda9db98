"""Pointwise nests whose tensors are contiguous along different axes: transposes, layout changes.

    for other axes and tiles of u x v (threads):
        loads that are contiguous along u: transposed into tiles that are contiguous along v
        for u: for v on vector lanes: the body, reading and writing those tiles
        stores that are contiguous along u: transposed out of their tiles

Both sides touch whole cache lines, and the body stays vector code.
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.bodies import IndexSet
from deuteron.codegen.cpp.emit import smaller
from deuteron.codegen.cpp.environment import Env, parallel_loops
from deuteron.codegen.cpp.nests import PassWriter
from deuteron.codegen.cpp.nontemporal import transpose_function
from deuteron.codegen.loops import (
    Loops,
    Write,
    outermost_first,
    points_visited,
    stride,
    unique_nodes,
)
from deuteron.ir.expr import Expr
from deuteron.ir.index import Axis, Index, const, hint
from deuteron.ir.operations import ITEMSIZE

# Elements of a tile along u and v. Measured on a transpose of 4096 x 2048 f32 (one core of an
# EPYC, 1 MiB of L2): 3.5 ms; 64 x 64 3.9, 32 x 32 4.6, 128 x 128 3.4 but twice the memory; with v
# blocks inside 0 to 20% slower.
TILE_U, TILE_V = 64, 128
# Few rows are still known to the TLB, and open in memory, when the next column of tiles goes
# through them: tiles are short, and with what they read in the first cache. Times of 64 x 32 over
# 64 x 128, two cores: relu to channels-last, of 64 rows of 3136 f32 0.85, bf16 0.79, of 512 rows
# 0.81 and 0.75, of 256 rows of 8192 0.96 and 0.83, of 1024 1.05 and 0.85; copies of 64 rows 0.85,
# of 256 in bf16 0.66; casts of 512 0.88, of 2048 1.16.
SHORT_TILE_V, FEW_ROWS = 32, 512
PREFETCH_ROWS = 8  # rows
MIN_TILED_EXTENT = 8  # extents below this gain nothing from whole cache lines


def transposed_axis(loops: Loops, v: Axis) -> Axis | None:
    """The axis along which most of what is strided along `v` is contiguous; None where tiles do not
    pay.
    """
    if hint(v.extent) < MIN_TILED_EXTENT:
        return None
    axes = (*loops.parallel, *loops.reduced)
    weight: dict[Axis, int] = {}
    for a in loops.accesses:
        step = stride(a.address, v)
        if step in (0, 1) or step is None:
            continue
        for u in axes:
            if u != v and stride(a.address, u) == 1 and hint(u.extent) >= MIN_TILED_EXTENT:
                weight[u] = weight.get(u, 0) + a.itemsize * points_visited(a.address, axes)
    best = max(weight, key=lambda u: (weight[u], u.name), default=None)
    return best if best is not None and weight[best] > 1 << 15 else None


class Tiles(PassWriter):
    """Writes the nest in tiles of `u` x `v`."""

    def __init__(self, env: Env, v: Axis, u: Axis) -> None:
        super().__init__(env, v, [], 0, frozenset())
        self.u = u
        few = hint(u.extent) <= FEW_ROWS and hint(v.extent) > TILE_V
        self.tile_v = SHORT_TILE_V if few else TILE_V

    def write(self) -> None:
        env, em = self.env, self.env.em
        axes = outermost_first(
            env.loops, [a for a in env.loops.parallel if a not in (self.u, self.v)]
        )
        extra = []
        for axis, side in ((self.v, self.tile_v), (self.u, TILE_U)):
            count = em.fresh("tiles")
            em.scope.add(f"const long long {count} = ({env.extent(axis)} + {side - 1}) / {side};")
            extra.append((em.fresh("b"), count))
        parallel_loops(env, axes, extra, lambda: self.tile(extra[1][0], extra[0][0]))

    def tile(self, u_block: str, v_block: str) -> None:
        env, em, u, v = self.env, self.env.em, self.u, self.v
        first, count = {}, {}
        for axis, block, side in ((u, u_block, TILE_U), (v, v_block, self.tile_v)):
            first[axis], n = em.fresh("t"), env.extent(axis)
            em.scope.add(f"const long long {first[axis]} = {block} * {side};")
            if axis.extent.value is not None and axis.extent.value % side == 0:
                count[axis] = str(side)
            else:
                count[axis] = em.fresh("m")
                left = f"{n} - {first[axis]}"
                em.scope.add(f"const int {count[axis]} = (int){smaller(left, str(side))};")
        em.used.add("d_transpose")
        if self.write_copies(first, count):
            return
        uu, vv = em.fresh("u"), em.fresh("v")
        cell = f"{uu} * {self.tile_v} + {vv}"
        statements = self.plan.passes[0].statements
        loads = self.transposed_loads(self.plan.passes[0].roots())
        for node in loads:
            name = em.fresh("tile")
            em.scope.add(
                f"alignas(64) {scalars.MEMORY_TYPES[node.dtype]} {name}[{TILE_U * self.tile_v}];"
            )
            self.staged[node] = scalars.from_memory(f"{name}[{cell}]", node.dtype, em.used)
            where, step = self.corner(node.attr[1][0], first)
            em.scope.add(
                f"d_transpose({em.tensors[node.attr[0]]} + {where}, {step}, {name}, {self.tile_v}, "
                f"{count[v]}, {count[u]});"
            )
        stores = [p for p in statements if isinstance(p, Write) and self.is_transposed(p.address)]
        stores = [p for p in stores if p.accumulate is None and p.mask is None]
        names = []
        for p in stores:
            names.append(em.fresh("tile"))
            em.scope.add(
                f"alignas(64) {scalars.MEMORY_TYPES[p.dtype]} {names[-1]}[{TILE_U * self.tile_v}];"
            )
            self.store_cells[p] = f"{names[-1]}[{cell}]"
        self.inside(uu, vv, first, count)
        for p, name in zip(stores, names, strict=True):
            where, step = self.corner(p.address, first)
            em.scope.add(
                f"{transpose_function(self.env, p)}({name}, {self.tile_v}, "
                f"{em.tensors[p.tensor]} + {where}, {step}, {count[u]}, {count[v]});"
            )

    def write_copies(self, first: dict[Axis, str], count: dict[Axis, str]) -> bool:
        """Writes a nest that only copies, from along u to along v, without tiles in between."""
        em, statements = self.env.em, self.plan.passes[0].statements
        pairs = []
        for p in statements:
            if not isinstance(p, Write) or p.accumulate is not None or p.mask is not None:
                return False
            if p.value.op != "load" or p.value.args or p.value.dtype != p.dtype:
                return False
            source = p.value.attr[1][0]
            if not self.is_transposed(source) or stride(p.address, self.v) != 1:
                return False
            pairs.append((p, source))
        for p, source in pairs:
            (a, step), (b, _) = self.corner(source, first), self.corner(p.address, first)
            out = p.address.coefficient(self.u)
            assert out is not None
            em.scope.add(
                f"{transpose_function(self.env, p)}({em.tensors[p.value.attr[0]]} + {a}, {step}, "
                f"{em.tensors[p.tensor]} + {b}, {em.index(out)}, {count[self.v]}, {count[self.u]});"
            )
        return True

    def inside(self, uu: str, vv: str, first: dict[Axis, str], count: dict[Axis, str]) -> None:
        """The body at every point of the tile."""
        em, u, v = self.env.em, self.u, self.v
        em.name_axis(u, f"({first[u]} + {uu})")
        em.name_axis(v, f"({first[v]} + {vv})")
        p = self.plan.passes[0]
        index_set = IndexSet(v, const(0), v.extent, list(p.statements), [], {}, self.linear)
        with em.inside(u) as rows:
            with em.inside(v) as scope:
                self.body(index_set, {}, "0", "0")
            rows.add(*self.prefetches(p.roots(), first), em.simd(scope))
            rows.loop(f"for (int {vv} = 0; {vv} < {count[v]}; ++{vv})", scope.lines)
        em.scope.loop(f"for (int {uu} = 0; {uu} < {count[u]}; ++{uu})", rows.lines)

    def prefetches(self, roots: Sequence[Expr], first: dict[Axis, str]) -> list[str]:
        """Fetches of what comes next, a later row where tiles go on along u, else the next tile's
        part of this one: no prefetcher of the machine's learns so many short accesses (relu to
        channels-last of 13 MiB 0.64 ms without, 0.49 ms with; cast and transpose of 2048 x 4096
        4.0 without, 4.4 with the next tile's, 3.7 with the eighth row from here)."""
        em, out = self.env.em, []
        down = hint(self.u.extent) > TILE_U
        if not down and hint(self.v.extent) <= self.tile_v:
            return []
        for n in unique_nodes(roots):
            unstaged = n.op == "load" and n.attr[1] and not n.args and n not in self.staged
            if (
                not unstaged
                or stride(n.attr[1][0], self.v) != 1
                or not stride(n.attr[1][0], self.u)
            ):
                continue
            step = n.attr[1][0].coefficient(self.u) if down else None
            em.name_axis(self.v, first[self.v] if down else f"({first[self.v]} + {self.tile_v})")
            with em.inside(self.v) as scope:
                address_text = f"{em.tensors[n.attr[0]]} + {em.index(n.attr[1][0])}"
                if step is not None:
                    address_text += f" + {PREFETCH_ROWS} * {em.index(step)}"
            if not scope.lines:
                line = 64 // ITEMSIZE[n.dtype]
                head = f"for (int k = 0; k < {self.tile_v}; k += {line})"
                out.append(f"{head} __builtin_prefetch({address_text} + k);")
        return out

    def is_transposed(self, address: Index) -> bool:
        step = stride(address, self.v)
        return step not in (0, 1, None) and stride(address, self.u) == 1

    def transposed_loads(self, roots: Sequence[Expr]) -> list[Expr]:
        transposed: dict[Expr, None] = {}
        for r in roots:
            for n in r.walk():
                if n.op == "load" and n.attr[1] and not n.args and self.is_transposed(n.attr[1][0]):
                    transposed[n] = None
        return list(transposed)

    def corner(self, address: Index, first: dict[Axis, str]) -> tuple[str, str]:
        """C texts of the tile's first address and of the stride along v."""
        em = self.env.em
        for axis, text in first.items():
            em.name_axis(axis, text)
        step = address.coefficient(self.v)
        assert step is not None
        with em.inside(self.u, self.v) as scope:
            texts = em.index(address), em.index(step)
        em.scope.add(*scope.lines)
        return texts
