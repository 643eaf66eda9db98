// Continues prelude.h: exponentials, logarithms, hyperbolic functions.

// ------------------------------------------------------------------------------------- exp and log

//@ d_exp_part
// e^t = p * 2^n with |log2 p| <= 1/2; t within +-2^21. 1.5 * 2^23 and a bias are added so that the
// mantissa's low bits hold n + bias, which are returned as they are: `s << 23` are the bits of 2^n
// where the bias is 127. q: 2^-28.2.
template <i32 bias> D_FN f32 d_exp_part(f32 t, u32 &s) {
  constexpr f32 whole = 12582912.0f + bias;
  f32 sum = d_fma(t, 1.44269504f, whole);
  f32 k = sum - whole;
  f32 r = d_fma(k, -0.693145752f, t);
  r = d_fma(k, -1.42860677e-06f, r);
  f32 q = d_poly(r, 0.00138383429f, 0.0083691664f, 0.0416681021f, 0.166665167f, 0.49999994f, 1.0f);
  s = d_bits(sum);
  return d_fma(q, r, 1.0f);
}

//@ d_scale
// p * 2^n for n from -160 to 160, n + 254 in the low bits of s: two factors, so that large and
// subnormal results round once. Halves of s have the bias of exponents, and the shifts drop the rest.
D_FN f32 d_scale(f32 p, u32 s) {
  u32 h = s >> 1;
  return (p * d_f32(h << 23)) * d_f32((s - h) << 23);
}

//@ d_exp_tail64
// e^r - 1 for |r| <= ln 2 / 2. q: 2^-60.
D_FN f64 d_exp_tail64(f64 r) {
  f64 q = d_poly(r, 2.0826570710463408e-09, 2.5112085131019884e-08, 2.755758232495889e-07,
      2.755723472586574e-06, 2.4801586925661706e-05, 0.00019841269896517287, 0.0013888888889116394,
      0.008333333333316982, 0.041666666666666095, 0.16666666666666682, 0.5);
  return d_fma(r * r, q, r);
}

//@ d_exp_rest64
// t = k ln 2 + r; t within +-2^50.
D_FN f64 d_exp_rest64(f64 t, f64 &k) {
  k = d_fma(t, 1.4426950408889634, 6755399441055744.0) - 6755399441055744.0;
  return d_fma(k, -1.9082149292705877e-10, d_fma(k, -0.6931471803691238, t));
}

//@ d_scale64
// p * 2^k as d_scale, k from -2044 to 2046.
D_FN f64 d_scale64(f64 p, f64 k) {
  f64 h = d_fma(k, 0.5, 6755399441055744.0);
  f64 g = (k - (h - 6755399441055744.0)) + 6755399441055744.0;
  return (p * d_f64((d_bits(h) + 1023ull) << 52)) * d_f64((d_bits(g) + 1023ull) << 52);
}

//@ d_exp
// What lies outside is chosen at the end: two clamps before it take the compiler seven instructions.
D_FN f32 d_exp(f32 x) {
  u32 s;
  f32 p = d_exp_part<254>(x, s);
  f32 y = d_scale(p, s);
  y = x > 89.0f ? D_INF : y;
  return x < -105.0f ? 0.0f : y;                                 // NaN passes both
}
D_FN f64 d_exp(f64 x) {
  f64 t = x > 711.0 ? 711.0 : x;
  t = t < -746.0 ? -746.0 : t;
  f64 k, r = d_exp_rest64(t, k);
  return d_scale64(d_exp_tail64(r) + 1.0, k);
}

//@ d_exp_nonpositive
// Of a number that is not positive: 2^(n + 64) is a number however small the result, which rounds
// once.
D_FN f32 d_exp_nonpositive(f32 x) {
  u32 s;
  f32 p = d_exp_part<191>(x, s);
  f32 y = (p * d_f32(s << 23)) * 5.42101086e-20f;                // 2^-64
  return x < -105.0f ? 0.0f : y;
}

