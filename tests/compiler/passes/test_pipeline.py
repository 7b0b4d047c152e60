"""Which passes run, what they report, and that they leave nothing to do."""

from typing import Any

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.passes import Report, rewrite
from umbel.compiler.passes.pipeline import DEFAULT, NAMES, checked_choice

from ..random_programs import bodies, program_of
from .program_pairs import bodies as twin_bodies
from .program_pairs import program_of as twin_program_of


@ul.function
def greet(s: ul.State, name: str) -> None:
    s += "Hello "
    s += name + ul.gen("x")
    s.copy().__iadd__(ul.gen("unused"))


def test_names_are_put_in_order() -> None:
    assert checked_choice("default").names == DEFAULT
    assert checked_choice("none").names == ()
    assert checked_choice("drop_unused").names == ("drop_unused",)
    assert checked_choice(reversed(NAMES)).names == NAMES
    assert checked_choice(["drop_unused", "default"]).names == ("fold", "drop_unused", "merge_text")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"passes": "fold_"}, r"no pass 'fold_'; did you mean 'fold'\?"),
        ({"passes": ["default", "merge_equals"]}, r"no pass 'merge_equals'; did you mean 'merge_equal'\?"),
        ({"passes": ["none", "fold"]}, '"none" stands alone'),
        ({"passes": 3}, r"passes must be a list of names, got int 3"),
        ({"passes": [3]}, r"passes has 3 in it"),
        ({"keep": ["x"]}, r"keep=\['x'\] is for the pass drop_unused; write passes=\[\"default\", \"drop_unused\"\]"),
        ({"passes": "drop_unused", "keep": "x"}, r"keep must be a list of names, got str 'x'"),
        ({"independent": ["x"]}, "is for the pass fork_independent"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ul.ParameterError, match=message):
        greet.compile(**given)


def test_the_report_says_what_was_done() -> None:
    report = rewrite(greet.trace(), ["default", "drop_unused"]).report
    assert report.rewrites == {"fold": 0, "drop_unused": 3, "merge_text": 0}
    assert report.calls == 1
    lines = str(report).splitlines()
    assert lines[0] == "fold         nothing to do"
    assert lines[1] == "drop_unused  2 dropped, 1 fork; 1 call fewer"
    assert lines[2].strip().startswith("left out: gen 'unused' (")
    assert str(Report(())) == "no passes"


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(4), twins=twin_bodies())
def test_a_second_time_changes_nothing(body: tuple[object, ...], twins: tuple[object, ...]) -> None:
    for program in (program_of(body, []), twin_program_of(twins)):
        for passes in ("default", NAMES, *NAMES):
            once = rewrite(program.trace(), passes).graph
            again = rewrite(once, passes)
            assert again.graph is once
            assert not any(again.report.rewrites.values())
