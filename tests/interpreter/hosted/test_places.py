"""Places in prompts: found by what stands before them, and cut without a change of the text."""

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.hosted.places import Block, Places, cut


def turn(role: str, text: str) -> Block:
    return Block(role, text, opens=True, closes=True)


def test_a_place_is_only_found_where_the_text_before_it_is_the_same():
    places = Places()
    places.remember([turn("user", "abc")])
    assert list(places.within([turn("user", "abcd")])) == [len(turn("user", "abc").spelling)]
    assert places.within([turn("user", "abd")]) == {}
    assert places.within([turn("system", "abcd")]) == {}


def test_texts_are_not_cut_into_blank_ones():
    blocks, ends = cut([turn("user", "abc\n\nd")], [len(turn("user", "abc\n\n").spelling)])
    assert [block.content for block in blocks] == ["abc\n\n", "d"]
    assert list(ends) == [0]
    blocks, ends = cut([turn("user", "abc\n\n")], [len(turn("user", "abc").spelling)])
    assert [block.content for block in blocks] == ["abc\n\n"]
    assert ends == {}


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab \n", max_size=6)), max_size=6),
    st.lists(st.integers(0, 60), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_cutting_keeps_the_text(said: list[tuple[str, str]], lengths: list[int]):
    blocks = [turn(role, text) for role, text in said]
    pieces, ends = cut(blocks, sorted(set(lengths)))
    assert "".join(piece.spelling for piece in pieces) == "".join(block.spelling for block in blocks)
    assert sum(piece.closes for piece in pieces) == len(blocks)
    assert list(ends) == sorted(set(ends))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=8), st.text("ab", max_size=12))
@settings(max_examples=150, deadline=None)
def test_places_are_the_remembered_beginnings(remembered: list[str], text: str):
    places = Places()
    for each in remembered:
        places.remember([turn("user", each)])
    head = len(turn("user", "").spelling)
    expected = sorted({head + len(each) for each in remembered if text.startswith(each)})
    assert list(places.within([turn("user", text)])) == expected
