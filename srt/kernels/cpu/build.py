"""Compiles the kernels with the system's compiler, once, into the cache folder.

<cache>/kernels/<isa>-<digest>/umbel-kernels.so, where the digest is of the sources, the flags and the compiler. No
torch headers are needed, so it takes seconds. A library is checked in a process of its own before it gets its name:
an instruction that this machine refuses costs the kernels, never the runtime. Its length and digest lie next to it, and
are compared whenever it is loaded: a damaged library is compiled again, one that another user could have written is not
loaded.

The trie walk is in it, and in a library of its own, <cache>/kernels/walk-<digest>, which runs on any CPU: with a GPU,
the host still makes masks, and needs no other kernel.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ....lang.errors import ModelError
from ...core.cache_folder import build_once, cache_folder
from ...core.trust import read_trusted, trusted
from .isa import Isa

SOURCES = Path(__file__).parent / "source"
LIBRARY = "umbel-kernels.so"
SEAL = "umbel-kernels.json"  # length and digest of the library
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi")
COMPILE_SECONDS = 300.0
CHECK_SECONDS = 60.0

_CHECK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.umbel_self_check())
"""
_CHECK_WALK = """
import ctypes, sys
ctypes.CDLL(sys.argv[1]).umbel_walk_trie
"""


class NoKernels(Exception):
    """The kernels are not available here; the message says why and what would help."""


class WrongKernels(NoKernels):
    """They compile, but fail their self-check on this machine."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """One library.

    Attributes:
        name: of its folder, and of its kernels in messages.
        pattern: of its source files.
        flags: added to the common ones.
        check: Python that runs in a process of its own, with the library's path; it fails when the library is wrong.
    """

    name: str
    pattern: str
    flags: tuple[str, ...]
    check: str


def library_path(isa: Isa, environment: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the library for `isa`, compiled now unless it is in the cache.

    Raises:
        NoKernels: there is no compiler, it fails, the cache folder cannot be written, or the result is wrong here.
    """
    return _path_of(_Recipe(isa.value, "*.cpp", isa.compiler_flags, _CHECK), environment)


def walk_path(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the trie walk's library, compiled in a second unless it is in the cache.

    Raises:
        NoKernels: as `library_path`.
    """
    return _path_of(_Recipe("walk", "trie_walk.cpp", (), _CHECK_WALK), environment)


def _path_of(recipe: _Recipe, environment: Mapping[str, str] | None) -> Path:
    compiler = find_compiler(environment)
    folder = cache_folder(environment) / "kernels" / f"{recipe.name}-{_digest(recipe, compiler)}"

    try:
        build_once(folder, lambda making: _build(making, recipe, compiler), complete=_is_whole)
        return trusted(folder / LIBRARY)
    except (ModelError, OSError) as error:  # of the cache folder
        raise NoKernels(str(error)) from error


def _is_whole(folder: Path) -> bool:
    """Returns whether a library is unchanged since its compilation: a damaged one would crash or compute nonsense.

    Raises:
        ModelError: another user could have written it.
    """
    try:
        seal = msgspec.json.decode(read_trusted(folder / SEAL), type=_Seal)
        library = read_trusted(folder / LIBRARY)
    except (OSError, ValueError):
        return False
    return seal == _seal(library)


class _Seal(msgspec.Struct, frozen=True):
    """Length and digest of a library, in a file next to it."""

    length: int  # bytes
    sha256: str


def _seal(library: bytes) -> _Seal:
    return _Seal(len(library), hashlib.sha256(library).hexdigest())


def find_compiler(environment: Mapping[str, str] | None = None) -> str:
    """Finds `$CXX`, or the first of g++, clang++ and c++ that is installed."""
    environment = os.environ if environment is None else environment
    asked = environment.get("CXX")
    for name in [asked] if asked else ["g++", "clang++", "c++"]:
        found = shutil.which(name, path=environment.get("PATH"))
        if found:
            return found
    raise NoKernels(
        f"CXX={asked} is not a program; unset it or name a C++ compiler"
        if asked
        else "there is no C++ compiler; install one (Debian and Ubuntu: apt-get install g++)"
    )


def _digest(recipe: _Recipe, compiler: str) -> str:
    """Hashes everything that determines the library. The compiler counts by path, size and time: running it is slow."""
    state = os.stat(compiler)
    digest = hashlib.sha256(repr((recipe.name, recipe.flags, FLAGS)).encode())
    digest.update(f"{os.path.realpath(compiler)} {state.st_size} {state.st_mtime_ns}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(folder: Path, recipe: _Recipe, compiler: str) -> None:
    print(f"umbel: compiling the {recipe.name} kernels; this happens once", file=sys.stderr, flush=True)
    flags = [*FLAGS, *recipe.flags, f'-DUMBEL_ISA="{recipe.name}"']
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = sorted(SOURCES.glob(recipe.pattern))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(
                pool.map(
                    lambda pair: _compile([compiler, *flags, "-c", str(pair[0]), "-o", str(pair[1])]),
                    zip(sources, objects, strict=True),
                )
            )
        _compile([compiler, *flags, *map(str, objects), "-o", str(folder / LIBRARY)])
    try:
        _run([sys.executable, "-c", recipe.check, str(folder / LIBRARY)], CHECK_SECONDS)
    except _Failed as error:
        raise WrongKernels(f"the {recipe.name} kernels fail their self-check: {error}") from error
    (folder / SEAL).write_bytes(msgspec.json.encode(_seal((folder / LIBRARY).read_bytes())))


class _Failed(Exception):
    """A command failed; the message is the line that says why."""


def _compile(command: list[str]) -> None:
    try:
        _run(command, COMPILE_SECONDS)
    except _Failed as error:
        raise NoKernels(f"the compiler failed: {error}") from error


def _run(command: list[str], seconds: float) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        status = f"status {error.returncode}"
        raise _Failed(next((line for line in lines if "error" in line), lines[-1] if lines else status)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Failed(str(error)) from error
