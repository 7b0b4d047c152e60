"""Makes equal calls once, and asks for samples of one prompt with one call.

Branches that begin alike are one branch as far as they are alike (`merge_equal`):

Fork ─┬► "Is it" ─► select x ─► " So: " ─► gen y        Fork ─► "Is it" ─► select x ─► Fork ─► " So: " ─► gen y
      └► "Is it" ─► select x ─► " But: " ─► gen z                                       └────► " But: " ─► gen z

Samples of one prompt are the texts of one call (`merge_samples`):

with s.fork(8) as f:                               one gen of branch 0, with n=8; the other branches have the
    f += "A: " + gen("answer", temperature=1)      second text, the third, ...

`EqualNodes` finds the same operations after the same prompt, in branches of one fork.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...interpreter.stream import REASONING_SUFFIX
from ...lang.ops import RoleBegin, RoleEnd, VarScopeEnd
from ...lang.sampling import MAX_N
from ..graph import STREAM_OPERATIONS, Graph, Node, frozen
from ..operations import (
    Append,
    Apply,
    Begin,
    Choose,
    Fork,
    Generate,
    GetForkItem,
    Join,
    Object,
    Operation,
    Options,
    StreamText,
    Variable,
)
from .rules import PassResult, Replacement, Rule, Site, apply_rules, call_label, gathers_variables, shrink_rules


class EqualNodes:
    """The equal nodes of one graph.

    Attributes:
        first: node → the first one of the graph that is the same. Calls are, where their kind is deterministic and
            their prompts are the same.
        place: stream node → what is the same object where prompts are the same.
    """

    def __init__(self, graph: Graph) -> None:
        self.first: dict[Node, Node] = {}
        self.place: dict[Node, object] = {}
        self._graph = graph
        self._branches: dict[object, object] = {}  # stream and place that branches leave → their beginning
        known: dict[object, Node] = {}
        for node in graph.nodes:
            self.first[node] = known.setdefault(self._key(node), node)
            if node.in_stream:
                self.place[node] = self._place(node)

    def _key(self, node: Node) -> object:
        op = node.op
        if not node.in_stream:
            taken = tuple(self.first[value] for value in node.inputs)
            return frozen(op) if not isinstance(op, Variable | Object) else _read(op, node.inputs[0]), taken
        before = node.before
        if before is None or isinstance(op, Fork | Join):
            return node  # streams and what ties them together are what they are
        if isinstance(op, Generate | Choose):
            if not is_deterministic(self._graph, node) or _captures(node):
                return node
            said: object = frozen(named(op, None))
        else:
            said = frozen(op)
        return said, self.place[before], tuple(self.first[value] for value in node.inputs[1:])

    def _place(self, node: Node) -> object:
        match node.op:
            case GetForkItem():
                # The same for all that leave here, and another than for the stream that goes on.
                fork = node.inputs[0]
                key = self._graph.stream_of[fork], self.place[_leaving(fork)]
                return self._branches.setdefault(key, object())
            case _:
                return self.first[node]


def _leaving(fork: Node) -> Node:
    """Returns the last thing before a fork that its branches see: neither forks nor joins of variables say anything."""
    node = fork
    while isinstance(node.op, Fork) or (isinstance(node.op, Join) and gathers_variables(node.op)):
        node = node.inputs[0]
    return node


def _captures(call: Node) -> bool:
    """Returns whether a call sets variables by captures. It stands for itself: their names are no names of the call."""
    return isinstance(call.op, Generate) and call.op.gen.captures is not None


def _read(op: Variable | Object, setter: Node) -> object:
    """Returns what is read, whatever it is called. A scope says its name, and a call has one name or two."""
    if _captures(setter):
        return type(op), op.name, getattr(op, "index", None)
    called = "thinking" if isinstance(setter.op, Generate) and op.name != setter.op.gen.name else "text"
    return type(op), called, getattr(op, "index", None)


def named(op: Operation, name: str | None) -> Generate | Choose:
    """Returns the call under another name; without one it is what a model sees of it."""
    if isinstance(op, Generate):
        return replace(op, gen=replace(op.gen, name=name))
    assert isinstance(op, Choose), "these are the calls"
    return replace(op, select=replace(op.select, name=name))


def is_deterministic(graph: Graph, call: Node) -> bool:
    """Returns whether the same prompt gives the same answer, in every run and on a backend that is deterministic at
    all: the best of choices, greedy text, and text with a seed. What a run may set itself does not count."""
    match call.op:
        case Choose(select):
            return select.temperature == 0
        case Generate():
            options = _certain(graph, call)
            return options.get("temperature") == 0 or options.get("seed") is not None
    raise AssertionError(f"{type(call.op).__name__} is no call")


def _certain(graph: Graph, call: Node) -> Options:
    """Returns sampling fields that no options of a run override: those of the call, and in a nested run all."""
    op = call.op
    assert isinstance(op, Generate), "only these have sampling fields"
    return {**op.defaults, **op.gen.options} if _is_nested(graph, call) else op.gen.options


def _is_nested(graph: Graph, node: Node) -> bool:
    """Returns whether a node stands in a run inside of the program, or a branch of one."""
    stream: int = graph.stream_of[node]
    while (parents := graph.parents(stream)) is not None:
        stream = parents[0]
    begin = graph.streams[stream][0].op
    return isinstance(begin, Begin) and begin.number > 0


def read_of(setter: Node, op: Variable | Object, old: Node) -> Variable | Object:
    """Returns a read of call `old`, of `setter` in its place, which may have another name."""
    name = name_of(setter)
    assert name is not None, "a call that is read has a name"
    thinking = isinstance(old.op, Generate) and op.name != old.op.gen.name
    return replace(op, name=name + REASONING_SUFFIX if thinking else name)


def name_of(call: Node) -> str | None:
    match call.op:
        case Generate(gen):
            return gen.name
        case Choose(select):
            return select.name
        case VarScopeEnd(name):
            return name
    raise AssertionError(f"{type(call.op).__name__} sets nothing")


def appended_streams(graph: Graph) -> set[int]:
    """Returns streams whose text a join appends to another one."""
    joins = (node for node in graph.nodes if isinstance(node.op, Join) and not gathers_variables(node.op))
    return {graph.stream_of[end] for join in joins for end in join.inputs[1:]}


def merge_equal(graph: Graph) -> PassResult:
    """Law: on a backend that is deterministic the same variables, and the prompts of the calls that are made are the
    same, part by part. A call is left out where another branch of the same fork makes the same one at the same prompt.

    That holds for `select` at temperature 0, and for a `gen` that says temperature=0 or a seed itself (in a nested run
    also by the defaults of its program). What a decorator says for all of a program does not count, for a run may say
    otherwise. Branches whose text is appended to their parent are left as they are, and so are samples without a seed.
    """
    plan = _Plan(graph)
    if not plan.same:
        return PassResult(graph, {})
    rewritten, _ = apply_rules(
        graph,
        (
            Rule("merged", STREAM_OPERATIONS, plan.merge),
            *shrink_rules(graph, plan.merged_branches),
            Rule("read", (Variable, Object), plan.read),
        ),
    )
    calls = [node for node in plan.same if isinstance(node.op, Generate | Choose)]
    notes = tuple(f"{call_label(node)} is {call_label(plan.same[node])}" for node in calls)
    return PassResult(rewritten, {"branch merged": len(plan.merged_branches)}, len(calls), notes)


class _Plan:
    """Knows which node is the same as which.

    Attributes:
        same: node of a branch → that of another branch which stands for it.
        merged_branches: the `GetForkItem`s of branches that begin inside of another one, or are no more.
    """

    def __init__(self, graph: Graph) -> None:
        self.same: dict[Node, Node] = {}
        self.merged_branches: set[Node] = set()
        self._leaving: dict[Node, int] = {}  # node → how many branches leave after it
        self._rest: dict[Node, int] = {}  # last node of what was merged → which of these its branch is
        self._names: dict[Node, str] = {}
        self._reads: dict[Node, list[Node]] = {}  # what stands for others → reads of it and of them
        equal_nodes = EqualNodes(graph)
        appended = appended_streams(graph)
        for number, stream in enumerate(graph.streams):
            # A branch that is looked at before it says anything is not looked at inside of another one.
            if number not in appended and graph.users[stream[0]] == stream[1:2]:
                shared = _shared(stream, equal_nodes)
                if shared:
                    self._add(stream, shared, equal_nodes)
        self._note_reads(graph)

    def _add(self, stream: Sequence[Node], shared: Sequence[Node], equal_nodes: EqualNodes) -> None:
        self.merged_branches.add(stream[0])
        for node in shared:
            first = equal_nodes.first[node]
            self.same[node] = first
            if isinstance(node.op, Generate | Choose) and (name := name_of(node)) and not name_of(first):
                self._names.setdefault(first, name)
        if len(shared) + 1 < len(stream):
            last = equal_nodes.first[shared[-1]]
            self._rest[shared[-1]] = self._leaving.setdefault(last, 0)
            self._leaving[last] += 1

    def _note_reads(self, graph: Graph) -> None:
        standing = set(self.same.values())
        for node in graph.nodes:
            if isinstance(node.op, Variable | Object):
                first = self.same.get(node.inputs[0], node.inputs[0])
                if first in standing:
                    self._reads.setdefault(first, []).append(node)

    # -------------------------------------------------------------------------------- rules

    def merge(self, site: Site) -> Node | Replacement | None:
        node, builder = site.node, site.builder
        if node in self.merged_branches:
            return Replacement(site.inputs[0], site.inputs[0])
        if node in self.same:
            first = self.same[node]
            place = site.places[first]
            if node in self._rest:
                place = builder.node(GetForkItem(self._rest[node]), (place,), node.line)
            return Replacement(site.nodes[first], place)
        if node not in self._leaving and node not in self._names and node not in self._reads:
            return None
        op = named(node.op, self._names[node]) if node in self._names else node.op
        made = builder.node(op, site.inputs, node.line)
        for read in self._reads.get(node, ()):  # before the joins that bring it back, as if branches had set it
            assert isinstance(read.op, Variable | Object), "these are reads"
            builder.node(read_of(made, read.op, read.inputs[0]), (made,), read.line)
        if node not in self._leaving:
            return made
        return Replacement(made, builder.node(Fork(self._leaving[node]), (made,), node.line))

    def read(self, site: Site) -> Node | None:
        node, setter = site.node, site.node.inputs[0]
        if setter not in self.same:
            return None
        assert isinstance(node.op, Variable | Object), "the pattern says so"
        return site.builder.node(read_of(site.inputs[0], node.op, setter), site.inputs, node.line)


def _shared(stream: Sequence[Node], equal_nodes: EqualNodes) -> Sequence[Node]:
    """Returns what a branch has in common with earlier ones, up to the last call of it."""
    if not isinstance(stream[0].op, GetForkItem):
        return ()
    count = 0
    for index, node in enumerate(stream[1:], start=1):
        if equal_nodes.first[node] is node:
            break
        if isinstance(node.op, Generate | Choose):
            count = index
    return stream[1 : count + 1]


def merge_samples(graph: Graph) -> PassResult:
    """Law: the variables have the same distribution. They have other values than before, as any two runs do.

    Merged are a `gen` of branches that leave one place, with the same text since then and the same parameters, without
    a seed and with n=1, if nothing after them in their branch depends on their text: no other call, no fork, no scope,
    no read of the text, and no parent that appends it. A run that is given a seed gives such branches one text each
    time; merged they get different ones.

    The backend has to take n above 1.
    """
    groups = _groups(graph)
    share = {call: _Share(group, index) for group in groups for index, call in enumerate(group.calls)}
    if not share:
        return PassResult(graph, {})

    def ask_once(site: Site) -> Node | None:
        mine = share.get(site.node)
        if mine is None:
            return None
        builder, line = site.builder, site.node.line
        if mine.index == 0:
            made = builder.node(mine.group.request, site.inputs, line)
            for index in range(len(mine.group.calls)):  # before the joins that bring them back
                builder.node(Variable(mine.group.name, index), (made,), line)
            return made
        request = site.nodes[mine.group.calls[0]]
        text = builder.node(Variable(mine.group.name, mine.index), (request,), line)
        return builder.node(Append(), (site.inputs[0], text), line)

    def read(site: Site) -> Node | None:
        mine = share.get(site.node.inputs[0])
        if mine is None:
            return None
        builder, op, line = site.builder, site.node.op, site.node.line
        request = site.nodes[mine.group.calls[0]]
        assert isinstance(op, Variable | Object), "the pattern says so"
        found = read_of(request, op, site.node.inputs[0])
        if isinstance(found, Variable):
            return builder.node(replace(found, index=mine.index), (request,), line)
        return builder.node(Apply("item", (mine.index,)), (builder.node(found, (request,), line),), line)

    rewritten, counts = apply_rules(
        graph, (Rule("asked once", (Generate,), ask_once), Rule("read", (Variable, Object), read))
    )
    saved = sum(len(group.calls) - 1 for group in groups)
    notes = tuple(f"{call_label(group.calls[0])} is asked for {len(group.calls)} texts at once" for group in groups)
    return PassResult(rewritten, {"request merged": saved} if counts else {}, saved, notes)


@dataclass(frozen=True, slots=True)
class _Group:
    """Calls that become one, of which the first makes it."""

    calls: Sequence[Node]
    name: str

    @property
    def request(self) -> Generate:
        op = named(self.calls[0].op, self.name)
        assert isinstance(op, Generate), "only these have several texts"
        return replace(op, gen=replace(op.gen, options={**op.gen.options, "n": len(self.calls)}))


@dataclass(frozen=True, slots=True)
class _Share:
    """The share of one call of a group: the text with its index."""

    group: _Group
    index: int


def _groups(graph: Graph) -> list[_Group]:
    equal_nodes = EqualNodes(graph)
    appended = appended_streams(graph)
    alike: dict[object, list[Node]] = {}
    for number, stream in enumerate(graph.streams):
        for index, node in enumerate(stream):
            if not isinstance(node.op, Generate):
                continue
            alone = number in appended or _captures(node)
            if not alone and _is_sample(graph, node) and _is_last(graph, stream[index:]):
                key = frozen(named(node.op, None)), equal_nodes.place[stream[index - 1]]
                alike.setdefault(key, []).append(node)
    groups: list[_Group] = []
    for calls in alike.values():
        name = next(filter(None, map(name_of, calls)), None)
        if name is None:  # nothing reads them: they are drop_unused's
            continue
        for start in range(0, len(calls), MAX_N):
            if len(calls[start : start + MAX_N]) > 1:
                groups.append(_Group(calls[start : start + MAX_N], name))
    return groups


def _is_sample(graph: Graph, call: Node) -> bool:
    """Returns whether the call draws one text, as far as it is known before a run."""
    op = call.op
    assert isinstance(op, Generate), "only these are samples"
    options = {**op.defaults, **op.gen.options}
    return (
        not is_deterministic(graph, call)
        and options.get("temperature") != 0
        and options.get("seed") is None
        and options.get("n", 1) == 1
    )


def _is_last(graph: Graph, rest: Sequence[Node]) -> bool:
    """Returns whether nothing depends on the text that a stream has from its first node on, `rest`."""
    for node in rest[1:]:
        gathering = isinstance(node.op, Join) and gathers_variables(node.op)
        if not gathering and not isinstance(node.op, Append | RoleBegin | RoleEnd):
            return False
    return not any(isinstance(user.op, StreamText) for node in rest for user in graph.users[node])
