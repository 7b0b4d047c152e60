"""umbel in other environments than this one: on other Pythons, at both ends of each range, beside other packages.

Each environment is made anew with pip. All but one are without torch; tests that need the runtime are left out there.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "openai,anthropic,gemini,testing"
RUNTIME = "runtime,server,store,video,default-model,openai,anthropic,testing"
# What these tests import themselves; the runtime's own tests need torch.
TOOLS = ["pytest", "hypothesis", "psutil", "regex", "pydantic", "interegular", "outlines-core", "jsonschema", "pillow"]
TOOLS += ["llguidance", "transformers"]  # without torch: for grammars, and for templates to compare with
TOOLS += ["pandas", "polars", "pyarrow", "nbclient", "ipykernel"]  # for batches in frames, and programs in cells
ALL = ("tests/lang", "tests/fsm", "tests/interpreter", "tests/compiler")
# What other packages do in the runtime: grammars, files of models, media, HTTP.
ON_PACKAGES = ("tests/fsm/engines", "tests/srt/constraints", "tests/srt/tokenizer", "tests/srt/weights")
ON_PACKAGES += ("tests/srt/multimodal", "tests/server/test_command.py", "tests/server/test_kv_events.py")
ON_PACKAGES += ("tests/server/test_bodies.py", "tests/server/test_openapi.py", "tests/server/test_http.py")
# transformers before 5.23 is more than 1e-4 away from our native kernels on two of the first; other users, which the
# second one plays, cannot enter a folder of pytest's.
ON_PACKAGES += ("--ignore=tests/srt/weights/test_gguf_hybrids.py", "--ignore=tests/srt/weights/test_trust.py")
HOSTED = ("tests/interpreter/hosted", "tests/interpreter/fakes", "tests/interpreter/test_front_door.py")
_TORCH = re.compile(r"umbel\.srt|\boracle\b|chosen_backend")  # in a test that needs the runtime
_REQUIREMENT = re.compile(r"(?P<name>[\w-]+)>=(?P<lowest>[\d.]+)")
_TORCH_BUILD = re.compile(r"^TORCH \?= (torch==\S+)$", re.MULTILINE)


def interpreter_of(version: str) -> str:
    """A working Python of this version: on the PATH, or among those of pyenv. Skips the test where there is none."""
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for found in (shutil.which(f"python{version}"), *map(str, installed)):
        if found is not None and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return found
    pytest.skip(f"python{version} is not on this machine")


def requirements(extras: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(each for extra in extras.split(",") for each in optional[extra])]


def lowest(extras: str) -> list[str]:
    """The lower end of each range, as pip's constraints; of a package that is named twice, that of the later extra.

    torch keeps the build of the Makefile: another one would bring gigabytes of CUDA.
    """
    found = [each for each in map(_REQUIREMENT.match, requirements(extras)) if each is not None]
    ends = {each["name"]: each["lowest"] for each in found if each["name"] != "torch"}
    return [f"{name}=={end}.*" for name, end in ends.items()]


def environment(folder: Path, python: str, *more: str, extras: str = EXTRAS, limits: Iterable[str] = ()) -> Path:
    """Makes an environment with umbel and what its tests import. Returns its Python.

    umbel is built from a copy of the tracked files: setuptools would leave a folder in the checkout, and take what an
    earlier version left there.
    """
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    inside = folder / "venv" / "bin" / "python"
    (folder / "limits.txt").write_text("\n".join(limits))
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", folder / "limits.txt"]
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in names:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    subprocess.run([*pip, f"{folder / 'source'}[{extras}]", *TOOLS, *more], check=True)
    return inside


def passes(python: Path, *paths: str, torch: bool = False) -> None:
    """Runs tests of this checkout on the umbel of the environment. Fails with their summary."""
    tests = [] if torch else list(Path(ROOT, "tests").rglob("*.py"))
    needs_torch = [f"--ignore={path}" for path in tests if _TORCH.search(path.read_text())]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *needs_torch]
    command += ["-m", "not nightly and not model", *paths]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]


@pytest.mark.parametrize("version", PYTHONS)
def test_what_needs_no_torch_passes_on_every_python(version: str, tmp_path: Path) -> None:
    passes(environment(tmp_path, interpreter_of(version)), *ALL)


def test_hosted_models_work_at_the_lower_end_of_every_range(tmp_path: Path) -> None:
    passes(environment(tmp_path, sys.executable, limits=lowest(EXTRAS)), *HOSTED)


def test_the_runtime_works_at_the_lower_end_of_every_range(tmp_path: Path) -> None:
    built = _TORCH_BUILD.search((ROOT / "Makefile").read_text())
    assert built is not None
    python = environment(tmp_path, sys.executable, built[1], extras=RUNTIME, limits=lowest(RUNTIME))
    passes(python, *ON_PACKAGES, torch=True)


def test_hosted_models_work_with_the_newest_of_everything(tmp_path: Path) -> None:
    passes(environment(tmp_path, sys.executable), *HOSTED)


def test_it_lives_beside_dspy(tmp_path: Path) -> None:
    python = environment(tmp_path, sys.executable, "dspy")
    subprocess.run([python, "-m", "pip", "check"], check=True)
    subprocess.run([python, "-c", "import dspy, umbel; umbel.OpenAI('m', api_key='k'); umbel.Echo()"], check=True)
    passes(python, *HOSTED)
