"""Numbers at and beyond their ranges: what one request brings changes nothing for the others, on any runner."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Runner
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineFailed, EngineGenerate, EngineScore, FromEngine, Schedule, ScoreEnded
from umbel.srt.runners.build import build_runner
from umbel.srt.sampling.sampler import Sampler, SampleRequest
from umbel.srt.scheduler.request import Generation
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from ..distributed.threads import led
from ..engine_harness import Engine
from ..runners.cuda.engines import in_torch, on_host, tiny_model

FLOATS = (math.nan, math.inf, -math.inf, -0.0, 0.0, 5e-324, 1e-310, 1e-38, 1e38, 1e308, -1e308, -1.0)
INTEGERS = (2**63, 2**63 - 1, 2**31, 2**31 - 1, 10**30, 0, -1, -(2**63))
FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "frequency_penalty": FLOATS,
    "presence_penalty": FLOATS,
    "repetition_penalty": FLOATS,
    "logit_bias": tuple({3: value, 4: -value} for value in FLOATS) + tuple({value: 1.0} for value in INTEGERS),
    "top_k": (*INTEGERS, math.nan, 1e308),
    "seed": INTEGERS,
    "max_tokens": (*INTEGERS, math.nan, math.inf, 1e308),
    "min_tokens": (*INTEGERS, math.nan, math.inf, 1e308),
    "n": INTEGERS,
    "top_logprobs": (*INTEGERS, math.nan),
    "prompt_logprobs_from": (*INTEGERS, math.nan),
    "stop_token_ids": tuple((value,) for value in INTEGERS),
}
COMPUTED = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
COMPUTED += ("top_k", "top_logprobs")

SAMPLED = SamplingParams(max_tokens=4, temperature=0.9, seed=5, ignore_eos=True)
NEIGHBOURS = [
    SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True, top_k=9),
    SamplingParams(max_tokens=6, temperature=0.8, seed=2, ignore_eos=True, top_p=0.9, top_logprobs=2),
    SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True, frequency_penalty=0.5, logit_bias={7: 1.0}),
]
PREFIX = [1, 2, 3, 4]


def changed(field: str, value: object) -> SamplingParams:
    """Whatever the edge would say of it. Of its own, so that nobody else feels it."""
    sampling = msgspec.structs.replace(SAMPLED)
    msgspec.structs.force_setattr(sampling, field, value)
    return sampling


def test_every_number_among_the_sampling_parameters_is_tried() -> None:
    numbers = {
        name
        for name, value in SamplingParams.__annotations__.items()
        if any(kind in str(value) for kind in ("int", "float"))
    }
    assert numbers == set(FIELDS)


SETTINGS: list[dict[str, object]] = [{"partial_logits": False}, {}, {"overlap": True}]


def engine(settings: dict[str, object]) -> Engine:
    machine = Engine(pool=1500, **settings)  # type: ignore[arg-type]
    machine.runner.picks_tokens = "partial_logits" not in settings
    return machine


def neighbours(machine: Engine) -> list[int]:
    return [machine.generate([*PREFIX, 5 + i], sampling) for i, sampling in enumerate(NEIGHBOURS)]


def judge(machine: Engine, ids: list[int], what: object) -> None:
    for i, (message_id, sampling) in enumerate(zip(ids, NEIGHBOURS, strict=True)):
        machine.assert_equals_reference(message_id, [*PREFIX, 5 + i], sampling)
    counts = [machine.count(name) for name in ("pool_rebuilds", "failed_steps", "discarded_tokens")]
    assert counts == [0, 0, 0], what


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_number_that_passed_the_edge_changes_nothing_for_the_others(settings: dict[str, object]) -> None:
    machine = engine(settings)
    for field, values in FIELDS.items():
        ids = neighbours(machine)
        bad = [machine.generate([*PREFIX, 11], changed(field, value)) for value in values]
        machine.run()
        judge(machine, ids, field)
        assert all(isinstance(machine.endings[message_id], Ended | EngineFailed) for message_id in bad)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_number_that_reaches_the_arithmetic_changes_nothing_for_the_others(settings: dict[str, object]) -> None:
    machine = engine(settings)
    refused = 0
    for field in COMPUTED:
        ids = neighbours(machine)
        bad = []
        for value in FIELDS[field]:
            bad.append(machine.generate([*PREFIX, 11], SAMPLED))
            job = machine.scheduler._table.alive[bad[-1]][0].job
            assert isinstance(job, Generation)
            msgspec.structs.force_setattr(job.sampling, field, value)
        machine.run()
        judge(machine, ids, field)
        refused += sum(isinstance(machine.endings[message_id], EngineFailed) for message_id in bad)
    assert refused > 20


def test_scores_and_schedules_of_any_numbers_change_nothing_for_the_others() -> None:
    machine = engine({})
    for field in ("priority", "timeout", "ahead", "start", "pin"):
        ids = neighbours(machine)
        for value in (*INTEGERS, *FLOATS):
            if field == "start":
                machine.score([[*PREFIX, 7, 8]], value)  # type: ignore[arg-type]  # on purpose
            elif field == "pin":
                machine.hint([*PREFIX, 7], pin=value)
            else:
                machine.generate([*PREFIX, 6], SAMPLED, **{field: value})
                machine.score([[*PREFIX, 7, 8], [*PREFIX, 9]], len(PREFIX), **{field: value})
        machine.run()
        judge(machine, ids, field)


# --------------------------------------------------------------------------------------------- right answers


@pytest.mark.parametrize("penalty", [5e-324, 1e-310, 1e-300, 1e-38, 1e-20, 2.0])
@pytest.mark.parametrize("bias", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_penalty_that_no_float_holds_leaves_the_order_of_the_exact_results(
    penalty: float, bias: float, scale: float
) -> None:
    generator = np.random.default_rng(7)
    vocabulary = 40
    for _ in range(5):
        logits = (generator.normal(size=vocabulary) * scale).astype(np.float32)
        prompt = generator.choice(vocabulary, 12, replace=False).astype(np.int32)
        biased = {int(token): bias for token in generator.choice(vocabulary, 4, replace=False)}
        for greedy in (True, False):
            sampling = SamplingParams(temperature=0.0 if greedy else 1.0, repetition_penalty=2.0, logit_bias=biased)
            msgspec.structs.force_setattr(sampling, "repetition_penalty", penalty)
            exact = [Fraction(float(value)) for value in logits]
            for token in prompt.tolist():
                value = exact[token]
                exact[token] = value / Fraction(penalty) if value > 0 else value * Fraction(penalty)
            for token, added in biased.items():
                exact[token] += Fraction(added)
            best = max(range(vocabulary), key=lambda token: exact[token])
            apart = exact[best] - sorted(exact)[-2]
            if (not greedy and apart < 100) or apart < abs(exact[best]) / 10**6:
                continue  # noise, or the rounding of a float32, may decide
            rows = torch.from_numpy(logits[None].copy())
            draw = SampleRequest(0, sampling, 5, 20, {}, prompt)
            assert Sampler(vocabulary).sample(rows, [draw]) == [best]
            assert not rows.isnan().any()


def test_logits_are_what_they_were_when_a_token_could_not_be_drawn() -> None:
    class Broken:
        def choose(self, logits: torch.Tensor, draws: object) -> np.ndarray:
            raise RuntimeError("no")

    rows = torch.randn(2, 30)
    before = rows.clone()
    sampling = SamplingParams(repetition_penalty=1.7, logit_bias={4: 2.0}, min_tokens=3)
    draws = [
        SampleRequest(row, sampling, 1, 9, {1: 2}, np.array([2, 3], dtype=np.int32), frozenset({5})) for row in (0, 1)
    ]
    with pytest.raises(RuntimeError):
        Sampler(30, Broken()).sample(rows, draws)  # type: ignore[arg-type]
    assert torch.equal(rows, before)


def test_a_text_whose_every_token_is_forbidden_ends_alone() -> None:
    machine = Engine(pool=600)
    every = tuple(range(machine.runner.vocab_size))
    bad = machine.generate([*PREFIX, 11], msgspec.structs.replace(SAMPLED, min_tokens=2, stop_token_ids=every))
    good = machine.generate([*PREFIX, 5], NEIGHBOURS[0])
    machine.run()
    ending = machine.endings[bad]
    assert isinstance(ending, EngineFailed)
    assert "min_tokens=2" in ending.message
    machine.assert_equals_reference(good, [*PREFIX, 5], NEIGHBOURS[0])
    assert machine.count("discarded_tokens") == machine.count("pool_rebuilds") == 0


# --------------------------------------------------------------------------------------------- runners

POISON = 5  # a token whose embedding is not a number
Model = tuple[dict[str, Any], Any]


def poisoned() -> Model:
    config, tensors = tiny_model("llama, biases everywhere")
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[POISON] = math.nan
    return config, {**tensors, "model.embed_tokens.weight": embedding}


def native(config: dict[str, Any], tensors: Any, **options: Any) -> Runner:
    return build_runner(config, tensors, num_slots=200, dtype="float32", kernels="native", **options)


@contextmanager
def two_ranks(config: dict[str, Any], tensors: Any) -> Iterator[Runner]:
    with led(2, lambda communicator: in_torch(config, tensors, communicator=communicator)) as (runner, _):
        yield runner


@contextmanager
def alone(runner: Runner) -> Iterator[Runner]:
    yield runner


RUNNERS: dict[str, tuple[Callable[[dict[str, Any], Any], Any], bool]] = {  # and whether steps overlap
    "torch": (lambda *model: alone(in_torch(*model)), False),
    "native": (lambda *model: alone(native(*model)), False),
    "native, no screen": (lambda *model: alone(native(*model, screened_head=False)), False),
    "native, bf16": (lambda *model: alone(native(*model, weights="bf16")), False),
    "native, int8": (lambda *model: alone(native(*model, weights="int8")), False),
    "cuda": (lambda *model: alone(on_host(*model)), False),
    "cuda, overlapped": (lambda *model: alone(on_host(*model)), True),
    "cuda, no graphs": (lambda *model: alone(on_host(*model, cuda_graphs=False)), True),
    "two ranks": (lambda *model: two_ranks(*model), False),
}


class Asking:
    """A scheduler on a runner, and what it has answered."""

    def __init__(self, runner: Runner, *, overlap: bool) -> None:
        config = SchedulerConfig(check_every_step=True, overlap=overlap)
        self.scheduler = Scheduler(runner, lambda _: b"a", frozenset(), config, VirtualClock())
        self.endings: dict[int, FromEngine] = {}
        self._next = 0

    def submit(self, tokens: list[int], sampling: SamplingParams) -> int:
        self._next += 1
        self.scheduler.handle_message(EngineGenerate(self._next, tokens, sampling, False, Schedule()))
        return self._next

    def score(self, sequences: list[list[int]], start: int) -> int:
        self._next += 1
        self.scheduler.handle_message(EngineScore(self._next, sequences, start))
        return self._next

    def run(self) -> None:
        while not self.scheduler.idle:
            for event in self.scheduler.step():
                assert event.id not in self.endings
                self.endings[event.id] = event

    def neighbours(self) -> list[int]:
        return [self.submit([1, 2, 3, 20 + i], sampling) for i, sampling in enumerate(NEIGHBOURS)]

    def texts(self, ids: list[int]) -> list[list[int]]:
        endings = [self.endings[message_id] for message_id in ids]
        return [ending.token_ids if isinstance(ending, Ended) else [] for ending in endings]

    def failed(self, message_id: int) -> str:
        ending = self.endings[message_id]
        assert isinstance(ending, EngineFailed), ending
        return ending.message


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.sampled(4)
def test_logits_of_a_row_that_are_not_numbers_end_its_request_only(name: str) -> None:
    build, overlap = RUNNERS[name]
    with build(*poisoned()) as runner:
        asking = Asking(runner, overlap=overlap)
        quiet = asking.neighbours()
        asking.run()
        free = asking.scheduler.kv.pool.free
        ids = asking.neighbours()
        bad = [asking.submit([1, 2, 3, POISON, 9 + i], sampling) for i, sampling in enumerate(NEIGHBOURS)]
        bad.append(asking.score([[1, 2, 3, 6, 7], [1, 2, 3, POISON, 7]], 3))
        asking.run()
        assert all("not numbers" in asking.failed(message_id) for message_id in bad)
        assert all(asking.texts(quiet))
        assert asking.texts(ids) == asking.texts(quiet)
        again = asking.neighbours()
        asking.run()
        counters = asking.scheduler.counters
        assert asking.texts(again) == asking.texts(quiet)
        assert counters["pool_rebuilds"] == counters["failed_steps"] == 0
        held = [node.tokens for _, node in asking.scheduler.kv.cache.walk()]
        assert not any(POISON in tokens for tokens in held), "wrong keys are not kept"
        assert counters["discarded_tokens"] > 0
        assert free - asking.scheduler.kv.pool.free < 30


REACHING: list[tuple[str, object]] = [
    ("top_k", 2**63),
    ("repetition_penalty", 1e-38),
    ("repetition_penalty", math.nan),
    ("temperature", math.nan),
    ("temperature", 5e-324),
    ("temperature", 1e308),
    ("top_p", math.nan),
    ("top_p", 5e-324),
    ("min_p", math.nan),
    ("min_p", 5e-324),
    ("logit_bias", {3: 1e308}),
    ("top_logprobs", -3),
]


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.sampled(4)
def test_numbers_that_reach_a_runner_end_their_request_only(name: str) -> None:
    build, overlap = RUNNERS[name]
    with build(*tiny_model("llama, biases everywhere")) as runner:
        asking = Asking(runner, overlap=overlap)
        quiet = asking.neighbours()
        asking.run()
        ids = asking.neighbours()
        bad = []
        for i, (field, value) in enumerate(REACHING):
            bad.append(asking.submit([1, 2, 3, 40 + i], msgspec.structs.replace(SAMPLED, max_tokens=2)))
            job = asking.scheduler._table.alive[bad[-1]][0].job
            assert isinstance(job, Generation)
            msgspec.structs.force_setattr(job.sampling, field, value)
        scored = asking.score([[1, 2, 3, 6, 7], [1, 2, 3, 8]], 3)
        asking.run()
        assert asking.texts(ids) == asking.texts(quiet)
        assert isinstance(asking.endings[scored], ScoreEnded)
        assert set(bad) <= set(asking.endings)
        counters = asking.scheduler.counters
        assert counters["pool_rebuilds"] == counters["failed_steps"] == counters["discarded_tokens"] == 0
