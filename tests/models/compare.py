"""A training step's numbers, and whether a compiled program's are as good as eager's.

Errors are root mean squares against a float64 run of the same weights and inputs, relative to the
tensor's own root mean square. Some gradients are zero but for rounding (a bias before a
normalisation); those are measured against the typical gradient of the model.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.models.zoo import Case, Inputs, Step, cast

Numbers = dict[str, Tensor]


def train_step(step: Step, inputs: Inputs, call: Callable[..., Tensor] | None = None) -> Numbers:
    """Loss, gradients of parameters and of the model's floating inputs, and buffers afterwards.

    `call` is what to run in place of `step` (its compiled form).
    """
    step.zero_grad(set_to_none=True)
    args = [
        t.detach().clone().requires_grad_(i < step.split and t.is_floating_point())
        for i, t in enumerate(inputs)
    ]
    loss = (step if call is None else call)(*args)
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, p in step.named_parameters():
        if p.grad is not None:
            numbers["grad " + name] = p.grad.detach().clone()
    for i, t in enumerate(args):
        if t.grad is not None:
            numbers[f"grad input {i}"] = t.grad.detach().clone()
    for name, b in step.named_buffers():
        if b.is_floating_point():
            numbers["buffer " + name] = b.detach().clone()
    return numbers


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


@dataclass(frozen=True)
class Errors:
    """Relative errors of a run against float64, per tensor."""

    of: dict[str, float]

    @staticmethod
    def against(reference: Numbers, got: Numbers) -> Errors:
        assert list(reference) == list(got), set(reference) ^ set(got)
        sizes = {name: rms(t) for name, t in reference.items()}
        grads = [s for name, s in sizes.items() if name.startswith("grad ")]
        typical = statistics.median(grads) if grads else 0.0
        out = {}
        for name, want in reference.items():
            have = got[name]
            assert have.shape == want.shape, (name, have.shape, want.shape)
            scale = max(sizes[name], 0.1 * typical if name.startswith("grad ") else 0.0, 1e-30)
            out[name] = rms(have.double().to(want.device) - want) / scale
        return Errors(out)

    @staticmethod
    def over(runs: list[Errors]) -> Errors:
        """Root mean squares over several runs: one run's rounding may be lucky."""
        return Errors(
            {n: math.sqrt(statistics.fmean(r.of[n] ** 2 for r in runs)) for n in runs[0].of}
        )

    def worst(self) -> float:
        return max(self.of.values(), default=0.0)


def failures(eager: Errors, got: Errors, dtype: torch.dtype, floor: float = 1e-6) -> list[str]:
    """Tensors whose error is more than twice eager's and more than one rounding of the dtype.

    The floor is 1e-6 where eager may be exact by chance; for half types, the rounding of the
    result itself.
    """
    floor = max(floor, torch.finfo(dtype).eps / 2)
    return [
        f"{name}: error {e:.2e}, eager's {eager.of[name]:.2e}"
        for name, e in got.of.items()
        if not e <= 2 * eager.of[name] + floor
    ]


@dataclass(frozen=True)
class Trial:
    """A case at one dtype and device: module, inputs, and its float64 numbers."""

    step: Step
    inputs: Inputs
    reference: Numbers
    dtype: torch.dtype

    @staticmethod
    def of(case: Case, dtype: torch.dtype, device: str, large: bool = False) -> Trial:
        step = case.step(large).to(device, dtype)
        inputs = cast(case.make_inputs(large), dtype, device)
        wide = copy.deepcopy(step).double()
        return Trial(step, inputs, train_step(wide, cast(inputs, torch.float64, device)), dtype)

    def errors(self, compiler: Callable[[nn.Module], Callable[..., Tensor]] | None) -> Errors:
        """Of a run from the same start; None runs eager."""
        step = copy.deepcopy(self.step)
        call = None if compiler is None else compiler(step)
        return Errors.against(self.reference, train_step(step, self.inputs, call))

    def errors_over_starts(
        self, compiler: Callable[[nn.Module], Callable[..., Tensor]], starts: int = 5
    ) -> tuple[Errors, Errors]:
        """Eager's and the compiled program's, over several starts (weights moved by 2 %)."""
        step = copy.deepcopy(self.step)
        call, start = compiler(step), copy.deepcopy(self.step.state_dict())
        eager, got = [], []
        for seed in range(starts):
            step.load_state_dict(start)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in step.parameters() if seed else ():
                    noise = torch.randn(p.shape, generator=generator).to(p)
                    p.add_(noise * 0.02 * p.double().square().mean().sqrt().to(p))
            wide, own = copy.deepcopy(step).double(), copy.deepcopy(step)
            inputs = tuple(t.double() if t.is_floating_point() else t for t in self.inputs)
            reference = train_step(wide, inputs)
            eager.append(Errors.against(reference, train_step(own, self.inputs)))
            got.append(Errors.against(reference, train_step(step, self.inputs, call)))
        return Errors.over(eager), Errors.over(got)
