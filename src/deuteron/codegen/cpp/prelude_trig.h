// Continues prelude_math.h: trigonometry, error and gamma functions, random numbers.

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
  u64 v0 = (w0 << l) | ((w1 >> 1) >> r), v1 = (w1 << l) | ((w2 >> 1) >> r);
  u64 v2 = (w2 << l) | ((w3 >> 1) >> r);
  u64 t = ((m * v0) << 32) + m * v1 + ((m * v2) >> 32);  // x * 2/pi mod 4, in units of 2^-62
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

//@ d_trig_near64
// sin and cos for |x| < 2^30 in f64. x = quadrant * pi/2 + r + low: three parts of pi/2, of which the
// product with the first is taken off exactly; the polynomials: 2^-55, 2^-59.
D_FN f64 d_trig_near64(f64 x, f64 &low, u64 &quadrant) {
  f64 sum = d_fma(x, 0.6366197723675814, 6755399441055744.0);
  f64 k = sum - 6755399441055744.0;
  f64 t = d_fma(k, -1.5707963267948966, x);
  f64 p = k * 6.123233995736766e-17, r = t - p, b = r - t;
  f64 lost = (t - (r - b)) - (p + b);                            // t - p - r (Knuth)
  low = d_fma(k, 1.4973849048591698e-33, lost - d_fma(k, 6.123233995736766e-17, -p));
  quadrant = d_bits(sum);
  return r;
}

//@ d_sin_poly64
D_FN f64 d_sin_poly64(f64 r, f64 z, f64 low) {
  f64 q = d_poly(z, 1.591672619388911e-10, -2.505111227257324e-08, 2.755731600817155e-06,
      -0.0001984126983657571, 0.008333333333330827, -0.16666666666666666);
  return r + d_fma(z * r, q, d_fma(-0.5 * z, low, low));
}

//@ d_cos_poly64
D_FN f64 d_cos_poly64(f64 r, f64 z, f64 low) {
  f64 q = d_poly(z, -1.1381754653662795e-11, 2.0876134024090145e-09, -2.755731721268659e-07,
      2.4801587298651292e-05, -0.0013888888888887322, 0.041666666666666664);
  f64 h = 0.5 * z, w = 1.0 - h;
  return w + d_fma(z * z, q, d_fma(-r, low, (1.0 - w) - h));
}

//@ d_sin_near64
D_FN f64 d_sin_near64(f64 x) {
  u64 n;
  f64 low, r = d_trig_near64(x, low, n), z = r * r;
  f64 s = d_sin_poly64(r, z, low), c = d_cos_poly64(r, z, low);
  f64 y = d_f64(d_bits(n & 1u ? c : s) ^ ((n & 2u) << 62));
  return x == 0.0 ? x : y;
}

//@ d_cos_near64
D_FN f64 d_cos_near64(f64 x) {
  u64 n;
  f64 low, r = d_trig_near64(x, low, n), z = r * r;
  f64 s = d_sin_poly64(r, z, low), c = d_cos_poly64(r, z, low);
  return d_f64(d_bits(n & 1u ? s : c) ^ (((n + 1u) & 2u) << 62));
}

//@ d_tan_near64
D_FN f64 d_tan_near64(f64 x) {
  u64 n;
  f64 low, r = d_trig_near64(x, low, n), z = r * r;
  f64 s = d_sin_poly64(r, z, low), c = d_cos_poly64(r, z, low);
  f64 y = (n & 1u ? -c : s) / (n & 1u ? s : c);
  return x == 0.0 ? x : y;
}

//@ d_is_near64
#if defined(__FMA__) || defined(__aarch64__)
D_FN bool d_is_near64(f64 x) { return __builtin_fabs(x) < 1073741824.0; }
#else  // without it the first product rounds
D_FN bool d_is_near64(f64) { return false; }
#endif

