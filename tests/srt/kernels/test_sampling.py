"""Choosing tokens in C++ against the torch reference, on every instruction set that this machine executes."""

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.errors import EngineError
from umbel.srt.core.batch import Draws
from umbel.srt.kernels.cpu.head import CpuSampling
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.sampling.sampler import TorchSampling, Wanted, describe

from .native import isa_cases, with_each_team

VOCABULARIES = [1, 20, 127, 128, 129, 700, 3000, 16_385, 40_000]  # cut blocks, cut chunks, one and several of each
torch.set_num_threads(1)


@pytest.fixture(params=isa_cases())
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    loaded = load_library(request.param)
    loaded.umbel_set_threads(2)
    yield loaded
    loaded.umbel_set_threads(1)


def draws(rows: list[int], *, seed: int = 0, **columns: object) -> Draws:
    """All kinds of draws mixed, unless a column is given."""
    rng, n = np.random.default_rng(seed), len(rows)
    mixed = {
        "inverse_temperatures": rng.choice([0, 1.0, 1 / 0.7, 0.01, 5.0, 1e30], n),
        "top_k": rng.choice([0, 0, 1, 5, 40, 300, 5000], n),
        "top_p": rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9], n),
        "min_p": rng.choice([0, 0, 1e-6, 0.05, 0.5, 1.0], n),
        **{name: np.full(n, value) for name, value in columns.items()},
    }
    return Draws(
        rows=np.array(rows, dtype=np.int64),
        inverse_temperatures=mixed["inverse_temperatures"].astype(np.float64),
        keys=rng.integers(0, 2**64, n, dtype=np.uint64),
        top_k=mixed["top_k"].astype(np.int32),
        top_p=mixed["top_p"].astype(np.float64),
        min_p=mixed["min_p"].astype(np.float64),
    )


def logits(rows: int, vocab: int, *, seed: int = 1, spread: float = 2.5, ties: bool = False) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)
    return torch.from_numpy(np.round(values) if ties else values)


