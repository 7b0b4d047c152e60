"""Whole models that see against transformers: prompts with pictures in, logits out, through the engine's runners."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from umbel.lang.runtime_options import Kernels
from umbel.srt.core.batch import PICTURE_BASE, Runner, picture_tokens
from umbel.srt.core.messages import EnginePicture
from umbel.srt.models.vision.config import GRID_DECODERS
from umbel.srt.models.vision.parts import build_vision, text_part
from umbel.srt.models.vision.preprocessor import read_normalisation, read_picture_format
from umbel.srt.multimodal.store import VisionStore
from umbel.srt.runners.build import build_runner

from ...multimodal.samples import decoded, saved
from ..reference import Piece, Sequences, random_tokens, relative_error, run_steps
from ..seeing import Seeing, on_device
from .tiny import (
    IMAGE_TOKEN,
    PATCH,
    Tiny,
    gemma3,
    llava,
    llava_next,
    noise,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
)

NUM_SLOTS = 700
HEADS = {"head_dim": 16}  # what the native kernels take

CASES: dict[str, Callable[[], Tiny]] = {
    "llava, clip": lambda: llava(text=HEADS),
    "llava, clip, full": lambda: llava(text=HEADS, vision_feature_select_strategy="full"),
    "llava, siglip, several layers": lambda: llava(tower="siglip", text=HEADS, vision_feature_layer=[1, -1]),
    "llava, siglip, full": lambda: llava(tower="siglip", text=HEADS, vision_feature_select_strategy="full"),
    "llava, mistral": lambda: llava(text={**HEADS, "model_type": "mistral", "sliding_window": 20}),
    "llava, qwen 2, tied": lambda: llava(text={"model_type": "qwen2", "hidden_size": 64, "tie_word_embeddings": True}),
    "llava next, clip": lambda: llava_next(text=HEADS),
    "llava next, siglip": lambda: llava_next(tower="siglip", text=HEADS, vision_feature_select_strategy="full"),
    "gemma 3": gemma3,
    "gemma 3, wide window": lambda: gemma3(sliding_window=64),
    "qwen 2": qwen2_vl,
    "qwen 2.5": qwen2_5_vl,
    "qwen 3": qwen3_vl,
    "qwen 3, experts": qwen3_vl_moe,
    "qwen 3, two layers": lambda: qwen3_vl(num_hidden_layers=2),  # the last one adds, too
}
# Each sequence: text, and pictures by (width, height) where they stand. Two in one prompt, one at the very beginning.
PROMPTS: list[list[int | tuple[int, int]]] = [
    [7, (50, 31), 9],
    [(24, 24), 5, (20, 77), 11],
    [23],
]


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]  # pictures by number
    images: list[Image.Image]


def prompts_of(tiny: Tiny) -> list[Prompt]:
    """Numbers go on from prompt to prompt."""
    prompts, number = [], 0
    for seed, parts in enumerate(PROMPTS):
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                ids += [token for token in random_tokens(part, seed * 10 + len(ids)) if token != IMAGE_TOKEN]
                continue
            number += 1
            images.append(noise(*part, seed=number))
            ids += picture_tokens(number, tiny.picture(images[-1], number).tokens)
        prompts.append(Prompt(ids, images))
    return prompts


def expected_logits(tiny: Tiny, prompt: Prompt) -> torch.Tensor:
    """[tokens, vocab] by transformers."""
    shown = np.array(prompt.token_ids) >= PICTURE_BASE
    ids = np.where(shown, IMAGE_TOKEN, prompt.token_ids)
    inputs: dict[str, Any] = tiny.inputs(*prompt.images) if prompt.images else {}
    if tiny.model.config.model_type == "gemma3":
        inputs["token_type_ids"] = torch.from_numpy(shown.astype(np.int64))[None]
    if tiny.model.config.model_type in GRID_DECODERS:
        inputs["mm_token_type_ids"] = torch.from_numpy(shown.astype(np.int64))[None]
    with torch.no_grad():
        return tiny.model(input_ids=torch.from_numpy(ids)[None], use_cache=False, **inputs).logits[0].float()


def pieces_of(prompt: Prompt, index: int, *, whole_pictures: bool) -> list[Piece]:
    """A prompt in chunks that end anywhere, or in such that end at a picture's ends at most."""
    length = len(prompt.token_ids)
    ends = {5, 11, 30, 48, length}
    if whole_pictures:
        shown = np.diff(np.array(prompt.token_ids) >= PICTURE_BASE, prepend=False, append=False)
        ends = {*np.flatnonzero(shown).tolist(), length}
    cuts = sorted({0, *(end for end in ends if 0 < end <= length)})
    return [Piece(index, start, end - start) for start, end in itertools.pairwise(cuts)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def runner_of(tiny: Tiny, kernels: str) -> Runner:
    """kernels: those of `Runtime`, or "device", the engine of CUDA."""
    if kernels == "device":
        vision = build_vision(tiny.config, tiny.tensors, dtype=torch.float32, device=torch.device("cpu"))
        return on_device(*text_part(tiny.config, tiny.tensors), NUM_SLOTS, VisionStore(vision))
    chosen = cast(Kernels, kernels)
    return build_runner(tiny.config, tiny.tensors, num_slots=NUM_SLOTS, dtype="float32", kernels=chosen)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        *((case, kernels) for case in CASES for kernels in ("torch", "native")),
        *((case, "device") for case in ("qwen 2.5", "qwen 3")),
    ],
)
def test_logits_equal_those_of_transformers_however_the_prompts_are_cut(case: str, kernels: str) -> None:
    tiny = CASES[case]()
    runner = runner_of(tiny, kernels)
    assert runner.pictures is not None
    prompts = prompts_of(tiny)
    number = 0
    for prompt in prompts:
        for image in prompt.images:
            number += 1
            runner.pictures.put(tiny.picture(image, number))
    both_ways = runner.pictures.both_ways
    sequences = Seeing([prompt.token_ids for prompt in prompts], NUM_SLOTS, runner.pictures)
    expected = [expected_logits(tiny, prompt) for prompt in prompts]
    together = [[Piece(index, 0, len(prompt.token_ids)) for index, prompt in enumerate(prompts)]]
    chunks = [[p] for i, prompt in enumerate(prompts) for p in pieces_of(prompt, i, whole_pictures=both_ways)]
    for steps in (together, chunks):
        runner.clear()
        for actual, logits in zip(run_steps(runner, sequences, steps), expected, strict=True):
            assert relative_error(actual, logits) < 1e-4


