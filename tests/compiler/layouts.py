"""What the tests of layouts share: graphs by hand, words as tokens, files to lint."""

import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
from umbel.compiler.graph import Builder, Graph, Node, Parameter
from umbel.compiler.layout.findings import Finding
from umbel.compiler.layout.linting import findings_of
from umbel.compiler.layout.loading import load
from umbel.compiler.layout.pieces import Kind, Piece
from umbel.compiler.layout.tokens import Counter
from umbel.compiler.operations import Append, Argument, Begin, Constant, Generate, RoleBegin, RoleEnd
from umbel.lang.generation import gen
from umbel.lang.ops import Gen

# A token is a character: what is shared can be counted on paper.
CHARACTERS = Counter("characters", lambda text: [ord(character) for character in text])


def pieces(*parts: str) -> list[Piece]:
    """`$name` is an argument, everything else constant text."""
    return [
        Piece(Kind.INSTANCE, name=part[1:]) if part.startswith("$") else Piece(Kind.CONSTANT, part) for part in parts
    ]


def graph_of(*parts: str, role: str | None = None) -> Graph:
    """A program that says these and generates; `$name` is an argument."""
    builder = Builder()
    node = builder.node(Begin("program"))
    if role is not None:
        node = builder.node(RoleBegin(role), (node,))
    names = []
    for part in parts:
        if part.startswith("$"):
            names.append(part[1:])
        value = builder.node(Argument(part[1:]) if part.startswith("$") else Constant(part))
        node = builder.node(Append(), (node, value))
    if role is not None:
        node = builder.node(RoleEnd(role), (node,))
    operation = gen("answer")
    assert isinstance(operation, Gen)
    node = builder.node(Generate(operation), (node,))
    parameters = [Parameter(name) for name in dict.fromkeys(names)]
    return builder.graph("program", parameters, [node], [], builder.node(Constant(None)))


def prompt_of(graph: Graph) -> str:
    """What the program's own stream appends, with `{name}` for arguments and `{Apply(...)}` for what is made of one."""
    return "".join(_shown(node.inputs[1]) for node in graph.streams[0] if isinstance(node.op, Append))


def _shown(value: Node) -> str:
    match value.op:
        case Constant(text):
            return str(text)
        case Argument(name):
            return f"{{{name}}}"
    return f"{{{value.op} of {[_shown(taken) for taken in value.inputs]}}}"


def lint(path: Path, source: str, *, shared: Collection[str] = (), counter: Counter = CHARACTERS) -> list[Finding]:
    """The findings of a file with this source."""
    path.write_text(source)
    subjects, _ = load(path)
    return [finding for subject in subjects for finding in findings_of(subject, counter, shared=shared)]


def patched(path: Path, diff: str) -> str:
    """The file after `patch -p0`."""
    if shutil.which("patch") is None:
        pytest.skip("the program patch is not installed")
    subprocess.run(["patch", "-p0"], input=diff, text=True, check=True, capture_output=True, cwd=path.parent)
    return path.read_text()
