"""Units build once, whoever asks; compilers that fail, hang or are missing end in a clear error."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deuteron.base.errors import BuildError
from deuteron.base.options import Options
from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS
from deuteron.runtime import build_cpp
from deuteron.runtime import cache as cache_module
from deuteron.runtime.cache import Cache
from dev.coverage.run import Worker

SOURCE = 'extern "C" int answer() { return %d; }\n'
PLAIN = ("-O1", "-fPIC", "-shared")


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(cache_dir=str(tmp_path / "cache"))


def script(path: Path, text: str) -> str:
    """A stand-in for the compiler."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def real() -> str:
    return build_cpp.compiler()[0][0]


def counting(folder: Path) -> str:
    """A compiler that notes each run."""
    log = folder / "runs"
    log.write_text("")
    return script(folder / "counting", f'echo run >> "{log}"\nexec "{real()}" "$@"\n')


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def leftovers(options: Options) -> list[Path]:
    """What builds left in the cache's folder of temporary files, besides locks."""
    folder = options.cache_folder() / "kernels" / "tmp"
    return [p for p in folder.iterdir() if p.suffix != ".lock"] if folder.exists() else []


def test_builds_once(tmp_path: Path, options: Options) -> None:
    options = Options(cache_dir=options.cache_dir, cxx=counting(tmp_path))
    lib = build_cpp.build(SOURCE % 42, PLAIN, options)
    assert lib.answer() == 42
    assert build_cpp.build(SOURCE % 42, PLAIN, options).answer() == 42
    assert runs(tmp_path) == 1 and not leftovers(options)
    assert build_cpp.build(SOURCE % 43, PLAIN, options).answer() == 43
    assert build_cpp.build(SOURCE % 42, ("-O2", *PLAIN), options).answer() == 42
    assert runs(tmp_path) == 3


def test_another_compiler_builds_anew(tmp_path: Path, options: Options) -> None:
    options = Options(cache_dir=options.cache_dir, cxx=counting(tmp_path))
    build_cpp.build(SOURCE % 1, PLAIN, options)
    script(Path(str(options.cxx)), f'echo run >> "{tmp_path}/runs"\nexec "{real()}"  "$@"\n')
    build_cpp.compiler.cache_clear()  # as a new process
    build_cpp.build(SOURCE % 1, PLAIN, options)
    assert runs(tmp_path) == 2


def test_threads_build_once(tmp_path: Path, options: Options) -> None:
    options = Options(cache_dir=options.cache_dir, cxx=counting(tmp_path))
    builds = [build_cpp.submit(SOURCE % (k % 2), PLAIN, options) for k in range(12)]
    assert [b.result().answer() for b in builds] == [0, 1] * 6
    assert runs(tmp_path) == 2
    assert builds[0].result() is builds[0].result()


def test_openmp_is_torchs(options: Options) -> None:
    """Kernels obey torch.set_num_threads, also where new threads call them."""
    source = """
    extern "C" int omp_get_num_threads();
    extern "C" int threads() {
      int n = 0;
      #pragma omp parallel
      { if (!n) n = omp_get_num_threads(); }
      return n;
    }
    """
    lib = build_cpp.build(source, KERNEL_CXX_FLAGS, options)
    before = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert lib.threads() == n
    finally:
        torch.set_num_threads(before)


# -- the compiler --------------------------------------------------------------------------------


def test_which_compiler(tmp_path: Path) -> None:
    spaced = tmp_path / "a folder"
    spaced.mkdir()
    path = script(spaced / "c++", f'exec "{real()}" "$@"\n')
    for cxx, words in ((path, (path,)), (f"'{path}' -v", (path, "-v")), ("env g++", None)):
        command, identity = build_cpp.compiler(cxx)
        assert words is None or command == words
        assert Path(command[0]).is_absolute() and identity
    assert build_cpp.compiler("env g++")[1] != build_cpp.compiler("env c++")[1]


