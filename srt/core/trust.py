"""Reads files from a cache, only where no other user can have put them.

A kernels library is code, a tokenizer decides what is a control token, and weights decide everything else. A user who
can write to the file, or to any folder on its path, decides its content. So each component of a path is checked when
the file is used, not only when it is made. Once every folder belongs to this user or to root, no other user can
exchange a component between the check and the use.
"""

import contextlib
import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

from ...lang.errors import ModelError

MOST_LINKS = 40  # symbolic links of one path
_OVERFLOW = 65534  # owner shown for files of users that this container does not know


def trusted(path: Path) -> Path:
    """Returns the path without symbolic links of a file or folder that only this user and root can have written.

    Every folder of the path belongs to one of the two and is closed to others, or has the sticky bit, as /tmp has: then
    others cannot exchange its files. A group of which this user is the only member counts as the user.

    Raises:
        ModelError: others could have written it; the message names the component and what to run.
        FileNotFoundError, NotADirectoryError: it is not there.
    """
    waiting = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    reached, links = Path("/"), 0
    _check(reached, reached.lstat(), path)
    while waiting:
        part = waiting.pop()
        if part == "..":  # of a symbolic link
            reached = reached.parent
            continue
        here = reached / part
        state = here.lstat()
        _check(here, state, path)
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
        _check(real, state, path)
        if not stat.S_ISREG(state.st_mode):
            raise ModelError(f"{path} is no file; remove it")
        return file.read()


def _check(here: Path, state: os.stat_result, path: Path) -> None:
    """Raises ModelError when others can have written this component or its content."""
    if not _is_ours(state.st_uid):
        raise ModelError(
            f"{path} is not used: {_named(here, path)} belongs to another user (uid {state.st_uid}); remove it, or set "
            "UMBEL_CACHE to a folder of yours"
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
        f"chmod go-w {here}, or set UMBEL_CACHE to a folder of yours"
    )


def _named(here: Path, path: Path) -> str:
    return "it" if here == path else str(here)


def _is_ours(user: int) -> bool:
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
