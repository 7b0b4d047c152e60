"""umbel doctor on machines that lack something."""

import importlib
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from umbel.interpreter.cli import main
from umbel.srt import doctor
from umbel.srt.doctor import Finding, State
from umbel.srt.kernels.cpu import library

from ..fake_hub import Answer, FakeHub, serve_hub
from .fake_cards import H100, T4, Card, FakeMachine, GiB


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "OLLAMA_MODELS", "LLAMA_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UMBEL_CACHE", str(tmp_path / "umbel"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub(FakeHub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def only(findings: object) -> Finding:
    (finding,) = list(findings)  # type: ignore[call-overload]
    assert isinstance(finding, Finding)
    return finding


def test_a_machine_that_has_everything_passes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("UMBEL_CACHE")  # the kernels are there
    monkeypatch.delenv("HOME")
    status = main(["doctor"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    names = [line[8:20].strip() for line in printed.splitlines() if line[:1] != " "]
    assert names[:4] == ["umbel", "packages", "compiler", "kernels"]
    assert {"torch", "umbel cache", "hub cache", "hub", "memory"} < set(names)
    assert f"torch {torch.__version__}" in printed


def test_a_package_that_is_missing_or_damaged_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version, load = importlib.metadata.version, importlib.import_module

    def no_gguf(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    def damaged(name: str) -> object:
        if name == "tokenizers":
            raise ImportError("undefined symbol: x")
        return load(name)

    monkeypatch.setattr(importlib.metadata, "version", no_gguf)
    monkeypatch.setattr(importlib, "import_module", damaged)
    found = {finding.name: finding for finding in doctor.packages()}
    assert (found["gguf"].state, found["gguf"].remedy) == (State.BROKEN, "pip install 'umbel[runtime]'")
    assert found["tokenizers"].text == "it is installed and cannot be imported: undefined symbol: x"
    monkeypatch.setattr(doctor, "examine", lambda: iter([found["gguf"]]))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "broken  gguf         not installed",
        "                     → pip install 'umbel[runtime]'",
    ]


def test_a_check_that_fails_is_a_line_and_the_others_go_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no such device")

    def lacks() -> None:
        raise ModuleNotFoundError("no torch", name="torch")

    for name, check in (("memory", fails), ("gpu", lacks), ("packages", fails), ("kernels", lacks)):
        monkeypatch.setattr(doctor, name, check)
    found = [(finding.name, finding.state) for finding in doctor.examine()]
    assert found.count(("torch", State.BROKEN)) == 2
    assert found.count(("fails", State.BROKEN)) == 2
    assert ("hub", State.OK) in found


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = only(doctor.compiler())
    assert finding.state is State.NOTE
    assert "CXX=no-such-compiler is not a program" in finding.text

    def none() -> None:
        raise library.NoKernels("there is no C++ compiler")

    monkeypatch.setattr(library, "load_library", none)
    assert "torch computes, not umbel's kernels: there is no C++ compiler" in only(doctor.kernels()).text
    monkeypatch.setattr(library, "load_library", lambda: None)
    monkeypatch.setattr(library, "choose_isa", lambda: library.Isa.AVX512)
    monkeypatch.setattr(library, "isa_of", lambda loaded: library.Isa.AVX2)
    assert only(doctor.kernels()).text == "avx2: the avx512 kernels, which this CPU lists, fail their check"


def test_a_gpu_that_torch_sees_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = FakeMachine(monkeypatch, tmp_path)
    machine.sees(H100, T4, Card("NVIDIA GeForce GTX 1080", 8 * GiB, 6, 1, 20))
    assert list(doctor.gpu())[1:] == [
        Finding(
            "gpu 0",
            State.OK,
            "NVIDIA H100 80GB HBM3, 85 GB, compute capability 9.0, chunk_size 8192, max_running 256",
        ),
        Finding(
            "gpu 1",
            State.OK,
            "Tesla T4, 16 GB, compute capability 7.5, chunk_size 1024, max_running 64; torch computes in float16: "
            "Triton's kernels and bfloat16 need 8.0",
        ),
        Finding(
            "gpu 2",
            State.NOTE,
            f"NVIDIA GeForce GTX 1080: torch {torch.__version__} has no kernels for compute capability 6.1",
            "run pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        ),
    ]


def test_a_gpu_that_torch_does_not_use_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tests/srt/runners/test_cards.py has all reasons."""
    machine = FakeMachine(monkeypatch, tmp_path)
    monkeypatch.setattr(doctor, "AMD_DRIVER", tmp_path / "kfd")
    assert list(doctor.gpu())[1:] == [Finding("gpu", State.OK, "none: the CPU computes")]
    (tmp_path / "kfd").touch()
    text = "an AMD GPU, which umbel does not use: the CPU computes"
    assert list(doctor.gpu())[1:] == [Finding("gpu", State.OK, text)]
    machine.torch(None, version="2.13.0+cpu")
    machine.has_driver("550.54.15", "NVIDIA L4")
    assert list(doctor.gpu())[1:] == [
        Finding(
            "gpu",
            State.NOTE,
            "NVIDIA L4 (driver 550.54.15): torch 2.13.0+cpu is a CPU build; the CPU computes",
            "run pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        )
    ]
    machine.torch(None, version="2.13.0+rocm6.4", hip="6.4")
    assert next(doctor.gpu()).text.startswith("2.13.0+rocm6.4 (ROCm 6.4 build), ")


def test_folders_say_their_size_their_rights_and_their_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "umbel").mkdir(mode=0o700)
    (home / "umbel" / "x").write_bytes(b"x" * 50_000)
    (home / ".ollama" / "models").mkdir(parents=True)
    assert doctor.size_of(home / "umbel") == 50_000
    found = {finding.name: finding for finding in doctor.folders()}
    assert found["umbel cache"].text.startswith(f"{home / 'umbel'}, 0.0 GB, ")
    assert found["hub cache"].text.startswith(f"{home / 'hf' / 'hub'}, not made yet, ")
    assert found["ollama"].text == f"{home / '.ollama' / 'models'}, 0.0 GB"
    usage = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000_000))
    assert "make room" in next(doctor.folders()).remedy
    (home / "umbel").chmod(0o777)
    open_to_all = next(doctor.folders())
    assert open_to_all.state is State.BROKEN
    assert "other users may write to it" in open_to_all.text
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert {finding.text for finding in doctor.folders() if finding.state is State.BROKEN} == {
        f"{home / 'umbel'} cannot be written",
        f"{home / 'hf' / 'hub'} cannot be written",
    }


def test_the_hub_says_whether_it_answers(hub: FakeHub) -> None:
    assert only(doctor.hub()) == Finding("hub", State.OK, f"{hub.address}, no token, answers")
    assert len(hub.requests) == 1
    hub.change = lambda request, answer: Answer(503)
    finding = only(doctor.hub())
    assert finding.state is State.NOTE
    assert finding.text.endswith("it was asked and does not answer: status 503")


def test_a_hub_that_cannot_be_reached_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    finding = only(doctor.hub())
    assert finding.state is State.NOTE
    assert finding.text.startswith("http://127.0.0.1:9, no token; it was asked and does not answer: ")
    assert "HTTPS_PROXY" in finding.remedy


def test_a_hub_that_is_silent_does_not_hold_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert only(doctor.hub()).state is State.NOTE


def test_the_hub_is_not_asked_where_the_network_is_forbidden(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_a_test")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = only(doctor.hub())
    assert finding.text == f"{hub.address}, a token is set; HF_HUB_OFFLINE forbids downloads"
    assert hub.requests == []


def test_huge_pages_that_are_switched_off_are_noted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = home / "enabled"
    monkeypatch.setattr(doctor, "HUGE_PAGES", setting)
    assert list(doctor.huge_pages()) == []
    setting.write_text("always [madvise] never\n")
    assert only(doctor.huge_pages()) == Finding("huge pages", State.OK, "madvise")
    setting.write_text("always madvise [never]\n")
    assert only(doctor.huge_pages()).remedy == f"echo madvise | sudo tee {setting}"


def test_little_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 0.0)
    assert only(doctor.memory()).state is State.OK
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 1e18)
    assert "weights='int8'" in only(doctor.memory()).remedy
