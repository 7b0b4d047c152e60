"""Probabilities of texts over all their tokens: every token sequence summed up, against the search's bounds."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.choice_search import ChoiceSearch, Probabilities, SearchLimits
from umbel.fsm.tokens.trie import build_trie, grows
from umbel.fsm.tokens.vocabulary import Vocabulary

Path = tuple[int, ...]

# "b" and "ab" have two ids; several ways lead to every text, and tokens go past the ends of texts.
TABLE = [b"a", b"b", b"c", b"ab", b"abc", b"bc", b"ba", b"b", b"ca", b"cab", b"ab", b"cc", b""]
EOS = len(TABLE) - 1
VOCABULARY = Vocabulary(TABLE, [EOS])
TRIE = build_trie(VOCABULARY)
EXACT = SearchLimits(epsilon=1e-9, most=100_000, patience=100_000)


class TableModel:
    """Tokens so far → probabilities of the next: drawn once, sharp or flat."""

    def __init__(self, seed: int, sharpness: float = 2.0) -> None:
        self._seed, self._sharpness = seed, sharpness

    @lru_cache  # noqa: B019  # lives as long as a test
    def logprobs(self, path: Path) -> tuple[float, ...]:
        logits = np.random.default_rng([self._seed, *path]).normal(size=len(TABLE)) * self._sharpness
        return tuple(logits - np.log(np.exp(logits).sum()))

    def probability(self, text: bytes, before: Path = (), ahead: Path = ()) -> float:
        """That what follows `before` begins with the text: the sum over every sequence of tokens."""
        total = 0.0
        for token, data in enumerate(TABLE):
            if not data:
                continue
            mass = math.exp(self.logprobs((*before, *ahead))[token])
            if data.startswith(text):
                total += mass
            elif text.startswith(data):
                total += mass * self.probability(text[len(data) :], before, (*ahead, token))
        return total


def encode(text: bytes) -> Path:
    """The longest token first, of equal ones the first."""
    if not text:
        return ()
    token = max((t for t, d in enumerate(TABLE) if d and text.startswith(d)), key=lambda t: (len(TABLE[t]), -t))
    return (token, *encode(text[len(TABLE[token]) :]))


def search(
    model: TableModel, texts: Sequence[bytes], limits: SearchLimits = EXACT, said: Path = ()
) -> tuple[ChoiceSearch, Probabilities]:
    choices = [(*said, *encode(text)) for text in texts]
    state = ChoiceSearch(TRIE, VOCABULARY.token_bytes, choices, said, longest=100, limits=limits)
    run(model, state)
    return state, state.probabilities


def run(model: TableModel, state: ChoiceSearch) -> set[Path]:
    """All that is asked is answered → the paths that were asked about."""
    nodes = [node for row in reversed(state.begin()) for node in row]  # children may be answered before their parents
    seen: set[Path] = set()
    while nodes:
        for node in nodes:
            path = tuple(node.tokens)
            assert path not in seen, "a node is evaluated once"
            seen.add(path)
            state.answer(node, np.array(model.logprobs(path))[state.question(node)])
        nodes = state.proceed()
    assert state.evaluated == len(seen)
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_bounds_close_on_the_sum_over_all_sequences(seed: int) -> None:
    model, texts = TableModel(seed), [b"abca", b"cabab", b"b", b"ccabc"]
    _, found = search(model, texts)
    truth = np.array([model.probability(text) for text in texts])
    assert np.exp(found.lower) == pytest.approx(truth, rel=1e-8)
    assert np.exp(found.upper) == pytest.approx(truth, rel=1e-8)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.1, 6.0),
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    st.integers(0, 12),
    st.sampled_from([0.5, 1e-2, 1e-4]),
)
def test_bounds_hold_wherever_a_search_ends(
    seed: int, sharpness: float, texts: list[str], most: int, epsilon: float
) -> None:
    model = TableModel(seed, sharpness)
    data = [text.encode() for text in texts]
    limits = SearchLimits(epsilon=epsilon, patience=most // 2, most=most, together=3)
    _, found = search(model, data, limits)
    for index, text in enumerate(data):
        longer = {other for other in data if other != text and other.startswith(text)}
        nearest = [one for one in longer if not any(one != other and one.startswith(other) for other in longer)]
        truth = model.probability(text) - sum(map(model.probability, nearest))
        assert math.exp(found.lower[index]) <= truth + 1e-9
        assert truth <= math.exp(found.upper[index]) + 1e-9
    assert sum(np.exp(found.lower)) <= 1 + 1e-9


def test_the_longer_of_two_choices_is_not_counted_for_the_shorter() -> None:
    model = TableModel(1)
    _, found = search(model, [b"a", b"ab", b"abc", b"ac"])
    p = model.probability
    truth = [p(b"a") - p(b"ab") - p(b"ac"), p(b"ab") - p(b"abc"), p(b"abc"), p(b"ac")]
    assert np.exp(found.lower) == pytest.approx(truth, rel=1e-6)
    assert sum(np.exp(found.lower)) == pytest.approx(p(b"a"), rel=1e-6)


def test_usual_tokens_and_those_that_go_past_the_end_by_hand() -> None:
    model = TableModel(2)
    _, found = search(model, [b"abb", b"c"])  # usual tokens: ab b, and c
    root, behind = np.exp(model.logprobs(())), np.exp(model.logprobs((3,)))
    b_and_more = [token for token, data in enumerate(TABLE) if data.startswith(b"b")]
    assert math.exp(found.usual[0]) == pytest.approx(root[3] * behind[b_and_more].sum())
    c_and_more = [token for token, data in enumerate(TABLE) if data.startswith(b"c")]
    assert math.exp(found.usual[1]) == pytest.approx(root[c_and_more].sum())
    assert found.logprobs[0] == pytest.approx([math.log(root[3]), math.log(behind[1])])


def test_one_choice_does_not_change_the_usual_score_of_another() -> None:
    model = TableModel(3)
    alone = search(model, [b"cabb"])[1].usual[0]
    beside = search(model, [b"ab", b"cabb", b"cc", b"b"])[1].usual[1]
    assert beside == pytest.approx(alone, abs=1e-12)


def test_what_the_prompt_said_is_a_condition() -> None:
    model, said = TableModel(4), (0,)
    _, found = search(model, [b"bc", b"c"], said=said)
    p = model.probability
    truth = [p(b"abc") / p(b"a"), p(b"ac") / p(b"a")]
    assert np.exp(found.lower) == pytest.approx(truth, rel=1e-6)
    assert np.exp(found.upper) == pytest.approx(truth, rel=1e-6)


def test_a_search_ends_when_the_order_is_certain_or_the_budget_is_spent() -> None:
    model, texts = TableModel(5), [b"abcabcabcabc", b"cabcabcabcab"]
    whole, _ = search(model, texts)
    patient, bounds = search(model, texts, SearchLimits(epsilon=1e-9, patience=8, most=10_000, together=2))
    first = 12  # usual tokens of both
    assert patient.evaluated <= whole.evaluated
    assert max(bounds.lower) > min(bounds.upper)
    stopped, bounds = search(model, texts, SearchLimits(epsilon=1e-9, patience=0, most=4, together=2))
    assert stopped.evaluated <= first + 4
    assert all(bounds.lower < bounds.upper)


def test_a_path_too_long_for_the_context_stays_in_the_bounds() -> None:
    model = TableModel(6)
    state = ChoiceSearch(TRIE, VOCABULARY.token_bytes, [encode(b"abcabc")], longest=2, limits=EXACT)
    assert all(len(path) <= 2 for path in run(model, state))
    bounds = state.probabilities
    assert math.exp(bounds.lower[0]) < model.probability(b"abcabc") < math.exp(bounds.upper[0])


def test_many_choices_share_their_beginnings() -> None:
    texts = [bytes(letters) for letters in itertools.product(b"abc", repeat=3)]
    model = TableModel(7)
    state, found = search(model, texts, SearchLimits(epsilon=1e-3, most=10_000, patience=10_000))
    assert np.exp(found.lower) == pytest.approx([model.probability(text) for text in texts], rel=2e-3)
    assert state.evaluated < 12 + 12 * 12, "not one search for each"


def test_tokens_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="choice 1 has a token that is no text"):
        ChoiceSearch(TRIE, VOCABULARY.token_bytes, [(0,), (EOS,)], longest=9)


@pytest.mark.parametrize(
    ("said", "texts", "answer"),
    [(b"a", [b"b"], True), (b"a", [b"c", b"a"], False), (b"c", [b"abx"], True), (b"cc", [b"c"], False)],
)
def test_the_prompts_last_token_grows_when_a_token_goes_on_with_a_text(
    said: bytes, texts: list[bytes], answer: bool
) -> None:
    assert grows(TRIE, said, texts) is answer
