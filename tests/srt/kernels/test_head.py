"""The head chooses what all its logits choose, on every instruction set that this machine runs."""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.lang.errors import ParameterError
from umbel.srt.core.batch import Allowed, RowNeed, RowRequests
from umbel.srt.kernels.cpu.head import Head
from umbel.srt.kernels.cpu.library import Isa, cpu_flags, load_library, usable
from umbel.srt.kernels.cpu.linear import Format, PackedMatrix
from umbel.srt.layers.checkpoint import BlockTensor
from umbel.srt.sampling.sampler import draw_key, gumbel, inverse_temperature

from .native import isa_cases, native_isas, with_each_team


def choose_from_logits(logits: torch.Tensor, row_requests: RowRequests) -> NDArray[np.int32]:
    """Chooses tokens by definition, as the reference; −1 where a logit is not finite. logits: float32 [rows, vocab]"""
    values = logits.double().numpy()
    return np.array([_choose_row(values[row], row_requests, row) for row in range(len(values))], dtype=np.int32)


def _choose_row(logits: NDArray[np.float64], row_requests: RowRequests, row: int) -> int:
    if not np.isfinite(logits).all():
        return -1
    if row in row_requests.allowed:
        bits = row_requests.allowed[row].bits
        assert bits is not None, "a choice among few tokens needs no head"
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(logits)]
        logits = np.where(allowed, logits, -np.inf)
    if row_requests.kinds[row] == RowNeed.ARGMAX:
        return int(logits.argmax())
    kept = logits > -np.inf
    if 0 < row_requests.top_k[row] < np.count_nonzero(kept):
        kept &= logits >= np.sort(logits)[-int(row_requests.top_k[row])]
    scale = row_requests.inverse_temperatures[row]
    if row_requests.min_p[row] > 0:
        kept &= (logits - logits.max()) * scale >= math.log(row_requests.min_p[row])
    scores = logits * scale + gumbel(row_requests.keys[row : row + 1], np.arange(len(logits)))
    return int(np.where(kept, scores, -np.inf).argmax())


FORMATS = (Format.F32, Format.BF16, Format.F16, Format.INT8, Format.Q8_0)


@pytest.fixture(params=isa_cases())
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    loaded = load_library(request.param)
    loaded.umbel_set_threads(2)
    yield loaded
    loaded.umbel_set_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(library: ctypes.CDLL, weight: torch.Tensor, form: Format) -> PackedMatrix:
    if form is not Format.Q8_0:
        return PackedMatrix(library, [weight], form)
    blocks = weight.reshape(len(weight), -1, 32)
    scales = blocks.abs().amax(dim=-1) / 127
    codes = (blocks / scales.clamp(min=1e-20)[..., None]).nan_to_num().round().to(torch.int8)
    data = torch.cat([scales.half()[..., None].view(torch.uint8), codes.view(torch.uint8)], dim=-1)
    shape = (len(weight), weight.shape[1])
    return PackedMatrix(library, [BlockTensor("Q8_0", shape, data.reshape(len(weight), -1).numpy())])


def head_of(library: ctypes.CDLL, weight: torch.Tensor, form: Format = Format.BF16, *, screen: bool = True) -> Head:
    return Head(library, matrix_of(library, weight, form), screen=screen)


