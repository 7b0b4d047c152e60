"""Where the kernels cannot be had, torch computes and says why: no compiler, no cache folder, a CPU too old."""

import ctypes
import os
import stat
import subprocess
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import pytest
from umbel.lang.errors import ParameterError
from umbel.srt.kernels.cpu import library
from umbel.srt.kernels.cpu import library as kernel_library
from umbel.srt.kernels.cpu.library import (
    Isa,
    NoKernels,
    WrongKernels,
    choose_isa,
    find_compiler,
    host_library_path,
    isa_of,
    library_path,
    load_host_library,
    load_library,
    narrower,
    usable,
)
from umbel.srt.runners import build as runner_build
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.runners.torch_runner import TorchRunner

from ..models.reference import reference_model, tensors_of

ZEN_3 = frozenset({"avx2", "fma", "f16c", "sse2"})
ICE_LAKE = ZEN_3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
SAPPHIRE_RAPIDS = ICE_LAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (frozenset(), Isa.PORTABLE),
        (ZEN_3, Isa.AVX2),
        (ZEN_3 | {"avx512f"}, Isa.AVX2),
        (ZEN_3 | {"avx_vnni"}, Isa.AVX_VNNI),
        (ICE_LAKE, Isa.AVX512),
        (SAPPHIRE_RAPIDS, Isa.AMX),
    ],
)
def test_the_widest_instruction_set_of_the_cpu_is_taken(flags: frozenset[str], isa: Isa) -> None:
    assert choose_isa({}, flags) is isa


def test_an_emulator_that_shows_the_list_of_its_machine_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """qemu-aarch64 shows the features of the x86 processor that it runs on."""
    lists = {"x86_64": "flags\t\t: avx2 fma f16c", "aarch64": "Features\t: asimd asimddp"}
    for shown in lists:
        for machine in lists:
            monkeypatch.setattr(Path, "read_text", lambda *_, shown=shown, **__: f"processor : 0\n{lists[shown]}\n")
            monkeypatch.setattr(library.platform, "machine", lambda machine=machine: machine)
            best = choose_isa({}, library.cpu_flags())
            assert best is ({"x86_64": Isa.AVX2, "aarch64": Isa.NEON}[machine] if shown == machine else Isa.PORTABLE)


def test_another_instruction_set_may_be_asked_for_when_the_cpu_has_it() -> None:
    assert choose_isa({"UMBEL_CPU_ISA": "portable"}, SAPPHIRE_RAPIDS) is Isa.PORTABLE
    assert choose_isa({"UMBEL_CPU_ISA": "amx-emulated"}, ZEN_3) is Isa.AMX_EMULATED
    with pytest.raises(ParameterError, match=r"UMBEL_CPU_ISA=avx512: this CPU .* does not run it"):
        choose_isa({"UMBEL_CPU_ISA": "avx512"}, ZEN_3)
    with pytest.raises(ParameterError, match="UMBEL_CPU_ISA=sse9: write one of portable, avx2"):
        choose_isa({"UMBEL_CPU_ISA": "sse9"}, ZEN_3)


def test_no_compiler_is_said_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler; install one"):
        find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(NoKernels, match="CXX=absent is not a program"):
        find_compiler({"PATH": str(tmp_path), "CXX": "absent"})


def script(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    compiler = script(tmp_path, "echo 'kernel.cpp:1: error: no such thing' >&2; exit 1")
    environment = {"UMBEL_CACHE": str(tmp_path / "cache"), "CXX": compiler, "PATH": os.environ["PATH"]}
    with pytest.raises(NoKernels, match=r"the compiler failed: kernel\.cpp:1: error: no such thing"):
        library_path(Isa.PORTABLE, environment)
    assert not [path for path in (tmp_path / "cache" / "kernels").iterdir() if path.is_dir()]


def test_a_library_that_fails_its_check_never_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that refuses an instruction: the process that tries it dies."""
    monkeypatch.setattr(library, "_CHECK", "import os; os.kill(os.getpid(), 4)")
    monkeypatch.chdir(tmp_path)  # asked for its --version, the script makes a file of that name
    compiler = script(tmp_path, 'for last; do :; done; : > "$last"')  # makes empty files of the right names
    environment = {"UMBEL_CACHE": str(tmp_path / "cache"), "CXX": compiler, "PATH": os.environ["PATH"]}
    with pytest.raises(WrongKernels, match="the portable kernels fail their self-check: status -4"):
        library_path(Isa.PORTABLE, environment)
    assert not [path for path in (tmp_path / "cache" / "kernels").iterdir() if path.is_dir()]


def test_kernels_that_fail_their_check_give_way_to_narrower_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that lists an instruction set and gets it wrong."""

    def only_portable(isa: Isa) -> Path:
        if isa is not Isa.PORTABLE:
            raise WrongKernels(f"the {isa.value} kernels fail their self-check: status 4")
        return library_path(isa)

    monkeypatch.setattr(kernel_library, "library_path", only_portable)
    monkeypatch.setattr(kernel_library, "choose_isa", lambda: Isa.AVX2)
    fresh = kernel_library._kernels.__wrapped__(None)
    assert not isinstance(fresh, str)
    assert isa_of(fresh) is Isa.PORTABLE
    assert "the avx2 kernels fail their self-check: status 4; the portable kernels are taken" in caplog.text


def test_kernels_that_cannot_be_had_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*_: object) -> Path:
        tries.append(1)
        raise NoKernels("the compiler failed")

    monkeypatch.setattr(kernel_library, "library_path", refuse)
    monkeypatch.setattr(kernel_library, "host_library_path", refuse)
    monkeypatch.setattr(kernel_library, "_kernels", cache(kernel_library._kernels.__wrapped__))
    monkeypatch.setattr(kernel_library, "_host", cache(kernel_library._host.__wrapped__))
    for load in (load_library, load_library, load_host_library, load_host_library):
        with pytest.raises(NoKernels, match="the compiler failed"):
            load()
    assert len(tries) == 2


