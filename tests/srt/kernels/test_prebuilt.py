"""Libraries that a wheel carries: which of them are used, and what is said where they are not."""

import ctypes
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from umbel.lang.errors import ParameterError
from umbel.srt import doctor
from umbel.srt.doctor import State
from umbel.srt.kernels.cpu import library
from umbel.srt.kernels.cpu.library import (
    HOST,
    LIBRARY,
    PREBUILT_FOR,
    SEAL,
    Isa,
    NoKernels,
    WrongKernels,
    choose_isa,
    compiler_of_prebuilt,
    host_library_path,
    recipe_for,
    seal_prebuilt,
    unfit_prebuilt,
)

BUILDER = "g++ (made up) 1.2.3"


@pytest.fixture(scope="module")
def compiled() -> bytes:
    return host_library_path({**os.environ, "UMBEL_KERNELS": "compiled"}).read_bytes()


@pytest.fixture
def prebuilt(compiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prebuilt libraries of an installation that has the host's alone."""
    folder = tmp_path / "prebuilt"
    (folder / HOST.name).mkdir(parents=True)
    (folder / HOST.name / LIBRARY).write_bytes(compiled)
    seal = seal_prebuilt(compiled, HOST, machine=platform.machine(), compiler=BUILDER)
    (folder / HOST.name / SEAL).write_bytes(seal)
    monkeypatch.setattr(library, "PREBUILT", folder)
    return folder


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a compiler, with an empty cache."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "UMBEL_CACHE": str(tmp_path / "cache")}


def test_a_prebuilt_library_needs_no_compiler(prebuilt: Path, bare: dict[str, str]) -> None:
    assert host_library_path(bare) == prebuilt / HOST.name / LIBRARY
    assert host_library_path({**bare, "UMBEL_KERNELS": "prebuilt"}) == prebuilt / HOST.name / LIBRARY


def test_it_is_checked_once_in_a_process_of_its_own(
    prebuilt: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []
    monkeypatch.setattr(library, "_check", lambda recipe, path: checks.append((recipe.name, path)))
    host_library_path(bare)
    host_library_path(bare)
    assert checks == [("host", prebuilt / HOST.name / LIBRARY)]
    (Path(bare["UMBEL_CACHE"]) / "kernels").chmod(0o777)  # others could say that it passed
    host_library_path(bare)
    (Path(bare["PATH"]) / "file").touch()
    host_library_path({**bare, "UMBEL_CACHE": str(Path(bare["PATH"]) / "file")})  # no folder to remember it in
    assert len(checks) == 3


def test_one_that_fails_its_check_is_not_used(
    prebuilt: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the same library compiled: narrower ones are tried."""
    dying = library.Recipe(HOST.name, HOST.patterns, HOST.flags, "import os; os.kill(os.getpid(), 4)")
    monkeypatch.setattr(library, "HOST", dying)
    for _ in range(2):
        with pytest.raises(WrongKernels, match="the host kernels fail their self-check: status -4"):
            host_library_path(bare)


def test_a_library_of_other_sources_is_left_out(
    prebuilt: Path, bare: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Path(shutil.copytree(library.SOURCES, tmp_path / "sources"))
    monkeypatch.setattr(library, "SOURCES", sources)
    assert unfit_prebuilt(HOST) == ""
    (sources / "trie_walk.cpp").write_bytes((sources / "trie_walk.cpp").read_bytes() + b"// changed\n")
    with pytest.raises(NoKernels, match=r"install one .*; the prebuilt host kernels were built from other sources"):
        host_library_path(bare)
    with pytest.raises(NoKernels, match=r"UMBEL_KERNELS=prebuilt: .* other sources; install a wheel that has them"):
        host_library_path({**bare, "UMBEL_KERNELS": "prebuilt"})


def damage(folder: Path) -> None:
    (folder / LIBRARY).write_bytes((folder / LIBRARY).read_bytes()[:-1] + b"?")


def cut(folder: Path) -> None:
    (folder / LIBRARY).write_bytes((folder / LIBRARY).read_bytes()[:-1])


def for_another_machine(folder: Path) -> None:
    content = (folder / LIBRARY).read_bytes()
    (folder / SEAL).write_bytes(seal_prebuilt(content, HOST, machine="sparc64", compiler=BUILDER))


def spoil_the_seal(folder: Path) -> None:
    (folder / SEAL).write_bytes(b"{}")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, "the prebuilt host kernels are damaged"),
        (cut, "the prebuilt host kernels are damaged"),
        (for_another_machine, f"the prebuilt host kernels are for sparc64, and this is {platform.machine()}"),
        (spoil_the_seal, "the prebuilt host kernels cannot be read: Object missing required field"),
        (shutil.rmtree, "the prebuilt host kernels are not in this installation"),
    ],
)
def test_a_library_that_does_not_fit_is_left_out(spoil: Callable[[Path], None], reason: str, prebuilt: Path) -> None:
    spoil(prebuilt / HOST.name)
    assert unfit_prebuilt(HOST).startswith(reason)


def test_compiled_libraries_may_be_asked_for(prebuilt: Path, bare: dict[str, str]) -> None:
    with pytest.raises(NoKernels, match="there is no C\\+\\+ compiler"):
        host_library_path({**bare, "UMBEL_KERNELS": "compiled"})
    with pytest.raises(ParameterError, match="UMBEL_KERNELS=yes: write prebuilt or compiled, or unset it"):
        host_library_path({**bare, "UMBEL_KERNELS": "yes"})


def test_a_checkout_says_nothing_of_prebuilt_libraries(
    bare: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "absent")
    with pytest.raises(NoKernels, match=r"apt-get install g\+\+\)$"):
        host_library_path(bare)


def test_the_seal_says_which_compiler_built_a_loaded_library(
    prebuilt: Path, bare: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ctypes.CDLL(str(host_library_path(bare)))
    assert compiler_of_prebuilt(loaded) == BUILDER
    monkeypatch.setattr(library, "PREBUILT", prebuilt.parent / "elsewhere")
    assert compiler_of_prebuilt(loaded) == ""


def test_wheels_have_a_library_for_every_cpu_of_their_machine() -> None:
    """Whatever a CPU lists, the instruction set that is chosen for it is one that its wheel has."""
    flags = [library._NEEDS[isa] for isa in library._WIDEST_FIRST]
    chosen = {choose_isa({}, frozenset(needed)) for needed in flags}
    assert chosen == {isa for isas in PREBUILT_FOR.values() for isa in isas} == set(Isa) - {Isa.AMX_EMULATED}


# --------------------------------------------------------------------------------------------------- umbel doctor


def test_doctor_needs_no_compiler_where_kernels_are_prebuilt(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (finding,) = doctor.compiler()
    assert (finding.state, finding.text) == (State.OK, "none, and none is needed: this wheel has prebuilt kernels")
    monkeypatch.setenv("UMBEL_KERNELS", "compiled")
    (finding,) = doctor.compiler()
    assert finding.state is State.NOTE


def test_doctor_says_which_kernels_are_used(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        _name = str(prebuilt / HOST.name / LIBRARY)

    monkeypatch.setattr(library, "load_library", Loaded)
    monkeypatch.setattr(library, "choose_isa", lambda: Isa.PORTABLE)
    monkeypatch.setattr(library, "isa_of", lambda loaded: Isa.PORTABLE)
    (finding,) = doctor.kernels()
    assert (finding.state, finding.text) == (State.OK, f"portable, prebuilt by {BUILDER}, in {prebuilt}")

    Loaded._name = "/cache/kernels/portable-0123/umbel-kernels.so"
    used, unused = doctor.kernels()
    assert used.text.startswith("portable, compiled here, in ")
    assert (unused.state, unused.text) == (State.NOTE, "the prebuilt portable kernels are not in this installation")

    content = (prebuilt / HOST.name / LIBRARY).read_bytes()
    (prebuilt / "portable").mkdir()
    (prebuilt / "portable" / LIBRARY).write_bytes(content)
    seal = seal_prebuilt(content, recipe_for(Isa.PORTABLE), machine=platform.machine(), compiler=BUILDER)
    (prebuilt / "portable" / SEAL).write_bytes(seal)
    *_, unused = doctor.kernels()
    assert unused.text == "UMBEL_KERNELS=compiled leaves the prebuilt kernels out"
