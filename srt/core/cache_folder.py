"""Keeps kernels, tokenizers and vocabularies in the cache folder, each made once, by the first process that needs it.

<cache>/kernels/<name>/           a compiled library and its seal, see srt/kernels/cpu/library.py
<cache>/kernels/.<name>.making-*  one being made; renamed when it is whole
<cache>/kernels/.<name>.lock      held by the process that makes it
<cache>/tokenizers/<digest>       tokenizer.json of a GGUF file, see srt/weights/documents.py
<cache>/vocabularies/<digest>     byte tables, see srt/tokenizer/vocabulary.py
<cache>/merges/<digest>           merges of a BPE tokenizer, see srt/tokenizer/merges.py
<cache>/digests/<digest>          digests of files of weights, see srt/weights/catalog/digests.py
<cache>/compared/<digest>         notes that the default model was compared with its digest
<cache>/models/<name>/            models that were put there, opened by name

Files are read only where no other user can have put them. A kernels library is code, a tokenizer decides what is a
control token, and weights decide everything else. A user who can write to the file, or to any folder on its path,
decides its content. So each component of a path is checked when the file is used, not only when it is made. Once every
folder belongs to this user or to root, no other user can exchange a component between the check and the use.
"""

import contextlib
import fcntl
import glob
import grp
import logging
import os
import pwd
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from ...lang.errors import ModelError

_log = logging.getLogger("umbel.engine")

MOST_LINKS = 40  # symbolic links of one path
_OVERFLOW = 65534  # owner shown for files of users that this container does not know


def trusted(path: Path, *, option: str = "UMBEL_CACHE") -> Path:
    """Returns the path without symbolic links of a file or folder that only this user and root can have written.

    Every folder of the path belongs to one of the two and is closed to others, or has the sticky bit, as /tmp has: then
    others cannot exchange its files. A group of which this user is the only member counts as the user.

    Args:
        option: where the folder was set, for the message.

    Raises:
        ModelError: others could have written it; the message names the component and what to run.
        FileNotFoundError, NotADirectoryError: it is not there.
    """
    waiting = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    reached, links = Path("/"), 0
    _check(reached, reached.lstat(), path, option)
    while waiting:
        part = waiting.pop()
        if part == "..":  # of a symbolic link
            reached = reached.parent
            continue
        here = reached / part
        state = here.lstat()
        _check(here, state, path, option)
        if not stat.S_ISLNK(state.st_mode):
            reached = here
            continue
        links += 1
        if links > MOST_LINKS:
            raise ModelError(f"{path}: more than {MOST_LINKS} symbolic links are on the way; give the real path")
        target = Path(os.readlink(here))
        if target.is_absolute():
            reached = Path("/")
        waiting += reversed([part for part in target.parts if part != "/"])
    return reached


