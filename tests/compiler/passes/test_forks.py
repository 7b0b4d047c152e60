"""Branches begin early, joins hold nothing up, and declared calls are made side by side."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.graph import Graph
from umbel.compiler.operations import Fork, Join
from umbel.compiler.passes import rewrite
from umbel.interpreter.backends.echo import Echo, Gate

from ..random_programs import bodies, program_of
from ..watching import Watched
from .running import answer, both, ran

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")


def sizes(graph: Graph) -> list[int]:
    return [node.op.size for node in graph.nodes if isinstance(node.op, Fork)]


@ul.function(max_tokens=4)
def sections(s: ul.State) -> None:
    s += "Plan. "
    with s.fork(2) as first:
        first += ["a" + ul.gen("x"), "b" + ul.gen("x")]
    with s.fork(2) as second:
        second += ["c" + ul.gen("y"), "d" + ul.gen("y")]
    s += "Own: " + ul.gen("own")
    s += "Then: " + first[1]["x"] + ul.gen("then")


def test_what_reads_no_branch_does_not_wait_for_any() -> None:
    """Four branches and the stream itself are asked for at once; before, two branches were."""
    for passes, at_once in ((["default"], 2), (["default", "fork_independent"], 5)):
        gate = Gate()
        state = sections.compile(passes=passes).run(backend=Echo(answer, gate=gate), stream=True)
        gate.wait_for(at_once)
        assert gate.waiting == at_once
        gate.open()
        state.sync()


def test_forks_of_one_place_are_one_and_all_is_as_it_was() -> None:
    plain, forked, report = both(sections, Watched(Echo(answer)), ["fork_independent"])
    assert forked == plain
    assert report.passes[0].counts == {"join sunk": 2, "fork merged": 1}
    assert sizes(rewrite(sections.trace(), ["fork_independent"]).graph) == [4]


def test_copies_side_by_side_are_siblings() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "a"
        for letter in "bcd":
            s.copy().__iadd__(letter + ul.gen("x"))

    assert sizes(rewrite(program.trace(), ["fork_independent"]).graph) == [3]


def test_forks_with_text_between_them_stay() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s.fork(2)
        s += "a"
        s.fork(2)

    graph = program.trace()
    assert rewrite(graph, ["fork_independent"]).graph is graph


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(4))
def test_random_programs_are_what_they_were(body: tuple[object, ...]) -> None:
    plain, forked, _ = both(program_of(body, []), Watched(Echo(answer)), ["fork_independent"], question="why?")
    assert forked.asked == plain.asked
    for what in ("variables", "facts", "text", "result", "messages"):
        assert forked.shown[what] == plain.shown[what]


# --------------------------------------------------------------------------------------- declared


@ul.function(max_tokens=16)
def describe(s: ul.State, document: str) -> None:
    s += "Document: " + document + "\nSummary: " + ul.gen("summary")
    s += "\nKeywords: " + ul.gen("keywords")
    s += "\nTone: " + ul.select("tone", ["dry", "warm"]) + ".\nTitle: " + ul.gen("title")


def test_declared_calls_do_not_see_each_other() -> None:
    backend = Watched(Echo(answer))
    compiled = describe.compile(passes=["default", "fork_independent"], independent=["summary", "keywords", "tone"])
    echo = Echo(lambda prompt: f"<{prompt.rpartition(chr(10))[2]}>", scores={"warm": -0.1, "dry": -3.0})
    state = compiled.run("it", backend=echo)
    assert state["summary"] == "<Summary: >"
    prompts = [request.prompt for request in echo.requests if hasattr(request, "sampling")]
    texts = ["".join(part.text for part in prompt) for prompt in prompts]
    assert "Document: it\nSummary: \nKeywords: " in texts
    assert state.text() == ("Document: it\nSummary: <Summary: >\nKeywords: <Keywords: >\nTone: warm.\nTitle: <Title: >")
    shown = ran(compiled, backend, document="it").shown
    assert list(shown["variables"]) == ["summary", "keywords", "tone", "title"]
    assert [node.op.mode for node in compiled.graph.nodes if isinstance(node.op, Join)] == ["concate_and_append"]


def test_calls_that_are_not_declared_are_never_touched() -> None:
    graph = describe.trace()
    assert rewrite(graph, ["fork_independent"]).graph is graph
    assert rewrite(graph, ["fork_independent"], independent=["title"]).graph is graph
    rewritten = rewrite(graph, ["fork_independent"], independent=["keywords", "tone"])
    assert sizes(rewritten.graph) == [2]
    assert "'summary'" not in rewritten.report.passes[0].notes[0]


def test_declared_calls_that_stay_together_are_refused() -> None:
    with pytest.raises(ul.ParameterError, match=r"select 'tone' .* sees the text of gen 'summary' \(.*test_forks.py:"):
        describe.compile(passes=["fork_independent"], independent=["summary", "tone"])

    @ul.function
    def turns(s: ul.State) -> None:
        s += ul.assistant(ul.gen("a"))
        s += ul.assistant(ul.gen("b"))

    with pytest.raises(ul.ParameterError, match="in one turn, or fork"):
        turns.compile(passes=["fork_independent"], independent=["a", "b"])

    @ul.function
    def reads(s: ul.State) -> None:
        s += ul.gen("a")
        s += s["a"] + ul.gen("b")

    with pytest.raises(ul.ParameterError, match=r"gen 'b' .* sees the text of gen 'a'"):
        reads.compile(passes=["fork_independent"], independent=["a", "b"])


def test_a_call_that_is_not_there_cannot_be_declared() -> None:
    with pytest.raises(ul.ParameterError, match=r"describe generates no 'sumary'; did you mean 'summary'\?"):
        describe.compile(passes=["fork_independent"], independent=["sumary"])
