"""Models that run through transformers, on the CUDA engine: our attention in steps, in graphs and launched ahead.

On the host; `test_device.py` has the same on a device.
"""

import dataclasses
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.core.batch import AsyncRunner
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.models import transformers_model
from umbel.srt.models.transformers_model import TransformersModel
from umbel.srt.runners import build
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.build import build_cuda_runner, heads_obstacle, triton_parts
from umbel.srt.runners.cuda.device import HostAccelerator, StepLimits, accelerator_for
from umbel.srt.runners.cuda.runner import CudaRunner

from ...models.equality import VOCABULARY, assert_texts_do_not_depend_on_the_schedule
from ...models.reference import Piece, reference_logits, reference_model, relative_error, tensors_of
from .engines import BORROWED, in_torch, mixed_steps, on_host, only_last_rows, sequences, tiny_model
from .recording import RecordingAccelerator, recorded_parts
from .test_runner import forked, last_logits
from .test_scheduling import answers, traffic
from .test_triton import STEPS

PARTS = triton_parts()
FORKED_SLOTS = 1 + 6 * 105
# Learned positions; layers that differ, share keys and have experts; sinks.
USUAL = ("gpt 2", "gemma 4, experts", "mimo 2")
ALL = [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in BORROWED]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model(name: str) -> tuple[dict[str, Any], Tensors, list[torch.Tensor]]:
    """Returns configuration, tensors, and the logits that transformers computes of `sequences()`."""
    model_type, own = BORROWED[name]
    reference = reference_model(model_type, **own)
    logits = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    return reference.config.to_dict(), tensors_of(reference), logits


def worst_error(runner: CudaRunner, name: str, steps: list[list[Piece]]) -> float:
    """Runs steps → the largest error of their last rows, relative to what transformers computes."""
    expected, worst = model(name)[2], 0.0
    for pieces in steps:
        actual = runner.forward(only_last_rows(sequences().batch(pieces))).values.cpu()
        rows = torch.stack([expected[piece.sequence][piece.start + piece.count - 1] for piece in pieces])
        worst = max(worst, relative_error(actual, rows))
    return worst


@pytest.mark.parametrize("name", ALL)
def test_graphs_that_know_addresses_only_give_the_logits_of_transformers(name: str) -> None:
    config, tensors, _ = model(name)
    runner = on_host(config, tensors, accelerator=RecordingAccelerator(), parts=recorded_parts(), max_running=4)
    assert worst_error(runner, name, [*mixed_steps(), *mixed_steps()]) < 1e-5
    facts = runner.facts()
    assert (facts["graph_replays"], facts["eager_steps"]) == (22, 4)
    assert (facts["kernels"], facts["weights"]) == ("torch, recorded reference attention", "float32")


def test_steps_kernel_by_kernel_give_the_logits_of_transformers() -> None:
    runner = on_host(*model("gemma 4, experts")[:2], cuda_graphs=False)
    assert worst_error(runner, "gemma 4, experts", mixed_steps()) < 1e-5
    assert runner.facts()["graphs"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name if name == "mimo 2" else pytest.param(name, marks=pytest.mark.nightly) for name in BORROWED]
)
def test_triton_attention_gives_the_logits_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "host_walk", lambda: None)  # masks are not asked for
    config, tensors, _ = model(name)
    device = "cpu" if PARTS.anywhere else "cuda"
    runner = build_runner(config, tensors, num_slots=200, dtype="float32", device=device, kernels="triton")
    assert isinstance(runner, CudaRunner)
    warming = int(runner.facts()["graph_replays"])  # on a device steps have warmed it up
    assert worst_error(runner, name, STEPS[:3]) < (2e-5 if PARTS.anywhere else 1e-4)
    facts = runner.facts()
    assert (facts["kernels"], int(facts["graph_replays"]) - warming) == ("torch, triton attention", 3)


# ------------------------------------------------------------------------------------ models that no graph can hold


def experts_on_the_host(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Tensors]:
    """A model whose experts are a loop over those that rows have chosen, as the host reads them."""
    load = transformers_model._load

    def eager(*args: Any, **kwargs: Any) -> Any:
        module = load(*args, **kwargs)
        module.set_experts_implementation("eager")
        return module

    monkeypatch.setattr(transformers_model, "_load", eager)
    return model("mimo 2")[:2]


def test_a_model_whose_steps_depend_on_the_host_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = experts_on_the_host(monkeypatch)
    with caplog.at_level(logging.WARNING):
        runner = on_host(config, tensors, accelerator=RecordingAccelerator(), parts=recorded_parts(), max_running=4)
    assert "steps of MiMoV2FlashForCausalLM are launched kernel by kernel, not as graphs: " in caplog.text
    assert worst_error(runner, "mimo 2", mixed_steps()) < 1e-5
    assert (runner.facts()["graphs"], runner.facts()["eager_steps"]) == (0, len(mixed_steps()))


class Waiting(HostAccelerator):
    def waits(self, work: Callable[[], object]) -> str | None:
        super().waits(work)
        return "called a synchronizing CUDA operation"


class Frozen(HostAccelerator):
    """Replays the numbers of the capture."""

    def capture(self, work: Callable[[], None]) -> Any:
        work()
        return self

    def replay(self) -> None: ...


