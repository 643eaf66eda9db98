"""GELU (tanh form) written by hand in CUDA C++: 16 bytes per load, four of them per thread.

Built through `torch.utils.cpp_extension.load_inline` when first asked for. Raises `Absent`, with
the reason, where there is no nvcc or no GPU.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from dev.bench.cases import Absent

# Without torch's headers: they take nvcc a minute.
KERNEL_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace {

__device__ __forceinline__ float gelu(float x) {
  // 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3)
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

__device__ __forceinline__ uint32_t one(uint32_t bits, float) {
  return __float_as_uint(gelu(__uint_as_float(bits)));
}

__device__ __forceinline__ uint32_t one(uint32_t bits, __nv_bfloat16) {
  __nv_bfloat162 pair = *reinterpret_cast<__nv_bfloat162*>(&bits);
  const float2 wide = __bfloat1622float2(pair);
  pair = __floats2bfloat162_rn(gelu(wide.x), gelu(wide.y));
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <typename T>
__global__ void __launch_bounds__(256) gelu_kernel(const uint4* x, uint4* y, int64_t n) {
  const int64_t first = int64_t(blockIdx.x) * 1024 + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (first + 256 * k < n) v[k] = __ldcs(x + first + 256 * k);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (first + 256 * k < n) {
      v[k] = make_uint4(one(v[k].x, T()), one(v[k].y, T()), one(v[k].z, T()), one(v[k].w, T()));
      __stcs(y + first + 256 * k, v[k]);
    }
}

}  // namespace

// n: of 16 bytes each.
void launch_gelu(const void* x, void* y, int64_t n, bool wide, void* stream) {
  const unsigned blocks = unsigned((n + 1023) / 1024);
  const auto* from = static_cast<const uint4*>(x);
  auto* to = static_cast<uint4*>(y);
  auto s = static_cast<cudaStream_t>(stream);
  if (wide)
    gelu_kernel<float><<<blocks, 256, 0, s>>>(from, to, n);
  else
    gelu_kernel<__nv_bfloat16><<<blocks, 256, 0, s>>>(from, to, n);
}
"""

BINDING_SOURCE = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

void launch_gelu(const void* x, void* y, int64_t n, bool wide, void* stream);

torch::Tensor gelu(torch::Tensor x) {
  const bool wide = x.scalar_type() == torch::kFloat;
  TORCH_CHECK(wide || x.scalar_type() == torch::kBFloat16, "float32 or bfloat16");
  TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.nbytes() % 16 == 0, "contiguous, 16 bytes");
  torch::Tensor y = torch::empty_like(x);
  launch_gelu(x.const_data_ptr(), y.mutable_data_ptr(), x.nbytes() / 16, wide,
              c10::cuda::getCurrentCUDAStream().stream());
  return y;
}
"""


@functools.cache
def gelu() -> Callable[[Tensor], Tensor]:
    """The function, built."""
    if not torch.cuda.is_available():
        raise Absent("CUDA C++ needs a GPU")
    from torch.utils import cpp_extension

    if shutil.which("nvcc") is None and cpp_extension.CUDA_HOME is None:
        raise Absent("there is no nvcc on this machine")
    built = cpp_extension.load_inline(
        "deuteron_bench_gelu",
        cpp_sources=BINDING_SOURCE,
        cuda_sources=KERNEL_SOURCE,
        functions=["gelu"],
        extra_cuda_cflags=["-O3"],
        no_implicit_headers=True,
        with_cuda=True,
    )
    return built.gelu
