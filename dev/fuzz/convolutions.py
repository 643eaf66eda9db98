"""Random convolution networks: convolutions of every kind, norms, pools, concatenations, views of
what they make, linear layers; both memory orders; inference and training.

In: a seed. Out: a `Program` as those of `fuzz_programs`, of fixed sizes. Each line is tried in
eager before it is kept. A network ends in a classifier, in an image, or in both with views of it.
"""

# ruff: noqa: E501 - a line of a program is one line
from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.check.test_cases import Line
from dev.fuzz.programs import MAX_MAGNITUDE, InputSpec, Program, tidy

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CHANNELS = (3, 4, 8, 16, 16, 20, 32)
SPATIAL_SIZES = {1: (9, 12, 17, 32), 2: (5, 7, 8, 9, 12), 3: (4, 5, 6)}
MAX_ELEMENTS = 30_000  # of a value
MAX_GROWTH = 48  # channels of a value; a flattened one has more

# Lines for the current value {x}, an image [B, C, *space]; {n}: dimensions of space; {c}: channels.
ACTIVATIONS = (
    "F.relu({x})",
    "F.silu({x})",
    "F.gelu({x})",
    "F.leaky_relu({x}, 0.1)",
    "F.hardswish({x})",
    "{x}.clamp(0, 6)",
    "{x} / 2.0",
    "{x} * {x}.mean(dim=[{dims}], keepdim=True).sigmoid()",
)
POOLS = (
    "F.max_pool{n}d({x}, 2)",
    "F.max_pool{n}d({x}, 3, 2, 1)",
    "F.max_pool{n}d({x}, [3], [1], [1])",
    "F.max_pool{n}d({x}, 2, 2, 1, 2, True)",
    "F.max_pool{n}d({x}, 3, 2, 1, return_indices=True)[0]",
    "F.avg_pool{n}d({x}, 2)",
    "F.avg_pool{n}d({x}, 3, 2, 1, True, False)",
    "F.avg_pool{n}d({x}, [3], [1], [1])",
    "F.adaptive_avg_pool{n}d({x}, 2)",
    "F.adaptive_avg_pool{n}d({x}, 1)",
    "F.adaptive_max_pool{n}d({x}, 3)",
    "F.interpolate({x}, scale_factor=2.0)",
)
# What follows from an image in which elements have to lie as their positions say.
VIEWS = (
    "{x}.flatten(2).unflatten(2, {x}.shape[2:])",
    "{x}.view({x}.shape[0], -1).view_as({x})",
    "{x}.reshape(1, -1, *{x}.shape[2:]).view({x}.shape)",
    "{x}.view({x}.shape[0], 2, -1, *{x}.shape[2:]).transpose(1, 2).reshape({x}.shape)",
    "{x}.movedim(1, -1).contiguous().movedim(-1, 1)",
    "torch.cat({x}.chunk(2, 1)[::-1], 1)",
    "torch.cat({x}.split([1, {x}.shape[1] - 1], 1), 1)",
    "torch.stack({x}.unbind(-1), -1)",
    "{x}.as_strided({x}.shape, {x}.stride()) + 1",
    "{x}[..., ::2]",
    "{x}[:, 1:].clone()",
    "{x}.flip(-1)",
    "F.pad({x}, (1, 0))",
    "{x} + {x}.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]",
    "torch.where({x} > 0, {x}, {x}.transpose(-2, -1))",
    "{x}.contiguous() * 2",
    "{x}.to(memory_format=torch.{last})",
    "{x}.clone(memory_format=torch.contiguous_format)",
    "{x}.permute(1, 0, *range(2, {x}.dim())).flatten(1).softmax(-1).unflatten(1, ({x}.shape[0], *{x}.shape[2:])).transpose(0, 1)",
)
NORMS = (
    "F.batch_norm({x}, None, None, {g}, {b}, True)",
    "F.batch_norm({x}, {mean}, {var}, {g}, {b}, True, 0.25)",
    "F.batch_norm({x}, {mean}, {var}, {g}, {b}, False)",
    "F.instance_norm({x})",
    "F.instance_norm({x}, weight={g}, bias={b})",
    "F.group_norm({x}, 1, {g}, {b})",
    "F.group_norm({x}, {groups}, {g}, {b})",
    "F.layer_norm({x}, {x}.shape[1:])",
    "F.layer_norm({x}.movedim(1, -1), ({c},), {g}, {b}).movedim(-1, 1)",
    "F.local_response_norm({x}, 3)",
)
LAST_LINES = (
    "F.linear(torch.flatten({x}, 1), {w}, {b})",
    "F.linear({x}.view({x}.shape[0], -1), {w}, {b})",
    "F.linear({x}.reshape({x}.shape[0], -1), {w})",
)


