"""Triton code generation for GPUs: a kernel in, the source of a Triton function and its launch
description out (`generate`). Processes that build import `libm` alone, without torch.
"""
