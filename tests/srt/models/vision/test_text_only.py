"""Vision models whose tower umbel does not have: their text part against transformers, and what is refused."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from umbel.lang.errors import ModelError
from umbel.srt.models.vision.config import decoder_config, reads_text_only, sees
from umbel.srt.runners.build import build_runner

from ..reference import TINY, Piece, Sequences, random_tokens, relative_error, run_steps
from .tiny import Tiny, qwen2_5_vl, qwen2_vl, qwen3_vl

NUM_SLOTS = 60
LENGTH = 23
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}

# model_type → what its text part and its tower differ in from the tiny default.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mistral3": ({"model_type": "mistral", "head_dim": 16, "sliding_window": None}, {**TOWER, "head_dim": 16}),
    "internvl": ({"model_type": "qwen2"}, TOWER),
    "llava_onevision": ({"model_type": "qwen2"}, {**TOWER, "model_type": "siglip_vision_model"}),
    "smolvlm": ({"model_type": "llama", "pad_token_id": 0}, TOWER),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def whole_model(model_type: str, **changes: Any) -> Any:  # Any: transformers is untyped
    """A random model with its tower, whose head is not its embedding."""
    torch.manual_seed(0)
    text, tower = CASES[model_type]
    config = AutoConfig.for_model(
        model_type,
        text_config={**TINY, **text},
        vision_config=tower,
        tie_word_embeddings=False,
        **changes,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model


def names_as_published(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of transformers 4, which most checkpoints have."""
    return {
        name.replace("model.language_model.", "language_model.model.").replace("lm_head.", "language_model.lm_head."): t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("model_type", CASES)
def test_the_text_part_equals_that_of_transformers(
    model_type: str, published: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model(model_type)
    tensors: dict[str, torch.Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if published:
        tensors = names_as_published(tensors)
    ids = random_tokens(LENGTH, 3)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    with caplog.at_level(logging.WARNING):
        runner = build_runner(model.config.to_dict(), tensors, num_slots=NUM_SLOTS, dtype="float32")
    assert f"pictures are not read: umbel has no tower of a {model_type}; its text part runs" in caplog.text
    actual = run_steps(runner, Sequences([ids], NUM_SLOTS), [[Piece(0, 0, 9)], [Piece(0, 9, LENGTH - 9)]])[0]
    assert relative_error(actual, expected) < 2e-5
    assert runner.pictures is None


@pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, qwen3_vl])
def test_a_decoder_may_be_described_and_named_like_a_text_model(make: Callable[[], Tiny]) -> None:
    """The first files of Qwen 2-VL and 2.5-VL have neither a text_config nor a prefix."""
    tiny = make()
    stated = tiny.config
    text = {key: value for key, value in stated["text_config"].items() if key not in ("rope_parameters", "model_type")}
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = {**stated, **text, "rope_theta": 900.0, "rope_scaling": mrope, "text_config": None}
    tensors = {name.replace("model.language_model.", "model."): t for name, t in tiny.tensors.items()}
    tensors = {name.replace("model.visual.", "visual."): t for name, t in tensors.items()}
    ids = random_tokens(LENGTH, 3)
    blind = {key: value for key, value in flat.items() if key != "vision_config"}
    without = {name: t for name, t in tensors.items() if not name.startswith("visual.")}
    expected, *others = (
        run_steps(
            build_runner(config, some, num_slots=NUM_SLOTS, dtype="float32"),
            Sequences([ids], NUM_SLOTS),
            [[Piece(0, 0, LENGTH)]],
        )[0]
        for config, some in ((stated, tiny.tensors), (flat, tensors), (blind, without))
    )
    assert all(torch.equal(actual, expected) for actual in others)


def test_a_checkpoint_without_a_head_is_tied_whatever_its_configuration_says() -> None:
    model = whole_model("mistral3")
    tensors = dict(model.state_dict())
    del tensors["lm_head.weight"]
    runner = build_runner(model.config.to_dict(), tensors, num_slots=NUM_SLOTS, dtype="float32")
    with torch.no_grad():
        model.lm_head.weight.copy_(tensors["model.language_model.embed_tokens.weight"])
        expected = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
    actual = run_steps(runner, Sequences([[5, 6, 7]], NUM_SLOTS), [[Piece(0, 0, 3)]])[0]
    assert relative_error(actual, expected) < 2e-5


def test_a_llava_with_a_tower_of_another_kind_reads_text() -> None:
    pixtral = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}, "text_config": {"hidden_size": 8}}
    assert not sees(pixtral)
    assert reads_text_only(pixtral)
    assert decoder_config(pixtral)["model_type"] == "llama"
    assert sees({"model_type": "llava"})
    assert not reads_text_only({"model_type": "llama"})
    assert decoder_config({"model_type": "llama"}) == {"model_type": "llama"}


def test_a_part_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelError, match="text_config='none'; write an object"):
        build_runner({"model_type": "mistral3", "text_config": "none"}, {}, num_slots=NUM_SLOTS)