def test_no_compiler(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    for cxx in ("/no/such/compiler", "no-such-compiler -O2", " "):
        with pytest.raises(build_cpp.NoCompiler, match="no C\\+\\+ compiler was found"):
            build_cpp.submit(SOURCE % 1, PLAIN, Options(cache_dir=options.cache_dir, cxx=cxx))
    build_cpp.compiler.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(build_cpp.NoCompiler) as caught:
        build_cpp.build(SOURCE % 1, PLAIN, options)
    assert "install" in caught.value.hint
    build_cpp.compiler.cache_clear()


def test_refused_source(options: Options) -> None:
    """The error shows the kept source, the compiler's words and a command that reproduces them."""
    with pytest.raises(BuildError) as caught:
        build_cpp.submit("int f( {", PLAIN, options).result()
    error = caught.value
    assert Path(error.source).read_text() == "int f( {"
    assert "error:" in error.output
    again = subprocess.run(error.command, shell=True, capture_output=True, text=True)
    assert again.returncode == 1 and "error:" in again.stderr
    assert error.source in str(error) and error.command in str(error)
    assert not leftovers(options)


def test_failing_compiler(tmp_path: Path, options: Options) -> None:
    for text, words in (
        ("exit 3", "exit status 3"),
        ("printf 'oh \\377'; exit 1", "oh"),
        ("kill -9 $$", "exit status -9"),
        ("exit 0", "No such file"),  # and no library
    ):
        cxx = script(tmp_path / "bad", text)
        build_cpp.compiler.cache_clear()
        with pytest.raises(BuildError) as caught:
            build_cpp.build(SOURCE % 5, PLAIN, Options(cache_dir=options.cache_dir, cxx=cxx))
        assert words in caught.value.output
    assert not list((options.cache_folder() / "kernels").rglob("*.so")) and not leftovers(options)
    assert build_cpp.build(SOURCE % 5, PLAIN, options).answer() == 5


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def hanging(folder: Path) -> str:
    """A compiler whose own child hangs; the child's number is in the file `pid`, at once."""
    text = f'sleep 1000 & echo $! > "{folder}/new"; mv "{folder}/new" "{folder}/pid"; wait\n'
    return script(folder / "hangs", text)


def child(folder: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (folder / "pid").exists():
            return int((folder / "pid").read_text())
        time.sleep(0.02)
    raise AssertionError("the compiler did not start")


def waiting(connection: Any) -> None:
    """A worker that waits for a compiler."""
    folder, cxx = connection.recv()
    with contextlib.suppress(KeyboardInterrupt):
        build_cpp.submit(SOURCE % 6, PLAIN, Options(cache_dir=folder, cxx=cxx)).result()


def test_a_lost_workers_compiler_ends_with_it(tmp_path: Path, options: Options) -> None:
    worker = Worker(waiting)
    worker.start()
    worker.connection.send((options.cache_dir, hanging(tmp_path)))
    pid = child(tmp_path)
    worker.stop(kill=True)
    assert gone(pid)


def test_hanging_compiler(tmp_path: Path, options: Options) -> None:
    options = Options(cache_dir=options.cache_dir, cxx=hanging(tmp_path), build_timeout=2)
    start = time.monotonic()
    with pytest.raises(BuildError) as caught:
        build_cpp.build(SOURCE % 6, PLAIN, options)
    assert 2 <= time.monotonic() - start < 20
    assert "build_timeout" in caught.value.output and gone(child(tmp_path))
    assert not leftovers(options)


INTERRUPTED = """
import os, signal, sys, threading
from deuteron.base.options import Options
from deuteron.runtime import build_cpp
options = Options(cache_dir={folder!r} + "/cache", cxx={cxx!r})
build = build_cpp.submit("int f();", ("-shared",), options)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "build.result()",  # and Ctrl-C
        "build_cpp.build('int f();', ('-shared',), options)",
        "while not os.path.exists({pid!r}): pass",  # the program ends while the compiler runs
        "while not os.path.exists({pid!r}): pass\nraise SystemExit(1)",
    ],
)
def test_interrupted(tmp_path: Path, ending: str) -> None:
    """Nothing hangs, nothing is left: no compiler, no half-written file."""
    code = INTERRUPTED.format(folder=str(tmp_path), cxx=hanging(tmp_path))
    code += textwrap.dedent(ending).format(pid=str(tmp_path / "pid"))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        pid = child(tmp_path)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        finally:
            process.kill()  # else one that goes on is waited for
    assert gone(pid)
    assert not leftovers(Options(cache_dir=str(tmp_path / "cache")))


def test_fork_while_building(tmp_path: Path, options: Options) -> None:
    """A child has no thread that builds: it builds for itself. The parent's build goes on."""
    slow = script(tmp_path / "slow", f'sleep 0.5; exec "{real()}" "$@"\n')
    options = Options(cache_dir=options.cache_dir, cxx=slow)
    build = build_cpp.submit(SOURCE % 7, PLAIN, options)
    time.sleep(0.2)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if build.result().answer() == 7 else 2
            code = code or (build_cpp.submit(SOURCE % 8, PLAIN, options).result().answer() != 8)
        finally:
            os._exit(code)
    assert build.result().answer() == 7
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_fork_after_parallel_kernels(options: Options) -> None:
    source = """
    extern "C" int threads() {
      int n = 0;
      #pragma omp parallel reduction(+:n)
      n += 1;
      return n;
    }
    """
    code = f"""
    import os, signal, torch
    from deuteron.base.options import Options
    from deuteron.codegen.cpp.kernels import KERNEL_CXX_FLAGS
    from deuteron.runtime import build_cpp
    torch.set_num_threads(2)
    lib = build_cpp.build({source!r}, KERNEL_CXX_FLAGS, Options(cache_dir={options.cache_dir!r}))
    assert lib.threads() == 2
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if lib.threads() == 1 and torch.ones(1 << 20).sum() == 1 << 20 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert lib.threads() == 2
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# -- bad libraries -------------------------------------------------------------------------------


def test_what_cannot_be_loaded_is_built_anew(tmp_path: Path, options: Options) -> None:
    """A good entry, by its hash, that is no library: as from another system."""
    options = Options(cache_dir=options.cache_dir, cxx=counting(tmp_path))
    pid = os.fork()  # what this process has loaded it would not load again
    if pid == 0:
        code = 1
        try:
            code = build_cpp.build(SOURCE % 9, PLAIN, options).answer() != 9
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    (path,) = (options.cache_folder() / "kernels").rglob("*.so")
    Cache.open(options).put(path.stem, ".so", b"no library")
    assert build_cpp.build(SOURCE % 9, PLAIN, options).answer() == 9
    assert runs(tmp_path) == 2


def test_deleted_between_check_and_use(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_cpp.build(SOURCE % 10, PLAIN, options)
    plain, deleted = Cache.pinned, []

    def pinned(cache: Cache, path: Path) -> str:
        if not deleted:
            deleted.append(path)
            path.unlink()
        return plain(cache, path)

    monkeypatch.setattr(Cache, "pinned", pinned)
    assert build_cpp.build(SOURCE % 10, PLAIN, options).answer() == 10 and deleted


def test_never_loadable(tmp_path: Path, options: Options) -> None:
    cxx = script(tmp_path / "text", 'for out; do :; done; echo "no library" > "$out"\n')
    with pytest.raises(BuildError, match="cannot be loaded") as caught:
        build_cpp.build(SOURCE % 11, PLAIN, Options(cache_dir=options.cache_dir, cxx=cxx))
    assert "noexec" in caught.value.hint


# -- full disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", build_cpp.NO_SPACE)
def test_full_disk(tmp_path: Path, options: Options, words: str) -> None:
    """The compiler finds the first folder full, and builds in the next."""
    test = f'case "$TMPDIR" in */cache/*) echo "fatal: {words}" >&2; exit 1;; esac'
    cxx = script(tmp_path / "full", f'{test}\nexec "{real()}" "$@"\n')
    lib = build_cpp.build(SOURCE % 12, PLAIN, Options(cache_dir=options.cache_dir, cxx=cxx))
    assert lib.answer() == 12
    cxx = script(tmp_path / "fuller", f'echo "fatal: {words}" >&2; exit 1\n')
    with pytest.raises(BuildError) as caught:
        build_cpp.build(SOURCE % 13, PLAIN, Options(cache_dir=options.cache_dir, cxx=cxx))
    assert words in caught.value.output and not leftovers(options)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_really_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    code = f"""
    from deuteron.base.options import Options
    from deuteron.runtime import build_cpp
    options = Options(cache_dir={str(place)!r})
    for _ in range(2):
        assert build_cpp.build({SOURCE % 14!r}, {PLAIN!r}, options).answer() == 14
    """
    try:
        (place / "fill").write_bytes(b"x" * 4096)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("UserWarning") == 1 and "No space left" in done.stderr
        assert not list(place.rglob("*.so"))
    finally:
        subprocess.run(["umount", str(place)], check=True)


# -- many processes ------------------------------------------------------------------------------

WORKER = """
import sys, time
from deuteron.base.options import Options
from deuteron.runtime import build_cpp
options = Options(cache_dir=sys.argv[1], cxx=sys.argv[2])
first, last = int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
source = 'extern "C" int answer() { return %d; }'
builds = [(k, build_cpp.submit(source % k, ("-O1", "-fPIC", "-shared"), options))
          for k in range(first, last)]
for k, b in builds:
    assert b.result().answer() == k
"""


def herd(tmp_path: Path, count: int) -> None:
    """Processes that start together on a cold cache; half of each one's units are everybody's."""
    cxx = counting(tmp_path)
    commands = [
        [sys.executable, "-c", WORKER, str(tmp_path / "cache"), cxx, str(n // 4), str(n // 4 + 4)]
        for n in range(count)
    ]
    processes = [
        subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for c in commands
    ]
    for p in processes:
        assert p.stdout is not None
        assert p.stdout.readline() == "ready\n"
    for p in processes:
        p.communicate("go\n", timeout=300)
    assert [p.returncode for p in processes] == [0] * count
    assert runs(tmp_path) == (count - 1) // 4 + 4  # each unit once
    assert not leftovers(Options(cache_dir=str(tmp_path / "cache")))


def test_eight_processes(tmp_path: Path) -> None:
    herd(tmp_path, 8)


@pytest.mark.slow
def test_many_processes(tmp_path: Path) -> None:
    herd(tmp_path, 32)


# It builds ever more units, and says which before it begins.
ENDLESS = """
import itertools, sys
from deuteron.base.options import Options
from deuteron.runtime import build_cpp
options = Options(cache_dir=sys.argv[1], cxx=sys.argv[2])
source = 'extern "C" int answer() { return %d; }'
for first in itertools.count(int(sys.argv[3]), 3):
    print(first, flush=True)
    builds = [(k, build_cpp.submit(source % k, ("-O1", "-fPIC", "-shared"), options))
              for k in range(first, first + 4)]
    for k, b in builds:
        assert b.result().answer() == k
"""


def killed(tmp_path: Path, rounds: int) -> None:
    """Processes die at random moments of a build; whatever they leave, the next one is right."""
    draw = random.Random(0)
    options = Options(cache_dir=str(tmp_path / "cache"))
    first = 0
    for _ in range(rounds):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path / "cache"), real(), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as p:
            assert p.stdout is not None
            assert p.stdout.readline() == f"{first}\n"
            time.sleep(draw.uniform(0, 0.15))
            p.kill()
            begun = [first, *map(int, p.stdout.read().split())]
        assert p.returncode == -signal.SIGKILL
        for n in range(first, begun[-1] + 4):
            assert build_cpp.build(SOURCE.strip() % n, PLAIN, options).answer() == n
        first = begun[-1] + 3
    root = options.cache_folder() / "kernels"
    for p in root.glob("??/*.so"):
        assert Cache.open(options).get(p.stem, ".so") == p
    for p in leftovers(options):  # a process that starts an hour later deletes them
        os.utime(p, (1, 1))
    cache_module._sweep.cache_clear()
    Cache.open(options).put("00" * 20, ".so", b"")
    assert not leftovers(options)


def test_kills_while_building(tmp_path: Path) -> None:
    killed(tmp_path, 10)


@pytest.mark.slow
def test_many_kills_while_building(tmp_path: Path) -> None:
    killed(tmp_path, 200)


def test_clang_is_told_apart(tmp_path: Path, options: Options) -> None:
    """It has other vector extensions."""
    says = "echo \"clang: error: unknown argument: '-fno-tree-pre'\"; exit 1\n"
    asked = Options(cache_dir=options.cache_dir, cxx=script(tmp_path / "own", says))
    with pytest.raises(BuildError, match="it is clang"):
        build_cpp.build(SOURCE % 3, PLAIN, asked)
