"""Helper functions of generated code that are not scalar operations: scratch memory, NaN-keeping extremes, floor division."""

from __future__ import annotations

_SCRATCH = """\
extern "C" void* aligned_alloc(unsigned long, unsigned long) noexcept;
extern "C" void free(void*) noexcept;
// Memory of one thread that grows to the largest request and stays: returning it to the system costs more than keeping it.
template <int kind> static inline char* d_thread_memory(long long bytes) {
  static __thread char* memory = nullptr;
  static __thread long long have = 0;
  if (bytes > have) {
    free(memory);
    have = (bytes + 4095) / 4096 * 4096;
    memory = (char*)aligned_alloc(64, have);
  }
  return memory;
}
"""


def _extreme(kind: str) -> str:
    """Of accumulator `a` and value `b`: NaN where either is. The compare of `a` with itself is off the chain of loads."""
    sign = ">" if kind == "max" else "<"
    return "\n".join(
        f"static inline {t} d_{kind}_nan({t} a, {t} b) {{ {t} m = a {sign} b ? a : b; return a != a ? a : m; }}"
        for t in ("float", "double")
    )


_TRANSPOSE = """\
#ifdef __AVX512F__
typedef float d_v16 __attribute__((vector_size(64)));
typedef int d_i16 __attribute__((vector_size(64)));
// Sixteen rows of sixteen: four rounds that exchange halves, quarters, pairs and neighbours of rows.
template <int S> static inline __attribute__((always_inline)) void d_exchange(d_v16 (&r)[16]) {
  d_i16 low, high;
  for (int k = 0; k < 16; ++k) {
    low[k] = k & S ? (k ^ S) + 16 : k;
    high[k] = k & S ? k + 16 : k ^ S;
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i & S) continue;
    d_v16 a = r[i], b = r[i + S];
    r[i] = __builtin_shuffle(a, b, low);
    r[i + S] = __builtin_shuffle(a, b, high);
  }
}
static inline void d_transpose16(const char* from, long long from_stride, char* to, long long to_stride) {
  d_v16 r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&r[i], from + i * from_stride * 4, 64);
  d_exchange<8>(r); d_exchange<4>(r); d_exchange<2>(r); d_exchange<1>(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) __builtin_memcpy(to + i * to_stride * 4, &r[i], 64);
}
#endif
// to[c][r] = from[r][c]
template <class T> static __attribute__((noinline, noclone)) void d_transpose(
    const T* from, long long from_stride, T* to, long long to_stride, long long rows, long long columns) {
  long long done = 0;
#ifdef __AVX512F__
  if (sizeof(T) == 4) {
    for (; done + 16 <= columns; done += 16) {
      long long r = 0;
      for (; r + 16 <= rows; r += 16)
        d_transpose16((const char*)(from + r * from_stride + done), from_stride, (char*)(to + done * to_stride + r),
                      to_stride);
      for (; r < rows; ++r)
        for (long long c = done; c < done + 16; ++c) to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
#endif
  for (long long r = 0; r < rows; ++r)
    for (long long c = done; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}"""