@pytest.mark.parametrize("compiled", ["before", pytest.param("now", marks=pytest.mark.nightly)])
def test_the_walk_is_compiled_without_the_other_kernels(compiled: str, tmp_path: Path) -> None:
    """Other tests share the library in the user's cache; compiling it takes seconds."""
    environment = {**os.environ, "UMBEL_CACHE": str(tmp_path / "cache")}
    library = ctypes.CDLL(str(host_library_path(environment if compiled == "now" else None)))
    assert hasattr(library, "umbel_walk_trie")
    assert not hasattr(library, "umbel_linear")


def test_a_long_compilation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PROGRESS_SECONDS", 0.0)
    first, second = Future[None](), Future[None]()
    first.set_result(None)

    def told(text: str, **_: object) -> None:  # the second file ends once it was told of the first
        said.append(text)
        second.set_result(None)

    said: list[str] = []
    monkeypatch.setattr("builtins.print", told)
    library._follow([first, second], "avx2")
    assert said == ["umbel: 1 of 2 files of the avx2 kernels are compiled"]


def test_sources_are_compiled_with_the_precompiled_headers(tmp_path: Path) -> None:
    command = [find_compiler(), *library.FLAGS]
    command += library._precompiled(tmp_path, command)
    (tmp_path / library.PRECOMPILED).write_text("#error the header is read again")
    source = str(library.SOURCES / "memory.cpp")
    subprocess.run([*command, "-c", source, "-o", str(tmp_path / "memory.o")], check=True)


def test_clang_is_known_by_what_it_says(tmp_path: Path) -> None:
    """macOS calls it g++, too. It compiles without precompiled headers."""
    assert library._is_clang(script(tmp_path, "echo Apple clang version 17.0.0"))
    assert not library._is_clang(script(tmp_path, "echo 'g++ (Debian 12.2.0) 12.2.0'"))
    assert not library._is_clang(str(tmp_path / "absent"))


def test_narrower_instruction_sets_are_those_of_the_cpu() -> None:
    assert narrower(Isa.AMX, SAPPHIRE_RAPIDS) is Isa.AVX512
    assert narrower(Isa.AMX, ZEN_3) is Isa.AVX2
    assert narrower(Isa.AVX2, ZEN_3) is Isa.PORTABLE
    assert narrower(Isa.PORTABLE, ZEN_3) is None
    assert narrower(Isa.AMX_EMULATED, ZEN_3) is None


def test_a_cache_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    environment = {**os.environ, "UMBEL_CACHE": str(tmp_path / "file")}
    with pytest.raises(NoKernels, match=r"cannot be made .* set UMBEL_CACHE"):
        library_path(Isa.PORTABLE, environment)


def test_what_runs_here_is_what_the_cpu_says() -> None:
    assert usable(Isa.PORTABLE, frozenset())
    assert not usable(Isa.AMX_EMULATED, frozenset())
    assert not usable(Isa.AMX, ICE_LAKE)


REFERENCE = reference_model("gemma3_text", head_dim=16)
CONFIG, TENSORS = REFERENCE.config.to_dict(), tensors_of(REFERENCE)


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NoKernels("there is no C++ compiler; install one")

    monkeypatch.setattr(runner_build, "load_library", refuse)


@pytest.mark.usefixtures("_no_kernels")
def test_without_kernels_torch_computes_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    runner = build_runner(CONFIG, TENSORS, num_slots=50, dtype="float32")
    assert isinstance(runner, TorchRunner)
    assert "torch computes, not the native kernels: there is no C++ compiler; install one" in caplog.text


@pytest.mark.usefixtures("_no_kernels")
def test_kernels_that_were_asked_for_and_cannot_be_had_are_an_error() -> None:
    with pytest.raises(ParameterError, match=r'kernels="native": there is no C\+\+ compiler'):
        build_runner(CONFIG, TENSORS, num_slots=50, dtype="float32", kernels="native")
    with pytest.raises(ParameterError, match="weights='int8': torch computes, with weights of the dtype"):
        build_runner(CONFIG, TENSORS, num_slots=50, dtype="float32", weights="int8")


def test_a_model_that_the_kernels_do_not_take_runs_in_torch(caplog: pytest.LogCaptureFixture) -> None:
    odd = reference_model("llama", head_dim=20)
    runner = build_runner(odd.config.to_dict(), tensors_of(odd), num_slots=50, dtype="float32")
    assert isinstance(runner, TorchRunner)
    assert "head_dim=20 is no multiple of 16" in caplog.text


def test_torch_refuses_weights_that_it_does_not_compute_with() -> None:
    with pytest.raises(ParameterError, match="weights='int8': torch computes"):
        build_runner(CONFIG, TENSORS, num_slots=50, dtype="float32", kernels="torch", weights="int8")


def test_every_format_of_weights_runs() -> None:
    for weights, form in (("float32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("auto", "f32")):
        runner = build_runner(CONFIG, TENSORS, num_slots=50, dtype="float32", weights=weights)  # type: ignore[arg-type]
        assert isinstance(runner, CpuRunner)
        assert runner.model.method.name == form
    stored = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    runner = build_runner(CONFIG, stored, num_slots=50, dtype="float32")
    assert isinstance(runner, CpuRunner)
    assert runner.model.method.name == "bf16"
