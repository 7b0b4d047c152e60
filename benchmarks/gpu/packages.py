"""What is installed here, and what can be installed from a folder of wheels where there is no network.

Machines with a GPU often have torch and Triton and little else. Whatever of `WHEELS` is missing is installed from
`wheels/` into a folder of its own, `wheels/installed/python3.12` or the like, so that nothing of the machine changes.

Only the standard library is imported here: this runs before anything else is looked for.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "wheels"

# Import name → name on the package index. What the language, the runtime and the benchmark need beside torch, Triton
# and numpy, with all that these need themselves.
WHEELS = {
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "jinja2": "jinja2",
    "markupsafe": "markupsafe",
    "psutil": "psutil",
    "regex": "regex",
    "jsonschema": "jsonschema",
    "jsonschema_specifications": "jsonschema-specifications",
    "referencing": "referencing",
    "rpds": "rpds-py",
    "attrs": "attrs",
    "typing_extensions": "typing-extensions",
    "pytest": "pytest",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
}
KERNELS = ("torch", "triton", "numpy")
SAMPLING = ("msgspec",)
ENGINE = ("msgspec", "zmq", "jinja2", "psutil", "regex", "jsonschema", "referencing")
RUNTIME = (*ENGINE, "tokenizers", "safetensors")  # in two processes, from a folder
TESTS = ("pytest", "hypothesis", "msgspec")
# Of wheels that are made for Linux: pip matches the number of a platform's name exactly.
_PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)), "manylinux2014_x86_64"]


def missing(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in names if not is_here(name)]


def is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def find_umbel() -> None:
    """Makes `import umbel` and `import benchmarks` work from the checkout, here and in processes that are started."""
    paths = [str(ROOT)] if is_here("umbel") else [str(ROOT), str(ROOT / ".types")]
    _add(path for path in paths if path not in sys.path)


def install(folder: Path = FOLDER) -> list[str]:
    """Installs what is missing and lies in the folder; the names, as they are imported.

    Raises:
        subprocess.CalledProcessError: pip cannot, and has said why on standard error.
    """
    target = folder / "installed" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if target.is_dir():
        _add([str(target)])
    wanted = {name: wheel for name in missing(WHEELS) if (wheel := _wheel(folder, WHEELS[name])) is not None}
    if wanted:
        _pip(
            "install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(target), *wanted.values()
        )
        if str(target) not in sys.path:
            _add([str(target)])
        importlib.invalidate_caches()
    return list(wanted)


def download(version: str, folder: Path = FOLDER) -> int:
    """Wheels of all of `WHEELS` for Linux on x86-64 and a Python such as "3.12"; their size in bytes.

    Raises:
        subprocess.CalledProcessError: pip cannot, and has said why on standard error.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):  # two versions of one package could not be told apart
        old.unlink()
    python = ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    _pip("download", "--no-deps", "--dest", str(folder), *python, *platforms, *WHEELS.values())
    return sum(path.stat().st_size for path in folder.glob("*.whl"))


def left_out(group: str, needed: Iterable[str]) -> str | None:
    """Why a group cannot run here, and what to do about it; None when it can."""
    absent = missing(needed)
    if not absent:
        return None
    names = [WHEELS.get(name, name) for name in absent]
    are = "is" if len(names) == 1 else "are"
    remedy = "run `make gpu-wheels` where there is a network, and carry the folder wheels/ here"
    if not set(absent) <= set(WHEELS):
        remedy = "install it"
    return f"{group} left out: {', '.join(names)} {are} not installed; {remedy}"


def environment(**more: str) -> Mapping[str, str]:
    """For a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def _wheel(folder: Path, name: str) -> str | None:
    """The file of a package."""
    prefix = name.replace("-", "_") + "-"
    found = sorted(path for path in folder.glob("*.whl") if path.name.lower().startswith(prefix))
    return str(found[-1]) if found else None


def _pip(verb: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def _add(paths: Iterable[str]) -> None:
    sys.path[:0] = list(paths)


if __name__ == "__main__":
    size = download(sys.argv[1] if len(sys.argv) > 1 else "3.12")
    print(f"{len(list(FOLDER.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB in {FOLDER.name}/")
