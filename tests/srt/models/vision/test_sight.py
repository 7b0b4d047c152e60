"""Towers, projectors and layouts against transformers on tiny random models: a picture in, rows of the decoder out."""

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
import torch
from umbel.lang.errors import ModelError, RequestError
from umbel.srt.core.batch import VisionModel
from umbel.srt.models.vision import sight
from umbel.srt.models.vision.parts import build_vision, text_part
from umbel.srt.models.vision.preprocessor import PREPROCESSOR

from ..reference import relative_error
from .tiny import Tiny, gemma3, llava, llava_next, noise, qwen2_5_vl, qwen2_vl, qwen3_vl

SIZES = [(24, 24), (1, 1), (31, 50), (100, 30), (20, 77), (48, 47)]
CASES: dict[str, Callable[[], Tiny]] = {
    "llava, clip": llava,
    "llava, clip, full": lambda: llava(vision_feature_select_strategy="full"),
    "llava, clip, last layer": lambda: llava(vision_feature_layer=-1),
    "llava, clip, before the layers": lambda: llava(vision_feature_layer=[0]),
    "llava, clip, several layers": lambda: llava(vision_feature_layer=[-2, 1, -1]),
    "llava, clip, no biases": lambda: llava(multimodal_projector_bias=False, projector_hidden_act="gelu_pytorch_tanh"),
    "llava, siglip": lambda: llava(tower="siglip", vision_feature_select_strategy="full"),
    "llava, siglip, default": lambda: llava(tower="siglip"),
    "llava next, clip": llava_next,
    "llava next, siglip, full": lambda: llava_next(tower="siglip", vision_feature_select_strategy="full"),
    "gemma 3": gemma3,
    "qwen 2": qwen2_vl,
    "qwen 2.5": qwen2_5_vl,
    "qwen 3": qwen3_vl,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sight_of(tiny: Tiny, dtype: torch.dtype = torch.float32) -> VisionModel:
    return build_vision(tiny.config, tiny.tensors, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_features_equal_those_of_transformers(case: str) -> None:
    tiny = CASES[case]()
    sight = sight_of(tiny)
    for width, height in SIZES:
        picture = tiny.picture(noise(width, height))
        ours, theirs = sight.encode(picture), tiny.features(noise(width, height))
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 1e-5
        assert len(ours) == sight.tokens(picture) == picture.tokens


# Three layers round at every step; ours and transformers' attention round at different places.
@pytest.mark.parametrize("case", ["llava, clip", "llava, siglip", "llava next, clip", "gemma 3", "qwen 2.5", "qwen 3"])
def test_bfloat16_differs_from_float32_by_rounding(case: str) -> None:
    tiny = CASES[case]()
    image = noise(50, 31)
    exact = sight_of(tiny).encode(tiny.picture(image))
    ours = sight_of(tiny, torch.bfloat16).encode(tiny.picture(image))
    tiny.model.to(torch.bfloat16)
    theirs = tiny.features(image)
    assert ours.dtype is torch.bfloat16
    assert relative_error(ours.float(), exact) < 0.03
    assert (ours.float() - exact).square().mean() < 1.5**2 * (theirs.float() - exact).square().mean()


@pytest.mark.parametrize("case", ["llava, clip", "llava next, clip", "gemma 3"])
def test_no_picture_has_more_tiles_than_the_largest(case: str) -> None:
    tiny = CASES[case]()
    sight = sight_of(tiny)
    largest = sight.largest()
    assert len(sight.encode(largest)) == largest.tokens
    assert len(largest.pixels) == max(len(tiny.picture(noise(*size)).pixels) for size in [*SIZES, (70, 70), (9, 90)])


def test_only_gemma_3_sees_a_picture_in_both_directions() -> None:
    assert [sight_of(make()).both_ways for make in (llava, llava_next, gemma3)] == [False, False, True]


def test_tiles_in_several_passes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = llava_next()
    picture = tiny.picture(noise(48, 47))
    together = sight_of(tiny).encode(picture)
    monkeypatch.setattr(sight, "BATCH_ROWS", 1)
    assert relative_error(sight_of(tiny).encode(picture), together) < 1e-6


def test_a_frame_is_an_overview_alone() -> None:
    tiny = llava_next()
    whole = tiny.picture(noise(50, 31))
    frame = msgspec.structs.replace(whole, columns=0, rows=0, pixels=whole.pixels[: 24 * 24 * 3])
    sight = sight_of(tiny)
    assert relative_error(sight.encode(frame), sight.encode(whole)[:36]) < 1e-6
    assert sight.tokens(frame) == 36


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_height": 12}, "12 × 24 pixels"),
        ({"pixels": b"123"}, "3 bytes of pixels"),
        ({"columns": 2, "rows": 1, "pixels": bytes(3 * 24 * 24 * 3)}, "sees one tile"),
    ],
)
def test_a_picture_for_another_model_is_refused(changes: dict[str, object], says: str) -> None:
    tiny = llava()
    picture = msgspec.structs.replace(tiny.picture(noise(9, 9)), **changes)
    with pytest.raises(RequestError, match=says):
        sight_of(tiny).tokens(picture)