//@ d_one_plus_exp
// 1 + e^x: a power that the sum does not show need not be exact, and one rounding makes the sum.
D_FN f32 d_one_plus_exp(f32 x) {
  f32 t = -80.0f > x ? -80.0f : x;
  t = 89.0f < t ? 89.0f : t;
  u32 s;
  f32 p = d_exp_part<126>(t, s);                                 // twice p, half of 2^n
  return d_fma(p + p, d_f32(s << 23), 1.0f);
}
D_FN f64 d_one_plus_exp(f64 x) { return 1.0 + d_exp(x); }

//@ d_divisor_scale
// For many divisions by b: a power of two with b's sign, times which b is positive and has a
// reciprocal.
D_FN f32 d_divisor_scale(f32 b) {
  f32 size = __builtin_fabsf(b);
  f32 scale = size < 0x1p-64f ? 0x1p64f : (size > 0x1p64f ? 0x1p-64f : 1.0f);
  return __builtin_copysignf(scale, b);
}

//@ d_div_by
// a / b rounded as a division is (Markstein 1990) but for a below 2^-100, within a unit in the last
// place there: by is b times its scale, inverse 1 / by. Where the remainder is no number, the
// quotient is 0, infinite or no number already. A remainder of +0 times -inverse is the zero that
// changes no other. Six operations, where vectors of divisions take 10 to 16 cycles.
#if defined(__FMA__) || defined(__aarch64__)
D_FN f32 d_div_by(f32 a, f32 by, f32 inverse, f32 scale) {
  f32 q = a * inverse;
  f32 better = d_fma(d_fma(q, by, -a), -inverse, q);
  return (better == better ? better : q) * scale;
}
#else
D_FN f32 d_div_by(f32 a, f32 by, f32 inverse, f32 scale) { return a / by * scale; }
#endif

//@ d_div_by_fast
// The same within 2^-23, as far as it is finite.
D_FN f32 d_div_by_fast(f32 a, f32, f32 inverse, f32 scale) { return a * inverse * scale; }

//@ d_exp2_part
// 2^t = p * 2^n as d_exp_part; 2^-25.9, all of it the rounding of ln 2.
template <i32 bias> D_FN f32 d_exp2_part(f32 t, u32 &s) {
  constexpr f32 whole = 12582912.0f + bias;
  f32 sum = t + whole;
  f32 r = t - (sum - whole);
  f32 q = d_poly(r, 0.000153532441f, 0.00133990031f, 0.00961843878f, 0.0555033199f, 0.240226477f,
      0.693147182f);
  s = d_bits(sum);
  return d_fma(q, r, 1.0f);
}

//@ d_exp2
D_FN f32 d_exp2(f32 x) {
  u32 s;
  f32 p = d_exp2_part<254>(x, s);
  f32 y = d_scale(p, s);
  y = x > 130.0f ? D_INF : y;
  return x < -151.0f ? 0.0f : y;
}
D_FN f64 d_exp2(f64 x) {
  f64 t = x > 1025.0 ? 1025.0 : x;
  t = t < -1080.0 ? -1080.0 : t;
  f64 k = (t + 6755399441055744.0) - 6755399441055744.0;
  return d_scale64(d_exp_tail64((t - k) * 0.6931471805599453) + 1.0, k);
}

//@ d_ldexp
// x * 2^n, n given as a value of x's type; in ATen it is that product, roundings included.
D_FN f32 d_ldexp(f32 x, f32 n) { return x * d_exp2(n); }
D_FN f64 d_ldexp(f64 x, f64 n) { return x * d_exp2(n); }

