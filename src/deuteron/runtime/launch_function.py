"""The C function that launches kernels, and what it reads.

In: tables of kernels (`Kernel`), of which each names its arguments among the addresses and sizes of
a call, and those of its boxes (`codegen.triton.kernel.Box`), which it makes the driver encode for
the copy engine. It is compiled once for a machine and needs no headers.
"""

from __future__ import annotations

import ctypes
from typing import Any

from deuteron.codegen.triton.kernel import TritonKernel
from deuteron.runtime.build_triton import Binary

SOURCE = """
typedef int (*launch_t)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, void*, void**, void**);
// CUlaunchAttribute and CUlaunchConfig.
struct attribute { int id, none; unsigned value[16]; };
struct configuration {
  unsigned grid[3], block[3], shared; void* stream; attribute* attributes; unsigned count;
};
typedef int (*launch_ex_t)(const configuration*, void*, void**, void**);
typedef int (*encode_t)(void*, int, unsigned, void*, const unsigned long long*,
                        const unsigned long long*, const unsigned*, const unsigned*, int, int, int,
                        int);
// A box: bytes from its tensor's address, rank, kind of elements, swizzle; of five dimensions each,
// extents, bytes from one place to the next (but along the innermost one) and blocks, innermost
// first, and strides in elements, outermost first.
typedef const unsigned long long* box_t;
struct alignas(64) map { long long words[16]; };
// `cooperative`: programs that run at the same time: 0 any, 1 all, more: so many, as a cluster.
struct kernel {
  void* function;
  unsigned grid, block, shared;
  int count, aligned, cooperative, boxed;
  const int* args;
  box_t boxes;
};

struct sequence {
  launch_t launch; launch_ex_t launch_ex; encode_t encode; const kernel* kernels; long long* sizes;
};

// Launches kernels `from` to `to` (excluded). 0, or minus the number (from 1) of a kernel whose
// addresses are not aligned, before anything of it or after it ran, or 1000 * its number + CUDA's
// error.
extern "C" int deuteron_launch(const sequence* q, int from, int to, void** p, void* stream) {
  void* none = 0;
  for (int i = from; i < to; ++i) {
    const kernel* k = q->kernels + i;
    if (!k->grid) continue;
    void** params = (void**)__builtin_alloca(sizeof(void*) * (k->count + 10 * k->boxed + 2));
    unsigned long long low = 0;
    int n = 0, rc;
    for (; n < k->count - k->boxed; ++n) {
      int a = k->args[n];
      if (a >= 0) { params[n] = p + a; low |= (unsigned long long)p[a]; }
      else params[n] = q->sizes + (-a - 1);
    }
    if (k->aligned && (low & 15)) return -(i + 1);
    map* maps = (map*)__builtin_alloca_with_align(sizeof(map) * (k->boxed + 1), 512);
    for (int j = 0; j < k->boxed; ++j) {
      box_t b = k->boxes + 24 * j;
      unsigned one[5] = {1, 1, 1, 1, 1}, block[5], rank = b[1];
      for (unsigned d = 0; d < rank; ++d) block[d] = b[14 + d];
      void* at = (char*)p[k->args[k->count - k->boxed + j]] + b[0];
      // 2: 128 bytes at once into the L2.
      rc = q->encode(maps + j, b[2], rank, at, b + 4, b + 9, block, one, 0, b[3], 2, 0);
      if (rc) return 1000 * (i + 1) + rc;
      params[n++] = maps + j;
      for (unsigned d = rank; d; --d) params[n++] = (void*)(b + 3 + d);
      for (unsigned d = 0; d < rank; ++d) params[n++] = (void*)(b + 19 + d);
    }
    params[n] = params[n + 1] = &none;
    if (k->cooperative) {
      attribute one = {k->cooperative == 1 ? 2 : 4, 0, {1, 1, 1}};  // all, cluster dimensions
      if (k->cooperative > 1) one.value[0] = k->cooperative;
      configuration c = {{k->grid, 1, 1}, {k->block, 1, 1}, k->shared, stream, &one, 1};
      rc = q->launch_ex(&c, k->function, params, 0);
    } else {
      rc = q->launch(k->function, k->grid, 1, 1, k->block, 1, 1, k->shared, stream, params, 0);
    }
    if (rc) return 1000 * (i + 1) + rc;
  }
  return 0;
}
"""


class Kernel(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("count", ctypes.c_int),
        ("aligned", ctypes.c_int),
        ("cooperative", ctypes.c_int),
        ("boxed", ctypes.c_int),
        ("args", ctypes.POINTER(ctypes.c_int)),
        ("boxes", ctypes.c_void_p),
    ]


def box_rows(kernel: TritonKernel, binary: Binary) -> Any:
    """What the C function needs for a kernel's boxes."""
    rows: list[int] = []
    for box, (swizzle, size, kind, *block) in zip(kernel.boxes, binary.boxes, strict=True):
        pitches = [size * n for n in box.strides[-2::-1]]
        rows += (box.offset, len(block), kind, swizzle)
        for five in (box.extents[::-1], pitches, block[::-1], box.strides):
            rows += (*five, *[0] * (5 - len(five)))
    return (ctypes.c_longlong * len(rows))(*rows)


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("none", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Table(ctypes.Structure):
    _fields_ = [
        ("launch", ctypes.c_void_p),
        ("launch_ex", ctypes.c_void_p),
        ("encode", ctypes.c_void_p),
        ("kernels", ctypes.POINTER(Kernel)),
        ("sizes", ctypes.POINTER(ctypes.c_longlong)),
    ]


__all__ = ["SOURCE", "Attribute", "Configuration", "Kernel", "Table", "box_rows"]