def whole_blocks(hidden: int, form: Format) -> int:
    """So many inputs, or the next number of them that blocks have."""
    return -(-hidden // 32) * 32 if form is Format.Q8_0 else hidden


def states(rows: int, hidden: int, seed: int = 3) -> torch.Tensor:
    """Hidden states of the size that gives logits of some units, with an outlier as real ones have."""
    x = normal(rows, hidden, seed=seed) * 4 / hidden**0.5
    x[:, hidden // 3] += 3
    return x


def best_picks(rows: int) -> RowRequests:
    return sampled_picks(rows, kinds=np.full(rows, RowNeed.ARGMAX, dtype=np.uint8))


def sampled_picks(
    rows: int,
    *,
    kinds: np.ndarray | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
) -> RowRequests:
    return RowRequests(
        kinds=np.full(rows, RowNeed.SAMPLE, dtype=np.uint8) if kinds is None else kinds,
        inverse_temperatures=np.full(rows, inverse_temperature(temperature)),
        keys=np.array([draw_key(seed, position) for position in range(rows)], dtype=np.uint64),
        top_k=np.full(rows, top_k, dtype=np.int32),
        min_p=np.full(rows, min_p),
    )


def assert_same(head: Head, x: torch.Tensor, row_requests: RowRequests) -> None:
    """Token by token the reference's, with the logits that `all` has."""
    logits = head.all(x)
    chosen = head.choose(x, row_requests)
    assert chosen.tokens.tolist() == choose_from_logits(logits, row_requests).tolist()
    assert chosen.logits.tolist() == logits[torch.arange(len(x)), torch.from_numpy(chosen.tokens).long()].tolist()


# ----------------------------------------------------------------------------------------------- the best token


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows", "vocab", "hidden"), [(1, 3000, 64), (7, 1001, 200), (19, 700, 1100), (70, 333, 33)])
@pytest.mark.sampled(5)
def test_the_best_token_is_that_of_all_logits(
    library: ctypes.CDLL, form: Format, rows: int, vocab: int, hidden: int
) -> None:
    hidden = whole_blocks(hidden, form)
    head = head_of(library, normal(vocab, hidden), form)
    x = states(rows, hidden)
    best = head.best(x)
    whole = head.all(x).max(dim=1)
    assert best.tokens.tolist() == whole.indices.tolist()
    assert best.logits.tolist() == whole.values.tolist()
    assert head.screens or form is Format.Q8_0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 400), st.integers(1, 300), st.sampled_from(FORMATS), st.integers(0, 99))
def test_sizes_are_free(rows: int, vocab: int, hidden: int, form: Format, seed: int) -> None:
    hidden = whole_blocks(hidden, form)
    for isa in native_isas():
        library = load_library(isa)
        head = head_of(library, normal(vocab, hidden, seed=seed), form)
        assert_same(head, states(rows, hidden), best_picks(rows))
        assert_same(head, states(rows, hidden), sampled_picks(rows, seed=seed))


def test_few_logits_are_computed_exactly(library: ctypes.CDLL) -> None:
    head = head_of(library, normal(20_000, 128))
    head.best(states(10, 128))
    counters = head.counters
    assert (counters.rows, counters.fallbacks) == (10, 0)
    assert 10 <= counters.exact <= counters.candidates < 10 * 1000


@pytest.mark.nightly  # it is compiled where the CPU has something wider
@pytest.mark.skipif(not usable(Isa.AVX2, cpu_flags()), reason="this CPU has no AVX2")
def test_blocks_of_bytes_are_screened_by_inputs_of_seven_bits() -> None:
    """With AVX2 and nothing wider. A logit costs one row of one panel."""
    head, x = head_of(load_library(Isa.AVX2), normal(20_000, 128), Format.Q8_0), states(10, 128)
    assert head.screens
    for requests in (best_picks(10), sampled_picks(10), sampled_picks(10, top_k=20), sampled_picks(10, min_p=0.1)):
        before = head.counters
        assert_same(head, x, requests)
        assert head.counters.fallbacks == 0
        assert 10 <= head.counters.exact - before.exact <= head.counters.candidates - before.candidates < 10 * 1000
    assert head.bytes == 2 * 20_000 * 4