//@ d_expm1
// 2 * (2^(n-1) * (e^r - 1) + (2^(n-1) - 1/2)): exact where n = 0. q: 2^-30.6.
D_FN f32 d_expm1(f32 x) {
  f32 t = x > 90.0f ? 90.0f : x;
  t = t < -25.0f ? -25.0f : t;
  f32 sum = d_fma(t, 1.44269504f, 12582912.0f);
  f32 k = sum - 12582912.0f;
  f32 r = d_fma(k, -0.693145752f, t);
  r = d_fma(k, -1.42860677e-06f, r);
  f32 q = d_poly(r, 0.000196581546f, 0.00139352074f, 0.0083336439f, 0.0416664667f, 0.166666657f,
      0.5f);
  f32 p = d_fma(r * r, q, r);
  u32 n = d_bits(sum) - 0x4b400000u;
  n = n == 129u ? 128u : n;                                      // beyond the largest result anyway
  f32 h = d_f32((n + 126u) << 23);
  f32 y = 2.0f * d_fma(h, p, h - 0.5f);
  y = x > 89.0f ? D_INF : y;
  return __builtin_fabsf(x) < 1e-7f ? x : y;
}
D_FN f64 d_expm1(f64 x) {
  f64 t = x > 709.79 ? 709.79 : x;
  t = t < -40.0 ? -40.0 : t;
  f64 k, p = d_exp_tail64(d_exp_rest64(t, k));
  f64 h = d_f64((d_bits(k + 6755399441055744.0) + 1022ull) << 52);
  f64 y = 2.0 * d_fma(h, p, h - 0.5);
  y = x > 709.782712893384 ? __builtin_inf() : y;
  return __builtin_fabs(x) < 1e-17 ? x : y;
}

//@ d_log_poly
// log(1 + f) - f for sqrt(1/2) - 1 <= f <= sqrt(2) - 1: 2^-27.5 of log(1 + f).
D_FN f32 d_log_poly(f32 f) {
  f32 q = d_poly(f, -0.0762184933f, 0.12904498f, -0.132429913f, 0.141818151f, -0.166090816f,
      0.200019747f, -0.250015825f, 0.333333254f, -0.499999881f);
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
  f64 r = d_poly(z, 0.13235815680401197, 0.1325204146976466, 0.15386993172477778,
      0.18181778268049117, 0.22222222607879122, 0.28571428569406615, 0.4000000000000493);
  r = d_fma(r, z, 0.6666666666666666) * z;
  f64 half = 0.5 * f * f;
  f64 low = d_fma(e, 1.9082149292705877e-10, s * (half + r));
  return d_fma(e, 0.6931471803691238, f - (half - low));
}

//@ d_log_exponent64
// e with u = m * 2^e, sqrt(1/2) <= m < sqrt(2), for the bits u of a positive normal number; as an
// integer biased by 1023.
D_FN u64 d_log_exponent64(u64 u) { return (u + 0x00095f619980c433ull) >> 52; }

//@ d_log_split64
// As d_log_split.
D_FN f64 d_log_split64(f64 x, f64 &e) {
  bool small = x < 2.2250738585072014e-308;
  u64 u = d_bits(small ? x * 18014398509481984.0 : x);
  u64 b = d_log_exponent64(u);
  e = d_f64(b | 0x4330000000000000ull) - (small ? 4503599627371573.0 : 4503599627371519.0);
  return d_f64(u - ((b - 1023ull) << 52)) - 1.0;
}

//@ d_log
D_FN f32 d_log(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_fma(e, 1.42860677e-06f, d_log_poly(f));
  return d_log_edge(x, d_fma(e, 0.693145752f, f + t));
}
D_FN f64 d_log(f64 x) {
  f64 e, f = d_log_split64(x, e);
  return d_log_edge(x, d_log_tail64(f, e));
}

//@ d_log2
D_FN f32 d_log2(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_log_poly(f);
  t = d_fma(t, 1.44269504f, f * 1.92596303e-08f);
  return d_log_edge(x, e + d_fma(f, 1.44269502f, t));
}
D_FN f64 d_log2(f64 x) {
  f64 e, l = d_log_tail64(d_log_split64(x, e), 0.0);
  return d_log_edge(x, d_fma(l, 2.0355273740931033e-17, d_fma(l, 1.4426950408889634, e)));
}

