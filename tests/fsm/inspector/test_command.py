"""What `umbel fsm` prints and draws."""

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.inspector.command import main
from umbel.fsm.inspector.compress import Edge, Graph
from umbel.fsm.inspector.drawing import dot, layered, svg

LONG = "".join(f"(a{number}|b{number})" for number in range(120))
PERSON = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'
SVG = "{http://www.w3.org/2000/svg}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "born": {"type": "integer", "minimum": 1900, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}

DATE = """\
regex: [0-9]{4}-(0[1-9]|1[0-2])

            bytes  characters  compressed
states          9           9           8
edges           9           9           8

removed     11% of the states after each character
shortest    7 bytes, 1 forced (14%)
            "0000-01"
explored    fully

   0  [0-9] -> 1
   1  [0-9] -> 2
   2  [0-9] -> 3
   3  [0-9] "-" -> 5
   5  "0" -> 6
      "1" -> 7
   6  [1-9] -> *8
   7  [0-2] -> *8
  *8  (end)

  * a text may end here
"""


def test_an_expression_is_printed_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["[0-9]{4}-(0[1-9]|1[0-2])"]) == 0
    assert capsys.readouterr().out == DATE


def test_a_schema_comes_from_a_file_an_argument_or_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(SCHEMA)
    file = tmp_path / "schema.json"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    printed = []
    for argument in (str(file), text, "-"):
        assert main([argument]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert printed[0].startswith("schema: {")
    assert """'{"name": "A' -> """ in printed[0]


def test_an_expression_comes_from_standard_input_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ab?\n"))
    assert main(["-"]) == 0
    assert capsys.readouterr().out.startswith("regex: ab?\n")


def test_the_kind_can_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ab").write_text('{"const": 1}')
    assert main(["ab"]) == 0
    assert capsys.readouterr().out.startswith('schema: {"const": 1}')
    assert main(["--regex", "ab"]) == 0
    assert capsys.readouterr().out.startswith("regex: ab")
    assert main(["--schema", "true", "--states", "5"]) == 0
    assert capsys.readouterr().out.startswith("schema: true")


def test_whitespace_is_that_of_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    shortest = []
    for whitespace in ("spaced", "compact"):
        assert main([json.dumps(SCHEMA), "--whitespace", whitespace, "--json"]) == 0
        shortest.append(json.loads(capsys.readouterr().out)["shortest"]["text"])
    assert shortest == ['{"name": "Ada", "born": 1900}', '{"name":"Ada","born":1900}']


def test_json_has_the_counts_and_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["(?:yes|no)é", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == "regex"
    assert printed["explored"] is True
    assert printed["states"] == {"bytes": 7, "characters": 6, "compressed": 3}
    assert printed["shortest"] == {"text": "noé", "bytes": 4, "forced_bytes": 3}
    assert sorted(edge[3] for edge in printed["graph"]["edges"]) == ["", "es", "o"]
    assert len(printed["graph"]["accepting"]) == 1


def test_what_was_not_explored_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["[ab]{500}", "--states", "5"]) == 0
    printed = capsys.readouterr().out
    assert "explored    5 states; 1 more are seen and left\n" in printed
    assert "  ?5  ...\n" in printed
    assert printed.endswith("* a text may end here; ? not explored\n")


def test_many_states_are_listed_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["[ab]{100}"]) == 0
    assert "100 edges; --edges lists them\n" in capsys.readouterr().out
    assert main(["[ab]{100}", "--edges"]) == 0
    assert "99  [ab] -> *100\n" in capsys.readouterr().out


