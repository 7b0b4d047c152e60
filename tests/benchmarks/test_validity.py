"""Whether values satisfy their constraints is seen without the code that enforced them."""

import json

import pytest
from umbel.srt.simulator.workload import Fork, Gen, Program, Text

from benchmarks.replay.validity import Validity, of_programs, of_regex, of_schema

SATISFIED, CUT, BROKEN = Validity(1), Validity(cut=1), Validity(broken=1)


@pytest.mark.parametrize(("text", "found"), [("ab12", SATISFIED), ("ab", CUT), ("", CUT), ("ab1x", BROKEN)])
def test_a_regex_is_satisfied_cut_or_broken(text: str, found: Validity) -> None:
    assert of_regex("[a-z]{2}[0-9]{2}", text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"born": "2000-02-29"}', SATISFIED),
        ('{"born": "2000-02-3', CUT),
        ('{"born": "2001-02-29"}', BROKEN),
        ("{}", BROKEN),
    ],
)
def test_a_schema_is_satisfied_cut_or_broken(text: str, found: Validity) -> None:
    schema = {"properties": {"born": {"type": "string", "format": "date"}}, "required": ["born"]}
    assert of_schema(schema, text) == found


def test_values_are_found_in_branches_and_failed_programs_left_out() -> None:
    program = Program(
        "p",
        (
            Text("x"),
            Gen("free", 4),
            Gen("a", 4, regex="a+"),
            Fork(((Gen("b", 4, json_schema={"const": 1}),), (Gen("b", 4, regex="c"),))),
        ),
    )
    values = {"free": "anything", "a": "aa", "0.b": json.dumps(2), "1.b": ""}
    assert of_programs([program, program], [values, ValueError()]) == Validity(1, 1, 1)
    assert of_programs([Program("q", (Gen("free", 4),))], [{"free": "x"}]) is None
