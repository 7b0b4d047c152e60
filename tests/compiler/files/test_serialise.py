"""Files of graphs: what is written is read again, and what is wrong in a file is said with its place."""

import enum
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.compiler.files import serialise
from umbel.compiler.graph import Builder, Line, kept, rebuilt
from umbel.compiler.operations import Append, Begin, Constant, Look
from umbel.lang.errors import GraphError
from umbel.lang.generation import gen

from ..broken_graphs import Parts
from ..kept_graphs import Named, alike, constant_graph, copied, gen_graph
from ..random_graphs import graphs

# ------------------------------------------------------------------------------------ there and back


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_a_graph_survives_its_file(graph):
    data = serialise.encode(graph)
    again = serialise.decode(data, source="copy")
    assert alike(graph, again)
    assert serialise.encode(again) == data
    assert serialise.digest(again) == serialise.digest(graph)


@settings(max_examples=30, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_nodes_or_on_lines(graph, random):
    numbers = {node: random.random() for node in graph.nodes}
    for node in graph.nodes:  # any order that has inputs first
        numbers[node] = max([numbers[node], *(numbers[taken] + 1 for taken in node.inputs)])
    shuffled = replace(graph, nodes=tuple(sorted(graph.nodes, key=numbers.__getitem__)))
    moved = rebuilt(shuffled, lambda builder, node, inputs: builder.node(node.op, inputs, Line("elsewhere.py", 1)))
    assert serialise.digest(moved) == serialise.digest(graph)


def test_the_digest_sees_what_a_graph_says():
    seen = {serialise.digest(constant_graph(value)) for value in ("a", "b", 1, True, 1.0, (1,), [1], {1}, {"a": 1})}
    assert len(seen) == 9


def test_names_that_were_fixed_are_kept_and_change_no_digest():
    graph = constant_graph("a")
    fixed = replace(graph, fixed=("n", "tone"))
    assert copied(fixed).fixed == ("n", "tone")
    assert copied(graph).fixed == ()
    assert json.loads(serialise.encode(graph))["version"] == 1
    assert json.loads(serialise.encode(fixed))["version"] == 3
    assert serialise.digest(fixed) == serialise.digest(graph)


def test_the_digest_of_version_1_stays_what_it_is():
    assert serialise.digest(Parts().graph()) == "f7169c98cbbf76db1046efb246a104605ca9e000cefb3cd882895d0b71cede92"


def test_a_graph_can_be_rebuilt_after_it_was_read():
    graph = copied(Parts().graph())
    assert alike(graph, rebuilt(graph, kept))


def test_numbers_that_json_does_not_have_survive():
    found = copied(constant_graph([math.nan, math.inf, -math.inf, -0.0, 10**300])).variables[0][1].op.value
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.0, 10**300]
    assert math.copysign(1, found[3]) == -1


@pytest.mark.parametrize("text", ["\ud83d\ude00", "\ud800", "\0", "\0000", "😀\u2028\x7f", '"\\u0000'])
def test_every_text_survives(text):
    graph = copied(constant_graph([text, {text: text}]))
    assert graph.variables[0][1].op.value == [text, {text: text}]


def test_a_picture_survives():
    builder = Builder()
    begin = builder.node(Begin("see"))
    seen = builder.node(Look(), [begin, builder.node(Constant(bytes(range(256))))])
    both = builder.node(Look(8), [seen, builder.node(Constant(Path("clip.mp4")))])
    graph = copied(builder.graph("see", [], [both], [], builder.node(Constant(None))))
    assert [node.op.value for node in graph.nodes if isinstance(node.op, Constant)] == [
        bytes(range(256)),
        Path("clip.mp4"),
        None,
    ]


