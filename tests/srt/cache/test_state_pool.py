"""Runs of recurrent states: in waves or one after the other, each begins with what the runs before it have left."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.srt.cache.state_pool import (
    LEAST_STATES,
    StateGeometry,
    StatePart,
    StatePool,
    States,
    StateStep,
    independent_groups,
    states_for_bytes,
    waves,
)
from umbel.srt.core.batch import StateRun

SUM = StateGeometry(((StatePart((1,), torch.float64),),))

runs = st.lists(st.builds(StateRun, st.integers(1, 3), st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=12)


def add_up(inputs: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
    """A layer whose state is ten times the state before, plus the input."""
    state, outputs = states[0], []
    for token in inputs.unbind(1):
        state = state * 10 + token
        outputs.append(state)
    return torch.stack(outputs, 1), (state,)


@settings(max_examples=60, deadline=None)
@given(runs=runs)
def test_waves_change_nothing(runs: list[StateRun]) -> None:
    pool = StatePool(SUM, 6, torch.device("cpu"))
    inputs = torch.arange(1, 1 + sum(run.rows for run in runs), dtype=torch.float64)[:, None]
    states, expected, first = [torch.zeros(1, dtype=torch.float64)] * 6, [], 0
    for run in runs:
        out, (after,) = add_up(inputs[None, first : first + run.rows], (states[run.source][None],))
        states[run.target] = after[0]
        expected.append(out[0])
        first += run.rows
    actual = StateStep(pool, runs).scan(0, inputs, add_up)
    assert torch.equal(actual, torch.cat(expected))
    assert torch.equal(pool.parts[0][0], torch.stack(states))


@settings(max_examples=60, deadline=None)
@given(runs=runs)
def test_groups_touch_nothing_that_others_write(runs: list[StateRun]) -> None:
    groups = independent_groups(runs)
    firsts = [0, *itertools.accumulate(run.rows for run in runs)]
    placed = list(zip(firsts, runs, strict=False))
    assert sorted(pair for group in groups for pair in group) == sorted(placed)
    for group in groups:
        assert group == sorted(group), "runs keep their order"
        written = {run.target for _, run in group}
        others = {slot for other in groups if other is not group for _, run in other for slot in run[1:]}
        assert not written & others


def test_sequences_that_begin_with_one_snapshot_are_groups_of_their_own() -> None:
    assert len(independent_groups([StateRun(1, 9, slot) for slot in range(1, 9)])) == 8


def test_sequences_that_share_nothing_are_one_wave() -> None:
    assert len(waves([StateRun(1, slot, slot) for slot in range(1, 9)])) == 1


def test_a_snapshot_that_is_taken_in_the_step_is_read_in_the_next_wave() -> None:
    found = waves([StateRun(5, 0, 1), StateRun(2, 1, 2), StateRun(3, 1, 3), StateRun(1, 4, 4)])
    assert [[first for first, _ in wave] for wave in found] == [[0, 10], [5, 7]]


def test_clearing_forgets_all_states() -> None:
    pool = StatePool(SUM, 4, torch.device("cpu"))
    StateStep(pool, [StateRun(1, 0, 3)]).scan(0, torch.ones(1, 1, dtype=torch.float64), add_up)
    pool.clear()
    assert not pool.parts[0][0].any()


@pytest.mark.parametrize("numbers", [1 << 42, 1 << 62])
def test_a_pool_that_no_memory_holds_says_what_to_write(numbers: int) -> None:
    vast = StateGeometry(((StatePart((numbers,), torch.float32),),))
    with pytest.raises(ParameterError, match="write a smaller pool_tokens or pool_memory"):
        StatePool(vast, LEAST_STATES, torch.device("cpu"))


def test_too_few_bytes_say_how_many_to_give() -> None:
    assert states_for_bytes(SUM, 8 * LEAST_STATES) == LEAST_STATES
    with pytest.raises(ParameterError, match=f"write at least {16 * LEAST_STATES} bytes"):
        states_for_bytes(SUM, 8 * LEAST_STATES - 1)