def test_an_error_shows_its_position(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([r"ab(c"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("umbel fsm: position 2: ")
    assert error.endswith("\n  ab(c\n    ^\n")
    assert main(["a" * 500 + "(" + "b" * 500]) == 1
    shown, mark = capsys.readouterr().err.splitlines()[1:]
    assert len(shown) < 130
    assert shown[mark.index("^")] == "("


def test_a_refused_schema_names_its_keyword_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}
    assert main([json.dumps(schema)]) == 1
    assert capsys.readouterr().err.startswith("umbel fsm: ")


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 1
    error = capsys.readouterr().err
    assert "/none.json': No such file or directory; write an expression, or the path" in error
    assert "Errno" not in error
    assert error.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--svg", str(tmp_path / "nowhere" / "a.svg")]) == 1
    assert "No such file" in capsys.readouterr().err


def circles(file: Path) -> int:
    return sum(1 for _ in ElementTree.fromstring(file.read_text(encoding="utf-8")).iter(f"{SVG}circle"))


@pytest.mark.parametrize(
    ("given", "note", "most"),
    [
        ("[ab]{600}", "counted repeats are loops, drawn without their counts", 4),
        (PERSON, "without the members that the schema does not name; --closed prints the same automaton", 20),
        ("(ab|[0-9]{2}x|y[a-z]z){90}q", "counted repeats are loops, drawn without their counts", 14),
        (LONG, "the first 60 of 121 states; dashed ones go on", 140),
    ],
)
def test_every_constraint_has_a_picture_that_says_what_it_leaves_out(
    given: str, note: str, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.svg"
    assert main([given, "--svg", str(file)]) == 0
    assert f"picture     {note}" in capsys.readouterr().out
    assert 1 < circles(file) <= most


def test_strings_of_a_bounded_length_are_loops_with_their_escapes(tmp_path: Path) -> None:
    strings = {name: {"type": "string", "maxLength": 30} for name in ("first", "second")}
    schema = {"type": "object", "properties": strings, "required": [*strings], "additionalProperties": False}
    file = tmp_path / "a.svg"
    assert main([json.dumps(schema), "--svg", str(file)]) == 0
    assert circles(file) <= 24
    root = ElementTree.parse(file).getroot()
    assert float(root.attrib["width"]) < 2000
    written = [element.text or "" for element in root.iter(f"{SVG}text")]
    for text in ("first", "second", "u00"):
        assert any(text in each for each in written), f"{text} is not drawn"


def test_a_number_of_states_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["a", "--states", "0"])
    assert "'0' is no number of states; write a number of 1 or more" in capsys.readouterr().err


def test_the_picture_has_every_state_and_label(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    assert main(["(ab|[0-9]{2}x)*<é>", "--svg", str(file)]) == 0
    root = ElementTree.parse(file).getroot()
    assert root.findtext(f"{SVG}title") == "(ab|[0-9]{2}x)*<é>"
    written = [element.text for element in root.iter(f"{SVG}text")]
    assert {"0", '"<é>"', '"ab"', "[0-9]"} <= set(written)
    assert len(list(root.iter(f"{SVG}circle"))) == len([text for text in written if text and text.isdigit()]) + 1


def test_the_picture_has_a_legend_of_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    assert main(["ab|cd", "--svg", str(file)]) == 0
    written = [element.text or "" for element in ElementTree.parse(file).iter(f"{SVG}text")]
    assert "a text may end here" in written
    assert any(text.startswith("one text; ") for text in written)
    assert "one character of a set, and the text after it" not in written  # there is none
    assert "goes on, not drawn" not in written


def test_a_picture_says_how_many_states_are_not_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.svg"
    assert (
        main(
            [
                "|".join(f"{chr(97 + n)}[0-9]{chr(65 + n)}[a-z]{chr(97 + n)}[0-9]{chr(65 + n)}" for n in range(26)),
                "--svg",
                str(file),
            ]
        )
        == 0
    )
    root = ElementTree.parse(file).getroot()
    written = [element.text or "" for element in root.iter(f"{SVG}text")]
    note = next(text for text in written if text.startswith("the first 60 of "))
    assert note in capsys.readouterr().out
    assert "goes on, not drawn" in written
    bottom = max(float(element.attrib["y"]) for element in root.iter(f"{SVG}text"))
    assert bottom < float(root.attrib["height"])


def test_a_folded_label_is_whole_below_the_pointer(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    long = "as it was said in the morning papers of the capital"
    assert main([f"{long}|[0-9]", "--svg", str(file)]) == 0
    root = ElementTree.parse(file).getroot()
    assert f'[0-9]\n"{long}"' in [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g")]
    assert any("…" in (element.text or "") for element in root.iter(f"{SVG}text"))


def test_dot_has_every_edge(tmp_path: Path) -> None:
    file = tmp_path / "a.dot"
    assert main([r'a"\\?', "--dot", str(file)]) == 0
    lines = file.read_text().splitlines()
    assert lines[0] == "digraph constraint {"
    assert r"""  0 -> 2 [label="'a\"'", color="#0b57d0", fontcolor="#0b57d0"];""" in lines
    assert r"""  2 -> 3 [label="\"\\\\\"", color="#0b57d0", fontcolor="#0b57d0"];""" in lines


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Every state is reached from state 0."""
    count = draw(st.integers(1, 12))
    pairs = {(draw(st.integers(0, state - 1)), state) for state in range(1, count)}
    pairs |= set(draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=14)))
    edges = tuple(Edge(source, target, ((0x61, 0x61 + target),)) for source, target in sorted(pairs))
    return Graph(0, tuple(range(count)), frozenset({count - 1}), edges)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_edges_lead_from_left_to_right_but_for_those_that_close_a_circle(graph: Graph) -> None:
    pairs = {(edge.source, edge.target) for edge in graph.edges}
    layout = layered(0, graph.states, pairs)
    depth = {item: index for index, layer in enumerate(layout.layers) for item in layer}
    assert {item for item in depth if isinstance(item, int)} == set(graph.states)
    assert sum(map(len, layout.layers)) == len(depth)
    for source, target in pairs - layout.backward:
        assert depth[source] < depth[target]
        assert all(depth[source, target, layer] == layer for layer in range(depth[source] + 1, depth[target]))


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_states_do_not_lie_on_each_other(graph: Graph) -> None:
    text = svg(graph, "any")
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    centres = {(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in root.iter(f"{SVG}circle")}
    assert len(centres) == len(graph.states)
    assert all(17 <= x <= width - 17 and 17 <= y <= height - 17 for x, y in centres)
    far = [(a, b) for a in centres for b in centres if a < b and abs(a[0] - b[0]) < 34 and abs(a[1] - b[1]) < 34]
    assert far == []
    assert not re.search(r"nan|inf", text)


def test_parallel_edges_share_an_arrow() -> None:
    edges = tuple(Edge(0, 1, ((code, code),)) for code in range(0x61, 0x69))
    graph = Graph(0, (0, 1), frozenset({1}), edges)
    written = [element.text for element in ElementTree.fromstring(svg(graph, "any")).iter(f"{SVG}text")]
    assert written[:5] == ['"a"', '"b"', '"c"', '"d"', "and 4 more"]
    assert dot(graph).count(" -> 1 ") == 8


def test_no_label_covers_a_state_in_the_picture_of_a_text_and_a_number(tmp_path: Path) -> None:
    properties = {"title": {"type": "string"}, "year": {"type": "integer"}}
    schema, picture = tmp_path / "schema.json", tmp_path / "schema.svg"
    schema.write_text(json.dumps({"type": "object", "properties": properties, "required": list(properties)}))
    assert main([str(schema), "--svg", str(picture)]) == 0
    root = ElementTree.fromstring(picture.read_text())
    circles = [[float(each.get(name)) for name in ("cx", "cy", "r")] for each in root.iter(f"{SVG}circle")]
    labels = [
        [float(each.get(name)) for name in ("x", "y", "width", "height")]
        for each in root.iter(f"{SVG}rect")
        if each.get("x") is not None
    ]
    assert len(circles) > 5
    assert len(labels) > 5
    for x, y, width, height in labels:
        for centre_x, centre_y, radius in circles:
            across = min(x + width, centre_x + radius) - max(x, centre_x - radius)
            down = min(y + height, centre_y + radius) - max(y, centre_y - radius)
            assert min(across, down) < 4, (x, y, centre_x, centre_y)
