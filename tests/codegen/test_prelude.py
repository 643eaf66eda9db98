"""The functions of the C++ prelude: values against float64, special values, conversions, Philox,
and that loops which call them vectorise."""

from __future__ import annotations

import ctypes
import math
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS
from deuteron.codegen.cpp.prelude import CPP_FUNCTIONS, CXX_FLAGS, prelude, used_functions
from deuteron.ir.operations import SCALAR_OPS

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")

UNARY = [
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "sigmoid",
    "lgamma",
    "digamma",
]
RARE = ["i0", "i0e", "i1", "i1e", "ndtri"]
BINARY = [
    "pow",
    "atan2",
    "fmod",
    "remainder",
    "floordiv",
    "truncdiv",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "copysign",
    "nextafter",
    "hypot",
]
INTEGER = ["floordiv", "truncdiv", "remainder", "fmod", "lshift", "rshift", "pow"]
TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "floordiv": torch.floor_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}
# Conversions: name -> (expression, argument type, result type).
CONVERSIONS = {
    "load_f16": ("d_load_f16(a[i])", "u16", "f32"),
    "load_bf16": ("d_load_bf16(a[i])", "u16", "f32"),
    "f32_to_f16": ("d_f32_to_f16(a[i])", "f32", "u16"),
    "f32_to_bf16": ("d_f32_to_bf16(a[i])", "f32", "u16"),
    "f32_i32": ("d_to_i32(a[i])", "f32", "i32"),
    "f64_i32": ("d_to_i32(a[i])", "f64", "i32"),
    "f32_i64": ("d_to_i64(a[i])", "f32", "i64"),
    "f64_i64": ("d_to_i64(a[i])", "f64", "i64"),
    "f32_i16": ("d_to_i16(a[i])", "f32", "i16"),
    "f32_i8": ("d_to_i8(a[i])", "f32", "i8"),
    "f32_u8": ("d_to_u8(a[i])", "f32", "u8"),
    "i64_f32": ("d_to_f32(a[i])", "i64", "f32"),
    "i64_f64": ("d_to_f64(a[i])", "i64", "f64"),
}
RANDOM = {"rand": "f32", "randn": "f32", "rand64": "f64", "randn64": "f64", "rand_bits": "i64"}
DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "u16": torch.uint16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
}


def loop(name: str, params: str, out: str, body: str) -> str:
    return (
        f"void {name}({params}, {out} *__restrict o, i64 n) {{\n#pragma omp simd\n"
        f"for (i64 i = 0; i < n; ++i) o[i] = {body};\n}}\n"
    )


def source() -> str:
    parts = []
    for t in ("f32", "f64"):
        parts += [
            loop(f"{n}_{t}", f"const {t} *__restrict a", t, f"d_{n}(a[i])") for n in (*UNARY, *RARE)
        ]
        parts += [
            loop(
                f"{n}_{t}",
                f"const {t} *__restrict a, const {t} *__restrict b",
                t,
                f"d_{n}(a[i], b[i])",
            )
            for n in BINARY
        ]
    for t in ("i32", "i64", "i8", "u8"):
        parts += [
            loop(
                f"{n}_{t}",
                f"const {t} *__restrict a, const {t} *__restrict b",
                t,
                f"d_{n}(a[i], b[i])",
            )
            for n in INTEGER
        ]
    parts += [loop(n, f"const {a} *__restrict a", o, e) for n, (e, a, o) in CONVERSIONS.items()]
    parts += [
        loop(n, "const f32 *__restrict a", "f32", f"d_{n}(a[i])")
        for n in (
            "exp_nonpositive",
            "one_plus_exp",
            "one_plus_tanh",
            "log1p_unit",
            "erf_for_one_plus",
        )
    ]
    scale = "d_divisor_scale(b[i])"
    parts += [
        loop(
            name,
            "const f32 *__restrict a, const f32 *__restrict b",
            "f32",
            f"d_{name}(a[i], b[i] * {scale}, 1.0f / (b[i] * {scale}), {scale})",
        )
        for name in ("div_by", "div_by_fast")
    ]
    parts += [
        loop(n, "i64 seed, i64 stream", t, f"d_{n}(seed, stream, i)") for n, t in RANDOM.items()
    ]
    parts.append(
        "void philox(i64 seed, i64 stream, i64 i, u32 *o) {\n"
        "  d_philox(seed, stream, i, o[0], o[1], o[2], o[3]);\n}\n"
    )
    body = 'extern "C" {\n' + "".join(parts) + "}\n"
    return prelude(used_functions(body)) + body


