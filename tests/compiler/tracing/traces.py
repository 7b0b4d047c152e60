"""What tests of tracing share: value nodes computed, nodes shown shortly, and what a program raises."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.checks.verify import verify
from umbel.compiler.graph import Graph, Node
from umbel.compiler.operations import FUNCTIONS, Append, Apply, Argument, Concat, Constant, Leaf, Structure, Variable


def value_of(node: Node, known: Mapping[str, Any]) -> Any:
    """What a value node is, for arguments and variables by name."""
    values = [value_of(taken, known) for taken in node.inputs] if not isinstance(node.op, Variable) else []
    match node.op:
        case Constant(value):
            return value
        case Argument(name) | Variable(name, None):
            return known[name]
        case Variable(name, index):
            return known[name][index]
        case Concat():
            return "".join(map(str, values))
        case Apply(function, arguments):
            return FUNCTIONS[function](*values, *arguments)
        case Structure(template):
            return _filled(template, values)
        case _:
            raise AssertionError(node)


def _filled(template: Any, values: list[Any]) -> Any:
    match template:
        case Leaf(index):
            return values[index]
        case list() | tuple():
            return type(template)(_filled(member, values) for member in template)
        case dict():
            return {key: _filled(member, values) for key, member in template.items()}
        case _:
            return template


def said(graph: Graph, **known: Any) -> str:
    """All text that the program's own stream appends."""
    appended = (node.inputs[1] for node in graph.streams[0] if isinstance(node.op, Append))
    return "".join(str(value_of(text, known)) for text in appended)


def traced(body: Callable[..., Any], **static: Any) -> Graph:
    """The graph of a function, which is whole."""
    graph = ul.function(body).trace(static_args=static)
    verify(graph)
    return graph


def refused(body: Callable[..., Any], **static: Any) -> str:
    """What TraceError says of a function, behind the place of the line marked with `# here`."""
    with pytest.raises(ul.TraceError) as caught:
        ul.function(body).trace(static_args=static)
    place, _, rest = str(caught.value).partition(": ")
    assert place == marked_line(body), str(caught.value)
    return rest


def marked_line(body: Callable[..., Any]) -> str:
    code = body.__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if "# here" in lines[n - 1])
    return f"{code.co_filename}:{number}"
