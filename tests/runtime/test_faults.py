"""Whole programs under faults: a right result or a clear error, nothing hung, nothing left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deuteron
from deuteron.base.errors import BuildError
from deuteron.runtime import build_cpp
from deuteron.runtime.cache import Cache

# A program whose process forks before it computes: a child starts in no time. `check(k)` compiles
# the k-th program and compares.
HEAD = """
import faulthandler, os, signal, sys, time, warnings
import torch, torch._dynamo, deuteron
torch.set_num_threads(1)
faulthandler.register(signal.SIGUSR1)

def check(k, **options):
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 600).reshape(20, 30).requires_grad_()
    f = lambda x: ((x * (1 + k / 128)).sin() + k / 64).softmax(-1).sum(0)
    out = deuteron.compile(f, options=options or None)(x)
    out.square().sum().backward()
    y = x.detach().clone().requires_grad_()
    want = f(y)
    want.square().sum().backward()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(x.grad, y.grad)

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid

def ended(pid, seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGUSR1)  # it prints where it hangs
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"
"""


def run(code: str, cache: Path | str, timeout: float = 280, **env: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DEUTERON_CACHE_DIR": str(cache), **env},
    )  # fmt: skip


def good(done: Any) -> None:
    assert done.returncode == 0, done.stderr[-4000:]


def f(x: Tensor) -> Tensor:
    return (x.sin() * 2).softmax(-1)


def compiled(**options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return deuteron.compile(f, options=options)


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# -- many processes ------------------------------------------------------------------------------


def herd(folder: Path, count: int) -> None:
    done = run(
        f"""
        pids = [child(lambda: [check(k // 4), check(100)]) for k in range({count})]
        codes = [ended(p) for p in pids]
        assert codes == [0] * {count}, codes
        """,
        folder,
    )
    good(done)
    root = folder / "kernels"
    assert [p for p in (root / "tmp").iterdir() if p.suffix != ".lock"] == []
    for p in root.glob("??/*.so"):
        assert Cache(root).get(p.stem, ".so") == p


def test_eight_processes(tmp_path: Path) -> None:
    herd(tmp_path, 8)


@pytest.mark.slow
def test_many_processes(tmp_path: Path) -> None:
    herd(tmp_path, 32)


def kills(folder: Path, rounds: int) -> None:
    done = run(
        f"""
        import itertools, mmap, random
        draw, begun = random.Random(0), mmap.mmap(-1, 4)  # shared with the children

        def endless(first):
            for k in itertools.count(first):
                begun[:] = k.to_bytes(4, "little")
                check(k)

        k = 0
        for _ in range({rounds}):
            pid = child(lambda: endless(k))
            time.sleep(draw.uniform(0, 1.5))
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -9
            k = max(k, int.from_bytes(begun[:], "little"))
            assert ended(child(lambda: check(k))) == 0, k
            k += 1
        """,
        folder,
        timeout=280 + 6 * rounds,  # a child that hangs is found by `ended`, and says where
    )
    good(done)
    for p in (folder / "kernels").glob("??/*.so"):
        assert Cache(folder / "kernels").get(p.stem, ".so") == p


def test_kills(tmp_path: Path) -> None:
    kills(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_kills(tmp_path: Path) -> None:
    kills(tmp_path, 200)


# -- the cache -----------------------------------------------------------------------------------


def test_bad_entries(tmp_path: Path) -> None:
    """Each process damages every entry of the one before in another way."""
    done = run(
        """
        from pathlib import Path
        root = Path(os.environ["DEUTERON_CACHE_DIR"]) / "kernels"
        def flip(p):
            data = bytearray(p.read_bytes())
            data[len(data) // 2] ^= 64
            p.write_bytes(bytes(data))
        damages = [
            lambda p: p.write_bytes(p.read_bytes()[:1000]),
            flip,
            lambda p: p.write_bytes(b""),
            lambda p: p.chmod(0o666),
            lambda p: p.chmod(0o000),
            lambda p: p.with_name(p.name + ".sha256").unlink(),
            lambda p: p.unlink(),
        ]
        if os.geteuid() == 0:
            damages.append(lambda p: os.chown(p, 65534, 65534))
        for damage in damages:
            assert ended(child(lambda: check(1))) == 0
            entries = list(root.glob("??/*.so"))
            assert len(entries) == 2, entries
            for p in entries:
                damage(p)
        assert ended(child(lambda: check(1))) == 0
        """,
        tmp_path,
    )
    good(done)
    assert "cannot be used" not in done.stderr


def test_no_place_for_a_cache(tmp_path: Path) -> None:
    """No home, or a home that is a file: one warning, right results."""
    (tmp_path / "file").write_text("")
    done = run("check(1)\ncheck(2)", tmp_path / "file" / "cache")
    good(done)
    assert done.stderr.count("kernel cache cannot be used") == 1


# -- the compiler --------------------------------------------------------------------------------


def test_no_compiler(tmp_path: Path) -> None:
    """The program runs through ATen and says so once."""
    done = run('check(1, cxx="/no/compiler")\ncheck(2, cxx="/no/compiler")', tmp_path)
    good(done)
    assert done.stderr.count("no C++ compiler was found") == 1


def build_error(raised: BaseException) -> BuildError:
    error = getattr(raised, "inner_exception", raised)
    assert isinstance(error, BuildError)
    return error


def test_failing_compiler(tmp_path: Path) -> None:
    cxx = script(tmp_path / "bad", 'echo "error: no mood"; exit 1\n')
    with pytest.raises(Exception, match="no mood") as caught:
        compiled(cxx=cxx, cache_dir=str(tmp_path / "cache"))(torch.ones(3, 4))
    error = build_error(caught.value)
    assert Path(error.source).exists() and error.command
    g = compiled(cxx=cxx, cache_dir=str(tmp_path / "cache"), fallback="aten")
    torch.testing.assert_close(g(torch.ones(3, 4)), f(torch.ones(3, 4)))


def test_hanging_compiler(tmp_path: Path) -> None:
    cxx = script(tmp_path / "hangs", "sleep 1000\n")
    start = time.monotonic()
    with pytest.raises(Exception, match="build_timeout") as caught:
        compiled(cxx=cxx, cache_dir=str(tmp_path / "cache"), build_timeout=1)(torch.ones(3, 4))
    build_error(caught.value)
    assert time.monotonic() - start < 30


def test_full_disk(tmp_path: Path) -> None:
    """The cache's disk is full for the compiler: it builds elsewhere."""
    real = build_cpp.compiler()[0][0]
    words = build_cpp.NO_SPACE[0]
    test = f'case "$TMPDIR" in {tmp_path}/*) echo "{words}"; exit 1;; esac'
    cxx = script(tmp_path / "full", f'{test}\nexec "{real}" "$@"\n')
    g = compiled(cxx=cxx, cache_dir=str(tmp_path / "cache"))
    torch.testing.assert_close(g(torch.ones(3, 4)), f(torch.ones(3, 4)))


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C during a build ends the program and the compiler."""
    cxx = script(tmp_path / "hangs", f'echo $$ > "{tmp_path}/pid"; exec sleep 1000\n')
    env = {**os.environ, "DEUTERON_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + f"check(1, cxx={cxx!r})"], env=env, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 120
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()  # else one that goes on is waited for
    assert process.returncode != 0
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    left = (tmp_path / "cache" / "kernels" / "tmp").iterdir()
    assert not [p for p in left if p.suffix != ".lock"]


# -- forks and threads ---------------------------------------------------------------------------


def test_fork_after_compile(tmp_path: Path) -> None:
    """Children call what the parent compiled with several threads, and compile for themselves."""
    done = run(
        """
        torch.set_num_threads(2)
        f = lambda x: (x.sin() * 2 + x).relu()
        g = deuteron.compile(f)
        x = torch.randn(1 << 20)
        want = f(x)
        torch.testing.assert_close(g(x), want)
        def work():
            torch.testing.assert_close(g(x), want)
            check(3)
        pids = [child(work) for _ in range(3)]
        codes = [ended(p, 120) for p in pids]
        assert codes == [0, 0, 0], codes
        torch.testing.assert_close(g(x), want)
        """,
        tmp_path,
    )
    good(done)


def test_threads(tmp_path: Path) -> None:
    """Threads call one program at once, each with inputs of its own."""
    g = compiled(cache_dir=str(tmp_path))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for k in range(40):
                x = torch.full((64, 600), 0.01 * number) + torch.arange(600) * 0.001 * k
                torch.testing.assert_close(g(x), f(x))
        except BaseException as e:  # noqa: BLE001 - reported below
            errors.append(e)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(200)
    assert not errors and not any(t.is_alive() for t in threads)
