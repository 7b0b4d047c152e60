"""Models by name: in caches of Hugging Face's layout, and in the folders of Ollama, LM Studio and llama.cpp."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.weights import open_model
from umbel.srt.weights.catalog.names import locate
from umbel.srt.weights.catalog.places import FoundModel, ModelPlaces, model_places
from umbel.srt.weights.catalog.repository import HubName

from ..tiny import BY_NAME, write_folder, write_gguf

COMMIT = "c0ffee" + "0" * 34
OTHER = "decade" + "0" * 34


@pytest.fixture
def places(tmp_path: Path) -> ModelPlaces:
    return model_places(environment={"HOME": str(tmp_path), "UMBEL_CACHE": str(tmp_path / "umbel")})


def write(path: Path, content: bytes | str = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cached(hub: Path, *files: str, repo: str = "org/repo", commit: str = COMMIT, ref: str = "main") -> Path:
    """Lays files into a cache, each a link to its blob → the snapshot's folder."""
    repository = hub / f"models--{repo.replace('/', '--')}"
    for number, file in enumerate(files):
        link = repository / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(
            write(repository / "blobs" / f"{commit[:6]}-{number}", "{}" if file.endswith("json") else "GGUF")
        )
    if ref:
        write(repository / "refs" / ref, commit)
    return repository / "snapshots" / commit


def found(name: str, places: ModelPlaces) -> FoundModel:
    model = locate(name, places)
    assert isinstance(model, FoundModel)
    return model


# ------------------------------------------------------------------------------------- the folders


def test_the_variables_of_each_program_name_its_folder(tmp_path: Path) -> None:
    write(tmp_path / ".lmstudio-home-pointer", str(tmp_path / "studio"))
    write(tmp_path / "studio" / "settings.json", json.dumps({"downloadsFolder": str(tmp_path / "chosen")}))
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    plain = model_places(environment=environment)
    assert plain.hubs == (tmp_path / "xdg" / "huggingface" / "hub",)
    assert plain.llama_cpp == tmp_path / "xdg" / "llama.cpp"
    assert plain.ollama[0] == tmp_path / ".ollama" / "models"
    assert plain.lm_studio[:2] == (tmp_path / "chosen", tmp_path / "studio" / "models")
    given = model_places(
        environment={**environment, "HF_HOME": "/hf", "LLAMA_CACHE": "/llama", "OLLAMA_MODELS": "/oll"}
    )
    assert given.hubs == (Path("/hf/hub"), Path("/llama"))
    assert given.ollama == (Path("/oll"),)
    assert model_places(environment={**environment, "HF_HOME": "/hf", "HF_HUB_CACHE": "/hub"}).hub == Path("/hub")


# ------------------------------------------------------------------------- caches of Hugging Face


def test_a_whole_snapshot_is_found_by_its_reference_and_its_commit(places: ModelPlaces) -> None:
    snapshot = cached(places.hub, "config.json", "tokenizer.json", "model.safetensors")
    assert found("org/repo", places).path == snapshot
    assert found(f"org/repo@{COMMIT}", places).path == snapshot
    assert locate("org/repo@v2", places) == HubName("org/repo", "v2")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_snapshot_with_a_gap_is_not_opened(missing: str, places: ModelPlaces) -> None:
    cached(places.hub, *({"config.json", "tokenizer.json", "model.safetensors"} - {missing}))
    assert locate("org/repo", places) == HubName("org/repo")


def test_a_link_to_a_blob_that_is_gone_is_a_gap(places: ModelPlaces) -> None:
    snapshot = cached(places.hub, "config.json", "tokenizer.json", "model.safetensors")
    (snapshot / "model.safetensors").resolve().unlink()
    assert locate("org/repo", places) == HubName("org/repo")


def test_every_shard_of_the_index_must_be_there(places: ModelPlaces) -> None:
    index = "model.safetensors.index.json"
    snapshot = cached(places.hub, "config.json", "tokenizer.json", index, "a.safetensors")
    (snapshot / index).resolve().write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert locate("org/repo", places) == HubName("org/repo")
    write(snapshot / "b.safetensors")
    assert found("org/repo", places).path == snapshot


