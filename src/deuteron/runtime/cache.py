"""The cache of built kernels on disk.

In: a key (a hash of everything that decides the content) and bytes. Out: a path. Entries are
content-addressed, written atomically, readable and writable by their owner alone, and checked when
read: a file that others can write, that is another user's, or whose bytes are not those that were
put there is deleted and built again, never trusted. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from deuteron.base.options import Options

# A lock held longer than this belongs to a build that hangs; building twice does no harm.
LOCK_SECONDS = 600.0


def key_of(*parts: str | bytes) -> str:
    """The key of an entry: SHA-256 of everything that decides what is in it."""
    h = hashlib.sha256()
    for p in parts:
        data = p.encode() if isinstance(p, str) else p
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()[:40]


@cache
def _private(reason: str) -> Path:
    """A folder of this process alone, removed when it ends."""
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="deuteron-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if reason:
        warnings.warn(
            f"Deuteron's kernel cache cannot be used: {reason}; kernels are built anew in this "
            f"process. Set DEUTERON_CACHE_DIR to a folder of your own.",
            stacklevel=2,
        )
    return folder


@dataclass(frozen=True)
class Cache:
    root: Path

    @staticmethod
    def open(options: Options) -> Cache:
        """The cache of these options; a private folder where it cannot be used."""
        if not options.cache:
            return Cache(_private(""))
        try:
            root = options.cache_folder() / "kernels"
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = root.stat()
            if info.st_uid != os.getuid():
                return Cache(_private(f"{root} is another user's"))
            if info.st_mode & 0o022:
                os.chmod(root, 0o700)
            if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
                return Cache(_private(f"{root} is not readable and writable"))
            return Cache(root)
        except (OSError, RuntimeError) as e:  # no home folder, no space, read-only
            return Cache(_private(str(e)))

    def path(self, key: str, suffix: str) -> Path:
        return self.root / key[:2] / f"{key}{suffix}"

    def get(self, key: str, suffix: str) -> Path | None:
        """The entry's file, or None where there is no good one."""
        path = self.path(key, suffix)
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                return self._bad(path)
            if info.st_mode & 0o022:
                return self._bad(path)
            data = path.read_bytes()
            digest = path.with_name(path.name + ".sha256").read_text()
        except FileNotFoundError:
            return None
        except OSError:
            return self._bad(path)
        return path if hashlib.sha256(data).hexdigest() == digest.strip() else self._bad(path)

    def _bad(self, path: Path) -> Path | None:
        for p in (path, path.with_name(path.name + ".sha256")):
            try:
                p.unlink(missing_ok=True)
            except OSError:
                break
        return None

    def put(self, key: str, suffix: str, data: bytes) -> Path:
        """Stores an entry; returns its file (in a private folder where the cache is full)."""
        path = self.path(key, suffix)
        try:
            self._write(path.with_name(path.name + ".sha256"), _digest(data))
            self._write(path, data)
            return path
        except OSError as e:
            other = Cache(_private(str(e))).path(key, suffix)
            self._write(other, data)
            return other

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(data)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held while an entry is built, so that processes build it once; a lock whose holder died
        is free, and one that cannot be had is done without."""
        lock = FileLock(self.path(key, ".lock"), timeout=LOCK_SECONDS, mode=0o600)
        held = False
        try:
            self.path(key, "").parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
            held = True
        except (OSError, Timeout, NotImplementedError):
            pass  # a file system without locks: building twice is right, only slower
        try:
            yield
        finally:
            if held:
                lock.release()

    def entries(self) -> list[Path]:
        """Files of entries."""
        return [p for p in self.root.glob("??/*") if p.is_file() and not p.name.startswith(".")]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


__all__ = ["Cache", "key_of"]