@pytest.mark.parametrize("form", FORMATS)
def test_of_equal_tokens_the_first_is_chosen(library: ctypes.CDLL, form: Format) -> None:
    weight = normal(900, 96)
    for token in (40, 777, 500, 899):
        weight[token] = weight[321]
    x = weight[321].expand(5, -1) * torch.tensor([[1.0], [0.1], [3.0], [1e-3], [40.0]])
    assert head_of(library, weight, form).best(x.contiguous()).tokens.tolist() == [40] * 5


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.sampled(4)
def test_near_ties_are_decided_by_exact_logits(library: ctypes.CDLL, form: Format) -> None:
    base = normal(1, 64)
    weight = base + 1e-3 * normal(2500, 64, seed=1)  # all of them lie within the screen's bounds
    assert_same(head_of(library, weight, form), base * torch.linspace(0.1, 5, 20)[:, None], best_picks(20))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_zeros_and_outliers_of_weights_change_nothing(library: ctypes.CDLL, form: Format) -> None:
    weight = normal(1200, 96)
    weight[::3] = 0
    weight[7] *= 1e4
    weight[:, 11] *= 300
    weight[100, 5] = 1e6
    weight /= 1024 if form is Format.F16 else 1  # it holds nothing above 65504
    x = states(12, 96)
    x[3] = 0
    x[4] = -x[4].abs()
    x[5] *= 1e-18
    x[6] *= 1e18
    assert_same(head_of(library, weight, form), x, best_picks(12))
    assert_same(head_of(library, weight, form), x, sampled_picks(12))


def test_logits_that_are_all_negative_lose_to_no_padding(library: ctypes.CDLL) -> None:
    head = head_of(library, -normal(35, 64).abs())
    x = normal(4, 64, seed=1).abs()
    best = head.best(x)
    assert bool((best.logits < 0).all())
    assert best.tokens.tolist() == head.all(x).argmax(dim=1).tolist()


def test_more_ties_than_a_shortlist_holds_take_all_logits(library: ctypes.CDLL) -> None:
    head = head_of(library, normal(1, 64).expand(9000, -1).contiguous())
    assert head.best(states(3, 64)).tokens.tolist() == [0, 0, 0]
    assert head.counters.fallbacks == 3


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_of_numbers_chooses_nothing(library: ctypes.CDLL, form: Format, bad: float) -> None:
    head = head_of(library, normal(600, 96), form)
    x = states(9, 96)
    x[2, 95] = bad
    for row_requests in (best_picks(9), sampled_picks(9)):
        chosen = head.choose(x, row_requests)
        assert chosen.tokens[2] == -1
        assert not np.isfinite(chosen.logits[2])
        assert (np.delete(chosen.tokens, 2) >= 0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_that_is_no_number_is_reported_in_every_row(library: ctypes.CDLL, form: Format) -> None:
    weight = normal(600, 96)
    weight[599, 3] = float("nan")
    head = head_of(library, weight, form)
    assert not head.screens
    assert head.best(states(4, 96)).tokens.tolist() == [-1] * 4


def test_logits_too_large_for_float32_choose_nothing(library: ctypes.CDLL) -> None:
    head = head_of(library, normal(100, 64) * 1e25)
    assert head.best(states(2, 64) * 1e25).tokens.tolist() == [-1, -1]


def test_without_a_screen_the_choice_is_the_same(library: ctypes.CDLL) -> None:
    weight, x = normal(2000, 64), states(20, 64)
    screened, plain = head_of(library, weight), head_of(library, weight, screen=False)
    for row_requests in (best_picks(20), sampled_picks(20), sampled_picks(20, top_k=5), sampled_picks(20, min_p=0.1)):
        one, other = screened.choose(x, row_requests), plain.choose(x, row_requests)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logits.tolist() == other.logits.tolist()
    assert plain.bytes == 0
    assert not plain.screens


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.sampled(4)
def test_coarse_estimates_choose_the_same(library: ctypes.CDLL, form: Format) -> None:
    weight, x = normal(3000, 96), states(40, 96)
    x[:, 50] *= 30  # one group of inputs is far larger than the others
    x[7, ::4] *= 50  # and in one row too many are
    matrix = matrix_of(library, weight, form)
    coarse, fine = Head(library, matrix), Head(library, matrix, coarse=False)
    for row_requests in (best_picks(40), sampled_picks(40)):
        one, other = coarse.choose(x, row_requests), fine.choose(x, row_requests)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logits.tolist() == other.logits.tolist()


def test_thousands_of_tokens_that_nobody_uses_fill_no_shortlist(library: ctypes.CDLL) -> None:
    weight = 0.01 * normal(16_000, 64)
    used = torch.arange(100, 16_000, 37)
    weight[used] = normal(len(used), 64, seed=1)
    head = head_of(library, weight)
    assert_same(head, states(12, 64), best_picks(12))
    assert_same(head, states(12, 64), sampled_picks(12, temperature=0.2))
    assert_same(head, states(12, 64), sampled_picks(12, temperature=0.2, top_k=20))
    assert head.counters.fallbacks == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_threads_and_of_rows_changes_nothing(library: ctypes.CDLL, form: Format) -> None:
    head, x = head_of(library, normal(8200, 96), form), states(21, 96)  # so many tokens that a sample goes first
    for row_requests in (sampled_picks(21), sampled_picks(21, top_k=20)):
        first, *others = with_each_team(library, partial(head.choose, x, row_requests))
        for other in others:
            assert other.tokens.tolist() == first.tokens.tolist()
            assert other.logits.tolist() == first.logits.tolist()
    alone = [head.best(x[row : row + 1]).logits[0] for row in range(21)]
    assert alone == head.best(x).logits.tolist()


# ----------------------------------------------------------------------------------------------- draws


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "temperature", [0.6, 1.0, *(pytest.param(extreme, marks=pytest.mark.nightly) for extreme in (1e-9, 100.0))]
)
@pytest.mark.parametrize(
    ("top_k", "min_p"),
    [
        *((0, 0.0), (20, 0.0), (300, 0.0), (10, 0.02)),
        *(pytest.param(*limit, marks=pytest.mark.nightly) for limit in ((1, 0.0), (256, 0.0), (0, 0.1), (0, 1.0))),
    ],
)
def test_a_draw_is_that_of_all_logits(
    library: ctypes.CDLL, form: Format, temperature: float, top_k: int, min_p: float
) -> None:
    head = head_of(library, normal(1500, 64), form)
    row_requests = sampled_picks(16, temperature=temperature, top_k=top_k, min_p=min_p, seed=7)
    assert_same(head, states(16, 64), row_requests)


