// Scalar functions of generated CPU code. No header is included: a unit that uses them compiles in
// milliseconds.
//
// A line `//@ name` opens a section; `prelude.py` emits `base`, the wanted sections and those they
// mention. The whole file is valid C++17 too. Rules for what stands here:
//  - f32 functions are branch-free (selects only) so that GCC vectorises loops that call them, on
//    AVX2 and AVX-512. They cover the whole range, infinities, NaN, signed zeros and subnormal
//    numbers included; errors are at most 2 ulp, tested.
//  - No -ffast-math: results rely on NaN and infinity. Contraction of a*b+c to a fused multiply-add
//    is harmless everywhere; where it is needed for accuracy it is written d_fma.
//  - f64: exp, log, log1p are inline; the rest is libm, with its vector variants (libmvec) where
//    glibc has them.
//  - Functions that branch or loop are D_SLOW: the compiler makes a vector clone that does one lane
//    after the other, so that the loop around them still vectorises.
// Polynomials are minimax fits (Remez exchange, relative error, coefficients rounded to the type);
// the error of a fit is given as a power of two.

//@ base
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
#define D_FN static inline __attribute__((always_inline))
#define D_INF __builtin_inff()
#define D_NAN __builtin_nanf("")

//@ d_bits
D_FN u32 d_bits(f32 x) { return __builtin_bit_cast(u32, x); }
D_FN u64 d_bits(f64 x) { return __builtin_bit_cast(u64, x); }

//@ d_f32
D_FN f32 d_f32(u32 x) { return __builtin_bit_cast(f32, x); }

//@ d_f64
D_FN f64 d_f64(u64 x) { return __builtin_bit_cast(f64, x); }

