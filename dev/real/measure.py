"""One model under eager, Inductor and Deuteron: right, how fast, how much memory.

In: what `build` made and a slot's settings. Out: fields of a row (see `report`).

Training hands every result a fixed gradient, so that no loss makes gradients vanish (the mean of a
norm's squares is constant). What counts as right: the error of each result, gradient and buffer
against a wider run, in the root of its summed squares, is at most twice eager's, plus
`ERROR_SLACK`. Where eager's error says nothing, it is taken for more (`as_expected`).
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from deuteron.base.record import Record
from deuteron.tools.measuring import collector_off, peak_bytes, synchronize
from dev.bench.cases import Program
from dev.bench.contenders import CONTENDERS, compiled, records
from dev.real.build import Built, Inputs, Unfit, broken

Row = dict[str, Any]
Values = dict[str, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Allowed beside twice eager's error: of float32 some units in the last place, as sums are taken in
# another order; of bf16 half a unit in the last place of what is stored.
ERROR_SLACK = {torch.float32: 2e-6, torch.bfloat16: 2e-3}
# A value is measured against this share of what values of the model are like, at least: gradients
# that cancel to nothing (of a bias before a norm, or of keys') are rounding in eager too, and right
# below it.
ERROR_FLOOR = 1e-3
# Elements of a value whose error is luck: that of a sum over everything is near 0 now and then, and
# of two such errors one is twice the other in three of ten cases.
FEW_ELEMENTS = 16
ROUNDS, MIN_ROUNDS = 40, 7
UNIT_S = {"cuda": 0.01, "cpu": 0.05}  # calls are timed together until they take so long
SLOWDOWN_LIMIT = {"cuda": 1.05, "cpu": 1.10}  # than the better of eager and Inductor: a failure


class Step:
    """A copy of the model under one compiler, and its step."""

    def __init__(self, name: str, built: Built, train: bool, wide: torch.dtype | None = None):
        self.name, self.train = name, train
        self.module = copy.deepcopy(built.module)
        self.inputs: Inputs = dict(built.inputs)
        if wide is not None:
            self.module = self.module.to(wide)
            self.inputs = cast(self.inputs, wide)
        self.device = next(iter(self.inputs.values())).device.type
        names = tuple(self.inputs)
        module = self.module

        def forward(*args: Tensor) -> Any:
            return module(**dict(zip(names, args)))

        self.call: Callable[..., Any] = forward
        contender = CONTENDERS[name]
        if contender.backend:
            self.call = compiled(contender, NO_PROGRAM, forward)
        self.gradients: list[Tensor] = []
        self.times: list[float] = []
        self.collected: list[Record] = []

    def outputs(self) -> list[Tensor]:
        leaves = tree_leaves(self.call(*self.inputs.values()))
        return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]

    def __call__(self) -> list[Tensor]:
        if not self.train:
            with torch.no_grad():
                return self.outputs()
        self.module.zero_grad(set_to_none=True)
        outs = self.outputs()
        ends = [t for t in outs if t.requires_grad]
        if len(self.gradients) != len(ends):
            self.gradients = [cotangent(t, k) for k, t in enumerate(ends)]
        torch.autograd.backward(ends, self.gradients)
        return outs

    def first(self) -> tuple[Values, float]:
        """What the first call computes; and how long it takes, in seconds."""
        start = time.perf_counter()
        with records(CONTENDERS[self.name]) as self.collected:
            outs = self()
        synchronize(self.device)
        took = time.perf_counter() - start
        values = {f"result {k}": t.detach().clone() for k, t in enumerate(outs)}
        if self.train:
            for n, p in self.module.named_parameters():
                if p.grad is not None:
                    values[f"gradient {n}"] = p.grad.clone()
        for n, b in self.module.named_buffers():
            if b.is_floating_point():
                values[f"buffer {n}"] = b.clone()
        return values, took

    def settle(self) -> None:
        """More calls, two at least, until one compiles nothing: what others changed (a cache that
        the model keeps) may make Dynamo compile again, up to its limit: not when time is taken."""
        with records(CONTENDERS[self.name]) as collected:
            self()
            for _ in range(config.recompile_limit):
                graphs = counters["stats"]["unique_graphs"]
                self()
                if counters["stats"]["unique_graphs"] == graphs:
                    break
        self.collected = [*self.collected, *collected]

    def timed(self, calls: int) -> float:
        """Seconds of a call, from start until the device is done, over `calls` in a row."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            self()
        synchronize(self.device)
        return (time.perf_counter() - start) / calls

    def peak_mb(self) -> float:
        self.module.zero_grad(set_to_none=True)
        return peak_bytes(self, self.device) / 1e6


