"""The common head: the parts that all runs of a program begin with, exactly as the interpreter sends them."""

from typing import Any

import pytest
from umbel.compiler.graph import Builder, Graph, Node, Parameter
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
    Join,
)
from umbel.compiler.program import function
from umbel.compiler.shared_prefix import common_head, shared_arguments
from umbel.interpreter.backends.echo import Echo
from umbel.lang import ops
from umbel.lang.chat_template import CHATML, ChatTemplate
from umbel.lang.generation import gen
from umbel.lang.ops import RoleBegin, RoleEnd
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import GenRequest

TEMPLATE = ChatTemplate(CHATML, name="test")
LONG = "Answer in one word. Rules: be brief, be kind, be right."


class Chain:
    """A graph of one stream, said link by link."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.last: Node = self.builder.node(Begin("p"))
        self.branches: list[Node] = []

    def say(self, value: object) -> "Chain":
        node = value if isinstance(value, Node) else self.builder.node(Constant(value))
        return self.op(Append(), node)

    def op(self, op: Any, *inputs: Node) -> "Chain":
        self.last = self.builder.node(op, (self.last, *inputs))
        return self

    def gen(self, name: str = "x", max_tokens: int = 8) -> "Chain":
        return self.op(Generate(ops.Gen(name, {"max_tokens": max_tokens})))

    def argument(self, name: str = "question") -> Node:
        return self.builder.node(Argument(name))

    def graph(self) -> Graph:
        result = self.builder.node(Constant(None))
        names = [Parameter("question"), Parameter("style", required=False, default="plain")]
        return self.builder.graph("p", names, (self.last, *self.branches), (), result)


def texts(parts: tuple[Part, ...]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Text)]


def test_the_head_ends_at_the_first_argument() -> None:
    chain = Chain().say("Q: ")
    graph = chain.say(chain.argument()).gen().graph()
    assert texts(common_head(graph, TEMPLATE)) == ["Q: "]


def test_equal_arguments_belong_to_the_head() -> None:
    chain = Chain().say("Style: ")
    chain.say(chain.argument("style")).say("\nQ: ")
    graph = chain.say(chain.argument()).gen().graph()
    assert texts(common_head(graph, TEMPLATE, {"style": "terse"})) == ["Style: terse\nQ: "]


def test_functions_and_joined_texts_of_known_arguments_are_known() -> None:
    chain = Chain()
    upper = chain.builder.node(Apply("upper"), (chain.argument("style"),))
    joined = chain.builder.node(Concat(), (upper, chain.builder.node(Constant("; Q: ")), chain.argument()))
    graph = chain.say(joined).gen().graph()
    assert texts(common_head(graph, TEMPLATE, {"style": "terse"})) == ["TERSE; Q: "]
    assert common_head(graph, TEMPLATE) == ()


@pytest.mark.parametrize("barrier", [Generate(ops.Gen("x")), Choose(ops.Select("x", ()))])
def test_the_head_ends_at_the_first_call(barrier: Any) -> None:
    chain = Chain().say("A: ")
    inputs = (chain.builder.node(Constant("yes")),) if isinstance(barrier, Choose) else ()
    graph = chain.op(barrier, *inputs).say("more").gen("y").graph()
    assert texts(common_head(graph, TEMPLATE)) == ["A: "]


def test_what_is_said_behind_the_last_call_is_in_no_prompt() -> None:
    assert common_head(Chain().say("only text").graph(), TEMPLATE) == ()
    forked = Chain().say("shared ")
    fork = forked.op(Fork(1)).last
    item = forked.builder.node(GetForkItem(0), (fork,))
    forked.branches = [forked.builder.node(Generate(ops.Gen("x")), (item,))]
    assert texts(common_head(forked.say("never asked").graph(), TEMPLATE)) == ["shared "]


def test_the_head_goes_on_behind_branches_that_bring_back_no_text() -> None:
    for mode, head in (("gather_variable", "A B"), ("concate_and_append", "A ")):
        chain = Chain().say("A ")
        fork = chain.op(Fork(1)).last
        branch = chain.builder.node(Generate(ops.Gen("x")), (chain.builder.node(GetForkItem(0), (fork,)),))
        graph = chain.op(Join(mode), branch).say("B").gen("y").graph()  # type: ignore[arg-type]
        assert texts(common_head(graph, TEMPLATE)) == [head]


def test_the_parts_are_those_of_a_run() -> None:
    """Scaffolding, the white space that a template trims, and the turn that is open where runs part."""

    @function
    def program(s: Any, question: str) -> None:
        with s.system():
            s += LONG + "  \n"
        with s.user():
            s += "Question: "
            s += question
        with s.assistant():
            s += gen("x", max_tokens=4)

    chain = Chain()
    chain.op(RoleBegin("system")).say(LONG + "  \n").op(RoleEnd("system")).op(RoleBegin("user")).say("Question: ")
    chain.say(chain.argument()).op(RoleEnd("user")).op(RoleBegin("assistant")).gen().op(RoleEnd("assistant"))
    for template in (CHATML, CHATML.replace("message['content']", "message['content'] | trim")):
        echo = Echo(["yes"], chat_template=ChatTemplate(template, name="t"))
        program.run(question="Why?", backend=echo).sync()
        request = next(request for request in echo.requests if isinstance(request, GenRequest))
        *whole, last = common_head(chain.graph(), echo.chat_template)
        assert tuple(whole) == request.prompt[: len(whole)]
        sent = request.prompt[len(whole)]
        assert isinstance(last, Text)
        assert isinstance(sent, Text)
        assert sent.text.startswith(last.text)
        assert "Question:" in last.text


def test_arguments_are_shared_when_they_are_equal_and_of_one_type() -> None:
    items: list[dict[str, Any]] = [
        {"a": "x", "b": 1, "c": [1, "z"], "d": 1},
        {"a": "x", "b": 2, "c": [1, "z"], "d": True},
    ]
    assert shared_arguments(items) == {"a": "x", "c": [1, "z"]}
    assert shared_arguments([*items, {"a": "x"}]) == {"a": "x"}
    assert shared_arguments([]) == {}
