"""C++ code generation for CPUs: kernels in, one translation unit out."""

from deuteron.codegen.cpp.environment import Machine
from deuteron.codegen.cpp.kernels import (
    KERNEL_CXX_FLAGS,
    CppKernel,
    generate,
    generate_for,
    translation_unit,
)

__all__ = [
    "KERNEL_CXX_FLAGS",
    "CppKernel",
    "Machine",
    "generate",
    "generate_for",
    "translation_unit",
]