//@ d_fma
#if defined(__FMA__) || defined(__aarch64__)
D_FN f32 d_fma(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
D_FN f64 d_fma(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
#else  // the product of two floats is exact in f64
D_FN f32 d_fma(f32 a, f32 b, f32 c) { return (f32)((f64)a * (f64)b + (f64)c); }
D_FN f64 d_fma(f64 a, f64 b, f64 c) { return a * b + c; }
#endif

//@ D_LIBM
// Declarations of libm's functions. D_GLIBC_MINOR is set by the loader: 2.22 brought vector
// variants of six functions, 2.35 the others; without them calls stay scalar.
#ifndef D_GLIBC_MINOR
#define D_GLIBC_MINOR 0
#endif
#if defined(__x86_64__) && D_GLIBC_MINOR >= 22
#define D_SIMD22 _Pragma("omp declare simd notinbranch")
#else
#define D_SIMD22
#endif
#if defined(__x86_64__) && D_GLIBC_MINOR >= 35
#define D_SIMD35 _Pragma("omp declare simd notinbranch")
#else
#define D_SIMD35
#endif
#define D_LIBM(NAME) extern "C" f64 NAME(f64) noexcept __attribute__((const));
#define D_LIBM2(NAME) extern "C" f64 NAME(f64, f64) noexcept __attribute__((const));

//@ D_SLOW
#define D_SLOW _Pragma("omp declare simd notinbranch") static __attribute__((noinline, const))

// ------------------------------------------------------------------------------------- conversions

//@ d_round_bf16
// Nearest bf16 (ties to even) as a float.
D_FN f32 d_round_bf16(f32 x) {
  u32 u = d_bits(x);
  u32 r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return x != x ? D_NAN : d_f32(r);
}

//@ d_load_bf16
D_FN f32 d_load_bf16(u16 x) { return d_f32((u32)x << 16); }

//@ d_store_bf16
// Of a float that is a bf16 value already.
D_FN u16 d_store_bf16(f32 x) { return (u16)(d_bits(x) >> 16); }

//@ d_f32_to_bf16
D_FN u16 d_f32_to_bf16(f32 x) { return d_store_bf16(d_round_bf16(x)); }

//@ d_load_f16
// The exponent is rebiased by a multiplication, which also normalises subnormal numbers.
D_FN f32 d_load_f16(u16 x) {
  u32 u = (u32)(x & 0x7fffu) << 13;
  f32 m = d_f32(u) * 5.192296858534828e33f;                      // 2^112
  u32 r = u >= 0x0f800000u ? u | 0x7f800000u : d_bits(m);        // infinity, NaN
  return d_f32(r | ((u32)(x & 0x8000u) << 16));
}

//@ d_round_f16
// Nearest f16 (ties to even) as a float: adding and subtracting 1.5 * 2^(exponent + 13) rounds to
// 11 bits; subnormal numbers use the exponent of the smallest normal one.
D_FN f32 d_round_f16(f32 x) {
  u32 a = d_bits(x) & 0x7fffffffu;
  u32 e = a & 0x7f800000u;
  e = e < 0x38800000u ? 0x38800000u : e;
  f32 big = d_f32(e + 0x06c00000u);
  f32 r = (d_f32(a) + big) - big;
  r = a >= 0x477ff000u ? D_INF : r;                              // 65520 and more
  r = a > 0x7f800000u ? D_NAN : r;
  return __builtin_copysignf(r, x);
}

//@ d_store_f16
// Of a float that is an f16 value already: the exponent is rebiased exactly by a multiplication.
D_FN u16 d_store_f16(f32 x) {
  u32 u = d_bits(x);
  u32 a = u & 0x7fffffffu;
  u32 r = d_bits(d_f32(a) * 1.925929944387236e-34f) >> 13;       // 2^-112
  r = a >= 0x7f800000u ? (a >> 13) - 0x38000u + ((a << 9) != 0 && ((a >> 13) & 0x3ffu) == 0) : r;
  return (u16)(r | (u >> 16 & 0x8000u));
}

//@ d_f32_to_f16
D_FN u16 d_f32_to_f16(f32 x) { return d_store_f16(d_round_f16(x)); }

//@ d_to_f64
#if defined(__AVX512DQ__) || !defined(__AVX2__)
template <class T> D_FN f64 d_to_f64(T x) { return (f64)x; }
#else  // AVX2 has no conversion of 64-bit integers: both halves are placed into mantissas
template <class T> D_FN f64 d_to_f64(T x) { return (f64)x; }
D_FN f64 d_to_f64(i64 x) {
  f64 high = d_f64((((u64)x >> 32) ^ 0x80000000ull) | 0x4530000000000000ull);
  f64 low = d_f64(((u64)x & 0xffffffffull) | 0x4330000000000000ull);
  return (high - 0x1.00000801p84) + low;                         // 2^84 + 2^63 + 2^52
}
#endif

//@ d_to_f32
template <class T> D_FN f32 d_to_f32(T x) { return (f32)x; }
#if defined(__AVX2__) && !defined(__AVX512DQ__)
// Through f64; bits that do not fit into 53 are folded into a sticky bit, so that there is one
// rounding.
D_FN f32 d_to_f32(i64 x) {
  u64 sticky = (((u64)x & 2047ull) + 2047ull) & 2048ull;
  u64 folded = ((u64)x & ~4095ull) | ((u64)x & 2048ull) | sticky;
  bool small = (u64)x + 0x10000000000000ull < 0x20000000000000ull;
  return (f32)d_to_f64((i64)(small ? (u64)x : folded));
}
#endif

//@ d_to_i32
// Truncation; what does not fit becomes INT_MIN, as x86's instruction has it and eager shows.
D_FN i32 d_to_i32(f32 x) { return x >= -2147483648.0f && x < 2147483648.0f ? (i32)x : (-2147483647 - 1); }
D_FN i32 d_to_i32(f64 x) { return x > -2147483649.0 && x < 2147483648.0 ? (i32)x : (-2147483647 - 1); }
template <class T> D_FN i32 d_to_i32(T x) { return (i32)x; }

//@ d_to_i64
// Truncation; what does not fit becomes INT64_MIN.
D_FN i64 d_to_i64(f64 x) {
  bool fits = x >= -9223372036854775808.0 && x < 9223372036854775808.0;
#if defined(__AVX512DQ__) || !defined(__AVX2__)
  return fits ? (i64)x : (-9223372036854775807LL - 1);
#else  // two halves, each placed into a mantissa
  f64 t = __builtin_trunc(x);
  f64 high = __builtin_floor(t * 2.3283064365386963e-10);
  f64 low = d_fma(high, -4294967296.0, t);
  u64 h = d_bits(high + 6755399441055744.0) << 32;
  u64 l = d_bits(low + 4503599627370496.0) & 0xffffffffull;
  return (i64)(fits ? h | l : 0x8000000000000000ull);
#endif
}
D_FN i64 d_to_i64(f32 x) { return d_to_i64((f64)x); }
template <class T> D_FN i64 d_to_i64(T x) { return (i64)x; }

//@ d_to_i16
template <class T> D_FN i16 d_to_i16(T x) { return (i16)d_to_i32(x); }

//@ d_to_i8
template <class T> D_FN i8 d_to_i8(T x) { return (i8)d_to_i32(x); }

//@ d_to_u8
// Eager goes through 64 bits: what does not fit there becomes 0.
D_FN u8 d_to_u8(f32 x) { return (u8)d_to_i32(x - 4294967296.0f * __builtin_truncf(x * 2.3283064365386963e-10f)); }
D_FN u8 d_to_u8(f64 x) { return (u8)d_to_i64(x); }
template <class T> D_FN u8 d_to_u8(T x) { return (u8)x; }

// -------------------------------------------------------------------------------- simple functions

//@ d_neg
D_FN f32 d_neg(f32 x) { return -x; }
D_FN f64 d_neg(f64 x) { return -x; }
template <class T> D_FN T d_neg(T x) { return (T)(0 - (u64)x); }

//@ d_abs
D_FN f32 d_abs(f32 x) { return __builtin_fabsf(x); }
D_FN f64 d_abs(f64 x) { return __builtin_fabs(x); }
template <class T> D_FN T d_abs(T x) { return x < 0 ? (T)(0 - (u64)x) : x; }

//@ d_sign
// 0 for NaN, as ATen's.
template <class T> D_FN T d_sign(T x) { return (T)((x > 0) - (x < 0)); }

//@ d_floor
D_FN f32 d_floor(f32 x) { return __builtin_floorf(x); }
D_FN f64 d_floor(f64 x) { return __builtin_floor(x); }

//@ d_ceil
D_FN f32 d_ceil(f32 x) { return __builtin_ceilf(x); }
D_FN f64 d_ceil(f64 x) { return __builtin_ceil(x); }

//@ d_trunc
D_FN f32 d_trunc(f32 x) { return __builtin_truncf(x); }
D_FN f64 d_trunc(f64 x) { return __builtin_trunc(x); }

//@ d_round
// Ties to even.
D_FN f32 d_round(f32 x) { return __builtin_rintf(x); }
D_FN f64 d_round(f64 x) { return __builtin_rint(x); }

//@ d_sqrt
D_FN f32 d_sqrt(f32 x) { return __builtin_sqrtf(x); }
D_FN f64 d_sqrt(f64 x) { return __builtin_sqrt(x); }

//@ d_rsqrt
D_FN f32 d_rsqrt(f32 x) { return 1.0f / __builtin_sqrtf(x); }
D_FN f64 d_rsqrt(f64 x) { return 1.0 / __builtin_sqrt(x); }

//@ d_reciprocal
D_FN f32 d_reciprocal(f32 x) { return 1.0f / x; }
D_FN f64 d_reciprocal(f64 x) { return 1.0 / x; }

//@ d_isnan
template <class T> D_FN bool d_isnan(T x) { return x != x; }

//@ d_isinf
D_FN bool d_isinf(f32 x) { return __builtin_fabsf(x) == D_INF; }
D_FN bool d_isinf(f64 x) { return __builtin_fabs(x) == __builtin_inf(); }

//@ d_signbit
D_FN bool d_signbit(f32 x) { return (i32)d_bits(x) < 0; }
D_FN bool d_signbit(f64 x) { return (i64)d_bits(x) < 0; }
template <class T> D_FN bool d_signbit(T x) { return x < 0; }

//@ d_copysign
D_FN f32 d_copysign(f32 x, f32 y) { return __builtin_copysignf(x, y); }
D_FN f64 d_copysign(f64 x, f64 y) { return __builtin_copysign(x, y); }

//@ d_maximum
// NaN where either argument is.
template <class T> D_FN T d_maximum(T a, T b) { T m = a > b ? a : b; return a != a ? a : m; }

//@ d_minimum
template <class T> D_FN T d_minimum(T a, T b) { T m = a < b ? a : b; return a != a ? a : m; }

//@ d_fmax
// The other argument where one is NaN.
template <class T> D_FN T d_fmax(T a, T b) { T m = a > b ? a : b; return b != b ? a : m; }

//@ d_fmin
template <class T> D_FN T d_fmin(T a, T b) { T m = a < b ? a : b; return b != b ? a : m; }

//@ d_nextafter
// Steps the bits as an integer: up where the step leads away from zero.
D_FN f32 d_nextafter(f32 x, f32 y) {
  u32 u = d_bits(x);
  u32 step = (x < y) == (x > 0.0f) ? u + 1u : u - 1u;
  u32 first = (d_bits(y) & 0x80000000u) | 1u;
  f32 r = x == 0.0f ? d_f32(first) : d_f32(step);
  r = x == y ? y : r;
  return x != x || y != y ? x + y : r;
}
D_FN f64 d_nextafter(f64 x, f64 y) {
  u64 u = d_bits(x);
  u64 step = (x < y) == (x > 0.0) ? u + 1ull : u - 1ull;
  u64 first = (d_bits(y) & 0x8000000000000000ull) | 1ull;
  f64 r = x == 0.0 ? d_f64(first) : d_f64(step);
  r = x == y ? y : r;
  return x != x || y != y ? x + y : r;
}

// ------------------------------------------------------------------------- division with remainder

//@ d_truncdiv
// Integers: in f64 (f32 for 16 bits and fewer) the quotient is exact and vectorises; 64 bits are
// divided one by one. A zero divisor gives 0 where ATen raises an error: the caller checks. The
// lowest number divided by -1 wraps around.
D_FN f32 d_truncdiv(f32 a, f32 b) { return __builtin_truncf(a / b); }
D_FN f64 d_truncdiv(f64 a, f64 b) { return __builtin_trunc(a / b); }
D_FN i32 d_truncdiv(i32 a, i32 b) {
  f64 q = (f64)a / (f64)(b == 0 ? 1 : b);
  i32 r = (i32)(q < 2147483648.0 ? q : -2147483648.0);
  return b == 0 ? 0 : r;
}
template <class T> D_FN T d_truncdiv(T a, T b) {
  i32 d = (i32)b, q = (i32)((f32)(i32)a / (f32)(d + (d == 0)));
  return (T)(d == 0 ? 0 : q);
}
D_FN i64 d_truncdiv(i64 a, i64 b) {
  return b == 0 ? 0 : b == -1 ? (i64)(0 - (u64)a) : a / b;
}

//@ d_fmod
// Where the truncated quotient is exact, or one too large by rounding, a - q*b is exact and needs
// one correction at most.
extern "C" f32 fmodf(f32, f32) noexcept __attribute__((const));
extern "C" f64 fmod(f64, f64) noexcept __attribute__((const));
D_SLOW f32 d_fmod(f32 a, f32 b) {
  f64 q = __builtin_trunc((f64)a / (f64)b);                      // exact below 2^29
  if (!(__builtin_fabs(q) < 536870912.0) || __builtin_fabsf(b) == D_INF) return fmodf(a, b);
  return __builtin_copysignf((f32)__builtin_fma(-q, (f64)b, (f64)a), a);
}
D_SLOW f64 d_fmod(f64 a, f64 b) {
  f64 c = __builtin_fabs(a), d = __builtin_fabs(b), q = __builtin_trunc(c / d);
  if (!(q < 9007199254740992.0) || d == __builtin_inf()) return fmod(a, b);
  f64 r = __builtin_fma(-q, d, c);
  return __builtin_copysign(r < 0.0 ? r + d : r, a);
}
template <class T> D_FN T d_fmod(T a, T b) { return (T)(a - b * d_truncdiv(a, b)); }

//@ d_remainder
// Python's: the sign of the divisor.
D_FN f32 d_remainder(f32 a, f32 b) {
  f32 r = d_fmod(a, b), t = r + b;
  return (r != 0.0f) & ((b < 0.0f) != (r < 0.0f)) ? t : r;
}
D_FN f64 d_remainder(f64 a, f64 b) {
  f64 r = d_fmod(a, b), t = r + b;
  return (r != 0.0) & ((b < 0.0) != (r < 0.0)) ? t : r;
}
template <class T> D_FN T d_remainder(T a, T b) {
  T r = d_fmod(a, b);
  return (T)(r != 0 && (b < 0) != (r < 0) ? r + b : r);
}

//@ d_floordiv
// f32: the floor of the exact quotient (f64 division cannot round it up to an integer below 2^29;
// beyond, the result rounds anyway). f64: ATen's rule, (a - a mod b) / b adjusted downwards and
// rounded to an integer. A zero has the sign of a / b; infinities give NaN when divided, -1 or 0 as
// divisors.
D_FN f32 d_floordiv(f32 a, f32 b) {
  f32 q = (f32)__builtin_floor((f64)a / (f64)b);
  q = __builtin_fabsf(b) == D_INF && a != 0.0f && (a < 0.0f) != (b < 0.0f) ? -1.0f : q;
  return b != 0.0f && !(__builtin_fabsf(a) < D_INF) ? D_NAN : q;
}
D_FN f64 d_floordiv(f64 a, f64 b) {
  f64 m = d_fmod(a, b), d = a / b, q = (a - m) / b;
  q = (m != 0.0) & ((b < 0.0) != (m < 0.0)) ? q - 1.0 : q;
  f64 f = __builtin_floor(q);
  f = q - f > 0.5 ? f + 1.0 : f;
  f = q == 0.0 ? __builtin_copysign(0.0, d) : f;
  u64 zero = b == 0.0 ? ~0ull : 0ull;                            // a mask, lest the call moves into a branch
  return d_f64((d_bits(d) & zero) | (d_bits(f) & ~zero));
}
template <class T> D_FN T d_floordiv(T a, T b) {
  T q = d_truncdiv(a, b);
  T r = (T)(a - q * b);
  return (T)(b != 0 && r != 0 && (r < 0) != (b < 0) ? q - 1 : q);
}

//@ d_lshift
// A count below 0 or beyond the width gives 0.
template <class T> D_FN T d_lshift(T a, T n) {
  bool fits = (u64)(i64)n < 8 * sizeof(T);
  return fits ? (T)((u64)a << (fits ? (i64)n : 0)) : (T)0;
}

//@ d_rshift
// A count below 0 or beyond the width gives the sign.
template <class T> D_FN T d_rshift(T a, T n) {
  bool fits = (u64)(i64)n < 8 * sizeof(T) - ((T)-1 < 0);
  return (T)(a >> (fits ? (i64)n : 8 * (i64)sizeof(T) - ((T)-1 < 0)));
}

// ------------------------------------------------------------------------------------- exp and log

//@ d_exp_part
// e^t = p * 2^n with |log2 p| <= 1/2; t within +-2^21. 1.5 * 2^23 is added so that the mantissa's
// low bits hold n; they are returned as they are, and `(s << 23) + 0x3f800000` are the bits of 2^n.
// q: 2^-28.2.
D_FN f32 d_exp_part(f32 t, u32 &s) {
  f32 sum = d_fma(t, 1.44269504f, 12582912.0f);
  f32 k = sum - 12582912.0f;
  f32 r = d_fma(k, -0.693145752f, t);
  r = d_fma(k, -1.42860677e-06f, r);
  f32 q = d_fma(r, 0.00138383429f, 0.0083691664f);
  q = d_fma(q, r, 0.0416681021f);
  q = d_fma(q, r, 0.166665167f);
  q = d_fma(q, r, 0.49999994f);
  s = d_bits(sum);
  return d_fma(r * r, q, r) + 1.0f;
}

//@ d_scale
// p * 2^n for n from -160 to 160, n in the low bits of s: two factors, so that large and subnormal
// results round once.
D_FN f32 d_scale(f32 p, u32 s) {
  i32 n = (i32)(s - 0x4b400000u);
  i32 h = n >> 1;
  return (p * d_f32((u32)(h + 127) << 23)) * d_f32((u32)(n - h + 127) << 23);
}

//@ d_exp_part64
// The same in f64; t within +-2^50. q: 2^-60.
D_FN f64 d_exp_part64(f64 t, f64 &k) {
  f64 sum = d_fma(t, 1.4426950408889634, 6755399441055744.0);
  k = sum - 6755399441055744.0;
  f64 r = d_fma(k, -0.6931471803691238, t);
  r = d_fma(k, -1.9082149292705877e-10, r);
  f64 q = d_fma(r, 2.0826570710463408e-09, 2.5112085131019884e-08);
  q = d_fma(q, r, 2.755758232495889e-07);
  q = d_fma(q, r, 2.755723472586574e-06);
  q = d_fma(q, r, 2.4801586925661706e-05);
  q = d_fma(q, r, 0.00019841269896517287);
  q = d_fma(q, r, 0.0013888888889116394);
  q = d_fma(q, r, 0.008333333333316982);
  q = d_fma(q, r, 0.041666666666666095);
  q = d_fma(q, r, 0.16666666666666682);
  q = d_fma(q, r, 0.5);
  return d_fma(r * r, q, r) + 1.0;
}

//@ d_exp
D_FN f32 d_exp(f32 x) {
  f32 t = x > 90.0f ? 90.0f : x;
  t = t < -105.0f ? -105.0f : t;                                 // NaN passes both
  u32 s;
  f32 p = d_exp_part(t, s);
  return d_scale(p, s);
}
D_FN f64 d_exp(f64 x) {
  f64 t = x > 711.0 ? 711.0 : x;
  t = t < -746.0 ? -746.0 : t;
  f64 k;
  f64 p = d_exp_part64(t, k);
  f64 h = d_fma(k, 0.5, 6755399441055744.0);                     // halves of the exponent, as in d_scale
  f64 g = (k - (h - 6755399441055744.0)) + 6755399441055744.0;
  return (p * d_f64((d_bits(h) + 1023ull) << 52)) * d_f64((d_bits(g) + 1023ull) << 52);
}

//@ d_exp2_part
// 2^t = p * 2^n as d_exp_part; 2^-25.9, all of it the rounding of ln 2.
D_FN f32 d_exp2_part(f32 t, u32 &s) {
  f32 sum = t + 12582912.0f;
  f32 r = t - (sum - 12582912.0f);
  f32 q = d_fma(r, 0.000153532441f, 0.00133990031f);
  q = d_fma(q, r, 0.00961843878f);
  q = d_fma(q, r, 0.0555033199f);
  q = d_fma(q, r, 0.240226477f);
  q = d_fma(q, r, 0.693147182f);
  s = d_bits(sum);
  return d_fma(q, r, 1.0f);
}

//@ d_exp2
D_SIMD35 D_LIBM(exp2)
D_FN f32 d_exp2(f32 x) {
  f32 t = x > 130.0f ? 130.0f : x;
  t = t < -151.0f ? -151.0f : t;
  u32 s;
  f32 p = d_exp2_part(t, s);
  return d_scale(p, s);
}
D_FN f64 d_exp2(f64 x) { return exp2(x); }

//@ d_ldexp
// x * 2^n, n given as a value of x's type; in ATen it is that product, roundings included.
D_FN f32 d_ldexp(f32 x, f32 n) { return x * d_exp2(n); }
D_FN f64 d_ldexp(f64 x, f64 n) { return x * d_exp2(n); }

//@ d_expm1
D_SIMD35 D_LIBM(expm1)
// 2 * (2^(n-1) * (e^r - 1) + (2^(n-1) - 1/2)): exact where n = 0. q: 2^-30.6.
D_FN f32 d_expm1(f32 x) {
  f32 t = x > 90.0f ? 90.0f : x;
  t = t < -25.0f ? -25.0f : t;
  f32 sum = d_fma(t, 1.44269504f, 12582912.0f);
  f32 k = sum - 12582912.0f;
  f32 r = d_fma(k, -0.693145752f, t);
  r = d_fma(k, -1.42860677e-06f, r);
  f32 q = d_fma(r, 0.000196581546f, 0.00139352074f);
  q = d_fma(q, r, 0.0083336439f);
  q = d_fma(q, r, 0.0416664667f);
  q = d_fma(q, r, 0.166666657f);
  q = d_fma(q, r, 0.5f);
  f32 p = d_fma(r * r, q, r);
  u32 n = d_bits(sum) - 0x4b400000u;
  n = n == 129u ? 128u : n;                                      // beyond the largest result anyway
  f32 h = d_f32((n + 126u) << 23);
  f32 y = 2.0f * d_fma(h, p, h - 0.5f);
  y = x > 89.0f ? D_INF : y;
  return __builtin_fabsf(x) < 1e-7f ? x : y;
}
D_FN f64 d_expm1(f64 x) { return expm1(x); }

//@ d_log_poly
// log(1 + f) - f for sqrt(1/2) - 1 <= f <= sqrt(2) - 1: 2^-27.5 of log(1 + f).
D_FN f32 d_log_poly(f32 f) {
  f32 q = d_fma(f, -0.0762184933f, 0.12904498f);
  q = d_fma(q, f, -0.132429913f);
  q = d_fma(q, f, 0.141818151f);
  q = d_fma(q, f, -0.166090816f);
  q = d_fma(q, f, 0.200019747f);
  q = d_fma(q, f, -0.250015825f);
  q = d_fma(q, f, 0.333333254f);
  q = d_fma(q, f, -0.499999881f);
  return q * (f * f);
}

//@ d_log_split
// x = (1 + f) * 2^e for positive finite x.
D_FN f32 d_log_split(f32 x, f32 &e) {
  bool small = x < 1.17549435e-38f;
  u32 u = d_bits(small ? x * 8388608.0f : x);
  i32 k = (i32)(u - 0x3f3504f3u) >> 23;
  e = (f32)(small ? k - 23 : k);
  return d_f32(u - ((u32)k << 23)) - 1.0f;
}

//@ d_log_edge
// The logarithm's values outside (0, inf).
D_FN f32 d_log_edge(f32 x, f32 y) {
  y = x > 0.0f ? y : D_NAN;
  y = x == 0.0f ? -D_INF : y;
  return x == D_INF ? x : y;
}
D_FN f64 d_log_edge(f64 x, f64 y) {
  y = x > 0.0 ? y : __builtin_nan("");
  y = x == 0.0 ? -__builtin_inf() : y;
  return x == __builtin_inf() ? x : y;
}

//@ d_log_tail64
// log((1 + f) * 2^e) with s = f / (2 + f), log(1 + f) = 2 atanh(s) = f - (f^2/2 - s (f^2/2 + R));
// R: 2^-66.
D_FN f64 d_log_tail64(f64 f, f64 e) {
  f64 s = f / (2.0 + f), z = s * s;
  f64 r = d_fma(z, 0.13235815680401197, 0.1325204146976466);
  r = d_fma(r, z, 0.15386993172477778);
  r = d_fma(r, z, 0.18181778268049117);
  r = d_fma(r, z, 0.22222222607879122);
  r = d_fma(r, z, 0.28571428569406615);
  r = d_fma(r, z, 0.4000000000000493);
  r = d_fma(r, z, 0.6666666666666666) * z;
  f64 half = 0.5 * f * f;
  f64 low = d_fma(e, 1.9082149292705877e-10, s * (half + r));
  return d_fma(e, 0.6931471803691238, f - (half - low));
}

//@ d_log_exponent64
// e with u = m * 2^e, sqrt(1/2) <= m < sqrt(2), for the bits u of a positive normal number; as an
// integer biased by 1023.
D_FN u64 d_log_exponent64(u64 u) { return (u + (0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull)) >> 52; }

//@ d_log
D_FN f32 d_log(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_fma(e, 1.42860677e-06f, d_log_poly(f));
  return d_log_edge(x, d_fma(e, 0.693145752f, f + t));
}
D_FN f64 d_log(f64 x) {
  bool small = x < 2.2250738585072014e-308;
  u64 u = d_bits(small ? x * 18014398509481984.0 : x);
  u64 b = d_log_exponent64(u);
  f64 e = d_f64(b | 0x4330000000000000ull) - (small ? 4503599627371573.0 : 4503599627371519.0);
  f64 f = d_f64(u - ((b - 1023ull) << 52)) - 1.0;
  return d_log_edge(x, d_log_tail64(f, e));
}

//@ d_log2
D_SIMD35 D_LIBM(log2)
D_FN f32 d_log2(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_log_poly(f);
  t = d_fma(t, 1.44269504f, f * 1.92596303e-08f);
  return d_log_edge(x, e + d_fma(f, 1.44269502f, t));
}
D_FN f64 d_log2(f64 x) { return log2(x); }

//@ d_log10
D_SIMD35 D_LIBM(log10)
D_FN f32 d_log10(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_fma(d_log_poly(f), 0.434294492f, f * -1.010305e-08f);
  t = d_fma(e, 4.60503898e-06f, d_fma(f, 0.434294492f, t));
  return d_log_edge(x, d_fma(e, 0.301025391f, t));
}
D_FN f64 d_log10(f64 x) { return log10(x); }

//@ d_log1p
// f = (1 + x) * 2^-k - 1 = x * 2^-k + (2^-k - 1), which rounds once.
D_FN f32 d_log1p(f32 x) {
  f32 u = 1.0f + x;
  i32 k = (i32)(d_bits(u) - 0x3f3504f3u) >> 23;
  f32 s = 0.25f * d_f32((u32)(129 - k) << 23);
  f32 f = d_fma(x, s, s - 1.0f), e = (f32)k;
  f32 t = d_fma(e, 1.42860677e-06f, d_log_poly(f));
  f32 y = d_log_edge(u, d_fma(e, 0.693145752f, f + t));
  return __builtin_fabsf(x) < 1e-10f ? x : y;
}
D_FN f64 d_log1p(f64 x) {
  f64 u = 1.0 + x;
  u64 b = d_log_exponent64(d_bits(u));
  f64 s = 0.25 * d_f64((2048ull - b) << 52);
  f64 e = d_f64(b | 0x4330000000000000ull) - 4503599627371519.0;
  f64 y = d_log_edge(u, d_log_tail64(d_fma(x, s, s - 1.0), e));
  return __builtin_fabs(x) < 1e-20 ? x : y;
}

//@ d_log_tail40
// d_log_tail64 to 2^-45: f32 functions that need more than f32.
D_FN f64 d_log_tail40(f64 f, f64 e) {
  f64 s = f / (2.0 + f), z = s * s;
  f64 r = d_fma(z, 0.1958493352716572, 0.22176141857984977);
  r = d_fma(r, z, 0.2857211008809074);
  r = d_fma(r, z, 0.39999995614996886);
  r = d_fma(r, z, 0.6666666667581493);
  return d_fma(e, 0.6931471805599453, f - s * (f - r * z));
}

//@ d_log1p40
// log(1 + x) to 2^-45 for x >= 0 whose logarithm an f32 can hold.
D_FN f64 d_log1p40(f64 x) {
  u64 b = d_log_exponent64(d_bits(1.0 + x));
  f64 s = d_f64((2046ull - b) << 52);
  f64 e = d_f64(b | 0x4330000000000000ull) - 4503599627371519.0;
  return d_log_tail40(d_fma(x, s, s - 1.0), e);
}

//@ d_pow
D_SIMD22 D_LIBM2(pow)
// e^(y log|x|) in f64 with 2^-38 or better; log: d_log_tail40, q of the exponential: 2^-39.7.
D_FN f32 d_pow(f32 x, f32 y) {
  f32 a = __builtin_fabsf(x);
  u64 u = d_bits((f64)a), b = d_log_exponent64(u);
  f64 e = d_f64(b | 0x4330000000000000ull) - 4503599627371519.0;
  f64 l = d_log_edge((f64)a, d_log_tail40(d_f64(u - ((b - 1023ull) << 52)) - 1.0, e));
  f64 t = (f64)y * l;
  t = t > 90.0 ? 90.0 : t;
  t = t < -105.0 ? -105.0 : t;
  f64 sum = d_fma(t, 1.4426950408889634, 6755399441055744.0);
  f64 z = d_fma(sum - 6755399441055744.0, -0.6931471805599453, t);
  f64 q = d_fma(z, 2.4708221508193106e-05, 0.00019909006284391935);
  q = d_fma(q, z, 0.0013889197690400016);
  q = d_fma(q, z, 0.008333281705725126);
  q = d_fma(q, z, 0.04166666439863868);
  q = d_fma(q, z, 0.1666666678479191);
  q = d_fma(q, z, 0.5000000000428465);
  q = d_fma(q, z * z, z) + 1.0;
  f32 r = (f32)(q * d_f64((d_bits(sum) + 1023ull) << 52));
  f32 h = 0.5f * y;
  bool whole = __builtin_truncf(y) == y, odd = whole && __builtin_truncf(h) != h;
  r = odd ? __builtin_copysignf(r, x) : r;
  r = x < 0.0f && !whole && a < D_INF ? D_NAN : r;
  r = a == 1.0f && __builtin_fabsf(y) == D_INF ? 1.0f : r;       // -1 too
  return y == 0.0f || x == 1.0f ? 1.0f : r;
}
D_FN f64 d_pow(f64 x, f64 y) { return pow(x, y); }
// Integers wrap around; a negative exponent gives 0 except for bases 1 and -1.
D_SLOW i64 d_pow(i64 x, i64 n) {
  if (n < 0) return x == 1 ? 1 : x == -1 ? (n & 1 ? -1 : 1) : 0;
  u64 r = 1, b = (u64)x;
  for (; n; n >>= 1, b *= b) r *= n & 1 ? b : 1;
  return (i64)r;
}
template <class T> D_FN T d_pow(T x, T n) { return (T)d_pow((i64)x, (i64)n); }

//@ d_sigmoid
// ATen's formula.
D_FN f32 d_sigmoid(f32 x) { return 1.0f / (1.0f + d_exp(-x)); }
D_FN f64 d_sigmoid(f64 x) { return 1.0 / (1.0 + d_exp(-x)); }

//@ d_tanh
D_SIMD35 D_LIBM(tanh)
// Odd polynomial (2^-28.4) below 0.6, 1 - 2 / (e^2x + 1) above.
D_FN f32 d_tanh(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_fma(z, -0.00589796668f, 0.0207986254f);
  q = d_fma(q, z, -0.0537847169f);
  q = d_fma(q, z, 0.133319363f);
  q = d_fma(q, z, -0.333332986f);
  f32 low = d_fma(q, z * a, a);
  u32 s;
  f32 t = a > 10.0f ? 20.0f : a + a;
  f32 p = d_exp_part(t, s);
  f32 e = p * d_f32((s << 23) + 0x3f800000u);
  f32 high = 1.0f - 2.0f / (e + 1.0f);
  return __builtin_copysignf(a < 0.6f ? low : high, x);
}
D_FN f64 d_tanh(f64 x) { return tanh(x); }

//@ d_sinh
D_SIMD35 D_LIBM(sinh)
// Odd polynomial (2^-31.6) below 1, h - 1/(4h) with h = e^x / 2 above.
D_FN f32 d_sinh(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_fma(z, 2.78221319e-06f, 0.000198428956f);
  q = d_fma(q, z, 0.00833331048f);
  q = d_fma(q, z, 0.166666672f);
  f32 low = d_fma(q, z * a, a);
  u32 s;
  f32 p = d_exp_part(a > 91.0f ? 91.0f : a, s);
  f32 h = d_scale(p, s - 1u);
  return __builtin_copysignf(a < 1.0f ? low : h - 0.25f / h, x);
}
D_FN f64 d_sinh(f64 x) { return sinh(x); }

//@ d_cosh
D_SIMD35 D_LIBM(cosh)
D_FN f32 d_cosh(f32 x) {
  f32 a = __builtin_fabsf(x);
  u32 s;
  f32 p = d_exp_part(a > 91.0f ? 91.0f : a, s);
  f32 h = d_scale(p, s - 1u);
  return h + 0.25f / h;
}
D_FN f64 d_cosh(f64 x) { return cosh(x); }

//@ d_asinh
D_SIMD35 D_LIBM(asinh)
D_FN f32 d_asinh(f32 x) {
  f64 a = (f64)__builtin_fabsf(x), z = a * a;
  f64 y = d_log1p40(a + z / (1.0 + __builtin_sqrt(z + 1.0)));
  y = a < __builtin_inf() ? y : a;
  return __builtin_copysignf((f32)y, x);
}
D_FN f64 d_asinh(f64 x) { return asinh(x); }

//@ d_acosh
D_SIMD35 D_LIBM(acosh)
D_FN f32 d_acosh(f32 x) {
  f64 t = (f64)x - 1.0;
  f32 y = (f32)d_log1p40(t + __builtin_sqrt(d_fma(t, t, 2.0 * t)));
  y = x == D_INF ? x : y;
  return x >= 1.0f ? y : D_NAN;
}
D_FN f64 d_acosh(f64 x) { return acosh(x); }

//@ d_atanh
D_SIMD35 D_LIBM(atanh)
D_FN f32 d_atanh(f32 x) {
  f64 a = (f64)__builtin_fabsf(x);
  f32 y = (f32)(0.5 * d_log1p40((a + a) / (1.0 - a)));
  y = a == 1.0 ? D_INF : y;
  return a <= 1.0 ? __builtin_copysignf(y, x) : D_NAN;
}
D_FN f64 d_atanh(f64 x) { return atanh(x); }

// ------------------------------------------------------------------------------------ trigonometry

//@ d_trig_far
// Quadrant and fraction of huge |x| (Payne and Hanek): the 24 bits of x are multiplied by the 96
// bits of 2/pi that matter, chosen by x's exponent from 2/pi written as 12 zero bits and 212 of its
// digits, modulo 4. |x| >= 2^13.
D_FN f32 d_trig_far(f32 x, u32 &quadrant) {
  u32 u = d_bits(x) & 0x7fffffffu;
  u32 off = (u >> 23) - 140u;
  u64 m = (u & 0x7fffffu) | 0x800000u;
  bool j2 = (off & 64u) != 0, j1 = (off & 32u) != 0;
  u32 a0 = j2 ? 0x529fc275u : 0x000a2f98u;
  u32 a1 = j2 ? 0x7d1f534du : 0x36e4e441u;
  u32 a2 = j2 ? 0xdc0db629u : 0x529fc275u;
  u32 a3 = j2 ? 0x5993c439u : 0x7d1f534du;
  u32 a4 = j2 ? 0x041fe516u : 0xdc0db629u;
  u32 w0 = j1 ? a1 : a0, w1 = j1 ? a2 : a1, w2 = j1 ? a3 : a2, w3 = j1 ? a4 : a3;
  u32 l = off & 31u, r = 31u - l;
  u64 v0 = (w0 << l) | ((w1 >> 1) >> r), v1 = (w1 << l) | ((w2 >> 1) >> r), v2 = (w2 << l) | ((w3 >> 1) >> r);
  u64 t = ((m * v0) << 32) + m * v1 + ((m * v2) >> 32);          // x * 2/pi mod 4, in units of 2^-62
  u64 q = (t + 0x2000000000000000ull) >> 62;
  f32 y = (f32)(d_to_f64((i64)(t - (q << 62))) * 3.4061215800865545e-19);  // pi/2 * 2^-62
  bool negative = (i32)d_bits(x) < 0;
  quadrant = negative ? 0u - (u32)q : (u32)q;
  return (negative ? -y : y) + (x - x);                          // NaN for infinities
}

//@ d_trig
// x = quadrant * pi/2 + r, |r| <= pi/4, the quadrant modulo 4 in the low bits. Cody and Waite's
// three parts of pi/2 below 2^13.
D_FN f32 d_trig(f32 x, u32 &quadrant) {
  f32 sum = d_fma(x, 0.636619747f, 12582912.0f);
  f32 k = sum - 12582912.0f;
  f32 r = d_fma(k, -1.57079637f, x);
  r = d_fma(k, 4.37113883e-08f, r);
  r = d_fma(k, 1.71512451e-15f, r);
  u32 q;
  f32 y = d_trig_far(x, q);
  bool near = __builtin_fabsf(x) < 8192.0f;
  quadrant = near ? d_bits(sum) : q;
  return near ? r : y;
}

//@ d_sin_poly
// sin r on +-pi/4: 2^-27.9.
D_FN f32 d_sin_poly(f32 r, f32 z) {
  f32 q = d_fma(z, -0.000195180954f, 0.00833218824f);
  q = d_fma(q, z, -0.166666552f);
  return d_fma(q, z * r, r);
}

//@ d_cos_poly
// cos r on +-pi/4: 2^-33.
D_FN f32 d_cos_poly(f32 z) {
  f32 q = d_fma(z, 2.44323273e-05f, -0.00138873095f);
  q = d_fma(q, z, 0.0416666456f);
  return d_fma(q, z * z, d_fma(z, -0.5f, 1.0f));
}

//@ d_sin
D_SIMD22 D_LIBM(sin)
D_FN f32 d_sin(f32 x) {
  u32 n;
  f32 r = d_trig(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  f32 y = d_f32(d_bits(n & 1u ? c : s) ^ ((n & 2u) << 30));
  return x == 0.0f ? x : y;
}
D_FN f64 d_sin(f64 x) { return sin(x); }

//@ d_cos
D_SIMD22 D_LIBM(cos)
D_FN f32 d_cos(f32 x) {
  u32 n;
  f32 r = d_trig(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  return d_f32(d_bits(n & 1u ? s : c) ^ (((n + 1u) & 2u) << 30));
}
D_FN f64 d_cos(f64 x) { return cos(x); }

//@ d_tan
D_SIMD35 D_LIBM(tan)
// sin r / cos r in f64 with the coefficients for f32: the quotient rounds once.
D_FN f32 d_tan(f32 x) {
  u32 n;
  f32 r = d_trig(x, n);
  f64 t = (f64)r, z = t * t;
  f64 s = d_fma(d_fma(d_fma(z, 2.83251006e-06, -0.000198530644), z, 0.0083333794), z, -0.166666672);
  f64 c = d_fma(d_fma(d_fma(z, 2.44323273e-05, -0.00138873095), z, 0.0416666456), z, -0.5);
  s = d_fma(s * z, t, t), c = d_fma(c, z, 1.0);
  f32 y = (f32)((n & 1u ? -c : s) / (n & 1u ? s : c));
  return x == 0.0f ? x : y;
}
D_FN f64 d_tan(f64 x) { return tan(x); }

//@ d_asin_poly
// asin s - s for |s| <= 1/2, z = s^2: 2^-31.6 of asin s.
D_FN f32 d_asin_poly(f32 s, f32 z) {
  f32 q = d_fma(z, 0.0376822613f, 0.0143203307f);
  q = d_fma(q, z, 0.0318385437f);
  q = d_fma(q, z, 0.0445133895f);
  q = d_fma(q, z, 0.0750052184f);
  q = d_fma(q, z, 0.166666597f);
  return q * (z * s);
}

//@ d_asin
D_SIMD35 D_LIBM(asin)
// pi/2 - 2 asin(root) above 1/2, with what the square root's rounding left out.
D_FN f32 d_asin(f32 x) {
  f32 a = __builtin_fabsf(x), h = d_fma(a, -0.5f, 0.5f), root = __builtin_sqrtf(h);
  bool big = a > 0.5f;
  f32 s = big ? root : a, u = d_asin_poly(s, big ? h : a * a);
  f32 rest = d_fma(-root, root, h) / (root + 1e-30f);            // twice the rounding error
  f32 high = d_fma(root, -2.0f, 1.57079637f) - (d_fma(u, 2.0f, rest) + 4.37113883e-08f);
  return a <= 1.0f ? __builtin_copysignf(big ? high : s + u, x) : D_NAN;
}
D_FN f64 d_asin(f64 x) { return asin(x); }

//@ d_acos
D_SIMD35 D_LIBM(acos)
D_FN f32 d_acos(f32 x) {
  f32 a = __builtin_fabsf(x), h = d_fma(a, -0.5f, 0.5f), root = __builtin_sqrtf(h);
  bool big = a > 0.5f;
  f32 s = big ? root : x, p = s + d_asin_poly(s, big ? h : x * x);
  f32 high = x > 0.0f ? 2.0f * p : 3.14159274f - (2.0f * p + 8.74227766e-08f);
  f32 y = big ? high : 1.57079637f - (p + 4.37113883e-08f);
  return a <= 1.0f ? y : D_NAN;
}
D_FN f64 d_acos(f64 x) { return acos(x); }

//@ d_atan_poly
// atan t for |t| <= 1: 2^-31.
D_FN f32 d_atan_poly(f32 t) {
  f32 z = t * t;
  f32 q = d_fma(z, 0.00113452214f, -0.00742536318f);
  q = d_fma(q, z, 0.022777617f);
  q = d_fma(q, z, -0.0449832566f);
  q = d_fma(q, z, 0.0676364899f);
  q = d_fma(q, z, -0.0882146209f);
  q = d_fma(q, z, 0.110612333f);
  q = d_fma(q, z, -0.142803431f);
  q = d_fma(q, z, 0.199997157f);
  q = d_fma(q, z, -0.333333284f);
  return d_fma(q, z * t, t);
}

//@ d_atan
D_SIMD35 D_LIBM(atan)
D_FN f32 d_atan(f32 x) {
  f32 a = __builtin_fabsf(x);
  bool big = a > 1.0f;
  f32 p = d_atan_poly((big ? -1.0f : a) / (big ? a : 1.0f));
  return __builtin_copysignf(big ? 1.57079637f + (p - 4.37113883e-08f) : p, x);
}
D_FN f64 d_atan(f64 x) { return atan(x); }

//@ d_atan2
D_SIMD35 D_LIBM2(atan2)
D_FN f32 d_atan2(f32 y, f32 x) {
  f32 a = __builtin_fabsf(x), b = __builtin_fabsf(y);
  bool swap = b > a;
  f32 high = swap ? b : a, low = swap ? a : b;
  f32 t = low / (high == 0.0f ? 1.0f : high);
  t = low == D_INF ? 1.0f : t;
  f32 p = d_atan_poly(t);
  p = swap ? 1.57079637f - (p + 4.37113883e-08f) : p;
  p = (i32)d_bits(x) < 0 ? 3.14159274f - (p + 8.74227766e-08f) : p;
  return x != x || y != y ? D_NAN : __builtin_copysignf(p, y);
}
D_FN f64 d_atan2(f64 y, f64 x) { return atan2(y, x); }

//@ d_hypot
D_SIMD35 D_LIBM2(hypot)
D_FN f32 d_hypot(f32 x, f32 y) {
  f64 a = (f64)x, b = (f64)y;
  f32 r = (f32)__builtin_sqrt(d_fma(a, a, b * b));
  return __builtin_fabsf(x) == D_INF || __builtin_fabsf(y) == D_INF ? D_INF : r;
}
D_FN f64 d_hypot(f64 x, f64 y) { return hypot(x, y); }

// ----------------------------------------------------------------------- error and gamma functions

//@ d_erf
D_SIMD35 D_LIBM(erf)
// x + x * E(x^2) below 0.92 (2^-30), 1 - 2^L(x) above (2^-33.6 of erf), where L is log2 erfc.
D_FN f32 d_erf(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_fma(z, 7.99664995e-05f, -0.000804976968f);
  q = d_fma(q, z, 0.00519240508f);
  q = d_fma(q, z, -0.0268557314f);
  q = d_fma(q, z, 0.112836257f);
  q = d_fma(q, z, -0.376126289f);
  q = d_fma(q, z, 0.128379166f);
  f32 low = d_fma(q, a, a);
  f32 t = a > 4.0f ? 4.0f : a;
  f32 l = d_fma(t, -3.05264912e-05f, 0.000627850823f);
  l = d_fma(l, t, -0.00602258462f);
  l = d_fma(l, t, 0.0362526216f);
  l = d_fma(l, t, -0.156234771f);
  l = d_fma(l, t, -0.913708985f);
  l = d_fma(l, t, -1.62955403f);
  l = d_fma(l, t, 0.000253731123f);
  u32 n;
  f32 p = d_exp2_part(l, n);
  f32 high = d_fma(-p, d_f32((n << 23) + 0x3f800000u), 1.0f);
  return __builtin_copysignf(a < 0.92f ? low : high, x);
}
D_FN f64 d_erf(f64 x) { return erf(x); }

//@ d_erfc
D_SIMD35 D_LIBM(erfc)
// In f64: e^(-x^2) / (1 + 2x) * P(t), t = (x - 4) / (x + 4); P: 2^-30.6.
D_FN f32 d_erfc(f32 x) {
  f64 a = (f64)__builtin_fabsf(x);
  a = a > 10.5 ? 10.5 : a;
  f64 t = (a - 4.0) / (a + 4.0);
  f64 q = d_fma(t, -0.000642036937353476, -0.001136828331189067);
  q = d_fma(q, t, 0.005043145484141592);
  q = d_fma(q, t, -0.016024403806385857);
  q = d_fma(q, t, 0.03722196415005647);
  q = d_fma(q, t, -0.06635461335679219);
  q = d_fma(q, t, 0.0937213140356426);
  q = d_fma(q, t, -0.10103781477090076);
  q = d_fma(q, t, 0.06809783265656497);
  q = d_fma(q, t, 0.015379629615416697);
  q = d_fma(q, t, -0.139621130691356);
  q = d_fma(q, t, 1.2329951187373451);
  f64 r = d_exp(-(a * a)) * q / d_fma(a, 2.0, 1.0);
  return (f32)(x < 0.0f ? 2.0 - r : r);
}
D_FN f64 d_erfc(f64 x) { return erfc(x); }

//@ d_lgamma
extern "C" f64 lgamma_r(f64, i32 *) noexcept;
D_SLOW f64 d_lgamma(f64 x) { i32 sign; return x == -__builtin_inf() ? __builtin_inf() : lgamma_r(x, &sign); }
D_FN f32 d_lgamma(f32 x) { return (f32)d_lgamma((f64)x); }

//@ d_digamma
// Reflection below 0, recurrence up to 10, then the asymptotic series (Abramowitz and Stegun
// 6.3.18).
D_SLOW f64 d_digamma(f64 x) {
  if (x == 0.0) return __builtin_copysign(__builtin_inf(), -x);
  f64 r = 0.0;
  if (x < 0.0) {
    f64 whole = __builtin_trunc(x);
    if (x == whole) return __builtin_nan("");
    r = -3.141592653589793 / d_tan(3.141592653589793 * (x - whole));
    x = 1.0 - x;
  }
  while (x < 10.0) { r -= 1.0 / x; x += 1.0; }
  f64 z = 1.0 / (x * x);
  f64 s = ((((((0.08333333333333333 * z - 0.021092796092796094) * z + 0.007575757575757576) * z - 0.004166666666666667) * z
             + 0.003968253968253968) * z - 0.008333333333333333) * z + 0.08333333333333333) * z;
  return r + d_log(x) - 0.5 / x - (x < 1e17 ? s : 0.0);
}
D_FN f32 d_digamma(f32 x) { return (f32)d_digamma((f64)x); }

//@ d_erfinv
// f32: x * P(w), w = -log(1 - x^2), one polynomial in w below 5 and one in sqrt(w) above (2^-23.5
// and 2^-24.6).
D_FN f32 d_erfinv(f32 x) {
  f32 w = -d_log(d_fma(-x, x, 1.0f));
  f32 a = w - 2.5f, b = __builtin_sqrtf(w) - 3.0f;
  f32 p = d_fma(a, -8.76583073e-09f, 2.32702551e-08f);
  p = d_fma(p, a, 4.65863337e-07f);
  p = d_fma(p, a, -3.46311572e-06f);
  p = d_fma(p, a, -4.96213124e-06f);
  p = d_fma(p, a, 0.000218345813f);
  p = d_fma(p, a, -0.00125274365f);
  p = d_fma(p, a, -0.00417738827f);
  p = d_fma(p, a, 0.24664028f);
  p = d_fma(p, a, 1.50140941f);
  f32 q = d_fma(b, 0.000113752409f, -0.000307962822f);
  q = d_fma(q, b, -5.37846645e-05f);
  q = d_fma(q, b, 0.00148307241f);
  q = d_fma(q, b, -0.00359903625f);
  q = d_fma(q, b, 0.00568774017f);
  q = d_fma(q, b, -0.00763693778f);
  q = d_fma(q, b, 0.00944519974f);
  q = d_fma(q, b, 1.00167489f);
  q = d_fma(q, b, 2.83297682f);
  f32 y = x * (w < 5.0f ? p : q);
  return __builtin_fabsf(x) == 1.0f ? __builtin_copysignf(D_INF, x) : y;
}
// f64: a closed first guess, then Halley steps on erf (on erfc near 1, where erf has no digits
// left).
D_SLOW f64 d_erfinv(f64 x) {
  f64 a = __builtin_fabs(x);
  if (!(a < 1.0)) return a == 1.0 ? __builtin_copysign(__builtin_inf(), x) : __builtin_nan("");
  f64 l = d_log1p(-a * a), b = 4.330746750799873 + 0.5 * l;
  f64 y = __builtin_sqrt(__builtin_sqrt(b * b - l * 6.802721088435375) - b);
  for (i32 i = 0; i < 3; ++i) {
    f64 f = a < 0.5 ? d_erf(y) - a : (1.0 - a) - d_erfc(y);
    f64 u = f / (1.1283791670955126 * d_exp(-y * y));
    y -= u / (1.0 + u * y);
  }
  return x == 0.0 ? x : __builtin_copysign(y, x);
}

// ---------------------------------------------------------------------------------- random numbers

//@ d_philox
// Philox-4x32-10 (Salmon et al., 2011). Counter = (low and high word of the element's number, low
// and high word of the stream), key = (low and high word of the seed). Each element has a counter
// of its own, so results depend neither on the number of threads nor on vector width.
D_FN void d_philox(i64 seed, i64 stream, i64 element, u32 &c0, u32 &c1, u32 &c2, u32 &c3) {
  u32 k0 = (u32)(u64)seed, k1 = (u32)((u64)seed >> 32);
  c0 = (u32)(u64)element, c1 = (u32)((u64)element >> 32), c2 = (u32)(u64)stream, c3 = (u32)((u64)stream >> 32);
#pragma GCC unroll 10
  for (i32 i = 0; i < 10; ++i) {
    u64 p0 = 0xd2511f53ull * (u64)c0, p1 = 0xcd9e8d57ull * (u64)c2;
    u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1, c3 = (u32)p0, c0 = n0, c2 = n2;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
}

//@ d_rand
// Uniform on [0, 1): the upper 24 bits of the first word.
D_FN f32 d_rand(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element, a, b, c, d);
  return (f32)(i32)(a >> 8) * 5.9604644775390625e-08f;
}

//@ d_rand64
// Uniform on [0, 1) with 53 bits, of the first two words.
D_FN f64 d_rand64(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element, a, b, c, d);
  return d_f64(0x3ff0000000000000ull | ((u64)a << 20) | (b >> 12)) - 1.0;
}

//@ d_randn
// Normal: Box and Muller's sqrt(-2 ln u) cos(2 pi v), u = ((x0 >> 8) + 1) 2^-24 in (0, 1], v = (x1
// >> 8) 2^-24 in [0, 1).
D_FN f32 d_randn(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element, a, b, c, d);
  f32 u = (f32)(i32)((a >> 8) + 1u) * 5.9604644775390625e-08f;
  u32 n = (b + 0x20000000u) >> 30;                               // nearest quarter turn
  f32 r = (f32)((i32)(((b >> 8) << 8) - (n << 30)) >> 8) * 3.74507035e-07f;  // 2 pi * 2^-24
  f32 z = r * r;
  f32 turn = n & 1u ? d_sin_poly(r, z) : d_cos_poly(z);
  f32 e, f = d_log_split(u, e);
  f32 t = d_fma(e, 0.693145752f, f + d_fma(e, 1.42860677e-06f, d_log_poly(f)));
  return __builtin_sqrtf(-2.0f * t) * d_f32(d_bits(turn) ^ (((n + 1u) & 2u) << 30));
}

//@ d_randn64
D_FN f64 d_randn64(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element, a, b, c, d);
  f64 u = 2.0 - d_f64(0x3ff0000000000000ull | ((u64)a << 20) | (b >> 12));
  f64 v = d_f64(0x3ff0000000000000ull | ((u64)c << 20) | (d >> 12)) - 1.0;
  return __builtin_sqrt(-2.0 * d_log(u)) * d_cos(6.283185307179586 * v);
}

//@ d_rand_bits
// 64 random bits: the first two words.
D_FN i64 d_rand_bits(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element, a, b, c, d);
  return (i64)(((u64)b << 32) | a);
}
