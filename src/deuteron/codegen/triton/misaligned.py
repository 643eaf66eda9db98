"""Misaligned rows: they begin between multiples of 16 bytes. Rotated loads read and write them in
whole vectors of 16 bytes.

In: the address of a row and the number of elements of a vector (`misaligned_rows`). Out: where
lanes lie in such a row, and the text of accesses to it.

Lanes begin at the first multiple of 16 bytes in the row. The elements before it (the rotation, a
number of elements) come after the row's end, in the last lanes. The row is a ring of its length
rounded up to whole vectors, and lane l has element (l + rotation) modulo that.
So as many lanes serve as for a row that is aligned, none reads anything but vectors of which some
element is the row's, and conditions on reading are the same for all of a vector. Elements of
vectors that belong to neighbouring rows are masked; they are never written. Reductions do not mind
the order; what depends on an element's place takes it from `rindex`.

Only lanes of a block from EDGE on, which is known when it is compiled, have to ask whether they are
at the row's ends: for the others the instructions are gone (softmax 1466, so 1018).

The text has the number of elements as a constexpr VECTOR, which is 1 where the addresses of tensors
are no multiples of 16 bytes (`generate.ALIGNED_CONSTEXPR`): then rows begin at their begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deuteron.codegen.loops import SPLIT, Loops, points_visited, stride
from deuteron.codegen.triton.scope import FULL, Dim, R
from deuteron.codegen.triton.state import TileState
from deuteron.ir.index import Axis, Index, Sym, Value, substitute
from deuteron.ir.operations import ITEMSIZE
from deuteron.schedule.kernel import Scan


def misaligned_rows(loops: Loops, r: Sequence[Axis]) -> tuple[Index, int] | None:
    """Rows that begin between multiples of 16 bytes: (address of a row, elements in 16 bytes). Read
    from its start such a row comes element by element. None where rows are aligned, or where the
    order of elements matters."""
    if len(r) != 1 or any(isinstance(p, Scan) for p in loops.statements):
        return None
    bytes_moved: dict[Index, int] = {}
    width: dict[Index, int] = {}
    for a in loops.accesses:
        if stride(a.address, r[0]) == 1:
            row = a.address - r[0].index
            bytes_moved[row] = (
                bytes_moved.get(row, 0)
                + points_visited(a.address, (*loops.parallel, *r)) * a.itemsize
            )
            width[row] = min(width.get(row, 8), a.itemsize)
    if not bytes_moved:
        return None
    row = max(bytes_moved, key=lambda i: bytes_moved[i])
    vector = 16 // width[row]
    if row.axes() & set(r) or any(isinstance(a, Value) for a in row.atoms()):
        return None
    aligned = all(
        c % vector == 0 or any(isinstance(a, Sym) and (a.hint or 1) % 16 == 0 for a in m)
        for m, c in row.terms
    )
    return None if aligned else (row, vector)


def rows_of_one_alignment(loops: Loops, r: Sequence[Axis]) -> tuple[Index, int] | None:
    """The same for a split's rows, if all of them begin as many elements behind a multiple of 16
    bytes where each is as many rows behind the one before as there are splits."""
    start = misaligned_rows(loops, r)
    if start is None or loops.row_split is None:
        return None
    (axis, count), (row, vector) = loops.row_split, start
    step = row.coefficient(axis)
    if tuple(loops.parallel) != (axis,) or step is None or axis in (row - axis.index * step).axes():
        return None
    return start if all(c * count % vector == 0 for _, c in step.terms) else None


@dataclass(frozen=True)
class Rotation:
    """`row`: the address of a row; `single`: whether blocks have one row; `first`: the address of a
    split's first row, where all its rows, each `step` behind the one before, have the same
    rotation;
    `itemsizes`: of the elements of all tensors.
    """

    row: Index
    vector: int
    single_row: bool
    first: Index | None = None
    step: int = 1
    itemsizes: tuple[int, ...] = ()

    def declare(self, em: TileState) -> None:
        """Where lanes begin, and the elements of a vector of those of so many bytes."""
        sizes = {"": self.vector} | {str(n): 16 // n for n in self.itemsizes}
        for name, count in sizes.items():
            em.scope.add(
                f"VECTOR{name}: tl.constexpr = {count} if ALIGNED else 1",
                f"BITS{name}: tl.constexpr = {count.bit_length() - 1} if ALIGNED else 0",
            )
        # The lane of a block from which on a row's ends are, which threads of others need not ask.
        r, line = em.dims["r"], sizes[""]
        last = -(-(r.count.value or 0) // line) * line - 1
        edge = f"{last} % {r.block} - {2 * line - 1}" if r.count.value else "0"
        em.scope.add(f"EDGE: tl.constexpr = {edge}")

    def begin(self, em: TileState) -> None:
        """What all rows of a split share; in the current scope."""
        if self.first is not None:
            em.scope.add(f"rrotation = -({em.index(self.first)}) & (VECTOR - 1)")
            self._ring(em)

    def row_begins(self, em: TileState, x: Dim) -> None:
        """For the rows of a block of `x`, which has just been entered."""
        p, text = x.prefix, f"{em.index(self.row)} + tl.zeros({em.shape(frozenset('x'))}, tl.int32)"
        em.scope.add(
            f"{p}rfirst = " + (f"tl.max({text})" if self.single_row else text),
            f"{p}rstart = {rounded_up(f'{p}rfirst')}",
        )
        if self.first is None:
            em.scope.add(f"rrotation = {p}rstart - {p}rfirst")
            self._ring(em)

    def _ring(self, em: TileState) -> None:
        em.scope.add(
            f"rring = {rounded_up('rnumel')}",
            "rhead = rring - rrotation",
            "rlast = rring - tl.maximum(rrotation - rnumel, 0)",  # of rows shorter than a vector
        )

    def lanes(self, lanes: str, r: Dim) -> list[str]:
        """The lines that say which element each lane of a block has."""
        out = [f"rlane = {lanes}", "rindex = rlane + rrotation"]
        if r.masked:
            out += [
                f"rwithin = tl.arange(0, {r.block})[None, :] < EDGE",
                f"redge = tl.arange(0, {r.block})[None, :] >= EDGE",
                "rindex = tl.where(redge & (rlane >= rhead), rindex - rring, rindex)",
                "rmask = rwithin | (rlane < rnumel - rrotation)"
                " | ((rlane >= rhead) & (rlane < rlast))",
            ]
        return out

    def sizes(self, at: str, block: str) -> str:
        """The text of the number of elements in blocks of lanes from `at`."""
        return f"libm.rotated_sizes({at}, rnumel, rring, rrotation, {block})"

    def covers(self, em: TileState, address: Index) -> bool:
        """Whether an address walks over the elements of the rows that are rotated."""
        return address is self.row + em.dims["r"].axes[0].index

    def load(self, em: TileState, tensor: str, dtype: str, hint: str) -> str:
        """The text of what is read of a tensor's rows; lines that it needs are written."""
        scope, rows = em.chain[em.level(FULL)], self._rows(em)
        ahead = self._place(em, tensor)
        if not em.dims["r"].masked:
            return f"tl.load({ahead}{', ' if rows else ''}{' & '.join(rows)}{hint})"
        main, wrapped = em.fresh("main"), em.fresh("wrapped")
        tail, head = (self._whole(em, kind, ITEMSIZE[dtype]) for kind in ("tail", "head"))
        inside = " & ".join([f"(rwithin | (rlane < {tail}))", *rows])
        behind = " & ".join([f"redge & (rlane >= {head})", "(rlane < rring)", *rows])
        scope.add(
            f"{main} = tl.load({ahead}, {inside}, other=0{hint})",
            f"{wrapped} = tl.load({self._place(em, tensor, ' - rring')}, {behind}, other=0{hint})",
        )
        return f"tl.where(redge & (rlane >= rhead), {wrapped}, {main})"

    def rotates(self, em: TileState, address: Index, dtype: str) -> bool:
        """Whether a tensor has rows that begin at multiples of 16 bytes, of which a lane reads the
        elements of its row's places (weights of columns), of 2 bytes. Wider ones come one by one,
        with half of the bytes."""
        rest, size = address - em.dims["r"].axes[0].index, ITEMSIZE[dtype]
        if size != 2 or "r" in em.index_deps(rest) or self.vector < 8:
            return False
        masked = em.dims["x"].masked and bool(em.index_deps(rest))
        return not masked and all(c * size % 16 == 0 for _, c in rest.terms)

    def rotated(self, em: TileState, tensor: str, address: Index, dtype: str, policy: str) -> str:
        """The text of what is read of such a tensor."""
        r, rest = em.dims["r"], address - em.dims["r"].axes[0].index
        start = f"{em.pointers[tensor]} + ({em.index(rest)})" if rest.terms else em.pointers[tensor]
        mask, ends = ("rmask", "True") if r.masked else ("None", "False")
        given = f"{start}, {em.starts['r']}, rnumel, rring, rrotation, rindex, {mask}"
        return f'libm.rotated_load({given}, {r.block}, {ends}, ALIGNED, "{policy}")'

    def store(
        self, em: TileState, tensor: str, itemsize: int, value: str, policy: str
    ) -> list[str]:
        """The lines that write a tensor's rows: vectors, then the elements of the row's ends."""
        ahead, rows = self._place(em, tensor), self._rows(em)
        if not em.dims["r"].masked:
            return [f"tl.store({ahead}, {value}{', ' if rows else ''}{' & '.join(rows)}{policy})"]
        body = self._whole(em, "body", itemsize)
        whole = " & ".join([f"(rwithin | (rlane < {body}))", *rows])
        last = " & ".join([f"redge & (rlane >= {body})", "(rlane < rnumel - rrotation)", *rows])
        first = " & ".join(["redge & (rlane >= rhead)", "(rlane < rlast)", *rows])
        ends = [
            f"tl.store({ahead}, {value}, {last}{policy})",
            f"tl.store({self._place(em, tensor, ' - rring')}, {value}, {first}{policy})",
        ]
        if self.single_row:
            head = f"if {em.starts['r']} + {em.dims['r'].block} > {body}:"
            ends = [head, *(f"    {line}" for line in ends)]
        return [f"tl.store({ahead}, {value}, {whole}{policy})", *ends]

    def _place(self, em: TileState, tensor: str, more: str = "") -> str:
        """Pointers to the elements of the lanes of a block: neighbours differ by constants, which
        instructions have room for."""
        start = f"{em.dims['x'].prefix}rstart + {em.starts['r']}{more}"
        return f"{em.pointers[tensor]} + ({start}) + tl.arange(0, {em.dims['r'].block})[None, :]"

    def _rows(self, em: TileState) -> Sequence[str]:
        x = em.dims["x"]
        return [f"{x.stem}mask"] if x.masked else []

    def _whole(self, em: TileState, kind: str, itemsize: int) -> str:
        """The name of the lane at which vectors end that have some element of the row before its
        begin (`tail`), or no other (`body`), or from which they have some of its begin (`head`); of
        a tensor with elements of so many bytes. Only 16 bytes together are certain to be the
        tensor's where one of them is."""
        name, more = f"r{kind}{itemsize}", f" + (VECTOR{itemsize} - 1)"
        scope = em.chain[em.level(FULL if self.first is None else R)]
        if name not in scope.sums:
            scope.sums[name] = name
            count = {"head": f"rrotation{more}", "tail": f"rnumel - rrotation{more}"}
            text = count.get(kind, "rnumel - rrotation")
            whole = f"(({text}) >> BITS{itemsize}) * VECTOR{itemsize}"
            scope.add(f"{name} = " + (f"rring - {whole}" if kind == "head" else whole))
        return name


def rotation_of(loops: Loops, start: tuple[Index, int], single_row: bool) -> Rotation:
    """The rotation of rows that begin so (`misaligned_rows`); `single_row`: one in each block."""
    sizes = tuple(sorted({a.itemsize for a in loops.accesses}))
    row, vector = start
    if loops.row_split is None:
        return Rotation(row, vector, single_row, itemsizes=sizes)
    axis, count = loops.row_split
    first = substitute(row, {axis: SPLIT.index})
    return Rotation(row, vector, single_row, first, count, sizes)


def rounded_up(text: str) -> str:
    """A number rounded up to whole vectors, as Triton sees that it is a multiple of them. (By a
    shift: numbers may be below 0.)"""
    return f"(({text} + (VECTOR - 1)) >> BITS) * VECTOR"
