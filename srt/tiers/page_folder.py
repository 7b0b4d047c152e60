"""A folder of pages that several processes share: its layout, its lock, and the bytes it holds.

    FOLDER/usage             bytes and pages of all processes; a process locks it to change the folder
    FOLDER/writing/T         locked by the process T as long as it lives
    FOLDER/writing/T.17      a page that T writes; renamed when it is whole
    FOLDER/ab/cd/abcd...     a page, under its name in hexadecimal

One count for all: each process adds a page's bytes under the lock before it writes them, so together they stay under
the limit. A killed process leaves its files in `writing`; the next one that starts removes them. When no other process
is there, a starting one counts the folder anew.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...lang.errors import ModelError
from ..core.cache_folder import is_ours, make_private
from .page_format import HEADER_BYTES, MOST_PAYLOAD, BadPage
from .tier import Payload

BLOCK = 4096  # bytes; files and folders take whole ones
LOCK_SECONDS = 5.0  # longest wait for another process; then the page is not stored
_LOCK_POLL = 0.002
_USAGE = struct.Struct("<8sQQ")
_USAGE_MAGIC = b"umbelKVu"
_HEX = frozenset("0123456789abcdef")


class PageFiles:
    """The system calls on pages. Tests make them fail and wait."""

    def read(self, path: Path) -> Payload:
        """Returns the bytes of a page.

        Raises:
            BadPage: another user's, no file, or too large.
            OSError: it cannot be read, or is not there.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode) or not is_ours(state.st_uid):
                raise BadPage("foreign")
            if state.st_size > MOST_PAYLOAD:
                raise BadPage("foreign")
            page = np.empty(state.st_size, dtype=np.uint8)
            done = 0
            while done < state.st_size:
                count = os.preadv(descriptor, [page.data[done:]], done)
                if not count:
                    break
                done += count
            return page[:done]
        finally:
            os.close(descriptor)

    def create(self, path: Path, size: int) -> None:
        """Makes an empty file of a size, which takes no room on the disk yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def write(self, path: Path, header: bytes, payload: Payload) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            parts = [memoryview(header), payload.data]
            place = 0
            while parts:
                count = os.pwritev(descriptor, parts, place)
                place += count
                while parts and count >= len(parts[0]):
                    count -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][count:]
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def stat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def touch(self, path: Path, nanoseconds: int) -> None:
        os.utime(path, ns=(nanoseconds, nanoseconds), follow_symlinks=False)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


@dataclass(slots=True)
class FolderUsage:
    """The bytes that all processes have in a folder, those being written included. Changed under the lock."""

    bytes: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class FoundPage:
    name: bytes
    size: int  # bytes, in whole blocks
    used: int  # nanoseconds


def blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class PageFolder:
    """Lays out a folder, and counts what all processes have in it.

    Args:
        folder: made when it is not there.

    Raises:
        ModelError: the folder cannot be made, or other users may write to it.
    """

    def __init__(self, folder: Path, files: PageFiles) -> None:
        self.files = files
        self._token = secrets.token_hex(16)
        self._given = folder
        self._alive = -1  # descriptor of writing/T
        self._written = 0
        self.folder = folder
        try:
            self.prepare()
        except OSError as error:
            raise ModelError(
                f"disk_cache={str(folder)!r}: no file can be locked there ({error.strerror}); write a folder on a "
                "local disk"
            ) from error

    def prepare(self) -> None:
        """Makes the folder and this process's file in it, also after they were removed.

        Raises:
            OSError, ModelError: it cannot be made.
        """
        self.folder = make_private(self._given, option="disk_cache")
        make_private(self._writing, option="disk_cache")
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        # Locked before it has its name: no other process sees it without its lock.
        path = self._writing / f".{self._token}"
        self._alive = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        os.rename(path, self._writing / self._token)

    def close(self) -> None:
        if self._alive >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._writing / self._token)
            os.close(self._alive)
            self._alive = -1

    def path_of(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / text[2:4] / text

    def now(self) -> int:
        """Returns the file system's time in nanoseconds, which is that of all processes and machines that share it."""
        os.utime(self._alive)
        return os.fstat(self._alive).st_mtime_ns

    @contextlib.contextmanager
    def locked(self) -> Iterator[FolderUsage]:
        """Holds the lock of the folder, and writes its usage afterwards.

        Raises:
            OSError: another process held it for `LOCK_SECONDS`, or the folder is gone.
        """
        path = self.folder / "usage"
        end = time.monotonic() + LOCK_SECONDS
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise OSError(errno.ETIMEDOUT, "another process holds the folder's lock") from None
                    time.sleep(_LOCK_POLL)
            usage = self._read_usage(descriptor)
            before = (usage.bytes, usage.pages)
            try:
                yield usage
            finally:
                if (usage.bytes, usage.pages) != before:
                    os.pwrite(descriptor, _USAGE.pack(_USAGE_MAGIC, max(0, usage.bytes), max(0, usage.pages)), 0)
        finally:
            os.close(descriptor)

    def _read_usage(self, descriptor: int) -> FolderUsage:
        data = os.pread(descriptor, _USAGE.size, 0)
        if len(data) == _USAGE.size:
            magic, size, pages = _USAGE.unpack(data)
            if magic == _USAGE_MAGIC:
                return FolderUsage(size, pages)
        usage = FolderUsage()
        self._count(usage)
        os.pwrite(descriptor, _USAGE.pack(_USAGE_MAGIC, usage.bytes, usage.pages), 0)
        return usage

    # ------------------------------------------------------------------ at start

    def clean(self, usage: FolderUsage) -> bool:
        """Removes what killed processes were writing → whether no other process is there. Under the lock."""
        alone = True
        with os.scandir(self._writing) as entries:
            names = sorted(entry.name for entry in entries)
        living: dict[str, bool] = {}
        for name in names:
            token = name.partition(".")[0]
            if not token:  # of a process that starts
                continue
            if token not in living:
                living[token] = token == self._token or self._lives(token)
                alone = alone and (token == self._token or not living[token])
            if living[token]:
                continue
            path = self._writing / name
            with contextlib.suppress(OSError):
                size = self.files.stat(path).st_size if "." in name else 0
                self.files.unlink(path)
                usage.bytes -= blocks(size)
        return alone

    def _lives(self, token: str) -> bool:
        """Returns whether the process of a token holds the lock of its file."""
        try:
            descriptor = os.open(self._writing / token, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def recount(self, usage: FolderUsage) -> list[FoundPage]:
        """Counts everything that is there anew → its pages. Under the lock."""
        usage.bytes = usage.pages = 0
        return self._count(usage)

    def _count(self, usage: FolderUsage) -> list[FoundPage]:
        found = []
        for page in self.scan(lambda: self._add_folder(usage)):
            usage.bytes += page.size
            usage.pages += 1
            found.append(page)
        with contextlib.suppress(OSError), os.scandir(self._writing) as entries:
            usage.bytes += sum(blocks(entry.stat(follow_symlinks=False).st_size) for entry in entries)
        return found

    @staticmethod
    def _add_folder(usage: FolderUsage) -> None:
        usage.bytes += BLOCK

    def scan(self, enter: Callable[[], None] = lambda: None) -> Iterator[FoundPage]:
        """Yields all pages, by their names and sizes; no payload is read.

        enter: called for each folder of pages.
        """
        for upper in _folders(self.folder):
            enter()
            for lower in _folders(upper):
                enter()
                start = upper.name + lower.name
                with contextlib.suppress(OSError), os.scandir(lower) as entries:
                    for entry in entries:
                        if len(entry.name) != 64 or not entry.name.startswith(start) or not _HEX.issuperset(entry.name):
                            continue
                        with contextlib.suppress(OSError):
                            state = entry.stat(follow_symlinks=False)
                            yield FoundPage(bytes.fromhex(entry.name), blocks(state.st_size), state.st_mtime_ns)

    # ------------------------------------------------------------------ one page

    def reserve(self, usage: FolderUsage, size: int) -> Path:
        """Makes the file in which a page is written, and counts it. Under the lock."""
        self._written += 1
        path = self._writing / f"{self._token}.{self._written}"
        self.files.create(path, size)
        usage.bytes += blocks(size)
        return path

    def publish(self, usage: FolderUsage, path: Path, name: bytes) -> None:
        """Gives a written page its name. Under the lock."""
        target = self.path_of(name)
        for folder in (target.parent.parent, target.parent):
            try:
                self.files.make_folder(folder)
            except FileExistsError:
                continue
            usage.bytes += BLOCK
        try:
            old = blocks(self.files.stat(target).st_size)
        except FileNotFoundError:
            old = 0
            usage.pages += 1
        self.files.replace(path, target)
        usage.bytes -= old

    def discard(self, usage: FolderUsage, path: Path, size: int) -> None:
        """Removes a file that was not published. Under the lock."""
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(path)
        usage.bytes -= blocks(size)

    def remove(self, usage: FolderUsage, name: bytes, size: int) -> None:
        """Removes a page, and folders that are empty then. Under the lock.

        Raises:
            FileNotFoundError: another process has removed it.
            OSError: it cannot be removed.
        """
        path = self.path_of(name)
        self.files.unlink(path)
        usage.bytes -= size
        usage.pages -= 1
        with contextlib.suppress(OSError):
            for folder in (path.parent, path.parent.parent):
                self.files.remove_folder(folder)
                usage.bytes -= BLOCK

    @property
    def _writing(self) -> Path:
        return self.folder / "writing"


def page_bytes(payload: Payload) -> int:
    """Returns the bytes of a page's file."""
    return HEADER_BYTES + payload.nbytes


def _folders(folder: Path) -> list[Path]:
    """Returns the folders of pages in a folder: those of two hexadecimal digits."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if len(entry.name) == 2 and _HEX.issuperset(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []
