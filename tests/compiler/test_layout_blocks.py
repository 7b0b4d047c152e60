"""Which pieces of a text may change places."""

from collections import Counter as Multiset

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.compiler.layout.blocks import cut, joined
from umbel.compiler.layout.marked import Marked
from umbel.compiler.layout.units import free_tokens

from .layouts import CHARACTERS, pieces


def blocks(*parts: str) -> list[str]:
    marked = Marked.of(pieces(*parts))
    return [marked.shown(block.text) for block in cut(marked).blocks]


def test_sentences_and_lines_are_blocks() -> None:
    assert blocks("Topic: ", "$topic", "\nBe brief. Use short words.\n") == [
        "Topic: {topic}",
        "Be brief.",
        "Use short words.",
    ]


def test_a_sentence_may_begin_behind_an_argument() -> None:
    """The paper's example."""
    assert blocks("Here is a question ", "$q", ". Please act as an expert.") == [
        "Here is a question {q}.",
        "Please act as an expert.",
    ]


def test_what_follows_an_argument_in_its_line_stays_there() -> None:
    assert blocks("$name", " likes tea\nBe polite.") == ["{name} likes tea", "Be polite."]


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        (("Article:\n", "$a", "\nSay hello."), "Article:\n{a}"),  # a label and what it labels
        (("<doc>\n", "$d", "\nOne more line.\n</doc>\nAnswer."), "<doc>\n{d}\nOne more line.\n</doc>"),  # tags
        (("```\n", "$c", "\nReturn it.\n```\nReview."), "```\n{c}\nReturn it.\n```"),  # fences
        (("Rules:\n1. Be kind.\n2. Be brief. Really.\n", "$x"), "Rules:\n1. Be kind.\n2. Be brief. Really."),
        (("- one\n- ", "$two", "\n- three\nEnd."), "- one\n- {two}\n- three"),
        (('He said "', "$words", '. And left." Reply.'), 'He said "{words}. And left."'),
        (("(see ", "$page", ". Then stop.) Reply."), "(see {page}. Then stop.)"),
        (("Text: ", "$t", "\nShorten the text above.\nBe kind."), "Text: {t}\nShorten the text above."),
        (("Read the following.\n", "$t", "\nBe kind."), "Read the following.\n{t}"),
        (("Be kind. Then reply to ", "$t", ".\nUse Latin."), "Be kind. Then reply to {t}."),
        (("$x", " is so.\nSay why it is. Be brief."), "{x} is so.\nSay why it is."),
        (("原文：\n", "$x", "\n请概括上述内容。用中文。"), "原文：\n{x}\n请概括上述内容。"),
        (("Q: 1+1\nA: 2\nQ: ", "$q", "\nA: "), "Q: 1+1\nA: 2\nQ: {q}\nA:"),  # shots and what is asked
        (("# Task\nReply to ", "$q", ".\nBe kind.\n# Style\nShort."), "# Task\nReply to {q}.\nBe kind."),
        (("One.\n---\n", "$q", "\nTwo."), "One.\n---\n{q}"),
        (("$q", "\nWrite e.g. in Latin. Be kind."), "Write e.g. in Latin."),  # no end of a sentence
        (("Be kind. ", "$q", "\nBe brief."), "Be kind. {q}"),  # who knows how a value begins
    ],
)
def test_what_speaks_of_its_neighbour_stays_with_it(parts: tuple[str, ...], together: str) -> None:
    assert together in blocks(*parts)


@pytest.mark.parametrize(
    "text", ["Write the last line in Latin.", "From here on, obey.", "End of the mail.", "Name them respectively."]
)
def test_what_speaks_of_the_order_of_all_fixes_all(text: str) -> None:
    assert cut(Marked.of(pieces("$mail", f"\n{text}\nReply."))).fixed


def test_a_cue_is_the_last() -> None:
    assert cut(Marked.of(pieces("$q", "\nBe brief.\nAnswer: "))).last_stays
    assert not cut(Marked.of(pieces("Be brief.\nQuestion: ", "$q"))).last_stays


def test_marks_are_characters_that_no_constant_has() -> None:
    marked = Marked.of(pieces("\U000f0000 one ", "$x"))
    assert marked.shown(marked.text) == "\U000f0000 one {x}"
    assert len(marked.holes) == 1


def test_new_neighbours_get_the_wider_gap() -> None:
    marked = Marked.of(pieces("Topic: ", "$t", "\n\nBe brief. Be kind.\n"))
    assert marked.shown(joined(cut(marked), [1, 2, 0])) == "Be brief. Be kind.\n\nTopic: {t}\n"


def test_labels_do_not_count_as_text_behind_a_value() -> None:
    marked = Marked.of(pieces("Name: ", "$a", "\nAge:\n", "$b", "\n---\n</doc>\nReply in one word.\nReply:"))
    assert free_tokens(marked, CHARACTERS) == len("Reply in one word.")


words = st.text(alphabet='ab AB.:\n-<>/"`()1', max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(words, st.sampled_from(["$x", "$y"])), max_size=6), st.randoms(use_true_random=False))
def test_blocks_are_the_text_and_any_order_keeps_every_character(parts: list[str], random: object) -> None:
    marked = Marked.of(pieces(*parts))
    found = cut(marked)
    order = list(range(len(found.blocks)))
    if order:
        assert joined(found, order) == marked.text
        random.shuffle(order)  # type: ignore[attr-defined]
        kept = Multiset(character for character in joined(found, order) if not character.isspace())
        assert kept == Multiset(character for character in marked.text if not character.isspace())
