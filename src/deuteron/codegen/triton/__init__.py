"""Triton code generation for GPUs: a kernel in, the source of a Triton function and its launch
description out.
"""

from deuteron.codegen.triton.generate import Config, TritonKernel, generate

__all__ = ["Config", "TritonKernel", "generate"]
