"""Folders of models that see, as transformers saves them: how they take pictures, and what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from umbel.lang.errors import ModelError
from umbel.srt.models.vision.parts import build_vision, text_part
from umbel.srt.models.vision.preprocessor import PREPROCESSOR
from umbel.srt.multimodal.format import PictureFormat
from umbel.srt.weights import ModelSource, open_model

from ..models.vision.tiny import Tiny, gemma3, llava, llava_next, noise, qwen2_5_vl
from .tiny import byte_level

MAKES = {"llava": llava, "llava_next": llava_next, "gemma3": gemma3, "qwen2_5_vl": qwen2_5_vl}


def write(folder: Path, tiny: Tiny, **tokenizer_config: object) -> Path:
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_level().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def opened(folder: Path) -> ModelSource:
    return open_model(folder, cache=folder.parent / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", llava())


def format_of(folder: Path) -> PictureFormat:
    form = opened(folder).picture_format
    assert form is not None
    return form


@pytest.mark.parametrize("family", MAKES)
def test_a_folder_that_transformers_saved_gives_the_same_model(family: str, tmp_path: Path) -> None:
    tiny = MAKES[family]()
    source = opened(write(tmp_path / "model", tiny))
    picture = tiny.picture(noise(50, 31))
    cpu = torch.device("cpu")
    saved, held = (
        build_vision(config, tensors, dtype=torch.float32, device=cpu)
        for config, tensors in ((source.config, source.tensors), (tiny.config, tiny.tensors))
    )
    assert torch.equal(saved.encode(picture), held.encode(picture))
    decoder = text_part(source.config, source.tensors)[1]
    expected = text_part(tiny.config, tiny.tensors)[1]
    assert set(decoder) == set(expected)
    assert all(torch.equal(decoder[name], expected[name]) for name in expected)
    assert source.vocab_size == 97


def test_a_text_model_takes_no_pictures(tmp_path: Path) -> None:
    from .tiny import BY_NAME, write_folder

    write_folder(tmp_path / "text", BY_NAME["qwen3"])
    assert opened(tmp_path / "text").picture_format is None


def test_settings_may_be_a_part_of_the_processors_file(folder: Path) -> None:
    form, fingerprint = format_of(folder), opened(folder).fingerprint
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, "resample": 2}}))
    assert form.resample == "bicubic"
    assert format_of(folder).resample == "bilinear"
    assert opened(folder).fingerprint != fingerprint  # other pixels are another model
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4, "image_processor": None}))
    assert format_of(folder) == form  # as transformers 4 wrote it


def test_a_folder_without_the_preprocessors_file_opens_but_takes_no_pictures(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    assert PREPROCESSOR not in opened(folder).config
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        format_of(folder)


def test_a_damaged_processors_file_is_named(folder: Path) -> None:
    (folder / "processor_config.json").write_text('{"image_processor": "CLIP"}')
    with pytest.raises(ModelError, match="image_processor is no object"):
        opened(folder)


LINES = "{% for message in messages %}{{ '<image>\\n' }}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "after"),
    [(None, ""), (LINES, "\n"), (LINES.replace("\\n", "\n"), "\n"), (LINES.replace("\\n", ""), ""), ("{{ 'x' }}", "")],
)
def test_behind_a_picture_stands_what_the_template_writes_there(folder: Path, template: Any, after: str) -> None:
    if template is not None:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    form = format_of(folder)
    assert (form.before, form.after) == ("", after)
    assert opened(folder).chat_template == template


@pytest.mark.parametrize("where", ["above", "extra_special_tokens", "nowhere"])
def test_gemma_3_has_tokens_around_a_picture(where: str, tmp_path: Path) -> None:
    tokens = {"boi_token": "<begin>", "eoi_token": {"content": "<end>"}}
    stated: dict[str, Any] = {"above": tokens, "extra_special_tokens": {where: tokens}, "nowhere": {}}[where]
    form = format_of(write(tmp_path / "model", gemma3(), **stated))
    names = ("<start_of_image>", "<end_of_image>") if where == "nowhere" else ("<begin>", "<end>")
    assert (form.before, form.after) == (f"\n\n{names[0]}", f"{names[1]}\n\n")


def test_qwen_has_tokens_around_a_picture(tmp_path: Path) -> None:
    form = format_of(write(tmp_path / "model", qwen2_5_vl()))
    assert (form.before, form.after) == ("<|vision_start|>", "<|vision_end|>")
    assert (form.layout, form.least_pixels, form.most_pixels) == ("dynamic", 500, 2000)


def test_sizes_that_the_decoders_configuration_leaves_out_are_known(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["vocab_size"]
    config["text_config"]["eos_token_id"] = 7
    path.write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert opened(folder).vocab_size == 32_000
    assert opened(folder).eos_ids == {7}
