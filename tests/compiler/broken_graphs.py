"""A good graph, and a table of ways to break it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from umbel.compiler.graph import Builder, Graph, Line, Node, Parameter
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
    Isolate,
    Join,
    Leaf,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)
from umbel.lang import ops


class Parts:
    """A good graph of two branches, in pieces that a test can put together wrongly."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.line = 0
        self.begin = self.node(Begin("tips"))
        self.topic = self.node(Argument("topic"))
        self.text = self.node(Constant("Tips about "))
        self.said = self.node(Append(), self.begin, self.text)
        self.asked = self.node(Append(), self.said, self.topic)
        self.fork = self.node(Fork(2), self.asked)
        self.items = [self.node(GetForkItem(index), self.fork) for index in range(2)]
        self.gens = [self.node(Generate(ops.Gen("tip", {"max_tokens": 9})), item) for item in self.items]
        self.tips = [self.node(Variable("tip"), gen) for gen in self.gens]
        self.join = self.node(Join("gather_variable"), self.fork, *self.gens)
        self.both = self.node(Structure([Leaf(0), Leaf(1)]), *self.tips)
        self.nothing = self.node(Constant(None))
        self.parameters = (Parameter("topic"), Parameter("count", False, 2))

    def node(self, op: object, *inputs: Node) -> Node:
        self.line += 1
        return self.builder.node(op, inputs, Line("tips.py", self.line))

    def graph(self, end: Node | None = None, *more: Node, value: Node | None = None) -> Graph:
        """`end`: of the program's own stream, instead of the join. `more`: ends besides. `value`: a variable more."""
        variables = [("tip", self.both), *([("more", value)] if value is not None else [])]
        return self.builder.graph(
            "tips", self.parameters, (end or self.join, *self.gens, *more), variables, self.nothing
        )


@dataclass(frozen=True)
class Broken:
    """How the good graph is broken, and what is said about it."""

    name: str
    change: Callable[[Parts], Graph]
    says: str


def ending(op: object, *inputs: Callable[[Parts], Node]) -> Callable[[Parts], Graph]:
    """The program's stream goes on with `op`, which takes the join and `inputs`."""
    return lambda parts: parts.graph(parts.node(op, parts.join, *(take(parts) for take in inputs)))


def valued(op: object, *inputs: Callable[[Parts], Node]) -> Callable[[Parts], Graph]:
    """The graph has a variable more, which is `op` of `inputs`."""
    return lambda parts: parts.graph(value=parts.node(op, *(take(parts) for take in inputs)))


def a(name: str) -> Callable[[Parts], Node]:
    return lambda parts: getattr(parts, name)


def gen_node(parts: Parts) -> Node:
    return parts.gens[0]


def constant(value: object) -> Callable[[Parts], Node]:
    return lambda parts: parts.node(Constant(value))


def generating(**attributes: object) -> Callable[[Parts], Graph]:
    return ending(Generate(replace(ops.Gen("x"), **attributes)))


def chain(*operations: object) -> Callable[[Parts], Graph]:
    def change(parts: Parts) -> Graph:
        end = parts.join
        for op in operations:
            end = parts.node(op, end)
        return parts.graph(end)

    return change


def without_order(parts: Parts) -> Graph:
    graph = parts.graph()
    nodes = list(graph.nodes)
    place = graph.numbers[parts.said]
    nodes.insert(place - 1, nodes.pop(place))
    return replace(graph, nodes=tuple(nodes))


def twice(parts: Parts) -> Graph:
    graph = parts.graph()
    return replace(graph, nodes=(*graph.nodes, graph.nodes[3]))


def with_a_stranger(parts: Parts) -> Graph:
    graph = parts.graph()
    return replace(graph, nodes=tuple(node for node in graph.nodes if node is not parts.text))


def with_a_twin(parts: Parts) -> Graph:
    graph = parts.graph()
    twin = Node(Constant(None), ())
    return replace(graph, nodes=(*graph.nodes, twin), result=twin, variables=(*graph.variables, ("x", graph.result)))


def with_a_leftover(parts: Parts) -> Graph:
    graph = parts.graph()
    return replace(graph, nodes=(*graph.nodes, Node(Constant("nobody asks"))))


