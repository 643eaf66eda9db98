"""What a compiled graph leaves in the process goes with it."""

from __future__ import annotations

import gc
import linecache

import torch

import deuteron  # noqa: F401


def modules() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<deuteron")}


def test_texts_of_modules_go_with_their_graphs() -> None:
    torch._dynamo.reset()
    gc.collect()
    before = modules()
    f = torch.compile(lambda x: (x * 3).exp().sum(0), backend="deuteron", options={"cache": False})
    f(torch.randn(7, 5))
    assert modules() - before
    del f
    torch._dynamo.reset()
    gc.collect()
    assert not modules() - before
