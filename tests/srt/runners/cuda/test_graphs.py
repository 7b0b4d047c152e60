"""Graphs of decode steps: their sizes, the padding of steps, and that nothing which they read ever moves."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.core.batch import DUMMY_SLOT, PictureRows
from umbel.srt.runners.cuda import graphs as captured_steps
from umbel.srt.runners.cuda.build import warm_up, warming_steps
from umbel.srt.runners.cuda.device import ALIGNMENT, Graph, HostAccelerator, Staging, StepLimits
from umbel.srt.runners.cuda.graphs import StepGraphs, graph_rows, idle, padded, sizes_upto

from ...models.reference import Piece, relative_error
from .engines import FAMILIES, mixed_steps, on_host, only_last_rows, sequences, tiny_model
from .recording import RecordingAccelerator, recorded_parts


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 100, 512])
def test_sizes_ascend_to_the_most_rows_and_waste_at_most_half(most: int) -> None:
    sizes = sizes_upto(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for before, size in pairwise(sizes):
        assert size <= 2 * before
        assert before < 8 or 2 * size <= 3 * before + 1


def test_the_usual_sizes() -> None:
    assert sizes_upto(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@dataclass
class Recorded:
    """A device that notes what is captured."""

    captured: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)

    def graphs(self, sizes: tuple[int, ...]) -> StepGraphs:
        return StepGraphs(_Capturing(self), sizes, self.ran.append)


class _Capturing(HostAccelerator):
    def __init__(self, record: Recorded) -> None:
        super().__init__()
        self._record = record

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = super().capture(work)
        self._record.captured.append(self._record.ran.pop())  # a capture runs nothing
        return graph


def test_a_size_is_captured_once_and_replayed_every_time() -> None:
    record = Recorded()
    graphs = record.graphs((1, 2, 4))
    for rows in (3, 1, 4, 3):
        graphs.run(graphs.size_for(rows))
    assert record.captured == [4, 1]
    assert record.ran == [4, 1, 4, 4]
    assert (len(graphs), graphs.replays) == (2, 4)


def test_captured_ahead_no_step_has_to_capture() -> None:
    record = Recorded()
    graphs = record.graphs((1, 2, 4))
    for size in (4, 2, 1):
        graphs.capture(size)
    graphs.run(2)
    assert record.captured == [4, 2, 1]
    assert record.ran == [2]


def test_all_graphs_of_a_runner_can_be_captured_ahead() -> None:
    runner = on_host(*tiny_model("qwen 3"), max_running=5)
    runner.capture_graphs()
    assert runner.facts()["graphs"] == 4  # 1, 2, 4, 5
    assert not any(part[1:].any() for part in runner.pool.keys), "only the dummy slot was written"


def test_warming_up_runs_steps_of_all_kinds_and_leaves_no_key() -> None:
    runner = on_host(*tiny_model("gemma 3"))
    limits = StepLimits(rows=300, sequences=8)
    steps = warming_steps(limits, context_length=runner.context_length, vocab_size=runner.vocab_size)
    assert [step.rows for step in steps] == [1, 7, 16, 100, 256, 256, 256], "as many as there are positions"
    warm_up(runner, limits)
    assert (runner.facts()["graph_replays"], runner.facts()["eager_steps"]) == (2, 5)
    assert not any(part[1:].any() for part in (*runner.pool.keys, *runner.pool.values))


def test_steps_that_have_no_graph_are_warmed_up_too() -> None:
    steps = warming_steps(StepLimits(rows=2048), context_length=4096, vocab_size=97)
    assert [step.rows for step in steps] == [1, 7, 16, 100, 1040, 1041, 2048]
    assert [len(step.logit_rows) for step in steps] == [1, 1, 1, 1, 16, 7, 1]


def test_graphs_end_where_steps_keep_the_device_busy() -> None:
    limits = StepLimits(rows=2048, graph_rows=256)
    assert (graph_rows(limits), graph_rows(StepLimits(rows=100, graph_rows=256))) == (256, 100)
    assert [step.rows for step in warming_steps(limits, context_length=4096, vocab_size=97)][-3:] == [272, 273, 2048]


def test_steps_of_text_have_graphs_up_to_so_many_rows_and_logits() -> None:
    captured = on_host(*tiny_model("qwen 3"), max_running=4, rows=9)._captured
    assert captured is not None
    places = np.array([1, 9], dtype=np.int32)
    mixed = only_last_rows(sequences().batch([Piece(0, 5, 1), Piece(1, 3, 2)]))
    assert not captured.takes(mixed), "its slots are in no table"
    mixed = replace(mixed, places=places)
    assert captured.takes(mixed)
    assert captured.takes(replace(mixed, logit_rows=np.arange(3)))
    assert not captured.takes(replace(mixed, pictures=(PictureRows(0, 1, 0, 0),)))
    prompts = replace(sequences().batch([Piece(0, 0, 6), Piece(1, 0, 3)]), places=places)
    assert captured.takes(only_last_rows(prompts))
    assert not captured.takes(replace(prompts, logit_rows=np.arange(5)))
    longer = sequences().batch([Piece(0, 0, 6), Piece(1, 0, 4)])
    assert not captured.takes(only_last_rows(replace(longer, places=places)))


@pytest.mark.parametrize("few", [4, 128])
@pytest.mark.parametrize("logit_rows", [[18], [11, 18], [0, 5, 12, 18], []])
@pytest.mark.sampled(4)
def test_prompts_of_any_length_give_the_same_logits_as_a_graph(
    logit_rows: list[int], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the rows that are asked for, and other ones at the next replay. Large steps have plans of their own."""
    monkeypatch.setattr(captured_steps, "FEW_ROWS", few)
    config, tensors = tiny_model("gemma 3")
    graphs = on_host(
        config, tensors, accelerator=RecordingAccelerator(), parts=recorded_parts(), max_running=4, rows=24
    )
    plain = on_host(config, tensors, cuda_graphs=False)
    graphs.capture_graphs()
    for wanted in ([3, 4], logit_rows):
        step = replace(
            sequences().batch([Piece(0, 0, 12), Piece(2, 0, 7)]), logit_rows=np.array(wanted, dtype=np.int64)
        )
        assert torch.allclose(graphs.forward(step).values, plain.forward(step).values, atol=1e-5)
    assert (graphs.facts()["graph_replays"], graphs.facts()["eager_steps"]) == (2, 0)


