"""Samples of one prompt are one request for several texts."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.operations import Generate
from umbel.compiler.passes import rewrite
from umbel.interpreter.backends.echo import Echo
from umbel.lang.sampling import MAX_N

from ..watching import Watched
from .program_pairs import bodies, program_of
from .running import answer, both


def requests_after(program: ul.Program) -> list[int]:
    """How many texts each call of the program asks for."""
    graph = rewrite(program.trace(), ["merge_samples"]).graph
    return [node.op.gen.options.get("n", 1) for node in graph.nodes if isinstance(node.op, Generate)]


def test_a_vote_is_one_request() -> None:
    @ul.function(temperature=0.7)
    def program(s: ul.State) -> list[str]:
        s += "Q: why? "
        with s.fork(3) as votes:
            votes += "A: " + ul.gen("answer", max_tokens=4) + "."
        return s["answer"]

    echo = Echo([["red", "green", "blue"]])
    state = program.compile(passes=["merge_samples"]).run(backend=echo)
    assert state["answer"] == state.ret_value == ["red", "green", "blue"]
    assert [facts["completion_tokens"] for facts in state.get_meta_info("answer")] == [1, 1, 1]
    assert echo.calls == 1


def test_the_branches_read_their_own_text() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        drafts = s.fork(2)
        drafts += ul.gen("draft")
        for draft in drafts:
            s += "[" + draft["draft"] + "]"
        numbers = s.fork(2)
        numbers += ul.gen("number", dtype=int)
        s["sum"] = [numbers[0].value("number"), numbers[1].value("number")]

    echo = Echo([["one", "two"], ["1", "2"]])
    state = program.compile(passes=["merge_samples"]).run(backend=echo)
    assert state.text() == "[one][two]"
    assert state["sum"] == [1, 2]


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"temperature": 0}, {"n": 2}], ids=["seeded", "greedy", "already several"]
)
def test_what_is_no_single_sample_stays(options: dict[str, int]) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s.fork(2).__iadd__(ul.gen("x", **options))

    assert len(requests_after(program)) == 2


def test_samples_that_something_depends_on_stay() -> None:
    @ul.function
    def program(s: ul.State) -> str:
        s.fork(2).__iadd__(ul.gen("a") + ul.select("b", ["x", "y"]))
        told = s.fork(2)
        told += ul.gen("c")
        told.join("concate_and_append")
        read = s.fork(2)
        read += ul.gen("d")
        scoped = s.fork(2)
        for branch in scoped:
            with branch.var_scope("e"):
                branch += ul.gen("f")
        return read[0].text() + read[1].text()

    assert requests_after(program) == [1] * 8


def test_a_request_asks_for_no_more_than_it_may() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s.fork(MAX_N + 2).__iadd__(ul.gen("x"))

    assert requests_after(program) == [MAX_N, 2]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_where_all_samples_are_equal_so_are_the_variables(body: tuple[object, ...]) -> None:
    """Echo gives one text for one prompt, so the distribution is one value."""
    plain, merged, report = both(program_of(body), Watched(Echo(answer)), ["merge_samples"], topic="cats")
    assert len(merged.asked) == len(plain.asked) - report.calls
    for what in ("variables", "text", "result", "messages"):
        assert merged.shown[what] == plain.shown[what]