def read_trusted(path: Path) -> bytes:
    """Returns the content of a file after checking its path and its open descriptor.

    Raises:
        ModelError: others could have written it.
        OSError: it cannot be read.
    """
    real = trusted(path)
    with open(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        state = os.fstat(file.fileno())
        _check(real, state, path, "UMBEL_CACHE")
        if not stat.S_ISREG(state.st_mode):
            raise ModelError(f"{path} is no file; remove it")
        return file.read()


def _check(here: Path, state: os.stat_result, path: Path, option: str) -> None:
    """Raises ModelError when others can have written this component or its content."""
    if not is_ours(state.st_uid):
        raise ModelError(
            f"{path} is not used: {_named(here, path)} belongs to another user (uid {state.st_uid}); remove it, or set "
            f"{option} to a folder of yours"
        )
    mode = stat.S_IMODE(state.st_mode)
    if stat.S_ISLNK(state.st_mode) or not mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    if stat.S_ISDIR(state.st_mode) and mode & stat.S_ISVTX:
        return
    if not mode & stat.S_IWOTH and _is_private(state.st_gid):
        return
    raise ModelError(
        f"{path} is not used, because other users may write to {_named(here, path)}; look at what is there, and run: "
        f"chmod go-w {here}, or set {option} to a folder of yours"
    )


def _named(here: Path, path: Path) -> str:
    return "it" if here == path else str(here)


def is_ours(user: int) -> bool:
    """Returns whether an owner of files is this user or root."""
    return user in (os.geteuid(), 0) or (user == _OVERFLOW and _hides_users())


@cache
def _hides_users() -> bool:
    """Returns whether this is a Linux container that does not know the owner of the system's own folders.

    No process of the container is that user."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except (OSError, ValueError):
        return False
    return not any(first <= _OVERFLOW < first + count for first, _, count in ranges)


@cache
def _is_private(group: int) -> bool:
    """Returns whether a group is the user's own: of the same name, with no other members, as many systems make it."""
    with contextlib.suppress(KeyError, OSError):
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
    return False


LOCK_SECONDS = 1800.0  # longest wait for another process that makes the same folder
_LOCK_POLL = 0.1


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Returns `$UMBEL_CACHE`, or "umbel" in the platform's folder for caches. Does not make it.

    Args:
        environment: None for this process's, as it is now.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("UMBEL_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "umbel"
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "umbel"


def make_private(folder: Path, *, option: str = "UMBEL_CACHE") -> Path:
    """Makes a folder (and its parents) that only this user can write to → its path without symbolic links.

    Args:
        option: where the folder was set, for the message.

    Raises:
        ModelError: it cannot be made, or others may write to it or to a folder on its path: a model there could not be
            trusted.
    """
    try:
        for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would leave the parents open to others
        return trusted(folder, option=option)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set {option} to a folder of yours"
        ) from error


def build_once(
    target: Path, build: Callable[[Path], None], *, complete: Callable[[Path], bool], seconds: float = LOCK_SECONDS
) -> bool:
    """Makes the folder `target` by calling `build` on a new sibling, unless it is complete already.

    An existing folder is read only if no other user can have made it.

    The sibling is renamed when `build` returns, so a half-made folder never has the name. Processes that
    ask at the same time wait for the first one. Returns whether this call made it.

    Raises:
        ModelError: the folder cannot be written, another user could have made it, or another process kept the lock
            for `seconds`.
    """
    if _trusted_if_there(target) and complete(target):
        return False
    make_private(target.parent)
    with locked(target.parent / f".{target.name}.lock", seconds=seconds):
        _remove_stale(target)
        if complete(target):
            return False
        making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
        try:
            build(making)
            if target.exists():  # an older format, or damaged
                shutil.rmtree(target)
            making.rename(target)
        except OSError as error:
            raise ModelError(
                f"{target} cannot be written ({error.strerror or error}); make room there, "
                "or set UMBEL_CACHE to a folder on another disk"
            ) from error
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return True


@contextlib.contextmanager
def locked(path: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds a lock file. The system drops the lock when its holder dies.

    Raises:
        ModelError: another process held it for longer than `seconds`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ModelError(f"{path} cannot be made ({error.strerror}); set UMBEL_CACHE to a folder of yours") from error
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ModelError(
                        f"another process has held {path} for {seconds:.0f} s; "
                        "end it, or set UMBEL_CACHE to another folder"
                    ) from None
                time.sleep(_LOCK_POLL)
            except OSError as error:
                raise ModelError(
                    f"{path} cannot be locked ({error.strerror}); set UMBEL_CACHE to a folder on a local disk"
                ) from error
        yield
    finally:
        os.close(descriptor)


def _trusted_if_there(target: Path) -> bool:
    """Returns whether the folder exists. Raises ModelError when another user can have made it."""
    try:
        trusted(target)
    except OSError:
        return False
    return True


def _remove_stale(target: Path) -> None:
    """Removes folders that killed processes left. The caller holds the lock, so no process is making one."""
    for stale in target.parent.glob(f".{glob.escape(target.name)}.making-*"):
        shutil.rmtree(stale, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file at once: readers see the old content or the new one, never a part."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def keep(path: Path, content: bytes) -> None:
    """Writes a file of the cache folder for the next start. Where it cannot be written, a warning says so once."""
    try:
        write_atomically(make_private(path.parent) / path.name, content)
    except (OSError, ModelError) as error:
        _say_unkept(path.parent, str(error))


@cache
def _say_unkept(folder: Path, reason: str) -> None:
    _log.warning("nothing is kept for the next start in %s: %s", folder, reason)
