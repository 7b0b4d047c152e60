"""Files of a model folder that are JSON in form and nonsense in size: refused with their path or key."""

from pathlib import Path

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.layers.config_values import MOST_LAYERS, MOST_POSITIONS, positive_int, positive_number
from umbel.srt.models.families import read_config as read_decoder
from umbel.srt.weights.documents import read_config
from umbel.srt.weights.safetensors_folder import INDEX, open_tensors

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def test_a_deep_configuration_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(DEEP)
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        read_config(path)


def test_a_deep_index_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(DEEP)
    with pytest.raises(ModelError, match="is not an index of shards"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("value", [10**18, 10**400, 0, -1, True, "9" * 100_000, [1] * 100_000, None])
def test_a_size_that_no_model_has_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(ModelError, match=f"num_hidden_layers=.*at most {MOST_LAYERS}") as caught:
        positive_int({"num_hidden_layers": value}, "num_hidden_layers", most=MOST_LAYERS)
    assert len(str(caught.value)) < 2000
    with pytest.raises(ModelError, match=r"hidden_size=.*whole number of at least 1"):
        positive_int({"hidden_size": value}, "hidden_size")


@pytest.mark.parametrize("value", [10**400, 1e300, 0, -1.0, float("nan"), "x"])
def test_a_number_that_float32_does_not_hold_is_refused_by_its_key(value: object) -> None:
    with pytest.raises(ModelError, match=r"rope_theta=.*positive number"):
        positive_number({"rope_theta": value}, "rope_theta")


def test_a_decoder_of_so_many_layers_is_refused_before_they_are_described() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, "num_hidden_layers": 10**18}
    with pytest.raises(ModelError, match="num_hidden_layers=1000000000000000000"):
        read_decoder(config)


def test_no_context_is_longer_than_the_longest() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = {"model_type": "llama", **sizes, "num_hidden_layers": 1, "max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e30}
    assert read_decoder({**config, "rope_parameters": yarn}).context_length == MOST_POSITIONS
    with pytest.raises(ModelError, match=r"max_position_embeddings=2147483647; write .* at most 268435456"):
        read_decoder({**config, "max_position_embeddings": 2**31 - 1})


def test_numbers_that_json_does_not_have_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"limit": [0.0, {"__float__": "Infinity"}], "a": {"__float__": [1]}, "b": {"__float__": "NaN", "c": 1}}'
    )
    assert read_config(path) == {
        "limit": [0.0, float("inf")],
        "a": {"__float__": [1]},
        "b": {"__float__": "NaN", "c": 1},
    }
