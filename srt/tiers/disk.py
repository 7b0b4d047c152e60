"""Pages on a disk, in a folder that processes share and that outlives them.

An index of names is made from the folder at start, without reading a payload. A page that another process has written
since is found by its path. What is read is checked as a whole (page_format.py): a page that is damaged, cut off or of
another model is a miss, is counted and removed.

The order of use is the time of the files. A use sets it to the file system's time, and never to less than any page has:
clocks that jump or differ change which page is evicted first, and nothing else.
"""

import contextlib
import errno
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...lang.errors import ModelError
from ..core.instruments import Clock, SystemClock
from .names import NAME_BYTES
from .page_folder import BLOCK, FolderUsage, PageFiles, PageFolder, blocks, page_bytes
from .page_format import HEADER_BYTES, BadPage, PageFormat
from .tier import Breaker, Faults, LoadCounts, Payload, TierFacts

_FOLDER_BYTES = 2 * BLOCK  # of the two folders that may have to be made for a page
_OPEN_AFTER = 5  # writes that failed one after the other
_PAUSE = 10.0  # seconds without writes then


@dataclass(slots=True)
class _IndexEntry:
    size: int  # bytes, in whole blocks
    used: int  # nanoseconds, as the file has them


class _NoRoomError(Exception):
    """Raised where nothing can be evicted."""


