"""Entries are what was put there, or are not used; a folder that cannot be used stops nobody."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deuteron.base import package
from deuteron.base.options import Options
from deuteron.runtime import cache as module
from deuteron.runtime.cache import Cache, fingerprint, key_of

KEY = key_of("a", "b")
DATA = b"some machine code" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> Cache:
    return Cache.open(Options(cache_dir=str(folder)))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not warned yet and has no private folder."""
    monkeypatch.setattr(module, "_WARNED", set())
    monkeypatch.setattr(module, "_PRIVATE_FOLDERS", {})
    module._private_folder.cache_clear()
    module._sweep.cache_clear()


def run(code: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that has `Cache`, `Options`, `KEY` and `DATA`."""
    head = """
        import os, sys, time
        from deuteron.base.options import Options
        from deuteron.runtime.cache import Cache, key_of
        KEY, DATA = key_of("a", "b"), b"some machine code" * 100
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + before + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def test_keys_cover_every_part() -> None:
    keys = {key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", ""), key_of(b"ab")}
    assert len(keys) == 5
    assert key_of("é") == key_of("é".encode())


def test_what_is_put_is_got(cache: Cache, folder: Path) -> None:
    assert cache.get(KEY, ".so") is None
    path = cache.put(KEY, ".so", DATA)
    assert path.read_bytes() == DATA and cache.get(KEY, ".so") == path
    assert Cache.open(Options(cache_dir=str(folder))).get(KEY, ".so") == path
    assert cache.get(KEY, ".cubin") is None
    cache.put(KEY, ".so", b"other")
    assert path.read_bytes() == b"other" and cache.get(KEY, ".so") == path
    cache.put(KEY, ".empty", b"")
    assert cache.get(KEY, ".empty") is not None
    cache.drop(KEY, ".so")
    assert cache.get(KEY, ".so") is None


def test_everything_belongs_to_its_owner_alone(cache: Cache, folder: Path) -> None:
    before = os.umask(0)  # the most careless one
    try:
        cache.put(KEY, ".so", DATA)
        with cache.lock(KEY):
            pass
    finally:
        os.umask(before)
    paths = [folder, *folder.rglob("*")]
    assert len(paths) >= 6
    for p in paths:
        assert p.stat().st_mode & 0o777 == (0o700 if p.is_dir() else 0o600), p


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES: list[Callable[[Path], Any]] = [
    truncate, flip, link, folder_instead, pipe_instead,
    lambda p: p.write_bytes(b""), lambda p: p.chmod(0o666), lambda p: p.chmod(0o620),
    lambda p: p.with_name(p.name + ".sha256").unlink(),
    lambda p: flip(p.with_name(p.name + ".sha256")),
    lambda p: p.with_name(p.name + ".sha256").chmod(0o602),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_entries_are_not_used(cache: Cache, damage: Callable[[Path], Any]) -> None:
    path = cache.put(KEY, ".so", DATA)
    damage(path)
    assert cache.get(KEY, ".so") is None
    if not path.is_dir():
        assert cache.put(KEY, ".so", DATA) == path
    else:
        with pytest.warns(UserWarning, match="kernel cache cannot be used"):
            cache.put(KEY, ".so", DATA)
    file = cache.get(KEY, ".so")
    assert file is not None and file.read_bytes() == DATA


def test_entries_cannot_be_passed_off_as_others(cache: Cache) -> None:
    """Both files of a good entry under another name: the hash covers the name."""
    path, other = cache.put(KEY, ".so", DATA), cache.path(KEY[::-1], ".so")
    other.parent.mkdir(mode=0o700)
    for ending in ("", ".sha256"):
        os.link(f"{path}{ending}", f"{other}{ending}")
    assert cache.get(KEY[::-1], ".so") is None and cache.get(KEY, ".so") == path


def test_folders_that_others_can_write(cache: Cache, folder: Path) -> None:
    path = cache.put(KEY, ".so", DATA)
    path.parent.chmod(0o777)
    assert cache.get(KEY, ".so") is None  # somebody may have put it there
    assert path.parent.stat().st_mode & 0o777 == 0o700
    cache.root.chmod(0o777)
    again = Cache.open(Options(cache_dir=str(folder)))
    assert again == cache and cache.root.stat().st_mode & 0o777 == 0o700


def test_files_of_other_users(cache: Cache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(KEY, ".so", DATA)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert cache.get(KEY, ".so") is None
    with pytest.warns(UserWarning, match="is another user's"):
        other = Cache.open(Options(cache_dir=str(folder)))
    assert other.root != cache.root


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_entries_given_to_another_user(cache: Cache) -> None:
    path = cache.put(KEY, ".so", DATA)
    os.chown(path, 65534, 65534)
    assert cache.get(KEY, ".so") is None
    cache.put(KEY, ".so", DATA)
    os.chown(path.parent, 65534, 65534)
    assert cache.get(KEY, ".so") is None


UNPRIVILEGED = """
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that an unprivileged user reaches."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_folders_that_cannot_be_used(public: Path, mode: int) -> None:
    """Unreadable, or read-only: one warning, and everything works."""
    folder = public / "home" / "kernels"
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    folder.chmod(mode)
    done = run("""
    import warnings; warnings.simplefilter("always")
    for _ in range(3):
        c = Cache.open(Options.make())
        with c.lock(KEY):
            assert c.get(KEY, ".so") is None
            path = c.put(KEY, ".so", DATA)
        assert c.get(KEY, ".so") == path and path.read_bytes() == DATA
        c.drop(KEY, ".so")
    for place in c.workplaces():
        (place / "file").write_text("")
        break
    print(path.parent.parent)
    """, UNPRIVILEGED, DEUTERON_CACHE_DIR=str(public / "home"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == 1 and "DEUTERON_CACHE_DIR" in done.stderr
    assert not Path(done.stdout.strip()).exists()  # gone when the process ended
    folder.chmod(0o700)
    assert not list(folder.iterdir())


def test_read_only_caches_are_read(public: Path) -> None:
    """What an image was built with is used, though nothing can be added."""
    home = str(public / "home")
    (public / "home").mkdir()
    if os.geteuid() == 0:
        os.chown(public / "home", 65534, 65534)
    code = UNPRIVILEGED + "c = Cache.open(Options.make())\n"
    put = "c.put(KEY, '.so', DATA)\n"
    assert run(put, code, DEUTERON_CACHE_DIR=home).returncode == 0
    for p in [*(public / "home").rglob("*"), public / "home"]:
        p.chmod(0o500 if p.is_dir() else 0o400)
    get = "assert c.get(KEY, '.so').read_bytes() == DATA\n"
    done = run(get, code, DEUTERON_CACHE_DIR=home)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for p in [public / "home", *(public / "home").rglob("*")]:
        p.chmod(0o700)


def test_no_home() -> None:
    """Neither HOME nor an entry of the user: a private folder."""
    done = run(
        """
        import pathlib, warnings
        for name in ("HOME", "XDG_CACHE_HOME", "DEUTERON_CACHE_DIR"):
            os.environ.pop(name, None)
        import pwd
        def none(*a): raise KeyError("no such user")
        pwd.getpwuid = none
        c = Cache.open(Options.make())
        assert c.put(KEY, ".so", DATA) == c.get(KEY, ".so")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == 1


def test_home_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="kernel cache cannot be used"):
        c = Cache.open(Options(cache_dir=str(tmp_path / "file" / "cache")))
    assert c.get(KEY, ".so") is None and c.get(KEY, ".so") == None  # noqa: E711
    assert c.put(KEY, ".so", DATA) == c.get(KEY, ".so")


def full_disk(monkeypatch: pytest.MonkeyPatch, roots: list[Path]) -> None:
    """Files under these folders cannot be made."""
    plain = os.open

    def fails(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and any(r in Path(path).parents for r in roots):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fails)


def test_full_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, [cache.root])
    with pytest.warns(UserWarning, match="No space left") as warned:
        path = cache.put(KEY, ".so", DATA)
        cache.put(KEY, ".json", b"{}")
    assert len(warned) == 1
    assert cache.root not in path.parents and cache.get(KEY, ".so") == path
    with cache.lock(KEY):
        pass
    assert not [p for p in cache.root.rglob("*") if p.is_file()]


def test_all_disks_full(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, [Path("/")])
    with (
        pytest.raises(module.CacheError, match="No space left") as caught,
        pytest.warns(UserWarning),
    ):
        cache.put(KEY, ".so", DATA)
    assert "DEUTERON_CACHE_DIR" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_really_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        c = Cache.open(Options(cache_dir=str(tmp_path / "cache")))
        big = os.urandom(200_000)
        with pytest.warns(UserWarning, match="No space left"):
            path = c.put(KEY, ".so", big)
        assert path.read_bytes() == big and c.get(KEY, ".so") == path
        assert not list(c.root.rglob("*.so")) and not list((c.root / "tmp").iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_without_cache(tmp_path: Path) -> None:
    done = run(
        """
        c = Cache.open(Options.make(options={"cache": False}))
        c.put(KEY, ".so", DATA)
        assert c == Cache.open(Options.make(options={"cache": False}))
        pid = os.fork()
        other = Cache.open(Options.make(options={"cache": False}))
        assert (other == c) == (pid != 0)
        other.put(KEY, ".json", DATA)
        os.write(1, f"{other.root}\\n".encode())  # one write: the two processes share the pipe
        if pid == 0:
            sys.exit(0)  # must not delete the parent's folder
        assert os.waitpid(pid, 0)[1] == 0
        assert c.get(KEY, ".so") is not None
        """,
        DEUTERON_CACHE_DIR=str(tmp_path / "unused"),
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    roots = done.stdout.split()
    assert len(roots) == 2 and not any(Path(r).exists() for r in roots)
    assert not (tmp_path / "unused").exists()


def test_leftovers_of_dead_processes(cache: Cache, folder: Path) -> None:
    old, new = cache.root / "tmp" / "old", cache.root / "tmp" / "new"
    (old / "inner").mkdir(parents=True)
    new.write_text("")
    mine = Path(module._private_folder(os.getpid(), None) or "")
    dead = mine.with_name(f"deuteron-{os.getuid()}-dead")
    dead.mkdir()
    (dead / "file").write_text("")
    for p in (old, dead):
        os.utime(p, (1, 1))
    module._sweep.cache_clear()
    module._private_folder.cache_clear()
    Cache.open(Options(cache_dir=str(folder))).put(KEY, ".so", DATA)
    Cache.open(Options(cache=False))
    assert new.exists() and not old.exists() and not dead.exists()


def test_old_private_folders_of_living_processes_stay() -> None:
    code = """
    print(Cache.open(Options.make(options={"cache": False})).root, flush=True)
    time.sleep(float(sys.stdin.readline()))
    """
    head = "import os, sys, time\nfrom deuteron.base.options import Options\n"
    head += "from deuteron.runtime.cache import Cache\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as living:  # fmt: skip
        assert living.stdout is not None and living.stdin is not None
        theirs = Path(living.stdout.readline().strip())
        os.utime(theirs, (1, 1))
        module._remove_dead(theirs)
        assert theirs.exists()
        living.stdin.write("0\n")
        living.stdin.flush()
        assert living.wait(20) == 0
    assert not theirs.exists()


# -- many at once --------------------------------------------------------------------------------


def test_locks_exclude(cache: Cache) -> None:
    inside, most, total = 0, 0, 0

    def work() -> None:
        nonlocal inside, most, total
        for _ in range(5):
            with cache.lock(KEY):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
                total += 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == 1 and total == 30


def test_a_dead_holder_blocks_nobody(cache: Cache, folder: Path) -> None:
    code = f"""
    with Cache.open(Options(cache_dir={str(folder)!r})).lock({KEY!r}):
        print("held", flush=True)
        time.sleep(100)
    """
    head = "import time\nfrom deuteron.base.options import Options\n"
    head += "from deuteron.runtime.cache import Cache\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        start = time.monotonic()
        with cache.lock(KEY, seconds=0.2):  # not had, and done without
            assert time.monotonic() - start > 0.15
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        start = time.monotonic()
        with cache.lock(KEY, seconds=20):
            assert time.monotonic() - start < 5


def test_no_locks_on_this_file_system(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with cache.lock(KEY):
        assert cache.put(KEY, ".so", DATA) == cache.get(KEY, ".so")


def test_writers_and_readers_at_once(cache: Cache) -> None:
    """Nobody ever reads a mixture, whoever writes what."""
    contents = [bytes([k]) * 10_000 for k in range(4)]
    stop, wrong = threading.Event(), []

    def write(k: int) -> None:
        while not stop.is_set():
            cache.put(KEY, ".so", contents[k])

    def read() -> None:
        while not stop.is_set():
            path = cache.get(KEY, ".so")
            if path is None:
                continue
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # another reader found it bad and deleted it
                continue
            if data not in contents:
                wrong.append(len(data))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for t in threads:
        t.start()
    time.sleep(1.0)
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
    cache.put(KEY, ".so", DATA)
    assert cache.get(KEY, ".so") is not None
    assert not list((cache.root / "tmp").iterdir())


# -- loading and clearing ------------------------------------------------------------------------


def test_pinned_names_survive_a_swapped_folder(cache: Cache, tmp_path: Path) -> None:
    path = cache.put(KEY, ".so", DATA)
    name = cache.pinned(path)
    assert Path(name).read_bytes() == DATA and cache.pinned(path) == name
    moved = cache.root.with_name("moved")
    cache.root.rename(moved)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"evil")
    assert Path(name).read_bytes() == DATA
    fd = module._PINS[cache.root][0]
    os.close(fd)  # a daemon does
    assert Path(cache.pinned(path)).read_bytes() == b"evil"  # ours again: the folder is checked
    os.close(module._PINS.pop(cache.root)[0])
    cache.root.chmod(0o777)
    with pytest.raises(module.CacheError, match="replaced"):
        cache.pinned(path)


def test_clearing(cache: Cache, folder: Path) -> None:
    kept = [folder / "devices.json", folder / "kernels" / "notes" / "mine.txt"]
    for p in kept:
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_text("x")
    for k in range(5):
        cache.put(key_of(str(k)), ".so", DATA)
    whole = Cache(folder)
    info = whole.info()
    assert info["files"] == 10 and info["bytes"] == 5 * (len(DATA) + 64)
    assert whole.clear() == info and whole.info() == {"files": 0, "bytes": 0}
    assert all(p.exists() for p in kept)
    assert cache.get(key_of("0"), ".so") is None
    assert cache.put(KEY, ".so", DATA) == cache.get(KEY, ".so")


def test_no_warning_without_reason(cache: Cache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(KEY, ".so", DATA)
        cache.get(KEY, ".so")
        with cache.lock(KEY):
            pass


@pytest.mark.parametrize("name", ["backend.py", "codegen/cpp/support.h"])
def test_another_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while its size, its time and the version stay makes another compiler:
    what this one compiled is not loaded by that one."""
    monkeypatch.setattr(package, "FOLDER", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fingerprints = []
    for text in ("a < b", "a > b", "a < b"):
        path.write_text(text)
        os.utime(path, (1, 1))
        fingerprints.append(fingerprint.__wrapped__())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
