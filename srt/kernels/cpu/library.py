"""Finds the library of the kernels for this CPU, prebuilt or compiled, and loads one per process.

    prebuilt/<isa>/umbel-kernels.so                  in a wheel of `make wheels`, for each instruction set of a machine
    <cache>/kernels/<isa>-<digest>/umbel-kernels.so  compiled by the system's compiler on first use

The instruction set is the widest of this CPU, or the one in UMBEL_CPU_ISA. A prebuilt library is taken if it belongs to
the sources next to it. UMBEL_KERNELS=compiled leaves prebuilt ones out, UMBEL_KERNELS=prebuilt compiles nothing. No
torch headers are needed, so a compilation takes seconds; its digest is of the sources, the flags and the compiler.

A library is checked in a process of its own before it is used: an instruction that this machine refuses costs the
kernels, never the runtime. Its length and digest lie next to it, and are compared whenever it is loaded: a damaged
library is compiled again, a compiled one that another user could have written is not loaded.

The trie walk is in it, and in a library of its own, <cache>/kernels/walk-<digest>, which runs on any CPU: with a GPU,
the host still makes masks, and needs no other kernel. Each family of kernels declares its own functions.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import msgspec

from ....lang.errors import ModelError, ParameterError
from ...core.cache_folder import build_once, cache_folder, read_trusted, trusted
from ...core.machine import usable_cores

_log = logging.getLogger("umbel.engine")

SOURCES = Path(__file__).parent / "source"
LIBRARY = "umbel-kernels.so"
SEAL = "umbel-kernels.json"  # length and digest of the library
PREBUILT = Path(__file__).parent / "prebuilt"  # there in wheels with prebuilt libraries
PRECOMPILED = "precompiled.h"
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi")
COMPILE_SECONDS = 300.0
CHECK_SECONDS = 60.0
PROGRESS_SECONDS = 5.0

_CHECK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.umbel_self_check())
"""
_CHECK_HOST = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.umbel_walk_trie, library.umbel_plan_attention
"""


class Isa(Enum):
    """Instruction sets, slowest first. `AMX_EMULATED` runs the tile code of AMX on any CPU with AVX2, for tests."""

    PORTABLE = "portable"
    NEON = "neon"  # ARM, with dot products of bytes
    NEON_I8MM = "neon-i8mm"  # also of unsigned with signed bytes
    AVX2 = "avx2"
    AVX_VNNI = "avx-vnni"  # AVX2 with dot products of bytes
    AVX512 = "avx512"
    AMX = "amx"
    AMX_EMULATED = "amx-emulated"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        return _FLAGS[self]


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")  # as /proc/cpuinfo spells them
_NEEDS: dict[Isa, tuple[str, ...]] = {
    Isa.PORTABLE: (),
    Isa.NEON: ("asimd", "asimddp"),
    Isa.NEON_I8MM: ("asimd", "asimddp", "i8mm"),
    Isa.AVX2: ("avx2", "fma", "f16c"),
    Isa.AVX_VNNI: ("avx2", "fma", "f16c", "avx_vnni"),
    Isa.AVX512: ("avx2", "fma", "f16c", *_AVX512),
    Isa.AMX: ("avx2", "fma", "f16c", *_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
}
# What a wheel for a machine has, as platform.machine() spells it.
PREBUILT_FOR: dict[str, tuple[Isa, ...]] = {
    "x86_64": (Isa.PORTABLE, Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512, Isa.AMX),
    "aarch64": (Isa.PORTABLE, Isa.NEON, Isa.NEON_I8MM),
}
_WIDEST_FIRST = (Isa.AMX, Isa.AVX512, Isa.AVX_VNNI, Isa.AVX2, Isa.NEON_I8MM, Isa.NEON, Isa.PORTABLE)
_VECTOR_512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
_FLAGS: dict[Isa, tuple[str, ...]] = {
    Isa.PORTABLE: (),
    Isa.NEON: ("-march=armv8.2-a+dotprod",),
    Isa.NEON_I8MM: ("-march=armv8.2-a+dotprod+i8mm",),
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c"),
    Isa.AVX_VNNI: ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    Isa.AVX512: ("-mavx2", "-mfma", "-mf16c", *_VECTOR_512),
    Isa.AMX: (
        *("-mavx2", "-mfma", "-mf16c", *_VECTOR_512, "-mavx512bf16"),
        *("-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DUMBEL_AMX"),
    ),
    Isa.AMX_EMULATED: ("-mavx2", "-mfma", "-mf16c", "-DUMBEL_AMX", "-DUMBEL_AMX_EMULATED"),
}


def cpu_flags() -> frozenset[str]:
    """Returns the features that the operating system lists; empty if it lists none (not Linux).

    An emulator may show the list of the machine that it runs on, which is not believed.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    name = "Features" if platform.machine() in ("aarch64", "arm64") else "flags"
    for line in text.splitlines():
        if line.startswith(name):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def usable(isa: Isa, flags: frozenset[str]) -> bool:
    """Returns whether a CPU with these features runs it. The emulation needs AVX2."""
    return flags.issuperset(_NEEDS[Isa.AVX2 if isa is Isa.AMX_EMULATED else isa])


