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
_TYPES = (
    ("float", True),
    ("double", True),
    ("signed char", False),
    ("unsigned char", False),
    ("short", False),
    ("int", False),
    ("long long", False),
)


def _extreme(kind: str) -> str:
    sign = ">" if kind == "max" else "<"
    return "\n".join(
        f"static inline {t} d_{kind}_nan({t} a, {t} b) {{ return (b {sign} a) | (b != b) ? b : a; }}"
        for t, is_float in _TYPES
        if is_float
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
template <class T> static __attribute__((noinline)) void d_transpose(
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


SUPPORT: dict[str, str] = {
    "d_max_nan": _extreme("max"),
    "d_min_nan": _extreme("min"),
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
