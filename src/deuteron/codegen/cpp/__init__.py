"""C++ code generation for CPUs: kernels in, one translation unit out."""

from deuteron.codegen.cpp.environment import Machine
from deuteron.codegen.cpp.kernels import (
    KERNEL_CXX_FLAGS,
    CppKernel,
    Task,
    generate,
    translation_unit,
    write_kernel,
)

__all__ = [
    "KERNEL_CXX_FLAGS",
    "CppKernel",
    "Machine",
    "Task",
    "generate",
    "translation_unit",
    "write_kernel",
]
