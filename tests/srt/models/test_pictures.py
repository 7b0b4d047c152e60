"""Pictures in the runners: logits are those of transformers with the tower's embeddings in their rows."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from umbel.lang.sampling import SamplingParams
from umbel.srt.attention.backend import TorchBackend
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import PICTURE_BASE, Runner, picture_spans, picture_tokens
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineGenerate
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.models.decoder import attention_geometry, build_model
from umbel.srt.multimodal.store import VisionStore
from umbel.srt.runners.cpu_runner import CpuRunner, build_cpu_runner
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from ..multimodal.toy_vision import ToyVision, picture
from .reference import Piece, random_tokens, reference_model, relative_error, run_steps, tensors_of
from .seeing import Seeing, on_device

NUM_SLOTS = 120
SIZES = {4: 7, 5: 12}  # tokens of the pictures, by number
TOKEN_IDS = [
    [*random_tokens(5, 1), *picture_tokens(4, 7), *random_tokens(3, 2), *picture_tokens(5, 12), *random_tokens(4, 3)],
    [*picture_tokens(5, 12), *picture_tokens(5, 12), *random_tokens(2, 4)],
    random_tokens(9, 5),
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2},  # shorter than a picture
}
WHOLE = [[Piece(0, 0, 31), Piece(1, 0, 26), Piece(2, 0, 9)]]
BETWEEN_PICTURES = [
    [Piece(0, 0, 5), Piece(1, 0, 12)],
    [Piece(0, 5, 9), Piece(1, 12, 13), Piece(2, 0, 4)],
    [Piece(0, 14, 13), Piece(1, 25, 1), Piece(2, 4, 5)],
    [Piece(0, 27, 4)],
]
INSIDE_PICTURES = [
    [Piece(0, 0, 8), Piece(1, 0, 5)],
    [Piece(0, 8, 1), Piece(1, 5, 15), Piece(2, 0, 9)],
    [Piece(0, 9, 22), Piece(1, 20, 6)],
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def store_of(*, both_ways: bool) -> tuple[VisionStore, ToyVision]:
    vision = ToyVision(both_ways=both_ways)
    store = VisionStore(vision)
    for number, tokens in SIZES.items():
        store.put(picture(number, tokens))
    return store, vision


def runner_of(reference: PreTrainedModel, engine: str, store: VisionStore) -> TorchRunner | CpuRunner | CudaRunner:
    """engine: "torch", "native" or "device", the engine of CUDA with the references of its kernels on the host."""
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    if engine == "device":
        return on_device(config, tensors, NUM_SLOTS, store)
    if engine == "torch":
        model = build_model(config, tensors, dtype=torch.float32, pack=False)
        backend = TorchBackend(attention_geometry(model), "cpu", block_rows=4)
        return TorchRunner(model, num_slots=NUM_SLOTS, backend=backend, pictures=store)
    return build_cpu_runner(
        config,
        tensors,
        library=load_library(),
        size=lambda geometry: PoolSize(NUM_SLOTS),
        dtype=torch.float32,
        weights="float32",
        tree_attention=True,
        screened_head=False,
        pictures=store,
    )


def reference_logits(reference: PreTrainedModel, ids: np.ndarray, *, both_ways: bool) -> torch.Tensor:
    """[tokens, vocab] of transformers, with embeddings in place of ids and masks written out."""
    numbers = ids - PICTURE_BASE
    embeddings = reference.get_input_embeddings()(torch.from_numpy(np.where(numbers < 0, ids, 0))[None])
    position = torch.arange(len(ids))
    causal = position[None, :] <= position[:, None]
    together = torch.zeros_like(causal)
    for start, end, number, _ in picture_spans(ids, SIZES.get):
        embeddings[0, start:end] = ToyVision().encode(picture(number, SIZES[number]))
        together[start:end, start:end] = both_ways
    masks = {"full_attention": causal | together}
    window = getattr(reference.config, "sliding_window", None)
    if window is not None:
        masks["sliding_attention"] = causal & (position[None, :] > position[:, None] - window) | together
    additive = {
        name: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None] for name, seen in masks.items()
    }
    mask: Any = additive if window is not None else additive["full_attention"]  # what transformers takes, by family
    with torch.no_grad():
        return reference(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits[0].float()


@pytest.mark.parametrize("engine", ["torch", "native", "device"])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_rows_of_pictures_take_the_embeddings_of_a_tower(family: str, both_ways: bool, engine: str) -> None:
    with torch.no_grad():
        reference = reference_model(family, **MODELS[family])
        expected = [reference_logits(reference, np.array(ids), both_ways=both_ways) for ids in TOKEN_IDS]
    store, vision = store_of(both_ways=both_ways)
    runner, sequences = runner_of(reference, engine, store), Seeing(TOKEN_IDS, NUM_SLOTS, store)
    for steps in (WHOLE, BETWEEN_PICTURES, *([] if both_ways else [INSIDE_PICTURES])):
        runner.clear()
        for actual, truth in zip(run_steps(runner, sequences, steps), expected, strict=True):
            assert relative_error(actual, truth) < 2e-5
    assert sorted(vision.encoded) == [4, 5], "each picture goes through the tower once"


def texts(runner: Runner, **settings: Any) -> tuple[list[list[int]], dict[str, float]]:
    """What the scheduler's requests say, in two rounds, and its counters."""
    config = SchedulerConfig(check_every_step=True, **settings)
    scheduler = Scheduler(runner, lambda token: b"", frozenset(), config, VirtualClock())
    said: dict[int, list[int]] = {}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number, end in enumerate((31, 29)):
        for branch in range(3):
            prompt = [*TOKEN_IDS[0][:end], *random_tokens(3, branch)]
            scheduler.handle_message(EngineGenerate(10 * number + branch, prompt, greedy, False))
        while not scheduler.idle:
            for event in scheduler.step():
                assert isinstance(event, Ended), event
                said[event.id] = event.token_ids
    return [said[message_id] for message_id in sorted(said)], scheduler.counters


@pytest.mark.parametrize("engine", ["torch", "native", "device"])
@pytest.mark.parametrize("both_ways", [True, False])
def test_texts_are_the_same_with_and_without_reuse_whatever_the_chunks(both_ways: bool, engine: str) -> None:
    reference = reference_model("gemma3_text", **MODELS["gemma3_text"])
    runner = runner_of(reference, engine, store_of(both_ways=both_ways)[0])
    alone, computed = texts(runner, radix_cache=False, max_step_tokens=None)
    reused, found = texts(runner, max_step_tokens=6)
    assert reused == alone
    assert computed["cached_tokens"] == 0
    assert found["cached_tokens"] == 2 * 31 + 3 * 29, "branches share what the first computes, the second round all"


@pytest.mark.parametrize("engine", ["torch", "native", "device"])
def test_facts_say_what_the_tower_did(engine: str) -> None:
    store, _ = store_of(both_ways=False)
    runner = runner_of(reference_model("llama", **MODELS["llama"]), engine, store)
    run_steps(runner, Seeing(TOKEN_IDS, NUM_SLOTS, store), INSIDE_PICTURES)
    facts = runner.facts()
    assert facts["pictures_computed"] == 2
    assert facts["picture_features_found"] == 6
    assert isinstance(facts["tower_seconds"], float)


def test_a_model_of_text_says_nothing_of_pictures() -> None:
    reference = reference_model("llama", **MODELS["llama"])
    model = build_model(reference.config.to_dict(), tensors_of(reference), dtype=torch.float32, pack=False)
    runner = TorchRunner(model, num_slots=NUM_SLOTS)
    assert runner.pictures is None
    assert not any("picture" in name for name in runner.facts())
