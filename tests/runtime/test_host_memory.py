"""The pool hands out what nobody holds any more, and never what somebody still holds."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deuteron.runtime import host_memory
from deuteron.runtime.host_memory import MIN_BYTES, HostPool

SHAPE, STRIDES = (256, 512), (512, 1)


@pytest.fixture
def pool() -> HostPool:
    return HostPool()


def get(pool: HostPool, shape: tuple[int, ...] = SHAPE) -> Tensor:
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(1, shape[k + 1])
    return pool.empty_strided(shape, tuple(strides), torch.float32)


def view(t: Tensor) -> Any:
    return t[3:5, 7]


def saved(t: Tensor) -> Any:
    """A tensor that autograd saved, through the graph alone."""
    leaf = torch.ones((), requires_grad=True)
    return (leaf * t).grad_fn


def capsule(t: Tensor) -> Any:
    return torch.utils.dlpack.to_dlpack(t)


def typed_storage(t: Tensor) -> Any:
    return t.storage()


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda t: t, view, saved, capsule, typed_storage,
    lambda t: t.numpy(), lambda t: t.numpy()[::2], lambda t: memoryview(t.numpy()),
    lambda t: t.untyped_storage(), lambda t: t.detach(), lambda t: t.data, lambda t: t.t(),
    lambda t: torch.nn.Parameter(t), lambda t: torch.from_dlpack(t), lambda t: [{"a": t.real}],
    lambda t: torch.empty(0).set_(t), lambda t: t.as_strided((2,), (1,), 5),
]  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_is_held_is_not_handed_out(pool: HostPool, hold: Callable[[Tensor], Any]) -> None:
    t = get(pool).fill_(1.0)
    address = t.data_ptr()
    holder = hold(t)
    del t
    gc.collect()
    others = [get(pool).fill_(2.0) for _ in range(3)]
    assert address not in [o.data_ptr() for o in others]
    assert pool.info()["used"] == 4 * 4 * 256 * 512
    del holder
    gc.collect()
    assert get(pool).data_ptr() == address


def test_freed_memory_is_used_again(pool: HostPool) -> None:
    t = get(pool)
    address = t.data_ptr()
    assert t.shape == SHAPE and t.stride() == STRIDES and t.dtype == torch.float32
    assert t.untyped_storage().nbytes() == t.numel() * 4 and t.storage_offset() == 0
    assert not t._is_view() and t.is_leaf and not t.requires_grad and t._version == 0
    del t
    again = pool.empty_strided((512, 256), (1, 512), torch.float32)
    assert again.data_ptr() == address and again.stride() == (1, 512)
    assert pool.empty_strided((512, 256), (256, 1), torch.float64).data_ptr() != address


def test_every_tensor_is_new(pool: HostPool) -> None:
    """Nothing of the tensor before clings to the next one: versions, gradients, hooks."""
    t = get(pool).add_(1).requires_grad_()
    t.sum().backward()
    address = t.data_ptr()
    del t
    t = get(pool)
    assert t.data_ptr() == address and t._version == 0 and t.grad is None
    assert not t.requires_grad


def test_inference_mode(pool: HostPool) -> None:
    with torch.inference_mode():
        t = get(pool)
        assert t.is_inference()
        address = t.data_ptr()
        del t
    t = get(pool)
    assert t.data_ptr() == address and not t.is_inference()
    t.requires_grad_().sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(1024, 1024),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.untyped_storage().resize_(MIN_BYTES),
        lambda t: t.share_memory_(),
        lambda t: torch._lazy_clone(t).add_(1),
    ],
)
def test_replaced_memory_is_let_go(pool: HostPool, change: Callable[[Tensor], Any]) -> None:
    t = get(pool)
    change(t)
    del t
    gc.collect()
    t = get(pool).fill_(1.0)
    assert not t.is_shared() and t.untyped_storage().nbytes() == 4 * 256 * 512
    assert pool.info() == {"bytes": 4 * 256 * 512, "used": 4 * 256 * 512, "blocks": 1}


def test_lazy_clone_keeps_its_values(pool: HostPool) -> None:
    t = get(pool).fill_(1.0)
    clone = torch._lazy_clone(t)
    del t
    get(pool).fill_(2.0)
    assert torch.equal(clone, torch.ones(SHAPE))


def test_small_and_odd_layouts(pool: HostPool) -> None:
    for shape, strides in (((), ()), ((0, 5), (5, 1)), ((3,), (1,)), ((1 << 20, 0), (0, 1))):
        t = pool.empty_strided(shape, strides, torch.int64)
        assert t.shape == shape and t.stride() == strides
    assert pool.info()["blocks"] == 0
    t = pool.empty_strided((100, 1000), (2000, 2), torch.float32).zero_()  # with holes
    assert t.untyped_storage().nbytes() == 4 * (99 * 2000 + 999 * 2 + 1)
    t = pool.empty_strided((1 << 20, 3), (0, 1), torch.float32)  # expanded
    assert t.untyped_storage().nbytes() == 12 and pool.info()["blocks"] == 1


def test_workspaces_of_similar_sizes_share(pool: HostPool) -> None:
    for n in (1, 100, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 12345678):
        w = pool.workspace(n)
        assert n <= w.numel() <= max(n * 9 // 8, n) and w.dtype == torch.uint8
        del w
    address = pool.workspace(10_000_000).data_ptr()
    assert pool.workspace(9_900_000).data_ptr() == address


def test_default_device_does_not_matter(pool: HostPool) -> None:
    with torch.device("meta"):
        assert get(pool).device.type == "cpu"
        assert get(pool, (2, 2)).device.type == "cpu"


def test_total_is_bounded(pool: HostPool) -> None:
    """Changing shapes do not pile up: what lies idle is at most half of what was in use at once."""
    most = 0
    for n in range(100_000, 200_000, 1000):
        held = [get(pool, (n,)), get(pool, (n + 7,))]
        most = max(most, sum(4 * t.numel() for t in held))
        del held
        assert pool.info()["bytes"] <= host_memory.IDLE_FACTOR * most
    pool.trim()
    assert pool.info() == {"bytes": 0, "used": 0, "blocks": 0}


def test_same_calls_need_no_new_memory(pool: HostPool) -> None:
    def step() -> None:
        held = [get(pool, (100_000 + 1000 * (k % 7),)) for k in range(60)]
        for k in range(30):
            held.append(get(pool, (90_000 + 500 * (k % 5),)))
            del held[:2]

    for _ in range(2):
        step()
    before = {id(b) for k in pool._buckets.values() for b in [*k.idle, *k.busy]}
    step()
    after = {id(b) for k in pool._buckets.values() for b in [*k.idle, *k.busy]}
    assert after == before


def test_idle_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "IDLE_SECONDS", 0.2)
    pool = HostPool()
    kept = get(pool, (50_000,))
    get(pool), get(pool, (77_777,))
    deadline = time.monotonic() + 20
    while pool.info()["blocks"] > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.info() == {"bytes": 200_000, "used": 200_000, "blocks": 1}
    del kept
    while pool._janitor is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool._janitor is None and not pool._buckets
    assert get(pool).numel() and pool._janitor is not None


def test_threads_never_share_a_block(pool: HostPool) -> None:
    errors = []

    def work(number: int) -> None:
        held: list[Tensor] = []
        for k in range(300):
            t = get(pool, (20_000 + 64 * (k % 3),))
            t.fill_(number * 1000 + k)
            held.append(t)
            if len(held) > 1 + k % 4:
                first = held.pop(0)
                if not bool((first == first[0]).all()) or int(first[0]) // 1000 != number:
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    info = pool.info()
    assert info["used"] == 0 and info["blocks"] <= 8 * 6


@pytest.mark.filterwarnings("ignore:This process")
def test_forked_children_have_memory_of_their_own(pool: HostPool) -> None:
    t = get(pool).fill_(1.0)
    pid = os.fork()
    if pid == 0:  # leaves by os._exit, whatever happens
        code = 1
        try:
            signal.alarm(60)
            torch.set_num_threads(1)  # OpenMP's other threads are not in the child
            get(pool).fill_(3.0)
            t.fill_(2.0)
            pool.trim()
            code = 0 if pool._janitor is None or pool._janitor.is_alive() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(t, torch.ones(SHAPE))


def test_results_are_saved_whole_and_no_larger(pool: HostPool) -> None:
    t, file = get(pool).fill_(1.0), io.BytesIO()
    torch.save(t, file)
    plain = io.BytesIO()
    torch.save(torch.ones(SHAPE), plain)
    assert abs(len(file.getvalue()) - len(plain.getvalue())) < 512