@pytest.mark.parametrize("logit_rows", [[0], [1, 3], [], [0, 1, 2, 3]])
@pytest.mark.parametrize("generated", [None, [0, 0], [1, 2], [1, 3]])
@pytest.mark.sampled(4)
def test_a_small_step_of_any_kind_gives_the_same_logits_as_a_graph(
    logit_rows: list[int], generated: list[int] | None
) -> None:
    """A row that decodes beside three of another sequence: of a prompt, or tokens that a jump has appended."""
    config, tensors = tiny_model("gemma 3")
    graphs, plain = on_host(config, tensors, max_running=5), on_host(config, tensors, cuda_graphs=False)
    first, second = [Piece(0, 0, 12), Piece(1, 0, 4)], [Piece(0, 12, 1), Piece(1, 4, 3)]
    step = replace(
        sequences().batch(second),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        generated=None if generated is None else np.array(generated, dtype=np.int32),
    )
    for runner in (graphs, plain):
        runner.forward(only_last_rows(sequences().batch(first)))
    assert torch.allclose(graphs.forward(step).values, plain.forward(step).values, atol=1e-5)
    assert (graphs.facts()["graph_replays"], graphs.facts()["eager_steps"]) == (1, 1)


def test_a_step_whose_plan_does_not_fit_is_launched_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = tiny_model("qwen 3")
    graphs, plain = on_host(config, tensors), on_host(config, tensors, cuda_graphs=False)
    monkeypatch.setattr(graphs._backend, "plan_into", lambda plan, batch, window: False)
    batch = only_last_rows(sequences().batch([Piece(0, 0, 5)]))
    assert torch.equal(graphs.forward(batch).values, plain.forward(batch).values)
    assert (graphs.facts()["graph_replays"], graphs.facts()["eager_steps"]) == (0, 1)


def test_rows_of_padding_are_sequences_of_one_token_in_the_dummy_slot() -> None:
    batch = only_last_rows(sequences().batch([Piece(0, 5, 1), Piece(1, 3, 1)]))
    batch = replace(batch, paths=(((1, 0, 4),), ()), token_sources=np.array([-1, 0]))
    more = padded(batch, 4)
    assert more.token_ids.tolist() == [*batch.token_ids.tolist(), 0, 0]
    assert more.positions.tolist() == [5, 3, 0, 0]
    assert more.write_slots.tolist() == [*batch.write_slots.tolist(), DUMMY_SLOT, DUMMY_SLOT]
    assert more.query_lengths.tolist() == [1, 1, 1, 1]
    assert more.prefix_lengths.tolist() == [5, 3, 0, 0]
    assert [slots.tolist() for slots in more.slots[2:]] == [[DUMMY_SLOT]] * 2
    assert more.logit_rows.tolist() == [0, 1], "nobody asks for those of padding"
    assert more.paths == (((1, 0, 4),), (), (), ())
    assert more.token_sources is not None
    assert more.token_sources.tolist() == [-1, 0, -1, -1]
    assert padded(batch, 2) is batch
    assert idle(3).rows == 3
    assert padded(batch, 3).spans == ()
    assert padded(batch, 3).generated is None
    jumped = padded(replace(batch, generated=np.array([1, 0], dtype=np.int32)), 3)
    assert jumped.generated is not None
    assert jumped.generated.tolist() == [1, 0, 0]


