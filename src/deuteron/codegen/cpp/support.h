// Helpers of generated CPU code that are not scalar operations: scratch memory, lanes, tiles.
// Helpers as in prelude.h, whose `base` is always there; `support.py` adds those that a unit uses.

//@ d_max_nan
// Of accumulator `a` and value `b`: NaN where either is. Comparing `a` with itself is off the chain
// of loads.
D_FN f32 d_max_nan(f32 a, f32 b) { f32 m = a > b ? a : b; return a != a ? a : m; }
D_FN f64 d_max_nan(f64 a, f64 b) { f64 m = a > b ? a : b; return a != a ? a : m; }

//@ d_min_nan
D_FN f32 d_min_nan(f32 a, f32 b) { f32 m = a < b ? a : b; return a != a ? a : m; }
D_FN f64 d_min_nan(f64 a, f64 b) { f64 m = a < b ? a : b; return a != a ? a : m; }

//@ d_index_div
D_FN i64 d_index_div(i64 a, i64 b) { i64 q = a / b; return q - (a % b != 0 && (a < 0) != (b < 0)); }

//@ d_index_mod
D_FN i64 d_index_mod(i64 a, i64 b) { i64 r = a % b; return r + (r != 0 && (r < 0) != (b < 0) ? b : 0); }

//@ d_interleaved
// Which of n steps is taken as the t-th: one of each of `ranges` ranges, then the next of each, at last the rest.
template <int ranges> D_FN i64 d_interleaved(i64 t, i64 n) {
  const i64 each = n / ranges;
  return t < ranges * each ? t % ranges * each + t / ranges : t;
}

//@ d_memory
extern "C" void* aligned_alloc(unsigned long, unsigned long) noexcept;
extern "C" void free(void*) noexcept;
// Memory of one thread that grows to the largest request and stays: returning it to the system
// costs more than keeping it.
template <int kind> static inline char* d_memory(i64 bytes) {
  static __thread char* memory = nullptr;
  static __thread i64 have = 0;
  if (bytes > have) {
    free(memory);
    have = (bytes + 4095) / 4096 * 4096;
    memory = (char*)aligned_alloc(64, have);
  }
  return memory;
}

//@ d_scratch
static inline char* d_scratch(i64 bytes) { return d_memory<0>(bytes); }

//@ d_scratch_columns
static inline char* d_scratch_columns(i64 bytes) { return d_memory<1>(bytes); }

//@ d_shared
template <int k> static inline char* d_shared(i64 bytes) { return d_memory<2 + k>(bytes); }

//@ d_lanes
// Registers: wider vectors would be split element by element where they are shuffled.
#if defined(__AVX512F__)
#define D_BYTES 64
#else
#define D_BYTES 32
#endif
typedef f32 d_v_f32 __attribute__((vector_size(D_BYTES)));
typedef i32 d_v_i32 __attribute__((vector_size(D_BYTES)));
typedef f64 d_v_f64 __attribute__((vector_size(D_BYTES)));
typedef i64 d_v_i64 __attribute__((vector_size(D_BYTES)));
template <class T> struct d_lane;
template <> struct d_lane<f32> { typedef d_v_f32 V; typedef d_v_i32 I; };
template <> struct d_lane<i32> { typedef d_v_i32 V; typedef d_v_i32 I; };
template <> struct d_lane<f64> { typedef d_v_f64 V; typedef d_v_i64 I; };
template <> struct d_lane<i64> { typedef d_v_i64 V; typedef d_v_i64 I; };
// Each element beside the one `step` away.
template <int step, class I, class V, class F> D_FN V d_reduce_step(V x, F f) {
  I at;
  for (int k = 0; k < D_BYTES / (int)sizeof(x[0]); ++k) at[k] = k ^ step;
  return f(x, (V)__builtin_shuffle(x, at));
}
// Combines an array of lanes (a multiple of 64 bytes) in registers: arrays into one register, then
// halves of it.
template <class V, class I, class F> D_FN V d_lanes(const void* from, int vectors, F f) {
  V x = d_load<V>(from);
#pragma GCC unroll 16
  for (int k = 1; k < vectors; ++k) x = f(x, d_load<V>((const char*)from + D_BYTES * k));
  constexpr int n = D_BYTES / sizeof(x[0]);
  if constexpr (n > 8) x = d_reduce_step<8, I>(x, f);
  if constexpr (n > 4) x = d_reduce_step<4, I>(x, f);
  return d_reduce_step<1, I>(d_reduce_step<2, I>(x, f), f);
}
#define D_LANES(NAME, EXPRESSION)                                                 \
  template <int n, class T> D_FN T NAME(const T* a) {                             \
    typedef typename d_lane<T>::V V;                                              \
    return d_lanes<V, typename d_lane<T>::I>(a, n * (int)sizeof(T) / D_BYTES,     \
                                             [](V x, V y) { return EXPRESSION; })[0]; \
  }
