"""The sampler against a plain numpy definition, and the noise of its draws against chance."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.lang.errors import EngineError
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.messages import IdLogprob
from umbel.srt.sampling.sampler import (
    LARGEST_NOISE,
    PROCESSORS,
    SMALLEST_NOISE,
    Sampler,
    SampleRequest,
    TorchSampling,
    Wanted,
    _top,
    describe,
    draw_key,
    draw_keys,
    gumbel,
    stack_draws,
    token_hash,
)

torch.set_num_threads(1)


def draw(
    sampling: SamplingParams,
    *,
    row: int = 0,
    seed: int = 1,
    position: int = 5,
    counts: Mapping[int, int] | None = None,
    prompt: tuple[int, ...] = (),
    forbidden: frozenset[int] = frozenset(),
) -> SampleRequest:
    return SampleRequest(row, sampling, seed, position, counts or {}, np.array(prompt, dtype=np.int32), forbidden)


def adjusted(logits: np.ndarray, wish: SampleRequest) -> np.ndarray:
    """Penalties, biases and forbidden tokens, token by token."""
    result = logits.astype(np.float32).copy()
    sampling = wish.sampling
    for token in range(len(result)):
        if token in wish.counts or token in wish.prompt:
            penalty = np.float32(sampling.repetition_penalty)
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        shift = -sampling.frequency_penalty * wish.counts.get(token, 0)
        shift -= sampling.presence_penalty if token in wish.counts else 0.0
        shift += sampling.logit_bias.get(token, 0.0)
        result[token] += np.float32(shift)
        if token in wish.forbidden:
            result[token] = -np.inf
    return result


def kept_probabilities(logits: np.ndarray, wish: SampleRequest) -> np.ndarray:
    """What is in the race, by the definition: a full sort, one filter after the other."""
    values = adjusted(logits, wish)
    sampling = wish.sampling
    scaled = (values.astype(np.float64) - values.max()) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.top_k > 0:
        weights[values < np.sort(values)[::-1][min(sampling.top_k, len(values)) - 1]] = 0
    if sampling.top_p < 1:
        order = np.argsort(-values, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        last = order[int(np.argmax(mass >= sampling.top_p * (1 - 1e-6)))]
        weights[values < values[last]] = 0
    inverse = 1.0 / max(sampling.temperature, 1e-30)
    differences = (values.astype(np.float64) - values.max()) * inverse
    weights[differences < (np.log(sampling.min_p) if sampling.min_p else -np.inf)] = 0
    return weights / weights.sum()


def mixed(value: int) -> int:
    """splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def noise(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """The definition in sampler.py, in 64 bits of which 32 are kept."""
    key = mixed(mixed(seed) ^ position)
    low32 = np.uint64(2**32 - 1)
    h = tokens.astype(np.uint64) ^ np.uint64(key % 2**32)
    h = (h ^ h >> np.uint64(17)) * np.uint64(0xED5AD4BB) & low32
    h = (h ^ h >> np.uint64(11)) + np.uint64(key >> 32) & low32
    h = h * np.uint64(0xAC4C1B51) & low32
    h = (h ^ h >> np.uint64(15)) * np.uint64(0x31848BAB) & low32
    h = h ^ h >> np.uint64(14)
    return -np.log(-np.log1p(-(h.astype(np.float64) + 0.5) * 2.0**-32))


def definition(logits: np.ndarray, wish: SampleRequest) -> int:
    values = adjusted(logits, wish)
    if wish.sampling.greedy:
        return int(values.argmax())
    kept = np.flatnonzero(kept_probabilities(logits, wish))
    inverse = 1.0 / max(wish.sampling.temperature, 1e-30)
    scores = values[kept].astype(np.float64) * inverse + noise(wish.seed, wish.position, kept)
    return int(kept[int(np.argmax(scores))])


def sample(logits: np.ndarray, *wishes: SampleRequest) -> list[int]:
    return Sampler(logits.shape[1]).sample(torch.from_numpy(logits.copy()), wishes)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 2, 5, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, 19), st.floats(-5, 5), max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([20, 700, 3000]),
    wishes=st.lists(st.tuples(params, st.integers(0, 2**40), st.integers(0, 10**6)), min_size=1, max_size=6),
    ties=st.booleans(),
    noise=st.integers(0, 1000),
)
def test_every_row_is_what_the_definition_gives(
    shape: int, wishes: list[tuple[SamplingParams, int, int]], ties: bool, noise: int
) -> None:
    """Different parameters in one batch, ties included: bfloat16 models give many equal logits."""
    logits = np.random.default_rng(noise).normal(0, 3, (len(wishes), shape)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    draws = [
        draw(
            sampling,
            row=row,
            seed=seed,
            position=position,
            counts={3: 2, 7: 1},
            prompt=(1, 3),
            forbidden=frozenset({2}),
        )
        for row, (sampling, seed, position) in enumerate(wishes)
    ]
    together = sample(logits, *draws)
    for row, wish in enumerate(draws):
        truth = definition(logits[row], wish)
        assert together[row] == truth
        alone = draw(
            wish.sampling,
            seed=wish.seed,
            position=wish.position,
            counts=wish.counts,
            prompt=(1, 3),
            forbidden=wish.forbidden,
        )
        assert sample(logits[row : row + 1], alone) == [truth], "a row does not depend on its batch"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=12, top_p=0.9, min_p=0.02, temperature=1.3),
    ],
)
def test_tokens_come_with_their_probabilities(sampling: SamplingParams) -> None:
    """Chi-square over 4,000 draws of fixed seeds; the bound is the 0.1 % quantile."""
    logits = np.random.default_rng(3).normal(0, 1.5, (1, 16)).astype(np.float32)
    count = 4000
    tokens = sample(logits, *(draw(sampling, seed=9, position=i) for i in range(count)))
    seen = np.bincount(tokens, minlength=16)
    expected = kept_probabilities(logits[0], draw(sampling)) * count
    assert seen[expected == 0].sum() == 0
    rare = expected < 5  # together one kind: alone they follow no chi-square
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson and Hilferty's approximation of the quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3 if freedom else 1e-6
    assert statistic <= bound