def in_a_circle(parts: Parts) -> Graph:
    graph = parts.graph()
    first, second = Node(Concat()), Node(Concat())
    object.__setattr__(first, "inputs", (second,))
    object.__setattr__(second, "inputs", (first,))
    return replace(graph, nodes=(*graph.nodes, first, second), result=second)


def changed(**attributes: object) -> Callable[[Parts], Graph]:
    return lambda parts: replace(parts.graph(), **attributes)


def with_a_second_begin(number: int) -> Callable[[Parts], Graph]:
    def change(parts: Parts) -> Graph:
        return parts.graph(None, parts.node(Begin("another", number)))

    return change


def with_other_ends(pick: Callable[[Parts], tuple[Node, ...]]) -> Callable[[Parts], Graph]:
    return lambda parts: replace(parts.graph(), ends=pick(parts))


def joining_a_stranger(parts: Parts) -> Graph:
    other = parts.node(Begin("another", 1))
    end = parts.node(Join("gather_variable"), parts.join, other)
    return parts.graph(end, other)


def joining_itself(parts: Parts) -> Graph:
    return parts.graph(parts.node(Join("gather_variable"), parts.join, parts.said))


def joining_the_parent(parts: Parts) -> Graph:
    inner = parts.node(Join("gather_variable"), parts.gens[0], parts.said)
    graph = parts.graph(None, inner)
    return replace(graph, ends=(parts.join, inner, parts.gens[1]))


def joining_another_turn(parts: Parts) -> Graph:
    fork = parts.node(Fork(1), parts.join)
    opened = parts.node(ops.RoleBegin("user"), parts.node(GetForkItem(0), fork))
    return parts.graph(parts.node(Join("concate_and_append"), fork, opened), opened)


def a_branch_twice(parts: Parts) -> Graph:
    again = Node(GetForkItem(0), (parts.fork,), Line("tips.py", 99))
    end = Node(Append(), (again, parts.text))
    graph = parts.graph()
    return replace(graph, nodes=(*graph.nodes, again, end), ends=(*graph.ends, end))


def deep(depth: int) -> object:
    template: object = Leaf(0)
    for _ in range(depth):
        template = [template]
    return template