def narrower(isa: Isa, flags: frozenset[str] | None = None) -> Isa | None:
    """Returns the next one to try when `isa` does not work here; None after the last."""
    here = cpu_flags() if flags is None else flags
    below = _WIDEST_FIRST[_WIDEST_FIRST.index(isa) + 1 :] if isa in _WIDEST_FIRST else ()
    return next((other for other in below if usable(other, here)), None)


def choose_isa(environment: Mapping[str, str] | None = None, flags: frozenset[str] | None = None) -> Isa:
    """Returns `$UMBEL_CPU_ISA`, or the fastest that this CPU runs.

    Raises:
        ParameterError: the variable names none, or one that this CPU does not run.
    """
    here = cpu_flags() if flags is None else flags
    asked = (os.environ if environment is None else environment).get("UMBEL_CPU_ISA", "")
    if asked:
        names = ", ".join(isa.value for isa in Isa if usable(isa, here))
        if asked not in {isa.value for isa in Isa}:
            raise ParameterError(f"UMBEL_CPU_ISA={asked}: write one of {names}, or unset it")
        if not usable(Isa(asked), here):
            raise ParameterError(f"UMBEL_CPU_ISA={asked}: this CPU ({platform.machine()}) does not run it; unset it")
        return Isa(asked)
    return next(isa for isa in _WIDEST_FIRST if usable(isa, here))


class Kernels(Enum):
    """Values of UMBEL_KERNELS: which libraries may be used."""

    ANY = ""  # a prebuilt one that fits, or else one that is compiled here
    PREBUILT = "prebuilt"
    COMPILED = "compiled"


def allowed_kernels(environment: Mapping[str, str] | None = None) -> Kernels:
    """Returns the libraries that `$UMBEL_KERNELS` allows.

    Raises:
        ParameterError: the variable has another value.
    """
    asked = (os.environ if environment is None else environment).get("UMBEL_KERNELS", "")
    if asked not in {each.value for each in Kernels}:
        raise ParameterError(f"UMBEL_KERNELS={asked}: write prebuilt or compiled, or unset it to allow both")
    return Kernels(asked)


class NoKernels(Exception):
    """The kernels are not available here; the message says why and what would help."""


class WrongKernels(NoKernels):
    """They compile, but fail their self-check on this machine."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One library.

    Attributes:
        name: of its folder, and of its kernels in messages.
        patterns: of its source files.
        flags: added to the common ones.
        check: Python that runs in a process of its own, with the library's path; it fails when the library is wrong.
    """

    name: str
    patterns: tuple[str, ...]
    flags: tuple[str, ...]
    check: str


HOST = Recipe("host", ("trie_walk.cpp", "automaton*.cpp", "attention_plan.cpp"), (), _CHECK_HOST)


def recipe_for(isa: Isa) -> Recipe:
    """Returns the recipe of the library with all kernels for an instruction set."""
    return Recipe(isa.value, ("*.cpp",), isa.compiler_flags, _CHECK)


