"""Random programs: generated line by line, each line tried in eager before it is kept.

In: a seed. Out: a `Program`: lines of Python, inputs of several sizes. The same seed gives the same
program. The text says what a user would write; the generator knows of an operation only what its
row in `fuzz_rows` says, and whether eager takes it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.oracle import copies
from dev.check.test_cases import Line, Straight, extent, words
from dev.fuzz.blocks import BLOCKS, mutated
from dev.fuzz.rows import ROWS

SIZES = (2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 33)
ODD_SIZES = (0, 1, 64, 67, 129)
MAX_ELEMENTS = 6000  # of a value: a program's cost is its compilation
MAX_AXES = 5
MOST_STRIDED = 3  # elements that a row with ``as_strided`` reaches over
MOST_UNBOUND = 64  # tensors that a row with ``unbind`` makes
MAX_MAGNITUDE = 1e5  # values that grow beyond are not kept: programs of inf and nan show nothing
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8)


@dataclass(frozen=True)
class InputSpec:
    """`axes`: letters of sizes, or numbers. `form`: how it lies in memory."""

    name: str
    axes: tuple[str | int, ...]
    dtype: torch.dtype
    form: str = "dense"
    grad: bool = False
    special: bool = False  # with inf and nan among its values

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[a] if isinstance(a, str) else a for a in self.axes)

    def make(self, sizes: dict[str, int], seed: int) -> Tensor:
        """Values are multiples of 1/32 in the float types that have few: sums are then exact in
        none and close in all."""
        shape = self.shape(sizes)
        g = torch.Generator().manual_seed(seed)
        order = list(range(len(shape)))
        if self.form == "permuted":
            order.reverse()
        stored = [shape[k] for k in order]
        if self.form == "stepped" and stored:
            stored[-1] = 2 * stored[-1] + 1
        if self.form == "expanded" and stored:
            stored[0] = min(1, stored[0])
        t = values(tuple(stored), self.dtype, g, self.special)
        if self.form == "stepped" and stored:
            t = t[..., 1::2]
        if self.form == "expanded" and stored:
            t = t.expand(shape)
        if self.form == "permuted":
            t = t.permute([order.index(k) for k in range(len(shape))])
        if self.form == "channels_last" and len(shape) > 2:  # also of one dimension of space
            t = t.movedim(1, -1).contiguous().movedim(-1, 1)
        return t.requires_grad_(self.grad)


def values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, special: bool) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -9
        return torch.randint(low, 17, shape, generator=g).to(dtype)
    out = torch.randn(shape, generator=g, dtype=torch.float64)
    if special and out.numel():
        where = torch.rand(shape, generator=g)
        for k, v in enumerate((float("inf"), float("-inf"), float("nan"), 0.0, -0.0)):
            out = out.masked_fill((where >= 0.04 * k) & (where < 0.04 * (k + 1)), v)
    return out.to(dtype)


@dataclass(frozen=True)
class Program:
    """Runs as ``fn(*inputs)``; `sizes` are the sizes it is run with, one after the other."""

    seed: int
    inputs: tuple[InputSpec, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    sizes: tuple[dict[str, int], ...]
    backward: bool
    dynamic: bool
    random: bool = False

    def straight(self, device: str = "cpu") -> Straight:
        """The program with its inputs, on a device."""

        def on(t: Tensor) -> Tensor:
            return t if device == "cpu" else copies([t], lambda s: s.to(device))[0]

        inputs = {
            s.name: tuple(on(s.make(z, self.seed * 97 + int(s.name[1:]))) for z in self.sizes)
            for s in self.inputs
        }
        return Straight(inputs, self.lines, self.outputs)


class Refused(Exception):
    """A row that no variable fits, or that eager does not take."""


class Generator:
    """The program so far, and what its variables are in eager."""

    def __init__(self, seed: int, most_lines: int = 40) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        rng = self.rng
        self.backward = rng.random() < 0.45
        self.dynamic = rng.random() < 0.35
        self.length = rng.randint(3, most_lines) if rng.random() < 0.5 else rng.randint(3, 12)
        self.dtype = rng.choices(FLOAT_DTYPES, (0.7, 0.08, 0.14, 0.08))[0]
        self.special = rng.random() < 0.06
        self.sizes = {a: rng.choice(SIZES) for a in "ABC"}
        if rng.random() < 0.25:
            self.sizes[rng.choice("ABC")] = rng.choice(ODD_SIZES)
        self.inputs: list[InputSpec] = []
        self.lines: list[Line] = []
        self.env: dict[str, Any] = {"torch": torch, "F": F}
        self.random = False
        self.read: set[str] = set()
        torch.manual_seed(seed)
        for _ in range(rng.randint(1, 3)):
            self.new_input(self.dtype)

    # -- variables --------------------------------------------------------------------------------
    def new_input(self, dtype: torch.dtype, axes: Sequence[str | int] | None = None) -> str:
        rng = self.rng
        if axes is None:
            count = rng.choices((0, 1, 2, 3, 4), (0.5, 2, 5, 3, 0.7))[0]
            axes = [rng.choice("ABC") if rng.random() < 0.9 else 1 for _ in range(count)]
        while self.elements(axes) > MAX_ELEMENTS:
            axes = axes[1:]
        form = rng.choices(("dense", "permuted", "stepped", "expanded"), (8, 1, 1, 0.4))[0]
        grad = self.backward and dtype.is_floating_point and rng.random() < 0.8
        if grad and form == "expanded":
            form = "dense"
        name = f"x{len(self.inputs)}"
        spec = InputSpec(name, tuple(axes), dtype, form, grad, self.special)
        self.inputs.append(spec)
        self.env[name] = spec.make(self.sizes, self.seed * 97 + len(self.inputs) - 1)
        return name

    def elements(self, axes: Sequence[str | int]) -> int:
        n = 1
        for a in axes:
            n *= self.sizes[a] if isinstance(a, str) else a
        return n

    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.env.items() if isinstance(v, Tensor)}

    def pick(self, kind: str) -> str:
        """A variable of a class; later and unread ones more often: programs are deep, and little of
        them is dead."""
        fits = [k for k, v in self.tensors().items() if is_kind(v, kind)]
        make = {"f": self.dtype, "i": torch.int64, "b": torch.bool}.get(kind, self.dtype)
        if not fits or (len(self.inputs) < 6 and self.rng.random() < 0.06):
            return self.new_input(make)
        weights = [
            (1.0 + 2.0 * k / len(fits)) * (1.0 if n in self.read else 3.0)
            for k, n in enumerate(fits)
        ]
        return self.rng.choices(fits, weights)[0]

    def partner(self, x: str, fits: Any, dtype: torch.dtype) -> str:
        """Another operand: a variable that fits, or a new input of x's sizes."""
        known = [k for k, v in self.tensors().items() if fits(v)]
        if known and self.rng.random() < 0.85:
            return self.rng.choice(known)
        axes = [self.letter(n) for n in self.env[x].shape]
        if self.rng.random() < 0.3:
            axes = [a if self.rng.random() < 0.6 else 1 for a in axes]
        if len(self.inputs) >= 8:
            raise Refused
        return self.new_input(dtype, axes)

    def letter(self, n: int) -> str | int:
        same = [a for a, k in self.sizes.items() if k == n]
        return same[0] if same else n

    # -- rows -------------------------------------------------------------------------------------
    def fill(self, kind: str, text: str) -> str:
        """The row's text with variables and numbers in its fields."""
        x = self.pick(kind)
        t = self.env[x]
        if "as_strided" in text and extent(t) < MOST_STRIDED:
            raise Refused  # eager may read on where a kernel left its working memory
        if "unbind" in text and max(t.shape, default=0) > MOST_UNBOUND:
            raise Refused  # Dynamo takes minutes for thousands of tensors
        if "scaled_dot_product_attention" in text and t.numel() == 0:
            raise Refused  # torch 2.11 divides by the number of heads on CPUs: the process ends
        rng = self.rng
        out = text
        while "{" in out:
            start = out.index("{")
            end = out.index("}", start)
            name = out[start + 1 : end]
            if name == "x":
                value = x
            elif name in ("d", "e"):
                if t.dim() == 0:
                    raise Refused
                value = str(rng.randrange(-t.dim(), t.dim()))
            elif name == "v":
                value = str(rng.randint(0, t.dim()))
            elif name == "ds":
                if t.dim() == 0:
                    raise Refused
                some = rng.sample(range(t.dim()), rng.randint(1, t.dim()))
                value = str(tuple(some))
            elif name == "o":
                value = str(tuple(rng.sample(range(t.dim()), t.dim())))
            else:
                value = self.field(name, x, t)
            out = out.replace("{x}", x, 1) if name == "x" else out[:start] + value + out[end + 1 :]
        return out

    def field(self, name: str, x: str, t: Tensor) -> str:
        rng = self.rng
        if name == "k":
            return str(rng.random() < 0.5)
        if name == "c":
            return str(rng.choice((-2, -1, 0, 1, 2, 3, 0.5, -0.25, 1.5)))
        if name == "p":
            return str(rng.choice((0.5, 1.0, 2.0, 3.0)))
        if name == "n":
            return str(rng.choice((0, 1, 2, 3, 5)))
        if name == "dt":
            return str(rng.choice((*FLOAT_DTYPES, torch.float32, torch.int64, torch.int32)))
        if name == "i":
            return self.pick("i")
        if name in ("y", "z"):
            return self.partner(x, lambda v: is_kind(v, "n") and broadcasts(v, t), self.dtype)
        if name == "b":
            return self.partner(x, lambda v: is_kind(v, "b") and broadcasts(v, t), torch.bool)
        if name in ("fy", "same"):
            return self.partner(x, lambda v: v.dtype == t.dtype and v.shape == t.shape, t.dtype)
        if name == "m":
            if t.dim() == 0:
                raise Refused

            def fits(v: Tensor) -> bool:
                return v.dtype == t.dtype and v.dim() == 2 and v.shape[0] == t.shape[-1]

            known = [k for k, v in self.tensors().items() if fits(v)]
            if known:
                return rng.choice(known)
            return self.new_input(t.dtype, [self.letter(t.shape[-1]), rng.choice("ABC")])
        raise AssertionError(f"no field {name}")

    def step(self) -> None:
        """One more line, if eager takes it."""
        groups = list(ROWS)
        group = self.rng.choices(groups, [ROWS[g][0] for g in groups])[0]
        kind, text = self.rng.choice(ROWS[group][1])
        inputs = len(self.inputs)
        try:
            self.add(self.fill(kind, text), group == "mutations")
        except Refused:
            self.drop_inputs(inputs)
            return
        self.random |= group == "random"

    def drop_inputs(self, count: int) -> None:
        for s in self.inputs[count:]:
            del self.env[s.name]
        del self.inputs[count:]

    def add(self, text: str, mutates: bool = False) -> str | None:
        """Runs a line; keeps it where eager takes it and its values stay in bounds."""
        target = None if mutates else f"v{len(self.lines)}"
        before = torch.random.get_rng_state()
        if mutates:
            self.mutate(text)
        else:
            try:
                value = eval(text, self.env)
            except Exception:  # noqa: BLE001 - eager refuses it, so it is no part of a program
                torch.random.set_rng_state(before)
                raise Refused from None
            if not acceptable(value, self.special):
                raise Refused
            self.env[str(target)] = value
        self.lines.append(Line(text, target))
        self.read |= words(text)
        return target

    def mutate(self, text: str) -> None:
        """A statement that writes. Where eager refuses it, or values grow, all runs again without
        it, because other variables may share the memory."""
        try:
            exec(text, self.env)
            good = all(acceptable(v, self.special) for v in self.tensors().values())
        except Exception:  # noqa: BLE001 - eager refuses it
            good = False
        if not good:
            self.replay()
            raise Refused

    def replay(self) -> None:
        self.env = {"torch": torch, "F": F}
        torch.manual_seed(self.seed)
        for k, s in enumerate(self.inputs):
            self.env[s.name] = s.make(self.sizes, self.seed * 97 + k)
        for line in self.lines:
            exec(str(line), self.env)

    # -- the program ------------------------------------------------------------------------------
    def generate(self) -> Program:
        if self.rng.random() < 0.2:
            self.block()
        tries = 0
        while len(self.lines) < self.length and tries < 12 * self.length:
            tries += 1
            self.step()
        made = [x.target for x in self.lines if x.target is not None]
        made = [n for n in made if isinstance(self.env.get(n), Tensor)]
        ends = [n for n in made if n not in self.read]
        results = self.rng.sample(ends, min(len(ends), self.rng.choice((1, 2, 4, 8))))
        results += self.rng.sample(made, min(len(made), self.rng.choice((0, 0, 0, 1, 2))))
        outputs = tuple(dict.fromkeys([*results, *made[-1:]])) or (self.inputs[0].name,)
        sizes = [dict(self.sizes)]
        if self.dynamic:
            for _ in range(2):
                other = dict(self.sizes)
                for a in other:
                    if self.rng.random() < 0.6:
                        pool = SIZES if self.rng.random() < 0.7 else (1, 2, 3, 64)
                        other[a] = self.rng.choice(pool)
                sizes.append(other)
        return tidy(
            Program(
                self.seed,
                tuple(self.inputs),
                tuple(self.lines),
                outputs,
                tuple(sizes),
                self.backward,
                self.dynamic,
                self.random,
            )
        )

    def block(self) -> None:
        """A piece of a real model, with a few changes that eager takes."""
        inputs, lines = self.rng.choice(BLOCKS)
        count = len(self.lines)
        names: dict[str, str] = {}
        for name, axes in inputs.items():
            if len(self.inputs) < 10:
                names[name] = self.new_input(
                    torch.int64 if name.startswith("i") else self.dtype, list(axes)
                )
        for target, text in lines:
            for attempt in (mutated(text, self.rng), text):
                try:
                    filled = attempt.format(**names)
                    mutates = target == ""
                    made = self.add(filled, mutates)
                except (Refused, KeyError):
                    continue
                if made is not None:
                    names[target] = made
                break
        self.length += len(self.lines) - count