def test_experts_are_read_with_inputs_or_outputs_first() -> None:
    """As they are published, and as transformers saves them."""
    tiny = qwen3_vl_moe()
    published = tiny.tensors
    saved_again = {name: tensor.detach() for name, tensor in tiny.model.state_dict().items()}
    assert any(published[name].shape != tensor.shape for name, tensor in saved_again.items())
    prompt = prompts_of(tiny)[2]
    for tensors in (published, saved_again):
        runner = build_runner(tiny.config, tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="torch")
        steps = [[Piece(0, 0, len(prompt.token_ids))]]
        actual = run_steps(runner, Sequences([prompt.token_ids], NUM_SLOTS), steps)[0]
        assert relative_error(actual, expected_logits(tiny, prompt)) < 1e-4


def test_a_text_prompt_of_a_model_that_sees_is_a_text_models() -> None:
    tiny = gemma3()
    runner = build_runner(tiny.config, tiny.tensors, num_slots=NUM_SLOTS, dtype="float32")
    prompt = prompts_of(tiny)[2]
    actual = run_steps(runner, Sequences([prompt.token_ids], NUM_SLOTS), [[Piece(0, 0, len(prompt.token_ids))]])[0]
    assert relative_error(actual, expected_logits(tiny, prompt)) < 1e-4


# ------------------------------------------------------------------------------------ clips

SHOWN = 3  # frames of a clip; the second part repeats the last one
WHILE = 0.3  # seconds between frames
CLIP = saved(
    noise(50, 31, seed=1), "GIF", save_all=True, append_images=[noise(50, 31, 2), noise(50, 31, 3)], duration=300
)


def clip_parts(tiny: Tiny) -> list[EnginePicture]:
    """A clip as the gateway sends it."""
    found = decoded(CLIP, SHOWN, form=read_picture_format(tiny.config))
    return [EnginePicture(number=index, **msgspec.structs.asdict(part.raster)) for index, part in enumerate(found)]


def clip_by_transformers(tiny: Tiny, parts: list[EnginePicture], ids: NDArray[np.int64]) -> torch.Tensor:
    """[tokens, vocab], with patches cut as transformers' video processors do."""
    height, width = parts[0].tile_height, parts[0].tile_width
    rows, columns = height // PATCH, width // PATCH
    raw = np.frombuffer(b"".join(part.pixels for part in parts), np.uint8).reshape(len(parts), 2, height, width, 3)
    normal = read_normalisation(tiny.config)
    pixels = (torch.tensor(raw).float() * normal.factor - torch.tensor(normal.mean)) / torch.tensor(normal.std)
    cut = pixels.permute(0, 1, 4, 2, 3).reshape(len(parts), 2, 3, rows // 2, 2, PATCH, columns // 2, 2, PATCH)
    patches = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * PATCH**2)
    shown = ids >= PICTURE_BASE
    more = {"second_per_grid_ts": torch.tensor([2 * WHILE])} if tiny.model.config.model_type == "qwen2_5_vl" else {}
    with torch.no_grad():
        return tiny.model(
            input_ids=torch.from_numpy(np.where(shown, tiny.model.config.video_token_id, ids))[None],
            pixel_values_videos=patches,
            video_grid_thw=torch.tensor([[len(parts), rows, columns]]),
            mm_token_type_ids=torch.from_numpy(2 * shown.astype(np.int64))[None],
            use_cache=False,
            **more,
        ).logits[0]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("qwen 2", "native"), ("qwen 2.5", "native"), ("qwen 2.5", "torch"), ("qwen 3", "native"), ("qwen 3", "device")],
)
def test_a_clip_is_read_as_transformers_reads_it(family: str, kernels: str) -> None:
    pytest.importorskip("av", reason="clips need PyAV (the video extra)")
    tiny = CASES[family]()
    parts = clip_parts(tiny)
    assert [part.time for part in parts] == {"qwen 2": [None, 1], "qwen 2.5": [None, 2], "qwen 3": [None, None]}[family]
    words = [token % 90 for token in random_tokens(14, 3)]
    time = words[:3] if family == "qwen 3" else []
    ids = [
        *words[:5],
        *time,
        *picture_tokens(0, parts[0].tokens),
        *time,
        *picture_tokens(1, parts[1].tokens),
        *words[5:],
    ]
    runner = runner_of(tiny, kernels)
    assert runner.pictures is not None
    for part in parts:
        runner.pictures.put(part)
    sequences = Seeing([ids], NUM_SLOTS, runner.pictures)
    expected = clip_by_transformers(tiny, parts, np.array(ids))
    cuts = [0, 7, 20, 31, 50, len(ids)]
    for steps in (
        [[Piece(0, 0, len(ids))]],
        [[Piece(0, start, end - start)] for start, end in itertools.pairwise(cuts)],
    ):
        runner.clear()
        assert relative_error(run_steps(runner, sequences, steps)[0], expected) < 1e-4
