"""GELU (tanh form) in CUDA C++: what Triton does by itself, written out.

    python examples/gelu_cuda.py

As in gelu_triton.py, memory bounds it. What one has to do for full bandwidth by hand:

- 16 bytes per load (`uint4`): one instruction per 128 bits, and a warp touches 512 bytes in a row.
- Four loads per thread before the first result is needed, so that enough bytes are on their way
  while others arrive.
- Loads and stores that do not stay in the caches (`__ldcs`, `__stcs`): nobody reads them again.

It needs a GPU and nvcc. Where one is missing, this says so and prints what Deuteron generates for
the CPU instead.
"""

from __future__ import annotations

import functools
import math
import shutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor

# A block of 256 threads owns 1024 vectors of 16 bytes. Thread t takes the vectors t, t + 256,
# t + 512 and t + 768 of its block, so that neighbouring threads read neighbouring vectors.
# The file does without torch's headers: they take nvcc a minute.
KERNEL = r"""
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace {

__device__ __forceinline__ float gelu(float x) {
  // 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3)
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

// 32 bits are one float ...
__device__ __forceinline__ uint32_t one(uint32_t bits, float) {
  return __float_as_uint(gelu(__uint_as_float(bits)));
}

// ... or two numbers of bfloat16, which are computed in float32.
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
  // All loads first: they are independent, and the memory answers them together.
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

BINDING = r"""
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


def missing() -> str:
    """What this machine lacks to build and run the kernel, or ""."""
    if not torch.cuda.is_available():
        return "CUDA C++ needs a GPU, and there is none on this machine"
    from torch.utils.cpp_extension import CUDA_HOME, is_ninja_available

    if shutil.which("nvcc") is None and CUDA_HOME is None:
        return "CUDA C++ needs nvcc, and there is none on this machine"
    if not is_ninja_available():
        return "CUDA C++ needs ninja (pip install ninja), and there is none on this machine"
    return ""


@functools.cache
def built() -> Callable[[Tensor], Tensor]:
    """The function: of a contiguous float32 or bfloat16 tensor of a multiple of 16 bytes."""
    from torch.utils import cpp_extension

    extension = cpp_extension.load_inline(
        "deuteron_example_gelu",
        cpp_sources=BINDING,
        cuda_sources=KERNEL,
        functions=["gelu"],
        extra_cuda_cflags=["-O3"],
        no_implicit_headers=True,
        with_cuda=True,
    )
    return extension.gelu


def plain(x: Tensor) -> Tensor:
    """The same as one writes it in PyTorch; Deuteron makes one kernel of it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def main() -> int:
    from deuteron.tools.side_by_side import generated, side_by_side

    reason = missing()
    if reason:
        x = torch.randn(1024, 1024)
        print(f"{reason}. What Deuteron generates from `plain` for the CPU:\n")
        print(generated(plain, (x,)), end="\n\n")
        return side_by_side(plain, None, (x,), 2.0 * x.nbytes, "B")
    x = torch.randn(16384, 16384, device="cuda")
    return side_by_side(plain, built(), (x,), 2.0 * x.nbytes, "B")


if __name__ == "__main__":
    sys.exit(main())
