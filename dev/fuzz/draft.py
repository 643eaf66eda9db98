"""What generators of one kind of program share: a program in the making.

Inputs and lines are added one by one; a line stays if eager takes it and its values stay in bounds.
Sizes are numbers; a program that is run with several sets of inputs gets other values in each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.oracle import copies
from dev.check.test_cases import Line, Straight, words
from dev.fuzz.programs import MAX_MAGNITUDE, InputSpec


class Refused(Exception):
    """A line that eager does not take, or whose values grow."""


@dataclass(frozen=True)
class Drawn:
    """A program; `fuzz_programs.Program` has the same attributes for those who run it."""

    seed: int
    inputs: dict[str, tuple[Tensor, ...]]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    backward: bool = False
    dynamic: bool = False
    imports: tuple[str, ...] = ()

    def straight(self, device: str = "cpu") -> Straight:
        """The program with its inputs, on a device."""

        def on(t: Tensor) -> Tensor:
            return t if device == "cpu" else copies([t], lambda s: s.to(device))[0]

        inputs = {n: tuple(map(on, ts)) for n, ts in self.inputs.items()}
        return Straight(inputs, self.lines, self.outputs, self.imports)


class Draft:
    """Inputs, lines, and what the variables are in eager. `names`: what lines may use beyond torch
    and F, and `imports` the statements that bring it."""

    def __init__(self, seed: int, imports: Sequence[str] = ()) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.imports = tuple(imports)
        self.inputs: dict[str, Tensor] = {}
        self.lines: list[Line] = []
        self.env: dict[str, Any] = {"torch": torch, "F": F}
        for text in self.imports:
            exec(text, self.env)
        torch.manual_seed(seed)

    def new_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        form: str = "dense",
        grad: bool = False,
        scale: float = 1.0,
    ) -> str:
        name = f"x{len(self.inputs)}"
        spec = InputSpec(name, tuple(shape), dtype, form)
        made = spec.make({}, self.seed * 97 + len(self.inputs))
        with torch.no_grad():
            if scale != 1.0:
                made.mul_(scale)
        self.env[name] = self.inputs[name] = made.requires_grad_(grad)
        return name

    def value(self, name: str) -> Tensor:
        tensor = self.env[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def add(self, text: str, finite: bool = True) -> str:
        """One more variable; raises `Refused`. Not `finite`: it may be infinite or large."""
        state = torch.random.get_rng_state()
        try:
            made = eval(text, self.env)
        except Exception:  # noqa: BLE001 - eager refuses it, so it is no part of a program
            torch.random.set_rng_state(state)
            raise Refused from None
        if finite and isinstance(made, Tensor) and not bounded(made):
            torch.random.set_rng_state(state)
            raise Refused
        name = f"v{len(self.lines)}"
        self.env[name] = made
        self.lines.append(Line(text, name))
        return name

    def finish(
        self,
        outputs: Sequence[str],
        backward: bool,
        sets: dict[str, tuple[Tensor, ...]] | None = None,
    ) -> Drawn:
        """The program, without lines and inputs that nothing needs. What has no target stays."""
        needed, lines = set(outputs), []
        for line in reversed(self.lines):
            if line.target is None or line.target in needed:
                needed |= words(line.text)
                lines.append(line)
        given = sets or {n: (t,) for n, t in self.inputs.items()}
        used = {n: ts for n, ts in given.items() if n in needed} or given
        return Drawn(
            self.seed,
            used,
            tuple(reversed(lines)),
            tuple(dict.fromkeys(outputs)),
            backward,
            imports=self.imports,
        )


def bounded(made: Tensor) -> bool:
    if made.numel() == 0 or made.dtype == torch.bool:
        return True
    known = made.detach().double()
    return bool(known.isfinite().all()) and float(known.abs().max()) < MAX_MAGNITUDE
