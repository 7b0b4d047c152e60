"""Tracing: a program runs once, with symbols, and what it says is the graph."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.graph import Graph, Parameter
from umbel.compiler.operations import (
    Append,
    Argument,
    Begin,
    Choose,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Look,
    Variable,
)
from umbel.lang.ops import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd

from .traces import refused, said, traced, value_of


def shown(graph: Graph) -> list[str]:
    """The nodes of a graph in their order: what they are, and the numbers of their inputs."""
    return [f"{name(node.op)} {[graph.numbers[taken] for taken in node.inputs]}" for node in graph.nodes]


def name(op: object) -> str:
    match op:
        case Constant(value):
            return f"ConstantText {value!r}"
        case Argument(name):
            return f"Argument {name}"
        case Generate(gen):
            return f"Gen {gen.name}"
        case Choose(select):
            return f"Select {select.name}"
        case Variable(name):
            return f"Variable {name}"
        case Begin(program):
            return f"Begin {program}"
        case Fork(size):
            return f"Fork {size}"
        case GetForkItem(index):
            return f"GetForkItem {index}"
        case _:
            return type(op).__name__


# ------------------------------------------------------------------------------------------ the paper's figure 14


@ul.function
def expand(s, tip):
    s += "Expand: " + tip + "\n" + ul.gen("detail")
    return s["detail"]


@ul.function
def advice(s, topic):
    s += "Topic: " + topic
    forks = s.fork(2)
    forks += lambda index: f"\n{index}. " + ul.gen("tip")
    forks.join()
    for tip in s["tip"]:
        s += expand.run(tip).ret_value
    s += ul.select("verdict", choices=["good", "bad"])
    return s["verdict"]


def test_every_kind_of_node_and_edge_of_the_paper() -> None:
    """Calls of decorated functions and forks create streams; reads of variables lead from one stream to another."""
    graph = advice.trace()
    assert shown(graph) == [
        "Argument topic []",
        "Begin advice []",
        "ConstantText 'Topic: ' []",
        "Append [1, 2]",
        "Append [3, 0]",
        "Fork 2 [4]",
        "GetForkItem 0 [5]",
        "GetForkItem 1 [5]",
        "ConstantText '\\n0. ' []",
        "Append [6, 8]",
        "Gen tip [9]",
        "ConstantText '\\n1. ' []",
        "Append [7, 11]",
        "Gen tip [12]",
        "Join [5, 10, 13]",
        "Variable tip [10]",
        "Variable tip [13]",
        "Begin expand []",
        "ConstantText 'Expand: ' []",
        "ConstantText '\\n' []",
        "Append [17, 18]",
        "Append [20, 15]",
        "Append [21, 19]",
        "Gen detail [22]",
        "Variable detail [23]",
        "Append [14, 24]",
        "Begin expand []",
        "Append [26, 18]",
        "Append [27, 16]",
        "Append [28, 19]",
        "Gen detail [29]",
        "Variable detail [30]",
        "Append [25, 31]",
        "ConstantText 'good' []",
        "ConstantText 'bad' []",
        "Select verdict [32, 33, 34]",
        "Variable verdict [35]",
        "Structure [15, 16]",
    ]
    numbers = graph.numbers
    assert [numbers[stream[0]] for stream in graph.streams] == [1, 6, 7, 17, 26]
    assert [numbers[end] for end in graph.ends] == [35, 10, 13, 23, 30]
    assert [(name, numbers[value]) for name, value in graph.variables] == [("tip", 37), ("verdict", 36)]
    assert numbers[graph.result] == 36


def test_the_edges_inside_and_between_streams() -> None:
    graph = advice.trace()
    numbers, stream_of = graph.numbers, graph.stream_of
    inside = {
        (numbers[before], numbers[node])
        for node in graph.nodes
        if node.in_stream and (before := node.before) is not None
    }
    assert inside == {
        *((1, 3), (3, 4), (4, 5), (5, 14), (14, 25), (25, 32), (32, 35)),
        *((6, 9), (9, 10), (7, 12), (12, 13)),
        *((17, 20), (20, 21), (21, 22), (22, 23), (26, 27), (27, 28), (28, 29), (29, 30)),
    }
    between = {
        (numbers[taken], numbers[node])
        for node in graph.nodes
        if node.in_stream
        for taken in node.inputs
        if taken.in_stream and stream_of[taken] != stream_of[node]
    }
    assert between == {(5, 6), (5, 7), (10, 14), (13, 14)}
    read = {
        (numbers[value.inputs[0]], numbers[node])
        for node in graph.nodes
        if node.in_stream
        for value in node.inputs
        if isinstance(value.op, Variable)
    }
    assert read == {(10, 21), (13, 28), (23, 25), (30, 32)}


def test_every_node_knows_its_line() -> None:
    graph = advice.trace()
    functions = {node.line.function if node.line else None for node in graph.nodes if isinstance(node.op, Append)}
    assert functions == {"advice", "expand"}
    append = next(node for node in graph.nodes if isinstance(node.op, Append))
    assert append.line is not None
    assert append.line.number == advice.body.function.__code__.co_firstlineno + 2
    assert append.line.file == __file__


@dataclass
class Shot:
    """Its `__init__` is generated, and no line of the program."""

    text: str

    def __post_init__(self) -> None:
        self.text = self.text.strip() + ul.__name__

    def __format__(self, specification: str) -> str:
        return self.text


def test_lines_are_those_of_the_program() -> None:
    def program(s, q):
        shots = [Shot(f"{index}") for index in range(2)]
        s += "".join(map("{}\n".format, shots))
        with s.user():
            s += (
                f"{q}"
            )  # fmt: skip

    graph = traced(program)
    first = program.__code__.co_firstlineno
    numbers = [node.line.number - first for node in graph.streams[0] if node.line is not None]
    assert numbers == [2, 3, 4, 3]


def test_generated_code_is_no_line() -> None:
    @dataclass
    class Asked:
        text: str

        def __post_init__(self) -> None:
            len(self.text)

    def program(s, q):
        len(Asked(q).text)

    with pytest.raises(ul.TraceError, match=r"test_trace.py:[0-9]+: len\(\)"):
        ul.function(program).trace()


def test_a_program_behind_python_c() -> None:
    source = """