def test_broken_numbers_in_the_dummy_slot_reach_no_row() -> None:
    config, tensors = tiny_model("gemma 3")
    clean, broken = on_host(config, tensors), on_host(config, tensors)
    batch = only_last_rows(sequences().batch([Piece(i, 4, 1) for i in range(3)]))
    for runner in (clean, broken):
        runner.forward(only_last_rows(sequences().batch([Piece(i, 0, 4) for i in range(3)])))
    for part in (*broken.pool.keys, *broken.pool.values):
        part[DUMMY_SLOT] = float("nan")
    assert torch.equal(clean.forward(batch).values, broken.forward(batch).values)


def test_what_graphs_read_and_write_stays_where_it_is() -> None:
    """A captured graph knows addresses only. Steps of several sizes, with others between them."""
    runner = on_host(*tiny_model("gemma 3"))
    captured = runner._captured
    assert captured is not None
    seen: dict[int, set[tuple[int, ...]]] = {}
    for pieces in [*mixed_steps(), *mixed_steps()]:
        runner.forward(only_last_rows(sequences().batch(pieces)))
        for size, inputs in captured._inputs.items():
            tensors = (inputs.token_ids, inputs.positions, inputs.write_slots, captured._logits, *runner.pool.keys)
            addresses = (*(tensor.data_ptr() for tensor in tensors), *(id(plan) for plan in inputs.plans.values()))
            seen.setdefault(size, set()).add(addresses)
        runner.clear()
    assert sorted(seen) == [1, 2, 4]
    assert all(len(addresses) == 1 for addresses in seen.values())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma 4", "gemma 3n", "lfm2", "qwen 3.5"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, FLOAT8])
def test_graphs_that_know_addresses_only_give_the_logits_of_steps_without_graphs(
    family: str, kv_dtype: torch.dtype
) -> None:
    """Other tokens, positions, slots and keys at every replay, and none of the Python that a capture went through.

    A captured step has rows of padding, so matrix products differ in their last bits from CPU to CPU. Of float8 keys
    such a bit may round one to its neighbour, 6 % away: 1.6e-5 of the logits where it was seen.
    """
    config, tensors = tiny_model(family)
    most = 1e-3 if kv_dtype is FLOAT8 else 1e-5
    plain = on_host(config, tensors, kv_dtype=kv_dtype, cuda_graphs=False)
    graphs = on_host(
        config, tensors, kv_dtype=kv_dtype, accelerator=RecordingAccelerator(), parts=recorded_parts(), max_running=4
    )
    graphs.capture_graphs()
    for pieces in [*mixed_steps(), *mixed_steps()]:
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(graphs.forward(batch).values, plain.forward(batch).values) < most
    assert graphs.facts()["graph_replays"] == 22
    graphs.clear()
    assert not any(part.view(torch.uint8).any() for part in graphs.pool.keys)
    batch = only_last_rows(sequences().batch([Piece(0, 0, 1)]))  # the graphs write to the pool that was cleared
    graphs.forward(batch)
    assert graphs.pool.keys[0].view(torch.uint8).any()
    assert graphs.states is None or all(part[1].any() for layer in graphs.states.parts for part in layer)


def test_arrays_travel_together_and_arrive_as_they_were() -> None:
    staging = Staging(HostAccelerator(), 64)
    arrays = [
        np.arange(5, dtype=np.int64),
        np.zeros(0, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([1.5, -2.5]),
        np.array([7], dtype=np.uint8),
    ]
    for _ in range(2):  # the first call has to grow the buffer
        tensors = staging.send(arrays)
        for tensor, array in zip(tensors, arrays, strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)
        addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
        assert all((address - addresses[0]) % ALIGNMENT == 0 for address in addresses)
    arrays[0] += 1
    again = staging.send(arrays)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in tensors]
    assert again[0].tolist() == [1, 2, 3, 4, 5]


def test_rows_that_do_not_lie_side_by_side_can_be_sent() -> None:
    (tensor,) = Staging(HostAccelerator(), 64).send([np.arange(10, dtype=np.int64)[::3]])
    assert tensor.tolist() == [0, 3, 6, 9]
