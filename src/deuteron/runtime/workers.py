"""Functions run in processes of their own, beside the compilation.

In: a function that another process can import, and arguments that can be pickled. Out: a `Task`,
whose `result` waits. The processes start when there is work, several where there is much, and end
when there has been none for a while, or when this process ends in whatever way. They are fresh
interpreters, which import the function's module and nothing else: not torch, not the user's
program. A crash, a hang or an interrupt there is an error here, and nothing worse.

Where no process can be started, the function runs here when its result is asked for. Pickles
travel only between this process and its own children.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, BinaryIO, TypeVar

from deuteron.base.errors import BuildError

# Idle processes end after this time: each holds the memory of the modules it imported.
IDLE_SECONDS = 60.0
# Whether this process is one that `Builder` started.
serving = False
_LENGTH = struct.Struct("<Q")
# The child's interpreter finds modules where this one does.
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}\nfrom deuteron.runtime.workers import serve\nserve()\n"
)


Explain = Callable[[BuildError], BuildError]
First = tuple[Callable[..., Any], tuple[Any, ...]]  # what a process does before its first task
T = TypeVar("T")


def awaited(future: Future[T]) -> T:
    """What a future's `result` returns or raises. An interrupt ends the wait: a signal that comes
    just before Python begins to wait is seen when the wait ends, so that each lasts a second (1 in
    1600 programs that were interrupted as they asked for a result went on until there was one)."""
    while not wait((future,), timeout=1.0).done:
        pass
    return future.result()


class Task:
    """A function that was submitted. Each time that its process dies it is tried with the next of
    `others`: arguments, by default the same once more, as the process may have been ended from
    outside. `explain` may add to the error when there are none left."""

    def __init__(
        self,
        builder: Builder,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        explain: Explain | None = None,
        others: Sequence[tuple[Any, ...]] | None = None,
        size: int = 0,
    ) -> None:
        self.builder, self.function, self.args = builder, function, args
        self.explain, self.size = explain, size
        self.others = deque([args] if others is None else others)
        self.future: Future[Any] = Future()
        self.process = os.getpid()

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> Any:
        """What the function returned, or raises what it raised; `BuildError` where its process
        died or took too long."""
        if not self.future.done() and (
            os.getpid() != self.process  # a forked child has no thread that waits for the process
            or self.builder.withdraw(self)
        ):
            self.run()
        return awaited(self.future)

    def run(self) -> None:
        """Runs it here."""
        try:
            value = self.function(*self.args)
        except Exception as e:  # noqa: BLE001 - raised again by `result`
            self.future.set_exception(e)
        else:
            self.future.set_result(value)


class Builder:
    """At most `count` processes. A call may take `seconds`."""

    def __init__(self, count: int, seconds: float = 300.0) -> None:
        self.count, self.seconds = count, seconds
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._waiting: list[Task] = []
        self._changed = threading.Condition()
        self._workers: set[_Worker] = set()
        self._free = 0  # workers that wait for a task, or will when they are prepared
        self._closed = False

    def _after_fork(self) -> None:
        """The processes are the parent's. A copy of their pipes kept open here would keep them
        alive after the parent's end."""
        for worker in self._workers:
            worker.disown()
        self._reset()

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        explain: Explain | None = None,
        others: Sequence[tuple[Any, ...]] | None = None,
        size: int = 0,
    ) -> Task:
        """Of the tasks that wait, the one of the largest `size` is next: it may take longest."""
        task = Task(self, function, args, explain, others, size)
        with self._changed:
            self._waiting.append(task)
            if self._free < len(self._waiting) and len(self._workers) < self.count:
                self._hire()
            self._changed.notify()
        return task

    def prepare(self, count: int, function: Callable[..., Any], *args: Any) -> None:
        """Starts processes until there are `count`. Each calls the function before its first task:
        what it imports is there then. Nobody hears what comes of it."""
        with self._changed:
            for _ in range(min(count, self.count) - len(self._workers)):
                self._hire((function, args))

    def withdraw(self, task: Task) -> bool:
        """Whether the task is the caller's to run: nobody else has it, or will."""
        with self._changed:
            if self._workers or task not in self._waiting:
                return False
            self._waiting.remove(task)
            return True

    def processes(self) -> list[int]:
        """Numbers of the processes that live."""
        return [w.process.pid for w in tuple(self._workers)]

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in tuple(self._workers):
            worker.kill()

    def _hire(self, first: First | None = None) -> bool:
        try:
            worker = _Worker()
        except OSError:  # no memory, no process left: whoever asks for the result runs the task
            return False
        self._workers.add(worker)
        self._free += first is not None
        threading.Thread(
            target=self._serve, args=(worker, first), name="deuteron-worker", daemon=True
        ).start()
        return True

    def _serve(self, worker: _Worker, first: First | None) -> None:
        """A worker's life, in a thread: hands it tasks one after the other."""
        left: list[Task] = []
        try:
            if first is not None:
                self._prepare(worker, *first)
            while worker.alive and (task := self._next()) is not None:
                self._do(worker, task)
        finally:
            worker.kill()
            with self._changed:
                self._workers.discard(worker)
                if self._waiting and not self._workers and not self._closed and not self._hire():
                    left, self._waiting = self._waiting, []
        for task in left:
            task.run()

    def _prepare(self, worker: _Worker, function: Callable[..., Any], args: Any) -> None:
        try:
            worker.call(function, args, self.seconds)
        except (OSError, EOFError, pickle.UnpicklingError):
            worker.kill()
        finally:
            with self._changed:
                self._free -= 1

    def _next(self) -> Task | None:
        """The next task; None where there was none for a while."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._free += 1
                self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_SECONDS)
                self._free -= 1
            if not self._waiting or self._closed:
                return None
            largest = max(self._waiting, key=lambda task: task.size)  # the first of the largest
            self._waiting.remove(largest)
            return largest

    def _do(self, worker: _Worker, task: Task) -> None:
        try:
            good, value, heard = worker.call(task.function, task.args, self.seconds)
            for text in heard:
                warnings.warn(text, stacklevel=1)
        except (OSError, EOFError, pickle.UnpicklingError) as e:
            code = worker.kill(patience=0.0 if isinstance(e, TimeoutError) else 1.0)
            good, value = False, _lost(task, e, code)
            if task.others and not isinstance(e, TimeoutError):
                task.args = task.others.popleft()
                with self._changed:
                    self._waiting.append(task)
                    self._changed.notify()
                return
        except BaseException as e:  # noqa: BLE001 - arguments that cannot be pickled, for one
            good, value = False, e
        if good:
            task.future.set_result(value)
        else:
            task.future.set_exception(value)


def _lost(task: Task, error: Exception, code: int | None) -> BuildError:
    lost = _lost_error(task, error, code)
    return task.explain(lost) if task.explain is not None else lost


def _lost_error(task: Task, error: Exception, code: int | None) -> BuildError:
    name = f"{task.function.__module__}.{task.function.__qualname__}"
    if isinstance(error, TimeoutError):
        return BuildError(
            f"a build did not end in time ({name}): {error}",
            hint="the option build_timeout says how many seconds a build may take",
        )
    if code is not None and code < 0:
        ended = f"it was ended by signal {-code} ({signal.strsignal(-code)})"
    else:
        ended = f"its exit status was {code}"
    return BuildError(
        f"the process that built kernels died ({name}): {ended}",
        hint="signal 9 may be the system's, out of memory: lower the option workers",
        output=str(error),
    )


class _Worker:
    """A process, from this side. One thread talks to it."""

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("this interpreter is part of another program")
        path = [p for p in sys.path if isinstance(p, str)]
        # A session of its own: Ctrl-C in the terminal is for this process, which ends it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.alive = True
        self.mine = True

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
    ) -> tuple[bool, Any, list[str]]:
        """(True, result) or (False, exception), and the warnings on the way."""
        message = pickle.dumps((function, args))
        assert self.process.stdin is not None and self.process.stdout is not None
        _write(self.process.stdin, message)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(seconds):
                raise TimeoutError(f"it was stopped after {seconds:g} s")
        answer: tuple[bool, Any, list[str]] = pickle.loads(_read(self.process.stdout))
        return answer

    def kill(self, patience: float = 0.0) -> int | None:
        """Ends the process with all that it started; returns its exit status, its own where it ends
        by itself within `patience` seconds."""
        if not self.mine:
            return None
        self.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(OSError):
            if self.process.poll() is None:
                self._close()
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._close()
        return code

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def disown(self) -> None:
        """In a forked child: it is the parent's."""
        self.mine = self.alive = False
        self._close()
        self.process.returncode = 0  # nobody here may wait for it