def test_rows_of_every_kind_go_together(library: ctypes.CDLL) -> None:
    rows = 60
    generator = np.random.default_rng(1)
    row_requests = RowRequests(
        kinds=generator.choice([RowNeed.ARGMAX, RowNeed.SAMPLE], rows).astype(np.uint8),
        inverse_temperatures=1 / generator.uniform(0.1, 3, rows),
        keys=generator.integers(0, 2**63, rows, dtype=np.uint64),
        top_k=generator.choice([0, 1, 7, 100, 1000], rows).astype(np.int32),
        min_p=generator.choice([0, 0.01, 0.5], rows),
    )
    assert_same(head_of(library, normal(2000, 100)), states(rows, 100), row_requests)


def masks(rows: int, vocab: int, share: float, *, seed: int = 5) -> dict[int, Allowed]:
    """Random ones, for all rows but the first."""
    generator = np.random.default_rng(seed)
    allowed = generator.random((rows, -(-vocab // 32) * 32)) < share
    allowed[:, vocab:] = False
    allowed[:, generator.integers(vocab)] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    return {row: Allowed(None, words[row].copy()) for row in range(1, rows)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("share", "screen"),
    [
        *((0.002, True), (0.5, False)),
        *(pytest.param(share, True, marks=pytest.mark.nightly) for share in (0.0, 0.5)),
    ],
)
def test_only_what_a_mask_allows_is_chosen(library: ctypes.CDLL, form: Format, share: float, screen: bool) -> None:
    head = head_of(library, normal(9001, 64), form, screen=screen)
    x, allowed = states(9, 64), masks(9, 9001, share)
    assert_same(head, x, replace(best_picks(9), allowed=allowed))
    for top_k, min_p in [(0, 0.0), (1, 0.0), (40, 0.0), (0, 0.1), (10, 0.02)]:
        assert_same(head, x, replace(sampled_picks(9, top_k=top_k, min_p=min_p, seed=7), allowed=allowed))
    assert head.counters.fallbacks == 0 or share > 0.1, "few tokens fit a shortlist"
    assert_same(head, x, replace(sampled_picks(9, top_k=300, seed=7), allowed=allowed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 400), st.sampled_from(FORMATS), st.floats(0, 1), st.integers(0, 99))
def test_masks_of_any_size(rows: int, vocab: int, form: Format, share: float, seed: int) -> None:
    for isa in native_isas():
        head = head_of(load_library(isa), normal(vocab, 64, seed=seed), form)
        allowed = masks(rows, vocab, share, seed=seed)
        assert_same(head, states(rows, 64), replace(best_picks(rows), allowed=allowed))
        assert_same(head, states(rows, 64), replace(sampled_picks(rows, top_k=seed, seed=seed), allowed=allowed))


def test_a_mask_of_another_vocabulary_is_refused(library: ctypes.CDLL) -> None:
    head = head_of(library, normal(100, 48))
    for bits in (np.ones(3, np.uint32), np.ones(4, np.int32), np.ones(8, np.uint32)[::2], None):
        with pytest.raises(ParameterError, match="give 4 words of bits"):
            head.choose(states(1, 48), replace(best_picks(1), allowed={0: Allowed(None, bits)}))


def test_tokens_that_tie_with_the_last_of_top_k_stay(library: ctypes.CDLL) -> None:
    weight = torch.eye(8).repeat_interleave(30, dim=0)  # 30 tokens of each logit
    x = torch.tensor([[9.0, 8.0, 7.0, 0, 0, 0, 0, 0]]).expand(200, -1).contiguous()
    row_requests = sampled_picks(200, temperature=10.0, top_k=31)
    head = head_of(library, weight)
    assert_same(head, x, row_requests)
    assert set(head.choose(x, row_requests).tokens // 30) == {0, 1}


def test_draws_follow_the_probabilities(library: ctypes.CDLL) -> None:
    draws = 4000
    weight = normal(12, 16)
    x = states(1, 16)
    head = head_of(library, weight, Format.F32)
    counts = np.bincount(head.choose(x.expand(draws, -1).contiguous(), sampled_picks(draws)).tokens, minlength=12)
    expected = torch.softmax(head.all(x)[0].double(), dim=0).numpy() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3  # chi-square, 11 degrees of freedom, p = 0.001


# ----------------------------------------------------------------------------------------------- some logits


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 23])
def test_some_logits_are_those_of_all(library: ctypes.CDLL, form: Format, rows: int) -> None:
    head, x = head_of(library, normal(700, 160), form), states(rows, 160)
    tokens = np.array([0, 1, 15, 16, 17, 333, 699, 698, 5, 5], dtype=np.int32)
    expected = head.all(x)[:, torch.from_numpy(tokens).long()]
    assert all(torch.equal(some, expected) for some in with_each_team(library, lambda: head.some(x, tokens)))
    assert head.some(x, tokens[:0]).shape == (rows, 0)
    assert head.some(x[:0], tokens).shape == (0, 10)


def test_the_copy_takes_a_byte_for_each_weight(library: ctypes.CDLL) -> None:
    weight = normal(500, 128)
    assert head_of(library, weight).bytes == 512 * 128 + 3 * 512 * 4
    assert head_of(library, weight, Format.INT8).bytes == 2 * 512 * 4, "an INT8 matrix is its own copy"


def test_no_rows_are_no_work(library: ctypes.CDLL) -> None:
    assert head_of(library, normal(20, 30)).best(normal(0, 30)).tokens.shape == (0,)


def test_what_is_no_draw_is_refused(library: ctypes.CDLL) -> None:
    head, x = head_of(library, normal(50, 30)), normal(2, 30)
    with pytest.raises(ParameterError, match=r"x is \(2, 29\)"):
        head.best(x[:, :29])
    with pytest.raises(ParameterError, match="LOGITS"):
        head.choose(x, sampled_picks(2, kinds=np.zeros(2, dtype=np.uint8)))
    with pytest.raises(ParameterError, match="for 2 rows"):
        head.choose(x, sampled_picks(3))
    with pytest.raises(ParameterError, match="min_p"):
        head.choose(x, sampled_picks(2, min_p=1.5))
    with pytest.raises(ParameterError, match="top_k"):
        head.choose(x, sampled_picks(2, top_k=-1))
    with pytest.raises(ParameterError, match="0 to 49"):
        head.some(x, np.array([3, 50], dtype=np.int32))
