"""A backend in one process that is closed gives its model back: the next one may need the memory."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from umbel.lang.prompt import Text
from umbel.lang.protocol import ConstraintSpec, Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt import in_process, launch
from umbel.srt.core.batch import Runner
from umbel.srt.core.vectors import NO_VECTORS
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import Engine, LoadedModel, ModelReading
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from .runners.cuda.engines import in_torch, on_host, tiny_model

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def device_runner() -> Runner:
    runner = on_host(*tiny_model("qwen 3", vocab_size=ByteTokenizer().vocab_size), max_running=4)
    runner.capture_graphs()
    return runner


def waiting_runner() -> Runner:
    return in_torch(*tiny_model("qwen 3", vocab_size=ByteTokenizer().vocab_size))


def watched(runner: Runner) -> list[weakref.ref[Any]]:
    inner = getattr(runner, "_runner", runner)
    return [weakref.ref(runner), weakref.ref(inner), weakref.ref(inner.model)]  # type: ignore[attr-defined]


async def use(backend: LocalBackend) -> None:
    """Free text and constrained text, at once."""
    digits = ConstraintSpec("regex", "[0-9]{1,5}")
    requests = [
        GenRequest("free", (Text("hello"),), SAMPLING, False),
        GenRequest("digits", (Text("hello, "),), SAMPLING, False, constraint=digits),
    ]

    async def final(request: GenRequest) -> None:
        async with aclosing(backend.generate(request)) as events:
            assert [isinstance(event, Final) async for event in events][-1]

    await asyncio.gather(*map(final, requests))
    await backend.close()


RUNNERS = pytest.mark.parametrize("make", [device_runner, waiting_runner])


@RUNNERS
@pytest.mark.nightly
def test_a_model_that_was_loaded_goes_with_its_last_holder(make: Callable[[], Runner]) -> None:
    runner = make()
    gone = watched(runner)
    backend = LocalBackend(loaded=LoadedModel("tiny", ByteTokenizer(), runner))
    del runner
    asyncio.run(use(backend))
    assert all(reference() is not None for reference in gone), "the next start uses it"
    del backend
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


@RUNNERS
def test_a_model_that_the_backend_has_loaded_goes_when_it_is_closed(
    make: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[weakref.ref[Any]] = []

    def open_engine(*arguments: Any, **options: Any) -> Engine:
        runner = make()
        gone.extend(watched(runner))
        return launch.open_engine(*arguments, **{**options, "loaded": LoadedModel("tiny", ByteTokenizer(), runner)})

    reading = ModelReading("tiny", ByteTokenizer(), None, NO_VECTORS)
    monkeypatch.setattr(in_process, "open_tokenizer", lambda options: reading)
    monkeypatch.setattr(in_process, "open_engine", open_engine)
    backend = LocalBackend("tiny")
    asyncio.run(use(backend))
    assert [reference() for reference in gone] == [None] * 3
