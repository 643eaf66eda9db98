"""Device functions that generated Triton kernels call (imported by them as `libm`).

In: tensors of one dtype (f32 or f64 unless said otherwise). Out: a tensor of that dtype. Accuracy
is that of eager PyTorch on CUDA, which uses the same libdevice functions. Triton's interpreter
cannot call libdevice: there the same names are torch's functions on the interpreter's arrays,
chosen once at import. Functions marked `@triton.jit` run in both.

Reduce combiners (`*_combine`) are associative up to rounding.
"""

# mypy: disable-error-code="no-untyped-def"
# (signatures of device functions are Triton's)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from deuteron.codegen.triton.atomics import atomic_update  # noqa: F401 - called by this module
from deuteron.codegen.triton.exchange import (  # noqa: F401 - kernels call them by this module
    begin_exchange,
    block_sizes,
    collect,
    collect_two,
    collected,
    combine_max,
    combine_min,
    combine_moments,
    combine_sum,
    decoupled_look_back,
    end_exchange,
    end_look_back,
    exclusive_prefix,
    look_back_flags,
    publish,
    write_flag,
)
from deuteron.codegen.triton.fast import (  # noqa: F401 - kernels call them by this module
    INTERPRETED,
    div_by_one_or_more,
    div_by_unit,
    erf_above_by,
    erf_above_fast,
    erf_half_by,
    erf_half_fast,
    erfc_fast,
    exp2_fast,
    exp_fast,
    f8e4m3_to_f32,
    f8e4m3_to_f32_native,
    f8e5m2_to_f32,
    f8e5m2_to_f32_native,
    f32_to_f8e4m3,
    f32_to_f8e4m3_native,
    f32_to_f8e5m2,
    f32_to_f8e5m2_native,
    reciprocal_fast,
    round_bf16,
    sigmoid_fast,
    sqrt_fast,
    tanh_fast,
)
from deuteron.codegen.triton.last_bits import (  # noqa: F401 - kernels call them by this module
    nextafter_half,
    signbit,
)
from deuteron.codegen.triton.merging import (  # noqa: F401 - kernels call them by this module
    add_combine,
    argmax_combine,
    argmax_last_nan_combine,
    argmax_last_nan_step,
    argmax_step,
    argmin_combine,
    argmin_step,
    difference,
    from_zero,
    max_combine,
    maximum,
    min_combine,
    minimum,
    mul_combine,
    online_finish,
    online_shifted,
    online_shifted_weighted,
    products_step,
    reduce_argmax,
    reduce_argmax_last_nan,
    reduce_argmin,
    welford_step,
)
from deuteron.codegen.triton.philox import (  # noqa: F401 - kernels call them by this module
    philox,
    rand,
    rand64,
    rand_below,
    rand_bits,
    rand_lanes,
    unit_f64,
)
from deuteron.codegen.triton.rotated_loads import (  # noqa: F401 - kernels call them by this module
    rotated_load,
    rotated_sizes,
)

# name here -> (libdevice's name, torch's name)
_TABLE = {
    "exp": ("exp", "exp"), "exp2": ("exp2", "exp2"), "expm1": ("expm1", "expm1"),
    "log": ("log", "log"), "log2": ("log2", "log2"), "log10": ("log10", "log10"),
    "log1p": ("log1p", "log1p"),
    "sin": ("sin", "sin"), "cos": ("cos", "cos"), "tan": ("tan", "tan"),
    "asin": ("asin", "asin"), "acos": ("acos", "acos"), "atan": ("atan", "atan"),
    "sinh": ("sinh", "sinh"), "cosh": ("cosh", "cosh"), "tanh": ("tanh", "tanh"),
    "asinh": ("asinh", "asinh"), "acosh": ("acosh", "acosh"), "atanh": ("atanh", "atanh"),
    "erf": ("erf", "erf"), "erfc": ("erfc", "erfc"), "erfinv": ("erfinv", "erfinv"),
    "lgamma": ("lgamma", "lgamma"), "i0": ("cyl_bessel_i0", "i0"),
    "i1": ("cyl_bessel_i1", "special.i1"), "ndtri": ("normcdfinv", "special.ndtri"),
    "rsqrt": ("rsqrt", "rsqrt"), "trunc": ("trunc", "trunc"), "rint": ("rint", "round"),
    "pow": ("pow", "pow"), "atan2": ("atan2", "atan2"), "nextafter": ("nextafter", "nextafter"),
    "hypot": ("hypot", "hypot"), "copysign": ("copysign", "copysign"), "fmod": ("fmod", "fmod"),
}  # fmt: skip


