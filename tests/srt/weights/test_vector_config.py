"""How a checkpoint says that it makes vectors, and what is refused by its name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.core.vectors import DenseMap, VectorConfig
from umbel.srt.in_process import LocalBackend
from umbel.srt.weights import open_model
from umbel.srt.weights.catalog.repository import HubName, files_to_download
from umbel.srt.weights.vector_config import read_vectors

from .tiny import BY_NAME, write_gguf

TEXT = {"hidden_size": 64, "tie_word_embeddings": True}
LAST = {"pooling_mode_lasttoken": True}


class Files:
    """Documents in memory."""

    def __init__(self, modules: object, **configs: object) -> None:
        self._modules = modules
        self._configs = configs

    def read(self, name: str) -> dict[str, Any]:  # Any: JSON
        found = self._configs.get(name.removesuffix("/config.json"))
        return found if isinstance(found, dict) else {}

    def text(self, name: str) -> str | None:
        if name != "modules.json" or self._modules is None:
            return None
        return self._modules if isinstance(self._modules, str) else json.dumps(self._modules)


def module(kind: str, path: str = "") -> dict[str, object]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def read(documents: Files, config: dict[str, Any] | None = None, *names: str) -> VectorConfig:
    return read_vectors(config or TEXT, TEXT, documents, names)


def test_a_model_that_says_nothing_takes_the_last_token_normalised() -> None:
    vectors = read(Files(None))
    assert vectors == VectorConfig(64)
    assert vectors.info == ul.lang.protocol.VectorInfo(64, ranks=False, generates=True)


def test_pooling_maps_and_normalisation_are_read() -> None:
    listed = [module("Transformer"), module("Pooling", "1_P"), module("Dense", "2_D"), module("Normalize")]
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 64, "out_features": 8, "bias": False, "activation_function": identity}
    vectors = read(Files(listed, **{"1_P": {"pooling_mode_mean_tokens": True}, "2_D": dense}))
    assert vectors == VectorConfig(8, every_row=True, maps=(DenseMap("2_D", 64, 8, biased=False, activation=""),))
    assert not read(Files(listed[:2], **{"1_P": LAST})).normalized


def test_a_classifier_and_a_model_with_answers_rank() -> None:
    named = {**TEXT, "architectures": ["Qwen3ForSequenceClassification"]}
    assert read(Files(None), named, "score.weight").labels == 2, "transformers' default"
    five = read(Files(None), {**named, "id2label": dict.fromkeys("abcde", "x")}, "score.weight")
    assert (five.labels, five.ranks, five.generates) == (5, False, False)
    answers = {"true_token_id": 4, "false_token_id": 5}
    assert read(Files([module("LogitScore", "1_L")], **{"1_L": answers})).answers == (4, 5)


def test_a_model_without_output_head_generates_nothing() -> None:
    untied = {**TEXT, "tie_word_embeddings": False}
    assert not read_vectors(untied, untied, Files(None), ["embed_tokens.weight"]).generates
    assert read_vectors(untied, untied, Files(None), ["model.embed_tokens.weight", "lm_head.weight"]).generates
    assert read_vectors(untied, untied, Files(None), []).generates, "names of a GGUF file are not listed"


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (Files([module("Pooling", "1")], **{"1": {"pooling_mode_cls_token": True}}), "pools by cls"),
        (Files([module("Pooling", "1")], **{"1": {**LAST, "pooling_mode_max_tokens": True}}), "lasttoken and max"),
        (Files([module("Pooling", "1")]), "pools by nothing"),
        (Files([module("LSTM", "1")]), "has a LSTM"),
        (Files([module("Transformer", "0_T")]), "in the folder '0_T'"),
        (Files([module("Dense", "1")], **{"1": {"in_features": 3, "out_features": 4}}), "maps 3 to 4 numbers after 64"),
        (Files([module("Dense", "1")], **{"1": {"in_features": 64, "out_features": 1 << 40}}), "maps 64"),
        (
            Files(
                [module("Dense", "1")], **{"1": {"in_features": 64, "out_features": 4, "activation_function": "os.x"}}
            ),
            "activation 'os.x'",
        ),
        (Files([module("LogitScore", "1")], **{"1": {"true_token_id": 4}}), "tokens 4 and None"),
        (Files([module("Pooling", "../../etc")]), "no folder next to it"),
        (Files([module("Pooling", "/etc")]), "no folder next to it"),
        (Files("{"), "cannot be read"),
        (Files({"a": 1}), "cannot be read"),
    ],
    ids=range(13),
)
def test_what_is_not_computed_is_refused_by_its_name(documents: Files, reason: str) -> None:
    vectors = read(documents)
    assert reason in vectors.refused
    assert (vectors.ranks, vectors.info.dimensions) == (False, 0)


def test_a_model_whose_tokens_see_those_after_them_generates_nothing() -> None:
    config = {**TEXT, "use_bidirectional_attention": True}
    assert read_vectors(config, config, Files(None), ()) == VectorConfig(64, both_ways=True, generates=False)


@settings(max_examples=60)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3)))
def test_odd_documents_are_refused_or_read(value: object) -> None:
    for documents in (Files([value]), Files([module("Pooling", "1")], **{"1": {"pooling_mode": value}})):
        assert isinstance(read(documents, {"architectures": value, "id2label": value}), VectorConfig)
    dense = {"in_features": value, "out_features": value, "activation_function": "", "bias": value}
    assert isinstance(read(Files([module("Dense", "1")], **{"1": dense})), VectorConfig)


@pytest.mark.parametrize(("stated", "every_row", "reason"), [(1, True, ""), (3, False, ""), (2, False, "pools by cls")])
def test_a_gguf_file_states_its_pooling(tmp_path: Path, stated: int, reason: str, *, every_row: bool) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, replace(BY_NAME["qwen3"], metadata={"pooling_type": stated}))
    vectors = open_model(path, cache=tmp_path).vectors
    assert (vectors.every_row, vectors.normalized) == (every_row, True)
    assert reason in vectors.refused
    if not reason:
        backend = LocalBackend(model=str(path), pool_tokens=100)
        assert abs(sum(number**2 for number in ul.embed(["the cat"], backend=backend)[0]) - 1) < 1e-4


def test_the_files_of_a_models_vectors_are_downloaded() -> None:
    wanted = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json")
    files = dict.fromkeys(
        (*wanted, "config.json", "tokenizer.json", "model.safetensors", "onnx/model.onnx", "2_Dense/x.bin"), 1
    )
    small, weights = files_to_download(HubName("org/repo"), files)
    assert {*wanted, "config.json", "tokenizer.json"} == set(small)
    assert weights == ["model.safetensors"]