class DiskTier:
    """Implements `Tier`. Used from one thread, after `open`.

    Args:
        folder: made when it is not there. Only this user and root may be able to write to it.
        limit: bytes that all processes have in the folder together. Each keeps to its own.
        scheme: `PageScheme.digest` of the engine.
        files: the system calls; tests replace them.

    Raises:
        MissingExtraError: xxhash is not installed.
        ModelError: the folder cannot be made, or other users may write to it.
    """

    name = "disk"

    def __init__(
        self, folder: Path, limit: int, scheme: bytes, *, files: PageFiles | None = None, clock: Clock | None = None
    ) -> None:
        assert limit > 0, "a cache of no bytes is switched off, not made"
        self._clock = clock = clock or SystemClock()
        self._limit = limit
        self._format = PageFormat(scheme)
        self._files = files or PageFiles()
        self._folder = PageFolder(folder, self._files)
        self._faults = Faults(self.name, clock)
        self._breaker = Breaker(clock, failures=_OPEN_AFTER, pause=_PAUSE)
        self._index: OrderedDict[bytes, _IndexEntry] = OrderedDict()  # the next to be evicted first
        self._refused: set[bytes] = set()  # bad pages that could not be removed, or are a newer umbel's
        self._stuck: dict[bytes, _IndexEntry] = {}  # pages that could not be removed
        self._last = 0  # latest use, in nanoseconds of the file system
        self._usage = FolderUsage()  # as it was last seen
        self._loads = LoadCounts()
        self._stored = self._evicted = self._dropped = 0

    def open(self) -> None:
        """Makes the index: 4 to 7 s for 100,000 pages, in which looks wait."""
        try:
            with self._locked() as usage:
                alone = self._folder.clean(usage)
                found = self._folder.recount(usage) if alone else None
            pages = sorted(found if found is not None else self._folder.scan(), key=lambda page: page.used)
        except OSError as error:
            self._fault(error)
            return
        self._index = OrderedDict((page.name, _IndexEntry(page.size, page.used)) for page in pages)
        self._last = max([self._last, *(page.used for page in pages[-1:])])

    def longest(self, names: Sequence[bytes]) -> int:
        count = 0
        for name in names:
            if name not in self._index and not self._adopt(name):
                break
            count += 1
        self._use(names[:count])
        return count

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        return self._loads.take(map(self._read, names), len(names))

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        first = len(names) - len(payloads)
        assert first >= 0, "every payload has a name"
        if first and not self._has(names[first - 1]):
            self._dropped += len(payloads)
            return
        for index, payload in enumerate(payloads, first):
            if not self._has(names[index]) and not self._write(names[index], payload):
                self._dropped += len(names) - index
                break
        self._use([name for name in names if name in self._index])

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self._has(name):
                self._remove(name)

    def sample(self, size: int) -> float | None:
        name = secrets.token_bytes(NAME_BYTES)
        try:
            self._write_once(name, np.zeros(size, dtype=np.uint8), evict=0)
        except (OSError, _NoRoomError):
            return None  # a store will say why
        before = self._clock.now()
        read = self._read(name)
        seconds = self._clock.now() - before
        self._remove(name)
        return None if read is None else seconds

    def facts(self) -> TierFacts:
        return TierFacts(
            self.name,
            pages=self._usage.pages,
            bytes=self._usage.bytes,
            limit=self._limit,
            hits=self._loads.hits,
            misses=self._loads.misses,
            stored=self._stored,
            evicted=self._evicted,
            dropped=self._dropped,
            faults=dict(self._faults.counts),
        )

    def close(self) -> None:
        self._folder.close()
        self._index.clear()

    # ------------------------------------------------------------------ what is there

    def _has(self, name: bytes) -> bool:
        return name in self._index or self._adopt(name)

    def _adopt(self, name: bytes) -> bool:
        """Takes a page into the index that another process has written."""
        if name in self._refused:
            return False
        try:
            state = self._files.stat(self._folder.path_of(name))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._fault(error)
            return False
        self._index[name] = _IndexEntry(blocks(state.st_size), state.st_mtime_ns)
        self._last = max(self._last, state.st_mtime_ns)
        return True

    def _use(self, names: Sequence[bytes]) -> None:
        """Makes the pages of a sequence the last to be evicted, the head after its tail."""
        if not names:
            return
        try:
            self._last = max(self._folder.now(), self._last + len(names))
            for place in range(len(names) - 1, -1, -1):
                entry = self._index[names[place]]
                entry.used = self._last - place
                self._index.move_to_end(names[place])
                with contextlib.suppress(FileNotFoundError):  # another process has removed it: a read will say so
                    self._files.touch(self._folder.path_of(names[place]), entry.used)
        except OSError as error:
            self._fault(error)

    # ------------------------------------------------------------------ reading

    def _read(self, name: bytes) -> Payload | None:
        if name in self._refused:
            return None
        try:
            page = self._files.read(self._folder.path_of(name))
            return self._format.payload(name, page)
        except FileNotFoundError:
            self._index.pop(name, None)
        except BadPage as bad:
            self._reject(name, bad.kind)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                self._reject(name, "foreign")
            else:
                self._fault(error)
        except MemoryError:
            self._faults.add("memory", "there is no memory to read a page")
        return None

    def _reject(self, name: bytes, kind: str) -> None:
        """Counts a page that is none, and removes it unless a newer umbel may have written it."""
        self._faults.add(kind, f"the file {name.hex()[:16]}... is {_BAD[kind]}")
        if kind == "newer" or not self._remove(name):
            self._refused.add(name)
            self._index.pop(name, None)

    def _remove(self, name: bytes) -> bool:
        """Removes a page from the folder → whether it is gone."""
        entry = self._index.get(name) or self._stuck.get(name)
        try:
            with self._locked() as usage:
                size = entry.size if entry is not None else blocks(self._files.stat(self._folder.path_of(name)).st_size)
                self._folder.remove(usage, name, size)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._fault(error)
            return False
        self._index.pop(name, None)
        self._stuck.pop(name, None)
        return True

    # ------------------------------------------------------------------ writing

    def _write(self, name: bytes, payload: Payload) -> bool:
        """Writes a page → whether it is there. Where the disk is full, it tries once more with less in the folder."""
        size = page_bytes(payload)
        if blocks(size) + _FOLDER_BYTES > self._limit or not self._breaker.allows():
            return False
        try:
            try:
                self._write_once(name, payload, evict=0)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._fault(error)
                self._write_once(name, payload, evict=2 * blocks(size))
        except _NoRoomError:
            self._faults.add("no room", f"{self._folder.folder} is full, and nothing in it can be evicted")
            return False
        except OSError as error:
            self._fault(error)
            self._breaker.failed()
            if isinstance(error, FileNotFoundError):
                self._start_again()
            return False
        self._breaker.succeeded()
        self._stored += 1
        return True

    def _write_once(self, name: bytes, payload: Payload, evict: int) -> None:
        """Writes a page to a file of its own, then gives it its name.

        evict: bytes that have to go first, whatever the limit is.
        """
        size = page_bytes(payload)
        with self._locked() as usage:
            target = self._limit - blocks(size) - _FOLDER_BYTES
            self._make_room(usage, min(target, usage.bytes - evict) if evict else target)
            path = self._folder.reserve(usage, size)
        published = False
        try:
            self._files.write(path, self._format.header(name, payload), payload)
            with self._locked() as usage:
                self._folder.publish(usage, path, name)
            published = True
        finally:
            if not published:
                with self._locked() as usage:
                    self._folder.discard(usage, path, size)
        self._refused.discard(name)
        self._index[name] = _IndexEntry(blocks(size), self._last)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[FolderUsage]:
        """Holds the folder's lock, and notes its usage for `facts`."""
        with self._folder.locked() as usage:
            try:
                yield usage
            finally:
                self._usage = FolderUsage(usage.bytes, usage.pages)

    def _make_room(self, usage: FolderUsage, target: int) -> None:
        """Evicts pages until the folder has at most `target` bytes. Under the lock.

        Raises:
            _NoRoomError: there is nothing more to evict.
        """
        scanned = False
        while usage.bytes > target:
            name = self._oldest()
            if name is None:
                if scanned:
                    raise _NoRoomError
                scanned = True
                self._look_again(usage)
                continue
            entry = self._index.pop(name)
            try:
                self._folder.remove(usage, name, entry.size)
                self._evicted += 1
            except FileNotFoundError:
                pass  # another process has evicted it, and counted that
            except OSError as error:
                self._stuck[name] = entry  # the next one is tried: one file must not stop all others
                self._fault(error)

    def _oldest(self) -> bytes | None:
        """Returns the page that no process has used for longest, of those in the index."""
        for _ in range(len(self._index)):
            name, entry = next(iter(self._index.items()))
            try:
                used = self._files.stat(self._folder.path_of(name)).st_mtime_ns
            except OSError:
                return name
            if used <= entry.used:
                return name
            entry.used = used  # by another process
            self._index.move_to_end(name)
        return next(iter(self._index), None)

    def _look_again(self, usage: FolderUsage) -> None:
        """Counts the folder anew, and takes the pages of other processes into the index. Under the lock."""
        pages = sorted(self._folder.recount(usage), key=lambda page: page.used)
        self._index = OrderedDict(
            (page.name, _IndexEntry(page.size, page.used)) for page in pages if page.name not in self._stuck
        )

    def _start_again(self) -> None:
        """Makes the folder anew: it was removed."""
        try:
            self._folder.prepare()
        except (OSError, ModelError) as error:
            self._fault(error)
            return
        self._refused.clear()
        self._stuck.clear()
        self.open()

    def _fault(self, error: OSError | ModelError) -> None:
        if isinstance(error, OSError):
            number = error.errno or 0
            self._faults.add(errno.errorcode.get(number, "OSError"), f"{os.strerror(number)} in {self._folder.folder}")
        else:
            self._faults.add("folder", str(error))


_BAD = {
    "foreign": "no page of umbel",
    "newer": "of a newer umbel",
    "truncated": f"cut off, or shorter than {HEADER_BYTES} bytes",
    "damaged": "damaged",
    "other model": "of another model or another layout of its keys",
    "other name": "another page",
}
