"""Proposals of another order, and the graph that has it."""

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.compiler.checks.verify import verify
from umbel.compiler.graph import Graph
from umbel.compiler.layout.pieces import calls_of, segments_of
from umbel.compiler.layout.reorder import apply, propose
from umbel.compiler.layout.tokens import ESTIMATE, Counter, prefix_tokens, shareable
from umbel.compiler.operations import Append, Argument, Constant

from .layouts import CHARACTERS, graph_of, prompt_of

PAPER = ("Here is a question ", "$question", ". Please act as a math expert and solve the given question.")
TURNED = "Please act as a math expert and solve the given question. Here is a question {question}."


def reordered(graph: Graph, **options: object) -> str:
    proposals = propose(graph, CHARACTERS, **options)  # type: ignore[arg-type]
    return prompt_of(apply(graph, proposals))


def test_the_papers_example() -> None:
    graph = graph_of(*PAPER)
    (proposal,) = propose(graph, CHARACTERS)
    assert proposal.after == TURNED
    assert proposal.old.first == len("Here is a question ")
    assert proposal.new.first == len(TURNED.partition("{")[0])
    assert prompt_of(apply(graph, [proposal])) == TURNED
    verify(apply(graph, [proposal]))


def test_a_good_layout_gets_no_proposal() -> None:
    assert (
        propose(graph_of("Be brief. Be kind.\n\nText:\n", "$text", "\n\nQuestion: ", "$q", "\nAnswer:"), CHARACTERS)
        == ()
    )


def test_a_reordered_graph_gets_no_proposal() -> None:
    graph = graph_of(*PAPER)
    assert propose(apply(graph, propose(graph, CHARACTERS)), CHARACTERS) == ()


def test_shared_arguments_go_between() -> None:
    graph = graph_of("Question: ", "$q", "\nText: ", "$text", "\nBe brief.\n")
    assert reordered(graph, shared=["text"]) == "Be brief.\nText: {text}\nQuestion: {q}\n"
    assert reordered(graph) == "Be brief.\nQuestion: {q}\nText: {text}\n"


def test_a_cue_stays_in_front_of_its_gen() -> None:
    assert reordered(graph_of("Text: ", "$t", "\nBe very brief.\nSummary:")) == "Be very brief.\nText: {t}\nSummary:"


def test_a_model_never_goes_on_with_an_argument_that_it_did_not_go_on_with_before() -> None:
    """Without a line's end behind it, `Question: {q}` would be continued."""
    bare = ("Question: ", "$q", "\nAnswer in one word, please")
    assert propose(graph_of(*bare), CHARACTERS) == ()
    assert reordered(graph_of(*bare, ".\n")) == "Answer in one word, please.\nQuestion: {q}\n"
    assert reordered(graph_of(*bare, ".", role="user")) == "Answer in one word, please.\nQuestion: {q}"


def test_text_that_goes_on_behind_an_answer_stays_there() -> None:
    @ul.function
    def program(s, topic):  # type: ignore[no-untyped-def]
        s += ul.gen("one")
        s += f" and {topic}.\nBe brief from now, be kind, be gentle."

    assert propose(program.trace(), CHARACTERS) == ()


def test_segments_end_where_streams_part() -> None:
    @ul.function
    def program(s, topic):  # type: ignore[no-untyped-def]
        s += "Topic: " + topic + "\n"
        forks = s.fork(2)
        forks += "Be brief and kind and gentle.\n"
        forks += ul.gen("tip")

    graph = program.trace()
    assert [len(segment.appends) for segment in segments_of(graph)] == [3, 1, 1]
    assert propose(graph, CHARACTERS) == ()


def test_text_that_is_read_in_the_middle_is_not_moved() -> None:
    @ul.function
    def program(s, topic):  # type: ignore[no-untyped-def]
        s += f"Topic: {topic}\n"
        s["seen"] = s.text()
        s += "Be brief and kind and gentle.\n" + ul.gen("tip")

    assert propose(program.trace(), CHARACTERS) == ()


def test_what_two_runs_share_ends_at_the_first_difference() -> None:
    @ul.function
    def program(s, topic):  # type: ignore[no-untyped-def]
        s += ul.system("Be kind.")
        s += ul.user("Topic: " + topic)
        s += ul.assistant(ul.gen("one"))
        s += ul.user("More.") + ul.assistant(ul.gen("two"))

    measured = shareable(calls_of(program.trace()), CHARACTERS)
    assert measured.first == len("Be kind.Topic: ")
    assert measured.total == 2 * measured.first


def test_a_token_that_may_reach_into_the_argument_is_not_shared() -> None:
    pairs = Counter("pairs", lambda text: [hash(text[place : place + 2]) for place in range(0, len(text), 2)])
    graph = graph_of("abc", "$x")
    assert prefix_tokens(calls_of(graph)[0].pieces, pairs) == 1
    assert prefix_tokens(calls_of(graph_of("abc"))[0].pieces, pairs) == 2


def test_without_a_tokenizer_four_bytes_are_a_token() -> None:
    assert ESTIMATE.tokens("abcde") == 2
    assert ESTIMATE.shared_tokens("abcde") == 1


@pytest.mark.parametrize("role", [None, "user"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "$x",
                "$y",
                "Be brief. ",
                "Use Latin words only.\n",
                "Text: ",
                "\n",
                "<a>",
                "</a>",
                "Cue:",
                "\n\n",
                "It is. ",
            ]
        ),
        min_size=1,
        max_size=9,
    )
)
def test_an_order_keeps_every_value_and_shares_more(role: str | None, parts: list[str]) -> None:
    graph = graph_of(*parts, role=role)
    proposals = propose(graph, CHARACTERS)
    new = apply(graph, proposals)
    verify(new)
    assert arguments(new) == arguments(graph)
    assert sorted("".join(prompt_of(new).split())) == sorted("".join(prompt_of(graph).split()))
    for proposal in proposals:
        assert proposal.gain.first >= 8
        assert shareable(calls_of(new), CHARACTERS) == proposal.new
        assert propose(new, CHARACTERS) == ()


def arguments(graph: Graph) -> list[str]:
    """Names that are appended, sorted; constants are looked at as text."""
    values = [node.inputs[1].op for node in graph.nodes if isinstance(node.op, Append)]
    assert all(isinstance(value, Argument | Constant) for value in values)
    return sorted(value.name for value in values if isinstance(value, Argument))
