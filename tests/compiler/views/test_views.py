"""Graphs as people look at them: listing, DOT, and pictures; and their edges, of the two kinds of the appendix D.1."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from umbel.compiler.graph import Builder, Graph, Line, Parameter
from umbel.compiler.operations import (
    Append,
    Apply,
    Argument,
    Begin,
    Choose,
    Concat,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Leaf,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)
from umbel.compiler.views.drawing import places
from umbel.compiler.views.listing import Edge, Labels, edges
from umbel.lang import ops
from umbel.lang.generation import gen

from ..broken_graphs import Parts
from ..random_graphs import graphs

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: ElementTree.Element) -> list[ElementTree.Element]:
    """Returns the boxes of nodes, without those of the legend."""
    return [group for group in picture.findall(f"{SVG}g") if group.find(f"{SVG}title") is not None]


def test_a_listing_has_a_line_for_everything_that_is_said():
    assert (
        Parts().graph().text()
        == """\
tips(topic, count=2)
  tips.py

stream 0: tips
   0  Begin tips                    line 1
   3  ConstantText "Tips about "    line 4
   4  Argument topic                line 5
   5  Fork 2 -> streams 1, 2        line 6
  12  Join gather_variable <- 8, 9  line 13

stream 1: branch 0 of 2, forked off stream 0 at 5
   6  GetForkItem 0 <- 5            line 7
   8  Gen tip max_tokens=9          line 9

stream 2: branch 1 of 2, forked off stream 0 at 5
   7  GetForkItem 1 <- 5            line 8
   9  Gen tip max_tokens=9          line 10

variables
  tip = [Variable tip <- 8, Variable tip <- 9]

result
  None
"""
    )


def test_lines_of_several_files_have_their_names():
    builder = Builder()
    begin = builder.node(Begin("p"), (), Line("/home/me/a.py", 1))
    end = builder.node(Append(), [begin, builder.node(Constant("x"))], Line("/home/me/b.py", 2))
    listing = builder.graph("p", [], [end], [], builder.node(Constant(None))).text()
    assert "  /home/me/a.py\n  /home/me/b.py\n" in listing
    assert re.search(r'0  Begin p +a.py:1\n  2  ConstantText "x"  b.py:2', listing)


def labelled(op: object, *inputs: object, longest: int | None = None) -> str:
    """The label of a node behind a stream's begin, or of a value."""
    builder = Builder()
    begin = builder.node(Begin("p"))
    taken = [builder.node(value) for value in inputs]
    node = builder.node(op, taken if isinstance(op, Concat | Apply | Structure) else [begin, *taken])
    graph = (
        builder.graph("p", [Parameter("q")], [begin], [], node)
        if not node.in_stream
        else (builder.graph("p", [Parameter("q")], [node], [], builder.node(Constant(None))))
    )
    return str(Labels(graph, longest).of(node))


@pytest.mark.parametrize(
    ("op", "inputs", "label"),
    [
        (Append(), [Constant('a "b" \\ \n\x1b\ud800')], 'ConstantText "a \\"b\\" \\\\ \\n\\x1b\\ud800"'),
        (Append(), [Argument("q")], "Argument q"),
        (Generate(gen("x", dtype=int, max_tokens=3)), [], r"""Gen x -> int max_tokens=3 stop=(' ', '\n') regex="(0|"""),
        (Generate(gen("x", stop="\n"), {"temperature": 0}), [], r'Gen x stop="\n" (defaults: temperature=0)'),
        (Generate(gen(), {}, ("<think>", "</think>")), [], "Gen (no name) (thinking: <think> </think>)"),
        (Choose(ops.Select("s", ())), [Constant("a"), Argument("q")], 'Select s of "a", Argument q'),
        (Choose(ops.Select("s", (), "exact", 0.5)), [Constant("a")], 'Select s of "a" method=exact temperature=0.5'),
        (Look(), [Constant(b"\x89PNG")], "Image 4 bytes"),
        (Look(8), [Argument("q")], "Video 8 frames of Argument q"),
        (ops.RoleBegin("user"), [], "RoleBegin user"),
        (ops.VarScopeEnd("x"), [], "VarScopeEnd x"),
        (Fork(3), [], "Fork 3"),
        (Concat(), [Constant("a"), Argument("q")], 'Concat ("a", Argument q)'),
        (Apply("slice", (None, 3, None)), [Argument("q")], "Apply slice(Argument q, None, 3, None)"),
        (Structure({"a": (Leaf(0),), "b": [1, "t"]}), [Argument("q")], '{"a": (Argument q,), "b": [1, "t"]}'),
    ],
    ids=repr,
)
def test_a_label_says_what_a_node_is(op, inputs, label):
    assert labelled(op, *inputs).startswith(label)