def random_mask(vocab: int, rng: np.random.Generator, share: float) -> np.ndarray:
    """Packed bits; the token in the middle is always allowed, and bits behind the vocabulary are set as well."""
    allowed = rng.random(-(-vocab // 32) * 32) < share
    allowed[vocab // 2] = allowed[vocab:] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from(VOCABULARIES),
    rows=st.integers(1, 70),
    spread=st.sampled_from([0.0, 0.1, 2.5, 30.0]),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.001, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_tokens_are_those_of_torch_whatever_the_number_of_threads(
    library: ctypes.CDLL, vocab: int, rows: int, spread: float, ties: bool, masked: float, seed: int
) -> None:
    rows = min(rows, 400_000 // vocab)
    rng = np.random.default_rng(seed)
    values = logits(rows, vocab, seed=seed, spread=spread, ties=ties)
    wanted = draws(rng.permutation(rows).tolist(), seed=seed)
    if masked:
        masks = [None if i % 3 == 1 else random_mask(vocab, rng, masked) for i in range(rows)]
        wanted = dataclasses.replace(wanted, masks=masks)
    native = CpuSampling(library)
    expected = TorchSampling().choose(values, wanted).tolist()
    for chosen in with_each_team(library, lambda: native.choose(values, wanted)):
        assert chosen.tolist() == expected


@pytest.mark.parametrize("kind", ["greedy", "all", "top_k", "wide top_k", "top_p", "wide top_p", "min_p"])
@pytest.mark.sampled(4)
def test_a_vocabulary_of_a_quarter_million_gives_the_tokens_of_torch(library: ctypes.CDLL, kind: str) -> None:
    only: dict[str, object] = {"inverse_temperatures": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    only |= {
        "greedy": {"inverse_temperatures": 0.0},
        "all": {},
        "top_k": {"top_k": 40},
        "wide top_k": {"top_k": 30_000, "top_p": 0.9},
        "top_p": {"inverse_temperatures": 4.0, "top_p": 0.9},
        "wide top_p": {"top_p": 0.97},
        "min_p": {"min_p": 0.05},
    }[kind]
    values = logits(3, 262_144)
    wanted = draws([2, 0, 1, 2], **only)
    assert CpuSampling(library).choose(values, wanted).tolist() == TorchSampling().choose(values, wanted).tolist()


def test_rows_may_lie_apart_and_padding_behind_them_is_not_read(library: ctypes.CDLL) -> None:
    padded = torch.full((5, 1000), torch.nan)
    padded[:, :700] = logits(5, 700)
    wanted = draws([4, 1, 1, 3])
    native = CpuSampling(library)
    assert (native.choose(padded[:, :700], wanted) == native.choose(padded[:, :700].contiguous(), wanted)).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 130, 40_000 - 1])
@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(
    library: ctypes.CDLL, wrong: float, place: int, inverse_temperature: float
) -> None:
    values = logits(6, 40_000)
    values[4, place] = wrong
    native = CpuSampling(library)
    for rows in ([4], [0, 1, 2, 3, 4, 5]):
        with pytest.raises(EngineError, match="not numbers"):
            native.choose(values, draws(rows, inverse_temperatures=inverse_temperature))
        with pytest.raises(EngineError, match="not numbers"):
            native.summarise(values, np.array(rows), 3)
    assert len(native.choose(values, draws([0, 5]))) == 2, "other rows do not matter"


def test_a_row_of_which_no_token_may_be_chosen_is_an_error(library: ctypes.CDLL) -> None:
    values = torch.full((1, 300), -torch.inf)
    with pytest.raises(EngineError, match="not numbers"):
        CpuSampling(library).choose(values, draws([0]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.sampled_from(VOCABULARIES),
    rows=st.integers(1, 9),
    top=st.sampled_from([0, 1, 5, 20]),
    spread=st.sampled_from([0.1, 5.0]),
    ties=st.booleans(),
)
def test_log_probabilities_are_those_of_float64(
    library: ctypes.CDLL, vocab: int, rows: int, top: int, spread: float, ties: bool
) -> None:
    values = logits(rows, vocab, spread=spread, ties=ties)
    own = np.arange(rows)[::-1].copy()
    summary, *others = with_each_team(library, lambda: CpuSampling(library).summarise(values, own, top))
    for other in others:
        assert other.normalisers.tolist() == summary.normalisers.tolist()
        assert other.top_tokens.tolist() == summary.top_tokens.tolist()
    truth = torch.logsumexp(values.double(), dim=-1).numpy()[own]
    assert summary.normalisers == pytest.approx(truth, abs=2e-6)
    for row, tokens, largest in zip(own, summary.top_tokens, summary.top_logits, strict=True):
        order = np.argsort(-values[row].numpy(), kind="stable")[: min(top, vocab)]
        assert tokens.tolist() == order.tolist()
        assert largest.tolist() == values[row].numpy()[order].tolist()


def test_described_tokens_are_the_same_from_both(library: ctypes.CDLL) -> None:
    values = logits(3, 3000)
    wanted = [Wanted(2, 7, 3), Wanted(0, 1), Wanted(2, 9, 5)]
    native, reference = (describe(values, wanted, chooser) for chooser in (CpuSampling(library), TorchSampling()))
    for mine, other in zip(native, reference, strict=True):
        assert mine.token_id == other.token_id
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        assert mine.logprob == pytest.approx(other.logprob, abs=2e-6)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=2e-6)


def test_nothing_asked_nothing_given(library: ctypes.CDLL) -> None:
    native = CpuSampling(library)
    assert native.choose(torch.zeros(0, 7), draws([])).tolist() == []
    assert native.summarise(torch.zeros(0, 7), np.zeros(0, dtype=np.int64), 3).top_tokens.shape == (0, 3)
