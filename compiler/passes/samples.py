"""Asks for samples of one prompt with one call.

with s.fork(8) as f:                               one gen of branch 0, with n=8; the other branches have the
    f += "A: " + gen("answer", temperature=1)      second text, the third, ...
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...lang.ops import RoleBegin, RoleEnd
from ...lang.sampling import MAX_N
from ..graph import Graph, Node, frozen
from ..operations import Append, Apply, Generate, Join, Object, StreamText, Variable
from .equal_nodes import EqualNodes, appended_streams, is_deterministic, name_of, named, read_of
from .rules import PassResult, Rule, Site, apply_rules, call_label, gathers_variables


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
            if number not in appended and _is_sample(graph, node) and _is_last(graph, stream[index:]):
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
