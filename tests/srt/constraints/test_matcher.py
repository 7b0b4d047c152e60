"""What a matcher looks at ahead of its text leaves the text as it was."""

from collections.abc import Callable

from umbel.fsm.engines.llguidance import LlguidanceConstraint
from umbel.fsm.engines.llguidance_tokens import LlguidanceTokens, MatcherLimits
from umbel.fsm.engines.selection import own_grammar
from umbel.fsm.engines.source import Source
from umbel.fsm.errors import Limits
from umbel.fsm.tokens.constraint import Constraint, JumpCounters
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.trie import build_trie
from umbel.fsm.tokens.vocabulary import Vocabulary
from umbel.srt.constraints.matcher import Matcher

FUEL = 1_000_000
END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"</s>"], [END])
AMBIGUOUS = Source("lark", 'start: s "!"\ns: s s | "a" | "b" | s "c" s')


def spend(prepare: Callable[[int], int | None]) -> bool:
    return prepare(FUEL) is not None


def write(matcher: Matcher, text: bytes) -> None:
    for token in text:
        assert matcher.prepare(FUEL) is not None
        assert matcher.settle(token, 1000) == token
        assert matcher.error is None


def test_a_look_past_the_limits_of_llguidance_leaves_the_text_as_it_was() -> None:
    tokens = LlguidanceTokens(VOCABULARY, build_trie(VOCABULARY), None, MatcherLimits(row_items=60))
    constraint = LlguidanceConstraint(AMBIGUOUS, tokens, encode=None, counters=JumpCounters())
    matcher = Matcher(constraint.begin(), frozenset([END]))
    write(matcher, b"ab")
    assert matcher.prepare(FUEL) is not None
    looked = sum(1 for _ in matcher.ahead(b"ab" * 50, spend))
    assert 0 < looked < 100, "the limits ended it"
    write(matcher, b"a!")
    assert matcher.finished


def test_a_look_ends_where_texts_need_the_states_that_are_left() -> None:
    limits = Limits(states=64)
    constraint = Constraint(own_grammar(Source("regex", "(a|b)*a(a|b){9}c"), limits), Masks(VOCABULARY), limits=limits)
    matcher = Matcher(constraint.begin(), frozenset([END]))
    write(matcher, b"ab")
    assert matcher.prepare(FUEL) is not None
    looked = sum(1 for _ in matcher.ahead(b"abaabbabaaab" * 20, spend))
    assert 0 < looked < 64
    write(matcher, b"bbabbb")


def test_a_look_counts_no_jumps() -> None:
    counters = JumpCounters()
    grammar = own_grammar(Source("regex", "(one|other) text"), Limits())
    constraint = Constraint(grammar, Masks(VOCABULARY), encode=lambda text: list(text.encode()), counters=counters)
    matcher = Matcher(constraint.begin(), frozenset([END]))
    while matcher.pending:
        matcher.settle(matcher.pending[0], 1000)
    assert matcher.prepare(FUEL) is not None
    before = counters.forced
    assert sum(1 for _ in matcher.ahead(b"ne text", spend)) > 3
    assert counters.forced == before
