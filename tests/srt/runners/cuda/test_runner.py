"""The CUDA engine, run on the host, gives the logits of the torch engine: families, kinds of steps, graphs or none."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from umbel.srt.core.batch import AsyncRunner, Batch
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.runners.torch_runner import TorchRunner

from ...attention.batches import Branch, branches, make_tree_batch, radix_paths
from ...models.reference import Piece, Sequences, relative_error
from .engines import (
    EXPERTS,
    FAMILIES,
    HYBRIDS,
    SHAPES,
    in_torch,
    mixed_steps,
    on_host,
    only_last_rows,
    sequences,
    tiny_model,
)

TREE_SLOTS = 1000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def last_logits(runner: CudaRunner, batch: Batch) -> torch.Tensor:
    return runner.forward(only_last_rows(batch)).values


@pytest.mark.sampled(6)
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *SHAPES, *EXPERTS, *HYBRIDS])
def test_logits_equal_those_of_torch(family: str, cuda_graphs: bool) -> None:
    config, tensors = tiny_model(family)
    truth, runner = in_torch(config, tensors), on_host(config, tensors, cuda_graphs=cuda_graphs)
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        expected = truth.forward(batch).values
        actual = runner.forward(batch)
        assert relative_error(actual.values, expected) < 1e-5
        assert actual.places.tolist() == list(range(len(pieces)))
        assert (actual.tokens == -1).all()
    facts = runner.facts()
    assert facts["eager_steps"] == (2 if cuda_graphs else len(mixed_steps()))
    assert facts["graph_replays"] == (11 if cuda_graphs else 0)
    assert facts["graphs"] == (3 if cuda_graphs else 0)  # three rows are padded to four
    assert float(facts["device_seconds"]) > 0


def test_it_is_a_launcher() -> None:
    runner = on_host(*tiny_model("qwen 3"))
    assert isinstance(runner, AsyncRunner)
    assert (runner.vocab_size, runner.context_length, runner.num_slots) == (97, 256, 200)


def test_logits_of_all_rows_of_a_prompt() -> None:
    """After the last attention only the rows that are asked for go on: here all, some and none."""
    config, tensors = tiny_model("gemma 3")
    truth, runner = in_torch(config, tensors), on_host(config, tensors)
    batch = sequences().batch([Piece(0, 0, 23), Piece(1, 0, 9)])
    expected = truth.forward(batch).values
    for rows in ([*range(32)], [3, 22, 31], []):
        some = dataclasses.replace(batch, logit_rows=np.array(rows, dtype=np.int64))
        actual = runner.forward(some).values
        assert actual.shape == (len(rows), 97)
        assert torch.allclose(actual, expected[rows], atol=1e-4)


def forked(branches: int, prefix: int) -> Batch:
    """Branches that decode behind one prefix, as nodes of the radix tree."""
    tokens = np.random.default_rng(3).integers(0, 97, (branches, prefix + 5))
    tokens[:, :prefix] = tokens[0, :prefix]
    own = Sequences([row.tolist() for row in tokens], 1 + tokens.size)
    for slots in own.slots[1:]:
        slots[:prefix] = own.slots[0][:prefix]
    batch = own.batch([Piece(i, prefix + 4, 1) for i in range(branches)])
    return dataclasses.replace(batch, paths=radix_paths(list(own.slots), [prefix] * branches))


@pytest.mark.parametrize("tree_attention", [True, False])
def test_branches_that_share_a_prefix_read_it_once(tree_attention: bool) -> None:
    config, tensors = tiny_model("qwen 3")
    tokens = 6 * 105
    truth = in_torch(config, tensors, num_slots=1 + tokens, tree_attention=False)
    runner = on_host(config, tensors, num_slots=1 + tokens, tree_attention=tree_attention)
    generator = torch.Generator().manual_seed(5)
    for layer, part in enumerate(truth.pool.keys):  # whatever the keys are: both engines read the same
        values = torch.randn(part.shape, generator=generator)
        for pool in (truth.pool, runner.pool):
            pool.keys[layer].copy_(values)
            pool.values[layer].copy_(values.flip(0))
    batch = forked(6, 100)
    assert relative_error(last_logits(runner, batch), truth.forward(batch).values) < 1e-5
    assert (int(runner.facts()["keys_saved"]) > 0) is tree_attention


@pytest.fixture(scope="module")
def engines() -> tuple[TorchRunner, CudaRunner]:
    """Two engines of one model with windows, whose pools hold the same random keys."""
    config, tensors = tiny_model("gemma 3", max_position_embeddings=TREE_SLOTS)
    truth, runner = in_torch(config, tensors, num_slots=TREE_SLOTS), on_host(config, tensors, num_slots=TREE_SLOTS)
    generator = torch.Generator().manual_seed(5)
    for part in ("keys", "values"):
        for theirs, ours in zip(getattr(truth.pool, part), getattr(runner.pool, part), strict=True):
            ours.copy_(theirs.copy_(torch.randn(theirs.shape, generator=generator)))
    return truth, runner


@settings(max_examples=25, deadline=None)
@given(parts=branches, seed=strategies.integers(0, 1000))
def test_steps_of_any_tree_of_sequences_give_the_logits_of_torch(
    engines: tuple[TorchRunner, CudaRunner], parts: list[Branch], seed: int
) -> None:
    truth, runner = engines
    batch, slots = make_tree_batch(parts, seed)
    assert slots <= TREE_SLOTS
    tokens = np.random.default_rng(seed).integers(0, 97, batch.rows)
    batch = only_last_rows(dataclasses.replace(batch, token_ids=tokens))
    assert relative_error(runner.forward(batch).values, truth.forward(batch).values) < 1e-5


def test_a_failed_step_can_be_forgotten() -> None:
    runner = on_host(*tiny_model("qwen 3"))
    addresses = [part.data_ptr() for part in (*runner.pool.keys, *runner.pool.values)]
    runner.forward(sequences().batch([Piece(0, 0, 23)]))
    assert runner.pool.keys[0].any()
    runner.clear()
    assert not any(part.any() for part in (*runner.pool.keys, *runner.pool.values))
    assert addresses == [part.data_ptr() for part in (*runner.pool.keys, *runner.pool.values)]
