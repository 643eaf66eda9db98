"""Non-temporal stores (past the caches), for results that no cache holds until they are read.

In: a kernel and the machine; the parts of a loop and its vector axis. Out: the tensors that are
written so, and the buffers of whole lines through which a vector loop writes them (`d_nontemporal`
of `support.h`).

An ordinary store fetches the line that it overwrites, unless a cache still has it. Measured on two
cores of an EPYC with 32 MiB of last-level cache, other work between the calls: ``b = 2 a + 1`` of 2
x 64 MiB 1.67 ms with ordinary stores, 1.27 ms with non-temporal ones; 2 x 32 MiB 0.78 and 0.66 ms;
2 x
16 MiB 0.34 ms either way. Sines of 10 M floats 2.10 and 1.78 ms, softmax over the rows of a matrix
of 16 MiB 1.30 and 1.15 ms. Where rows are short, they lose (softmax along rows of 64 floats 2.04
and 2.30 ms, rotation of rows of 128 0.93 and 1.13 ms): such stores leave no time to fetch the next
row while they wait for memory.

Where a row is read in several passes, an ordinary store's line is fetched beside an earlier pass
(`PrefetchingWriter.prefetches`), which costs no time where that computes much (log-softmax of rows
of 2048 takes 1.02 of its time with non-temporal stores) but a third of what a norm moves. With
AVX2, one core, shared memory of 20 GB/s: layer norm of 4096 x 2048 takes 0.69, of 64 x 65536 with
gradients 0.86, instance norm 0.79, batch norm with gradients 0.89, add and RMS norm with gradients
0.81, softmax with gradients 0.85 of the time. With AVX-512, two cores of a Xeon, tensors of 16 to
32 MiB: RMS norm with gradients takes 0.56, layer norm 0.63, of 64 x 65536 0.66, batch norm 0.81 of
the time, half of it due to prefetches (`PrefetchingWriter.prefetch_later_pages`). There costly
passes have non-temporal stores too (softmax with gradients 0.79, log-softmax 0.77).
"""

from __future__ import annotations

from collections.abc import Sequence

from deuteron.codegen.cpp import scalars
from deuteron.codegen.cpp.environment import Env, Machine
from deuteron.codegen.loops import Statement, Write, stride
from deuteron.ir.index import Axis, hint, product
from deuteron.ir.operations import ITEMSIZE
from deuteron.ir.program import tensors_read
from deuteron.schedule.kernel import Kernel, Schedule

CACHED_RESULT_FRACTION = 32  # results below this fraction of the last cache stay in it
# A kernel that touches this fraction of the last cache stores what the graph returns
# non-temporally; what a later step of the graph reads, where the kernel touches more than all of
# it.
RETURNED_FRACTION = 4
# Bytes of the last cache on which a core counts. A Xeon names 480 MiB, of a host that many share;
# two cores read and write no faster there than in memory: 51 GB/s with ordinary stores to 16 of 32
# MiB, 31 to 64 of 128 MiB, 56 with non-temporal stores to either. Its gradients of slices of 32
# MiB take 0.78, of a mean square of 32 MiB 0.80 of the time.
CORE_CACHE_BYTES = 32 << 20
# The same where tiles are transposed into their places: the fetches that ordinary stores cause are
# short and far from each other (the Xeon: 32 MiB transposed 6.9 ms, with non-temporal stores 2.6
# ms; stores in order of their addresses gain nothing there).
CORE_CACHE_BYTES_TILES = 16 << 20
# Lines of a row below which its ends cost more than is gained (the Xeon: RMS norm of rows of 32
# lines of bf16 with gradients takes 0.68 of the time, similarities of rows of 48 0.85, lookups in
# an embedding of rows of 16 1.14).
MIN_ROW_LINES = 32


def read_later(schedule: Schedule) -> dict[str, frozenset[str]]:
    """For each kernel, by name, the tensors that it writes and a later step reads."""

    def root(name: str) -> str:
        return schedule.aliases.get(name, name)

    later: set[str] = set()
    out: dict[str, frozenset[str]] = {}
    for step in reversed(schedule.steps):
        if isinstance(step, Kernel):
            out[step.name] = frozenset(n for n, _ in step.writes if root(n) in later)
            later.update(root(n) for n, _ in step.reads)
            later.update(root(n) for n, _ in step.writes if n in schedule.aliases)
        else:
            later.update(root(n) for n in tensors_read(step))
    return out


def nontemporal_tensors(
    kernel: Kernel, machine: Machine, again: frozenset[str], tiles: bool = False
) -> frozenset[str]:
    """The tensors that a kernel stores non-temporally: large ones, in a kernel that touches more
    than the last cache may hold. `again`: those that are read soon; `tiles`: as far as it writes
    them in tiles."""
    layouts = dict(kernel.reads) | dict(kernel.writes)
    size = {n: ITEMSIZE[lay.dtype] * hint(product(lay.shape)) for n, lay in layouts.items()}
    read = {n for n, _ in kernel.reads}
    share = CORE_CACHE_BYTES_TILES if tiles else CORE_CACHE_BYTES
    last = min(machine.l3_bytes, machine.threads * share)
    total = sum(size.values())
    if not last or total < last // RETURNED_FRACTION:
        return frozenset()
    large = {
        n for n, _ in kernel.writes if n not in read and size[n] >= last // CACHED_RESULT_FRACTION
    }
    return frozenset(large if total >= (last if tiles else machine.l3_bytes) else large - again)


def nontemporal_stores(
    env: Env, parts: Sequence[Statement], axis: Axis, tiles: bool = False
) -> list[Write]:
    """The stores of a vector loop along `axis` that go through a buffer; `tiles`: the next ones lie
    in another row."""
    out = []
    for w in parts:
        if not isinstance(w, Write) or w.tensor not in (
            env.nontemporal_tiles if tiles else env.nontemporal
        ):
            continue
        if w.accumulate is not None or w.mask is not None or stride(w.address, axis) != 1:
            continue
        line = 64 // ITEMSIZE[w.dtype]
        n = axis.extent.value
        if n is None or n >= MIN_ROW_LINES * line:
            out.append(w)
    return out


def transpose_function(env: Env, w: Write) -> str:
    """The function that transposes a tile into its place."""
    if w.tensor not in env.nontemporal_tiles:
        return "d_transpose"
    env.em.used.add("d_nontemporal")  # its end
    return "d_transpose_nontemporal"


def store_address(env: Env, w: Write, axis: Axis, text: str) -> str:
    """C text of the address of a store where `axis` is `text`; what it needs is written before."""
    em = env.em
    em.name_axis(axis, text)
    with em.inside(axis) as scope:
        address = f"{em.tensors[w.tensor]} + {em.index(w.address)}"
    em.scope.add(*scope.lines)
    return address


def store_buffer(env: Env, w: Write, count: int) -> str:
    """Declares a buffer for `count` elements of a store."""
    name = env.em.fresh("out")
    env.em.scope.add(f"alignas(64) {scalars.MEMORY_TYPES[w.dtype]} {name}[{count}];")
    env.em.used.add("d_nontemporal")
    return name


__all__ = [
    "store_buffer",
    "store_address",
    "read_later",
    "nontemporal_stores",
    "nontemporal_tensors",
    "transpose_function",
]
