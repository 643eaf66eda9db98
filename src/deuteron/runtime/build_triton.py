"""Triton kernels become binaries.

In: `codegen.triton.generate.TritonKernel`, one of its configurations, and a GPU by compute
capability. Out: a `Binary`: machine code and what its launch needs. Building touches no GPU, so it
runs anywhere, for any GPU, in any process. Results are kept in the cache as the code itself and a
JSON file; nothing of Triton is imported where they are found there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from deuteron.base.errors import BuildError, DeuteronError
from deuteron.base.options import Options
from deuteron.codegen.triton.generate import Config, TritonKernel
from deuteron.runtime.cache import Cache, key_of


class NoTriton(DeuteronError):
    """Triton is not installed."""


@dataclass(frozen=True)
class Binary:
    """A kernel for one kind of GPU. `shared` is bytes of shared memory; `spills` bytes a thread."""

    name: str
    code: bytes
    num_warps: int
    shared: int
    registers: int = 0
    spills: int = 0


@cache
def version() -> str:
    """Triton's version without importing it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("triton")
    except PackageNotFoundError:
        raise NoTriton(
            "Triton is not installed, so nothing can be generated for this GPU",
            hint='pip install triton, or options={"fallback": "aten"}',
        ) from None


@cache
def library_text() -> str:
    """The source of the functions that kernels import."""
    from deuteron.codegen.triton import libm

    return Path(libm.__file__).read_text()


@lru_cache(maxsize=256)
def module(path: Path) -> ModuleType:
    """The generated module; Triton reads its functions' text from the file."""
    spec = importlib.util.spec_from_file_location(f"deuteron_kernel_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def build(
    kernel: TritonKernel,
    config: Config,
    capability: int,
    options: Options,
    aligned: bool = True,
    wide: bool = False,
) -> Binary:
    """The binary of a variant: `aligned` pointers and sizes are multiples of 16; `wide` indices
    have 64 bits. `capability` is 90 for an H200."""
    cache = Cache.open(options)
    key = key_of(
        kernel.source, repr((config, capability, aligned, wide)), version(), library_text()
    )
    found = _read(cache, key)
    if found is not None:
        return found
    with cache.lock(key):
        found = _read(cache, key)
        if found is not None:
            return found
        made, about = _compile(kernel, config, capability, cache, key, aligned, wide)
        cache.put(key, ".cubin", made)
        cache.put(key, ".json", json.dumps(about).encode())
        return Binary(code=made, **about)


def _read(cache: Cache, key: str) -> Binary | None:
    code, about = cache.get(key, ".cubin"), cache.get(key, ".json")
    if code is None or about is None:
        return None
    return Binary(code=code.read_bytes(), **json.loads(about.read_text()))


def _compile(
    kernel: TritonKernel,
    config: Config,
    capability: int,
    cache: Cache,
    key: str,
    aligned: bool,
    wide: bool,
) -> tuple[bytes, dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = cache.put(key_of(kernel.source), ".py", kernel.source.encode())
    jit = getattr(module(path), kernel.name)
    attrs = {}
    if aligned:
        attrs = {(kernel.params.index(p),): [["tt.divisibility", 16]] for p in kernel.aligned}
    source = ASTSource(
        fn=jit,
        signature=kernel.signature(wide),
        constexprs=kernel.constants(config, wide),
        attrs=attrs,
    )
    asked = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": kernel.fp_fusion,
    }
    if kernel.debug:
        asked |= {"debug": True, "sanitize_overflow": False}
    try:
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=asked)
    except Exception as e:
        raise BuildError(
            f"Triton refused the generated kernel {kernel.name}",
            hint='please report it; options={"fallback": "aten"} runs the graph through ATen',
            source=str(path),
            output=f"{type(e).__name__}: {e}",
            command=f"{sys.executable} {path}",
        ) from e
    about = {
        "name": done.metadata.name,
        "num_warps": done.metadata.num_warps,
        "shared": done.metadata.shared,
    }
    return done.asm["cubin"], about


__all__ = ["Binary", "NoTriton", "build"]
