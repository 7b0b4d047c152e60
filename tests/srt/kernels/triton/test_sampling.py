"""Tokens chosen by the kernels: those of the torch reference, for the same seeds and positions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import EngineError
from umbel.srt.core.batch import Draws
from umbel.srt.kernels.triton.sampling import DeviceDraws, TritonSampling
from umbel.srt.kernels.triton.tuning import read_tuning, tuned
from umbel.srt.sampling.sampler import TorchSampling, draw_keys

from .closeness import random

# The interpreter says what numpy does about infinities and logarithms of 0, which the kernels mean.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def wishes(
    *rows: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    position: int = 3,
    masks: Sequence[np.ndarray | None] | None = None,
) -> Draws:
    """One draw for each of `rows`, with its own seed; numbers are for all of them, or one for each."""
    count = len(rows)
    temperatures = np.broadcast_to(np.array(temperature, dtype=np.float64), count)
    return Draws(
        rows=np.array(rows, dtype=np.int64),
        inverse_temperatures=np.divide(1.0, temperatures, out=np.zeros(count), where=temperatures > 0),
        keys=draw_keys(list(range(100, 100 + count)), [position] * count),
        top_k=np.broadcast_to(np.array(top_k, dtype=np.int32), count).copy(),
        top_p=np.broadcast_to(np.array(top_p, dtype=np.float64), count).copy(),
        min_p=np.broadcast_to(np.array(min_p, dtype=np.float64), count).copy(),
        masks=masks,
    )


def reference_tokens(logits: torch.Tensor, draws: Draws) -> list[int]:
    return TorchSampling().choose(logits.float(), draws).tolist()


def mask_of(allowed: Sequence[int], vocab: int) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_columns_and_masks_are_aligned_for_any_number_of_draws(count: int) -> None:
    """Triton compiles a kernel again for an address that is no multiple of 16."""
    masks = [mask_of([0, 2], 64), *[None] * (count - 1)]
    draws = DeviceDraws.of(wishes(*range(count), masks=masks), torch.device(torch.get_default_device()))
    assert draws.rows.tolist() == list(range(count))
    assert draws.masks.tolist() == [[5, 0]]
    assert draws.mask_rows.tolist() == [0, *[-1] * (count - 1)]
    columns = (draws.rows, draws.inverse_temperatures, draws.keys, draws.top_p, draws.log_min_p, draws.top_k)
    assert {column.data_ptr() % 16 for column in (draws.counters, *columns, draws.mask_rows, draws.masks)} == {0}


def test_draws_at_temperature_0_have_no_limits() -> None:
    device = torch.device(torch.get_default_device())
    assert not DeviceDraws.of(wishes(0, 1, temperature=[0.0, 1.0], top_k=[5, 0], min_p=[0.1, 0]), device).limited
    assert DeviceDraws.of(wishes(0, 1, temperature=[0.0, 1.0], top_p=[1.0, 0.9]), device).limited


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_draws_that_are_on_the_device_can_be_chosen_again(limits: dict[str, float]) -> None:
    """As a graph does: counters are what they were."""
    logits = random(2, 3000) * 3
    draws = DeviceDraws.of(wishes(0, 1, 1, temperature=[0.0, 1.0, 0.7], **limits), logits.device)
    tokens = [TritonSampling().choose_sent(logits, draws).tolist() for _ in range(2)]
    assert tokens[0] == tokens[1]
    assert not draws.counters.any()


def test_programs_read_several_times_where_there_are_many_rows() -> None:
    logits = random(2, 9000) * 3
    draws = wishes(0, 1, 0, 1, temperature=[0.0, 1.0, 1.3, 0.8], top_k=[0, 0, 7, 0], top_p=[1, 1, 1, 0.9])
    with tuned(logits.device, sampling_scan=replace(read_tuning().sampling_scan, programs=2)):
        assert TritonSampling().choose(logits, draws).tolist() == reference_tokens(logits, draws)


@pytest.mark.parametrize("vocab", [5, 128, 700, 9000])  # one tile, several, and several chunks
def test_the_most_likely_token_is_chosen_and_of_equal_ones_the_first(vocab: int) -> None:
    logits = (random(4, vocab) * 2).round()  # many ties
    assert TritonSampling().choose(logits, wishes(0, 1, 2, 3, temperature=0.0)).tolist() == [
        int(np.flatnonzero(row == row.max())[0]) for row in logits.cpu().numpy()
    ]


@pytest.mark.parametrize("vocab", [3, 700, 9000])
def test_races_have_the_same_winners(vocab: int) -> None:
    logits = random(3, vocab) * 3
    for position in range(2):
        draws = wishes(2, 0, 0, 1, 1, temperature=[0.3, 1.0, 2.0, 50.0, 1e-30], position=position)
        assert TritonSampling().choose(logits, draws).tolist() == reference_tokens(logits, draws)


def test_a_race_of_equal_logits_is_decided_by_the_noise_alone() -> None:
    logits = torch.zeros(1, 9000)
    for position in range(3):
        draws = wishes(0, 0, 0, position=position)
        assert TritonSampling().choose(logits, draws).tolist() == reference_tokens(logits, draws)


LIMITS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},  # more than there are tiles: no bound from their maxima
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.05},
    {"top_k": 500, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.3},
]


@pytest.mark.sampled(3)
# With 4 candidates the search goes over the rows themselves.
@pytest.mark.parametrize(("limits", "candidates"), [*zip(LIMITS, repeat(8192)), *zip(LIMITS[1::2], repeat(4))], ids=str)
def test_limits_leave_the_same_tokens_in_the_race(limits: dict[str, float], candidates: int) -> None:
    logits = random(2, 400) * 2
    draws = wishes(0, 1, temperature=[1.7, 0.6], **limits)
    assert TritonSampling(candidates=candidates).choose(logits, draws).tolist() == reference_tokens(logits, draws)


@pytest.mark.parametrize("candidates", [8192, 300])
def test_nuclei_of_flat_rows_are_found_among_many_tokens(candidates: int) -> None:
    logits = random(1, 5000) * 0.5  # all of them are within the reach of the bound that holds for every row
    draws = wishes(0, 0, 0, top_p=[0.02, 0.4, 0.97])
    assert TritonSampling(candidates=candidates).choose(logits, draws).tolist() == reference_tokens(logits, draws)


def test_what_ties_with_the_last_token_kept_is_kept() -> None:
    logits = torch.full((1, 300), -50.0)
    logits[0, [3, 40, 41, 299]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    chosen = set()
    for position in range(5):
        draws = wishes(0, 0, temperature=3.0, top_k=[2, 0], top_p=[1.0, 0.6], position=position)
        tokens = TritonSampling().choose(logits, draws).tolist()
        assert tokens == reference_tokens(logits, draws)
        chosen |= set(tokens)
    assert chosen == {3, 40, 41, 299}


@pytest.mark.parametrize("candidates", [8192, 4])
def test_zero_of_either_sign_is_one_logit(candidates: int) -> None:
    logits = torch.zeros(1, 700)
    logits[0, ::2] = -0.0
    logits[0, 300] = 0.1
    draws = wishes(0, 0, temperature=50.0, top_k=[1, 0], top_p=[1, 1e-3])
    assert TritonSampling(candidates=candidates).choose(logits, draws).tolist() == [300, 300]


def test_masks_leave_out_what_may_not_be_chosen() -> None:
    vocab = 700
    logits = random(3, vocab) * 3
    allowed = [5, 31, 32, 64, 333, 699]
    masks = [mask_of(allowed, vocab), None, mask_of([17], vocab), mask_of(allowed, vocab), mask_of(allowed, vocab)]
    draws = wishes(
        0,
        0,
        1,
        2,
        2,
        temperature=[0.0, 0.0, 1.0, 1.0, 1.0],
        top_k=[0, 0, 0, 3, 0],
        top_p=[1, 1, 1, 1, 0.5],
        masks=masks,
    )
    tokens = TritonSampling().choose(logits, draws).tolist()
    assert tokens == reference_tokens(logits, draws)
    assert tokens[2] == 17
    assert {tokens[0], tokens[3], tokens[4]} <= set(allowed)


def test_forbidden_tokens_never_win() -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [7, 250]] = torch.tensor([-3.0, -2.0])
    for limits in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}):
        draws = wishes(0, 0, 0, temperature=[0.0, 1.0, 1e30], **limits)
        assert TritonSampling().choose(logits, draws).tolist() == reference_tokens(logits, draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_may_have_16_bits_and_rows_may_lie_apart(dtype: torch.dtype) -> None:
    logits = (random(3, 800) * 3).to(dtype)[:, :555]
    draws = wishes(0, 1, 2, temperature=[0.0, 1.0, 0.8], top_k=[0, 0, 9])
    assert TritonSampling().choose(logits, draws).tolist() == reference_tokens(logits.float(), draws)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_random_batches_give_the_tokens_of_the_reference(data: st.DataObject) -> None:
    vocab, count = data.draw(st.integers(1, 600)), data.draw(st.integers(1, 4))
    scale = data.draw(st.sampled_from([0.1, 1.0, 5.0]))
    logits = random(count, vocab, seed=data.draw(st.integers(0, 9))) * scale
    if data.draw(st.booleans()):
        logits = logits.round()
    each = lambda values: data.draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))  # noqa: E731
    masks = [
        None if allowed is None else mask_of(sorted(allowed), vocab)
        for allowed in data.draw(
            st.lists(st.none() | st.sets(st.integers(0, vocab - 1), min_size=1), min_size=count, max_size=count)
        )
    ]
    draws = wishes(
        *range(count),
        temperature=each([0.0, 0.2, 1.0, 2.5]),
        top_k=each([0, 1, 2, 40, 10_000]),
        top_p=each([1.0, 0.99, 0.7, 0.01]),
        min_p=each([0.0, 0.05, 0.5]),
        position=data.draw(st.integers(0, 1000)),
        masks=masks,
    )
    chooser = TritonSampling(candidates=data.draw(st.sampled_from([8192, 16])))
    assert chooser.choose(logits, draws).tolist() == reference_tokens(logits, draws)


WISHES: list[dict[str, float]] = [{"top_p": 0.5}, {"temperature": 0.0}, {}, {"top_k": 5}, {"min_p": 0.1}]


@pytest.mark.parametrize(
    ("bad", "wish"),
    [
        *((torch.nan, wish) for wish in WISHES),
        (torch.inf, WISHES[0]),
        *(pytest.param(torch.inf, wish, marks=pytest.mark.nightly) for wish in WISHES[1:]),
    ],
    ids=str,
)
@pytest.mark.sampled(4)
def test_rows_that_are_not_numbers_are_refused_when_they_are_asked_for(bad: float, wish: dict[str, float]) -> None:
    logits = random(3, 300)
    logits[1, 200] = bad
    chooser = TritonSampling()
    assert chooser.choose_async(logits, wishes(0, 1, 2, **wish)).tolist()[1] == -1
    assert (chooser.choose_async(logits, wishes(0, 2, **wish)) >= 0).all()
    with pytest.raises(EngineError, match="not numbers"):
        chooser.choose(logits, wishes(1, **wish))
    with pytest.raises(EngineError, match="not numbers"):
        chooser.summarise(logits, np.array([1]), 2)


def test_a_row_without_a_token_that_may_be_chosen_is_refused() -> None:
    draws = wishes(0, 0, 0, temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 4], masks=[mask_of([], 300)] * 3)
    assert TritonSampling().choose_async(random(1, 300), draws).tolist() == [-1, -1, -1]


def test_no_draws_are_no_work() -> None:
    chooser = TritonSampling()
    assert chooser.choose(random(2, 50), wishes()).tolist() == []
    assert chooser.summarise(random(2, 50), np.array([], dtype=np.int64), 3).top_tokens.shape == (0, 3)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("vocab", "top"), [(20, 3), (700, 0), (700, 5), (700, 12), (9000, 20), (7, 20)])
@pytest.mark.parametrize("candidates", [8192, 4])
def test_normalisers_and_largest_logits_are_those_of_the_reference(vocab: int, top: int, candidates: int) -> None:
    logits = (random(3, vocab) * 8).round() / 2  # ties
    rows = np.array([2, 0], dtype=np.int64)
    actual = TritonSampling(candidates=candidates).summarise(logits, rows, top)
    expected = TorchSampling().summarise(logits, rows, top)
    np.testing.assert_allclose(actual.normalisers, expected.normalisers, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(actual.top_tokens, expected.top_tokens)
    np.testing.assert_array_equal(actual.top_logits, expected.top_logits)
