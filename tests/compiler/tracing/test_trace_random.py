"""Random programs are traced without an error, to graphs that are whole and say their texts.

That they run as the programs do is said by test_equality.py.
"""

from typing import Any

import umbel as ul
from hypothesis import HealthCheck, given, settings
from umbel.compiler.checks.verify import verify
from umbel.compiler.graph import Graph, frozen
from umbel.compiler.tracing.trace import trace

from ..random_programs import bodies, program_of


def said(graph: Graph) -> list[Any]:
    """All of a graph but its lines."""
    nodes = [(frozen(node.op), tuple(graph.numbers[taken] for taken in node.inputs)) for node in graph.nodes]
    return [
        nodes,
        [graph.numbers[end] for end in graph.ends],
        [(name, graph.numbers[value]) for name, value in graph.variables],
        graph.numbers[graph.result],
    ]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(4))
def test_random_programs_are_traced(body: tuple[object, ...]) -> None:
    program = program_of(body, [])
    found = trace(program)
    verify(found.graph)
    names = dict(found.graph.variables)
    assert "last" in names
    assert said(found.graph) == said(trace(program).graph)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(3))
def test_a_static_argument_is_a_constant(body: tuple[object, ...]) -> None:
    program = program_of(body, [])
    graph = program.trace(static_args={"question": "why?"})
    verify(graph)
    assert [parameter.name for parameter in graph.parameters] == ["shots"]
    assert said(graph) == said(program.bind(question="why?").trace())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies(3))
def test_tracing_changes_no_program(body: tuple[object, ...]) -> None:
    """What it says before and after it was traced is the same."""
    program = program_of(body, [])
    backend = ul.Echo(lambda prompt: "one two")
    with ul.default_backend(backend):
        before = program.run("why?", timeout=60.0).text()
        program.trace()
        assert program.run("why?", timeout=60.0).text() == before
