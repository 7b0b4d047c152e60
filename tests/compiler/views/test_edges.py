"""The two kinds of dependencies of the paper's appendix D.1."""

from umbel.compiler.graph import Graph
from umbel.compiler.operations import Append, Apply, Begin, Concat, StreamText
from umbel.compiler.views.listing import Edge, edges

from ..broken_graphs import Parts


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
