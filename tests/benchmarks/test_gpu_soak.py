"""A soak and a shortage of memory on small backends, with a clock that counts its readings."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest
import torch
from umbel.interpreter import loop
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel
from umbel.srt.runners.cuda.device import StepLimits

from benchmarks.gpu.engine.shapes import TINY
from benchmarks.gpu.engine.soak import (
    SAID,
    Outcome,
    ScarceRunner,
    Soak,
    on_host,
    shortage_figure,
    soak_figures,
    whole_pool,
)
from benchmarks.gpu.engine.steps import random_runner
from benchmarks.gpu.engine.words import WordTokenizer

SIZES = replace(on_host(20.0), long=70)


@pytest.fixture
def scarce() -> ScarceRunner:
    limits = StepLimits(rows=96, sequences=8, logits=64)
    runner = random_runner(TINY, torch.device("cpu"), slots=1025, limits=limits, dtype="float32", kernels="torch")
    return ScarceRunner(runner)


@pytest.fixture
def backend(scarce: ScarceRunner) -> Iterator[LocalBackend]:
    loaded = LoadedModel("tiny", WordTokenizer([SAID], TINY.vocab), scarce)  # type: ignore[arg-type]  # it delegates
    backend = LocalBackend(loaded=loaded, seed=1, max_running=8, chunk_size=64)
    loop.streams.run(backend.start())
    yield backend
    loop.streams.run(backend.close())


def readings() -> "Iterator[float]":
    return map(float, count())


def soak_on(backend: LocalBackend) -> Soak:
    clock = readings()
    return Soak(backend, SIZES, lambda: next(clock))


def test_a_soak_sends_all_kinds_of_calls_and_finds_its_controls_and_its_pool_right(backend: LocalBackend) -> None:
    async def work() -> tuple[Soak, list[float], tuple[bool, str]]:
        soak = soak_on(backend)
        await soak.run()
        pool = await whole_pool(backend)
        return soak, await soak.check(), pool

    soak, gaps, pool = loop.streams.run(work())
    assert set(soak.outcome.asked) == {"control", "fork", "constrained", "long", "given_up", "urgent"}
    assert soak.outcome.errors == []
    assert soak.outcome.asked == soak.outcome.answered
    assert len(gaps) == len(soak.outcome.controls) > 0
    figures = soak_figures(soak.outcome, gaps, pool, (100, 100), SIZES)
    assert [one.met for one in figures] == ["must"] * 4, [one.note for one in figures]


def test_a_text_that_is_not_what_comes_alone_is_found(backend: LocalBackend) -> None:
    async def work() -> list[float]:
        soak = soak_on(backend)
        await soak._control()
        (control,) = soak.outcome.controls
        wrong = (*control.token_ids[:-1], (control.token_ids[-1] + 1) % 256)
        soak.outcome.controls.append(replace(control, token_ids=wrong))
        return await soak.check()

    right, wrong = loop.streams.run(work())
    assert right <= 2e-3
    assert wrong > 0.1


def test_calls_are_answered_while_steps_find_no_memory(backend: LocalBackend, scarce: ScarceRunner) -> None:
    figure = loop.streams.run(shortage_figure(backend, scarce, SIZES))
    assert figure is not None
    assert (figure.measured, figure.limit, figure.met) == (16.0, 16.0, "must")
    assert "steps of 16 rows at most, memory shortages 2, failed steps 0" in figure.note
    assert scarce.most is None, "memory is given back"


def test_a_shortage_that_no_step_met_shows_nothing(backend: LocalBackend) -> None:
    class Nothing:
        def turns(self) -> Iterator[object]:
            @contextmanager
            def block() -> Iterator[str]:
                yield "all left"

            yield block()

    assert loop.streams.run(shortage_figure(backend, Nothing(), SIZES)) is None  # type: ignore[arg-type]


def test_errors_texts_and_slots_that_are_wrong_fail_a_soak() -> None:
    outcome = Outcome()
    outcome.asked["long"], outcome.answered["long"] = 3, 2
    outcome.errors.append("long: EngineError: it broke")
    figures = soak_figures(outcome, [0.0, 1.5], (False, "3 free of 9"), (100 << 20, 300 << 20), SIZES)
    assert [one.is_wrong for one in figures] == [True] * 4
    assert figures[0].note.endswith("first: long: EngineError: it broke")
    assert figures[1].note == "at most 1.5 behind the likeliest token, allowed 0.002"


def test_a_pool_that_lost_slots_is_not_whole() -> None:
    class Losing:
        async def control(self, verb: str) -> object:
            facts = {"running": 0, "waiting": 0, "idle_checks": 1, "integrity_failures": 0}
            result = {**facts, "free_slots": 3, "cached_slots": 4, "total_slots": 8}
            return type("Done", (), {"result": result})

    assert asyncio.run(whole_pool(Losing()))[0] is False  # type: ignore[arg-type]  # all that is used
