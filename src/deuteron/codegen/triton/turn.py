"""Rows that begin between multiples of 16 bytes, read and written in whole vectors of 16 bytes.

In: the address of a row and the number of elements of a vector (`ragged`). Out: where lanes
lie in such a row, and the text of accesses to it.

Lanes begin at the first multiple of 16 bytes in the row. The elements before it, `turn` in number,
come after the row's end, in the last vector of lanes: the row is a ring of its length rounded up to
whole vectors, and lane l has element (l + turn) modulo that. So as many lanes serve as for a row
that is aligned, none reads anything but vectors of which some element is the row's, and conditions
on reading are the same for all of a vector. Elements of vectors that belong to neighbouring rows
are masked; they are never written. Folds do not mind the order; what depends on an element's place
takes it from `rindex`.

The text has the number of elements as a constexpr VECTOR, which is 1 where the addresses of tensors
are no multiples of 16 bytes (`generate.ALIGNED`): then rows begin at their begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deuteron.codegen.loops import Loops, points, stride
from deuteron.codegen.triton.scope import FULL, Dim, R
from deuteron.ir.expr import ITEMSIZE
from deuteron.ir.index import Axis, Index, Sym, Value
from deuteron.schedule.kernel import Prefix

if TYPE_CHECKING:
    from deuteron.codegen.triton.emit import Emitter


def ragged(loops: Loops, r: Sequence[Axis]) -> tuple[Index, int] | None:
    """Rows that begin between multiples of 16 bytes: (address of a row, elements in 16 bytes). Read
    from its start such a row comes element by element. None where rows are aligned, or where the
    order of elements matters."""
    if len(r) != 1 or any(isinstance(p, Prefix) for p in loops.parts):
        return None
    moved: dict[Index, int] = {}
    width: dict[Index, int] = {}
    for a in loops.accesses:
        if stride(a.address, r[0]) == 1:
            row = a.address - r[0].index
            moved[row] = moved.get(row, 0) + points(a.address, (*loops.parallel, *r)) * a.itemsize
            width[row] = min(width.get(row, 8), a.itemsize)
    if not moved:
        return None
    row = max(moved, key=lambda i: moved[i])
    vector = 16 // width[row]
    if row.axes() & set(r) or any(isinstance(a, Value) for a in row.atoms()):
        return None
    aligned = all(
        c % vector == 0 or any(isinstance(a, Sym) and (a.hint or 1) % 16 == 0 for a in m)
        for m, c in row.terms
    )
    return None if aligned else (row, vector)


def turned_alike(loops: Loops, r: Sequence[Axis]) -> tuple[Index, int] | None:
    """The same for a worker's rows, if all of them begin as many elements behind a multiple of 16
    bytes where each is as many rows behind the one before as there are workers."""
    start = ragged(loops, r)
    if start is None or loops.chunk is None:
        return None
    (axis, count), (row, vector) = loops.chunk, start
    step = row.coefficient(axis)
    if tuple(loops.parallel) != (axis,) or step is None or axis in (row - axis.index * step).axes():
        return None
    return start if all(c * count % vector == 0 for _, c in step.terms) else None


@dataclass(frozen=True)
class Turn:
    """`row`: the address of a row; `single`: whether blocks have one row; `first`: the address of a
    worker's first row, where all its rows, each `step` behind the one before, have the same turn.
    """

    row: Index
    vector: int
    single: bool
    first: Index | None = None
    step: int = 1
    itemsizes: tuple[int, ...] = ()  # of elements that are read

    def declare(self, em: Emitter) -> None:
        """The elements of a vector: of all tensors, and of those with elements of so many bytes."""
        sizes = {"": self.vector} | {str(n): 16 // n for n in self.itemsizes}
        for name, count in sizes.items():
            em.scope.add(
                f"VECTOR{name}: tl.constexpr = {count} if ALIGNED else 1",
                f"BITS{name}: tl.constexpr = {count.bit_length() - 1} if ALIGNED else 0",
            )

    def begin(self, em: Emitter) -> None:
        """What all rows of a worker share; in the current scope."""
        if self.first is not None:
            em.scope.add(f"rturn = -({em.index(self.first)}) & (VECTOR - 1)")
            self._ring(em)

    def row_begins(self, em: Emitter, x: Dim) -> None:
        """For the rows of a block of `x`, which has just been entered."""
        p, text = x.prefix, f"{em.index(self.row)} + tl.zeros({em.shape(frozenset('x'))}, tl.int32)"
        em.scope.add(
            f"{p}rfirst = " + (f"tl.max({text})" if self.single else text),
            f"{p}rstart = {rounded_up(f'{p}rfirst')}",
        )
        if self.first is None:
            em.scope.add(f"rturn = {p}rstart - {p}rfirst")
            self._ring(em)

    def _ring(self, em: Emitter) -> None:
        em.scope.add(
            f"rring = {rounded_up('rnumel')}",
            "rbody = ((rnumel - rturn) >> BITS) * VECTOR",
            "rlast = rring - tl.maximum(rturn - rnumel, 0)",  # of rows shorter than a vector
        )

    def lanes(self, lanes: str, masked: bool) -> list[str]:
        """The lines that say which element each lane of a block has."""
        out = [f"rlane = {lanes}", "rindex = rlane + rturn"]
        if masked:
            out += [
                "rturned = rlane >= rring - rturn",
                "rindex = tl.where(rturned, rindex - rring, rindex)",
                "rmask = (rlane < rnumel - rturn) | (rturned & (rlane < rlast))",
            ]
        return out

    def sizes(self, at: str, block: str) -> str:
        """The text of the number of elements in blocks of lanes from `at`."""
        return f"libm.turned_sizes({at}, rnumel, rring, rturn, {block})"

    def has(self, em: Emitter, address: Index) -> bool:
        """Whether an address walks over the elements of rows that turn so."""
        return address is self.row + em.dims["r"].axes[0].index

    def load(self, em: Emitter, tensor: str, dtype: str, hint: str) -> str:
        """The text of what is read of a tensor's rows; lines that it needs are written."""
        scope, rows = em.chain[em.level(FULL)], self._rows(em)
        ahead = self._place(em, tensor)
        if not em.dims["r"].masked:
            return f"tl.load({ahead}{', ' if rows else ''}{' & '.join(rows)}{hint})"
        inside, behind = self._vectors(em, ITEMSIZE[dtype])
        main, turned = em.fresh("main"), em.fresh("turned")
        scope.add(
            f"{main} = tl.load({ahead}, {' & '.join([inside, *rows])}, other=0{hint})",
            f"{turned} = tl.load({self._place(em, tensor, ' - rring')}, "
            f"{' & '.join([behind, *rows])}, other=0{hint})",
        )
        return f"tl.where(rturned, {turned}, {main})"

    def moves(self, em: Emitter, address: Index, dtype: str) -> bool:
        """Whether a tensor has rows that begin at multiples of 16 bytes, of which a lane reads the
        elements of its row's places (weights of columns), of 2 bytes. Wider ones come one by one,
        with half of the bytes."""
        rest, size = address - em.dims["r"].axes[0].index, ITEMSIZE[dtype]
        if size != 2 or "r" in em.index_deps(rest) or self.vector < 8:
            return False
        masked = em.dims["x"].masked and bool(em.index_deps(rest))
        return not masked and all(c * size % 16 == 0 for _, c in rest.terms)

    def moved(self, em: Emitter, tensor: str, address: Index, dtype: str, policy: str) -> str:
        """The text of what is read of such a tensor."""
        r, rest = em.dims["r"], address - em.dims["r"].axes[0].index
        start = f"{em.pointers[tensor]} + ({em.index(rest)})" if rest.terms else em.pointers[tensor]
        mask, ends = ("rmask", "True") if r.masked else ("None", "False")
        given = f"{start}, {em.starts['r']}, rnumel, rring, rturn, rindex, {mask}"
        return f'libm.turned_load({given}, {r.block}, {ends}, ALIGNED, "{policy}")'

    def store(self, em: Emitter, tensor: str, value: str, policy: str) -> list[str]:
        """The lines that write a tensor's rows: vectors, then the elements of the row's ends."""
        ahead, rows = self._place(em, tensor), self._rows(em)
        if not em.dims["r"].masked:
            return [f"tl.store({ahead}, {value}{', ' if rows else ''}{' & '.join(rows)}{policy})"]
        whole = " & ".join(["(rlane < rbody)", *rows])
        last = " & ".join(["(rlane >= rbody)", "(rlane < rnumel - rturn)", *rows])
        first = " & ".join(["rturned", "(rlane < rlast)", *rows])
        behind = self._place(em, tensor, " - rring")
        ends = [
            f"tl.store({ahead}, {value}, {last}{policy})",
            f"tl.store({behind}, {value}, {first}{policy})",
        ]
        if self.single:
            head = f"if {em.starts['r']} + {em.dims['r'].block} > rbody:"
            ends = [head, *(f"    {line}" for line in ends)]
        return [f"tl.store({ahead}, {value}, {whole}{policy})", *ends]

    def _place(self, em: Emitter, tensor: str, more: str = "") -> str:
        """Pointers to the elements of the lanes of a block: neighbours differ by constants, which
        instructions have room for."""
        start = f"{em.dims['x'].prefix}rstart + {em.starts['r']}{more}"
        return f"{em.pointers[tensor]} + ({start}) + tl.arange(0, {em.dims['r'].block})[None, :]"

    def _rows(self, em: Emitter) -> Sequence[str]:
        x = em.dims["x"]
        return [f"{x.stem}mask"] if x.masked else []

    def _vectors(self, em: Emitter, itemsize: int) -> tuple[str, str]:
        """Masks of the vectors that have some element of the row, and of those that have some of
        its beginning, which come last; of a tensor with elements of so many bytes. Only 16 bytes
        together are certain to be the tensor's where one of them is."""
        name = f"rtail{itemsize}"
        scope = em.chain[em.level(FULL if self.first is None else R)]
        if name not in scope.sums:
            scope.sums[name] = name
            scope.add(
                f"{name} = {rounded_up('rnumel - rturn', itemsize)}",
                f"rhead{itemsize} = rring - {rounded_up('rturn', itemsize)}",
            )
        return f"(rlane < {name})", f"(rlane >= rhead{itemsize}) & (rlane < rring)"


def rounded_up(text: str, itemsize: int | str = "") -> str:
    """A number rounded up to whole vectors, as Triton sees that it is a multiple of them. (By a
    shift: numbers may be below 0.)"""
    return f"(({text} + (VECTOR{itemsize} - 1)) >> BITS{itemsize}) * VECTOR{itemsize}"