def test_a_tag_finds_its_file_and_no_tag_the_only_one(places: ModelPlaces) -> None:
    snapshot = cached(places.hub, "m-Q4_K_M.gguf", "config.json")
    assert found("org/repo:q4_k_m", places).path == snapshot / "m-Q4_K_M.gguf"
    assert found("org/repo", places).path == snapshot / "m-Q4_K_M.gguf"
    assert locate("org/repo:Q8_0", places) == HubName("org/repo", "main", "Q8_0")
    (snapshot / "m-Q8_0.gguf").symlink_to((snapshot / "config.json").resolve())
    with pytest.raises(ModelError, match=r"several GGUF files: Q4_K_M .*, Q8_0"):
        locate("org/repo", places)


def test_parts_count_when_all_are_there(places: ModelPlaces) -> None:
    snapshot = cached(places.hub, "m-Q8_0-00001-of-00002.gguf")
    assert isinstance(locate("org/repo:Q8_0", places), HubName)
    write(snapshot / "m-Q8_0-00002-of-00002.gguf")
    assert found("org/repo:Q8_0", places).path == snapshot / "m-Q8_0-00001-of-00002.gguf"


def test_llama_cpp_keeps_either_layout_in_its_folder(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    places = model_places(environment={"HOME": str(tmp_path), "LLAMA_CACHE": str(llama)})
    snapshot = cached(llama, "m-Q4_0.gguf")
    assert found("org/repo:Q4_0", places).path == snapshot / "m-Q4_0.gguf"
    flat = write(llama / "ggml-org_tiny-GGUF_tiny-Q8_0.gguf")
    assert found("ggml-org/tiny-GGUF:Q8_0", places).path == flat
    assert found("llama.cpp:ggml-org_tiny-GGUF_tiny-Q8_0", places).path == flat
    with pytest.raises(ModelError, match=r"llama.cpp has no file 'tiny'.*ggml-org_tiny-GGUF_tiny-Q8_0"):
        locate("llama.cpp:tiny", places)


def test_a_folder_that_exists_goes_before_a_repository(
    places: ModelPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cached(places.hub, "config.json", "tokenizer.json", "model.safetensors")
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert found("org/repo", places).path == Path("org/repo")


def test_any_part_of_a_file_names_the_first(places: ModelPlaces, tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"m-0000{number}-of-00002.gguf") for number in (1, 2))
    assert found(str(second), places).path == first
    first.unlink()
    assert found(str(second), places).path == second  # opening it says what is missing


def test_names_of_models_here_are_proposed(places: ModelPlaces) -> None:
    cached(places.hub, "config.json", "tokenizer.json", "model.safetensors", repo="Qwen/Qwen3-0.6B")
    with pytest.raises(ModelError, match=r"no model, folder or file 'Qwen3-0.6B'; did you mean 'Qwen/Qwen3-0.6B'\?"):
        locate("Qwen3-0.6B", places)
    with pytest.raises(ModelError, match='write "org/repo"; of Ollama, "ollama:NAME"'):
        locate("zzz", places)


# ----------------------------------------------------------------------------------------- Ollama


def stored(store: Path, name: str, content: bytes = b"GGUF", **changes: Any) -> Path:  # Any: of a layer
    """Lays a model into a store of Ollama → its manifest."""
    digest = hashlib.sha256(content).hexdigest()
    write(store / "blobs" / f"sha256-{digest}", content)
    model = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(content)}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{digest}", "size": 1}
    return write(store / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": [template, model | changes]}))


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("mike/tiny:q4", "registry.ollama.ai/mike/tiny/q4"),
        ("hf.co/org/repo:Q4_K_M", "hf.co/org/repo/Q4_K_M"),
    ],
)
def test_models_of_ollama_are_found_by_its_names(name: str, manifest: str, places: ModelPlaces) -> None:
    stored(places.ollama[0], manifest)
    model = found(f"ollama:{name}", places)
    assert model.path.read_bytes() == b"GGUF"
    assert model.name == f"ollama:{name}"


def test_the_newer_manifests_are_links_to_blobs_and_may_be_lists(places: ModelPlaces) -> None:
    store = places.ollama[0]
    blob = stored(store, "old").rename(store / "blobs" / f"sha256-{'1' * 64}")
    entries = [
        {"runner": "mlx", "digest": f"sha256:{'2' * 64}"},
        {"runner": "llamacpp", "digest": f"sha256:{'1' * 64}"},
    ]
    listing = write(store / "blobs" / f"sha256-{'3' * 64}", json.dumps({"manifests": entries}))
    for tag, target in (("latest", blob), ("list", listing)):
        link = store / "manifests-v2" / "ollama.com" / "library" / "new" / tag
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    assert found("ollama:new", places).path == found("ollama:new:list", places).path