class Refused(Exception):
    """A line that eager does not take, or whose values grow."""


class Network:
    """The network so far, and what its variables are in eager."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.rank = rng.choices((2, 1, 3), (8, 1.5, 1))[0]
        self.dtype = rng.choices(DTYPES, (0.7, 0.2, 0.1))[0]
        self.backward = rng.random() < 0.5
        self.inputs: list[InputSpec] = []
        self.lines: list[Line] = []
        self.images: list[str] = []
        self.env: dict[str, object] = {"torch": torch, "F": F}
        torch.manual_seed(seed)
        size = rng.choice(SPATIAL_SIZES[self.rank])
        sizes = [
            size if rng.random() < 0.6 else rng.choice(SPATIAL_SIZES[self.rank])
            for _ in range(self.rank)
        ]
        form = rng.choices(("dense", "channels_last", "stepped"), (4, 4, 1))[0]
        shape = (rng.choice((1, 2, 2, 4)), rng.choice(CHANNELS), *sizes)
        self.images.append(self.new_input(shape, form, rng.random() < 0.5))

    # -- variables --------------------------------------------------------------------------------
    def new_input(self, shape: tuple[int, ...], form: str = "dense", grad: bool = True) -> str:
        name = f"x{len(self.inputs)}"
        spec = InputSpec(name, shape, self.dtype, form, grad and self.backward)
        self.inputs.append(spec)
        self.env[name] = spec.make({}, self.seed * 97 + len(self.inputs) - 1)
        return name

    def value(self, name: str) -> Tensor:
        tensor = self.env[name]
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def image(self) -> str:
        return self.images[-1]

    def add(self, text: str, inputs: int) -> str:
        """One more line, if eager takes it; else the inputs beyond the first `inputs` go again."""
        state = torch.random.get_rng_state()
        written = {s.name: self.value(s.name).detach().clone() for s in self.inputs}
        try:
            made = eval(text, self.env)
            if not acceptable(made):
                raise Refused
        except Exception:  # noqa: BLE001 - eager refuses it, so it is no part of a network
            torch.random.set_rng_state(state)
            for name, before in written.items():
                with torch.no_grad():
                    self.value(name).copy_(before)
            for s in self.inputs[inputs:]:
                del self.env[s.name]
            del self.inputs[inputs:]
            raise Refused from None
        name = f"v{len(self.lines)}"
        self.env[name] = made
        self.lines.append(Line(text, name))
        return name

    # -- layers -----------------------------------------------------------------------------------
    def convolution(self) -> str:
        rng, x = self.rng, self.value(self.image)
        c, n = x.shape[1], self.rank
        kernel = rng.choice((1, 1, 2, 3, 3, 3, 5))
        stride, dilation = rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2))
        transposed = rng.random() < 0.15
        groups = rng.choice((1, 1, 1, 1, c, 2, 4))
        out = c * rng.choice((1, 2)) if groups == c else rng.choice(CHANNELS)
        if c % groups or out % groups:
            groups = 1
        shape = (c, out // groups) if transposed else (out, c // groups)
        form = rng.choices(("dense", "channels_last"), (4, 1))[0]
        w = self.new_input((*shape, *[kernel] * n), form)
        scale = (shape[1] * kernel**n) ** 0.5
        weight = f"{w} / {scale:.3g}"
        if rng.random() < 0.15:  # standardised
            weight = f"F.batch_norm({w}.reshape(1, {shape[0]}, -1), None, None, training=True).reshape_as({w})"
        bias = self.new_input((out,)) if rng.random() < 0.6 else None
        padding = rng.choice((0, kernel // 2, 1))
        lists = [f"[{k}]" if rng.random() < 0.2 else str(k) for k in (stride, padding, dilation)]
        if transposed:
            given = f"{bias}, {lists[0]}, {lists[1]}, {stride - 1}, {groups}, {lists[2]}"
            return f"F.conv_transpose{n}d({self.image}, {weight}, {given})"
        return f"F.conv{n}d({self.image}, {weight}, {bias}, {', '.join(lists)}, {groups})"

    def norm(self) -> str:
        c, rng = self.value(self.image).shape[1], self.rng
        text = rng.choice(NORMS)
        made = {k: self.new_input((c,)) for k in ("g", "b") if "{" + k + "}" in text}
        if "{mean}" in text:
            made["mean"] = self.new_input((c,), grad=False)
            made["var"] = self.new_input((c,), grad=False)
            if "True" not in text:
                text = text.replace("{var}", "{var}.square() + 0.5")
        return text.format(x=self.image, c=c, groups=2 if c % 2 == 0 else c, **made)

    def pointwise(self) -> str:
        dims = ", ".join(str(2 + k) for k in range(self.rank))
        return self.rng.choice(ACTIVATIONS).format(x=self.image, dims=dims)

    def pool(self) -> str:
        return self.rng.choice(POOLS).format(x=self.image, n=self.rank)

    def view(self) -> str:
        last = "channels_last_3d" if self.rank == 3 else "channels_last"
        return self.rng.choice(VIEWS).format(x=self.image, last=last)

    def joined(self) -> str:
        """With an earlier image of the same sizes in space, or the same sizes."""
        x = self.value(self.image)
        others = [n for n in self.images[:-1] if self.value(n).shape[2:] == x.shape[2:]]
        if not others:
            raise Refused
        other = self.rng.choice(others)
        if self.value(other).shape == x.shape and self.rng.random() < 0.5:
            return f"{self.image} + {other}"
        return f"torch.cat([{self.image}, {other}], 1)"

    def end(self) -> str:
        x = self.value(self.image)
        features = x[0].numel() if x.shape[0] else 0
        w, b = self.new_input((7, features)), self.new_input((7,))
        return self.rng.choice(LAST_LINES).format(
            x=self.image, w=f"({w} / {features**0.5:.3g})", b=b
        )

    # -- the network ------------------------------------------------------------------------------
    def step(self, layer: Callable[[], str]) -> None:
        inputs = len(self.inputs)
        try:
            name = self.add(layer(), inputs)
        except Refused:
            return
        shape = self.value(name).shape
        if len(shape) == self.rank + 2 and 0 < shape[1] <= MAX_GROWTH and min(shape[2:]) > 0:
            self.images.append(name)

    def generate(self) -> Program:
        rng = self.rng
        layers = {
            self.convolution: 5,
            self.norm: 3,
            self.pointwise: 3,
            self.pool: 2,
            self.view: 2.5,
            self.joined: 2,
        }
        self.step(self.convolution)
        for layer in rng.choices(list(layers), list(layers.values()), k=rng.randint(3, 12)):
            self.step(layer)
        outputs = [self.image]
        if rng.random() < 0.6:
            self.step(self.end)
            outputs = [self.lines[-1].target or self.image]
        if rng.random() < 0.25:  # images, and views of them
            text = rng.choice(
                ("{x}.flatten(1)", "{x}[:, 0]", "{x}.transpose(1, -1)", "{x}.detach()")
            )
            self.step(lambda: text.format(x=self.image))
            outputs += [self.image, self.lines[-1].target or self.image]
        if len(self.images) > 2 and rng.random() < 0.3:
            outputs.append(rng.choice(self.images[1:]))
        return tidy(
            Program(
                self.seed,
                tuple(self.inputs),
                tuple(self.lines),
                tuple(dict.fromkeys(outputs)),
                ({},),
                self.backward,
                dynamic=False,
            )
        )


def acceptable(made: object) -> bool:
    if not isinstance(made, Tensor) or made.numel() > MAX_ELEMENTS or not made.numel():
        return False
    known = made.detach().double()
    return bool(known.isfinite().all()) and float(known.abs().max()) < MAX_MAGNITUDE


def network(seed: int) -> Program:
    """The network of a seed."""
    return Network(seed).generate()


__all__ = ["network"]