def _interpreted(path: str) -> Callable[..., Any]:
    """torch's function `path` on the arrays that Triton's interpreter holds."""
    import numpy as np
    import torch
    from triton.runtime.interpreter import TensorHandle

    function: Any = torch
    for part in path.split("."):
        function = getattr(function, part)

    def call(*args: Any) -> Any:
        arrays = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) for a in args]
        result = function(*arrays).numpy()
        dtype = args[0].dtype
        scalar = all(not a.type.is_block() for a in args)
        kind = dtype if scalar else tl.block_type(dtype, list(result.shape))
        return tl.core.tensor(TensorHandle(result, dtype), kind)

    return call


def _pick(name: str) -> Any:
    device, host = _TABLE[name]
    return _interpreted(host) if INTERPRETED else getattr(libdevice, device)


exp = _pick("exp")
exp2 = _pick("exp2")
expm1 = _pick("expm1")
log = _pick("log")
log2 = _pick("log2")
log10 = _pick("log10")
log1p = _pick("log1p")
sin = _pick("sin")
cos = _pick("cos")
tan = _pick("tan")
asin = _pick("asin")
acos = _pick("acos")
atan = _pick("atan")
sinh = _pick("sinh")
cosh = _pick("cosh")
tanh = _pick("tanh")
asinh = _pick("asinh")
acosh = _pick("acosh")
atanh = _pick("atanh")
erf = _pick("erf")
erfc = _pick("erfc")
erfinv = _pick("erfinv")
lgamma = _pick("lgamma")
i0 = _pick("i0")
i1 = _pick("i1")
ndtri = _pick("ndtri")
rsqrt = _pick("rsqrt")
trunc = _pick("trunc")
rint = _pick("rint")  # ties to even
pow = _pick("pow")
atan2 = _pick("atan2")
nextafter = _pick("nextafter")
hypot = _pick("hypot")
copysign = _pick("copysign")
fmod = _pick("fmod")


# -- arithmetic ------------------------------------------------------------------------------------


@triton.jit
def div(a, b):
    """IEEE division; `/` alone is approximate for f32."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def divisor(b):
    """For many divisions by `b`: (b times a power of two, its reciprocal, that power of two). The
    first two are positive, the third has the sign: so `div_by` can keep that of a zero."""
    size = tl.abs(b)
    scale = tl.where(size < 5.421010862427522e-20, 1.8446744073709552e19, 1.0)
    scale = tl.where(size > 1.8446744073709552e19, 5.421010862427522e-20, scale)
    scaled = b * scale
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scaled)
    sign = tl.where(inverse < 0.0, -1.0, 1.0)
    return scaled * sign, inverse * sign, scale * sign


@triton.jit
def div_by(a, b, inverse, scale):
    """``a / b`` rounded as a division is (Markstein 1990), in 6 operations where one takes 15.

    `b`, `inverse` and `scale` come from `divisor`. Where the remainder is no number, the quotient
    is 0 or infinite or no number already. A remainder of 0 is +0: times `-inverse`, which is
    negative, it is the zero that changes no other.
    """
    q = a * inverse
    better = tl.fma(tl.fma(q, b, a * -1.0), inverse * -1.0, q)
    return tl.where(better == better, better, q) * scale


@triton.jit
def div_by_fast(a, b, inverse, scale):
    """The same within 2^-23, in 2 operations; as far as it is finite, for any divisor."""
    return a * inverse * scale


@triton.jit
def sqrt(x):
    """The correctly rounded square root."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def sigmoid(x):
    return reciprocal_below_one(1.0 + exp(x * -1.0))


@triton.jit
def reciprocal_below_one(x):
    """Of what is at least 1."""
    if x.dtype == tl.float32:
        return div_by_one_or_more(tl.full([], 1.0, tl.float32), x)
    else:
        return 1.0 / x


@triton.jit
def fmax(a, b):
    """The other argument where one is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))


@triton.jit
def fmin(a, b):
    return tl.where(a != a, b, tl.where(b != b, a, tl.minimum(a, b)))


@triton.jit
def sign(x):
    """0 for NaN, as ATen's."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def remainder(a, b):
    """Python's: the sign of the divisor."""
    r = fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)


