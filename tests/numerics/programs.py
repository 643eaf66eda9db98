"""Programs whose values are compared with eager's bit by bit, the signs of zeros included: groups
of functions that are compiled as one. Run as a script, under Triton's interpreter, it prints one
line of JSON for each group."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Function = Callable[..., Any]
Group = tuple[list[Function], tuple[Tensor, ...]]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EDGES = [0.0, -0.0, 1.0, -1.0, 0.75, -2.5, 3.5, -7.25, 1e-7, -1e-7, 60000.0, math.inf, -math.inf]
EDGES += [math.nan]
WHOLE = [0, 1, -1, 2, -3, 7, 2**31, -(2**31), 2**53 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63)]
FACTOR = 2862933555777941757


def pairs(values: list[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a = torch.tensor(values, dtype=torch.int64 if type(values[0]) is int else torch.float64)
    a = a.to(dtype)
    return a.repeat_interleave(len(a)).clone(), a.repeat(len(a)).clone()


def steps(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(n, dtype=dtype)


def next_to(a: Tensor, b: Tensor) -> list[Tensor]:
    up = torch.full_like(a, math.inf)
    return [torch.nextafter(a, b), torch.nextafter(a, up) - a, torch.nextafter(a, -up)]


def zeros_of_sums(a: Tensor, b: Tensor) -> list[Tensor]:
    out = [a + 0, a + 0.0, a + -0.0, a - 0, a - -0.0, 0 - a, a * -1, a * 1, a / 1, a / -1.0]
    out += [-(a - b), b - a, -(a + b), -a - b, a - a, -0.0 + a, torch.rsub(a, 0), (-a).neg()]
    return [*out, torch.add(a, b, alpha=-1), torch.sub(a, b, alpha=-1), a + b * -1.0]


def zeros_of_products(a: Tensor, b: Tensor) -> list[Tensor]:
    out = [-(a * b), (-a) * b, a / b, -a / b, a * 0.0, a / -0.0, torch.full_like(a, -0.0) / b]
    out += [torch.copysign(a, b), torch.copysign(b, -0.0), torch.signbit(-b.nan_to_num())]
    out += [torch.atan2(a.nan_to_num() * 0, b.nan_to_num()).signbit(), torch.where(a > 0, b, -0.0)]
    out += [a.masked_fill(a == 0, -0.0)]
    return [*out, torch.fmod(a, 2.0), torch.remainder(a, -2.0), a.round(), a.trunc(), a.ceil()]


GROUPS: dict[str, Group] = {
    "bits of constants": (
        [
            lambda x: torch.ones(6).view(torch.int32) + 1 + x,
            lambda x: torch.full((3,), 2.5, dtype=torch.float64).view(torch.int32) // 3 + x,
            lambda x: (torch.zeros(6, dtype=torch.int32) + 1065353216).view(torch.float32) * 2,
            lambda x: torch.ones(12, dtype=torch.uint8).view(torch.int16) * 2 + x,
            lambda x: torch.arange(6, dtype=torch.float32).view(torch.int32) - x,
            lambda x: torch.full((6,), -0.0).view(torch.int32) + x,
            lambda x: (x.float() + 1.5).view(torch.int32) * 2,
        ],
        (steps(6, torch.int32),),
    ),
    "numbers for tensors": (
        [
            torch.vmap(lambda x: (x * 3, 2 - x, x / 3, x > 0.5, torch.where(x > 0, 1.0, x))),
            torch.vmap(torch.func.grad(lambda r: 0.25 * (r * r).sum())),
            torch.vmap(lambda x: (x.masked_fill(x > 0, 2), x.clone().fill_(4), x.clamp(0.1))),
            lambda x: [x.clone().copy_(n) for n in (1.5, 2, True)],
            lambda x: x.clone()[:, 1:].copy_(2.5),
            lambda x: torch.func.vjp(lambda y: y * 2.5 + 1, x)[1](x)[0],
            lambda x: torch.func.jacrev(lambda y: y * 3)(x[0]),
            lambda x: [torch.where(x > 0, a, b) for a in (1.0, x) for b in (2, x)],
            lambda x: [torch.add(2, x), torch.sub(2, x), torch.mul(2.5, x), torch.div(2, x)],
        ],
        (torch.linspace(-2, 2, 15).view(3, 5),),
    ),
    "numbers among integers": (
        [
            lambda x: [torch.bucketize(n, x) for n in (2.5, 2, 3.0, -1.5)],
            lambda x: [torch.searchsorted(x, n, right=True) for n in (2.5, 2, 3.0)],
            lambda x: torch.bucketize(torch.tensor([0.5, 2.0, 7.5]), x),
            lambda x: [x > 2.5, x == 2.5, x <= 2.999999999, x != 3.0, x < 300, x >= -1],
            lambda x: [x.clamp(1.5, 3.5), x.clamp(max=2.7), torch.clamp_min(x, 1.5)],
            lambda x: [x // 2.5, x % 2.5, x // 2, torch.div(x, 2.5, rounding_mode="trunc")],
            lambda x: [x**2, x**2.0, x**0, x**7, x * 2.5, x + 2**40],
        ],
        (torch.tensor([1, 2, 3, 5, 8]),),
    ),
    "whole numbers and floats": (
        [
            lambda x: [x == 2.0**53, x == 2**53 + 1, x > 2.0**53, x < 2.0**63, x == math.nan],
            lambda x: [op(x, x.float()) for op in (torch.eq, torch.gt, torch.add, torch.maximum)],
            lambda x: [op(x, x.double()) for op in (torch.eq, torch.lt, torch.sub, torch.minimum)],
            lambda x: [x.int(), x.short(), x.to(torch.uint8), x.bool(), x.float(), x.bfloat16()],
            lambda x: [torch.isclose(x, x + 1), torch.where(x > 0, x, 0.5)],
        ],
        (torch.tensor(WHOLE),),
    ),
    "half types among others": (
        [
            lambda a, b, n: [n == a, n > a, n <= b, n + a, n * b, torch.maximum(n, a)],
            lambda a, b, n: [a == 0.1, a > 0.1, a < 0.1, a == 2049, b == 0.1, b > 257, b <= 0.1],
            lambda a, b, n: [a == a.float(), a < b, a + b, torch.maximum(a, b)],
            lambda a, b, n: [torch.fmod(a, 0.31), b % 0.31, a // 0.31, 2.5037 // b],
        ],
        (
            torch.tensor([2048, 0.1, 3.0, 5.0]).half(),
            torch.tensor([256, 0.1, 3.0, 5.0]).bfloat16(),
            torch.tensor([2049, 257, 3, 4097]),
        ),
    ),
    "integers that wrap around": (
        [
            lambda x: [steps(7) * FACTOR % 1000 + x, steps(7) * FACTOR // 7 + x],
            lambda x: [(x * FACTOR) % 1000, (x * FACTOR + 1) >> 33, x * FACTOR < 0],
            lambda x: [steps(7) * FACTOR < 0, steps(7) + (2**63 - 3) < 0, steps(7) * 2**62 * 4 + x],
            lambda x: torch.where(steps(7) * FACTOR > 10, 1, 2) + x,
            lambda x: ((steps(7) + 2**32) * (steps(7) + 2**32)) // 3 + x,
            lambda x: [(steps(7) << 62) // 3 + x, (x + 1) << 63, -(steps(7) - 2**63) // 3],
            lambda x: [(steps(7) - 2**63).abs() // 5, torch.arange(2**63 - 8, 2**63 - 1) // 3],
            lambda x: torch.arange(-(2**63), -(2**63) + 7) % 7 + x,
            lambda x: (steps(7, torch.int32) * 1103515245 + 12345) % 1000 + x,
            lambda x: (x * 1.5)[(steps(7) * FACTOR) % 7],
            lambda x: (x * 1.5)[((steps(7) * FACTOR) >> 3) % 7],
            lambda x: [(steps(7) * FACTOR).int() // 7, (steps(7) * FACTOR).to(torch.int8) + x],
            lambda x: [(x * FACTOR).cumsum(0), (x + 2**20).cumprod(0), (x + 2**62).sum()],
            lambda x: [torch.full((7,), 2**62) * 4 + x, torch.full((7,), 2**63 - 1) + 1 + x],
        ],
        (steps(7),),
    ),
    "large positions as numbers": (
        [
            lambda x: [steps(50000) * 50000 + x, steps(50000) * 50000 // 7 + x],
            lambda x: steps(50000, torch.int32) * 50000 + x.int(),
            lambda x: (steps(50000) * 2**33 > 2**40) & (x == 0),
        ],
        (torch.zeros(50000, dtype=torch.int64),),
    ),
    "bytes": (
        [
            lambda x: [x + 200, x - 1, x * 3, -x, ~x, x // 3, x % 7, x << 1, x >> 1, x ^ 255],
            lambda x: [x + (-1), x * -1, x == -1, x.to(torch.int8) // 5, x.sum(), x.cumsum(0)],
            lambda x: [x.to(torch.int8).sum(dtype=torch.int8), x.bool() + x.bool(), ~x.bool()],
        ],
        (steps(256).to(torch.uint8),),
    ),
    "arithmetic of edges": (
        [
            lambda a, b: [a + b, a - b, a * b, a & b, a ^ b, -a, ~a, a.abs(), a.sign(), a > b],
            lambda a, b: [a << b, a >> b, a << 3, a >> 63, torch.maximum(a, b), a == b],
            lambda a, b: [(a + b) // 3, (a * b) % 11, (a - b) < 0, a.int() * b.int()],
        ],
        pairs(WHOLE, torch.int64),
    ),
    "running products of zeros": (
        [lambda x: x.cumprod(0), lambda x: x.flip(0).cumprod(0), lambda x: (x * 0).cumprod(0)],
        ((torch.arange(77) % 7 - 3.0) / 4,),
    ),
    "powers of two": (
        [
            lambda x, n: [torch.ldexp(x, n), torch.ldexp(x.half(), n), torch.ldexp(x.double(), n)],
            lambda x, n: [torch.ldexp(x, n * 40), torch.ldexp(x, torch.tensor(200))],
        ],
        (torch.tensor([1.5, -0.0, 3e-39, -7.0, 0.1, 5.0]), torch.tensor([3, 9, -5, 0, -12, 11])),
    ),
}
for _dtype in FLOATS:
    _name = str(_dtype)[6:]
    GROUPS[f"last bits, {_name}"] = [next_to], pairs(EDGES, _dtype)
    GROUPS[f"zeros of sums, {_name}"] = [zeros_of_sums], pairs(EDGES, _dtype)
    GROUPS[f"zeros of products, {_name}"] = [zeros_of_products], pairs(EDGES, _dtype)


def difference(exact: Any, got: Any) -> str:
    """Where two values are not the same, "" where they are. NaN is NaN."""
    if not isinstance(exact, Tensor):
        return "" if exact == got else f"{got} instead of {exact}"
    if exact.dtype != got.dtype or exact.shape != got.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {exact.dtype} {tuple(exact.shape)}"
    same = exact == got
    if exact.dtype.is_floating_point:
        same &= exact.signbit() == got.signbit()
        same |= exact.isnan() & got.isnan()
    wrong = (~same).flatten().nonzero().flatten()
    if not len(wrong):
        return ""
    a, b = (t.flatten()[wrong[:3]].tolist() for t in (got, exact))
    return f"{len(wrong)} elements, first at {int(wrong[0])}: {a} instead of {b}"


def differences(name: str, backend: Any) -> list[str]:
    """What the functions of a group, compiled as one program, show otherwise than eager does."""
    functions, inputs = GROUPS[name]

    def program(*args: Tensor) -> list[Any]:
        return [f(*args) for f in functions]

    usual = program(*[x.clone() for x in inputs])
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
    values = compiled(*[x.clone() for x in inputs])
    out = []
    for k, (a, b) in enumerate(zip(usual, values, strict=True)):
        for n, (x, y) in enumerate(zip(tree_leaves(a), tree_leaves(b), strict=True)):
            text = difference(x, y)
            out += [f"function {k}, result {n}: {text}"] if text else []
    return out


def main() -> None:
    from dev.check.interpret import interpreted

    for name in GROUPS:
        try:
            differing = differences(name, interpreted)
        except Exception as e:  # noqa: BLE001 - the test shows it
            differing = [f"{type(e).__name__}: {e}"[-2000:]]
        print(json.dumps({"group": name, "differences": differing}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