def _nothing(*_: object) -> None:
    raise AssertionError("the module's own forward runs")


NO_PROGRAM = Program(_nothing, ())


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs.items()}


def cotangent(t: Tensor, seed: int) -> Tensor:
    """A fixed gradient of a result, the same in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    wave = torch.randint(-8, 9, t.shape, generator=generator).double() / 8
    return (wave / math.sqrt(max(1, t.numel()))).to(t.device, t.dtype)


def settled(built: Built, dtype: str, channels_last: bool) -> Built:
    """The model and its inputs in a slot's dtype and memory order."""
    module, inputs = built.module.to(DTYPES[dtype]), cast(built.inputs, DTYPES[dtype])
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = {
            k: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
            for k, t in inputs.items()
        }
    return Built(module, inputs, built.rung)


# -------------------------------------------------------------------------------------- errors
def reference(built: Built, train: bool) -> tuple[str, Values]:
    """A wider run of eager, and how wide; nothing where the model does not run so."""
    narrow = next(iter(built.module.parameters())).dtype
    for wide in (torch.float64, torch.float32):
        if wide == narrow:
            break
        try:
            return str(wide).removeprefix("torch."), Step("eager", built, train, wide).first()[0]
        except Exception as error:  # noqa: BLE001 - casts that the model has written out
            if broken(error):
                raise
    return "eager", {}


def errors(exact: Values, got: Values) -> dict[str, float]:
    """Of each value that the reference has: the root of summed squares of differences, over that of
    the reference."""
    floor = floors(exact)
    relative = {}
    for k, e in exact.items():
        if k not in got or got[k].shape != e.shape:
            relative[k] = math.inf
            continue
        off = norm(got[k].double() - e.double())
        relative[k] = off / max(norm(e), floor[k], 1e-30) if off == off else math.inf
    return relative


def floors(exact: Values) -> dict[str, float]:
    """What the root of a value's summed squares counts as at least."""
    usual = {}
    for kind in {k.partition(" ")[0] for k in exact}:
        these = [v for k, v in exact.items() if k.startswith(kind)]
        squares = sum(norm(v) ** 2 for v in these)
        usual[kind] = math.sqrt(squares / max(1, sum(v.numel() for v in these)))
    return {
        k: ERROR_FLOOR * usual[k.partition(" ")[0]] * math.sqrt(v.numel()) for k, v in exact.items()
    }


def as_expected(exact: Values, eager: dict[str, float]) -> dict[str, float]:
    """Eager's errors, but where they are luck: of a value of few elements at least the root of the
    mean of squares over all such of its kind; of a gradient that cancels to nothing what keeps the
    result below the floor."""
    expected, floor = dict(eager), floors(exact)
    for kind in {k.partition(" ")[0] for k in exact}:
        few = [k for k, v in exact.items() if k.startswith(kind) and v.numel() < FEW_ELEMENTS]
        mean = math.sqrt(sum(eager[k] ** 2 for k in few) / max(1, len(few)))
        expected |= {k: max(eager[k], mean) for k in few}
    grads = [k for k in exact if k.startswith("gradient")]
    nothing = [k for k in grads if norm(exact[k]) < ERROR_FLOOR * floor[k]]
    return expected | {k: max(expected[k], 0.5) for k in nothing}


def norm(t: Tensor) -> float:
    return float(t.double().square().sum().sqrt()) if t.numel() else 0.0


def wrong(mine: dict[str, float], eager: dict[str, float], dtype: torch.dtype) -> list[str]:
    """What is worse than it may be, worst first."""
    bad = []
    for k, e in eager.items():
        m = mine.get(k, math.inf)
        if not m <= 2 * e + ERROR_SLACK[dtype]:
            bad.append((m / (2 * e + ERROR_SLACK[dtype]), f"{k}: {m:.2e}, eager {e:.2e}"))
    return [text for _, text in sorted(bad, key=lambda b: -b[0])]