D_LANES(d_lanes_sum, x + y)
D_LANES(d_lanes_prod, x * y)
D_LANES(d_lanes_larger, x > y ? x : y)
D_LANES(d_lanes_smaller, x < y ? x : y)
D_LANES(d_lanes_any, x | y)
D_LANES(d_lanes_all, x & y)
// NaN where any lane is; its search runs beside that of the extreme.
template <int n, class T> D_FN T d_lanes_nan(const T* a) {
  typedef typename d_lane<T>::V V;
  V bad = {};
#pragma GCC unroll 16
  for (int k = 0; k < n * (int)sizeof(T) / D_BYTES; ++k) {
    V x = d_load<V>((const char*)a + D_BYTES * k);
    bad += x != x ? x : V{};
  }
  return d_lanes_sum<D_BYTES / sizeof(T)>((const T*)&bad);
}
template <int n, class T> D_FN T d_lanes_max(const T* a) {
  if ((T)0.5 == (T)0) return d_lanes_larger<n>(a);
  T bad = d_lanes_nan<n>(a), m = d_lanes_larger<n>(a);
  return bad != bad ? bad : m;
}
template <int n, class T> D_FN T d_lanes_min(const T* a) {
  if ((T)0.5 == (T)0) return d_lanes_smaller<n>(a);
  T bad = d_lanes_nan<n>(a), m = d_lanes_smaller<n>(a);
  return bad != bad ? bad : m;
}
// The sum of floats, in double; clears them.
template <int n, class T> D_FN f64 d_lanes_flush(T* a) {
  alignas(64) f64 b[n];
  for (int l = 0; l < n; ++l) b[l] = (f64)a[l];
  for (int l = 0; l < n; ++l) a[l] = 0;
  return d_lanes_sum<n>(b);
}