@triton.jit
def floordiv(a, b):
    """Python's and ATen's rule for floats: (a - a mod b) / b adjusted downwards and rounded to an
    integer.
    """
    q = div(a, b)
    m = fmod(a, b)
    d = div(a - m, b)
    d = tl.where((m != 0) & ((b < 0) != (m < 0)), d - 1.0, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1.0, f)
    return tl.where(b == 0, q, tl.where(d == 0, q * 0.0, f))


@triton.jit
def int_truncdiv(a, b):
    """A zero divisor gives 0; ATen's result is undefined there on CUDA."""
    return tl.where(b == 0, b, a // tl.where(b == 0, b + 1, b))


@triton.jit
def int_fmod(a, b):
    return a - b * int_truncdiv(a, b)


@triton.jit
def int_floordiv(a, b):
    q = int_truncdiv(a, b)
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q).to(a.dtype)


@triton.jit
def int_remainder(a, b):
    r = int_fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r).to(a.dtype)


@triton.jit
def narrow(x):
    """An i64 as i32, for comparing with an index: what is no 32-bit index equals none."""
    return tl.where((x >= 0) & (x < 2147483648), x, -1).to(tl.int32)


@triton.jit
def index_div(a, b):
    """Floor division of an index that may be negative by a positive one."""
    q = a // b
    return tl.where(a - q * b < 0, q - 1, q)


@triton.jit
def index_mod(a, b):
    r = a % b
    return tl.where(r < 0, r + b, r)


@triton.jit
def int_pow(a, n):
    """Repeated squaring. A negative exponent gives 0 unless the base is 1 or -1, as ATen's."""
    one = tl.where(a == a, 1, 0).to(a.dtype)
    out = one
    base = a
    e = tl.where(n < 0, 0, n).to(tl.int64)
    for _ in range(64):
        out = tl.where((e & 1) != 0, out * base, out).to(a.dtype)
        base = (base * base).to(a.dtype)
        e = e >> 1
    odd = (n & 1) != 0
    negative = tl.where(a == 1, 1, tl.where(a == -1, tl.where(odd, -1, 1), 0)).to(a.dtype)
    return tl.where(n < 0, negative, out)


@triton.jit
def lshift(a, n, BITS: tl.constexpr):
    """A count below 0 or beyond the width gives 0."""
    fits = (n >= 0) & (n < BITS)
    zero = tl.where(fits, n, 0).to(a.dtype)
    return tl.where(fits, a << zero, 0).to(a.dtype)


@triton.jit
def rshift(a, n, BITS: tl.constexpr):
    """A count below 0 or beyond the width gives the sign."""
    fits = (n >= 0) & (n < BITS)
    return (a >> tl.where(fits, n, BITS - 1).to(a.dtype)).to(a.dtype)


@triton.jit
def rshift_unsigned(a, n, BITS: tl.constexpr):
    """A count below 0 or beyond the width gives 0."""
    fits = (n >= 0) & (n < BITS)
    return tl.where(fits, a >> tl.where(fits, n, 0).to(a.dtype), 0).to(a.dtype)


@triton.jit
def ldexp(x, n):
    """``x * 2**n``, in two steps so that a factor alone neither overflows nor vanishes."""
    half = tl.floor(n * 0.5)
    return x * exp2(half) * exp2(n - half)


# -- special functions that libdevice does not have ------------------------------------------------


@triton.jit
def digamma(x):
    """Reflection below 0, recurrence up to 10, then the asymptotic series (Abramowitz and Stegun
    6.3.18), in f64.
    """
    a = x.to(tl.float64)
    pole = (a <= 0) & (a == tl.floor(a))
    below = a < 0
    fraction = a - tl.floor(a)
    safe = tl.where(pole, 0.25, fraction).to(tl.float64)
    reflected = -3.141592653589793 / tan(safe * 3.141592653589793)
    y = tl.where(below, 1.0 - a, a)
    y = tl.where(pole, 1.0, y).to(tl.float64)
    r = tl.where(below, reflected, 0.0).to(tl.float64)
    for _ in range(10):
        small = y < 10.0
        r = tl.where(small, r - 1.0 / y, r)
        y = tl.where(small, y + 1.0, y)
    z = 1.0 / (y * y)
    s = 0.08333333333333333 * z - 0.021092796092796094
    s = s * z + 0.007575757575757576
    s = s * z - 0.004166666666666667
    s = s * z + 0.003968253968253968
    s = s * z - 0.008333333333333333
    s = s * z + 0.08333333333333333
    r = r + log(y) - 0.5 / y - s * z
    r = tl.where(pole, tl.where(a == 0, -copysign(a * 0.0 + float("inf"), a), float("nan")), r)
    return r.to(x.dtype)


