"""Folders of models that see, through the whole runtime: programs show pictures, and say what transformers says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import umbel as ul
from PIL import Image
from umbel.srt.core.batch import picture_tokens
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.weights import ModelSource, open_model

from ... import toy_tokenizers
from .test_seeing_models import CLIP, SHOWN, clip_by_transformers, clip_parts
from .tiny import IMAGE_TOKEN, Tiny, gemma3, llava_next, noise, qwen2_5_vl, qwen3_vl

pytestmark = pytest.mark.processes

LEAD, QUESTIONS, LENGTH = "Look: ", (" what is it?", " and where?"), 8
SIZES = {"vocab_size": toy_tokenizers.byte_level().get_vocab_size(), "max_position_embeddings": 1024}
MAKES = {
    "llava_next": lambda: llava_next(text={**SIZES, "head_dim": 16}),
    "gemma3": lambda: gemma3(**SIZES),
    "qwen3_vl": lambda: qwen3_vl(**SIZES),
}


def write(folder: Path, tiny: Tiny) -> ModelSource:
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(toy_tokenizers.byte_level().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"boi_token": "the", "eoi_token": "of"}))
    return open_model(folder)


def ids_around(source: ModelSource, tokenizer: HFTokenizer, question: str) -> tuple[list[int], list[int]]:
    form = source.picture_format
    assert form is not None
    before = tokenizer.encode(LEAD, first=True) + tokenizer.encode(form.before, first=False)
    return before, tokenizer.encode(form.after, first=False) + tokenizer.encode(question, first=False)


def text_by_transformers(tiny: Tiny, before: list[int], behind: list[int], image: Image.Image) -> list[int]:
    """The most likely tokens, one after the other."""
    shown = tiny.picture(image).tokens
    ids = before + [IMAGE_TOKEN] * shown + behind
    inputs = tiny.inputs(image)
    prompt = len(ids)
    for _ in range(LENGTH):
        places = np.arange(len(ids))
        inside = (places >= len(before)) & (places < len(before) + shown)
        name = {"gemma3": "token_type_ids", "qwen3_vl": "mm_token_type_ids"}.get(tiny.model.config.model_type)
        if name is not None:
            inputs[name] = torch.from_numpy(inside.astype(np.int64))[None]
        with torch.no_grad():
            ids.append(int(tiny.model(torch.tensor([ids]), use_cache=False, **inputs).logits[0, -1].argmax()))
    return ids[prompt:]


@ul.function
def ask(s: ul.State, image: Image.Image, question: str) -> None:
    s += LEAD + ul.image(image) + question + ul.gen("answer", max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "family",
    [name if number == 0 else pytest.param(name, marks=pytest.mark.nightly) for number, name in enumerate(MAKES)],
)
def test_two_questions_about_one_picture(family: str, tmp_path: Path) -> None:
    tiny = MAKES[family]()
    source = write(tmp_path / "model", tiny)
    tokenizer = source.tokenizer()
    image = noise(50, 31)
    with ul.Runtime(model=str(tmp_path / "model"), dtype="float32", pool_tokens=1000, threads=1) as backend:
        states = [ask.run(image=image, question=question, backend=backend) for question in QUESTIONS]
        said = [state["answer"] for state in states]
        usages = [state.usage for state in states]
    for question, answer in zip(QUESTIONS, said, strict=True):
        before, behind = ids_around(source, tokenizer, question)
        tokens = text_by_transformers(tiny, before, behind, image)
        assert answer == b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
    most = max(usage.cached_tokens for usage in usages)  # whichever came second
    assert most >= tiny.picture(image).tokens


@ul.function
def watch(s: ul.State, clip: bytes) -> None:
    s += LEAD + ul.video(clip, num_frames=SHOWN) + QUESTIONS[0]
    s += ul.gen("answer", max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_clip_is_shown_as_the_family_writes_it(family: str, tmp_path: Path) -> None:
    """One text around all parts, or one around each part, with its time before it."""
    pytest.importorskip("av", reason="clips need PyAV (the video extra)")
    tiny = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}[family](**SIZES)
    tiny.model.config.video_token_id = SIZES["vocab_size"] - 1  # in no text here
    source = write(tmp_path / "model", tiny)
    tokenizer, form = source.tokenizer(), source.picture_format
    assert form is not None
    first, second = (picture_tokens(part.number, part.tokens) for part in clip_parts(tiny))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, first=False)

    before, after = encode(form.before), encode(form.after)
    shown = [*before, *first, *second, *after]
    if family == "qwen3_vl":
        times = [encode(f"<{time} seconds>") for time in ("0.1", "0.6")]
        shown = [*times[0], *before, *first, *after, *times[1], *before, *second, *after]
    ids = [*tokenizer.encode(LEAD, first=True), *shown, *encode(QUESTIONS[0])]
    for _ in range(LENGTH):
        ids.append(int(clip_by_transformers(tiny, clip_parts(tiny), np.array(ids))[-1].argmax()))
    backend = LocalBackend(model=str(tmp_path / "model"), dtype="float32", pool_tokens=1000)
    for _ in range(2):
        state = watch.run(CLIP, backend=backend)
        assert state["answer"] == b"".join(map(tokenizer.token_bytes, ids[-LENGTH:])).decode("utf-8", "replace")
    assert state.usage.cached_tokens >= len(first) + len(second)