def program(s, q):
    s += q
    len(q)
"""
    names: dict[str, Any] = {}
    exec(compile(source, "<string>", "exec"), names)
    with pytest.raises(ul.TraceError, match=r"^<string>:4: len\(\) looks"):
        ul.function(names["program"]).trace()


# ------------------------------------------------------------------------------------------ what is said


def test_each_operand_is_a_node_of_its_own() -> None:
    def program(s, x):
        s += f"a {x} b"
        s += "c" + ul.gen("y") + ["d", x]

    graph = traced(program)
    assert [name(node.inputs[1].op) for node in graph.streams[0] if isinstance(node.op, Append)] == [
        "ConstantText 'a '", "Argument x", "ConstantText ' b'", "ConstantText 'c'", "ConstantText 'd'", "Argument x",
    ]  # fmt: skip


def test_an_empty_text_says_nothing() -> None:
    def program(s, x):
        s += ""
        s += f"{x}"

    assert len(traced(program).streams[0]) == 2


def test_roles_and_scopes() -> None:
    def program(s):
        s += ul.system("be brief")
        with s.user():
            s += "hi"
        with s.assistant(), s.var_scope("all"):
            s += ul.gen("answer")

    graph = traced(program)
    kinds = [type(node.op) for node in graph.streams[0]]
    assert kinds == [
        Begin, RoleBegin, Append, RoleEnd, RoleBegin, Append, RoleEnd,
        RoleBegin, VarScopeBegin, Generate, VarScopeEnd, RoleEnd,
    ]  # fmt: skip
    assert [name for name, _ in graph.variables] == ["answer", "all"]
    assert all(node.line is not None and node.line.file == __file__ for node in graph.streams[0][1:])


def test_the_grammar_is_that_of_the_interpreter() -> None:
    def program(s):
        s += ul.user_begin()
        s += ul.system("no")

    with pytest.raises(ul.ProgramError, match="cannot begin inside an open user turn") as caught:
        ul.function(program).trace()
    first = program.__code__.co_firstlineno
    assert any(f"{__file__}:{first + 2}" in note for note in caught.value.__notes__)


def test_loops_over_constants_unroll() -> None:
    def program(s, q, n):
        for index in range(n):
            s += f"{index}: {q}\n" + ul.gen(f"x{index}")

    graph = traced(program, n=3)
    assert said(graph, q="Q") == "0: Q\n1: Q\n2: Q\n"
    assert [name for name, _ in graph.variables] == ["x0", "x1", "x2"]


def test_choices_may_be_arguments() -> None:
    def program(s, first):
        s += ul.select("x", choices=[first, "no", f"not {first}"])

    graph = traced(program)
    choose = graph.streams[0][-1]
    assert isinstance(choose.op, Choose)
    assert choose.op.select.choices == ()
    assert [value_of(choice, {"first": "a"}) for choice in choose.inputs[1:]] == ["a", "no", "not a"]


def test_pictures_are_arguments_or_constants(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")

    class Drawn:
        def save(self, target: io.BytesIO, format: str) -> None:
            target.write(format.encode())

    def program(s, path):
        s += ul.image(path) + ul.image(f"{path}.png") + ul.image(picture) + ul.image(b"bytes") + ul.video(path, 3)
        s += ul.image(Drawn())

    looks = [node for node in traced(program).streams[0] if isinstance(node.op, Look)]
    sources = [value_of(node.inputs[1], {"path": "p"}) for node in looks]
    assert sources == ["p", "p.png", str(picture), b"bytes", "p", b"PNG"]
    assert [node.op.num_frames for node in looks] == [None, None, None, None, 3, None]


def test_a_picture_that_is_no_file_is_said_at_once() -> None:
    def program(s):
        s += ul.image("no such file.png")

    with pytest.raises(ul.ParameterError, match="there is no such file"):
        ul.function(program).trace()


# ------------------------------------------------------------------------------------------ parameters and results


def test_parameters_are_those_that_a_run_gives() -> None:
    class Helper:
        @ul.function
        def program(self, s, a, /, b, c=3, *, d="x", **more):
            s += f"{a}{b}{c}{d}"
            assert more == {}

    graph = Helper().program.bind(b="B").trace(static_args={"d": "D"})
    assert graph.parameters == (Parameter("a"), Parameter("c", False, 3))
    assert graph.fixed == ("b", "d")
    assert said(graph, a="1", c=3) == "1B3D"


def test_parameters_that_collect_arguments_are_refused() -> None:
    def listed(s, *docs):  # here
        for document in docs:
            s += document

    def named(s, **words):  # here
        s += words["a"]

    assert refused(listed) == (
        "a graph has no *docs. Write a parameter that is a list, and fix it with static_args; or listed.run(...) to "
        "run the program with the interpreter"
    )
    assert refused(named).startswith(
        "a graph has no **words but for what is fixed. Write a parameter a, or fix it with static_args; or named.run("
    )
    assert said(traced(named, a="A")) == "A"
    assert said(ul.function(named).bind(a="B").trace()) == "B"


def test_static_arguments_that_the_program_does_not_have() -> None:
    with pytest.raises(ul.ParameterError, match="no parameter 'topics'"):
        advice.trace(static_args={"topics": 1})
    with pytest.raises(ul.ParameterError, match="static_args must be a dict"):
        advice.trace(static_args=["topic"])  # type: ignore[arg-type]


def test_the_result_may_be_nested() -> None:
    def program(s, q):
        s += ul.gen("x")
        return {"x": s["x"], "all": [f"Q: {q}", (1, None, True)], "n": 2.5}

    result = traced(program).result
    assert value_of(result, {"x": "X", "q": "why"}) == {"x": "X", "all": ["Q: why", (1, None, True)], "n": 2.5}


def test_a_program_that_returns_nothing() -> None:
    assert traced(lambda s: None).result.op == Constant(None)


def test_an_object_of_the_program_is_kept() -> None:
    kept = object()
    assert traced(lambda s: kept).result.op.value is kept


def test_tracing_leaves_nothing_behind() -> None:
    """A program that has been traced runs as before."""

    @ul.function
    def program(s, q):
        s += q + ul.gen("x")

    program.trace()
    state = program.run("Q: ", backend=ul.Echo(lambda prompt: "A"))
    assert state.text() == "Q: A"


def test_two_traces_of_a_program_are_equal() -> None:
    assert shown(advice.trace()) == shown(advice.trace())