@pytest.mark.parametrize(
    ("arguments", "text", "wanted"),
    [
        ({"dtype": int}, "12", 12),
        ({"dtype": float}, "1.5", 1.5),
        ({"dtype": bool}, "False", False),
        ({"dtype": Literal["a", 2, None]}, "2", 2),
        ({"dtype": str}, '"ab"', "ab"),
        ({"regex": "[a-z]+"}, "ab", "ab"),
        ({"json_schema": {"type": "array"}}, "[1]", [1]),
        ({"dtype": list[Annotated[int, "even"]]}, "[1.0, 2]", [1, 2]),
        ({"dtype": tuple[int, str]}, '[1, "a"]', (1, "a")),
        ({"dtype": tuple[int, ...]}, "[1]", (1,)),
        ({"dtype": set[str]}, '["a"]', {"a"}),
        ({"dtype": frozenset[bool]}, "[true]", frozenset({True})),
        ({"dtype": dict[str, UUID]}, '{"a": "' + "0" * 32 + '"}', {"a": UUID(int=0)}),
        ({"dtype": dict[Literal["k"], float | None]}, '{"k": null}', {"k": None}),
        ({"dtype": list[Any]}, '[{"a": 1}]', [{"a": 1}]),
        (
            {"dtype": Named},
            '{"name": "a", "more": [{"name": "b", "more": []}]}',
            {"name": "a", "more": [{"name": "b", "more": []}]},
        ),
    ],
    ids=str,
)
def test_what_a_gen_makes_of_its_text_survives(arguments, text, wanted):
    said = gen("x", **arguments)
    read = copied(gen_graph(said)).ends[0].op.gen
    assert read == said
    found = read.result.parse(text)
    assert found == wanted
    assert type(found) is type(wanted)
    assert repr(found) == repr(said.result.parse(text))


def test_a_text_that_is_none_is_refused_after_reading_as_before():
    result = copied(gen_graph(gen("x", dtype=Named))).ends[0].op.gen.result
    with pytest.raises(ValueError, match="the keys of Named, not without 'more'"):
        result.parse('{"name": "a"}')


# ------------------------------------------------------------------------------ what no file can hold


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Person:
    name: str


class Thing:
    pass


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (gen_graph(gen("x", dtype=Colour)), r"gen\('x'\) .*your class Colour; write dtype=Literal\['red', 'blue'\]"),
        (gen_graph(gen("x", dtype=Person)), "your class Person; write a TypedDict with the same keys, or json_schema="),
        (gen_graph(gen("x", dtype=list[Colour])), "your class Colour; write"),
        (constant_graph(Thing()), "the value of variable 'kept' cannot be kept in a file: .*class Thing; write what"),
        (constant_graph([Colour.RED]), "an object of the class Colour"),
        (constant_graph(1 << 5000), "a number of 5001 bits"),
    ],
    ids=["enum", "dataclass", "inside", "object", "member", "number"],
)
def test_objects_of_classes_are_refused_with_their_line(graph, says):
    with pytest.raises(GraphError, match=says) as refusal:
        serialise.encode(graph)
    assert re.search(r" at one.py:[34]: ", str(refusal.value))


def test_a_default_that_no_file_holds_is_refused_by_name():
    with pytest.raises(GraphError, match="the default of parameter 'a' cannot be kept in a file: it is an object of"):
        serialise.encode(gen_graph(gen("x"), default=Thing()))


def test_a_list_that_contains_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(GraphError, match=r"the default of parameter 'a' .* nested deeper than 30, or contains itself"):
        serialise.encode(gen_graph(gen("x"), default=endless))


def test_a_graph_that_is_not_whole_is_not_written():
    with pytest.raises(GraphError, match="is needed by nothing"):
        serialise.encode(replace(Parts().graph(), ends=()))


# ------------------------------------------------------------------------------------- files as such


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "tips.umbel.json"
    Parts().graph().save(path)
    before = path.read_bytes()
    with pytest.raises(GraphError):
        constant_graph(Thing()).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tips.umbel.json"]
    assert alike(serialise.read(path), Parts().graph())


def test_a_file_that_is_not_there_is_no_graph_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        serialise.read(tmp_path / "none.umbel.json")


def test_a_file_is_read_by_people_line_by_line():
    lines = serialise.encode(Parts().graph()).decode().splitlines()
    assert lines[5] == '  {"op": "Append", "inputs": [0, 2], "line": [0, 4, ""]},'


@pytest.mark.processes
def test_another_process_reads_the_same_graph(tmp_path):
    graph = gen_graph(gen("x", dtype=list[int]), default=("ü", {"k": b"\0"}))
    graph.save(tmp_path / "x.umbel.json")
    code = "import sys; from umbel.compiler.files.serialise import digest, read; print(digest(read(sys.argv[1])))"
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.umbel.json")], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == serialise.digest(graph)


def test_a_graph_of_many_nodes_takes_no_recursion():
    builder = Builder()
    end = builder.node(Begin("long"))
    text = builder.node(Constant("a"))
    for _ in range(20_000):
        end = builder.node(Append(), (end, text))
    graph = builder.graph("long", [], [end], [], text)
    assert serialise.digest(copied(graph)) == serialise.digest(graph)