BROKEN = [
    # the graph
    Broken("its name", changed(name=3), "the graph's name is 3"),
    Broken("a parameter", changed(parameters=("topic",)), "is no parameter; write Parameter"),
    Broken("a parameter's name", changed(parameters=(Parameter(""),)), "parameter of the graph is called ''"),
    Broken("parameters", changed(parameters=(Parameter("topic"), Parameter("topic"))), "two parameters .* 'topic'"),
    Broken("variables", lambda p: replace(p.graph(), variables=(("a", p.both), ("a", p.nothing))), "two variables"),
    Broken("a variable's name", lambda p: replace(p.graph(), variables=((1, p.both),)), "called 1; write"),
    Broken("a variable that is a place", lambda p: p.graph(value=p.join), "variable 'more' is a Join"),
    Broken("a result that is a place", lambda p: replace(p.graph(), result=p.join), "result is a Join"),
    Broken("a result from elsewhere", lambda p: replace(p.graph(), result=Node(Constant(1))), "result is a Constant"),
    Broken("an argument", valued(Argument("who")), r"no parameter 'who'; its parameters are count, topic"),
    # order
    Broken("the order", without_order, r"node 2 \(Append\) at tips.py:4 takes a Constant that comes after it"),
    Broken("a node that is not there", with_a_stranger, "takes a Constant that is not in the graph"),
    Broken("a node twice", twice, r"is in the graph twice, first as node 3"),
    Broken("equal nodes", with_a_twin, "says the same as node 14; equal nodes are one"),
    Broken("what nobody needs", with_a_leftover, r"node 15 \(Constant\) is needed by nothing"),
    Broken("a circle", in_a_circle, "takes a Concat that comes after it"),
    # inputs
    Broken("too few inputs", ending(Append()), "it takes 2 inputs, got 1"),
    Broken("too many inputs", ending(Append(), a("text"), a("topic")), "it takes 2 inputs, got 3"),
    Broken("inputs of a value", valued(Constant(4), a("text")), "it takes 0 inputs, got 1"),
    Broken("no choice", ending(Choose(ops.Select("s", ()))), "it takes 2 or more inputs, got 1"),
    Broken("no branch", ending(Join("gather_variable")), "it takes 2 or more inputs, got 1"),
    Broken("a place as text", ending(Append(), a("said")), "it takes a value where it has Append"),
    Broken("a value before", lambda p: p.graph(None, p.node(Fork(1), p.text)), "a place of a stream where it has"),
    Broken("a value joined", ending(Join("gather_variable"), a("text")), "a place of a stream where it has Constant"),
    Broken("the text of a value", valued(StreamText(), a("text")), "a place of a stream where it has Constant"),
    Broken("a place in a structure", valued(Structure([Leaf(0)]), a("said")), "a value where it has Append"),
    Broken("a function of a place", valued(Apply("upper"), a("said")), "a value where it has Append"),
    Broken("a list as text", ending(Append(), a("both")), "it takes text where it has a Structure"),
    Broken("a number as text", ending(Append(), constant(5)), r"it takes text where it has 5; write str\(value\)"),
    Broken("None in a text", valued(Concat(), a("nothing")), "it takes text where it has None"),
    Broken("a place as picture", ending(Look(), a("said")), "a value where it has Append"),
    Broken("an empty choice", ending(Choose(ops.Select("s", ())), constant("")), "the choice '' is empty"),
    Broken("a choice twice", ending(Choose(ops.Select("s", ())), a("text"), a("text")), "'Tips about ' is given twice"),
    Broken("a branch of a text", lambda p: p.graph(None, p.node(GetForkItem(0), p.said)), "begins at a Fork, and not"),
    Broken("a branch too many", lambda p: p.graph(None, p.node(GetForkItem(2), p.fork)), "fork of 2 has no branch 2"),
    Broken("a name that is not set", valued(Variable("top"), gen_node), "reads 'top' of a Generate that sets 'tip'"),
    Broken("an object not set", valued(Object("top"), gen_node), "reads 'top' of a Generate that sets 'tip'"),
    Broken("a name of a text", valued(Variable("tip"), a("said")), "reads 'tip' of a Append that sets no variable"),
    Broken("a text of one", valued(Variable("s", 0), lambda p: choice(p)), "reads text 0 of 's', which has one only"),
    Broken("a leaf too many", valued(Structure([Leaf(1)]), a("text")), r"has Leaf\(1\) and it has 1 inputs"),
    Broken("a leaf too few", valued(Structure([]), a("text")), r"no Leaf\(0\)"),
    Broken("a deep template", valued(Structure(deep(40)), a("text")), "nested deeper than 30"),
    # attributes
    Broken("an operation", valued("say"), "str is no operation of a graph"),
    Broken("a fork's size", ending(Fork(0)), "size=0; write an integer of at least 1"),
    Broken("a fork's kind", ending(Fork(True)), "size=True; write an integer"),
    Broken("a role", chain(ops.RoleBegin("judge")), "role='judge'; write one of system, user"),
    Broken("a scope's name", chain(ops.VarScopeBegin("")), "name=''; write a non-empty string"),
    Broken("a time", chain(ops.CachePoint(0.0)), "ttl=0.0; write seconds as a float, up to 86400"),
    Broken("a time's kind", chain(ops.CachePoint("1h")), "ttl='1h'; write seconds"),
    Broken("a tenant", ending(Isolate(), constant("a/b")), r"private\('a/b'\): write 1 to 128"),
    Broken("a tenant's kind", ending(Isolate(), constant(7)), r"private\(7\): write 1 to 128"),
    Broken("a place as tenant", ending(Isolate(), a("said")), "a value where it has Append"),
    Broken("frames", ending(Look(0), constant(b"x")), "num_frames=0"),
    Broken("a mode", ending(Join("both"), gen_node), "mode='both'; write one of gather_variable"),
    Broken("a begin", lambda p: p.graph(None, p.node(Begin("x", -1))), "number=-1"),
    Broken("an index", valued(Variable("tip", -1), gen_node), "index=-1"),
    Broken("a gen", ending(Generate("x")), r"gen='x'; write an umbel.gen"),
    Broken("a gen's name", generating(name=""), "gen.name=''"),
    Broken("a gen's tries", generating(max_tries=11), "gen.max_tries=11; write an integer from 1 to 10"),
    Broken("a gen's switch", generating(allow_best_effort=1), "gen.allow_best_effort=1; write True or False"),
    Broken("a gen's constraint", generating(constraint="[a-z]"), "gen.constraint is of type str; .* ConstraintSpec"),
    Broken("a gen's result", generating(result=int), "gen.result is of type type"),
    Broken("a gen's healing", generating(token_healing="yes"), "gen.token_healing is of type str; .* bool or None"),
    Broken("an option", generating(options={"heat": 1}), "no sampling parameter 'heat'"),
    Broken("an option's value", generating(options={"temperature": -1}), "temperature=-1 is out of range"),
    Broken("an option's kind", generating(options={"stop": "\n"}), "options.stop is of type str; it has to be tuple"),
    Broken("options", generating(options=3), "options=3; write a dict"),
    Broken("two options", generating(options={"min_tokens": 9, "max_tokens": 8}), "min_tokens=9 is more than"),
    Broken("a default", ending(Generate(ops.Gen("x"), {"top_k": 0})), "defaults: top_k=0 keeps no token"),
    Broken("a draw's default", ending(Choose(ops.Select("s", ()), {"seed": -1}), a("text")), "defaults: seed=-1"),
    Broken("tags", ending(Generate(ops.Gen("x"), {}, ("<think>",))), r"tags=\('<think>',\)"),
    Broken("a select", ending(Choose(ops.Gen("x")), a("text")), "write an umbel.select"),
    Broken("a select's choices", ending(Choose(ops.Select("s", ("a",))), a("text")), "choices are inputs"),
    Broken("a select's method", ending(Choose(ops.Select("s", (), "best")), a("text")), "select.method='best'"),
    Broken("a select's heat", ending(Choose(ops.Select("s", (), temperature=-1)), a("text")), "select.temperature=-1"),
    Broken("a function", valued(Apply("eval"), a("text")), "no function 'eval' of text; "),
    Broken("a constant too few", valued(Apply("zfill"), a("text")), "zfill takes 1 constants .*, got 0"),
    Broken("a constant too many", valued(Apply("strip", ("a", "b")), a("text")), "strip takes 0 to 1 constants"),
    Broken("a constant's kind", valued(Apply("center", ("9",)), a("text")), "center takes an integer, got '9'"),
    Broken("a key", valued(Apply("item", ((1, b"x"),)), a("text")), "item takes text, an integer, None or a tuple"),
    Broken("a step", valued(Apply("slice", (0, 1, 0)), a("text")), "slice takes a step other than 0"),
    # streams
    Broken("two ways on", lambda p: p.graph(None, p.node(Append(), p.said, p.text)), "goes on from node 3 already"),
    Broken("two beginnings", with_a_second_begin(0), "stream 0 has begun already, with node 0"),
    Broken("a branch twice", a_branch_twice, "says the same as node 6"),
    Broken("an end that is none", with_other_ends(lambda p: (p.join, *p.gens, p.said)), "ends and ends nothing"),
    Broken("an end twice", with_other_ends(lambda p: (p.join, *p.gens, p.join)), "among the graph's ends twice"),
    Broken("an end that is a value", with_other_ends(lambda p: (p.text, p.join, *p.gens)), "a Constant is among the"),
    Broken("an end that is missing", with_other_ends(lambda p: (p.join, p.gens[0])), "not among the graph's ends"),
    Broken("ends in another order", with_other_ends(lambda p: (*p.gens, p.join)), "the first end of a graph is that"),
    Broken("a stranger joined", joining_a_stranger, "what it joins as branch 0, node 15, left another stream"),
    Broken("itself joined", joining_itself, "what it joins as branch 0, node 3, left another stream"),
    Broken("the parent joined", joining_the_parent, "left another stream"),
    Broken("another turn joined", joining_another_turn, "branch 0 is inside user turn and its parent inside no turn"),
    Broken("turns in turns", chain(ops.RoleBegin("user"), ops.RoleBegin("user")), "cannot begin inside an open user"),
    Broken("a turn that is not open", chain(ops.RoleEnd("user")), r"user_end\(\) without user_begin\(\)"),
    Broken("another scope", chain(ops.VarScopeBegin("a"), ops.VarScopeEnd("b")), r"the end of var_scope\('b'\)"),
]


def choice(parts: Parts) -> Node:
    """A select in a stream of its own."""
    return parts.node(Choose(ops.Select("s", ())), parts.node(Begin("another", 1)), parts.text)
