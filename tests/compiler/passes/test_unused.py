"""Dead calls are not made, and what is asked for is what it was."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.operations import Fork, Generate
from umbel.compiler.passes import rewrite
from umbel.interpreter.backends.echo import Echo

from ..random_programs import bodies, program_of
from ..watching import Watched
from .running import answer, both, ran

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")


@ul.function(max_tokens=4)
def review(s: ul.State, text: str) -> None:
    s += "Review " + text + ". Plan: " + ul.gen("plan")
    with s.fork(3) as views:
        views += [ul.gen("style"), "Facts: " + ul.gen("facts") + ul.gen("more"), ul.gen("tone")]
    s += "Facts: " + views[1]["facts"] + ". So: " + ul.gen("verdict")
    s += "Bye: " + ul.gen("farewell")


def test_only_what_is_asked_for_is_generated() -> None:
    backend = Watched(Echo(answer))
    plain, kept, report = both(review, backend, ["drop_unused"], keep=["verdict"], text="it")
    assert kept.variables == {"verdict": plain.variables["verdict"]}
    assert len(kept.asked) == 3  # plan, facts, verdict
    assert set(kept.asked) <= set(plain.asked)
    assert report.calls == 4
    dropped = report.passes[0].notes
    assert ["'style'" in dropped[0], "'more'" in dropped[1], "'tone'" in dropped[2]] == [True] * 3
    assert all("test_unused.py:" in note for note in dropped)


def test_all_variables_and_the_text_are_asked_for_by_default() -> None:
    graph = review.trace()
    assert rewrite(graph, ["drop_unused"]).graph is graph


def test_a_branch_that_nobody_reads_goes() -> None:
    @ul.function(max_tokens=4)
    def program(s: ul.State) -> None:
        s += "a" + ul.gen("x")
        s.copy().__iadd__("b" + ul.gen("y"))
        review.run("it")

    graph = rewrite(program.trace(), ["drop_unused"]).graph
    assert [node.op.gen.name for node in graph.nodes if isinstance(node.op, Generate)] == ["x"]
    assert not any(isinstance(node.op, Fork) for node in graph.nodes)
    assert len(graph.streams) == 1


def test_a_list_keeps_its_branches_and_their_facts() -> None:
    @ul.function(max_tokens=4)
    def program(s: ul.State) -> None:
        with s.fork(2) as forks:
            forks += ["a" + ul.gen("x") + ul.gen("rest"), "b" + ul.gen("other")]

    plain, kept, report = both(program, Watched(Echo(answer)), ["drop_unused"], keep=["x"])
    assert kept.variables == {"x": plain.variables["x"]}
    assert kept.shown["facts"]["x"] == plain.shown["facts"]["x"]
    assert report.calls == 2


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(ul.ParameterError, match=r"review sets no variable 'verdit'; did you mean 'verdict'\?"):
        review.compile(passes=["drop_unused"], keep=["verdit"])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(4))
def test_random_programs_keep_what_is_kept(body: tuple[object, ...]) -> None:
    program, backend = program_of(body, []), Watched(Echo(answer))
    plain = ran(program, backend, question="why?")
    for keep in (None, ["last"], []):
        compiled = program.compile(passes=["default", "drop_unused"], keep=keep)
        kept = ran(compiled, backend, question="why?")
        wanted = plain.variables if keep is None else {name: plain.variables[name] for name in keep}
        assert kept.variables == wanted
        assert kept.shown["result"] == plain.shown["result"]
        assert keep is not None or kept.shown["text"] == plain.shown["text"]
        assert len(kept.asked) == len(plain.asked) - compiled.report.calls
        assert set(kept.asked) <= set(plain.asked)
