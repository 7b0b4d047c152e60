"""docs/graph-format.md names everything that a file can hold, and random programs survive in files."""

import json
import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from umbel.compiler.checks.nodes import OPERATIONS
from umbel.compiler.checks.verify import verify
from umbel.compiler.files import results as file_results
from umbel.compiler.files import serialise
from umbel.compiler.files import values as file_values
from umbel.lang import ops

from ..kept_graphs import alike, copied
from ..random_programs import bodies, program_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "graph-format.md").read_text()


def test_the_example_is_a_graph():
    block = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    graph = serialise.decode(block[1].encode(), source="the page")
    # The page wraps the first line, which has no width.
    assert json.loads(serialise.encode(graph)) == json.loads(block[1])


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_there_with_its_attributes(name):
    row = next(line for line in PAGE.splitlines() if line.startswith("| ") and f"`{name}`" in line.split("|")[1])
    assert (
        re.findall(r"`(\w+)`", row.split("|")[3].partition(":")[0])[:1]
        == [field.name for field in fields(OPERATIONS[name])][:1]
    )
    for field in fields(OPERATIONS[name]):
        assert f"`{field.name}`" in row


@pytest.mark.parametrize(
    "name",
    [
        *(field.name for kind in (ops.Gen, ops.Select) for field in fields(kind) if field.name != "choices"),
        *serialise._WHOLE,
    ],
)
def test_every_member_is_there(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [*file_values._READERS, *file_results._Reading._KINDS])
def test_every_kind_of_value_is_there(name):
    assert f'{{"{name}": ' in PAGE


@pytest.mark.parametrize("name", [*file_results._PARSERS, *file_results._SCALARS])
def test_every_reader_is_there(name):
    assert f'`"{name}"`' in PAGE


@settings(max_examples=25, deadline=None)
@given(bodies(3))
def test_random_programs_are_whole_and_survive_their_files(body):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = program_of(body, []).trace()
    verify(graph)
    assert alike(copied(graph), graph)
    assert serialise.digest(copied(graph)) == serialise.digest(graph)
    assert graph.text()
    assert graph.svg()
