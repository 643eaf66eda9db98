// Scalar functions of generated CPU code. No header is included: a unit that uses them compiles in
// milliseconds.
//
// A line `//@ name` opens a helper; `prelude.py` emits `base`, the wanted helpers and those they
// mention. The whole file is valid C++17 too. Rules for what stands here:
//  - f32 functions are branch-free (selects only) so that GCC vectorises loops that call them, on
//    AVX2 and AVX-512. They cover the whole range, infinities, NaN, signed zeros and subnormal
//    numbers included; errors are at most 2 ulp, tested.
//  - No -ffast-math: results rely on NaN and infinity. Contraction of a*b+c to a fused multiply-add
//    is harmless everywhere; where it is needed for accuracy it is written d_fma.
//  - f64: exp, log, log1p are inline; the rest is libm, one number at a time.
//  - A number does not depend on its place in a loop: vectors and left-over elements round alike.
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
// Vectors at any address. By memcpy they are numbers of 512 bits to g++ (`FLAGS` in kernels.py).
template <class V> struct __attribute__((packed, may_alias)) d_vector { V v; };
template <class V> D_FN V d_load(const void* from) { return ((const d_vector<V>*)from)->v; }
template <class V> D_FN void d_store(void* to, V x) { ((d_vector<V>*)to)->v = x; }

//@ d_bits
D_FN u32 d_bits(f32 x) { return __builtin_bit_cast(u32, x); }
D_FN u64 d_bits(f64 x) { return __builtin_bit_cast(u64, x); }

//@ d_f32
D_FN f32 d_f32(u32 x) { return __builtin_bit_cast(f32, x); }

//@ d_f64
D_FN f64 d_f64(u64 x) { return __builtin_bit_cast(f64, x); }

//@ d_opaque
// An integer of which the compiler knows nothing, where what it knows leads it astray: masked by
// ones that it does not see. The call leaves the loop, because its result is always the same.
#if defined(__GNUC__) && !defined(__clang__)
static __attribute__((noipa, const)) i64 d_ones() { return -1; }
template <class T> D_FN T d_opaque(T t) { return (T)(t & (T)d_ones()); }
#else
template <class T> D_FN T d_opaque(T t) { return t; }
#endif

//@ d_alias
// The same address, which g++ does not know to be the same, where it makes wrong code of what lies
// side by side (its bug 114375, of versions before 11.5, 12.4, 13.3 and 14).
template <class T> D_FN T d_alias(T p) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ * 100 + __GNUC_MINOR__ < 1303 && \
    __GNUC__ * 100 + __GNUC_MINOR__ != 1204 && __GNUC__ * 100 + __GNUC_MINOR__ != 1205 && \
    __GNUC__ * 100 + __GNUC_MINOR__ != 1105
  asm("" : "+r"(p));
#endif
  return p;
}