def test_labels_of_reads_name_the_node_that_is_read():
    parts = Parts()
    graph = parts.builder.graph(
        "tips",
        parts.parameters,
        (parts.join, *parts.gens),
        [
            ("one", parts.node(Variable("tip", 1), parts.gens[0])),
            ("object", parts.node(Object("tip"), parts.gens[1])),
            ("text", parts.node(StreamText(), parts.said)),
        ],
        parts.nothing,
    )
    assert graph.text().partition("variables\n")[2].partition("\n\n")[0].splitlines() == [
        "  one = Variable tip[1] <- 8",
        "  object = Object tip <- 9",
        "  text = StreamText <- 3",
    ]


def test_long_texts_and_lists_are_cut():
    assert labelled(Append(), Constant("a" * 99), longest=9) == 'ConstantText "aaaaa…aaa"'
    leaves = Structure([Leaf(0)] * 20)
    assert labelled(leaves, Argument("q"), longest=9) == f"[{'Argument q, ' * 8}… 12 more]"


def test_values_inside_of_values_are_named_by_number_in_the_end():
    builder = Builder()
    begin = builder.node(Begin("p"))
    value = builder.node(Argument("q"))
    for number in range(2000):
        value = builder.node(Apply("item", (number,)), [value])
    graph = builder.graph("p", [Parameter("q")], [begin], [], value)
    assert "Apply item(Apply item(Apply item(Apply item(Apply item(node 1996, 1995)" in graph.text()


# ------------------------------------------------------------------------------------------- places


def test_branches_stand_side_by_side_and_the_join_below_them():
    graph = Parts().graph()
    found = places(graph)
    rows = {type(node.op).__name__: row for node, row in found.rows.items()}
    assert found.columns == (0, 1, 2)
    assert rows == {"Begin": 0, "Append": 2, "Fork": 3, "GetForkItem": 4, "Generate": 5, "Join": 6}


def test_a_column_is_taken_again_after_a_join():
    parts = Parts()
    fork = parts.node(Fork(1), parts.join)
    branch = parts.node(GetForkItem(0), fork)
    assert places(parts.graph(fork, branch)).columns == (0, 1, 2, 1)


def test_a_run_inside_of_the_program_stands_where_it_is_needed():
    parts = Parts()
    inner = parts.node(Generate(ops.Gen("x")), parts.node(Begin("inner", 1)))
    end = parts.node(Append(), parts.join, parts.node(Variable("x"), inner))
    graph = parts.graph(end, inner)
    rows = places(graph).rows
    assert [rows[node] for node in (*graph.streams[3], end)] == [5, 6, 7]


def test_a_branch_stands_right_of_all_that_came_of_the_branch_before_it():
    builder = Builder()
    outer = builder.node(Fork(2), [builder.node(Begin("p"))])
    branches = [builder.node(GetForkItem(index), [outer]) for index in range(2)]
    ends = []
    for branch in branches:
        inner = builder.node(Fork(2), [branch])
        ends += [inner, *(builder.node(GetForkItem(item), [inner]) for item in range(2))]
    graph = builder.graph("p", [], [outer, *ends], [], builder.node(Constant(None)))
    found = places(graph)
    columns = {node: found.columns[graph.stream_of[node]] for node in (*branches, *ends)}
    assert [columns[node] for node in branches] == [1, 4]
    assert [columns[node] for node in ends] == [1, 2, 3, 4, 5, 6]
    assert found.strips == (0, 1, 0, 1, 0)


def test_lines_of_two_forks_in_one_strip_have_lanes_of_their_own():
    builder = Builder()
    outer = builder.node(Fork(1), [builder.node(Begin("p"))])
    inner = builder.node(Fork(2), [builder.node(GetForkItem(0), [outer])])
    later = builder.node(Fork(1), [builder.node(Append(), [outer, builder.node(Constant("then"))])])
    ends = [later, inner, builder.node(GetForkItem(0), [later])]
    ends += [builder.node(GetForkItem(item), [inner]) for item in range(2)]
    graph = builder.graph("p", [], ends, [], builder.node(Constant(None)))
    found = places(graph)
    assert found.strips == (0, 1, 0, 2, 0)
    assert found.lanes[later] > found.lanes[inner]


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_no_two_nodes_stand_in_one_place_and_every_line_leads_down(graph):
    found = places(graph)
    taken = [(row, found.columns[graph.stream_of[node]]) for node, row in found.rows.items()]
    assert len(set(taken)) == len(taken)
    for edge in found.edges:
        assert found.rows[edge.source] < found.rows[edge.target]
    for node, row in found.rows.items():
        if isinstance(node.op, GetForkItem):
            assert row == found.rows[node.inputs[0]] + 1


