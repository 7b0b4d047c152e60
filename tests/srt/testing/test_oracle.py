"""The oracle finds every kind of wrong reuse; otherwise the tests that rest on it would prove nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from umbel.srt.core.batch import Batch, Draws, RowNeed, RowRequests
from umbel.srt.sampling.sampler import Sampler, draw_key
from umbel.srt.testing.oracle import OracleError, OracleModel, OracleRunner, histories


def batch(tokens: list[int], slots: list[int], *, prefix: int = 0, known: int = 0) -> Batch:
    """One sequence: rows [prefix, len) of `tokens` in `slots`; keys before `known` are in the pool."""
    positions = np.arange(prefix, len(tokens), dtype=np.int64)
    writes = np.array(slots[prefix:], dtype=np.int64)
    writes[: max(0, known - prefix)] = 0
    return Batch(
        token_ids=np.array(tokens[prefix:], dtype=np.int64),
        positions=positions,
        write_slots=writes,
        query_lengths=np.array([len(positions)], dtype=np.int32),
        prefix_lengths=np.array([prefix], dtype=np.int32),
        slots=(np.array(slots, dtype=np.int32),),
        logit_rows=np.array([len(positions) - 1], dtype=np.int64),
    )


def runner() -> OracleRunner:
    return OracleRunner(vocab_size=16, context_length=32, num_slots=20)


def test_the_pool_gives_the_logits_of_the_whole_history() -> None:
    oracle = runner()
    oracle.forward(batch([1, 2, 3], [4, 5, 6]))
    logits = oracle.forward(batch([1, 2, 3, 7], [4, 5, 6, 9], prefix=3)).values
    assert torch.equal(logits[0], torch.from_numpy(oracle.model.reference([1, 2, 3, 7])))


def test_a_row_without_a_slot_reads_the_key_that_is_there() -> None:
    oracle = runner()
    oracle.forward(batch([1, 2, 3], [4, 5, 6]))
    logits = oracle.forward(batch([1, 2, 3], [4, 5, 6], prefix=2, known=3)).values
    assert torch.equal(logits[0], torch.from_numpy(oracle.model.reference([1, 2, 3])))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (batch([1, 2, 3, 7], [4, 5, 8, 9], prefix=3), "position 2: slot 8 holds nothing"),
        (batch([1, 2, 3, 7], [5, 4, 6, 9], prefix=3), "position 0: slot 5 holds the key of position 1"),
        (batch([1, 2, 8], [4, 5, 6], prefix=2, known=3), "position 2: the slot holds token 3, the sequence has 8"),
        (batch([9, 2, 3], [7, 5, 6], known=0, prefix=0), ""),
    ],
)
def test_wrong_slots_are_named(wrong: Batch, message: str) -> None:
    oracle = runner()
    oracle.forward(batch([1, 2, 3], [4, 5, 6]))
    if not message:  # a legal rewrite: the inverse
        oracle.forward(wrong)
        return
    with pytest.raises(OracleError, match=message):
        oracle.forward(wrong)


def test_a_key_computed_after_another_prefix_is_found_though_its_token_is_right() -> None:
    oracle = runner()
    oracle.forward(batch([1, 2, 3], [4, 5, 6]))
    oracle.forward(batch([9], [7]))
    with pytest.raises(OracleError, match="position 1: the key was computed after another prefix"):
        oracle.forward(batch([9, 2, 3, 7], [7, 5, 6, 8], prefix=3))


def test_a_wrong_prefix_is_found_when_the_truth_is_known() -> None:
    oracle = runner()
    oracle.forward(batch([1, 2, 3], [4, 5, 6]))
    oracle.expected = lambda: [np.array([1, 9, 3, 7], dtype=np.int32)]
    with pytest.raises(OracleError, match="position 1: the slot holds token 2, the sequence has 9"):
        oracle.forward(batch([1, 2, 3, 7], [4, 5, 6, 8], prefix=3))


@pytest.mark.parametrize(
    "change",
    [
        {"positions": np.array([0, 1, 3], dtype=np.int64)},
        {"write_slots": np.array([4, 5, 5], dtype=np.int64)},
        {"write_slots": np.array([4, 5, 9], dtype=np.int64)},
        {"query_lengths": np.array([2], dtype=np.int32)},
        {"prefix_lengths": np.array([1], dtype=np.int32)},
        {"slots": (np.array([4, 5], dtype=np.int32),)},
        {"slots": (np.array([0, 5, 6], dtype=np.int32),)},
        {"logit_rows": np.array([2, 1], dtype=np.int64)},
        {"logit_rows": np.array([3], dtype=np.int64)},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(OracleError):
        runner().forward(replace(batch([1, 2, 3], [4, 5, 6]), **change))  # type: ignore[arg-type]


def test_clear_forgets() -> None:
    oracle = runner()
    oracle.forward(batch([1, 2], [4, 5]))
    oracle.clear()
    with pytest.raises(OracleError, match="holds nothing"):
        oracle.forward(batch([1, 2, 3], [4, 5, 6], prefix=2))


def test_the_order_of_tokens_matters() -> None:
    assert histories(np.array([1, 2]))[-1] != histories(np.array([2, 1]))[-1]
    assert histories(np.array([1, 2, 3]))[1] == histories(np.array([1, 2]))[-1]


def test_logits_never_tie_and_one_token_stands_out() -> None:
    model = OracleModel(vocab_size=1000)
    logits = model.logits(histories(np.arange(500) % 7))
    ordered = np.sort(logits, axis=1)
    assert (np.diff(ordered, axis=1) > 0).all()
    assert np.median(ordered[:, -1] - ordered[:, -2]) > 1


def test_favourites_are_what_it_likes_to_say() -> None:
    model = OracleModel(vocab_size=300, favourites=(65, 66))
    best = {int(model.reference([1, 2, i]).argmax()) for i in range(50)}
    assert best == {65, 66}


def test_logits_are_the_same_on_every_machine() -> None:
    logits = OracleModel(vocab_size=16).reference([1, 2, 3])
    assert int(logits.argmax()) == 14
    assert float(logits.sum()) == pytest.approx(61.84386, abs=1e-3)


def picks(kind: RowNeed, *, top_k: int = 0, min_p: float = 0.0) -> RowRequests:
    return RowRequests(
        kinds=np.array([kind], dtype=np.uint8),
        inverse_temperatures=np.array([1.0]),
        keys=np.array([draw_key(3, 4)], dtype=np.uint64),
        top_k=np.array([top_k], dtype=np.int32),
        min_p=np.array([min_p]),
    )


@pytest.mark.parametrize(
    "asked",
    [
        picks(RowNeed.ARGMAX),
        *(picks(RowNeed.SAMPLE), picks(RowNeed.SAMPLE, top_k=3), picks(RowNeed.SAMPLE, min_p=0.2)),
        picks(RowNeed.SAMPLE, top_k=100, min_p=0.01),
    ],
)
def test_a_token_that_the_runner_picks_is_the_one_that_the_sampler_chooses(asked: RowRequests) -> None:
    answers = []
    for picks_tokens in (True, False):
        oracle = OracleRunner(vocab_size=16, context_length=32, num_slots=20, picks_tokens=picks_tokens)
        answers.append(oracle.forward(replace(batch([1, 2, 3], [4, 5, 6]), row_requests=asked)))
    picked, complete = answers
    assert (len(picked.values), picked.places.tolist()) == (0, [-1])
    assert (len(complete.values), complete.places.tolist(), complete.tokens.tolist()) == (1, [0], [-1])
    wish = Draws(
        rows=np.array([0]),
        inverse_temperatures=np.array([float(asked.kinds[0] == RowNeed.SAMPLE)]),
        keys=asked.keys,
        top_k=asked.top_k,
        top_p=np.array([1.0]),
        min_p=asked.min_p,
    )
    assert picked.tokens.tolist() == Sampler(16).choose(complete.values, wish).tolist()


def test_a_row_that_is_asked_for_whole_keeps_its_logits() -> None:
    oracle = OracleRunner(vocab_size=16, context_length=32, num_slots=20, picks_tokens=True)
    answer = oracle.forward(replace(batch([1, 2, 3], [4, 5, 6]), row_requests=picks(RowNeed.LOGITS)))
    assert (answer.places.tolist(), answer.tokens.tolist()) == ([0], [-1])
    assert torch.equal(answer.values[0], torch.from_numpy(oracle.model.reference([1, 2, 3])))
