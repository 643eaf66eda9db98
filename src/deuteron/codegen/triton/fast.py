"""Device functions in few instructions, for `libm`, under whose name generated kernels call them:
approximations of the device's, and conversions of 8-bit floats.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


# -- as fast as the device can (see `precision` for where) -----------------------------------------
# Where the exact ones cost more than memory takes. Results below 2^-126 are 0.


@triton.jit
def exp_fast(x):
    return exp2_fast(x * 1.4426950408889634)


@triton.jit
def sigmoid_fast(x):
    return rcp(1.0 + exp2_fast(x * -1.4426950408889634))


@triton.jit
def erf_above_fast(x):
    """``1 + erf(x)`` within 4 2^-23, and within 2^-10 of itself: where it is small, erfc(-x)."""
    return erf_above_by(x, exp2_fast(x * x * -1.4426950408889634))


@triton.jit
def erfc_fast(x):
    return erf_above_fast(-x)


@triton.jit
def erf_above_by(x, decay):
    """The same by ``exp(-x * x)``."""
    return erf_half_by(x, 1.0, decay) * 2.0


@triton.jit
def erf_half_fast(x, SCALE: tl.constexpr):
    """``(1 + erf(SCALE * x)) / 2``."""
    return erf_half_by(x, SCALE, exp2_fast(x * x * (SCALE * SCALE * -1.4426950408889634)))


@triton.jit
def erf_half_by(x, SCALE: tl.constexpr, decay):
    """The same by ``exp(-(SCALE * x)^2)``.

    erfc(a) = e^(-a^2) t P(t) with t = 1 / (1 + 0.39 a) (the form of Abramowitz and Stegun 7.1.26);
    P, here its half, is the polynomial whose largest error on [0, 4.2] is least, 8e-9.
    """
    t = rcp(tl.fma(tl.abs(x), SCALE * 0.39, 1.0))
    p = tl.fma(tl.fma(t, -0.113768565, 0.443332185), t, -0.31770014)
    p = tl.fma(tl.fma(tl.fma(p, t, 0.3247797), t, 0.045694205), t, 0.11766261)
    tail = p * t * decay
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def tanh_fast(x):
    """Within 4 units in the last place: 1 - 2 / (1 + e^2a) of a = abs(x), and below 0.55 a + a^3
    P(a^2), P the polynomial whose largest relative error there is least, 4e-8. Without the branch
    of libdevice's, which a loop with many elements waits for: half the time of GELU's gradient."""
    a = tl.abs(x)
    t = tl.fma(rcp(exp2_fast(a * 2.8853900817779268) + 1.0), -2.0, 1.0)
    s = x * x
    p = tl.fma(tl.fma(tl.fma(s, 0.01643757, -0.052671808), s, 0.13320725), s, -0.33332947)
    small = tl.fma(p, s, 1.0) * x
    return tl.where(a < 0.55, small, tl.where(x < 0, -t, t))


@triton.jit
def exp2_fast(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_fast(x):
    """Of any number, within 2 units in the last place."""
    return 1.0 / x


@triton.jit
def sqrt_fast(x):
    return tl.sqrt(x)


@triton.jit
def rcp(x):
    """0 of what is over 2^126."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def div_by_unit(a, b, inverse, FINITE: tl.constexpr):
    """`libm.div_by` of a divisor from 1 to 2^64; `FINITE`: what is divided is. (Times -1 is free,
    Triton's minus a subtraction from 0.)"""
    q = a * inverse
    better = tl.fma(tl.fma(q, b, a * -1.0), inverse * -1.0, q)
    if FINITE:
        return better
    else:
        return tl.where(better == better, better, q)


@triton.jit
def rcp_any(x):
    """Within a unit in the last place; of what is over 2^126 below the normal numbers."""
    return tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def div_by_one_or_more(a, b):
    """``a / b`` of a divisor of at least 1, infinity included: rounded as a division but for one in
    a million, without that one's branch, for whose call a loop keeps all it has in registers."""
    return div_by_unit(a, b, rcp_any(b), False)


@triton.jit
def round_bf16(x):
    """The nearest bf16, as f32. The instruction for two of them (the other is 0) is faster than
    the one for one, and leaves the bits in the upper half."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;",
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _exp2(x):
    return tl.exp2(x)


@triton.jit
def _rcp(x):
    return 1.0 / x


@triton.jit
def _round_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


if INTERPRETED:
    exp2_fast, rcp, rcp_any, round_bf16 = _exp2, _rcp, _rcp, _round_bf16


# -- 8-bit floats as their bits --------------------------------------------------------------------
# With 4 bits of exponent and 3 of the fraction, or 5 and 2. `native` ones are instructions of sm_89
# and later, which saturate.


@triton.jit
def f32_to_f8e4m3(x):
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    normal = (a - 0x3BF80001 + ((a >> 20) & 1)) >> 20
    # adding 2^14 rounds to 2^-9, the smallest one
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    r = tl.where(a < 0x3C800000, small, normal)
    r = tl.where(a > 0x43E00000, tl.where(a > 0x7F800000, 0x7F, 0x7E), r)
    return (r | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def f8e4m3_to_f32(bits):
    u = (bits & 0x7F).to(tl.int32)
    size = (u << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where(u == 0x7F, float("nan"), size).to(tl.int32, bitcast=True)
    return (size | ((bits & 0x80).to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_f8e5m2(x):
    bits = x.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    normal = (a - 0x37F00001 + ((a >> 21) & 1)) >> 21
    small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    r = tl.where(a < 0x38800000, small, normal)
    r = tl.where(a >= 0x47800000, tl.where(a > 0x7F800000, 0x7F, 0x7C), r)
    return (r | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def f8e5m2_to_f32(bits):
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def f32_to_f8e4m3_native(x):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def f8e4m3_to_f32_native(bits):
    return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def f32_to_f8e5m2_native(x):
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(x) >= 61440.0, (bits & 0x80) | 0x7C, bits)


f8e5m2_to_f32_native = f8e5m2_to_f32
if INTERPRETED:
    f32_to_f8e4m3_native, f8e4m3_to_f32_native = f32_to_f8e4m3, f8e4m3_to_f32
    f32_to_f8e5m2_native = f32_to_f8e5m2
