"""The same engine on the Triton kernels: in their interpreter without a GPU, compiled with one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from umbel.srt.attention import long_prompts
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.core.batch import RowNeed, RowRequests
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.runners import build
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.build import triton_parts
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.sampling.sampler import draw_keys
from umbel.srt.weights.quantization import Int4Method

from ...models.reference import Piece, relative_error
from .engines import HYBRIDS, SHAPES, in_torch, on_host, only_last_rows, sequences, tiny_model

PARTS = triton_parts()
pytestmark = [] if PARTS.anywhere else [pytest.mark.gpu]
TOLERANCE = 2e-5 if PARTS.anywhere else 1e-4  # of the largest logit; a device sums in other orders

# The interpreter takes a millisecond for each program: few rows, and as few layers as a window class needs.
STEPS = [
    [Piece(0, 0, 6)],
    [Piece(0, 6, 1), Piece(1, 0, 2)],
    [Piece(0, 7, 1), Piece(1, 2, 1)],
    [Piece(0, 8, 1)],
]

KINDS = ("sliding_attention", "full_attention")
NIGHTLY = (
    *HYBRIDS,
    "gemma 4",
    "gemma 4, values that are keys",
    "gemma 3n",
    "gpt-oss",
    "llama, biases everywhere",
    "qwen 3",
    "gemma 2",
    "phi 4 mini",
    "olmo 2",
    "granite",
    "glm 4 0414",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def on_device(config: dict[str, Any], tensors: Tensors, **options: Any) -> CudaRunner:
    device = torch.device("cpu" if PARTS.anywhere else "cuda")
    return on_host(config, tensors, accelerator=accelerator_for(device), parts=PARTS, max_running=2, **options)


def small(family: str, *, layers: int = 2) -> tuple[dict[str, Any], Tensors]:
    if family in HYBRIDS:
        return tiny_model(family)
    kinds: dict[str, Any] = {}
    if family in SHAPES:
        kinds = {"layer_types": list(KINDS), "num_kv_shared_layers": 0}
    if family == "gemma 3n":
        kinds["activation_sparsity_pattern"] = [0.8, 0.0]
    if family == "gemma 4":  # whose last two layers read the keys of the first two
        layers, kinds = 4, {"layer_types": list(KINDS) * 2}
    return tiny_model(family, num_hidden_layers=layers, sliding_window_pattern=2, **kinds)


@pytest.mark.nightly
@pytest.mark.parametrize("torch_prompts", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_chunks_of_a_long_prompt_attend_by_torch_without_a_graph(
    torch_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each other in bfloat16, before rows that decode in graphs."""
    monkeypatch.setattr(long_prompts, "LEAST_VECTORS", 16)
    config, tensors = small("qwen 3")
    truth = in_torch(config, tensors)
    runner = on_device(config, tensors, dtype=torch.bfloat16, torch_prompts=torch_prompts)
    before = dict(runner.facts())  # on a device steps have warmed it up
    for pieces in ([Piece(0, 0, 9), Piece(2, 0, 10)], [Piece(0, 9, 11)], [Piece(0, 20, 1), Piece(2, 10, 1)]):
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values.cpu(), truth.forward(batch).values) < 3e-2
    facts = runner.facts()
    counts = [int(facts[name]) - int(before[name]) for name in ("torch_prompts", "eager_steps", "graph_replays")]
    assert counts == [3 if torch_prompts else 0, 2, 1]


@pytest.mark.parametrize(
    "family",
    [
        "gemma 3",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mixtral", "deepseek v3", *NIGHTLY)),
    ],
)
def test_logits_equal_those_of_torch(family: str) -> None:
    config, tensors = small(family)
    truth, runner = in_torch(config, tensors), on_device(config, tensors)
    warming = int(runner.facts()["graph_replays"])  # on a device steps have warmed it up
    for pieces in STEPS:
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values.cpu(), truth.forward(batch).values) < TOLERANCE
    facts = runner.facts()
    assert (facts["kernels"], int(facts["graph_replays"]) - warming) == ("triton", 2)


@pytest.mark.nightly
def test_experts_in_four_bits_are_those_of_torch() -> None:
    """By the kernels of one row and of sorted tokens, in graphs and without."""
    config, tensors = tiny_model("qwen 3, experts", num_hidden_layers=1, hidden_size=64, moe_intermediate_size=32)
    truth = in_torch(config, tensors, weights="int4")
    runner = on_device(config, tensors, method=Int4Method())
    for pieces in STEPS:
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values.cpu(), truth.forward(batch).values) < TOLERANCE
    assert runner.facts()["weights"] == "int4"


def test_it_is_what_is_built_where_triton_is_asked_for() -> None:
    """With a pool of given size; what memory leaves is measured on a device only."""
    config, tensors = small("qwen 3")
    device = "cpu" if PARTS.anywhere else "cuda"
    runner = build_runner(config, tensors, num_slots=50, dtype="float32", device=device, kernels="triton")
    assert isinstance(runner, CudaRunner)
    assert (runner.num_slots, runner.facts()["kernels"]) == (50, "triton")
    assert (runner.trie_walk is None) is (build.host_walk() is None)  # masks are made on the host


@pytest.mark.nightly
def test_keys_in_float8_are_those_of_torch() -> None:
    config, tensors = small("qwen 3", layers=1)
    truth = in_torch(config, tensors, kv_dtype="fp8")
    runner = on_device(config, tensors, kv_dtype=FLOAT8)
    for pieces in STEPS[:3]:
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values.cpu(), truth.forward(batch).values) < 1e-2


@pytest.mark.nightly
def test_tokens_are_those_that_torch_chooses() -> None:
    """Two launches, the second of which does not know its tokens."""
    config, tensors = small("qwen 3", layers=1)
    row_requests = RowRequests(
        kinds=np.array([RowNeed.SAMPLE, RowNeed.ARGMAX], dtype=np.uint8),
        inverse_temperatures=np.array([0.8, 0.0]),
        keys=draw_keys([3, 4], [0, 0]),
        top_k=np.array([20, 0], dtype=np.int32),
        min_p=np.array([0.01, 0.0]),
        top_p=np.array([0.9, 1.0]),
    )
    first = only_last_rows(sequences().batch([Piece(0, 0, 2), Piece(1, 0, 1)]))
    second = only_last_rows(sequences().batch([Piece(0, 2, 1), Piece(1, 1, 1)]))
    second = dataclasses.replace(second, token_ids=np.zeros(2, dtype=np.int64), token_sources=np.arange(2))
    tokens = []
    for runner in (on_device(config, tensors), on_host(config, tensors)):
        answers = [runner.launch(dataclasses.replace(batch, row_requests=row_requests)) for batch in (first, second)]
        tokens.append([answer.result().tokens.tolist() for answer in answers])
    assert tokens[0] == tokens[1]
