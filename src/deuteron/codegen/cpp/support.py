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


SUPPORT: dict[str, str] = {
    "d_max_nan": _extreme("max"),
    "d_min_nan": _extreme("min"),
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
