"""Locks on open files, for one process at a time. They end with the process that holds them."""

import importlib
import os

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCKED_BYTE = 1 << 30  # Windows locks bytes and keeps others from reading them: one after the end of any file of ours


def lock_file(descriptor: int, *, shared: bool = False) -> bool:
    """Locks an open file, without waiting.

    Args:
        shared: other processes may hold a shared lock at the same time. On Windows every lock is exclusive.

    Returns:
        Whether the file is locked now; False where another process, or another descriptor, holds a lock.
    """
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            _lock_byte(descriptor)
    except OSError:
        return False
    return True


def _lock_byte(descriptor: int) -> None:
    msvcrt = importlib.import_module("msvcrt")
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