//@ d_fma
#if defined(__FMA__) || defined(__aarch64__)
D_FN f32 d_fma(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
D_FN f64 d_fma(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
#else  // the product of two floats is exact in f64
D_FN f32 d_fma(f32 a, f32 b, f32 c) { return (f32)((f64)a * (f64)b + (f64)c); }
D_FN f64 d_fma(f64 a, f64 b, f64 c) { return a * b + c; }
#endif

//@ d_poly
// A polynomial in z, the highest coefficient first.
template <class T> D_FN T d_poly(T, T q) { return q; }
template <class T, class... Rest> D_FN T d_poly(T z, T q, T c, Rest... rest) {
  return d_poly(z, d_fma(q, z, c), rest...);
}

//@ D_LIBM
// Declarations of libm's functions. Their vector variants (libmvec) round otherwise than they do, so
// that a number would depend on its place in a loop, and one computed again not be what it was.
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
// Of a float that is an f16 value already: the exponent is rebiased exactly by a multiplication. A
// NaN of which the lower bits alone are set keeps one. No &&: g++ 12 has no vectors for branches.
D_FN u16 d_store_f16(f32 x) {
  u32 u = d_bits(x);
  u32 a = u & 0x7fffffffu;
  u32 r = d_bits(d_f32(a) * 1.925929944387236e-34f) >> 13;       // 2^-112
  u32 low = (u32)((a & 0x1fffu) != 0) & (u32)((a & 0x7fe000u) == 0);
  u32 special = (a >> 13) - 0x38000u + low;
  r = a >= 0x7f800000u ? special : r;
  return (u16)(r | (u >> 16 & 0x8000u));
}

//@ d_f32_to_f8e4m3
// The nearest (ties to even), as its bits: 4 bits of exponent, 3 of the fraction; 448 where it is
// too large. Subnormal ones: adding 2^14 rounds to 2^-9.
D_FN u8 d_f32_to_f8e4m3(f32 x) {
  u32 a = d_bits(x) & 0x7fffffffu;
  u32 normal = (a + 0xc407ffffu + ((a >> 20) & 1u)) >> 20;
  u32 small = d_bits(d_f32(a) + 16384.0f) - 0x46800000u;
  u32 r = a < 0x3c800000u ? small : normal;                      // 2^-6
  r = a > 0x43e00000u ? (a > 0x7f800000u ? 0x7fu : 0x7eu) : r;   // 448
  return (u8)(r | (d_bits(x) >> 24 & 0x80u));
}

//@ d_f8e4m3_to_f32
D_FN f32 d_f8e4m3_to_f32(u8 x) {
  u32 u = x & 0x7fu;
  f32 m = u == 0x7fu ? D_NAN : d_f32(u << 20) * 1.329227995784916e36f;  // 2^120
  return d_f32(d_bits(m) | (u32)(x & 0x80u) << 24);
}

//@ d_f32_to_f8e5m2
// 5 bits of exponent, 2 of the fraction; infinity from 61440 on.
D_FN u8 d_f32_to_f8e5m2(f32 x) {
  u32 a = d_bits(x) & 0x7fffffffu;
  u32 normal = (a + 0xc80fffffu + ((a >> 21) & 1u)) >> 21;
  u32 small = d_bits(d_f32(a) + 128.0f) - 0x43000000u;
  u32 r = a < 0x38800000u ? small : normal;                      // 2^-14
  r = a >= 0x47800000u ? (a > 0x7f800000u ? 0x7fu : 0x7cu) : r;  // 65536
  return (u8)(r | (d_bits(x) >> 24 & 0x80u));
}

//@ d_f8e5m2_to_f32
D_FN f32 d_f8e5m2_to_f32(u8 x) { return d_load_f16((u16)((u32)x << 8)); }

//@ d_f32_to_f16
// d_store_f16(d_round_f16(x)) in half as many instructions, as d_f32_to_f8e5m2: subnormal ones are
// rounded by adding 0.5.
D_FN u16 d_f32_to_f16(f32 x) {
  u32 a = d_bits(x) & 0x7fffffffu;
  u32 normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  u32 small = d_bits(d_f32(a) + 0.5f) - 0x3f000000u;
  u32 r = a < 0x38800000u ? small : normal;                      // 2^-14
  r = a >= 0x477ff000u ? 0x7c00u : r;                            // 65520
  r = a > 0x7f800000u ? 0x7e00u : r;
  return (u16)(r | (d_bits(x) >> 16 & 0x8000u));
}

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
// Through f64; bits that do not fit into 53 are reduced into a sticky bit, so that there is one
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
D_FN i32 d_to_i32(f32 x) {
  return x >= -2147483648.0f && x < 2147483648.0f ? (i32)x : (-2147483647 - 1);
}
D_FN i32 d_to_i32(f64 x) {
  return x > -2147483649.0 && x < 2147483648.0 ? (i32)x : (-2147483647 - 1);
}
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

//@ d_truncated
// (f32)d_to_i64(x) without the integers, of which vectors hold half as many. The sum makes 0 of -0.
D_FN f32 d_truncated(f32 x) {
  bool fits = x >= -9223372036854775808.0f && x < 9223372036854775808.0f;
  return fits ? __builtin_truncf(x) + 0.0f : -9223372036854775808.0f;
}

//@ d_to_i16
template <class T> D_FN i16 d_to_i16(T x) { return (i16)d_to_i32(x); }

//@ d_to_i8
template <class T> D_FN i8 d_to_i8(T x) { return (i8)d_to_i32(x); }

//@ d_to_u8
// Eager goes through 64 bits: what does not fit there becomes 0.
D_FN u8 d_to_u8(f32 x) {
  return (u8)d_to_i32(x - 4294967296.0f * __builtin_truncf(x * 2.3283064365386963e-10f));
}
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
// The other argument where one is NaN; the first of two zeros, as ATen's.
template <class T> D_FN T d_fmax(T a, T b) { T m = a >= b ? a : b; return b != b ? a : m; }

//@ d_fmin
template <class T> D_FN T d_fmin(T a, T b) { T m = a <= b ? a : b; return b != b ? a : m; }

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

//@ d_nextafter_f16
D_FN f32 d_nextafter_f16(f32 x, f32 y) {
  u32 u = d_store_f16(x), v = d_store_f16(y);
  u32 step = (x < y) == (x > 0.0f) ? u + 1u : u - 1u;
  f32 r = d_load_f16((u16)(x == 0.0f ? (v & 0x8000u) | 1u : step));
  r = x == y ? y : r;
  return x != x || y != y ? x + y : r;
}

//@ d_nextafter_bf16
D_FN f32 d_nextafter_bf16(f32 x, f32 y) {
  u32 u = d_store_bf16(x), v = d_store_bf16(y);
  u32 step = (x < y) == (x > 0.0f) ? u + 1u : u - 1u;
  f32 r = d_load_bf16((u16)(x == 0.0f ? (v & 0x8000u) | 1u : step));
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
  u64 zero = b == 0.0 ? ~0ull : 0ull;  // a mask, lest the call moves into a branch
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
// A count below 0 or beyond the width gives the sign. Narrow types shift as i32.
D_FN i64 d_rshift(i64 a, i64 n) { return a >> ((u64)n < 63ull ? n : 63ll); }
template <class T> D_FN T d_rshift(T a, T n) {
  i32 limit = 8 * (i32)sizeof(T) - ((T)-1 < 0);
  return (T)((i32)a >> ((u32)(i32)n < (u32)limit ? (i32)n : limit));
}
