"""How far a compiler's results are from float64, and whether that is too far.

In: what a call of the user's function computes, as `Values` (label -> tensor): under eager, in
float64, under a compiler. Out: numbers and sentences.

The *error* of a value is its largest difference from the float64 run over the largest magnitude
there. It may be twice eager's, plus half a unit in the last place. Eager's is the largest of
several runs whose inputs and parameters are moved by up to a unit in the last place: where rounding
decides (the side of a ReLU, gradients that cancel), one run of eager says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deuteron.tools.measuring import error_line
from deuteron.tools.target import Target

Values = dict[str, Tensor]
MOVED_RUNS = 3
# A value is measured against this share of the largest of its kind (results, gradients), at least:
# gradients that cancel to nothing are rounding in eager too.
FLOOR = 1e-3
# From this error of eager's on, the float64 run computes something else (it reads bits, say).
UNUSABLE = 0.5
# Of whole numbers, the share of elements that rounding may move (an argmax, a quantised value).
WHOLE_NUMBERS = 1e-3
WIDER_DTYPES = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class State:
    """The tensors that a call may change: arguments, parameters, buffers, and their values before
    any call."""

    def __init__(self, target: Target) -> None:
        self.tensors = target.named_tensors()
        self.before = {k: t.detach().clone() for k, t in self.tensors.items()}

    def changed(self) -> Values:
        """Those that have other values now. By value: not everything that writes to a tensor
        counts its version up."""
        return {k: t for k, t in self.tensors.items() if not same(t.detach(), self.before[k])}

    def restore(self) -> None:
        with torch.no_grad():
            for k, t in self.changed().items():
                t.detach().copy_(self.before[k])

    @contextmanager
    def replaced(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Other values, from `change`, in place of those before any call; what a call inside
        writes is gone afterwards."""
        self.restore()
        kept = {k: t.data for k, t in self.tensors.items()}
        try:
            for t in self.tensors.values():
                t.data = change(t.data)
            yield
        finally:
            for k, t in self.tensors.items():
                t.data = kept[k]