# ------------------------------------------------------------------------------------- checkpoints


def old_name(name: str) -> str:
    """As transformers 4 wrote LLaVA checkpoints."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    name = name.replace("language_model.", "language_model.model.", 1)
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


def middle_name(name: str) -> str:
    """As 4.52 did: its modules had moved, the tower's had not."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


@pytest.mark.parametrize("rename", [old_name, middle_name])
@pytest.mark.parametrize("make", [llava, llava_next, gemma3])
def test_all_spellings_of_names_give_the_same_model(make: Callable[[], Tiny], rename: Callable[[str], str]) -> None:
    tiny = make()
    config, cpu = tiny.config, torch.device("cpu")
    renamed = {rename(name): tensor for name, tensor in tiny.tensors.items()}
    if rename is old_name and make is llava:  # old towers stored a buffer
        renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(37)[None]
    picture = tiny.picture(noise(50, 31))
    sight = build_vision(config, renamed, dtype=torch.float32, device=cpu)
    assert torch.equal(sight.encode(picture), sight_of(tiny).encode(picture))
    decoder, expected = text_part(config, renamed)[1], text_part(config, tiny.tensors)[1]
    assert set(decoder) == set(expected)
    assert all(decoder[name] is renamed[rename(stored)] for name, stored in _stored(tiny).items())


def _stored(tiny: Tiny) -> dict[str, str]:
    """The decoder's names → those of transformers 5."""
    return {
        name if name.startswith("lm_head") else name.replace("model.language_model.", "model.", 1): name
        for name in tiny.tensors
        if "language_model" in name or "lm_head" in name
    }


def test_the_decoder_has_the_tensors_of_a_text_model() -> None:
    tiny = llava()
    config, tensors = text_part(tiny.config, tiny.tensors)
    assert config["model_type"] == "llama"
    assert set(tensors) == set(_stored(tiny))
    assert len(tensors) == len(_stored(tiny))


def test_tensors_are_read_when_they_are_asked_for() -> None:
    read: list[str] = []

    class Noted(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    tiny = llava()
    tensors = text_part(tiny.config, Noted(tiny.tensors))[1]
    assert not read
    assert tensors["model.norm.weight"] is not None
    assert read == ["model.language_model.norm.weight"]


def test_layers_that_are_not_looked_at_are_not_read() -> None:
    tiny = llava(vision_feature_layer=-3)
    tensors = {name: value for name, value in tiny.tensors.items() if "layers.2.self_attn.q_proj" not in name}
    assert len(tensors) < len(tiny.tensors)
    build_vision(tiny.config, tensors, dtype=torch.float32, device=torch.device("cpu"))


def test_every_tensor_is_accounted_for() -> None:
    tiny = llava()
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=r"tensors this model does not use: something\.else"):
        build_vision(tiny.config, {**tiny.tensors, "something.else": torch.ones(1)}, dtype=torch.float32, device=cpu)
    missing = {name: value for name, value in tiny.tensors.items() if "linear_2.bias" not in name}
    with pytest.raises(ModelError, match=r"lacks 1 tensors: multi_modal_projector\.linear_2\.bias"):
        build_vision(tiny.config, missing, dtype=torch.float32, device=cpu)
    twice = {**tiny.tensors, "language_model.lm_head.weight": torch.ones(1)}
    with pytest.raises(ModelError, match="the same tensor; keep one"):
        text_part(tiny.config, twice)


def test_a_model_without_its_preprocessor_is_refused() -> None:
    tiny = llava()
    config = {key: value for key, value in tiny.config.items() if key != PREPROCESSOR}
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        build_vision(config, tiny.tensors, dtype=torch.float32, device=torch.device("cpu"))


def test_pixels_may_be_left_as_they_are() -> None:
    tiny = llava()
    processor = type(tiny.processor)(**{**tiny.processor.to_dict(), "do_normalize": False, "rescale_factor": 1 / 127})
    plain = dataclasses.replace(tiny, processor=processor)
    image = noise(50, 31)
    assert relative_error(sight_of(plain).encode(plain.picture(image)), plain.features(image)) < 1e-5
