"""Random graphs with every operation that there is, for tests of what has to hold for all of them."""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
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
from umbel.lang.generation import gen

# Every character that a Python string can hold, halves of surrogate pairs among them.
TEXTS = st.text(st.characters(), max_size=6) | st.sampled_from(["", "\0", "\ud83d\ude00", "\0d83d", '"\\', "Q: "])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | st.integers(), inner, max_size=3)
        | st.sets(TEXTS, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=6,
)
GENS = st.sampled_from(
    [
        gen("x"),
        gen("y", max_tokens=5, stop=["\n", "."]),
        gen("x", n=3, temperature=0.5, seed=1, logit_bias={7: -1.5, 3: 2}),
        gen(),
        gen("number", dtype=int),
        gen("truth", dtype=bool),
        gen("list", json_schema=list[dict[str, int | None]], json_whitespace="compact"),
        gen("word", regex="[a-z]+", token_healing=False, max_tries=2, allow_best_effort=True),
    ]
)
APPLICATIONS = st.sampled_from(
    [
        Apply("upper"),
        Apply("str"),
        Apply("center", (10, "*")),
        Apply("slice", (None, 3, None)),
        Apply("item", ("key",)),
        Apply("format", (">8",)),
    ]
)
LINES = st.none() | st.builds(Line, st.sampled_from(["a.py", "ö.py"]), st.integers(1, 99), st.sampled_from(["", "f"]))
ROLES = st.sampled_from(["system", "user", "assistant"])


@dataclass(frozen=True)
class Stream:
    """Where a growing stream stands.

    `fork`: the branches that were forked off it and can be joined.
    """

    end: Node
    role: str | None = None
    scopes: tuple[str, ...] = ()
    names: tuple[tuple[str, Node], ...] = ()
    fork: tuple[int, ...] = ()


@dataclass
class Growth:
    """A graph that is being drawn: its streams, and the values that anything may take by now."""

    draw: st.DrawFn
    builder: Builder = field(default_factory=Builder)
    streams: list[Stream] = field(default_factory=list)
    runs: int = 0

    def node(self, op: object, *inputs: Node) -> Node:
        return self.builder.node(op, inputs, self.draw(LINES))

    def begin(self) -> None:
        self.streams.append(Stream(self.node(Begin(f"program {self.runs}", self.runs))))
        self.runs += 1

    def text(self) -> Node:
        names = [name for stream in self.streams for name in stream.names]
        match self.draw(st.sampled_from(["constant", "argument", "variable", "apply", "concat", "stream"])):
            case "argument":
                return self.node(Argument(self.draw(st.sampled_from(["a", "b"]))))
            case "variable" if names:
                name, setter = self.draw(st.sampled_from(names))
                several = isinstance(setter.op, Generate) and setter.op.gen.options.get("n", 1) > 1
                return self.node(Variable(name, 1 if several else None), setter)
            case "apply":
                return self.node(self.draw(APPLICATIONS), self.text())
            case "concat":
                return self.node(Concat(), *(self.text() for _ in range(self.draw(st.integers(0, 2)))))
            case "stream":
                return self.node(StreamText(), self.draw(st.sampled_from(self.streams)).end)
            case _:
                return self.node(Constant(self.draw(TEXTS)))

    def grow(self) -> None:
        number = self.draw(st.integers(0, len(self.streams) - 1))
        stream = self.streams[number]
        kinds = ["say", "generate", "choose", "look", "isolate", "role", "scope", "point", "fork", "join", "begin"]
        match self.draw(st.sampled_from(kinds)):
            case "generate":
                op = Generate(self.draw(GENS), {"temperature": 0}, self.draw(st.sampled_from([None, ("<t>", "</t>")])))
                stream = self.named(replace(stream, end=self.node(op, stream.end)), op.gen.name)
            case "choose":
                op = Choose(ops.Select("s", (), temperature=0.5), {"seed": 3})
                choices = [self.node(Constant(text)) for text in ("yes", "no")]
                stream = self.named(replace(stream, end=self.node(op, stream.end, *choices)), "s")
            case "look":
                source = self.node(Constant(self.draw(st.binary(min_size=1, max_size=9))))
                stream = replace(stream, end=self.node(Look(self.draw(st.sampled_from([None, 4]))), stream.end, source))
            case "isolate":
                tenant = self.draw(st.sampled_from([Constant("acme"), Argument("a")]))
                stream = replace(stream, end=self.node(Isolate(), stream.end, self.node(tenant)))
            case "point":
                ttl = self.draw(st.sampled_from([0.5, 300.0]))
                stream = replace(stream, end=self.node(ops.CachePoint(ttl), stream.end))
            case "role" if stream.role is None:
                role = self.draw(ROLES)
                stream = replace(stream, role=role, end=self.node(ops.RoleBegin(role), stream.end))
            case "role" if stream.role is not None:
                stream = replace(stream, role=None, end=self.node(ops.RoleEnd(stream.role), stream.end))
            case "scope" if self.draw(st.booleans()) or not stream.scopes:
                name = self.draw(st.sampled_from(["p", "q"]))
                end = self.node(ops.VarScopeBegin(name), stream.end)
                stream = replace(stream, scopes=(*stream.scopes, name), end=end)
            case "scope":
                name = stream.scopes[-1]
                end = self.node(ops.VarScopeEnd(name), stream.end)
                stream = self.named(replace(stream, scopes=stream.scopes[:-1], end=end), name)
            case "fork" if len(self.streams) < 8:
                size = self.draw(st.integers(1, 3))
                fork = self.node(Fork(size), stream.end)
                first = len(self.streams)
                for index in range(size):
                    self.streams.append(replace(stream, end=self.node(GetForkItem(index), fork), fork=()))
                stream = replace(stream, end=fork, fork=tuple(range(first, first + size)))
            case "join" if stream.fork:
                branches = [self.streams[branch] for branch in stream.fork]
                same = all(branch.role == stream.role for branch in branches)
                mode = self.draw(st.sampled_from(["gather_variable", *(["concate_and_append"] if same else [])]))
                stream = replace(
                    stream, end=self.node(Join(mode), stream.end, *(branch.end for branch in branches)), fork=()
                )
            case "begin" if self.runs < 3:
                self.begin()
                return
            case _:
                stream = replace(stream, end=self.node(Append(), stream.end, self.text()))
        self.streams[number] = stream

    def named(self, stream: Stream, name: str | None) -> Stream:
        return stream if name is None else replace(stream, names=(*stream.names, (name, stream.end)))

    def graph(self) -> Graph:
        values = {name: self.node(Variable(name), setter) for name, setter in self.streams[0].names}
        values["kept"] = self.node(Constant(self.draw(VALUES)))
        members = list(values.values())
        leaves = [Leaf(index) for index in range(len(members))]
        result = self.node(Structure({"all": leaves, "more": (None, self.draw(VALUES))}), *members)
        objects = [self.node(Object(name), setter) for name, setter in self.streams[0].names]
        if objects:
            values["objects"] = self.node(Structure([Leaf(index) for index in range(len(objects))]), *objects)
        parameters = (Parameter("a"), Parameter("b", False, self.draw(VALUES)))
        return self.builder.graph(
            "program", parameters, (stream.end for stream in self.streams), values.items(), result
        )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph of up to eight streams."""
    growth = Growth(draw)
    growth.begin()
    for _ in range(draw(st.integers(0, 12))):
        growth.grow()
    return growth.graph()