def machines() -> dict[str, list[str]]:
    """Instruction sets to build for that this machine can run."""
    flags = {"native": ["-march=native", "-mprefer-vector-width=512"]}
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in (
        "AVX2",
        "AVX512",
    ):
        flags["avx2"] = ["-march=haswell"]
    return flags


@pytest.fixture(scope="module", params=list(machines()))
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, str, str]:
    """(library, its source, the compiler's notes on vectorisation)."""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "functions.cpp"
    text = source()
    path.write_text(text)
    done = subprocess.run(
        [
            str(GXX),
            *(f for f in KERNEL_CXX_FLAGS if f != "-march=native"),
            *machines()[request.param],
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fopt-info-vec-optimized",
            "-fno-ipa-icf",  # equal functions keep their own loops
            "-shared",
            "-fPIC",
            str(path),
            "-o",
            str(folder / "functions.so"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "functions.so")), text, done.stderr


def call(
    built: tuple[ctypes.CDLL, str, str], name: str, out: torch.dtype, *args: torch.Tensor
) -> torch.Tensor:
    result = torch.empty(args[0].numel(), dtype=out)
    getattr(built[0], name)(
        *(ctypes.c_void_p(t.data_ptr()) for t in (*args, result)), ctypes.c_longlong(result.numel())
    )
    return result


# fmt: off
SPECIAL = torch.tensor([
    0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 0.25, math.inf, -math.inf, math.nan, 1e-45,
    -1e-45, 1e-40, 1.17549435e-38, 3.4028234e38, -3.4028234e38, 1e6, -1e6, 1e10, 1e22, 1e30,
    88.7, 88.73, 89, 91, -87, -88, -103.9, -104, -150, 127.99, 128, -149, -150, 8191.99, 8192,
    8193, 1e5, 16777216, math.pi, math.pi / 2, 1.5 * math.pi, 0.92, 0.6, 10, 9, 4, 0.9999999,
    1.0000001, -0.9999999, 0.70710678, 1.41421356, 0.41421356, 2.0**63, 2.0**31, 2.0**-24,
    -(2.0**-24),
])
# fmt: on


def samples(count: int = 1 << 15) -> torch.Tensor:
    """Every exponent, the usual range densely, and special values."""
    g = torch.Generator().manual_seed(1)
    any_bits = (
        torch.randint(-(2**31), 2**31, (4 * count,), generator=g)
        .to(torch.int32)
        .view(torch.float32)
    )
    usual = [torch.randn(count, generator=g) * s for s in (1, 4, 30, 1000)]
    unit = [torch.rand(count, generator=g) * 2 - 1, 1 + torch.randn(count, generator=g) * 0.01]
    return torch.cat([any_bits, *usual, *unit, SPECIAL])


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    x = samples()
    y = x[torch.randperm(x.numel(), generator=g)].clone()
    y[::2] = torch.randn(y[::2].numel(), generator=g) * 3
    n = SPECIAL.numel()
    return torch.cat([x, SPECIAL.repeat(n)]), torch.cat([y, SPECIAL.repeat_interleave(n)])


def ulps(got: torch.Tensor, reference: torch.Tensor, bits: int, lowest: int) -> torch.Tensor:
    """Distance in units of the exact result's last place; infinite where only one is NaN."""
    exponent = (torch.frexp(reference)[1] - bits).clamp(min=lowest)
    distance = (got.double() - reference).abs() / torch.ldexp(
        torch.ones_like(reference), exponent.double()
    )
    rounded = reference.to(got.dtype)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    distance = torch.where(same & ~distance.isfinite(), 0.0, distance)
    return torch.where(distance.isnan(), math.inf, distance)


def check(
    got: torch.Tensor,
    reference: torch.Tensor,
    limit: float,
    *args: torch.Tensor,
    signs: bool = True,
) -> None:
    single = got.dtype == torch.float32
    error = ulps(got, reference, *((24, -149) if single else (53, -1022)))
    i = int(error.argmax())
    where = [float(a[i]) for a in args]
    assert error[i] <= limit, (
        f"{float(error[i]):.3g} ulp at {where}: {float(got[i])} for {float(reference[i])}"
    )
    if signs:
        zeros = (got == 0) & (reference == 0)
        wrong = zeros & (got.signbit() != reference.signbit())
        assert not wrong.any(), f"sign of zero at {[float(a[wrong][0]) for a in args]}"


@pytest.mark.parametrize("name", UNARY)
def test_unary_f32(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    x = samples()
    if name == "sigmoid":  # ATen's formula gives 0 where the true value is subnormal
        x = x[~(x < -87)]
    check(
        call(built, f"{name}_f32", torch.float32, x),
        getattr(torch, name)(x.double()),
        3.5 if name == "erfinv" else 2,
        x,
    )


def test_exp_of_no_positive_number(built: tuple[ctypes.CDLL, str, str]) -> None:
    """Subnormal results, too: the logarithm of a softmax is a number."""
    x = torch.cat([samples(), torch.linspace(-120, 0, 1 << 16)])
    x = x[~(x > 0)]
    check(call(built, "exp_nonpositive", torch.float32, x), x.double().exp(), 2, x)


def test_one_and_an_exponential(built: tuple[ctypes.CDLL, str, str]) -> None:
    x = torch.cat([samples(), torch.linspace(-120, 120, 1 << 16)])
    check(call(built, "one_plus_exp", torch.float32, x), x.double().exp() + 1, 1.5, x)


def test_one_and_a_tangent(built: tuple[ctypes.CDLL, str, str]) -> None:
    """Also where the tangent is near -1, of whose sum eager keeps 2^-24 at best."""
    x = torch.cat([samples(), torch.linspace(-40, 40, 1 << 16)])
    want = 2 / (1 + (-2 * x.double()).exp())
    got = call(built, "one_plus_tanh", torch.float32, x).double()
    torch.testing.assert_close(got, want, rtol=3e-7, atol=1e-12, equal_nan=True)


def test_erf_of_a_sum(built: tuple[ctypes.CDLL, str, str]) -> None:
    """Within 2^-23 of it, and 1 where the exact one is."""
    x = torch.cat([samples(), torch.linspace(-6, 6, 1 << 18)])
    got = call(built, "erf_for_one_plus", torch.float32, x)
    want = torch.erf(x.double())
    assert torch.equal(got.isnan(), x.isnan())
    assert ((got - want).abs().nan_to_num(0) <= 2.0**-23).all()
    assert torch.equal(got[x.abs() > 4], torch.sign(x[x.abs() > 4]))


def test_log1p_of_a_unit(built: tuple[ctypes.CDLL, str, str]) -> None:
    x = torch.cat([samples().abs(), torch.linspace(0, 1, 1 << 16)])
    x = x[~(x > 1)]
    check(call(built, "log1p_unit", torch.float32, x), x.double().log1p(), 1.5, x)


@pytest.mark.parametrize("name, limit", [("div_by", 0.5), ("div_by_fast", 2.0)])
def test_divisions_by_a_reciprocal(
    built: tuple[ctypes.CDLL, str, str], name: str, limit: float
) -> None:
    """Rounded as a division is, but of what is too small for its remainder."""
    x, y = pairs()
    got = call(built, name, torch.float32, x, y)
    check(got, x.double() / y.double(), max(limit, 1.0), x, y)
    large = ~(x.abs() < 2.0**-100) & ~(got.abs() < 2.0**-100) & ~(got.abs() > 2.0**127)
    check(got[large], (x / y)[large].double(), limit - 0.5, x[large], y[large])
    g = torch.Generator().manual_seed(5)
    x, y = (torch.randn(1 << 20, generator=g) * 10 for _ in range(2))
    check(call(built, name, torch.float32, x, y), (x / y).double(), limit - 0.5, x, y)


@pytest.mark.parametrize("name", UNARY)
def test_unary_f64(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    x = samples().double()
    if name in ("sinh", "cosh"):  # ATen's overflows early
        x = x[~(x.abs() > 709)]
    if name in ("sin", "cos", "tan"):  # next to their roots
        counts = torch.cat([torch.arange(1, 2000), torch.arange(2**29, 2**29 + 2000)])
        roots = counts.double() * (math.pi / 2)
        x = torch.cat([x, roots, roots * (1 + 1e-12)])
    got, want = call(built, f"{name}_f64", torch.float64, x), getattr(torch, name)(x)
    if name in ("lgamma", "digamma"):  # relative to the terms that cancel at the roots
        assert torch.allclose(got, want, rtol=1e-13, atol=1e-13, equal_nan=True)
    else:
        check(got, want, 4, x)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", RARE)
def test_special(built: tuple[ctypes.CDLL, str, str], name: str, dtype: str) -> None:
    x = samples().to(DTYPES[dtype])
    if name == "ndtri":
        x = torch.cat([x, torch.linspace(0, 1, 4099, dtype=DTYPES[dtype])])
    if dtype == "f64" and name in ("i0", "i1"):  # ATen's overflow early
        x = x[~((x.abs() > 709) & x.isfinite())]
    got = call(built, f"{name}_{dtype}", DTYPES[dtype], x)
    # ATen's own f64 values are up to 8 units off.
    check(got, getattr(torch.special, name)(x.double()), 2 if dtype == "f32" else 16, x)


@pytest.mark.parametrize("name", BINARY)
def test_binary_f32(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    x, y = pairs()
    f = TORCH.get(name) or getattr(torch, name)
    got = call(built, f"{name}_f32", torch.float32, x, y)
    eager = name in ("nextafter", "floordiv", "truncdiv")
    want = f(x, y).double() if eager else f(x.double(), y.double())
    check(got, want, 2, x, y, signs=name not in ("fmax", "fmin"))


@pytest.mark.parametrize("name", [n for n in BINARY if n != "pow"])
def test_binary_f64(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    x, y = (t.double() for t in pairs())
    want = (TORCH.get(name) or getattr(torch, name))(x, y)
    got = call(built, f"{name}_f64", torch.float64, x, y)
    check(got, want, 2, x, y, signs=name not in ("fmax", "fmin"))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [*UNARY, *RARE, *BINARY])
def test_places(built: tuple[ctypes.CDLL, str, str], name: str, dtype: str) -> None:
    """A number does not depend on its place in a loop, in a vector or left over: what is computed
    again is what it was. Libm's vector variants round otherwise (random program 15000131)."""
    t = DTYPES[dtype]
    given = [x.to(t)[:1031] for x in (pairs() if name in BINARY else [samples()])]
    whole = call(built, f"{name}_{dtype}", t, *given)
    for first in range(0, 1024, 61):
        part = call(built, f"{name}_{dtype}", t, *(x[first : first + 7].clone() for x in given))
        assert torch.equal(part.nan_to_num(7.5), whole[first : first + 7].nan_to_num(7.5))


def test_pow_f64(built: tuple[ctypes.CDLL, str, str]) -> None:
    x, y = (t.double() for t in pairs())
    check(call(built, "pow_f64", torch.float64, x, y), torch.pow(x, y), 4, x, y)


@pytest.mark.parametrize("dtype", ["i32", "i64", "i8", "u8"])
@pytest.mark.parametrize("name", INTEGER)
def test_integers(built: tuple[ctypes.CDLL, str, str], name: str, dtype: str) -> None:
    info, g = torch.iinfo(DTYPES[dtype]), torch.Generator().manual_seed(3)
    a = torch.randint(info.min, info.max, (4099,), generator=g, dtype=DTYPES[dtype])
    b = torch.randint(info.min, info.max, (4099,), generator=g, dtype=DTYPES[dtype])
    if name in ("lshift", "rshift", "pow"):
        b %= 70 if dtype != "u8" else 9
    else:
        b[::2] %= 9
        b[b == 0] = 1
        if info.min < 0:
            b[(b == -1) & (a == info.min)] = 2
    if name == "pow":
        a %= 50
    want = TORCH[name](a, b) if name in TORCH else getattr(torch, name)(a, b)
    assert torch.equal(call(built, f"{name}_{dtype}", DTYPES[dtype], a, b), want)


def test_division_of_integers_never_traps(built: tuple[ctypes.CDLL, str, str]) -> None:
    """ATen raises for a zero divisor; generated code must at least not end the process."""
    for dtype in ("i32", "i64", "i8"):
        low = torch.iinfo(DTYPES[dtype]).min
        a = torch.tensor([5, low, low], dtype=DTYPES[dtype])
        got = call(
            built,
            f"truncdiv_{dtype}",
            DTYPES[dtype],
            a,
            torch.tensor([0, -1, 0], dtype=DTYPES[dtype]),
        )
        assert got[0] == 0 and got[2] == 0 and got[1] == low


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_types(built: tuple[ctypes.CDLL, str, str], kind: str) -> None:
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    every = torch.arange(1 << 16).to(torch.uint16)
    exact = every.view(dtype).float()
    loaded = call(built, f"load_{kind}", torch.float32, every)
    assert torch.equal(
        loaded.view(torch.int32)[~exact.isnan()], exact.view(torch.int32)[~exact.isnan()]
    )
    assert torch.equal(loaded.isnan(), exact.isnan())
    middles = (exact[:-1].double() + exact[1:].double()).div(2).float()  # ties
    x = torch.cat(
        [
            samples(),
            exact,
            middles,
            middles * (1 + 2.0**-20),
            torch.tensor([65519.99, 65520.0, -65520.0, 65504.0]),
        ]
    )
    want = x.to(dtype)
    got = call(built, f"f32_to_{kind}", torch.uint16, x).view(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("name", [n for n in CONVERSIONS if "f16" not in n])
def test_number_conversions(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    _, source_type, target = CONVERSIONS[name]
    g = torch.Generator().manual_seed(4)
    if source_type == "i64":
        wide = torch.randint(-(2**63), 2**63 - 1, (1 << 15,), generator=g)
        x = torch.cat(
            [
                wide,
                wide >> 20,
                wide >> 9,
                wide >> 40,
                torch.tensor(
                    [
                        0,
                        1,
                        -1,
                        2**63 - 1,
                        -(2**63),
                        2**53 + 1,
                        2**54 + 2,
                        2**62 + 2**38,
                        2**62 + 2**38 + 1,
                    ]
                ),
            ]
        )
        assert torch.equal(call(built, name, DTYPES[target], x), x.to(DTYPES[target]))
        return
    info = torch.iinfo(DTYPES[target])
    x = torch.cat(
        [
            samples().double(),
            torch.rand(1 << 15, generator=g, dtype=torch.float64) * (info.max - info.min)
            + info.min,
            torch.tensor([info.min, info.max], dtype=torch.float64),
        ]
    ).to(DTYPES[source_type])
    got = call(built, name, DTYPES[target], x)
    low, high = (-1, 256) if target == "u8" else (float(info.min), float(info.max) + 1)
    fits = (
        (x.trunc().double() >= low)
        & (x.trunc().double() < high)
        & (x > -1 if target == "u8" else x == x)
    )
    assert torch.equal(got[fits], x[fits].to(DTYPES[target]))
    if target in ("i32", "i64"):
        assert (got[~fits] == info.min).all()


def test_philox_known_answers(built: tuple[ctypes.CDLL, str, str]) -> None:
    """The published answers of Philox-4x32-10."""

    def signed(low: int, high: int) -> int:
        value = low | high << 32
        return value - 2**64 if value >= 2**63 else value

    for counter, key, want in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        out = (ctypes.c_uint32 * 4)()
        arguments = (signed(*key), signed(*counter[2:]), signed(*counter[:2]))
        built[0].philox(*map(ctypes.c_longlong, arguments), out)
        assert tuple(out) == want


@pytest.mark.parametrize("name", list(RANDOM))
def test_random_numbers(built: tuple[ctypes.CDLL, str, str], name: str) -> None:
    def draw(seed: int, stream: int, n: int = 1 << 18) -> torch.Tensor:
        out = torch.empty(n, dtype=DTYPES[RANDOM[name]])
        getattr(built[0], name)(
            ctypes.c_longlong(seed),
            ctypes.c_longlong(stream),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_longlong(n),
        )
        return out

    x = draw(1234567890123, 5)
    again = draw(1234567890123, 5, 1001)  # libm's scalar and vector cosine differ in the last bit
    assert (
        torch.allclose(x[:1001], again, rtol=1e-14, atol=1e-14)
        if name == "randn64"
        else torch.equal(x[:1001], again)
    )
    assert not torch.equal(x, draw(1234567890123, 6)) and not torch.equal(x, draw(1234567890124, 5))
    if name == "rand_bits":
        for bit in range(0, 64, 7):
            assert abs(float(((x >> bit) & 1).double().mean()) - 0.5) < 0.006
        return
    v = x.double()
    assert v.isfinite().all()
    if name.startswith("randn"):
        moments = [float((v**k).mean()) for k in (1, 2, 3, 4)]
        assert all(
            abs(m - w) < t
            for m, w, t in zip(moments, (0, 1, 0, 3), (0.01, 0.015, 0.04, 0.1), strict=True)
        )
        want = torch.tensor([0.5 * (1 + math.erf(q / math.sqrt(2))) for q in (-2, -1, 0, 1, 2)])
        got = torch.tensor([float((v < q).double().mean()) for q in (-2, -1, 0, 1, 2)])
        assert (got - want).abs().max() < 0.005
    else:
        assert v.min() >= 0 and v.max() < 1
        assert torch.histc(v.float(), 16, 0, 1).div(v.numel() / 16).sub(1).abs().max() < 0.04
    assert abs(float(((v[1:] - v.mean()) * (v[:-1] - v.mean())).mean() / v.var())) < 0.01


def test_every_loop_vectorises(built: tuple[ctypes.CDLL, str, str]) -> None:
    _, text, notes = built
    if platform.machine() != "x86_64":
        pytest.skip("checked on x86")
    lines = text.split("\n")
    vectorised = {int(n) for n in re.findall(r":(\d+):\d+: optimized: loop vectorized", notes)}
    scalar = {
        re.search(r"void (\w+)", lines[i - 2])[1]  # type: ignore[index]
        for i, line in enumerate(lines)
        if line.startswith("for (i64 i = 0; i < n") and i + 1 not in vectorised
    }
    division = {f"{op}_i64" for op in ("floordiv", "truncdiv", "remainder", "fmod")}
    # No vector instruction divides 64-bit integers; GCC narrows the shifts to 16 bits, which AVX2
    # cannot shift by counts of their own.
    assert scalar <= division | {"rshift_i8", "rshift_u8"}, scalar


def test_sections_stand_alone(tmp_path: Path) -> None:
    """Each function brings what it needs, and nothing is included."""
    for name in sorted(CPP_FUNCTIONS):
        text = prelude([f"d_{name}"])
        assert "#include" not in text
        done = subprocess.run(
            [str(GXX), *CXX_FLAGS, "-fsyntax-only", "-x", "c++", "-"],
            input=text,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{name}: {done.stderr[:1000]}"


def test_names() -> None:
    assert SCALAR_OPS.keys() >= CPP_FUNCTIONS
    assert {*UNARY, *BINARY, *INTEGER} <= CPP_FUNCTIONS
    assert used_functions("o = d_exp(x) + d_other(y)") == {"d_exp"}
    with pytest.raises(KeyError):
        prelude(["d_other"])