//@ d_log10
D_FN f32 d_log10(f32 x) {
  f32 e, f = d_log_split(x, e);
  f32 t = d_fma(d_log_poly(f), 0.434294492f, f * -1.010305e-08f);
  t = d_fma(e, 4.60503898e-06f, d_fma(f, 0.434294492f, t));
  return d_log_edge(x, d_fma(e, 0.301025391f, t));
}
D_FN f64 d_log10(f64 x) {
  f64 e, l = d_log_tail64(d_log_split64(x, e), 0.0);
  f64 low = d_fma(l, 1.098319650216765e-17, e * -2.8037281277851704e-18);
  return d_log_edge(x, d_fma(e, 0.3010299956639812, d_fma(l, 0.4342944819032518, low)));
}

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

//@ d_log1p_unit
// Of a number from 0 to 1: x + x^2 Q(x), 2^-27.5.
D_FN f32 d_log1p_unit(f32 x) {
  f32 q = d_poly(x, -0.003291074186563492f, 0.02008846029639244f, -0.0574604831635952f,
      0.10661371052265167f, -0.15344977378845215f, 0.1969212144613266f, -0.24958020448684692f,
      0.33330464363098145f, -0.4999993145465851f);
  return d_fma(x * x, q, x);
}

//@ d_log_tail40
// d_log_tail64 to 2^-45: f32 functions that need more than f32.
D_FN f64 d_log_tail40(f64 f, f64 e) {
  f64 s = f / (2.0 + f), z = s * s;
  f64 r = d_poly(z, 0.1958493352716572, 0.22176141857984977, 0.2857211008809074,
      0.39999995614996886, 0.6666666667581493);
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
D_LIBM2(pow)
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
  f64 q = d_poly(z, 2.4708221508193106e-05, 0.00019909006284391935, 0.0013889197690400016,
      0.008333281705725126, 0.04166666439863868, 0.1666666678479191, 0.5000000000428465);
  q = d_fma(q, z * z, z) + 1.0;
  f32 r = (f32)(q * d_f64((d_bits(sum) + 1023ull) << 52));
  f32 h = 0.5f * y;
  bool whole = __builtin_truncf(y) == y, odd = whole & (__builtin_truncf(h) != h);
  r = odd ? __builtin_copysignf(r, x) : r;
  r = (x < 0.0f) & !whole & (a < D_INF) ? D_NAN : r;
  r = (a == 1.0f) & (__builtin_fabsf(y) == D_INF) ? 1.0f : r;       // -1 too
  return (y == 0.0f) | (x == 1.0f) ? 1.0f : r;
}
D_SLOW f64 d_pow(f64 x, f64 y) { return pow(x, y); }
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
D_FN f32 d_sigmoid(f32 x) { return 1.0f / d_one_plus_exp(-x); }
D_FN f64 d_sigmoid(f64 x) { return 1.0 / d_one_plus_exp(-x); }

//@ d_signed
// A number that is not negative, with the sign of x.
D_FN f32 d_signed(f32 y, f32 x) { return d_f32(d_bits(y) | (d_bits(x) & 0x80000000u)); }

//@ d_tanh
// Odd polynomial (2^-28.4) below 0.6, 1 - 2 / (e^2x + 1) above.
D_FN f32 d_tanh(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_poly(z, -0.00589796668f, 0.0207986254f, -0.0537847169f, 0.133319363f, -0.333332986f);
  f32 low = d_fma(q, z * a, a);
  u32 s;
  f32 t = 10.0f < a ? 10.0f : a;
  f32 p = d_exp_part<127>(t + t, s);
  f32 high = 1.0f - 2.0f / d_fma(p, d_f32(s << 23), 1.0f);
  return d_signed(a < 0.6f ? low : high, x);
}
D_FN f64 d_tanh(f64 x) {
  f64 a = __builtin_fabs(x);
  f64 u = d_expm1(22.0 < a ? 44.0 : a + a);
  return __builtin_copysign(u / (u + 2.0), x);
}

