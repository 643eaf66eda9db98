"""Runs of a program, and whether one run shows what another does.

In: a function of flat tensors. Out: `Seen` (results, gradients, inputs afterwards, who shares
memory with whom), and `differences` between a compiled run and eager's.

What counts as the same value is found out, not fixed. Close to eager by a few units in the last
place is right. Else a float64 run of eager decides: the error is at most twice eager's, plus what
moving the inputs, and what is rounded on the way, by a unit in the last place does to the result.
A sum is moved by a unit in the last place of the sum of its terms' magnitudes, which is what
another order of its terms does to it. NaN and inf are where eager has them, or where float64 has
them, or where rounding or torch's own formula for an operator puts them. Where float64 has no
number and eager has one, units in the last place count from that. A zero has eager's sign where
runs that differ by rounding have it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dev.check.perturbed import ContiguousArguments, PerturbedResults, PoisonedMemory, significant

WIDE_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
HALF_DTYPES = (torch.float16, torch.bfloat16)
POISONED_RUNS = 4  # runs in memory full of NaN: which of it an operator gets is chance
# Units in the last place, of the element and of the tensor's mean magnitude, that are always
# allowed: vector functions are within 4, and sums are taken in another order.
ALLOWED_ULPS = 4.0
# Eager's own error, as a share of the mean magnitude, from which on eager is no measure by itself.
HALF_LOST_SHARE = {torch.float16: 0.3, torch.bfloat16: 0.3}
LOST_ELSE = 0.02
PERTURBED_RUNS = 3  # runs with inputs, and runs with results, moved by a unit in the last place


# -- inputs ----------------------------------------------------------------------------------------
def flat_storage(t: Tensor) -> Tensor:
    """All of a tensor's storage as one row of its dtype."""
    storage = t.untyped_storage()
    out = torch.empty(0, dtype=t.dtype, device=t.device)
    return out.set_(storage, 0, (storage.nbytes() // t.element_size(),))


def copies(
    tensors: Sequence[Tensor],
    change: Callable[[Tensor], Tensor] = Tensor.clone,
    grad: bool = True,
) -> list[Tensor]:
    """Copies with the same strides, offsets and sharing of memory; `change` makes a copy of one
    flat storage."""
    made: dict[tuple[int, torch.dtype], Tensor] = {}
    out = []
    with torch.no_grad():
        for t in tensors:
            lazy = t.is_conj() or t.is_neg()
            plain = t.detach().clone() if lazy else t.detach()
            key = (plain.untyped_storage()._cdata if lazy else t.untyped_storage()._cdata, t.dtype)
            if lazy or key not in made:
                made[key] = change(flat_storage(plain.resolve_conj().resolve_neg()))
            base = made[key]
            copy = torch.empty(0, dtype=base.dtype, device=base.device).set_(
                base.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
            )
            out.append(copy.requires_grad_(t.requires_grad and grad))
    return out


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return copies(tensors, lambda s: s.to(WIDE_DTYPES.get(s.dtype, s.dtype), copy=True))


def to_cpu(storage: Tensor) -> Tensor:
    return storage.to("cpu", copy=True)


def moved(tensors: Sequence[Tensor], seed: int, wide: bool) -> list[Tensor]:
    """Floating elements moved by up to a unit in the last place of their own dtype."""
    generator = torch.Generator().manual_seed(seed)

    def change(s: Tensor) -> Tensor:
        to = WIDE_DTYPES.get(s.dtype, s.dtype) if wide else s.dtype
        if not (s.dtype.is_floating_point or s.dtype.is_complex):
            return s.clone()
        real = s.real.dtype if s.dtype.is_complex else s.dtype
        way = torch.randint(-1, 2, s.shape, generator=generator).double().to(s.device)
        other = s.to(WIDE_DTYPES.get(s.dtype, s.dtype)) * (1.0 + torch.finfo(real).eps * way)
        return other.to(to)

    return copies(tensors, change)


def parts(t: Tensor) -> Tensor:
    """Real numbers of a tensor, in float64."""
    t = t.resolve_conj().resolve_neg()
    return (torch.view_as_real(t) if t.dtype.is_complex else t).double()


# -- runs ------------------------------------------------------------------------------------------
@dataclass
class Seen:
    """What a run shows. `values`: label -> tensor or plain value. `strides`, `shared` per output:
    what it shares memory with (an input or an earlier output), and at which offset."""

    values: dict[str, Any] = field(default_factory=dict)
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    def part(self, prefix: str) -> Seen:
        """What concerns the labels that begin so."""
        return Seen(
            {k: v for k, v in self.values.items() if k.startswith(prefix)},
            {k: v for k, v in self.strides.items() if k.startswith(prefix)},
            {k: v for k, v in self.shared.items() if k.startswith(prefix)},
        )


def cotangent(t: Tensor, seed: int) -> Tensor:
    """A fixed gradient of a result: multiples of 1/8, the same in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    way = torch.randint(-8, 9, t.shape, generator=generator).to(t.device)
    return (way.double() / 8).to(t.dtype)


def differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.layout == torch.strided


def sharing(outputs: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, str]:
    """Which input or earlier output each output shares memory with, and from which byte on: of an
    input's memory, or counted from where that output begins. Where a result begins in memory that
    was allocated for it says nothing: copies that eager's scatters make keep an input's offset."""
    owners: dict[int, tuple[str, int]] = {}
    out = {}
    for name, t in inputs.items():
        owners.setdefault(t.untyped_storage()._cdata, (name, 0))
    for name, t in outputs.items():
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            continue
        key, at = t.untyped_storage()._cdata, t.storage_offset() * t.element_size()
        if t.numel() == 0:  # no element is shared
            continue
        same = next((k for k, x in inputs.items() if x is t), None)
        if same is not None:
            out[name] = f"is {same}"
        elif key in owners:
            owner, start = owners[key]
            out[name] = f"shares {owner} at byte {at - start}"
        else:
            owners[key] = name, at
    return out


def see(
    run: Callable[[list[Tensor]], Any], inputs: list[Tensor], backward: bool, seed: int = 0
) -> Seen:
    """Runs `run` on `inputs` (which it may change), and its backward from fixed gradients."""
    torch.manual_seed(seed)
    return observed([(run(inputs), inputs)], backward)[0]


def observed(calls: Sequence[tuple[Any, Sequence[Tensor]]], backward: bool) -> list[Seen]:
    """What calls show that ran as one: (result, inputs after the call) of each. One backward
    through all of them runs here, from fixed gradients."""
    rows = [
        (
            {f"out{i}": x for i, x in enumerate(tree_flatten(result)[0])},
            {f"in{i}": x for i, x in enumerate(inputs)},
        )
        for result, inputs in calls
    ]
    shared = [sharing(outputs, inputs) for outputs, inputs in rows]
    grads = gradients(rows) if backward else [{} for _ in rows]
    out = []
    for (outputs, inputs), places, gradients_of in zip(rows, shared, grads):
        seen = Seen(shared=places)
        for k, x in outputs.items():
            seen.values[k] = x.detach().clone() if isinstance(x, Tensor) else x
            if isinstance(x, Tensor) and x.layout == torch.strided:
                seen.strides[k] = significant(x)
            if isinstance(x, Tensor):
                seen.values[f"{k} requires grad"] = x.requires_grad
        for k, g in gradients_of.items():
            seen.values[k] = g.detach().clone() if g is not None else None
        for k, x in inputs.items():
            seen.values[f"{k} afterwards"] = x.detach().clone()
        out.append(seen)
    return out


def gradients(
    rows: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
) -> list[dict[str, Tensor | None]]:
    """Of each row's inputs that require one, all by one backward."""
    ends: list[Tensor] = []
    given: list[Tensor] = []
    starts: list[Tensor] = []
    owners: list[tuple[int, str]] = []
    out: list[dict[str, Tensor | None]] = [{} for _ in rows]
    for row, (outputs, inputs) in enumerate(rows):
        mine = [x for x in outputs.values() if differentiable(x)]
        # What has a gradient since it was written to is no leaf: how later results depend on it
        # is not in the graph of any program compiled by AOTAutograd.
        leaves = {k: x for k, x in inputs.items() if x.requires_grad and x.is_leaf}
        if mine and leaves:
            ends += mine
            given += [cotangent(x, i) for i, x in enumerate(mine)]
            starts += leaves.values()
            owners += [(row, k) for k in leaves]
    if starts:
        computed = torch.autograd.grad(ends, starts, given, allow_unused=True)
        for (row, k), g in zip(owners, computed):
            out[row][f"grad of {k}"] = g
    return out


# -- comparison ------------------------------------------------------------------------------------
class Oracle:
    """Eager's run, and, when they are asked for, runs in float64 and of moved inputs.

    `run` takes flat inputs; `wide` too, and computes in float64 (it may replace dtype arguments).
    """

    def __init__(
        self,
        run: Callable[[list[Tensor]], Seen],
        wide: Callable[[list[Tensor]], Seen],
        inputs: Sequence[Tensor],
    ) -> None:
        self.run, self.wide, self.inputs = run, wide, list(inputs)
        self.eager = run(copies(inputs))
        self.more: list[tuple[Seen | None, bool]] = []

    def attempt(
        self, given: list[Tensor], wide: bool, mode: TorchDispatchMode | None = None
    ) -> Seen | None:
        usual = torch.get_default_dtype()
        try:
            if wide:  # what integers become when divided
                torch.set_default_dtype(torch.float64)
            with mode or nullcontext():
                return self.wide(given) if wide else self.run(given)
        except Exception:  # noqa: BLE001 - eager cannot do this in float64: it is then no measure
            return None
        finally:
            torch.set_default_dtype(usual)

    def otherwise(
        self, given: list[Tensor], wide: bool, mode: PerturbedResults | None = None
    ) -> Seen | None:
        """A run with other numbers. On a GPU only where the CPU takes it: a position that another
        number puts out of range ends the process there (seed 73002997)."""
        if self.on_cpu is not None:
            again = None if mode is None else mode.again()
            if self.on_cpu.attempt(copies(given, to_cpu), wide, again) is None:
                return None
        return self.attempt(given, wide, mode)

    @cached_property
    def on_cpu(self) -> Oracle | None:
        """The same on the CPU, for what is on a GPU; None where eager cannot do it there."""
        if all(t.device.type == "cpu" for t in self.inputs):
            return None
        try:
            return Oracle(self.run, self.wide, copies(self.inputs, to_cpu))
        except Exception:  # noqa: BLE001 - it is then no measure
            return None

    @cached_property
    def exact(self) -> Seen | None:
        return self.attempt(widened(self.inputs), True)

    @cached_property
    def coarsest(self) -> torch.dtype:
        """The inputs' floating dtype of the largest unit in the last place."""
        dtypes = [t.real.dtype if t.is_complex() else t.dtype for t in self.inputs]
        dtypes = [d for d in dtypes if d.is_floating_point] or [torch.float32]
        return max(dtypes, key=lambda d: torch.finfo(d).eps)

    @cached_property
    def others(self) -> list[tuple[Seen | None, bool]]:
        """Runs that differ from `exact` (where true) or `eager` by rounding only."""
        out: list[tuple[Seen | None, bool]] = []
        if self.on_cpu is not None:
            # Eager's kernels for GPUs do not agree on what becomes of inf (rows by Welford's sums
            # are NaN, where the length is no multiple of 4); its kernels for CPUs are another view.
            out.append((self.on_cpu.eager, False))
        for wide in (True, False):
            for k in range(PERTURBED_RUNS):
                out.append((self.otherwise(moved(self.inputs, k, wide), wide), wide))
                out.append((self.perturbed(k, wide), wide))
                if self.unexpanded is not None:
                    out.append((self.otherwise(moved(self.unexpanded, k, wide), wide), wide))
        return out

    @cached_property
    def unexpanded(self) -> list[Tensor] | None:
        """The inputs with a place in memory for each element, so that those of one expanded tensor
        move by themselves, as what is rounded on the way does. None where nothing is expanded, or
        where that shows in exact arithmetic."""
        given = [t.detach() for t in self.inputs]
        if not any(0 in significant(t) for t in given):
            return None
        given = [
            (t.clone(memory_format=torch.contiguous_format) if 0 in significant(t) else t)
            .detach()
            .requires_grad_(x.requires_grad)
            for t, x in zip(given, self.inputs)
        ]
        return given if self.like_exact(self.attempt(widened(given), True)) else None

    def like_exact(self, seen: Seen | None) -> bool:
        """Whether a run in float64 shows what `exact` does, up to eager's roundings."""
        return all(self.near(seen, name) for name in self.eager.values)

    def near(self, seen: Seen | None, name: str) -> bool | None:
        """That of one value; None where a run has it not in eager's form."""
        e = self.eager.values[name]
        if not isinstance(e, Tensor) or e.layout != torch.strided or e.numel() == 0:
            return True
        x, y = self.like(seen, name), self.like(self.exact, name)
        if x is None or y is None:
            return None
        real = e.real.dtype if e.dtype.is_complex else e.dtype
        near = 16 * torch.finfo(real).eps if real.is_floating_point else 0.0
        a, b = parts(x), parts(y)
        level = float(b[b.isfinite()].abs().mean()) if bool(b.isfinite().any()) else 0.0
        same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= near * (b.abs() + level))
        return bool(same.all())

    @cached_property
    def contiguous(self) -> Oracle | None:
        """The same with operators that read contiguous copies. None where that changes nothing in
        float64: else eager contradicts itself, and what does not depend on the memory is right."""
        seen = self.attempt(widened(self.inputs), True, ContiguousArguments())
        if all(self.near(seen, name) is not False for name in self.eager.values):
            return None

        def under(run: Callable[[list[Tensor]], Seen]) -> Callable[[list[Tensor]], Seen]:
            def wrapped(xs: list[Tensor]) -> Seen:
                with ContiguousArguments():
                    return run(xs)

            return wrapped

        return Oracle(under(self.run), under(self.wide), self.inputs)

    def unwritten(self) -> list[str]:
        """Values that eager computes from memory that nobody wrote, as oneDNN does with the
        gradient of a bfloat16 conv3d's weights whose kernel is larger than the image: runs whose
        operators get memory full of NaN show it, or numbers far beyond those of float64 that come
        and go."""
        names: dict[str, None] = {}
        for _ in range(POISONED_RUNS):
            seen = self.attempt(copies(self.inputs), False, PoisonedMemory())
            for name, e in self.eager.values.items():
                x, exact = self.like(seen, name), self.like(self.exact, name)
                if x is None or x.layout != torch.strided or not x.numel():
                    continue
                a, b = parts(x), parts(e)
                bad = a.isnan() & ~b.isnan()
                if exact is not None and bool(exact.isfinite().all()):
                    bad |= (a - b).abs() > 8 * float(parts(exact).abs().max())
                if bool(bad.any()):
                    names[name] = None
        return list(names)

    def perturbed(self, seed: int, wide: bool) -> Seen | None:
        """A run in which what is rounded on the way is moved."""
        given = widened(self.inputs) if wide else copies(self.inputs)
        return self.otherwise(given, wide, PerturbedResults(seed, self.coarsest if wide else None))

    @cached_property
    def tied(self) -> Seen | None:
        """A run in which a number equals those that rounding puts on either side of it."""
        modes = [PerturbedResults(k, None) for k in range(6 * PERTURBED_RUNS)]
        for mode in modes:
            self.otherwise(copies(self.inputs), False, mode)
        gaps = [torch.stack(together) for together in zip(*(mode.gaps for mode in modes))]
        # As far again as these runs go apart: sums of many terms move further.
        low, high = [g.amin(0) for g in gaps], [g.amax(0) for g in gaps]
        ties = [(2 * a <= b) & (2 * b >= a) for a, b in zip(low, high)]
        return (
            self.otherwise(copies(self.inputs), False, PerturbedResults(0, None, ties))
            if ties
            else None
        )

    def further(self) -> Iterator[tuple[Seen | None, bool]]:
        """`others`, and more such runs while they are asked for."""
        yield from self.others
        if not self.more:
            self.more.append((self.tied, False))
        for k in range(20 * PERTURBED_RUNS):
            if k == len(self.more):
                wide = k % 4 < 2  # `PerturbedResults` does what is odd with both
                self.more.append((self.perturbed(PERTURBED_RUNS + k, wide), wide))
            yield self.more[k]

    def like(self, seen: Seen | None, name: str) -> Tensor | None:
        """A value of another run, when it has the form of eager's."""
        e = self.eager.values[name]
        x = None if seen is None else seen.values.get(name)
        if not isinstance(x, Tensor) or x.shape != e.shape or x.layout != e.layout:
            return None
        same = x.dtype in (e.dtype, WIDE_DTYPES.get(e.dtype, e.dtype))
        return x.to(e.device) if same else None


__all__ = [
    "Oracle",
    "Seen",
    "copies",
    "observed",
    "see",
]