def nudged(built: Built) -> Built:
    """The same, with every other parameter one unit in the last place larger."""
    module = copy.deepcopy(built.module)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                larger = torch.nextafter(p, torch.full_like(p, math.inf))
                every_other = torch.arange(p.numel(), device=p.device).view(p.shape) % 2 == 0
                p.copy_(torch.where(every_other, larger, p))
    return Built(module, built.inputs, built.rung)


class Checked:
    """Eager, a wider run, and what they say of others."""

    def __init__(self, built: Built, train: bool) -> None:
        self.built, self.train = built, train
        self.nudged: dict[str, float] = {}  # errors of eager beside rounding, once asked for
        self.eager = Step("eager", built, train)
        self.dtype = next(iter(built.module.parameters())).dtype
        again = Step("eager", built, train)
        values, self.first_s = self.eager.first()
        check_fit(values)
        self.kind, exact = reference(built, train)
        self.exact = exact or values
        self.errors = errors(self.exact, values)
        repeat = errors(values, again.first()[0])
        if max(repeat.values(), default=0.0) > (1e-2 if self.dtype == torch.bfloat16 else 1e-4):
            raise Unfit("eager's results are random")
        if self.kind == "eager":  # eager is the only measure: what another order of sums may do
            usual = 2e-2 if self.dtype == torch.bfloat16 else 1e-5
            self.errors = dict.fromkeys(values, usual)
        elif not max(self.errors.values(), default=0.0) < 0.5:
            raise Unfit("eager's results are rounding only")

    def judge(self, values: Values) -> tuple[float, list[str]]:
        """The largest error, and what is wrong: also beside the errors of eager where every other
        parameter is a unit in the last place larger (a network whose activations jump there has
        errors a hundred times those of eager, in eager with another order of sums, too)."""
        relative = errors(self.exact, values)
        bad = wrong(relative, as_expected(self.exact, self.errors), self.dtype)
        if bad and not self.nudged:
            step = Step("eager", nudged(self.built), self.train)
            self.nudged = errors(self.exact, step.first()[0])
        if bad:
            larger = {k: max(e, self.nudged[k]) for k, e in self.errors.items()}
            bad = wrong(relative, as_expected(self.exact, larger), self.dtype)
        return max(relative.values(), default=0.0), bad


def check_fit(values: Values) -> None:
    """Raises where eager's values say nothing."""
    results = [v for k, v in values.items() if not k.startswith("buffer")]
    if not results:
        raise Unfit("no float results")
    if not all(bool(v.isfinite().all()) for v in results):
        raise Unfit("eager's results are not finite")


# --------------------------------------------------------------------------------------- times
def time_all(steps: Sequence[Step], seconds: float) -> Row:
    """Rounds over all steps, in another order each; the median of a step's times, ms. On a CPU
    the least stands beside it, since others may use the machine."""
    device = steps[0].device
    for s in steps:
        s.timed(2)
    guess = min(s.timed(1) for s in steps)
    calls = max(1, round(UNIT_S[device] / guess))
    begin, rounds, order = time.perf_counter(), 0, random.Random(0)
    with collector_off():
        while rounds < ROUNDS and (rounds < MIN_ROUNDS or time.perf_counter() - begin < seconds):
            for s in order.sample(list(steps), len(steps)):
                s.times.append(s.timed(calls))
            rounds += 1
    row: Row = {"rounds": rounds, "calls": calls}
    for s in steps:
        row[f"{s.name}_ms"] = round(statistics.median(s.times) * 1e3, 5)
        row[f"{s.name}_least_ms"] = round(min(s.times) * 1e3, 5)
        if device == "cuda":
            row[f"{s.name}_peak_mb"] = round(s.peak_mb(), 2)
    return row


def slower(row: Row, device: str) -> float:
    """Deuteron's time over the better of the others'; 0 where there is none. On a CPU the lesser
    of the ratios of medians and of least times, as a busy machine makes the other."""

    def ratio(what: str) -> float:
        others = [row[f"{n}{what}"] for n in ("eager", "inductor") if f"{n}{what}" in row]
        mine = row.get(f"deuteron{what}", 0.0)
        return mine / min(others) if others else 0.0

    kinds = ("_ms",) if device == "cuda" else ("_ms", "_least_ms")
    return min(map(ratio, kinds))


__all__ = ["Checked", "Step", "settled", "slower", "time_all"]