def test_hashes_are_uniform_along_seeds_positions_and_tokens() -> None:
    tokens = np.arange(5000)
    along = {
        "seeds": token_hash(np.array([draw_key(seed, 7) for seed in range(5000)], dtype=np.uint64), np.array(11)),
        "positions": token_hash(np.array([draw_key(7, place) for place in range(5000)], dtype=np.uint64), np.array(11)),
        "tokens": token_hash(np.array(draw_key(7, 3), dtype=np.uint64), tokens),
    }
    for name, hashes in along.items():
        for bits in (hashes >> np.uint32(27), hashes & np.uint32(31)):  # the leading and the last five bits
            counts = np.bincount(bits.astype(np.int64), minlength=32)
            statistic = ((counts - 156.25) ** 2 / 156.25).sum()
            assert statistic < 61.1, f"{name}: chi-square, 31 degrees of freedom, 0.1 %"
    assert len(np.unique(along["tokens"])) == 5000, "no two tokens of a draw have the same noise"


@pytest.mark.parametrize("other", [(8, 3), (7, 4), (3, 7)])
def test_draws_know_nothing_of_each_other(other: tuple[int, int]) -> None:
    """Correlation of the noise of 50,000 tokens in two draws: within 3.3 standard deviations of none."""
    tokens = np.arange(50_000)
    left, right = (gumbel(np.array(draw_key(*key), dtype=np.uint64), tokens) for key in ((7, 3), other))
    assert abs(float(np.corrcoef(left, right)[0, 1])) < 3.3 / 50_000**0.5


def test_noise_is_the_definition_and_stays_within_its_bounds() -> None:
    for seed, position, token in ((0, 0, 0), (2**63 - 1, 2**20, 262_143), (5, 9, 77)):
        tokens = np.array([token])
        key = np.array(draw_key(seed, position), dtype=np.uint64)
        assert gumbel(key, tokens) == pytest.approx(noise(seed, position, tokens), rel=1e-14)
        assert draw_keys([1, seed], [2, position]).tolist() == [draw_key(1, 2), draw_key(seed, position)]
    extremes = [-math.log(-math.log1p(-(h + 0.5) * 2.0**-32)) for h in (0, 2**32 - 1)]
    assert LARGEST_NOISE - 1e-4 < extremes[0] < LARGEST_NOISE
    assert SMALLEST_NOISE < extremes[1] < SMALLEST_NOISE + 1e-4


def test_extreme_temperatures_neither_overflow_nor_lose_the_best_token() -> None:
    logits = np.array([[1.0, 80.0, 79.0, -50.0]], dtype=np.float32)
    for truncation in ({}, {"top_k": 3}, {"top_p": 0.9}):
        assert sample(logits, draw(SamplingParams(temperature=1e-300, **truncation))) == [1]
        assert sample(logits, draw(SamplingParams(temperature=100.0, **truncation)))[0] in range(4)


def test_a_nucleus_wider_than_the_first_candidates_is_not_cut() -> None:
    logits = np.zeros((1, 40_000), dtype=np.float32)  # all tokens equally likely
    wishes = [draw(SamplingParams(top_p=0.99), seed=3, position=i) for i in range(6)]
    tokens = [sample(logits, wish)[0] for wish in wishes]
    assert max(tokens) > 20_000
    assert tokens == [definition(logits[0], wish) for wish in wishes]


