"""C++ code generation for CPUs: kernels in, one translation unit out."""

from deuteron.codegen.cpp.kernels import FLAGS, CppKernel, generate, generate_for, translation_unit
from deuteron.codegen.cpp.nests import Machine

__all__ = ["FLAGS", "CppKernel", "Machine", "generate", "generate_for", "translation_unit"]