# ----------------------------------------------------------------------------- in the other process


def serve() -> None:
    """Runs what comes, until the pipe ends."""
    global serving
    serving = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    # What the functions print must not mix with the answers.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, messages), daemon=True).start()
    while True:
        _write(sink, _answer(messages.get()))


def _listen(source: BinaryIO, messages: queue.SimpleQueue[bytes]) -> None:
    """Passes on what comes. When the pipe ends, nobody waits for a result any more: the process
    ends too, in the middle of a task, with all that it started."""
    try:
        while True:
            messages.put(_read(source))
    finally:
        os.killpg(0, signal.SIGKILL)


def _answer(message: bytes) -> bytes:
    with warnings.catch_warnings(record=True) as caught:
        try:
            function, args = pickle.loads(message)
            good, value = True, function(*args)
        except BaseException as e:  # noqa: BLE001 - the other process raises it
            good, value = False, e
    heard = [str(w.message) for w in caught]
    try:
        answer = pickle.dumps((good, value, heard))
        if not good:
            pickle.loads(answer)
        return answer
    except Exception as e:  # noqa: BLE001 - a result or an exception that does not travel
        if good:
            return pickle.dumps((False, e, heard))
        return pickle.dumps((False, BuildError(f"{type(value).__name__}: {value}"), heard))


def _write(pipe: Any, message: bytes) -> None:
    data = memoryview(_LENGTH.pack(len(message)) + message)
    while data:
        data = data[pipe.write(data) :]


def _read(pipe: BinaryIO | Any) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, size)


def _exactly(pipe: Any, size: int) -> bytes:
    parts = []
    while size:
        part = pipe.read(min(size, 1 << 20))
        if not part:
            raise EOFError("the pipe ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


__all__ = ["Builder", "Task", "serve"]
