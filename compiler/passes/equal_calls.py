"""Makes equal calls once: branches that begin alike are one branch as far as they are alike.

Fork ─┬► "Is it" ─► select x ─► " So: " ─► gen y        Fork ─► "Is it" ─► select x ─► Fork ─► " So: " ─► gen y
      └► "Is it" ─► select x ─► " But: " ─► gen z                                       └────► " But: " ─► gen z
"""

from collections.abc import Sequence

from ..graph import STREAM_OPERATIONS, Graph, Node
from ..operations import Choose, Fork, Generate, GetForkItem, Object, Variable
from .equal_nodes import EqualNodes, appended_streams, name_of, named, read_of
from .rules import PassResult, Replacement, Rule, Site, apply_rules, call_label, shrink_rules


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
