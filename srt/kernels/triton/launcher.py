"""Finds what Triton needs to compile its launcher, before the first kernel does.

Triton makes the code of the GPU itself. The module that loads and launches it is C, which it compiles with the system's
compiler when it first runs, and keeps in its cache. Where that fails, the error comes from inside of a step. No Triton
is imported here: that takes a second, and `umbel doctor` asks on machines without it.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

MODULE = "cuda_utils"  # the name of the module in the cache
COMPILERS = ("gcc", "clang")  # as Triton looks for them


def missing_for_launcher(
    environment: Mapping[str, str] | None = None, include: Path | None = None
) -> tuple[str, str] | None:
    """Returns what Triton misses to compile its launcher, and how to get it, as two clauses; None: nothing.

    Args:
        environment: of the process, where PATH, CC and the folder of the cache are; None: this one's.
        include: the folder of Python.h; None: that of this Python.
    """
    environment = os.environ if environment is None else environment
    if any(_cache(environment).glob(f"*/{MODULE}*.so")):
        return None
    asked = environment.get("CC")
    if not any(shutil.which(name, path=environment.get("PATH")) for name in ([asked] if asked else COMPILERS)):
        if asked:
            return f"CC={asked!r} is not a program", "unset CC, or set it to a C compiler"
        packages = "Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc"
        return "they need a C compiler, and there is none", f"install one ({packages}) or set CC"
    header = (_include() if include is None else include) / "Python.h"
    if not header.exists():
        own = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        packages = f"Debian, Ubuntu: apt install {own}; Fedora: dnf install python3-devel"
        return f"they need {header}, and it is not there", f"install it ({packages})"
    return None


def _cache(environment: Mapping[str, str]) -> Path:
    """Returns the folder of Triton's cache, which need not be there."""
    home = environment.get("TRITON_HOME") or Path.home()
    return Path(environment.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _include() -> Path:
    """Returns the folder of this Python's headers, by the scheme in which Triton looks for them."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"])
