"""Rank 0 tells the others what it computes: steps, launched steps and pictures. The other ranks are threads here."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.errors import EngineError
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import AsyncRunner, Batch, Logits, Runner
from umbel.srt.core.instruments import FaultHook, VirtualClock, no_faults
from umbel.srt.core.messages import Ended, EngineFailed, EngineForget, EngineGenerate, EnginePicture, FromEngine
from umbel.srt.distributed.ranks import (
    Clear,
    KnownSlots,
    LeaderAsyncRunner,
    RanksApart,
    RankStep,
    SentSlots,
    ToRank,
    lead,
    to_rank,
)
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.models.sharding import ShardedTensors, shard_config
from umbel.srt.multimodal.store import VisionStore
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.device import Accelerator, CaptureFailed, Graph, HostAccelerator
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from ..models.reference import Piece, Sequences, random_tokens, relative_error, run_steps
from ..models.vision.test_seeing_models import NUM_SLOTS, Seeing, expected_logits, pieces_of, prompts_of
from ..models.vision.tiny import Tiny, gemma3, llava_next, qwen3_vl
from ..multimodal.toy_vision import ToyVision, picture
from ..runners.cuda.engines import in_torch, on_host, tiny_model
from ..runners.cuda.test_scheduling import Question, answers, traffic
from .threads import ThreadCommunicator, ThreadRanks, led, on_ranks


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------ messages


def sent(message: ToRank) -> ToRank:
    """As another rank reads it."""
    others = ThreadRanks(2)
    others.send(message)
    others.close()
    (heard,) = others.received_by(1)
    return heard


def test_a_step_arrives_as_it_was_sent() -> None:
    sequences = Sequences([random_tokens(9, 1), random_tokens(5, 2)], 40)
    whole = replace(
        sequences.batch([Piece(0, 3, 6), Piece(1, 4, 1)]),
        paths=(((1, 0, 3), (4, 3, 6)), ()),
        generated=np.array([2, 1], dtype=np.int32),
        spans=(((0, 4),), ()),
        token_sources=np.array([-1, -1, -1, -1, -1, 0, 2]),
        rope_positions=np.arange(21).reshape(3, 7),
    )
    plain = replace(whole, paths=(), generated=None, spans=(), token_sources=None, rope_positions=None)
    for batch in (whole, plain):
        message = sent(RankStep.of(batch, SentSlots()))
        assert isinstance(message, RankStep)
        arrived = message.batch(KnownSlots(), KnownSlots())
        for name in ("token_ids", "positions", "write_slots", "query_lengths", "prefix_lengths", "logit_rows"):
            np.testing.assert_array_equal(getattr(arrived, name), getattr(batch, name))
            assert getattr(arrived, name).dtype == getattr(batch, name).dtype
        for slots, own in zip(arrived.slots, batch.slots, strict=True):
            np.testing.assert_array_equal(slots, own)
        assert (arrived.paths, arrived.spans) == (batch.paths, batch.spans)
        for name in ("generated", "token_sources", "rope_positions"):
            np.testing.assert_equal(getattr(arrived, name), getattr(batch, name))


def numbered(
    numbers: list[int], slots: list[list[int]], changed: list[int], *, windows: list[list[int]] | None = None
) -> Batch:
    """A step in which each sequence has one row, its last slot."""
    ends = np.array([len(own) for own in slots])
    return replace(
        Sequences([random_tokens(len(own), 1) for own in slots], 100).batch(
            [Piece(number, end - 1, 1) for number, end in enumerate(ends.tolist())]
        ),
        slots=tuple(np.array(own, dtype=np.int32) for own in slots),
        window_slots=None if windows is None else tuple(np.array(own, dtype=np.int32) for own in windows),
        sequences=np.array(numbers),
        changed=np.array(changed, dtype=np.int32),
    )


STEPS = [
    numbered([7, 4], [[3, 5, 6], [8, 9]], [0, 0]),
    numbered([7, 4], [[3, 5, 6, 10], [8, 9, 11]], [3, 2]),
    numbered([4, 9], [[8, 9, 11, 12], [20, 21, 22, 23]], [3, 0]),
    numbered([9, 7], [[20, 41, 42, 23, 24], [3, 5, 6, 10, 13]], [1, 4]),  # of the tree's; one that has paused
    numbered([9, 7], [[20, 41, 42, 23, 24, 25], [3, 5, 6, 10, 13, 14]], [5, 5]),
]


def test_slots_that_the_others_have_are_not_sent_again() -> None:
    sending, known, window = SentSlots(), KnownSlots(), KnownSlots()
    counts = []
    for step in STEPS:
        message = sent(RankStep.of(step, sending))
        assert isinstance(message, RankStep)
        counts.append(len(message.slots) // 4)
        arrived = message.batch(known, window)
        assert [own.tolist() for own in arrived.slots] == [own.tolist() for own in step.slots]
    assert counts == [5, 2, 5, 9, 2]


def test_a_step_of_unnumbered_sequences_is_sent_whole_and_forgets_the_others() -> None:
    sending, known, window = SentSlots(), KnownSlots(), KnownSlots()
    counts = []
    for step in (STEPS[0], replace(STEPS[1], sequences=None, changed=None), STEPS[2]):
        message = sent(RankStep.of(step, sending))
        assert isinstance(message, RankStep)
        counts.append(len(message.slots) // 4)
        arrived = message.batch(known, window)
        assert [own.tolist() for own in arrived.slots] == [own.tolist() for own in step.slots]
    assert counts == [5, 7, 8]


def test_slots_of_window_layers_are_right_where_rows_see_them() -> None:
    sending, known, window = SentSlots(), KnownSlots(), KnownSlots()
    for step in (
        numbered([7], [[3, 5, 6, 8]], [0], windows=[[0, 2, 4, 6]]),
        numbered([7], [[3, 5, 6, 8, 9]], [4], windows=[[0, 0, 4, 6, 1]]),
    ):
        message = sent(RankStep.of(step, sending))
        assert isinstance(message, RankStep)
        (arrived,) = message.batch(known, window).slots_of(windowed=True)
        assert step.window_slots is not None
        assert arrived[-3:].tolist() == step.window_slots[0][-3:].tolist()


def test_a_message_too_large_is_refused() -> None:
    others = ThreadRanks(2)
    others._ends[0].sendall((1 << 40).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="larger than the limit"):
        next(to_rank(others._theirs[0]))
    others.close()


# ------------------------------------------------------------------------------------------ steps


def part_of(
    config: dict[str, Any],
    tensors: Tensors,
    communicator: ThreadCommunicator,
    *,
    accelerator: Accelerator | None = None,
    **switches: bool,
) -> CudaRunner:
    """A rank of the CUDA engine, on the host."""
    cut = ShardedTensors(tensors, config, communicator)
    return on_host(
        shard_config(config, communicator.ranks),
        cut,
        communicator=communicator,  # type: ignore[arg-type]  # it is no switch
        accelerator=accelerator,
        **switches,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_of_the_cuda_engine_on_two_ranks_are_those_of_one(overlap: bool, graphs: bool) -> None:
    config, tensors = tiny_model("qwen 3")
    questions = traffic(11)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1)
    with led(2, lambda communicator: part_of(config, tensors, communicator, cuda_graphs=graphs)) as (runner, _):
        assert isinstance(runner, LeaderAsyncRunner)
        texts, scheduler = answers(runner, questions, max_running=8, overlap=overlap)
        facts = runner.facts()
    assert texts == truth
    assert (scheduler.counters["overlapped_steps"] > 5) is overlap
    assert (int(facts["graph_replays"]) > 5) is graphs


class NoCapture(HostAccelerator):
    """Runs the work of a capture, as CUDA does before it captures, and then has no memory for a graph."""

    def capture(self, work: Callable[[], None]) -> Graph:
        super().capture(work)
        raise CaptureFailed("OutOfMemoryError: no room for a graph")


@pytest.mark.parametrize("lacking", [(0,), (1,), (1, 2), (0, 1, 2)])
@pytest.mark.sampled(4)
def test_ranks_of_which_one_cannot_capture_run_without_graphs(
    lacking: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = tiny_model("qwen 3", num_attention_heads=6, num_key_value_heads=3, intermediate_size=48)
    questions = traffic(5)[:4]
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1)

    def build(communicator: ThreadCommunicator) -> CudaRunner:
        accelerator = NoCapture() if communicator.rank in lacking else HostAccelerator()
        runner = part_of(config, tensors, communicator, accelerator=accelerator)
        runner.capture_graphs()
        return runner

    with led(3, build) as (runner, _):
        texts, _ = answers(runner, questions, max_running=8, overlap=True)
        facts = runner.facts()
    assert texts == truth
    assert (facts["graphs"], facts["graph_replays"]) == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"steps are launched kernel by kernel, not as graphs: rank {lacking[0]}: steps of 8 rows: "
        "OutOfMemoryError: no room for a graph"
    ]


def test_ranks_on_different_devices_run_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    config, tensors = tiny_model("qwen 3")

    def facts(communicator: ThreadCommunicator) -> Mapping[str, str | int | float]:
        accelerator = HostAccelerator()
        accelerator.name = "the guest" if communicator.rank else "the host"
        runner = part_of(config, tensors, communicator, accelerator=accelerator)
        runner.capture_graphs()
        return runner.facts()

    assert [one["graphs"] for one in on_ranks(2, facts)] == [0, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "steps are launched kernel by kernel, not as graphs: rank 0: the ranks have different devices, here the host"
    ]


def test_ranks_capture_the_same_graphs() -> None:
    config, tensors = tiny_model("qwen 3")

    def graphs(communicator: ThreadCommunicator) -> str | int | float:
        runner = part_of(config, tensors, communicator)
        runner.capture_graphs()
        return runner.facts()["graphs"]

    assert on_ranks(2, graphs) == [4, 4]  # 1, 2, 4, 8


@pytest.mark.parametrize("overlap", [True, False])
def test_guesses_of_next_tokens_change_no_text_of_two_ranks(overlap: bool) -> None:
    config, tensors = tiny_model("qwen 3")
    questions = [
        Question([5, 6, 7] * 4, SamplingParams(max_tokens=30, ignore_eos=True, seed=3, temperature=temperature))
        for temperature in (0.0, 0.3)
    ]
    with led(2, lambda communicator: part_of(config, tensors, communicator)) as (runner, _):
        truth, without = answers(runner, questions, max_running=8, overlap=overlap)
        texts, scheduler = answers(runner, questions, max_running=8, overlap=overlap, token_guesses=True)
    assert texts == truth
    assert without.counters["guessed_prompt_rows"] == 0 < scheduler.counters["accepted_prompt_rows"]
    assert scheduler.counters["steps"] < without.counters["steps"]


@pytest.mark.parametrize("point", ["engine.forward", "engine.sample"])
def test_a_step_or_a_row_that_fails_ends_its_requests_only(point: str) -> None:
    config, tensors = tiny_model("qwen 3")
    visits = 0

    def fault(visited: str) -> None:
        nonlocal visits
        visits += visited == point
        if visited == point and visits == 3:
            raise EngineError("on purpose")

    def ask(scheduler: Scheduler, number: int) -> FromEngine:
        scheduler.handle_message(
            EngineGenerate(number, [5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0), False)
        )
        events = [event for _ in range(20) for event in scheduler.step()]
        return events[-1]

    def asked(runner: Runner, faults: FaultHook) -> list[FromEngine]:
        scheduler = Scheduler(runner, lambda _: b"a", frozenset(), SchedulerConfig(), VirtualClock(), faults)
        return [ask(scheduler, number) for number in (1, 2)]

    whole, _ = asked(in_torch(config, tensors), no_faults)
    with led(2, lambda communicator: in_torch(config, tensors, communicator=communicator)) as (runner, others):
        failed, answered = asked(runner, fault)
    assert isinstance(failed, EngineFailed)
    assert isinstance(answered, Ended)
    assert isinstance(whole, Ended)
    assert answered.token_ids == whole.token_ids
    assert others.sent.count(Clear()) == (point == "engine.forward"), "the keys behind a row that failed are sound"


class Refusing:
    """An `batch.AsyncRunner` whose steps fail on this rank."""

    vocab_size, context_length, num_slots, num_states = 10, 10, 10, 0
    window_pool = None
    pictures = pages = chooser = trie_walk = None

    def forward(self, batch: Batch) -> Logits:
        raise MemoryError("no room")

    launch = forward

    def facts(self) -> dict[str, int]:
        return {}

    def clear(self) -> None:
        """There is nothing."""


def test_a_step_that_fails_on_one_rank_is_nobody_elses_to_go_on_from() -> None:
    runner: Runner = lead(Refusing(), ThreadRanks(2), sums="threads")
    batch = Sequences([[1, 2]], 10).batch([Piece(0, 0, 2)])
    assert isinstance(runner, AsyncRunner)
    for begin in (runner.forward, runner.launch):
        with pytest.raises(RanksApart):
            begin(batch)


def test_everybody_forgets_the_pool_together() -> None:
    others = ThreadRanks(2)
    lead(Refusing(), others, sums="threads").clear()
    assert others.sent == [Clear()]


# ------------------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("make", [llava_next, gemma3, qwen3_vl])
def test_pictures_are_seen_by_all_ranks(make: Callable[[], Tiny]) -> None:
    tiny = make()
    prompts = prompts_of(tiny)

    def one(communicator: ThreadCommunicator) -> Runner:
        return build_runner(
            tiny.config, tiny.tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="torch", communicator=communicator
        )

    with led(2, one) as (runner, others):
        store = runner.pictures
        assert store is not None
        images = [image for prompt in prompts for image in prompt.images]
        for number, image in enumerate(images, 1):
            store.put(tiny.picture(image, number))
        sequences = Seeing([prompt.token_ids for prompt in prompts], NUM_SLOTS, store)
        steps = [
            [piece]
            for index, prompt in enumerate(prompts)
            for piece in pieces_of(prompt, index, whole_pictures=store.both_ways)
        ]
        for prompt, actual in zip(prompts, run_steps(runner, sequences, steps), strict=True):  # type: ignore[arg-type]
            assert relative_error(actual, expected_logits(tiny, prompt)) < 1e-5
    assert sum(isinstance(message, EnginePicture) for message in others.sent) == len(images)


class Seer(Refusing):
    def __init__(self) -> None:
        self.pictures = VisionStore(ToyVision())


def test_the_others_keep_a_picture_while_a_request_here_holds_it() -> None:
    others = ThreadRanks(2)
    runner = lead(Seer(), others, sums="threads")  # type: ignore[arg-type]
    store = runner.pictures
    assert store is not None
    shown = picture(1, 3)
    store.put(shown)
    held = store.hold(1)
    store.forget(1)
    assert store.tokens(1) is None
    store.put(shown)  # it comes back while it is held
    store.forget(1)
    runner.clear()
    assert others.sent == [shown, Clear()]
    del held
    runner.clear()
    assert others.sent == [shown, Clear(), EngineForget(1), Clear()]
    store.put(shown)
    assert others.sent[4:] == [shown]


def test_a_picture_that_is_refused_here_is_not_uploaded() -> None:
    others = ThreadRanks(2)
    store = lead(Seer(), others, sums="threads").pictures  # type: ignore[arg-type]
    assert store is not None
    with pytest.raises(Exception, match="has 3 tokens in this model, not 4"):
        store.put(EnginePicture(1, 4, 4, 3, 0, 0, 1, 1, bytes(3)))
    assert others.sent == []
