"""Equal calls are made once, and every variable is what it was."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.operations import Choose, Generate
from umbel.compiler.passes import rewrite
from umbel.interpreter.backends.echo import Echo
from umbel.srt.in_process import LocalBackend

from ..watching import Watched
from .program_pairs import bodies, program_of
from .running import answer, both


@pytest.fixture(scope="module")
def oracle() -> Watched:
    return Watched(LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15))


def calls_after(program: ul.Program) -> int:
    graph = rewrite(program.trace(), ["merge_equal"]).graph
    return sum(isinstance(node.op, Generate | Choose) for node in graph.nodes)


def test_a_choice_that_branches_have_in_common_is_made_once(oracle: Watched) -> None:
    @ul.function(max_tokens=4)
    def program(s: ul.State) -> None:
        s += "Sky: "
        forks = s.fork(3)
        for branch, name in zip(forks, "abc", strict=True):
            branch += "blue? " + ul.select(name, ["yes", "no"]) + " why " + ul.gen("why", temperature=0)
            branch += name + ul.gen("more", temperature=0)
        forks.join()

    plain, merged, report = both(program, oracle, ["merge_equal"])
    assert report.calls == 4
    assert len(plain.asked) == 9
    assert set(merged.asked) == set(plain.asked)
    assert merged.variables == plain.variables
    assert merged.variables["b"][1] is not None
    assert "select 'b'" in report.passes[0].notes[0]
    assert "is select 'a'" in report.passes[0].notes[0]


def test_samples_without_a_seed_and_what_a_run_may_change_stay() -> None:
    @ul.function(temperature=0, seed=3)
    def program(s: ul.State) -> None:
        s.fork(2).__iadd__(ul.gen("x"))
        s.fork(2).__iadd__(ul.gen("y", temperature=0.5))
        s.fork(2).__iadd__(ul.select("z", ["a", "b"], temperature=1))

    assert calls_after(program) == 6


def test_a_seed_makes_a_sample_deterministic_and_a_nested_run_its_defaults_certain() -> None:
    @ul.function(temperature=0)
    def nested(s: ul.State) -> None:
        s.fork(2).__iadd__(ul.gen("x"))

    @ul.function
    def program(s: ul.State) -> None:
        s.fork(2).__iadd__(ul.gen("y", seed=4))
        nested.run()

    assert calls_after(program) == 2


def test_branches_whose_text_is_appended_stay() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        forks = s.fork(2)
        forks += ul.select("x", ["a", "b"])
        forks.join("concate_and_append")

    assert calls_after(program) == 2


def test_calls_with_other_texts_before_them_or_other_options_stay() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s.fork(2).__iadd__(["a" + ul.select("x", ["a", "b"]), "b" + ul.select("x", ["a", "b"])])
        s.fork(2).__iadd__([ul.gen("y", temperature=0), ul.gen("y", temperature=0, max_tokens=3)])

    assert calls_after(program) == 4


def test_a_branch_that_is_no_more_leaves_its_facts(oracle: Watched) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        with s.fork(2) as forks:
            forks += "Is it? " + ul.select("x", ["yes", "no"])

    plain, merged, report = both(program, oracle, ["merge_equal"])
    assert report.calls == 1
    assert merged.shown == plain.shown


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_random_programs_have_the_same_variables(body: tuple[object, ...]) -> None:
    check(body, Watched(Echo(answer)))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_random_programs_have_the_same_variables_on_the_oracle(body: tuple[object, ...], oracle: Watched) -> None:
    check(body, oracle)


def check(body: tuple[object, ...], backend: Watched) -> None:
    plain, merged, report = both(program_of(body), backend, ["merge_equal"], topic="cats", seed=5)
    assert len(merged.asked) == len(plain.asked) - report.calls
    assert set(merged.asked) == set(plain.asked)
    for what in ("variables", "text", "result", "messages"):
        assert merged.shown[what] == plain.shown[what]
