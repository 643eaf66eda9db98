"""Small matrix products by cuBLAS's own interface, with little host time.

In: a `codegen.products.Product`. Out: a `Multiply`, called with a stream and addresses. The
algorithm is what cuBLAS recommends, as in ATen, but asked for once. A C function makes the call; it
needs no headers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deuteron.base.errors import DeuteronError
from deuteron.base.options import Options
from deuteron.base.products import tf32
from deuteron.codegen.products import Product, Side
from deuteron.runtime import build_cpp

SOURCE = """
extern "C" int sched_yield(void);
struct algorithm { unsigned long long data[8]; };
struct product {
  void* handle; void* desc; void* first; void* second; void* out;
  algorithm best, good, any;     // for addresses that are multiples of 256, of 16, others
  int (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                  const void*, void*, void*, void*, const algorithm*, void*, unsigned long, void*);
  int (*set)(void*, int, const void*, unsigned long);
  int bias, busy;
};

// p: a, b, out and the bias, if there is one.
extern "C" int deuteron_multiply(product* q, void** p, void* space, unsigned long size,
                                 void* stream) {
  static const float one = 1.0f, zero = 0.0f;
  unsigned long long low = (unsigned long long)p[0] | (unsigned long long)p[1]
                           | (unsigned long long)p[2];
  int rc = 0;
  if (q->bias) {
    low |= (unsigned long long)p[3];
    while (__atomic_exchange_n(&q->busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
    rc = q->set(q->desc, 8, p + 3, sizeof(void*));
  }
  const algorithm* how = low & 15 ? &q->any : low & 255 ? &q->good : &q->best;
  if (!rc)
    rc = q->multiply(q->handle, q->desc, &one, p[1], q->first, p[0], q->second, &zero, p[2],
                     q->out, p[2], q->out, how, space, size, stream);
  if (q->bias) __atomic_store_n(&q->busy, 0, __ATOMIC_RELEASE);
  return rc;
}
"""

# Numbers of cuBLAS's interface.
CUBLAS_TYPES = {"f32": 0, "f16": 2, "bf16": 14}
FLOAT, TF32 = 68, 77  # kinds of computation
TRANSPOSE_FIRST, TRANSPOSE_SECOND, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
WITH_BIAS = {"": 4, "relu": 6, "gelu": 36}  # and an activation
BATCH, BATCH_STEP = 5, 6
MAX_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)
# Partial results that an algorithm may write, one for each part of k. With 32 MB to use, as ATen
# gives it without a bias, cuBLAS recommends 264 for f32 8x256x256: 31 us on an H200, where one
# without any takes 3.0; 128x768x2304 takes 19.7 with five, 30 without. Long sums have more: bf16
# 512x13 of 8192 takes 52 with seven, 13 by ATen.
MAX_PARTIALS, PARTIAL_LENGTH = 7, 512


class BlasError(DeuteronError):
    """cuBLAS refused a product."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ulonglong * 8)]


class _Result(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("space", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Product(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("handle", "desc", "first", "second", "out")),
        *((n, _Algorithm) for n in ("best", "good", "any")),
        ("multiply", ctypes.c_void_p),
        ("set", ctypes.c_void_p),
        ("bias", ctypes.c_int),
        ("busy", ctypes.c_int),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    """The library that torch has loaded."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for line in maps.splitlines():
        if line.rpartition("/")[2].startswith("libcublasLt.so"):
            return ctypes.CDLL(line[line.index("/") :])
    return None


def version() -> str:
    library = _library()
    assert library is not None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(library.cublasLtGetVersion())


def available() -> bool:
    """Whether products can be made here."""
    return _library() is not None


def _ok(rc: int, what: str) -> None:
    if rc:
        raise BlasError(f"cuBLAS error {rc} at {what}")


def _made(what: str, *args: Any) -> ctypes.c_void_p:
    out = ctypes.c_void_p(0)
    _ok(getattr(_library(), what)(ctypes.byref(out), *args), what)
    return out


def _set(what: str, where: ctypes.c_void_p, attribute: int, value: Any) -> None:
    rc = getattr(_library(), what)(
        where, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
    )
    _ok(rc, f"{what} {attribute}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    torch.cuda.current_stream(device).synchronize()  # there is a context
    return _made("cublasLtCreate")


@cache
def _function(options: Options) -> Any:
    lib = build_cpp.build(SOURCE, ("-O2", "-fPIC", "-shared"), options)
    function = lib.deuteron_multiply
    function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_void_p]
    return function


_WORKSPACES: dict[tuple[int, int, int], torch.Tensor] = {}  # by device, stream, size
_PRODUCTS: dict[tuple[Product, int, bool], Multiply | None] = {}
MAX_PRODUCTS = 4096


def multiply(product: Product, device: str, options: Options) -> Multiply | None:
    """What makes a product; None where cuBLAS or this machine cannot."""
    if not available():
        return None
    key = (product, torch.device(device).index or 0, tf32())
    if key not in _PRODUCTS:
        if len(_PRODUCTS) >= MAX_PRODUCTS:
            _PRODUCTS.clear()
        try:
            _PRODUCTS[key] = Multiply(product, key[1], options)
        except BlasError:
            _PRODUCTS[key] = None
    return _PRODUCTS[key]


class Multiply:
    """One product on one device. Raises `BlasError` where cuBLAS has no way to do it."""

    def __init__(self, product: Product, device: int, options: Options) -> None:
        self.product, self.device = product, device
        self.spaces: dict[int, int] = {}  # addresses by stream
        with torch.cuda.device(device):
            self.prepare()
        self.function = _function(options)

    def __call__(self, stream: int, pointers: Any) -> None:
        space = self.spaces.get(stream)
        if space is None:
            space = self.workspace(stream)
        rc = self.function(self.address, pointers, space, self.space, stream)
        if rc:
            raise BlasError(f"cuBLAS error {rc} at {self.product}")

    def record(self, stream: int, now: int, pointers: Any, sizes: tuple[int, ...]) -> None:
        """Multiplies on the stream `now`, which is being recorded, as on `stream`."""
        space = self.spaces.get(stream)
        if space is None:
            space = self.workspace(stream)
        rc = self.function(self.address, pointers, space, self.space, now)
        if rc:
            raise BlasError(f"cuBLAS error {rc} at {self.product}")

    def workspace(self, stream: int) -> int:
        """The memory that products on a stream use, one after the other."""
        if not self.space:
            self.spaces[stream] = 0
            return 0
        size = 1 << (self.space - 1).bit_length()
        key = (self.device, stream, size)
        space = _WORKSPACES.get(key)
        if space is None:
            at = torch.device("cuda", self.device)
            space = _WORKSPACES[key] = torch.empty(size, dtype=torch.uint8, device=at)
        self.spaces[stream] = space.data_ptr()
        return space.data_ptr()

    def prepare(self) -> None:
        p = self.product
        kind = CUBLAS_TYPES[p.dtype]
        compute = ctypes.c_int(TF32 if p.dtype == "f32" and tf32() else FLOAT)
        desc = _made("cublasLtMatmulDescCreate", compute, ctypes.c_int(CUBLAS_TYPES["f32"]))
        settings: list[tuple[int, Any]] = [
            (TRANSPOSE_FIRST, ctypes.c_int(int(p.b.transposed))),
            (TRANSPOSE_SECOND, ctypes.c_int(int(p.a.transposed))),
        ]
        if p.bias:
            settings += [
                (EPILOGUE, ctypes.c_int(WITH_BIAS[p.activation])),
                (BIAS_POINTER, ctypes.c_void_p(256)),
            ]
        for attribute, value in settings:
            _set("cublasLtMatmulDescSetAttribute", desc, attribute, value)
        first = self.layout(kind, p.n, p.k, p.b)
        second = self.layout(kind, p.k, p.m, p.a)
        out = self.layout(kind, p.n, p.m, p.out)
        self.handle = _handle(self.device)
        self.layouts = (desc, first, second, out, out)
        algorithms = [self.candidates(1, n)[0] for n in (256, 16, 2 if kind else 4)]
        self.space = max(r.space for r in algorithms)
        self.min_space = max(r.space for r in algorithms[1:])
        library = _library()
        assert library is not None
        functions = [
            ctypes.cast(getattr(library, n), ctypes.c_void_p)
            for n in ("cublasLtMatmul", "cublasLtMatmulDescSetAttribute")
        ]
        head = (self.handle, desc, first, second, out, *(r.algorithm for r in algorithms))
        self.table = _Product(*head, *functions, int(p.bias), 0)
        self.address = ctypes.addressof(self.table)

    def use(self, candidate: _Result) -> None:
        """Uses a candidate for aligned addresses."""
        self.table.best = candidate.algorithm
        self.space = max(self.min_space, candidate.space)
        self.spaces.clear()

    def layout(self, kind: int, rows: int, columns: int, side: Side) -> ctypes.c_void_p:
        if side.transposed:
            rows, columns = columns, rows
        shape = (ctypes.c_ulonglong(rows), ctypes.c_ulonglong(columns))
        step = ctypes.c_longlong(side.column)
        out = _made("cublasLtMatrixLayoutCreate", ctypes.c_int(kind), *shape, step)
        if self.product.batch > 1:
            _set("cublasLtMatrixLayoutSetAttribute", out, BATCH, ctypes.c_int(self.product.batch))
            _set("cublasLtMatrixLayoutSetAttribute", out, BATCH_STEP, ctypes.c_longlong(side.batch))
        return out

    def candidates(self, count: int, alignment: int = 256) -> list[_Result]:
        """What cuBLAS recommends for addresses of this alignment, the best first."""
        wish = _made("cublasLtMatmulPreferenceCreate")
        name = "cublasLtMatmulPreferenceSetAttribute"
        p = self.product
        most = max(MAX_PARTIALS, p.k // PARTIAL_LENGTH) * 4 * p.m * p.n * p.batch
        _set(name, wish, MAX_WORKSPACE, ctypes.c_size_t(most))
        for attribute in ALIGNMENTS:
            _set(name, wish, attribute, ctypes.c_uint(alignment))
        results, count_returned = (_Result * count)(), ctypes.c_int(0)
        library = _library()
        assert library is not None
        rc = library.cublasLtMatmulAlgoGetHeuristic(
            self.handle,
            *self.layouts,
            wish,
            ctypes.c_int(count),
            results,
            ctypes.byref(count_returned),
        )
        library.cublasLtMatmulPreferenceDestroy(wish)
        out = [r for r in results[: count_returned.value] if not r.state]
        if rc or not out:
            raise BlasError(f"cuBLAS has no algorithm for {self.product} ({rc})")
        return out


__all__ = ["BlasError", "Multiply", "available", "multiply", "version"]