_LANES = """\
typedef float d_lanes_f __attribute__((vector_size(64)));
typedef int d_lanes_i __attribute__((vector_size(64)));
typedef double d_lanes_d __attribute__((vector_size(64)));
typedef long long d_lanes_l __attribute__((vector_size(64)));
static inline __attribute__((always_inline)) d_lanes_f d_swap(d_lanes_f x, d_lanes_i at) { return __builtin_shuffle(x, at); }
static inline __attribute__((always_inline)) d_lanes_i d_swap(d_lanes_i x, d_lanes_i at) { return __builtin_shuffle(x, at); }
static inline __attribute__((always_inline)) d_lanes_d d_swap(d_lanes_d x, d_lanes_l at) { return __builtin_shuffle(x, at); }
static inline __attribute__((always_inline)) d_lanes_l d_swap(d_lanes_l x, d_lanes_l at) { return __builtin_shuffle(x, at); }
// Combines an array of lanes (a multiple of 64 bytes) in registers: arrays into one register, then halves of it.
template <class V, class I, class F> static inline __attribute__((always_inline)) V d_lanes(const void* from, int vectors, F f) {
  V x;
  __builtin_memcpy(&x, from, 64);
#pragma GCC unroll 8
  for (int k = 1; k < vectors; ++k) {
    V y;
    __builtin_memcpy(&y, (const char*)from + 64 * k, 64);
    x = f(x, y);
  }
  if constexpr (sizeof(x[0]) == 4) {
    x = f(x, d_swap(x, I{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    x = f(x, d_swap(x, I{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    x = f(x, d_swap(x, I{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    x = f(x, d_swap(x, I{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  } else {
    x = f(x, d_swap(x, I{4, 5, 6, 7, 0, 1, 2, 3}));
    x = f(x, d_swap(x, I{2, 3, 0, 1, 6, 7, 4, 5}));
    x = f(x, d_swap(x, I{1, 0, 3, 2, 5, 4, 7, 6}));
  }
  return x;
}
template <class T> struct d_lane_types;
template <> struct d_lane_types<float> { typedef d_lanes_f V; typedef d_lanes_i I; };
template <> struct d_lane_types<int> { typedef d_lanes_i V; typedef d_lanes_i I; };
template <> struct d_lane_types<double> { typedef d_lanes_d V; typedef d_lanes_l I; };
template <> struct d_lane_types<long long> { typedef d_lanes_l V; typedef d_lanes_l I; };
#define D_LANES(NAME, EXPRESSION)                                                                     \\
  template <int n, class T> static inline __attribute__((always_inline)) T NAME(const T* a) {         \\
    typedef typename d_lane_types<T>::V V;                                                            \\
    return d_lanes<V, typename d_lane_types<T>::I>(                                                   \\
        a, n * (int)sizeof(T) / 64, [](V x, V y) { return EXPRESSION; })[0];                          \\
  }
D_LANES(d_lanes_sum, x + y)
D_LANES(d_lanes_prod, x * y)
D_LANES(d_lanes_larger, x > y ? x : y)
D_LANES(d_lanes_smaller, x < y ? x : y)
D_LANES(d_lanes_any, x | y)
D_LANES(d_lanes_all, x & y)
// NaN where any lane is; its search runs beside that of the extreme.
template <int n, class T> static inline __attribute__((always_inline)) T d_lanes_nan(const T* a) {
  typedef typename d_lane_types<T>::V V;
  V bad = {};
#pragma GCC unroll 8
  for (int k = 0; k < n * (int)sizeof(T) / 64; ++k) {
    V x;
    __builtin_memcpy(&x, (const char*)a + 64 * k, 64);
    bad += x != x ? x : V{};
  }
  return d_lanes_sum<64 / sizeof(T)>((const T*)&bad);
}
template <int n, class T> static inline __attribute__((always_inline)) T d_lanes_max(const T* a) {
  if ((T)0.5 == (T)0) return d_lanes_larger<n>(a);
  T bad = d_lanes_nan<n>(a), m = d_lanes_larger<n>(a);
  return bad != bad ? bad : m;
}
template <int n, class T> static inline __attribute__((always_inline)) T d_lanes_min(const T* a) {
  if ((T)0.5 == (T)0) return d_lanes_smaller<n>(a);
  T bad = d_lanes_nan<n>(a), m = d_lanes_smaller<n>(a);
  return bad != bad ? bad : m;
}
// The sum of floats, in double; clears them.
template <int n> static inline __attribute__((always_inline)) double d_lanes_flush(float* a) {
  alignas(64) double b[n];
  for (int l = 0; l < n; ++l) b[l] = (double)a[l];
  for (int l = 0; l < n; ++l) a[l] = 0;
  return d_lanes_sum<n>(b);
}"""


SUPPORT: dict[str, str] = {
    "d_max_nan": _extreme("max"),
    "d_min_nan": _extreme("min"),
    "d_lanes": _LANES,
    "d_transpose": _TRANSPOSE,
    "d_scratch": "static inline char* d_scratch(long long bytes) { return d_thread_memory<0>(bytes); }",
    "d_scratch_columns": "static inline char* d_scratch_columns(long long bytes) { return d_thread_memory<1>(bytes); }",
    "d_shared": "template <int k> static inline char* d_shared(long long bytes) "
    "{ return d_thread_memory<2 + k>(bytes); }",
    "d_index_div": "static inline long long d_index_div(long long a, long long b) "
    "{ long long q = a / b; return q - (a % b != 0 && (a < 0) != (b < 0)); }",
    "d_index_mod": "static inline long long d_index_mod(long long a, long long b) "
    "{ long long r = a % b; return r + (r != 0 && (r < 0) != (b < 0) ? b : 0); }",
}


def support(used: set[str]) -> str:
    """The helpers among `used`, in a fixed order."""
    memory = [_SCRATCH] if used & {"d_scratch", "d_scratch_columns", "d_shared"} else []
    return "\n".join(memory + [text for name, text in SUPPORT.items() if name in used])
