"""The cache of built kernels on disk.

In: a key (a hash of everything that decides the content) and bytes. Out: a path. Entries are
content-addressed, appear by an atomic rename, belong to their owner alone (0600 in folders of
0700), and are checked when read: a file that others can write, that is another user's, or whose
bytes are not those that were put there under this name is deleted and built again, never trusted.
Nothing is unpickled.

    kernels/ab/abcd….so, abcd….so.sha256    an entry, and the hash of its name and bytes
    kernels/tmp/                            files that become entries, builds, locks

A folder that cannot be used (no home, not ours, read-only, full) is no failure: there is one
warning, and kernels go to a folder of this process alone, which is removed when it ends. What a
killed process leaves behind is never an entry, and is deleted by a later process.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from deuteron.base import package
from deuteron.base.errors import CacheError
from deuteron.base.options import Options

# A lock held longer than this belongs to a build that hangs; building twice does no harm.
LOCK_SECONDS = 600.0
# Age from which files that only a living process needs are taken for a dead one's.
STALE_SECONDS = 3600.0
OTHERS_WRITE = 0o022
MEMORY_FOLDER = "/dev/shm"  # where the folder of temporary files is full


def key_of(*parts: str | bytes) -> str:
    """The key of an entry: SHA-256 of everything that decides what is in it."""
    h = hashlib.sha256()
    for p in parts:
        data = p.encode() if isinstance(p, str) else p
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()[:40]


@cache
def fingerprint() -> str:
    """Which compiler this is: every file of the package by its content, the texts that kernels
    include (`*.h`) too. Its version and the files' times say less: a source tree changes between
    two versions, and some installers give every file one time. 10 ms for 2.6 MB, once."""
    root = package.FOLDER
    kinds = ("*.py", "*.h")
    files = sorted((str(p.relative_to(root)), p) for kind in kinds for p in root.rglob(kind))
    return key_of(*(part for name, path in files for part in (name, path.read_bytes())))


@dataclass(frozen=True)
class Cache:
    """A folder of entries. Processes and threads may share it."""

    root: Path

    @staticmethod
    def open(options: Options) -> Cache:
        """The cache of these options; a private folder where it cannot be used."""
        if not options.cache:
            return Cache(_private())
        try:
            root = options.cache_folder() / "kernels"
            if not root.is_dir():
                root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                root.mkdir(mode=0o700, exist_ok=True)
            info = root.stat()
            if info.st_uid != os.getuid():
                return Cache(_private_because(f"{root} is another user's"))
            if info.st_mode & OTHERS_WRITE:
                root.chmod(0o700)
            if not os.access(root, os.R_OK | os.X_OK):
                return Cache(_private_because(f"{root} is not readable"))
        except (OSError, RuntimeError) as e:  # RuntimeError: the user has no home folder
            return Cache(_private_because(str(e)))
        return Cache(root)

    def path(self, key: str, suffix: str) -> Path:
        return self.root / key[:2] / f"{key}{suffix}"

    def get(self, key: str, suffix: str) -> Path | None:
        """The entry's file, or None where there is no good one."""
        for root in (self.root, *_PRIVATE_FOLDERS.get(os.getpid(), ())):
            path = Cache(root).path(key, suffix)
            if _good(path):
                return path
        return None

    def drop(self, key: str, suffix: str) -> None:
        """Deletes an entry that proved bad."""
        for root in (self.root, *_PRIVATE_FOLDERS.get(os.getpid(), ())):
            _delete(Cache(root).path(key, suffix))

    def put(self, key: str, suffix: str, data: bytes) -> Path:
        """Stores an entry; returns its file (in a private folder where the cache cannot be
        written)."""
        try:
            return self._put(key, suffix, data)
        except OSError as e:
            reason = str(e)
        _warn(reason)
        for root in _private_folders():
            try:
                return Cache(root)._put(key, suffix, data)
            except OSError as e:
                reason = str(e)
        raise CacheError(f"built kernels can be written nowhere: {reason}", hint=_HINT)

    def _put(self, key: str, suffix: str, data: bytes) -> Path:
        _sweep(self.root, os.getpid())
        path = self.path(key, suffix)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whoever reads between the two sees no entry, or one whose hash is wrong: it is built anew.
        self._write(_digest_path(path), _digest(path, data))
        self._write(path, data)
        return path

    def _write(self, path: Path, data: bytes) -> None:
        new = self._temporary() / secrets.token_hex(12)
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
                f.write(data)
            os.replace(new, path)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise

    def _temporary(self) -> Path:
        folder = self.root / "tmp"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def workplaces(self) -> Generator[Path, None, None]:
        """Folders to build in, one after the other (the next one where a disk is full); each is
        removed when the next is asked for."""
        for where in (self._temporary, lambda: None, lambda: MEMORY_FOLDER):
            try:
                folder = tempfile.mkdtemp(prefix="deuteron-build-", dir=where())
            except OSError:
                continue
            try:
                yield Path(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def lock(self, key: str, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Held while an entry is built, so that processes build it once. The system frees the lock
        of a holder that died; a lock that cannot be had is done without."""
        held: FileLock | None = None
        try:
            held = FileLock(self._temporary() / f"{key}.lock", timeout=seconds, mode=0o600)
            held.acquire(poll_interval=0.02)
        except (OSError, Timeout, NotImplementedError):
            held = None  # no locks here, or a build that hangs: building twice is right, only slow
        try:
            yield
        finally:
            if held is not None:
                held.release()

    # -- for people -------------------------------------------------------------------------------

    def info(self) -> dict[str, int]:
        """How many files of the cache there are in the folder, and their bytes."""
        sizes = [p.stat().st_size for p in self._files()]
        return {"files": len(sizes), "bytes": sum(sizes)}

    def clear(self) -> dict[str, int]:
        """Deletes the cache's own files (their names are content hashes) and nothing else there;
        returns `info` of them. Programs that run keep what they have loaded."""
        files = self._files()
        size = 0
        for p in files:
            with suppress(FileNotFoundError):
                size += p.stat().st_size
                p.unlink()
        above = {p for f in files for p in f.parents if self.root in p.parents}
        for folder in sorted(above, reverse=True):
            with suppress(OSError):  # not empty
                folder.rmdir()
        return {"files": len(files), "bytes": size}

    def _files(self) -> list[Path]:
        def hashed(path: Path) -> bool:
            return any(_HASH.search(part) for part in path.relative_to(self.root).parts)

        return [p for p in self.root.rglob("*") if p.is_file() and hashed(p)]

    # -- loading ----------------------------------------------------------------------------------

    def pinned(self, path: Path) -> str:
        """A name of an entry under which nobody else can put another file between the check and
        the use, even where others can rename a folder above the cache: it starts at the folder
        itself, held open, which was checked to be ours."""
        root = path.parent.parent
        fd = _pin(root)
        return str(path) if fd is None else f"/proc/self/fd/{fd}/{path.relative_to(root)}"


_HASH = re.compile(r"[0-9a-f]{16}")
_HINT = "set DEUTERON_CACHE_DIR to a folder of your own on a disk with space"


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _digest(path: Path, data: bytes) -> bytes:
    """The name counts, so that nobody can pass off one entry as another."""
    return hashlib.sha256(path.name.encode() + b"\0" + data).hexdigest().encode()


def _own_bytes(path: Path) -> bytes | None:
    """The content of a file that is ours and that nobody else can write; else None."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        info = os.fstat(fd)
        ours = info.st_uid == os.getuid() and not info.st_mode & OTHERS_WRITE
        return f.read() if ours and stat.S_ISREG(info.st_mode) else None


def _good(path: Path) -> bool:
    """Whether there is such an entry, as it was put there. Deletes a bad one."""
    try:
        folder = path.parent.stat()
        if folder.st_uid != os.getuid() or folder.st_mode & OTHERS_WRITE:
            path.parent.chmod(0o700)  # and what others may have put there is not used
        else:
            data, digest = _own_bytes(path), _own_bytes(_digest_path(path))
            if data is not None and digest == _digest(path, data):
                return True
    except FileNotFoundError:
        return False
    except OSError:  # unreadable, a link, a broken disk: bad all the same
        pass
    _delete(path)
    return False


def _delete(path: Path) -> None:
    for p in (path, _digest_path(path)):
        with suppress(OSError):  # a folder that cannot be written: the entry is not used either
            p.unlink(missing_ok=True)


# -------------------------------------------------------------------------------- other folders

_PRIVATE_FOLDERS: dict[int, list[Path]] = {}  # private folders by process


def _private() -> Path:
    """A folder of this process alone."""
    for folder in _private_folders():
        return folder
    raise CacheError("no folder can be made for built kernels", hint=_HINT)


def _private_folders() -> Iterator[Path]:
    """Folders of this process alone, on different disks; made when asked for."""
    for parent in (None, MEMORY_FOLDER):
        folder = _private_folder(os.getpid(), parent)
        if folder is not None:
            yield folder


@cache
def _private_folder(pid: int, parent: str | None) -> Path | None:
    """A private folder of process `pid` (a forked child gets its own); None where there is no
    space."""
    prefix = f"deuteron-{os.getuid()}-"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError:
        return None
    # Held for life: whoever can lock it knows that this process, and its children, ended.
    alive = FileLock(folder / "alive", timeout=0)
    with suppress(OSError, NotImplementedError):
        alive.acquire()

    def remove() -> None:
        if os.getpid() == pid:
            alive.release()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _PRIVATE_FOLDERS.setdefault(pid, []).append(folder)
    for other in folder.parent.glob(prefix + "*"):
        if other != folder and _stale(other):
            _remove_dead(other)
    return folder


def _remove_dead(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            return
        with FileLock(folder / "alive", timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, Timeout, NotImplementedError):
        return


def _stale(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.lstat().st_mtime > STALE_SECONDS
    return False


@cache
def _sweep(root: Path, pid: int) -> None:
    """Once per process that makes entries: deletes what dead processes left where they are made.
    Looking at all of it takes longer than all else that a process does with a warm cache."""
    with suppress(OSError):
        for path in (root / "tmp").iterdir():
            if _stale(path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


_WARNED: set[str] = set()


def _warn(reason: str) -> None:
    if not _WARNED:
        _WARNED.add(reason)
        warnings.warn(
            f"Deuteron's kernel cache cannot be used: {reason}; kernels are built anew in this "
            f"process. Set DEUTERON_CACHE_DIR to a folder of your own.",
            stacklevel=2,
        )


def _private_because(reason: str) -> Path:
    _warn(reason)
    return _private()


_PINS: dict[Path, tuple[int, int, int]] = {}


def _pin(root: Path) -> int | None:
    """An open descriptor of a folder that is ours alone; None where the system has no /proc."""
    known = _PINS.get(root)
    if known is not None:
        with suppress(OSError):  # a program that turns into a daemon closes all descriptors
            info = os.fstat(known[0])
            if (info.st_dev, info.st_ino) == known[1:]:
                return known[0]
    if not os.path.isdir("/proc/self/fd"):
        return None
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if info.st_uid != os.getuid() or info.st_mode & OTHERS_WRITE:
        os.close(fd)
        raise CacheError(f"{root} was replaced by a folder that others can write", hint=_HINT)
    _PINS[root] = (fd, info.st_dev, info.st_ino)
    return fd


__all__ = ["Cache", "fingerprint", "key_of"]
