"""What every test starts from: own kernel cache, no network, few threads, a fresh Dynamo, and the
random numbers of its name, so that a test finds today what it found yesterday."""

from __future__ import annotations

import gc
import importlib
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

_CACHE = "DEUTERON_CACHE_DIR"


# Examples are those of the test's name, as other random numbers are (`python -m dev fuzz` draws
# anew).
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The controller makes the cache; xdist's workers inherit it and share what they build.
    if _CACHE not in os.environ:
        folder = tempfile.mkdtemp(prefix="deuteron-tests-")
        os.environ[_CACHE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Tests look at how graphs are compiled; `tests/runtime/test_graph_cache.py` is about those that
    # the cache has.
    os.environ.setdefault("DEUTERON_KEEP_GRAPHS", "0")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # One thread a worker: OpenMP teams of several processes on few cores stall one another.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """What a module leaves behind stays (what torch imports and keeps, mostly): the garbage
    collector need not walk it again and again, which took a tenth of the time."""
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> None:
    number = zlib.crc32(request.node.nodeid.encode())
    random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Neither what Dynamo compiled nor that there were hooks on saved tensors is left behind."""
    yield
    support = sys.modules.get("deuteron.runtime.support")
    if support is not None:
        support.HOOKS_SEEN.clear()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def every_rewrite_succeeds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A rewrite that raises is undone, and the compile goes on: to tests it is a failure all the
    same, but to those that make one fail (marked `failing_rewrites`)."""
    transaction = None
    if "torch" in sys.modules and "failing_rewrites" not in request.keywords:
        transaction = importlib.import_module("deuteron.graph.transaction")
    if transaction is None:
        yield
        return
    failures, plain = [], transaction.failed

    def failed(record: Any, name: str, e: Exception) -> None:
        failures.append(f"{name}: {e!r}")
        plain(record, name, e)

    monkeypatch.setattr(transaction, "failed", failed)
    yield
    assert not failures, "rewrites failed, and the compile went on without them"
