"""The beginning of a program as a graph that was read and not traced: up to the first call, or to where it depends.

For programs that look at their values, which no trace can follow. Whatever they do later, this much they say first.
"""

import ast

from ...lang.generation import gen
from ...lang.ops import Gen, RoleBegin, RoleEnd
from ..graph import Builder, Graph, Line, Node, Parameter
from ..operations import Append, Argument, Begin, Constant, Generate
from .runs import Run, Source
from .scopes import Scope
from .source import SourceFile, SourceProgram, Stop, Turn
from .volatile import volatile_call


def sketch(file: SourceFile, program: SourceProgram) -> Graph:
    """A graph whose one call stands for all that is not known. Values that come from parameters are arguments, by
    their first parameter's name; the graph ends where something else is said."""
    builder = Builder()
    node = builder.node(Begin(program.function.name))
    names = parameter_names(program)
    role = ""
    for said in program.said:
        match said:
            case Run():
                extended = _extended(builder, node, said, program.scope, names, file)
                if extended is None:
                    break
                node = extended
            case Turn(role):
                node = builder.node(RoleBegin(role), (node,))
            case Stop.TURN_ENDS:
                node = builder.node(RoleEnd(role), (node,))
            case _:
                break
    call = gen("rest")
    assert isinstance(call, Gen), "gen() without reasoning is one operation"
    end = builder.node(Generate(call), (node,))
    parameters = [Parameter(name) for name in names]
    return builder.graph(program.function.name, parameters, [end], [], builder.node(Constant(None)))


def parameter_names(program: SourceProgram) -> list[str]:
    """Without the state, and `self`."""
    arguments = program.function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    return [*names[2 if names[:1] == ["self"] else 1 :], *(each.arg for each in arguments.kwonlyargs)]


def _extended(builder: Builder, node: Node, run: Run, scope: Scope, names: list[str], file: SourceFile) -> Node | None:
    for source in run.sources:
        value = _value(builder, source, scope, names)
        if value is None:
            return None
        line = Line(str(file.path), source.container.statement.lineno)
        node = builder.node(Append(), (node, value), line)
    return node


def _value(builder: Builder, source: Source, scope: Scope, names: list[str]) -> Node | None:
    text = source.text if source.text is not None else scope.constant(source.expression)
    if text is not None:
        return builder.node(Constant(text))
    if volatile_call(source.expression, scope) is not None:
        return builder.node(Constant(ast.unparse(source.expression)))  # told apart by its origin
    for part, _ in scope.flowing(source.expression):
        if isinstance(part, ast.Name) and part.id in names:
            return builder.node(Argument(part.id))
    return None