class InFloat64(TorchFunctionMode):
    """Where a program asks for a narrower float by name, it gets float64."""

    CASTS = dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.view:  # which reads bits
            args = [WIDER_DTYPES.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
            kwargs = {
                k: WIDER_DTYPES.get(v, v) if isinstance(v, torch.dtype) else v
                for k, v in (kwargs or {}).items()
            }
        return self.CASTS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def in_float64() -> Iterator[None]:
    """Programs compute in float64 here, given tensors of that dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(usual)


def widened(t: Tensor) -> Tensor:
    return t.to(WIDER_DTYPES.get(t.dtype, t.dtype), copy=True)


def moved(seed: int) -> Callable[[Tensor], Tensor]:
    """Moves every floating element by up to a unit in the last place."""

    def change(t: Tensor) -> Tensor:
        if t.dtype not in WIDER_DTYPES:
            return t.clone()
        generator = torch.Generator().manual_seed(seed)
        way = torch.randint(-1, 2, t.shape, generator=generator).to(t.device)
        return (widened(t) * (1 + torch.finfo(t.dtype).eps * way)).to(t.dtype)

    return change


def random_states() -> tuple[Tensor, ...]:
    """Of the generators that a program draws from by default."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)


class Judge:
    """What `eager` computed in its first call, more exact values, and what they say of others.

    `reference`: what errors are measured against, "float64" or "eager"; "" where the function draws
    random numbers, so that nothing is compared. `note` says why, where it is not float64.
    """

    def __init__(self, eager: Values, step: Callable[[], Values], state: State) -> None:
        self.eager, self.exact = eager, eager
        self.step, self.state = step, state
        self.reference, self.note = "float64", ""
        self.eager_error: float | None = None
        self.allowed: dict[str, float] = {}
        if self.random():
            self.reference = ""
            self.note = "the function draws random numbers, so results are not compared"
            return
        runs = [eager]
        for k in range(MOVED_RUNS):
            with state.replaced(moved(k)):
                runs.append(self.run())
        self.note = self.widen()
        if self.note:
            self.reference, self.exact = "eager", eager
        own = self.errors(eager)
        worst = {k: max(self.errors(r)[k] for r in runs) for k in own}
        self.eager_error = max(own.values(), default=0.0) if not self.note else None
        self.allowed = {k: 2 * e + slack(eager[k].dtype) for k, e in worst.items()}

    def run(self) -> Values:
        """A call under eager: what its first one has shown."""
        torch.manual_seed(0)
        values = self.step()
        written = {k: t for k, t in self.state.tensors.items() if afterwards(k) in self.eager}
        return values | {afterwards(k): t.detach().clone() for k, t in written.items()}

    def random(self) -> bool:
        """Whether random numbers decide results."""
        self.state.restore()
        torch.manual_seed(1)
        before = random_states()
        again = self.step()
        drawn = not all(map(torch.equal, before, random_states()))
        return drawn and any(not same(v, self.eager[k]) for k, v in again.items())

    def widen(self) -> str:
        """Runs the function in float64; why that is no measure, or ""."""
        try:
            with self.state.replaced(widened), in_float64():
                exact = self.run()
        except Exception as error:  # noqa: BLE001 - whatever keeps it from running in float64
            return f"the function does not run in float64: {error_line(error)}"
        if {k: v.shape for k, v in exact.items()} != {k: v.shape for k, v in self.eager.items()}:
            return "in float64 the function has other results"
        self.exact = exact
        if max(self.errors(self.eager).values(), default=0.0) > UNUSABLE:
            return "in float64 the function computes something else"
        return ""

    def errors(self, values: Values) -> dict[str, float]:
        """Of each value that eager has."""
        largest = {k: magnitude(v) for k, v in self.exact.items()}
        usual: dict[str, float] = {}
        for k, m in largest.items():
            usual[k.split()[0]] = max(usual.get(k.split()[0], 0.0), m)
        return {
            k: error(e, values.get(k), self.eager[k], max(largest[k], FLOOR * usual[k.split()[0]]))
            for k, e in self.exact.items()
        }

    def of(self, values: Values) -> tuple[float | None, list[str]]:
        """The largest error, and which values are wrong, worst first."""
        if not self.reference:
            return None, []
        errors = self.errors(values)
        surplus = [k for k in values if k not in self.eager]
        problems = [(math.inf, f"{k}: eager has no such value") for k in surplus]
        for k, e in errors.items():
            given, wanted = values.get(k), self.eager[k]
            if given is None:
                problems.append((math.inf, f"{k} is missing"))
            elif (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
                problems.append((math.inf, f"{k} is {form(given)} instead of {form(wanted)}"))
            elif not e <= self.allowed[k]:
                bound = self.allowed[k]
                problems.append((e / bound, f"{k} is off by {e:.1e}; at most {bound:.1e} is right"))
        worst = max(errors.values(), default=0.0)
        return worst, [text for _, text in sorted(problems, key=lambda p: -p[0])]


def afterwards(name: str) -> str:
    """The label of what a call leaves in a tensor that it writes to."""
    return f"{name} after the call"


def form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def fractional(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def slack(dtype: torch.dtype) -> float:
    """What is allowed beside twice eager's error."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return WHOLE_NUMBERS
    return 1e-6 + torch.finfo(dtype).eps / 2


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(equal(a, b).all())


def equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def numbers(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def magnitude(t: Tensor) -> float:
    """The largest finite one; 0 of whole numbers."""
    if not fractional(t):
        return 0.0
    size = numbers(t).abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0


def error(exact: Tensor, got: Tensor | None, eager: Tensor, scale: float) -> float:
    """The largest difference over `scale`; of whole numbers the share of elements that differ.
    Where float64 or eager has no number, the value is eager's."""
    if got is None or got.shape != exact.shape:
        return math.inf
    if not fractional(exact):
        return float((got != exact).double().mean()) if got.numel() else 0.0
    x, y, z = numbers(got), numbers(exact), numbers(eager)
    finite = y.isfinite() & z.isfinite()
    if not bool(equal(x, z)[~finite].all()):
        return math.inf
    off = (x - y).abs()[finite]
    if not bool(off.isfinite().all()):
        return math.inf
    return float(off.max()) / (scale or 1.0) if off.numel() else 0.0