@triton.jit
def _bessel_tail(a, MU: tl.constexpr):
    """exp(-a) I(a) for large `a` (Abramowitz and Stegun 9.7.1), MU = 4 order^2; error below 1e-16
    from 500 on.
    """
    t = 1.0 / (8.0 * a)
    s = 1.0 - (MU - 25) * t / 3.0
    s = 1.0 - (MU - 9) * t / 2.0 * s
    s = 1.0 - (MU - 1) * t * s
    return s / tl.sqrt(6.283185307179586 * a)


@triton.jit
def i0e(x):
    a = tl.abs(x.to(tl.float64))
    near = tl.minimum(a, 500.0)
    return tl.where(a <= 500.0, i0(near) * exp(-near), _bessel_tail(tl.maximum(a, 500.0), 0)).to(
        x.dtype
    )


@triton.jit
def i1e(x):
    a = tl.abs(x.to(tl.float64))
    near = tl.minimum(a, 500.0)
    out = tl.where(a <= 500.0, i1(near) * exp(-near), _bessel_tail(tl.maximum(a, 500.0), 4))
    return tl.where(x < 0, -out, out).to(x.dtype)


# -- reductions
# -----------------------------------------------------------------------------------------


@triton.jit
def reduce_sum(x, axis: tl.constexpr = 1):
    return from_zero(tl.sum(x, axis, keep_dims=True))


@triton.jit
def in_pairs(x):
    """The even and the odd elements of rows."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def in_runs(x, run: tl.constexpr):
    """Each element so many times, along the last of two dimensions."""
    many = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], run])
    return tl.reshape(many, [x.shape[0], x.shape[1] * run])


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def reduce_sum_two(x, y):
    a, b = tl.reduce((x, y), 1, _add_two)
    return from_zero(a)[:, None], from_zero(b)[:, None]


@triton.jit
def reduce_prod(x, axis: tl.constexpr = 1):
    return tl.reduce(x, axis, mul_combine, keep_dims=True)


@triton.jit
def reduce_max(x, axis: tl.constexpr = 1):
    return tl.reduce(x, axis, max_combine, keep_dims=True)


@triton.jit
def reduce_min(x, axis: tl.constexpr = 1):
    return tl.reduce(x, axis, min_combine, keep_dims=True)


@triton.jit
def reduce_any(x, axis: tl.constexpr = 1):
    return tl.max(x.to(tl.int32), axis, keep_dims=True) != 0


@triton.jit
def reduce_all(x, axis: tl.constexpr = 1):
    return tl.min(x.to(tl.int32), axis, keep_dims=True) != 0


# -- scans -----------------------------------------------------------------------------------------


@triton.jit
def scan_sum(x):
    return tl.associative_scan(from_zero(x), 1, add_combine)


@triton.jit
def scan_prod(x):
    return tl.associative_scan(x, 1, mul_combine)


@triton.jit
def scan_max(x):
    return tl.associative_scan(x, 1, max_combine)


@triton.jit
def scan_min(x):
    return tl.associative_scan(x, 1, min_combine)


# -- random numbers --------------------------------------------------------------------------------


@triton.jit
def randn(seed, stream, element):
    """Box and Muller: sqrt(-2 ln u) cos(2 pi v)."""
    a, b, c, d = philox(seed, stream, element)
    u = ((a >> 8) + 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    v = (b >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v)


@triton.jit
def randn64(seed, stream, element):
    a, b, c, d = philox(seed, stream, element)
    u = 1.0 - unit_f64(a, b)
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * unit_f64(c, d))


# -- reductions over the rows of a tile (dimension 0), for columns
# --------------------------------------


@triton.jit
def cols_sum(x):
    return from_zero(tl.sum(x, 0))[None, :]


@triton.jit
def cols_prod(x):
    return tl.reduce(x, 0, mul_combine)[None, :]


@triton.jit
def cols_max(x):
    return tl.reduce(x, 0, max_combine)[None, :]


@triton.jit
def cols_min(x):
    return tl.reduce(x, 0, min_combine)[None, :]


@triton.jit
def cols_any(x):
    return tl.max(x.to(tl.int32), 0)[None, :] != 0


@triton.jit
def cols_all(x):
    return tl.min(x.to(tl.int32), 0)[None, :] != 0