//@ d_sin
D_LIBM(sin)
D_FN f32 d_sin(f32 x) {
  u32 n;
  f32 r = d_trig(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  f32 y = d_f32(d_bits(n & 1u ? c : s) ^ ((n & 2u) << 30));
  return x == 0.0f ? x : y;
}
D_SLOW f64 d_sin(f64 x) { return d_is_near64(x) ? d_sin_near64(x) : sin(x); }

//@ d_cos
D_LIBM(cos)
D_FN f32 d_cos(f32 x) {
  u32 n;
  f32 r = d_trig(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  return d_f32(d_bits(n & 1u ? s : c) ^ (((n + 1u) & 2u) << 30));
}
D_SLOW f64 d_cos(f64 x) { return d_is_near64(x) ? d_cos_near64(x) : cos(x); }

//@ d_tan
D_LIBM(tan)
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
D_SLOW f64 d_tan(f64 x) { return d_is_near64(x) ? d_tan_near64(x) : tan(x); }

//@ d_asin_poly
// asin s - s for |s| <= 1/2, z = s^2: 2^-31.6 of asin s.
D_FN f32 d_asin_poly(f32 s, f32 z) {
  f32 q = d_poly(z, 0.0376822613f, 0.0143203307f, 0.0318385437f, 0.0445133895f, 0.0750052184f,
      0.166666597f);
  return q * (z * s);
}

//@ d_atan_poly
// atan t for |t| <= 1: 2^-31.
D_FN f32 d_atan_poly(f32 t) {
  f32 z = t * t;
  f32 q = d_poly(z, 0.00113452214f, -0.00742536318f, 0.022777617f, -0.0449832566f, 0.0676364899f,
      -0.0882146209f, 0.110612333f, -0.142803431f, 0.199997157f, -0.333333284f);
  return d_fma(q, z * t, t);
}

//@ d_atan_poly64
// atan n/d for 0 <= n <= d: 2^-59 for t up to sqrt(2) - 1, pi/4 + atan t beyond.
D_FN f64 d_atan_poly64(f64 n, f64 d) {
  bool far = n > 0.41421356237309503 * d;
  f64 t = (far ? n - d : n) / (far ? n + d : d), z = t * t;
  f64 q = d_poly(z, 0.016284375049956695, -0.034569315063240416, 0.0455154473401848,
      -0.05230443640686046, 0.05878927554473668, -0.06666424760200507, 0.07692296368042296,
      -0.09090908753259112, 0.11111111105150588, -0.14285714285659779, 0.19999999999999804,
      -0.3333333333333333);
  f64 p = d_fma(z * t, q, t);
  return far ? 0.7853981633974483 + (p + 3.061616997868383e-17) : p;
}

//@ d_atan
D_FN f32 d_atan(f32 x) {
  f32 a = __builtin_fabsf(x);
  bool big = a > 1.0f;
  f32 p = d_atan_poly((big ? -1.0f : a) / (big ? a : 1.0f));
  return __builtin_copysignf(big ? 1.57079637f + (p - 4.37113883e-08f) : p, x);
}
D_FN f64 d_atan(f64 x) {
  f64 a = __builtin_fabs(x);
  bool big = a > 1.0;
  f64 p = d_atan_poly64(big ? 1.0 : a, big ? a : 1.0);
  return __builtin_copysign(big ? 1.5707963267948966 - (p - 6.123233995736766e-17) : p, x);
}

//@ d_atan2
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
D_FN f64 d_atan2(f64 y, f64 x) {
  f64 a = __builtin_fabs(x), b = __builtin_fabs(y);
  bool swap = b > a;
  f64 high = swap ? b : a, low = swap ? a : b;
  f64 s = high > 1.0 ? 0.5 : 1.0;                                // their sum is finite
  bool both = low == __builtin_inf();
  f64 p = d_atan_poly64(both ? 1.0 : low * s, both | (high == 0.0) ? 1.0 : high * s);
  p = swap ? 1.5707963267948966 - (p - 6.123233995736766e-17) : p;
  p = (i64)d_bits(x) < 0 ? 3.141592653589793 - (p - 1.2246467991473532e-16) : p;
  return (x != x) | (y != y) ? __builtin_nan("") : __builtin_copysign(p, y);
}

//@ d_asin
// pi/2 - 2 asin(root) above 1/2, with what the square root's rounding left out.
D_FN f32 d_asin(f32 x) {
  f32 a = __builtin_fabsf(x), h = d_fma(a, -0.5f, 0.5f), root = __builtin_sqrtf(h);
  bool big = a > 0.5f;
  f32 s = big ? root : a, u = d_asin_poly(s, big ? h : a * a);
  f32 rest = d_fma(-root, root, h) / (root + 1e-30f);            // twice the rounding error
  f32 high = d_fma(root, -2.0f, 1.57079637f) - (d_fma(u, 2.0f, rest) + 4.37113883e-08f);
  return a <= 1.0f ? __builtin_copysignf(big ? high : s + u, x) : D_NAN;
}
D_FN f64 d_asin(f64 x) { return d_atan2(x, __builtin_sqrt((1.0 - x) * (1.0 + x))); }

//@ d_acos
D_FN f32 d_acos(f32 x) {
  f32 a = __builtin_fabsf(x), h = d_fma(a, -0.5f, 0.5f), root = __builtin_sqrtf(h);
  bool big = a > 0.5f;
  f32 s = big ? root : x, p = s + d_asin_poly(s, big ? h : x * x);
  f32 high = x > 0.0f ? 2.0f * p : 3.14159274f - (2.0f * p + 8.74227766e-08f);
  f32 y = big ? high : 1.57079637f - (p + 4.37113883e-08f);
  return a <= 1.0f ? y : D_NAN;
}
D_FN f64 d_acos(f64 x) { return d_atan2(__builtin_sqrt((1.0 - x) * (1.0 + x)), x); }

//@ d_hypot
D_FN f32 d_hypot(f32 x, f32 y) {
  f64 a = (f64)x, b = (f64)y;
  f32 r = (f32)__builtin_sqrt(d_fma(a, a, b * b));
  return __builtin_fabsf(x) == D_INF || __builtin_fabsf(y) == D_INF ? D_INF : r;
}
D_FN f64 d_hypot(f64 x, f64 y) {
  f64 a = __builtin_fabs(x), b = __builtin_fabs(y), m = b > a ? b : a;
  f64 s = m > 0x1p500 ? 0x1p-600 : (m < 0x1p-400 ? 0x1p600 : 1.0);
  f64 t = m > 0x1p500 ? 0x1p600 : (m < 0x1p-400 ? 0x1p-600 : 1.0);
  f64 r = __builtin_sqrt(d_fma(a * s, a * s, (b * s) * (b * s))) * t;
  return (a == __builtin_inf()) | (b == __builtin_inf()) ? __builtin_inf() : r;
}

// ----------------------------------------------------------------------- error and gamma functions

//@ d_erf
// x + x * E(x^2) below 0.92 (2^-30), 1 - 2^L(x) above (2^-33.6 of erf), where L is log2 erfc.
D_FN f32 d_erf(f32 x) {
  f32 a = __builtin_fabsf(x), z = a * a;
  f32 q = d_poly(z, 7.99664995e-05f, -0.000804976968f, 0.00519240508f, -0.0268557314f, 0.112836257f,
      -0.376126289f, 0.128379166f);
  f32 low = d_fma(q, a, a);
  f32 t = 4.0f < a ? 4.0f : a;
  f32 l = d_poly(t, -3.05264912e-05f, 0.000627850823f, -0.00602258462f, 0.0362526216f,
      -0.156234771f, -0.913708985f, -1.62955403f, 0.000253731123f);
  u32 n;
  f32 p = d_exp2_part<127>(l, n);
  f32 high = d_fma(-p, d_f32(n << 23), 1.0f);
  return d_signed(a < 0.92f ? low : high, x);
}
// x + x * E(x^2) below 1 (2^-62), 1 - e^(-x^2) W(t) above (2^-57), t = (a - 3) / (a + 3).
D_FN f64 d_erf(f64 x) {
  f64 a = __builtin_fabs(x), z = a * a;
  f64 q = d_poly(z, 5.957176147746114e-11, -1.1372848856789924e-09, 1.4659775274046955e-08,
      -1.6350312701054618e-07, 1.6461000484121361e-06, -1.4925595266831182e-05,
      0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145, -0.026866170645076792,
      0.11283791670954879, -0.3761263890318375, 0.1283791670955126);
  f64 b = 6.0 < a ? 6.0 : a, t = (b - 3.0) / (b + 3.0);
  f64 w = d_poly(t, 3.381355142042904e-09, 1.2755818949624478e-06, 2.0135111426447427e-06,
      -8.00978093907608e-06, -1.2845780030775907e-05, 6.406279226046039e-05, 4.525434558991009e-05,
      -0.0005970624964924544, 0.0007077464666941425, 0.004269136356961225, -0.024392499318915004,
      0.07166583719747308, -0.15011593650077898, 0.24560380171233487, -0.3262335600430372,
      0.17900115118138996);
  f64 high = d_fma(-d_exp(-b * b), w, 1.0);
  return __builtin_copysign(a < 1.0 ? d_fma(q, a, a) : high, x);
}

//@ d_erf_for_one_plus
// For 1 + erf(x): within 2^-23, the unit in the last place of such a sum from 1 on.
D_FN f32 d_erf_for_one_plus(f32 x) {
  f32 a = __builtin_fabsf(x), t = 4.0f < a ? 4.0f : a;
  f32 l = d_poly(t, -4.438496398506686e-05f, 0.0004372269904706627f, -0.001461380859836936f,
      -0.0008233512635342777f, 0.0283000860363245f, -0.14850568771362305f, -0.918410062789917f,
      -1.6279093027114868f, 2.1717637466167616e-08f);
  u32 n;
  f32 p = d_exp2_part<127>(l, n);
  return d_signed(__builtin_fabsf(d_fma(-p, d_f32(n << 23), 1.0f)), x);
}

//@ d_erfc
D_LIBM(erfc)
// In f64: e^(-x^2) / (1 + 2x) * P(t), t = (x - 4) / (x + 4); P: 2^-30.6.
D_FN f32 d_erfc(f32 x) {
  f64 a = (f64)__builtin_fabsf(x);
  a = a > 10.5 ? 10.5 : a;
  f64 t = (a - 4.0) / (a + 4.0);
  f64 q = d_poly(t, -0.000642036937353476, -0.001136828331189067, 0.005043145484141592,
      -0.016024403806385857, 0.03722196415005647, -0.06635461335679219, 0.0937213140356426,
      -0.10103781477090076, 0.06809783265656497, 0.015379629615416697, -0.139621130691356,
      1.2329951187373451);
  f64 r = d_exp(-(a * a)) * q / d_fma(a, 2.0, 1.0);
  return (f32)(x < 0.0f ? 2.0 - r : r);
}
D_SLOW f64 d_erfc(f64 x) { return erfc(x); }

//@ d_lgamma
extern "C" f64 lgamma_r(f64, i32 *) noexcept;
D_SLOW f64 d_lgamma(f64 x) {
  i32 sign;
  return x == -__builtin_inf() ? __builtin_inf() : lgamma_r(x, &sign);
}
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
  f64 s = (0.08333333333333333 * z - 0.021092796092796094) * z + 0.007575757575757576;
  s = ((s * z - 0.004166666666666667) * z + 0.003968253968253968) * z - 0.008333333333333333;
  s = (s * z + 0.08333333333333333) * z;
  return r + d_log(x) - 0.5 / x - (x < 1e17 ? s : 0.0);
}
D_FN f32 d_digamma(f32 x) { return (f32)d_digamma((f64)x); }

//@ d_erfinv
// f32: x * P(w), w = -log(1 - x^2), one polynomial in w below 5 and one in sqrt(w) above (2^-23.5
// and 2^-24.6).
D_FN f32 d_erfinv(f32 x) {
  f32 w = -d_log(d_fma(-x, x, 1.0f));
  f32 a = w - 2.5f, b = __builtin_sqrtf(w) - 3.0f;
  f32 p = d_poly(a, -8.76583073e-09f, 2.32702551e-08f, 4.65863337e-07f, -3.46311572e-06f,
      -4.96213124e-06f, 0.000218345813f, -0.00125274365f, -0.00417738827f, 0.24664028f,
      1.50140941f);
  f32 q = d_poly(b, 0.000113752409f, -0.000307962822f, -5.37846645e-05f, 0.00148307241f,
      -0.00359903625f, 0.00568774017f, -0.00763693778f, 0.00944519974f, 1.00167489f, 2.83297682f);
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
// of its own (or a word of one), so results depend neither on threads nor on vector width.
D_FN void d_philox(i64 seed, i64 stream, i64 element, u32 &c0, u32 &c1, u32 &c2, u32 &c3) {
  u32 k0 = (u32)(u64)seed, k1 = (u32)((u64)seed >> 32);
  c0 = (u32)(u64)element, c1 = (u32)((u64)element >> 32);
  c2 = (u32)(u64)stream, c3 = (u32)((u64)stream >> 32);
#pragma GCC unroll 10
  for (i32 i = 0; i < 10; ++i) {
    u64 p0 = 0xd2511f53ull * (u64)c0, p1 = 0xcd9e8d57ull * (u64)c2;
    u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1, c3 = (u32)p0, c0 = n0, c2 = n2;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
}

//@ d_rand
// Uniform on [0, 1): the upper 24 bits of a word. Four elements share a counter.
D_FN f32 d_rand(i64 seed, i64 stream, i64 element) {
  u32 a, b, c, d;
  d_philox(seed, stream, element >> 2, a, b, c, d);
  u32 word = (u32)element & 3u;
  a = word == 0 ? a : word == 1 ? b : word == 2 ? c : d;
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