//@ d_dot
// c[r][v] += sum of a[r][k] b[k][v] (`first`: nothing is there yet): c has rows of whole registers,
// cm apart, b rows bk apart; a's elements are am apart along r, ak along k. n is rounded up to whole
// registers. Blocks of the result are in registers (Cascade Lake, 64 x 64 x 64: 135 GFLOP/s a core).
// What is there is added last: Llama 4 with sums over 16384 places, in blocks of 64, is 7e-7 off so,
// 2.8e-6 with one after the other.
#if defined(__AVX512F__) && !defined(__clang__)
D_FN d_v_f32 d_v_fma(d_v_f32 a, d_v_f32 b, d_v_f32 c) { return (d_v_f32)__builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4); }
constexpr int d_dot_rows = 6, d_dot_vectors = 4;
#elif defined(__FMA__) && !defined(__clang__)
D_FN d_v_f32 d_v_fma(d_v_f32 a, d_v_f32 b, d_v_f32 c) { return __builtin_ia32_vfmaddps256(a, b, c); }
constexpr int d_dot_rows = 6, d_dot_vectors = 2;
#else
D_FN d_v_f32 d_v_fma(d_v_f32 a, d_v_f32 b, d_v_f32 c) { return a * b + c; }
constexpr int d_dot_rows = 4, d_dot_vectors = 2;
#endif
template <bool first, int R, int V>
static __attribute__((noinline)) void d_dot_block(f32* c, i64 cm, const f32* a, i64 am, i64 ak, const f32* b, i64 bk, i64 k) {
  constexpr int N = D_BYTES / 4;
  d_v_f32 t[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) t[r][v] = d_v_f32{};
  const f32 *low = a, *high = a + (R / 2) * am;
  for (; k > 0; --k, low += ak, high += ak, b += bk) {
    d_v_f32 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = d_load<d_v_f32>(b + v * N);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      d_v_f32 y = (r < R / 2 ? low[r * am] : high[(r - R / 2) * am]) - d_v_f32{};
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) t[r][v] = d_v_fma(x[v], y, t[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) d_store(c + r * cm + v * N, first ? t[r][v] : t[r][v] + d_load<d_v_f32>(c + r * cm + v * N));
}
template <bool first, int V>
D_FN void d_dot_rows_of(f32* c, i64 cm, const f32* a, i64 am, i64 ak, const f32* b, i64 bk, i64 m, i64 k) {
  constexpr int R = d_dot_rows;
  i64 r = 0;
  for (; r + R <= m; r += R) d_dot_block<first, R, V>(c + r * cm, cm, a + r * am, am, ak, b, bk, k);
  for (; r + 4 <= m; r += 4) d_dot_block<first, 4, V>(c + r * cm, cm, a + r * am, am, ak, b, bk, k);
  for (; r < m; ++r) d_dot_block<first, 1, V>(c + r * cm, cm, a + r * am, am, ak, b, bk, k);
}
template <bool first>
static void d_dot(f32* c, i64 cm, const f32* a, i64 am, i64 ak, const f32* b, i64 bk, i64 m, i64 n, i64 k) {
  constexpr int N = D_BYTES / 4, V = d_dot_vectors;
  i64 v = 0;
  for (; v + (V - 1) * N < n; v += V * N) d_dot_rows_of<first, V>(c + v, cm, a, am, ak, b + v, bk, m, k);
  for (; v < n; v += N) d_dot_rows_of<first, 1>(c + v, cm, a, am, ak, b + v, bk, m, k);
}

//@ d_pad
// Zeros behind the first n elements of rows, up to whole registers.
template <class T> D_FN void d_pad(T* a, i64 step, i64 rows, i64 n) {
  for (i64 r = 0; r < rows; ++r)
    for (i64 c = n; c % 16; ++c) a[r * step + c] = 0;
}

//@ d_scan
// Running sums (products) of 16 doubles in their place, from `carry` on, which goes on. Each is the
// carry and what came since then: the next block waits for one addition. A number is made a vector by
// taking zeros from it, which leaves -0.0 what it is.
template <int step, class F> D_FN d_v_f64 d_scan_step(d_v_f64 x, d_v_f64 neutral, F f) {
  constexpr int n = D_BYTES / 8;
  d_v_i64 at;
  for (int k = 0; k < n; ++k) at[k] = k < step ? k : k - step + n;
  return f(x, (d_v_f64)__builtin_shuffle(neutral, x, at));
}
template <class F> D_FN void d_scan(f64* a, f64* carry, f64 first, F f) {
  constexpr int n = D_BYTES / 8, parts = 16 / n;
  d_v_f64 neutral = first - d_v_f64{}, x[parts];
#pragma GCC unroll 4
  for (int k = 0; k < parts; ++k) {
    x[k] = d_scan_step<1>(d_load<d_v_f64>(a + n * k), neutral, f);
    x[k] = d_scan_step<2>(x[k], neutral, f);
    if constexpr (n > 4) x[k] = d_scan_step<4>(x[k], neutral, f);
  }
#pragma GCC unroll 4
  for (int k = 1; k < parts; k += 2) x[k] = f(x[k], x[k - 1][n - 1] - d_v_f64{});
  if constexpr (parts > 2) {
    d_v_f64 half = x[1][n - 1] - d_v_f64{};
    x[2] = f(x[2], half), x[3] = f(x[3], half);
  }
  d_v_f64 before = *carry - d_v_f64{};
  *carry = f(d_v_f64{*carry}, d_v_f64{x[parts - 1][n - 1]})[0];
#pragma GCC unroll 4
  for (int k = 0; k < parts; ++k) d_store(a + n * k, f(before, x[k]));
}
D_FN void d_scan_sum(f64* a, f64* carry) {
  d_scan(a, carry, 0, [](d_v_f64 x, d_v_f64 y) { return x + y; });
}
D_FN void d_scan_prod(f64* a, f64* carry) {
  d_scan(a, carry, 1, [](d_v_f64 x, d_v_f64 y) { return x * y; });
}

//@ d_transpose
// Rows and columns of the blocks that registers transpose: squares with AVX-512, whose instructions
// shuffle any elements of two registers; with AVX2, which interleaves halves of registers, as many
// columns as a half has. One element without such instructions.
constexpr int d_tile_rows(int bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return bytes == 8 ? 8 : bytes == 4 || bytes == 2 ? 16 : 1;
#elif defined(__AVX512F__)
  return bytes == 8 ? 8 : bytes == 4 ? 16 : 1;
#elif defined(__AVX2__) && !defined(__clang__)
  return bytes == 1 ? 1 : 32 / bytes;
#else
  return 1;
#endif
}
constexpr int d_tile_columns(int bytes) {
#if defined(__AVX512F__)
  return d_tile_rows(bytes);
#else
  return d_tile_rows(bytes) == 1 ? 1 : 16 / bytes;
#endif
}
template <int bytes> struct d_word { typedef unsigned char type; };
template <> struct d_word<2> { typedef u16 type; };
template <> struct d_word<4> { typedef u32 type; };
template <> struct d_word<8> { typedef u64 type; };
// Stores a register, past the caches if `nontemporal` (then `to` is a multiple of its size).
template <bool nontemporal, class Row> D_FN void d_store_row(char* to, Row x) {
#if defined(__AVX__) && !defined(__clang__)
  typedef f32 Half __attribute__((vector_size(32)));
  if constexpr (nontemporal && sizeof(Row) == 32) return __builtin_ia32_movntps256((f32*)to, (Half)x);
#endif
#if defined(__AVX512F__) && !defined(__clang__)
  typedef f32 Line __attribute__((vector_size(64)));
  if constexpr (nontemporal && sizeof(Row) == 64) return __builtin_ia32_movntps512((f32*)to, (Line)x);
#endif
  d_store(to, x);
}
#if defined(__AVX512F__)
// Rows that lie S apart exchange blocks of S elements.
template <int S, int N, class Row> D_FN void d_exchange(Row (&r)[N]) {
  Row low, high;
  for (int k = 0; k < N; ++k) {
    low[k] = k & S ? (k ^ S) + N : k;
    high[k] = k & S ? k + N : k ^ S;
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if (i & S) continue;
    Row a = r[i], b = r[i + S];
    r[i] = __builtin_shuffle(a, b, low);
    r[i + S] = __builtin_shuffle(a, b, high);
  }
}
template <int N, class Row> D_FN void d_load_columns(const char* from, i64 stride, Row (&r)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) r[i] = d_load<Row>(from + i * stride);
  if (N == 16) d_exchange<N / 2, N, Row>(r);
  d_exchange<4, N, Row>(r), d_exchange<2, N, Row>(r), d_exchange<1, N, Row>(r);
}
#elif defined(__AVX2__) && !defined(__clang__)
// Halves of registers are rows that lie N apart; each pair of them, N / 2 apart, is interleaved
// until the elements of a column are neighbours.
template <int N, class Row> D_FN void d_load_columns(const char* from, i64 stride, Row (&r)[N]) {
  typedef i32 Half __attribute__((vector_size(16)));
  Row low, high;
  for (int k = 0; k < 2 * N; ++k) {
    low[k] = k / N * N + k % N / 2 + (k & 1 ? 2 * N : 0);
    high[k] = low[k] + N / 2;
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    r[i] = (Row)__builtin_ia32_vinsertf128_si256(
        __builtin_ia32_si256_si(d_load<Half>(from + i * stride)),
        d_load<Half>(from + (i + N) * stride), 1);
#pragma GCC unroll 4
  for (int s = 1; s < N; s *= 2) {
    Row t[N];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      t[2 * i] = __builtin_shuffle(r[i], r[i + N / 2], low);
      t[2 * i + 1] = __builtin_shuffle(r[i], r[i + N / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) r[i] = t[i];
  }
}
#else
template <int N, class Row> void d_load_columns(const char*, i64, Row (&)[N]);
#endif
// Q blocks of N rows and C columns; strides in bytes.
template <class W, int N, int C, int Q, bool nontemporal>
static inline void d_transpose_blocks(const char* from, i64 from_stride, char* to, i64 to_stride) {
  typedef W Row __attribute__((vector_size(N * sizeof(W))));
  Row r[Q][C];
#pragma GCC unroll 2
  for (int q = 0; q < Q; ++q) d_load_columns<C, Row>(from + q * N * from_stride, from_stride, r[q]);
#pragma GCC unroll 16
  for (int i = 0; i < C; ++i)
#pragma GCC unroll 2
    for (int q = 0; q < Q; ++q)
      d_store_row<nontemporal, Row>(to + i * to_stride + q * sizeof(Row), r[q][i]);
}
// to[c][r] = from[r][c]
template <bool nontemporal, class T> static __attribute__((noinline, noclone)) void d_transpose_to(
    const T* from, i64 from_stride, T* to, i64 to_stride, i64 rows, i64 columns) {
  constexpr int size = sizeof(T), N = d_tile_rows(size), C = d_tile_columns(size);
  // Past the caches go whole lines: halves that wait for their other halves cost ten times as much.
  constexpr int Q = nontemporal && N * size < 64 ? 64 / (N * size) : 1;
  typedef typename d_word<size>::type W;
  i64 done = 0;
  if constexpr (N > 1) {
    for (; done + C <= columns; done += C) {
      i64 r = 0;
      for (; r + Q * N <= rows; r += Q * N)
        d_transpose_blocks<W, N, C, Q, nontemporal>(
            (const char*)(from + r * from_stride + done), from_stride * size,
            (char*)(to + done * to_stride + r), to_stride * size);
      for (; r + N <= rows; r += N)
        d_transpose_blocks<W, N, C, 1, false>(
            (const char*)(from + r * from_stride + done), from_stride * size,
            (char*)(to + done * to_stride + r), to_stride * size);
      for (; r < rows; ++r)
        for (i64 c = done; c < done + C; ++c) to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
  // Whole lines are written where the vector loop does not reach.
  for (i64 c = done; c < columns; ++c)
    for (i64 r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
}
template <class T>
D_FN void d_transpose(const T* from, i64 from_stride, T* to, i64 to_stride, i64 rows, i64 columns) {
  d_transpose_to<false>(from, from_stride, to, to_stride, rows, columns);
}
// Past the caches, where `to` has rows that begin with whole registers.
template <class T> D_FN void d_transpose_nontemporal(
    const T* from, i64 from_stride, T* to, i64 to_stride, i64 rows, i64 columns) {
  if (((u64)to | (u64)to_stride * sizeof(T)) & 63)
    d_transpose_to<false>(from, from_stride, to, to_stride, rows, columns);
  else
    d_transpose_to<true>(from, from_stride, to, to_stride, rows, columns);
}

//@ d_short_vectors
// Whether vectors are shorter than a line.
#if defined(__AVX512F__)
constexpr bool d_short_vectors = false;
#else
constexpr bool d_short_vectors = true;
#endif

//@ d_reads_stall
// Whether loops that only read wait for what comes unless they fetch it; else at how many places
// they are best at work, if rows are short: the caches' own prefetchers do the rest.
#if !defined(__AVX512F__)
constexpr bool d_reads_stall = false;
constexpr int d_interleaved_ranges = 4;
#elif defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool d_reads_stall = false;
constexpr int d_interleaved_ranges = 8;
#else
constexpr bool d_reads_stall = true;
constexpr int d_interleaved_ranges = 1;
#endif

//@ D_DENSE
// Of functions with much arithmetic: instructions are put into an order before registers are given
// out, which g++ does not do for x86 by itself. With few registers, long chains of operations on one
// vector then run beside those on the next.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__AVX512F__)
#define D_DENSE __attribute__((optimize("schedule-insns")))
#else
#define D_DENSE
#endif

//@ d_bf16_blocks
// bf16 of a block as floats, before (D_WIDEN) and behind a loop over its lanes (D_BF16_RESULTS, D_STORE_BF16),
// which reads `d_wide(NAME[l])` and writes by `d_put_float`.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
typedef char d_h_i8 __attribute__((vector_size(32)));
typedef i32 d_h_i32 __attribute__((vector_size(32)));
typedef u32 d_h_u32 __attribute__((vector_size(32)));
typedef i64 d_h_i64 __attribute__((vector_size(32)));
typedef f32 d_h_f32 __attribute__((vector_size(32)));
typedef i64 d_h_half __attribute__((vector_size(16)));
// A load to both halves of a register, and one shuffle for eight numbers.
template <int n> D_FN void d_widen(f32* to, const u16* from) {
  constexpr char z = -128;  // a byte of zeros
  constexpr d_h_i8 at = {z, z, 0, 1, z, z, 2,  3,  z, z, 4,  5,  z, z, 6,  7,
                         z, z, 8, 9, z, z, 10, 11, z, z, 12, 13, z, z, 14, 15};
#pragma GCC unroll 16
  for (int k = 0; k < n; k += 8) {
    d_h_i64 both = __builtin_ia32_vbroadcastsi256(d_load<d_h_half>(from + k));
    *(d_h_f32*)(to + k) = (d_h_f32)__builtin_ia32_pshufb256((d_h_i8)both, at);
  }
}
// As d_f32_to_bf16, in the lower half of each element.
D_FN d_h_i64 d_rounded(const f32* from) {
  d_h_f32 x = *(const d_h_f32*)from;
  d_h_u32 u = (d_h_u32)x, number = (d_h_u32)(x == x);
  d_h_u32 r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (d_h_i64)((number & r) | (~number & 0x7fc0u));
}
template <int n> D_FN void d_store_bf16_block(u16* to, const f32* from) {
#pragma GCC unroll 8
  for (int k = 0; k < n; k += 16) {
    d_h_i64 a = d_rounded(from + k), b = d_rounded(from + k + 8);
    d_h_i64 low = __builtin_shuffle(a, b, d_h_i64{0, 1, 4, 5});
    d_h_i64 high = __builtin_shuffle(a, b, d_h_i64{2, 3, 6, 7});
    d_store(to + k, __builtin_ia32_packusdw256((d_h_i32)low, (d_h_i32)high));
  }
}
D_FN f32 d_as_float(f32 x) { return x; }
D_FN void d_put_float(f32& to, f32 x) { to = x; }
#define D_WIDEN(N, NAME, FROM) alignas(64) f32 NAME[N]; d_widen<N>(NAME, FROM);
#define D_BF16_RESULTS(N, NAME, TO) alignas(64) f32 NAME[N];
#define D_STORE_BF16(N, NAME, TO) d_store_bf16_block<N>(TO, NAME);
#else
D_FN f32 d_as_float(u16 x) { return d_load_bf16(x); }
D_FN void d_put_float(u16& to, f32 x) { to = d_f32_to_bf16(x); }
#define D_WIDEN(N, NAME, FROM) const u16* const NAME = FROM;
#define D_BF16_RESULTS(N, NAME, TO) u16* const NAME = TO;
#define D_STORE_BF16(N, NAME, TO)
#endif

//@ d_trig_small
// sin and cos of arguments below 8192: prelude's, without the reduction of large arguments.
D_FN f32 d_trig_small(f32 x, u32 &quadrant) {
  f32 sum = d_fma(x, 0.636619747f, 12582912.0f);
  f32 k = sum - 12582912.0f;
  f32 r = d_fma(k, -1.57079637f, x);
  quadrant = d_bits(sum);
  return d_fma(k, 1.71512451e-15f, d_fma(k, 4.37113883e-08f, r));
}
D_FN f32 d_sin_small(f32 x) {
  u32 n;
  f32 r = d_trig_small(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  f32 y = d_f32(d_bits(n & 1u ? c : s) ^ ((n & 2u) << 30));
  return x == 0.0f ? x : y;
}
D_FN f32 d_cos_small(f32 x) {
  u32 n;
  f32 r = d_trig_small(x, n), z = r * r;
  f32 s = d_sin_poly(r, z), c = d_cos_poly(z);
  return d_f32(d_bits(n & 1u ? s : c) ^ (((n + 1u) & 2u) << 30));
}

D_FN f64 d_sin_small(f64 x) { return d_sin_near64(x); }
D_FN f64 d_cos_small(f64 x) { return d_cos_near64(x); }
D_FN f64 d_tan_small(f64 x) { return d_tan_near64(x); }

//@ d_nontemporal
// Copies a block that is complete to memory that nobody reads soon: whole lines go past the caches,
// which then need not fetch what is overwritten.
#if defined(__AVX512F__)
typedef f32 d_line __attribute__((vector_size(64)));
D_FN void d_store_line(char* to, d_line x) { __builtin_ia32_movntps512((f32*)to, x); }
#elif defined(__AVX__)
typedef f32 d_line __attribute__((vector_size(32)));
D_FN void d_store_line(char* to, d_line x) { __builtin_ia32_movntps256((f32*)to, x); }
#else
typedef f32 d_line __attribute__((vector_size(16)));
#if defined(__SSE__)
D_FN void d_store_line(char* to, d_line x) { __builtin_ia32_movntps((f32*)to, x); }
#else
D_FN void d_store_line(char* to, d_line x) { d_store(to, x); }
#endif
#endif
// Before other threads may read it.
D_FN void d_nontemporal_end() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}
D_FN void d_whole_line(char* to, const char* from) {
  d_line x[64 / sizeof(d_line)];
#pragma GCC unroll 4
  for (int i = 0; i < (int)(64 / sizeof(d_line)); ++i)
    x[i] = d_load<d_line>(from + i * sizeof(d_line));
#pragma GCC unroll 4
  for (int i = 0; i < (int)(64 / sizeof(d_line)); ++i)
    d_store_line(to + i * sizeof(d_line), x[i]);
}
template <class T> D_FN void d_nontemporal(T* to_, const T* from_, i64 n) {
  char* to = (char*)to_;
  const char* from = (const char*)from_;
  i64 bytes = n * (i64)sizeof(T), k = (i64)(-(u64)to & 63);
  k = k < bytes ? k : bytes;
  __builtin_memcpy(to, from, k);
  for (; k + 64 <= bytes; k += 64) d_whole_line(to + k, from + k);
  __builtin_memcpy(to + k, from + k, bytes - k);
}
// The first place from `low` on, of at most `high`, that starts a line; `at` is the address of `low`.
template <class T> D_FN i64 d_line_start(const T* at, i64 low, i64 high) {
  i64 n = low + (i64)((-(u64)at & 63) / sizeof(T));
  return n < high ? n : high;
}
template <int n, class T> D_FN void d_nontemporal_lanes(T* to, const T* from) {
  static_assert(n * sizeof(T) % 64 == 0, "whole lines");
  constexpr int bytes = n * sizeof(T);
  if (!((u64)to & 63))
    for (int k = 0; k < bytes; k += 64) d_whole_line((char*)to + k, (const char*)from + k);
  else
    for (int k = 0; k < bytes; k += sizeof(d_line))
      d_store((char*)to + k, d_load<d_line>((const char*)from + k));
}
// In one of several passes over a row, some of which are costly (see nontemporal.py).
template <int n, class T> D_FN void d_nontemporal_last(T* to, const T* from) {
#if defined(__AVX512F__)
  d_nontemporal_lanes<n>(to, from);
#else
  for (int k = 0; k < n; ++k) to[k] = from[k];
#endif
}

//@ d_rand_lanes
// d_rand of 64 elements that share 16 counters. With AVX-512 words lie in the low halves of 64 bits,
// as products of 32 bits want them; g++ 12 makes the same of the loop below by multiplying 64 bits
// (three times as long), and by moving words to and fro.
#if defined(__AVX512F__)
typedef u64 d_v_u64 __attribute__((vector_size(64)));
typedef i32 d_v_word __attribute__((vector_size(64)));
typedef f32 d_v_random __attribute__((vector_size(64)));
D_FN d_v_u64 d_mul_words(d_v_u64 x, u64 y) {
  return (d_v_u64)__builtin_ia32_pmuludq512_mask((d_v_word)x, (d_v_word)(d_v_u64{} + y),
                                                 (i64 __attribute__((vector_size(64)))){}, 255);
}
D_FN d_v_u64 d_high_words(d_v_u64 x) {
  constexpr d_v_word odd = {1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15};
  return (d_v_u64)__builtin_shuffle((d_v_word)x, odd);
}
D_FN void d_unit_floats(f32* out, d_v_u64 words) {
  d_v_word bits = (d_v_word)((u32 __attribute__((vector_size(64))))words >> 8);
  d_store(out, __builtin_convertvector(bits, d_v_random) * 5.9604644775390625e-08f);
}
static inline void d_rand_64(f32* out, i64 seed, i64 stream, i64 counter) {
  constexpr d_v_u64 first = {0, 1, 2, 3, 4, 5, 6, 7}, lower = {0, 8, 1, 9, 2, 10, 3, 11};
  d_v_u64 zero = {}, k0 = zero + (u64)seed, k1 = zero + ((u64)seed >> 32), c[2][4];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    c[h][0] = first + (u64)(counter + 8 * h), c[h][1] = c[h][0] >> 32;
    c[h][2] = zero + (u64)stream, c[h][3] = c[h][2] >> 32;
  }
#pragma GCC unroll 10
  for (int i = 0; i < 10; ++i, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      d_v_u64 p0 = d_mul_words(c[h][0], 0xd2511f53u), p1 = d_mul_words(c[h][2], 0xcd9e8d57u);
      c[h][0] = d_high_words(p1) ^ c[h][1] ^ k0, c[h][2] = d_high_words(p0) ^ c[h][3] ^ k1;
      c[h][1] = p1, c[h][3] = p0;
    }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    d_v_u64 x = (c[h][0] & 0xffffffffu) | c[h][1] << 32, y = (c[h][2] & 0xffffffffu) | c[h][3] << 32;
    d_unit_floats(out + 32 * h, __builtin_shuffle(x, y, lower));
    d_unit_floats(out + 32 * h + 16, __builtin_shuffle(x, y, lower + 4));
  }
}
#else
static inline void d_rand_64(f32* out, i64 seed, i64 stream, i64 counter) {
#pragma omp simd
  for (int l = 0; l < 16; ++l) {
    u32 a, b, c, d;
    d_philox(seed, stream, counter + l, a, b, c, d);
    out[4 * l] = (f32)(i32)(a >> 8) * 5.9604644775390625e-08f;
    out[4 * l + 1] = (f32)(i32)(b >> 8) * 5.9604644775390625e-08f;
    out[4 * l + 2] = (f32)(i32)(c >> 8) * 5.9604644775390625e-08f;
    out[4 * l + 3] = (f32)(i32)(d >> 8) * 5.9604644775390625e-08f;
  }
}
#endif
// d_rand of elements first ... first + n - 1; n is a multiple of 64.
template <int n> static inline void d_rand_lanes(f32* out, i64 seed, i64 stream, i64 first) {
  if (!(first & 3)) {
    for (int k = 0; k < n; k += 64) d_rand_64(out + k, seed, stream, (first + k) >> 2);
    return;
  }
  alignas(64) f32 all[n + 64];
  for (int k = 0; k <= n; k += 64) d_rand_64(all + k, seed, stream, (first + k) >> 2);
  __builtin_memcpy(out, all + (first & 3), n * sizeof(f32));
}

//@ d_checked
// A tensor's memory whose accesses are checked (option check_accesses): the first one outside is
// reported to the caller, and goes to a place of no meaning.
extern "C" int snprintf(char*, unsigned long, const char*, ...) noexcept;
static __attribute__((noinline, cold)) void d_out_of_bounds(const char* what, i64 at, i64 n) {
  if (__atomic_exchange_n(&cpp_bounds_error.taken, 1, __ATOMIC_RELAXED)) return;
  snprintf(cpp_bounds_error.text, sizeof(cpp_bounds_error.text),
           "%s, which has %lld elements, is accessed at element %lld", what, n, at);
}
template <class T> struct d_address {  // where a block begins
  T* p;
  i64 at, n;
  const char* what;
  operator T*() const { return p + at; }
  bool inside(i64 by) const {
    if (at + by >= 0 && at + by < n) return true;
    d_out_of_bounds(what, at + by, n);
    return false;
  }
  // Rows that are `step` apart, of so many neighbours; null where a corner is outside.
  T* block(i64 step, i64 rows, i64 columns) const {
    if (rows <= 0 || columns <= 0) return p + at;
    i64 r = (rows - 1) * step, c = columns - 1;
    return inside(0) && inside(r) && inside(c) && inside(r + c) ? p + at : nullptr;
  }
};
template <class T> struct d_checked {
  T* p;
  i64 n;
  const char* what;
  T& operator[](i64 at) const {
    if (at >= 0 && at < n) return p[at];
    d_out_of_bounds(what, at, n);
    alignas(64) static __thread char spare[64];
    return *(T*)spare;
  }
  d_address<T> operator+(i64 at) const { return {p, at, n, what}; }
};
template <class T, class U>
static void d_transpose(d_address<T> from, i64 step, U* to, i64 to_step, i64 rows, i64 columns) {
  const U* f = from.block(step, rows, columns);
  if (f) d_transpose(f, step, to, to_step, rows, columns);
}
template <class T, class U>
static void d_transpose(T* from, i64 step, d_address<U> to, i64 to_step, i64 rows, i64 columns) {
  U* t = to.block(to_step, columns, rows);
  if (t) d_transpose((const U*)from, step, t, to_step, rows, columns);
}
template <class T, class U> static void d_transpose(
    d_address<T> from, i64 step, d_address<U> to, i64 to_step, i64 rows, i64 columns) {
  U* t = to.block(to_step, columns, rows);
  if (t) d_transpose(from, step, t, to_step, rows, columns);
}

//@ d_copy_strided
// to[k] = from[s k]: nothing but these elements is read, nor what lies behind the last.
template <int s, class T> D_FN void d_copy_strided(T* to, const T* from, i64 n) {
#if defined(__AVX512F__)
  if constexpr (s == 2 && sizeof(T) == 4) {
    typedef T Row __attribute__((vector_size(64)));
    typedef i32 At __attribute__((vector_size(64)));
    if (n >= 16) {
      for (i64 k = 0; k < n; k += 16) {
        i64 at = k < n - 16 ? k : n - 16;
        Row x = d_load<Row>(from + 2 * at), y = d_load<Row>(from + 2 * at + 15);
        x = __builtin_shuffle(x, y, At{0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31});
        d_store(to + at, x);
      }
      return;
    }
  }
#endif
  for (i64 k = 0; k < n; ++k) to[k] = from[s * k];
}
template <int s, class T, class P>  // P: a d_address
D_FN auto d_copy_strided(T* to, P from, i64 n) -> decltype(from.what, void()) {
  if (const T* f = from.block(0, 1, s * (n - 1) + 1)) d_copy_strided<s>(to, f, n);
}