//@ d_one_plus_tanh
// 1 + tanh(x) = 2 / (1 + e^-2x), of which nothing is lost where tanh is near -1.
D_FN f32 d_one_plus_tanh(f32 x) { return 2.0f / d_one_plus_exp(-2.0f * x); }
D_FN f64 d_one_plus_tanh(f64 x) { return 1.0 + d_tanh(x); }

//@ d_half_exp64
// e^x / 2 for x >= 0, which overflows where that does.
D_FN f64 d_half_exp64(f64 x) {
  f64 k, r = d_exp_rest64(712.0 < x ? 712.0 : x, k);
  return d_scale64(d_exp_tail64(r) + 1.0, k - 1.0);
}

//@ d_sinh
// Odd polynomial (2^-31.6) below 1, h - 1/(4h) with h = e^x / 2 above.
D_FN f32 d_sinh(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_poly(z, 2.78221319e-06f, 0.000198428956f, 0.00833331048f, 0.166666672f);
  f32 low = d_fma(q, z * a, a);
  u32 s;
  f32 p = d_exp_part<254>(91.0f < a ? 91.0f : a, s);
  f32 h = d_scale(p, s - 1u);
  return d_signed(a < 1.0f ? low : h - 0.25f / h, x);
}
D_FN f64 d_sinh(f64 x) {
  f64 a = __builtin_fabs(x), u = d_expm1(1.0 < a ? 1.0 : a), h = d_half_exp64(a);
  return __builtin_copysign(a < 1.0 ? 0.5 * (u + u / (u + 1.0)) : h - 0.25 / h, x);
}

//@ d_cosh
D_FN f32 d_cosh(f32 x) {
  f32 a = __builtin_fabsf(x);
  u32 s;
  f32 p = d_exp_part<254>(91.0f < a ? 91.0f : a, s);
  f32 h = d_scale(p, s - 1u);
  return h + 0.25f / h;
}
D_FN f64 d_cosh(f64 x) {
  f64 h = d_half_exp64(__builtin_fabs(x));
  return h + 0.25 / h;
}

//@ d_asinh
D_FN f32 d_asinh(f32 x) {
  f64 a = (f64)__builtin_fabsf(x), z = a * a;
  f64 y = d_log1p40(a + z / (1.0 + __builtin_sqrt(z + 1.0)));
  y = a < __builtin_inf() ? y : a;
  return __builtin_copysignf((f32)y, x);
}
D_FN f64 d_asinh(f64 x) {
  f64 a = __builtin_fabs(x), z = a * a;
  bool far = a > 1e150;                                          // log 2a
  f64 y = d_log1p(far ? a : a + z / (1.0 + __builtin_sqrt(z + 1.0)));
  return __builtin_copysign(far ? y + 0.6931471805599453 : y, x);
}

//@ d_acosh
D_FN f32 d_acosh(f32 x) {
  f64 t = (f64)x - 1.0;
  f32 y = (f32)d_log1p40(t + __builtin_sqrt(d_fma(t, t, 2.0 * t)));
  y = x == D_INF ? x : y;
  return x >= 1.0f ? y : D_NAN;
}
D_FN f64 d_acosh(f64 x) {
  f64 t = x - 1.0;
  bool far = x > 1e150;
  f64 y = d_log1p(far ? x : t + __builtin_sqrt(d_fma(t, t, 2.0 * t)));
  return x >= 1.0 ? (far ? y + 0.6931471805599453 : y) : __builtin_nan("");
}

//@ d_atanh
D_FN f32 d_atanh(f32 x) {
  f64 a = (f64)__builtin_fabsf(x);
  f32 y = (f32)(0.5 * d_log1p40((a + a) / (1.0 - a)));
  y = a == 1.0 ? D_INF : y;
  return a <= 1.0 ? __builtin_copysignf(y, x) : D_NAN;
}
D_FN f64 d_atanh(f64 x) {
  f64 a = __builtin_fabs(x), y = 0.5 * d_log1p((a + a) / (1.0 - a));
  return a <= 1.0 ? __builtin_copysign(y, x) : __builtin_nan("");
}
