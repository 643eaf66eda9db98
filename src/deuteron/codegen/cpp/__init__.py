"""C++ code generation for CPUs: kernels in, one translation unit out."""

from deuteron.codegen.cpp.environment import Machine
from deuteron.codegen.cpp.kernels import FLAGS, CppKernel, generate, generate_for, translation_unit

__all__ = ["FLAGS", "CppKernel", "Machine", "generate", "generate_for", "translation_unit"]
