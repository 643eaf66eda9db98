"""Processes that build: they start when needed, end when not, and take nothing down with them."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deuteron.base.errors import BuildError
from deuteron.runtime import workers
from deuteron.runtime.workers import Builder


@pytest.fixture
def builder() -> Iterator[Builder]:
    b = Builder(2, seconds=30)
    yield b
    b.close()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that the processes can import."""
    text = """
    import os, signal, sys, threading, time

    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__("odd")

    def modules(): return sorted(m for m in sys.modules if "." not in m)
    def odd(): raise Odd(1, 2)
    def lock(): return threading.Lock()
    def noisy(x): print("noise"); os.write(1, b"more"); return x
    def crash(): os.kill(os.getpid(), signal.SIGSEGV)
    def crash_once(path):
        if not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second"
    def meet(mine, other):
        open(mine, "w").close()
        end = time.monotonic() + 20
        while not os.path.exists(other) and time.monotonic() < end:
            time.sleep(0.01)
        return os.path.exists(other)
    def child(path):
        import subprocess
        p = subprocess.Popen(["sleep", "1000"])
        open(path, "w").write(str(p.pid))
        p.wait()
    """
    (tmp_path / "deuteron_test_helpers.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    import deuteron_test_helpers  # type: ignore[import-not-found]

    yield deuteron_test_helpers
    del sys.modules["deuteron_test_helpers"]


def test_results_and_errors(builder: Builder, helpers: Any) -> None:
    tasks = [builder.submit(operator.add, k, 1) for k in range(20)]
    assert [t.result() for t in tasks] == list(range(1, 21)) and tasks[0].done()
    assert builder.submit(os.getpid).result() in builder.processes()
    big = os.urandom(5_000_000)
    assert builder.submit(operator.add, big, b"!").result() == big + b"!"
    with pytest.raises(ZeroDivisionError):
        builder.submit(operator.truediv, 1, 0).result()
    with pytest.raises(BuildError, match="Odd: odd"):  # it does not unpickle
        builder.submit(helpers.odd).result()
    with pytest.raises(TypeError, match="pickle"):
        builder.submit(helpers.lock).result()
    with pytest.raises((TypeError, AttributeError)):
        builder.submit(len, threading.Lock()).result()
    assert builder.submit(helpers.noisy, 3).result() == 3
    assert 1 <= len(builder.processes()) <= 2


def test_lazy_and_light(builder: Builder, helpers: Any) -> None:
    assert not builder.processes()
    loaded = builder.submit(helpers.modules).result()
    assert "torch" not in loaded and "triton" not in loaded and "__main__" in loaded
    assert len(builder.processes()) == 1  # one task, one process


def test_side_by_side(builder: Builder, helpers: Any, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    tasks = [builder.submit(helpers.meet, a, b), builder.submit(helpers.meet, b, a)]
    assert [t.result() for t in tasks] == [True, True]


def test_prepared(builder: Builder, helpers: Any, tmp_path: Path) -> None:
    """A process that gets ready has the task that comes meanwhile, and none is started for it."""
    builder.prepare(1, time.sleep, 0.2)
    assert builder.submit(os.getpid).result() in builder.processes()
    assert len(builder.processes()) == 1
    builder.prepare(5, Path.touch, tmp_path / "ready")
    assert len(builder.processes()) == 2  # as many as it may have
    builder.prepare(5, os._exit, 1)
    assert len(builder.processes()) == 2
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    tasks = [builder.submit(helpers.meet, a, b), builder.submit(helpers.meet, b, a)]
    assert [t.result() for t in tasks] == [True, True] and (tmp_path / "ready").exists()


def test_what_gets_a_process_ready_fails(helpers: Any) -> None:
    """One that dies is replaced; one that says what is wrong goes on."""
    for what, dies in (((helpers.crash,), True), ((operator.truediv, 1, 0), False)):
        b = Builder(1)
        b.prepare(1, *what)
        first = b.processes()
        assert b.submit(operator.add, 1, 2).result() == 3
        assert (b.processes() != first) is dies
        b.close()


def test_large_tasks_first(tmp_path: Path) -> None:
    b = Builder(1)
    log = tmp_path / "order"
    b.prepare(1, time.sleep, 0.5)
    tasks = [b.submit(os.system, f"echo {n} >> '{log}'", size=n) for n in (2, 1, 3, 3, 5, 4)]
    assert [t.result() for t in tasks] == [0] * 6
    assert log.read_text().split() == ["5", "4", "3", "3", "2", "1"]
    b.close()


def test_one_after_the_other() -> None:
    b = Builder(1)
    tasks = [b.submit(os.getpid) for _ in range(3)]
    assert [t.result() for t in tasks] == b.processes() * 3 and os.getpid() not in b.processes()
    with pytest.raises(ZeroDivisionError):
        b.submit(operator.truediv, 1, 0).result()
    b.close()


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    b = Builder(2)
    monkeypatch.setattr(subprocess, "Popen", fails)
    assert b.submit(os.getpid).result() == os.getpid()


def test_crashes(builder: Builder, helpers: Any, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="signal 11"):
        builder.submit(helpers.crash).result()
    assert builder.submit(operator.add, 1, 2).result() == 3
    tasks = [builder.submit(helpers.crash) for _ in range(2)]
    tasks += [builder.submit(operator.add, k, 1) for k in range(4)]
    assert [t.result() for t in tasks[2:]] == [1, 2, 3, 4]
    for t in tasks[:2]:
        with pytest.raises(BuildError, match="died"):
            t.result()
    assert builder.submit(helpers.crash_once, str(tmp_path / "mark")).result() == "second"


def test_killed_from_outside(builder: Builder) -> None:
    task = builder.submit(time.sleep, 1.0)
    time.sleep(0.3)
    (pid,) = builder.processes()
    os.kill(pid, signal.SIGKILL)
    assert task.result() is None  # by another process
    assert gone([pid])


def test_hanging(helpers: Any, tmp_path: Path) -> None:
    b = Builder(2, seconds=3)
    start = time.monotonic()
    with pytest.raises(BuildError, match="in time") as caught:
        b.submit(helpers.child, str(tmp_path / "pid")).result()
    assert 3 <= time.monotonic() - start < 20 and "build_timeout" in caught.value.hint
    assert gone([int((tmp_path / "pid").read_text())])  # what it had started ended too
    assert b.submit(operator.add, 1, 2).result() == 3
    b.close()


def test_idle_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_SECONDS", 0.2)
    b = Builder(2)
    assert b.submit(operator.add, 1, 2).result() == 3
    pids = b.processes()
    assert len(pids) == 1 and gone(pids)
    assert b.submit(operator.add, 1, 3).result() == 4
    b.close()


def test_close(builder: Builder) -> None:
    tasks = [builder.submit(time.sleep, 100) for _ in range(2)]
    time.sleep(0.3)
    pids = builder.processes()
    start = time.monotonic()
    builder.close()
    assert gone(pids) and time.monotonic() - start < 5
    assert len(pids) == 2 and tasks


PROGRAM = """
import os, sys, time
from deuteron.runtime.workers import Builder
b = Builder(2)
tasks = [b.submit(time.sleep, {seconds}) for _ in range(2)]
while len(b.processes()) < 2: time.sleep(0.01)
print(*b.processes(), flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "os._exit(0)", "tasks[0].result()"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_program(ending: str, how: signal.Signals) -> None:
    """However it ends, in the middle of their tasks."""
    code = PROGRAM.format(ending=ending, seconds=1000)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as p:
        assert p.stdout is not None
        pids = [int(x) for x in p.stdout.readline().split()]
        assert len(pids) == 2
        p.send_signal(how)
        try:
            p.wait(10)
        finally:
            p.kill()  # else one that goes on is waited for
    assert gone(pids)


def test_fork(builder: Builder) -> None:
    """A child uses its own processes, and does not keep the parent's alive."""
    task = builder.submit(time.sleep, 1.0)
    time.sleep(0.2)
    before = builder.processes()
    read, write = os.pipe()
    waits, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(30)
            ok = builder.submit(operator.add, 1, 2).result() == 3
            ok = ok and task.result() is None and not set(before) & set(builder.processes())
            os.write(write, b"x")
            os.read(waits, 1)
            builder.close()
            code = 0 if ok else 2
        finally:
            os._exit(code)
    assert os.read(read, 1) == b"x"
    assert task.result() is None and builder.processes() == before
    builder.close()
    assert gone(before)  # though the child lives
    os.write(ends, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