@pytest.mark.parametrize(
    ("accelerator", "reason"), [(Waiting(), "called a synchronizing"), (Frozen(), "does not give the logits of the")]
)
def test_the_reason_is_said(accelerator: HostAccelerator, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = on_host(*model("gpt 2")[:2], accelerator=accelerator)
    assert reason in caplog.text
    assert runner.facts()["graphs"] == 0
    assert worst_error(runner, "gpt 2", mixed_steps()) < 1e-5


# ----------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(("overlap", "cuda_graphs"), [(True, True), (False, False)])
def test_texts_are_those_of_torch(overlap: bool, cuda_graphs: bool) -> None:
    config, tensors, _ = model("gpt 2")
    questions = traffic(26)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1, partial_logits=False)
    runner = on_host(config, tensors, cuda_graphs=cuda_graphs)
    assert isinstance(runner, AsyncRunner)
    texts, scheduler = answers(runner, questions, max_running=8, overlap=overlap)
    assert texts == truth
    assert (int(runner.facts()["graph_replays"]) > 10) is cuda_graphs
    assert (scheduler.counters["overlapped_steps"] > 20) is overlap


@pytest.mark.parametrize("name", ["mimo 2", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("cohere 2", "phi"))])
def test_texts_do_not_depend_on_the_schedule(name: str) -> None:
    runner = on_host(*tiny_model(name, vocab_size=VOCABULARY), num_slots=66)
    assert_texts_do_not_depend_on_the_schedule(runner)
    assert int(runner.facts()["graph_replays"]) > 50


def test_branches_that_share_a_prefix_read_it_once() -> None:
    config, tensors, _ = model("gpt 2")
    truth = in_torch(config, tensors, num_slots=FORKED_SLOTS, tree_attention=False)
    runner = on_host(config, tensors, num_slots=FORKED_SLOTS)
    generator = torch.Generator().manual_seed(5)
    for pool in zip((*truth.pool.keys, *truth.pool.values), (*runner.pool.keys, *runner.pool.values), strict=True):
        numbers = torch.randn(pool[0].shape, generator=generator)
        for part in pool:
            part.copy_(numbers)
    batch = forked(6, 100)
    assert relative_error(last_logits(runner, batch), truth.forward(batch).values) < 1e-5
    assert int(runner.facts()["keys_saved"]) > 0


@pytest.mark.nightly
def test_texts_on_triton_are_those_of_torch() -> None:
    """Forks of prompts, chunks, and steps that are launched ahead."""
    config, tensors, _ = model("cohere 2")
    questions = traffic(6)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1, partial_logits=False)
    device = accelerator_for(torch.device("cpu" if PARTS.anywhere else "cuda"))
    runner = on_host(config, tensors, accelerator=device, parts=PARTS, max_running=4)
    assert answers(runner, questions, max_running=4, overlap=True)[0] == truth


# ------------------------------------------------------------------------------------------------ what else is asked


def test_hidden_states_are_those_of_torch() -> None:
    config, tensors, _ = model("gpt 2")
    batch = dataclasses.replace(
        sequences().batch([Piece(0, 0, 12), Piece(1, 0, 5)]),
        logit_rows=np.array([3, 16]),
        hidden_rows=np.array([4, 11]),
    )
    expected, actual = (make(config, tensors).forward(batch) for make in (in_torch, on_host))
    assert expected.hidden is not None
    assert actual.hidden is not None
    assert torch.allclose(actual.hidden, expected.hidden, atol=1e-5)
    assert relative_error(actual.values, expected.values) < 1e-5


def test_a_pool_in_float8_is_that_of_torch() -> None:
    config, tensors, _ = model("gpt 2")
    truth, runner = in_torch(config, tensors, kv_dtype="fp8"), on_host(config, tensors, kv_dtype=FLOAT8)
    assert runner.facts()["kv_dtype"] == "float8_e4m3fn"
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values, truth.forward(batch).values) < 1e-5


def test_the_pool_is_what_steps_and_graphs_leave() -> None:
    config, tensors, _ = model("gpt 2")
    built = [
        build_cuda_runner(
            config,
            tensors,
            accelerator=HostAccelerator(free=10_000_000, peak=2_000_000),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            limits=StepLimits(rows=40, sequences=8, logits=16),
            parts=recorded_parts(),
            cuda_graphs=cuda_graphs,
            borrowed=loaded(config, tensors),
        ).num_slots
        for cuda_graphs in (False, True)
    ]
    assert 0 < built[1] < built[0] < 10_000_000 // (2 * 2 * 64 * 4)


def loaded(config: dict[str, Any], tensors: Tensors) -> TransformersModel:
    return transformers_model.build_transformers_model(config, tensors, dtype=torch.float32, device=torch.device("cpu"))


def test_heads_that_the_kernels_do_not_take_run_in_torch() -> None:
    config, tensors = tiny_model("gpt 2", hidden_size=48)
    with pytest.raises(ParameterError, match=r'kernels="triton": head_dim=12: .* multiples of 16 .* torch computes'):
        build_runner(config, tensors, num_slots=20, dtype="float32", device="cpu", kernels="triton")
    config, tensors = tiny_model("mimo 2", head_dim=16, swa_head_dim=16, v_head_dim=32, swa_v_head_dim=32)
    found = heads_obstacle(loaded(config, tensors), kv_dtype=torch.float32)
    assert found == "they take no values (32 numbers) that are larger than their keys (16)"


def test_weights_that_do_not_fit_are_not_read() -> None:
    config, tensors, _ = model("gpt 2")

    class Unread(dict[str, torch.Tensor]):
        def keys(self) -> Any:
            raise AssertionError("all tensors are copied")

    huge = Unread({**tensors, "padding": torch.empty((1 << 29,), device="meta")})
    with pytest.raises(ParameterError, match=r"the weights take \d+ bytes in float32, the host has"):
        build_runner(config, huge, num_slots=20, dtype="float32", kernels="triton")
