"""The cache folder: converted models and vocabularies, each made once, by the first process that needs it.

<cache>/models/<name>/           a finished model: safetensors, config, tokenizer
<cache>/models/.<name>.making-*  one being made; renamed when it is whole
<cache>/models/.<name>.lock      held by the process that makes it
<cache>/vocabularies/<digest>    byte tables, see srt/tokenizer/vocabulary.py
"""

import contextlib
import fcntl
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...lang.errors import ModelError
from .trust import trusted

LOCK_SECONDS = 1800.0  # longest wait for another process that converts the same model
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


def make_private(folder: Path) -> Path:
    """Makes a folder (and its parents) that only this user can write to → its path without symbolic links.

    Raises:
        ModelError: it cannot be made, or others may write to it or to a folder on its path: a model there could not be
            trusted.
    """
    try:
        for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would leave the parents open to others
        return trusted(folder)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set UMBEL_CACHE to a folder of yours"
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