def test_a_model_that_ollama_has_not_finished_is_refused(places: ModelPlaces) -> None:
    stored(places.ollama[0], "registry.ollama.ai/library/cut/latest", size=9)
    with pytest.raises(ModelError, match="has 4 bytes, its manifest says 9; run: ollama pull cut"):
        locate("ollama:cut", places)
    manifest = stored(places.ollama[0], "registry.ollama.ai/library/gone/latest", b"gone")
    (places.ollama[0] / "blobs" / f"sha256-{hashlib.sha256(b'gone').hexdigest()}").unlink()
    with pytest.raises(ModelError, match=r"cannot be read .*; run: ollama pull gone"):
        locate("ollama:gone", places)
    manifest.write_text("{")
    with pytest.raises(ModelError, match="not stored as one GGUF file"):
        locate("ollama:gone", places)


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha256-12", 7, None])
def test_a_digest_leads_to_no_other_file(digest: object, places: ModelPlaces) -> None:
    stored(places.ollama[0], "registry.ollama.ai/library/odd/latest", digest=digest)
    with pytest.raises(ModelError, match="is damaged: a layer has no digest"):
        locate("ollama:odd", places)


def test_a_store_that_cannot_be_read_holds_nothing(places: ModelPlaces, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    stored(places.ollama[0], "registry.ollama.ai/library/tiny/latest")
    monkeypatch.setattr(Path, "stat", denied)
    monkeypatch.setattr("os.stat", denied)
    with pytest.raises(ModelError, match="Ollama has no model 'tiny'"):
        locate("ollama:tiny", places)


def test_an_unknown_model_of_ollama_is_answered_with_those_it_has(places: ModelPlaces) -> None:
    stored(places.ollama[0], "registry.ollama.ai/library/llama3.2/latest")
    with pytest.raises(ModelError, match=r"Ollama has no model 'lama3.2' in .*did you mean 'ollama:llama3.2:latest'\?"):
        locate("ollama:lama3.2", places)
    for name in ("ollama:", "ollama:a/b/c/d", "ollama:../../x", "ollama:x y"):
        with pytest.raises(ModelError):
            locate(name, places)


# -------------------------------------------------------------------------------------- LM Studio


def test_models_of_lm_studio_are_found_by_folder_or_plain_name(places: ModelPlaces) -> None:
    folder = places.lm_studio[0] / "lmstudio-community" / "Qwen3-0.6B-GGUF"
    file = write(folder / "Qwen3-0.6B-Q4_K_M.gguf")
    for name in ("lmstudio-community/Qwen3-0.6B-GGUF", "qwen3-0.6b", "Qwen3-0.6B-GGUF:Q4_K_M"):
        assert found(f"lmstudio:{name}", places).path == file
    second = write(folder / "Qwen3-0.6B-Q8_0.gguf")
    assert found("lmstudio:qwen3-0.6b:q8_0", places).path == second
    with pytest.raises(ModelError, match=r"several GGUF files: Q4_K_M .*, Q8_0"):
        locate("lmstudio:qwen3-0.6b", places)
    with pytest.raises(ModelError, match="no GGUF file 'Q5_0'"):
        locate("lmstudio:qwen3-0.6b:Q5_0", places)
    write(places.lm_studio[0] / "other" / "Qwen3-0.6B-GGUF" / "m.gguf")
    with pytest.raises(ModelError, match=r"may mean lmstudio:lmstudio-community/.*, lmstudio:other/"):
        locate("lmstudio:qwen3-0.6b", places)
    with pytest.raises(ModelError, match="LM Studio has no model 'qwen4'"):
        locate("lmstudio:qwen4", places)


# --------------------------------------------------------------------------------------- opening


def test_models_of_other_programs_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    write_gguf(tmp_path / "tiny.gguf", BY_NAME["qwen3"])
    stored(tmp_path / "ollama", "registry.ollama.ai/library/tiny/latest", (tmp_path / "tiny.gguf").read_bytes())
    source = open_model("ollama:tiny", cache=tmp_path / "cache")
    assert source.name == "ollama:tiny"
    assert source.config["model_type"] == "qwen3"
    snapshots = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    write_folder(snapshots / COMMIT, BY_NAME["qwen3"])
    write(snapshots.parent / "refs" / "main", COMMIT)
    assert open_model("org/tiny", cache=tmp_path / "cache").name == "org/tiny"