def test_top_values_of_a_large_vocabulary_come_from_few_blocks() -> None:
    logits = torch.randn(3, 262_144, generator=torch.Generator().manual_seed(5))
    values, ids = _top(logits, 64)
    truth = logits.topk(64, dim=-1)
    assert torch.equal(values, truth.values)
    assert torch.equal(logits.gather(1, ids), values)


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    assert sample(np.array([[1.0, 2.0, 2.0]], dtype=np.float32), draw(SamplingParams(temperature=0.0))) == [1]


def test_padding_behind_the_vocabulary_is_never_chosen() -> None:
    logits = torch.tensor([[0.0, 1.0, 99.0]])
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9)):
        assert Sampler(2).sample(logits.clone(), [draw(sampling)])[0] < 2


def test_logits_that_are_not_numbers_end_in_an_error() -> None:
    logits = np.full((1, 8), np.nan, dtype=np.float32)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=2)):
        with pytest.raises(EngineError, match="not numbers"):
            sample(logits, draw(sampling))


def test_log_probabilities_are_those_of_the_unmodified_logits() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (3, 50)).astype(np.float32)
    entries = describe(torch.from_numpy(logits), [Wanted(2, 7, 3), Wanted(0, 1)], TorchSampling())
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert entries[0].logprob == pytest.approx(reference[2, 7], abs=1e-5)
    assert entries[1] == IdLogprob(1, entries[1].logprob, ())
    best = np.argsort(-reference[2])[:3]
    assert [token for token, _ in entries[0].top] == best.tolist()
    assert [value for _, value in entries[0].top] == pytest.approx(reference[2, best].tolist(), abs=1e-5)


def test_equal_alternatives_are_named_by_id() -> None:
    entry = describe(torch.zeros(1, 6), [Wanted(0, 2, 6)], TorchSampling())[0]
    assert [token for token, _ in entry.top] == [0, 1, 2, 3, 4, 5]


def test_nothing_asked_nothing_given() -> None:
    assert Sampler(4).sample(torch.zeros(0, 4), []) == []
    assert describe(torch.zeros(0, 4), [], TorchSampling()) == []


@pytest.mark.parametrize("allowed", [np.array([3, 40, 669]), np.arange(1, 700), np.arange(690)])
def test_a_mask_rules_tokens_out(allowed: NDArray[np.int64]) -> None:
    logits = torch.from_numpy(np.random.default_rng(8).normal(0, 2, (3, 700)).astype(np.float32))
    mask = np.packbits(np.isin(np.arange(704), allowed), bitorder="little").view(np.uint32)
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
    ):
        columns = stack_draws([draw(sampling, row=row, seed=row) for row in range(3)])
        tokens = Sampler(700).choose(logits, dataclasses.replace(columns, masks=[mask, None, mask]))
        few = torch.full_like(logits, -torch.inf)
        few[:, allowed] = logits[:, allowed]
        few[1] = logits[1]
        assert tokens.tolist() == Sampler(700).choose(few, columns).tolist()
        assert set(tokens[[0, 2]].tolist()) <= set(allowed.tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_chooses_the_same_tokens() -> None:
    logits = torch.randn(6, 262_144, generator=torch.Generator().manual_seed(2)) * 4
    kinds = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.9},
        {"top_p": 0.95, "temperature": 3.0},
        {"top_k": 40},
        {"min_p": 0.1},
    ]
    draws = [draw(SamplingParams(**kind), row=row, seed=row, counts={5: 1}) for row, kind in enumerate(kinds)]
    on_cpu = Sampler(262_144).sample(logits.clone(), draws)
    assert Sampler(262_144).sample(logits.cuda(), draws) == on_cpu


class Halved:
    """A fake LogitsProcessor: halves the logits of every row."""

    def applies(self, sampling: SamplingParams) -> bool:
        return True

    def process(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
        before = logits.clone()
        logits /= 2

        def undo() -> None:
            logits.copy_(before)

        return undo


def test_processors_change_logits_in_their_order_before_a_token_is_drawn() -> None:
    sampler = Sampler(4, processors=(*PROCESSORS, Halved()))
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    biased = SamplingParams(temperature=0.0, logit_bias={0: 9.0})
    assert sampler.sample(logits, [draw(biased)]) == [0]
    assert logits.tolist() == [[5.0, 1.0, 1.5, 2.0]], "first the bias, then the half of it"


def test_logits_are_restored_when_a_later_processor_raises() -> None:
    class Broken(Halved):
        def process(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Callable[[], None]:
            raise RuntimeError("on purpose")

    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(RuntimeError, match="on purpose"):
        Sampler(4, processors=(Halved(), Broken())).sample(logits, [draw(SamplingParams())])
    assert logits.tolist() == [[1.0, 2.0, 3.0, 4.0]]