def library_path(isa: Isa, environment: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the library for `isa`: the prebuilt one, or one that is compiled now unless it is cached.

    Raises:
        NoKernels: none is prebuilt, and there is no compiler, it fails, or the cache folder cannot be written.
        WrongKernels: the library fails its self-check on this machine.
        ParameterError: `UMBEL_KERNELS` has a value that is none of `Kernels`.
    """
    return _path_of(recipe_for(isa), environment)


def host_library_path(environment: Mapping[str, str] | None = None) -> Path:
    """Returns the path of the library of `load_host_library`, prebuilt, cached, or compiled in seconds.

    Raises:
        NoKernels: as `library_path`.
    """
    return _path_of(HOST, environment)


class _Seal(msgspec.Struct, frozen=True):
    """Length and digest of a library, in a file next to it."""

    length: int  # bytes
    sha256: str


def _seal(library: bytes) -> _Seal:
    return _Seal(len(library), hashlib.sha256(library).hexdigest())


def _path_of(recipe: Recipe, environment: Mapping[str, str] | None) -> Path:
    allowed = allowed_kernels(environment)
    if allowed is Kernels.COMPILED:
        return _compiled_path(recipe, environment)
    unfit = unfit_prebuilt(recipe)
    if not unfit:
        return _checked_prebuilt(recipe, environment)
    if allowed is Kernels.PREBUILT:
        raise NoKernels(f"UMBEL_KERNELS=prebuilt: {unfit}; install a wheel that has them, or unset UMBEL_KERNELS")
    try:
        return _compiled_path(recipe, environment)
    except WrongKernels:
        raise
    except NoKernels as error:
        raise NoKernels(f"{error}; {unfit}" if PREBUILT.is_dir() else str(error)) from error


# ---------------------------------------------------------------------------------------------- prebuilt libraries
# They are as trusted as the Python files next to them, which were loaded without a look at their owners.


class PrebuiltSeal(_Seal, frozen=True):
    """Seal of a library in a wheel.

    Attributes:
        sources: digest of the sources and flags that it was built from.
        machine: as platform.machine() spells it.
        compiler: its first line of --version.
    """

    sources: str
    machine: str
    compiler: str


def seal_prebuilt(library: bytes, recipe: Recipe, *, machine: str, compiler: str) -> bytes:
    """Returns the content of the seal that lies next to a prebuilt library.

    Args:
        machine: as platform.machine() spells it.
        compiler: its first line of --version.
    """
    seal = _seal(library)
    return msgspec.json.encode(PrebuiltSeal(seal.length, seal.sha256, _digest(recipe), machine, compiler))


def unfit_prebuilt(recipe: Recipe) -> str:
    """Returns why the prebuilt library of a recipe is not used; "" where it is there, undamaged, and of our sources."""
    name = f"the prebuilt {recipe.name} kernels"
    try:
        seal = msgspec.json.decode((PREBUILT / recipe.name / SEAL).read_bytes(), type=PrebuiltSeal)
        library = (PREBUILT / recipe.name / LIBRARY).read_bytes()
    except FileNotFoundError:
        return f"{name} are not in this installation"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {error}"
    if seal.machine != platform.machine():
        return f"{name} are for {seal.machine}, and this is {platform.machine()}"
    if seal.sources != _digest(recipe):
        return f"{name} were built from other sources"
    whole = _seal(library)
    return "" if (seal.length, seal.sha256) == (whole.length, whole.sha256) else f"{name} are damaged"


def _checked_prebuilt(recipe: Recipe, environment: Mapping[str, str] | None) -> Path:
    """Runs the self-check of a prebuilt library unless a folder in the cache says that it passed here."""
    library = PREBUILT / recipe.name / LIBRARY
    seal = msgspec.json.decode((PREBUILT / recipe.name / SEAL).read_bytes(), type=PrebuiltSeal)
    passed = cache_folder(environment) / "kernels" / f"{recipe.name}-prebuilt-{seal.sha256[:16]}"
    try:
        build_once(passed, lambda _: _check(recipe, library), complete=Path.is_dir)
    except (ModelError, OSError):  # a cache folder that cannot be written, or that others can: it is checked each time
        _check(recipe, library)
    return library


def compiler_of_prebuilt(library: ctypes.CDLL) -> str:
    """Returns the compiler that built a loaded library, for one of a wheel; "" for one that was compiled here."""
    path = Path(library._name)
    if not path.is_relative_to(PREBUILT):
        return ""
    return msgspec.json.decode((path.parent / SEAL).read_bytes(), type=PrebuiltSeal).compiler


# ----------------------------------------------------------------------------------------------- compiled libraries


def _compiled_path(recipe: Recipe, environment: Mapping[str, str] | None) -> Path:
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


def _digest(recipe: Recipe, compiler: str | None = None) -> str:
    """Hashes everything that determines the library. The compiler counts by path, size and time: running it is slow.

    Args:
        compiler: None for the sources and flags alone.
    """
    digest = hashlib.sha256(repr((recipe.name, recipe.flags, FLAGS)).encode())
    if compiler is not None:
        state = os.stat(compiler)
        digest.update(f"{os.path.realpath(compiler)} {state.st_size} {state.st_mtime_ns}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(folder: Path, recipe: Recipe, compiler: str) -> None:
    print(f"umbel: compiling native code, the {recipe.name} kernels; this happens once", file=sys.stderr, flush=True)
    compile_library(folder / LIBRARY, recipe, compiler)
    _check(recipe, folder / LIBRARY)
    (folder / SEAL).write_bytes(msgspec.json.encode(_seal((folder / LIBRARY).read_bytes())))


def compile_library(library: Path, recipe: Recipe, compiler: str, link_flags: Sequence[str] = ()) -> None:
    """Compiles the sources of a recipe, several at once, and links them.

    Args:
        library: the file to write; its folder exists.
        link_flags: added to the command that links.

    Raises:
        NoKernels: the compiler fails; the message has its line about the error.
    """
    flags = [*FLAGS, *recipe.flags, f'-DUMBEL_ISA="{recipe.name}"']
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        sources = sorted(path for pattern in recipe.patterns for path in SOURCES.glob(pattern))
        if len(sources) > 1 and not _is_clang(compiler):
            flags += _precompiled(Path(scratch), [compiler, *flags])
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
            running = [pool.submit(_compile, command) for command in commands]
            try:
                _follow(running, recipe.name)
            except NoKernels:
                for future in running:
                    future.cancel()  # files that have not begun
                raise
        _compile([compiler, *flags, *map(str, objects), *link_flags, "-o", str(library)])


def _follow(running: Sequence[Future[None]], name: str) -> None:
    """Waits for the files of a library, and says every few seconds how many are compiled.

    Raises:
        NoKernels: the compiler failed for one.
    """
    left = set(running)
    while left:
        ended, left = wait(left, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
        for future in ended:
            future.result()
        if left:
            text = f"umbel: {len(running) - len(left)} of {len(running)} files of the {name} kernels are compiled"
            print(text, file=sys.stderr, flush=True)


def _check(recipe: Recipe, library: Path) -> None:
    try:
        _run([sys.executable, "-c", recipe.check, str(library)], CHECK_SECONDS)
    except _Failed as error:
        raise WrongKernels(f"the {recipe.name} kernels fail their self-check: {error}") from error


def _is_clang(compiler: str) -> bool:
    """Returns whether a compiler is clang, by any name: clang 14 refuses system headers after precompiled ones."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=CHECK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "clang" in done.stdout


def _precompiled(scratch: Path, command: list[str]) -> list[str]:
    """Compiles the system headers that most sources include, and returns the flags that make sources use them.

    g++ reads `NAME.gch` in place of the header NAME, and the header itself where the flags do not fit.
    """
    header = Path(shutil.copy(SOURCES / PRECOMPILED, scratch))
    _compile([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return ["-include", str(header)]


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


def load_library(isa: Isa | None = None) -> ctypes.CDLL:
    """Loads the kernels for `isa`, or else for the fastest instruction set that works on this CPU.

    They are prebuilt, or compiled on first use.

    Raises:
        NoKernels: they are not available here. It is not tried again in this process.
        ParameterError: `UMBEL_CPU_ISA` names an instruction set that this CPU does not run, or `UMBEL_KERNELS` has a
            value that is none of `Kernels`.
    """
    return _loaded(_kernels(isa))


def load_host_library() -> ctypes.CDLL:
    """Loads the library of what the host does for any device: trie walk, automata and attention plans.

    Raises:
        NoKernels: it is not available here. It is not tried again in this process.
    """
    return _loaded(_host())


def _loaded(found: ctypes.CDLL | str) -> ctypes.CDLL:
    if isinstance(found, str):
        raise NoKernels(found)
    return found


# Both cache the reason of a failure as text: a cached exception would keep its frames alive, and with them a model that
# was being loaded.


@cache
def _kernels(isa: Isa | None) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(library_path(isa)) if isa else _widest())
    except NoKernels as error:
        return str(error)
    library.umbel_set_threads.argtypes = [ctypes.c_int]
    library.umbel_set_threads.restype = None
    library.umbel_threads.restype = ctypes.c_int
    library.umbel_isa.restype = ctypes.c_char_p
    return library


@cache
def _host() -> ctypes.CDLL | str:
    try:
        return ctypes.CDLL(str(host_library_path()))
    except NoKernels as error:
        return str(error)


def isa_of(library: ctypes.CDLL) -> Isa:
    """Returns the instruction set that the library was compiled for."""
    return Isa(library.umbel_isa().decode())


def _widest() -> str:
    """Returns the path of the widest library that passes its self-check: a listed CPU feature may still not work."""
    isa = choose_isa()
    while True:
        try:
            return str(library_path(isa))
        except WrongKernels as error:
            next_isa = narrower(isa)
            if next_isa is None:
                raise
            _log.warning("%s; the %s kernels are taken", error, next_isa.value)
            isa = next_isa