# ------------------------------------------------------------------------------------------ pictures


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_every_graph_is_shown_in_every_way(graph):
    said = [node for node in graph.nodes if node.in_stream]
    picture = ElementTree.fromstring(graph.svg())
    assert len(boxes(picture)) == len(said)
    assert len(picture.findall(f"{SVG}path")) == len(places(graph).edges)
    graph.text().encode()
    assert len(re.findall(r"^    \d+ \[label=", graph.dot(), re.MULTILINE)) == len(said)


def test_a_picture_hides_no_text():
    builder = Builder()
    end = builder.node(Append(), [builder.node(Begin("p")), builder.node(Constant("long " * 30))], Line("p.py", 7))
    picture = ElementTree.fromstring(builder.graph("p", [], [end], [], builder.node(Constant(None))).svg())
    box = boxes(picture)[1]
    assert box.findtext(f"{SVG}title") == f'2  ConstantText "{"long " * 30}"\np.py:7'
    assert "".join(box.find(f"{SVG}text").itertext()) == '2  ConstantText "long long lon… long "'


def test_a_picture_is_drawn_for_light_and_for_dark_ground():
    style = ElementTree.fromstring(Parts().graph().svg()).findtext(f"{SVG}style")
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    assert ".umbel-paper{fill:#ffffff}" in light
    assert ".umbel-paper{fill:#0d1117}" in dark


def test_values_between_streams_are_dashed():
    parts = Parts()
    graph = parts.graph(parts.node(Append(), parts.join, parts.tips[1]))
    dashed = [
        path for path in ElementTree.fromstring(graph.svg()).findall(f"{SVG}path") if path.get("stroke-dasharray")
    ]
    assert len(dashed) == 1
    assert "9 -> 13 [color=blue, style=dashed];" in graph.dot().replace(str(graph.numbers[graph.ends[0]]), "13")


def test_a_notebook_shows_picture_and_listing():
    graph = Parts().graph()
    assert graph._repr_svg_() == graph.svg()
    html = graph._repr_html_()
    assert graph.svg() in html
    assert "<pre>tips(topic, count=2)" in html
    assert "Join gather_variable &lt;- 8, 9" in html


def test_a_graph_is_named_by_its_size():
    assert repr(Parts().graph()) == "<graph tips: 15 nodes in 3 streams>"


def listed(graph: Graph, found) -> list[tuple[str, str]]:
    """Edges as pairs of "number operation"."""

    def named(node):
        return f"{graph.numbers[node]} {type(node.op).__name__}"

    return [(named(edge.source), named(edge.target)) for edge in found]


def of_kind(kind: str, graph: Graph) -> list[Edge]:
    return [edge for edge in edges(graph) if edge.kind == kind]


def test_a_stream_says_one_thing_after_the_other():
    graph = Parts().graph()
    assert listed(graph, of_kind("intra", graph)) == [
        ("0 Begin", "3 Append"),
        ("3 Append", "4 Append"),
        ("4 Append", "5 Fork"),
        ("6 GetForkItem", "8 Generate"),
        ("7 GetForkItem", "9 Generate"),
        ("5 Fork", "12 Join"),
    ]


def test_branches_need_their_fork_and_a_join_its_branches():
    graph = Parts().graph()
    assert listed(graph, of_kind("inter", graph)) == [
        ("5 Fork", "6 GetForkItem"),
        ("5 Fork", "7 GetForkItem"),
        ("8 Generate", "12 Join"),
        ("9 Generate", "12 Join"),
    ]


def test_text_needs_every_stream_that_it_is_made_of():
    parts = Parts()
    loud = [parts.node(Apply("upper"), tip) for tip in parts.tips]
    text = parts.node(Concat(), loud[0], parts.text, loud[1], loud[0])
    graph = parts.graph(parts.node(Append(), parts.join, text))
    assert listed(graph, [edge for edge in edges(graph) if edge.target is graph.ends[0]]) == [
        ("12 Join", "18 Append"),
        ("8 Generate", "18 Append"),
        ("9 Generate", "18 Append"),
    ]


def test_what_a_stream_reads_of_itself_is_no_edge_more():
    parts = Parts()
    said = parts.node(Append(), parts.gens[0], parts.tips[0])
    other = parts.node(Append(), parts.node(Begin("other", 1)), parts.node(StreamText(), said))
    graph = parts.builder.graph(
        "tips", parts.parameters, (parts.join, said, parts.gens[1], other), [("tip", parts.both)], parts.nothing
    )
    into = {target for _, target in listed(graph, of_kind("inter", graph))}
    assert f"{graph.numbers[said]} Append" not in into
    assert f"{graph.numbers[other]} Append" in into