def is_kind(v: Tensor, kind: str) -> bool:
    if kind == "a":
        return True
    if kind == "f":
        return v.dtype.is_floating_point
    if kind == "b":
        return v.dtype == torch.bool
    whole = v.dtype in INTEGER_DTYPES
    return whole or (kind == "n" and v.dtype.is_floating_point)


def broadcasts(a: Tensor, b: Tensor) -> bool:
    """To the shape of `b`, or to a shape not much larger."""
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return False
    return len(shape) <= MAX_AXES and shape.numel() <= MAX_ELEMENTS


def acceptable(value: Any, special: bool) -> bool:
    if not isinstance(value, Tensor):
        return False
    if value.numel() > MAX_ELEMENTS or value.dim() > MAX_AXES or value.dtype.is_complex:
        return False
    if value.numel() == 0 or value.dtype == torch.bool:
        return True
    known = value.detach().double()
    finite = known.isfinite()
    if not special and not bool(finite.all()):
        return False
    return bool(finite.any()) and float(known[finite].abs().max()) < MAX_MAGNITUDE


def tidy(p: Program) -> Program:
    """Without lines and inputs that nothing needs; what writes stays."""
    needed, lines = set(p.outputs), []
    for line in reversed(p.lines):
        if line.target is None or line.target in needed:
            needed |= words(line.text)
            lines.append(line)
    used = tuple(s for s in p.inputs if s.name in needed)
    return replace(p, inputs=used or p.inputs[:1], lines=tuple(reversed(lines)))


def program(seed: int, most_lines: int = 40) -> Program:
    """The program of a seed."""
    return Generator(seed, most_lines).generate()
