"""The engine on a CUDA device: logits and texts are those of torch on the CPU, with graphs and without, in step or not.

Sums on the device have another order, so tokens are compared where the CPU is sure of them: where the second best is
further away than rounding.
"""

from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.errors import UmbelError
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import AsyncRunner
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.models.families import is_family
from umbel.srt.models.transformers_model import build_transformers_model
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.build import build_cuda_runner
from umbel.srt.runners.cuda.device import CudaAccelerator, StepLimits
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.runners.torch_runner import TorchRunner

from ...models.reference import Piece, Sequences, relative_error
from .engines import (
    BORROWED,
    EXPERTS,
    FAMILIES,
    NUM_SLOTS,
    in_torch,
    mixed_steps,
    only_last_rows,
    sequences,
    tiny_model,
)
from .test_scheduling import answers, traffic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} finds no GPU"),
]
SURE = 1e-3  # of the largest logit: further apart than sums in another order


def on_device(
    config: dict[str, Any], tensors: Tensors, *, dtype: torch.dtype = torch.float32, **switches: Any
) -> CudaRunner:
    accelerator, borrowed = CudaAccelerator(torch.device("cuda")), None
    if not is_family(config):
        borrowed = build_transformers_model(config, tensors, dtype=dtype, device=accelerator.device)
    return build_cuda_runner(
        config,
        tensors,
        accelerator=accelerator,
        dtype=dtype,
        kv_dtype=dtype,
        size=lambda geometry: PoolSize(NUM_SLOTS),
        limits=StepLimits(rows=32, sequences=8),
        borrowed=borrowed,
        **switches,
    )


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_logits_equal_those_of_the_cpu(family: str, cuda_graphs: bool) -> None:
    config, tensors = tiny_model(family)
    truth, runner = in_torch(config, tensors), on_device(config, tensors, cuda_graphs=cuda_graphs)
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        expected = truth.forward(batch).values
        assert relative_error(runner.forward(batch).values.cpu(), expected) < 1e-4
    assert (int(runner.facts()["graph_replays"]) > 0) is cuda_graphs


EXPERTS_BORROWED = ("olmoe", "gemma 4, experts", "mimo 2")


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("name", BORROWED)
def test_models_of_transformers_give_the_logits_of_the_cpu(name: str, cuda_graphs: bool) -> None:
    """torch groups the products of experts on the device in bfloat16 only: in float32 they run without graphs."""
    config, tensors = tiny_model(name)
    truth, runner = in_torch(config, tensors), on_device(config, tensors, cuda_graphs=cuda_graphs)
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values.cpu(), truth.forward(batch).values) < 1e-4
    if name not in EXPERTS_BORROWED:
        assert (int(runner.facts()["graph_replays"]) > 0) is cuda_graphs


@pytest.mark.parametrize("name", ["gpt 2", "olmoe"])
def test_models_of_transformers_run_as_graphs_in_bfloat16(name: str) -> None:
    config, tensors = tiny_model(name)
    graphs, plain = (
        on_device(config, tensors, dtype=torch.bfloat16, cuda_graphs=cuda_graphs) for cuda_graphs in (True, False)
    )
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(graphs.forward(batch).values, plain.forward(batch).values) < 0.03
    assert int(graphs.facts()["graph_replays"]) > 0


@pytest.mark.parametrize("family", ["qwen 3", "gemma 3"])
def test_a_step_gives_the_same_bits_again(family: str) -> None:
    runner = on_device(*tiny_model(family))
    four = Sequences([[7 + number] * 20 for number in range(4)], NUM_SLOTS)
    runner.forward(only_last_rows(four.batch([Piece(number, 0, 8) for number in range(4)])))
    for position in range(8, 16):
        batch = only_last_rows(four.batch([Piece(number, position, 1) for number in range(4)]))
        first, again = (runner.forward(batch).values.clone() for _ in range(2))
        assert torch.equal(first, again)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", ["qwen 3", "gpt 2"])
def test_texts_are_those_of_the_cpu(family: str, overlap: bool, cuda_graphs: bool) -> None:
    config, tensors = tiny_model(family)
    questions = traffic(26)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1, partial_logits=False)
    texts, scheduler = answers(
        on_device(config, tensors, cuda_graphs=cuda_graphs), questions, max_running=8, overlap=overlap
    )
    assert texts == truth
    assert (scheduler.counters["overlapped_steps"] > 20) is overlap


def test_no_switch_changes_a_text() -> None:
    config, tensors = tiny_model("gemma 3")
    questions = traffic(20)
    texts = [
        answers(on_device(config, tensors, **switches), questions, max_running=8, overlap=overlap)[0]
        for switches, overlap in (
            ({}, True),
            ({}, False),
            ({"tree_attention": False}, True),
            ({"cuda_graphs": False}, True),
        )
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_steps_are_launched_behind_steps_that_nobody_has_read() -> None:
    config, tensors = tiny_model("qwen 3")
    runner, truth = on_device(config, tensors), on_device(config, tensors, cuda_graphs=False)
    assert isinstance(runner, AsyncRunner)
    batches = [only_last_rows(sequences().batch(pieces)) for pieces in mixed_steps()]
    pending = [runner.launch(batch) for batch in batches]
    last = pending[-1].result().values.cpu()
    assert relative_error(last, [truth.forward(batch) for batch in batches][-1].values.cpu()) < 1e-4


# ------------------------------------------------------------------------------------- real weights


def greedy(runner: CudaRunner | TorchRunner, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """The most likely tokens one after another, and the logits that each was chosen by."""
    ids, logits, done = list(prompt), [], 0
    for _ in range(count):
        batch = only_last_rows(Sequences([ids], NUM_SLOTS).batch([Piece(0, done, len(ids) - done)]))
        row = runner.forward(batch).values[0].float().cpu()
        logits.append(row)
        done = len(ids)
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], logits


@pytest.mark.model
def test_the_default_model_says_what_it_says_on_the_cpu_outside_ties() -> None:
    try:
        from umbel.srt.weights import open_model

        source = open_model("default")
    except (ImportError, UmbelError) as error:
        pytest.skip(f"no default model: {error}")
    options: dict[str, Any] = {"num_slots": NUM_SLOTS, "dtype": "float32"}
    cpu = build_runner(source.config, source.tensors, device="cpu", kernels="torch", **options)
    gpu = build_runner(source.config, source.tensors, device="cuda", kernels="triton", **options)
    prompt = [2, *source.tokenizer().encode("The capital of France is Paris. The capital of Italy is", first=True)]
    expected, logits = greedy(cpu, prompt, 40)
    actual, _ = greedy(gpu, prompt, 40)
    for position, (wanted, got, row) in enumerate(zip(expected, actual, logits, strict=True)):
        best = row.topk(2).values
        if wanted != got:
            assert float((best[0] - best[1]) / best[0].abs()) < SURE, f"token {position} is no tie"
            return  # from here on they are two texts
    assert np.array_equal(expected, actual)
