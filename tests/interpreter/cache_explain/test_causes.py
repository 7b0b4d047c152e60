"""Causes, from what is known of prompts."""

import pytest
from umbel.interpreter.cache_explain.history import Asked, Intent, Layout, Neighbour, Neighbours, common_length
from umbel.interpreter.cache_explain.report import Ending, decide, estimate, of_sources
from umbel.lang.cache_report import CacheCause
from umbel.lang.prompt import EMPTY, Source, SourceKind
from umbel.lang.protocol import Usage

TEXT = "the same for all and this is not"
NOW = 10  # when the call in question began


class At:
    """A line."""

    def __init__(self, number: int) -> None:
        self.file, self.number, self.function = "program.py", number, "program"


def call(*, ended: int | None = 5) -> Asked:
    return Asked(Intent("gen", "x", EMPTY, None), None, "", 1, 0, ended=ended)


def neighbours(*texts: str, ended: int | None = 5, others: tuple[str, ...] = ()) -> Neighbours:
    same, apart = (
        tuple(Neighbour(call(ended=ended), Layout(text, ()), common_length(TEXT, text)) for text in kind)
        for kind in (texts, others)
    )
    return Neighbours(same, apart)


def cause(cached: int, ending: Ending, found: Neighbours) -> CacheCause:
    asked = call()
    asked.began = NOW
    return decide(asked, cached, ending, found).cause


def test_a_token_over_the_place_where_texts_part_is_no_seam() -> None:
    found = neighbours("the same for me")  # they part at character 13
    assert cause(3, Ending(12, 16, (3,)), found) is CacheCause.NEW


def test_the_same_characters_in_other_tokens_are_a_seam() -> None:
    assert cause(3, Ending(4, 8, (3,)), neighbours(TEXT)) is CacheCause.SEAM


def test_tokens_that_were_there_are_gone_or_on_their_way() -> None:
    ending = Ending(4, 8, (7,))
    assert cause(1, ending, neighbours(TEXT)) is CacheCause.EVICTED
    assert cause(1, ending, neighbours(TEXT, ended=NOW + 1)) is CacheCause.CONCURRENT
    assert cause(1, ending, neighbours(TEXT, ended=None)) is CacheCause.CONCURRENT


def test_another_salt_had_more_of_it() -> None:
    assert cause(0, Ending(0, 3), neighbours(others=(TEXT,))) is CacheCause.SALT
    assert cause(0, Ending(0, 3), neighbours(others=("the",))) is CacheCause.FIRST


def test_what_others_have_asked_for_is_not_remembered_here() -> None:
    decision = decide(call(), 5, Ending(16, 20, (1,)), neighbours("the other"))
    assert (decision.cause, decision.character, decision.parted) == (CacheCause.NEW, 16, None)


LONG = "w " * 4000


def estimated(cached: int, *texts: str, minimum: int = 0, written: int = 0, tokens: int = 4000) -> CacheCause:
    asked = call()
    asked.began = NOW
    found = tuple(Neighbour(call(), Layout(text, ()), common_length(LONG, text)) for text in texts)
    usage = Usage(tokens, cached, cache_write_tokens=written)
    return estimate(asked, usage, LONG, Neighbours(found, ()), minimum=minimum).cause


@pytest.mark.parametrize(
    ("cached", "earlier", "minimum", "written", "expected"),
    [
        (0, None, 0, 0, CacheCause.FIRST),
        (3968, LONG, 0, 0, CacheCause.HIT),  # all but what does not fill a step
        (2048, LONG, 1024, 0, CacheCause.HIT),  # up to the last place that is stored
        (0, LONG, 1024, 0, CacheCause.EVICTED),
        (7, LONG, 0, 0, CacheCause.EVICTED),
        (1920, LONG[:4000] + "x", 0, 0, CacheCause.NEW),
        (0, LONG[:4000] + "x", 0, 0, CacheCause.EVICTED),  # 2,000 tokens were the same
        (0, LONG[:4000] + "x", 0, 4000, CacheCause.NEW),  # stored as a whole, or not at all
        (0, "x", 5000, 0, CacheCause.SHORT),
    ],
)
def test_providers_are_judged_by_their_counts(
    cached: int, earlier: str | None, minimum: int, written: int, expected: CacheCause
) -> None:
    texts = () if earlier is None else (earlier,)
    assert estimated(cached, *texts, minimum=minimum, written=written) is expected


def test_what_differs_in_one_place_is_told_by_who_said_it() -> None:
    text = Source(SourceKind.TEXT, At(3))
    assert of_sources(text, Source(SourceKind.TEXT, At(3))) is CacheCause.VOLATILE
    assert of_sources(text, Source(SourceKind.TEXT, At(4))) is CacheCause.OTHER_LINE
    assert of_sources(text, Source(SourceKind.SCAFFOLD, At(3), "user")) is CacheCause.OTHER_LINE
    assert of_sources(text, None) is CacheCause.OTHER_LINE
    said = Source(SourceKind.GENERATED, At(3), "x")
    assert of_sources(said, Source(SourceKind.GENERATED, At(3), "x")) is CacheCause.GENERATED
    nowhere = Source(SourceKind.TEXT, None)
    assert of_sources(nowhere, Source(SourceKind.TEXT, None)) is CacheCause.VOLATILE
