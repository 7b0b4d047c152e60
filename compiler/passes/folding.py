"""Folds a graph: computes constant values, splits text into its pieces (`fold`), and appends constants that stand
together at once (`merge_text`). The prompts stay the same, part by part.

    Append "Q: " ─► Append "why" ─► Append "" ─► Generate        Append "Q: why" ─► Generate

Text is merged only between operations that append: whatever else stands in a stream (a scope, a fork, a turn) is a
border, and so is a place that a value looks at.
"""

from itertools import zip_longest
from typing import Any

from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Node
from ..operations import FUNCTIONS, Append, Apply, Begin, Choose, Concat, Constant, Generate, Leaf, Look, Structure
from .rules import PassResult, Replacement, Rule, Site, apply_rules

_MOST = 1 << 20  # a number in a call that would fold, and characters of what comes out: files hold what they hold
_PLAIN = (str, int, float, bool, bytes, type(None))


def fold(graph: Graph) -> PassResult:
    """Law: every prompt has the same parts, every variable the same value, every call stays."""
    return PassResult(*apply_rules(graph, (*_VALUES, Rule("taken apart", (Append,), _say_pieces))))


# ------------------------------------------------------------------------------------------ values


def _compute(site: Site) -> Node | None:
    """Computes a function of a constant. One that raises is left to raise when the program runs."""
    op, (value,) = site.node.op, site.inputs
    assert isinstance(op, Apply), "the pattern says so"
    if not isinstance(value.op, Constant) or not _is_small(op, value.op.value):
        return None
    try:
        result = FUNCTIONS[op.function](value.op.value, *op.arguments)
    except Exception:  # whatever the function says of this value
        return None
    return site.builder.node(Constant(result), (), site.node.line) if isinstance(result, _PLAIN) else None


def _is_small(op: Apply, value: object) -> bool:
    """Returns whether the result is small enough to compute: a file may pad a text to any width."""
    if not isinstance(value, str | int | float | bool | None):
        return False
    length = len(value) if isinstance(value, str) else 1
    for argument in op.arguments:
        if isinstance(argument, int) and abs(argument) * max(length, 1) > _MOST:
            return False
        if isinstance(argument, str) and op.function == "format" and any(map(str.isdigit, argument)):
            return len(argument) < 6
        if isinstance(argument, str) and len(argument) * max(length, 1) > _MOST:
            return False
    return True


def _pick(site: Site) -> Node | None:
    """Takes a member out of a list, tuple or dict that the graph builds."""
    op, (value,) = site.node.op, site.inputs
    assert isinstance(op, Apply), "the pattern says so"
    if op.function != "item" or not isinstance(value.op, Structure):
        return None
    try:
        member = value.op.template[op.arguments[0]]
    except (LookupError, TypeError):
        return None
    if isinstance(member, Leaf):
        return value.inputs[member.index]
    return site.builder.node(Constant(member), (), site.node.line) if isinstance(member, _PLAIN) else None


def _join_text(site: Site) -> Node | None:
    """Takes texts out of texts, joins constants side by side, and leaves out empty ones. A text of one that may be
    anything stays: it is what says that the one has to be text."""
    pieces: list[Node] = []
    for taken in site.inputs:
        for piece in taken.inputs if isinstance(taken.op, Concat) else (taken,):
            text = _text(piece)
            if text is not None and pieces and (before := _text(pieces[-1])) is not None:
                pieces[-1] = site.builder.node(Constant(before + text), (), pieces[-1].line)
            else:
                pieces.append(piece)
    if len(pieces) > 1:
        pieces = [piece for piece in pieces if _text(piece) != ""]
    if all(_text(piece) is not None for piece in pieces):
        return pieces[0] if pieces else site.builder.node(Constant(""), (), site.node.line)
    return None if tuple(pieces) == site.inputs else site.builder.node(site.node.op, pieces, site.node.line)


def _write_out(site: Site) -> Node | None:
    """Writes constants into the list, tuple or dict that they are in. One without anything that could be changed is a
    constant; lists and dicts are built anew in every run, as the program did."""
    op = site.node.op
    assert isinstance(op, Structure), "the pattern says so"
    inputs: list[Node] = []
    template = _filled(op.template, site.inputs, inputs)
    if not inputs and _is_fixed(template):
        return site.builder.node(Constant(template), (), site.node.line)
    if len(inputs) == len(site.inputs):
        return None
    return site.builder.node(Structure(template), inputs, site.node.line)


def _filled(template: Any, values: tuple[Node, ...], inputs: list[Node]) -> Any:  # Any: see Structure.template
    """Returns the template with plain constants at their leaves; `inputs` gets what stays a leaf."""
    match template:
        case Leaf(index):
            value = values[index]
            if isinstance(value.op, Constant) and isinstance(value.op.value, _PLAIN):
                return value.op.value
            if value not in inputs:
                inputs.append(value)
            return Leaf(inputs.index(value))
        case list():
            return [_filled(member, values, inputs) for member in template]
        case tuple():
            return tuple(_filled(member, values, inputs) for member in template)
        case dict():
            return {key: _filled(member, values, inputs) for key, member in template.items()}
    return template


def _is_fixed(template: object) -> bool:
    if isinstance(template, tuple):
        return all(map(_is_fixed, template))
    return isinstance(template, _PLAIN)


def _text(node: Node) -> str | None:
    return node.op.value if isinstance(node.op, Constant) and isinstance(node.op.value, str) else None


_VALUES = (
    Rule("computed", (Apply,), _compute),
    Rule("picked", (Apply,), _pick),
    Rule("joined", (Concat,), _join_text),
    Rule("written out", (Structure,), _write_out),
)


# ------------------------------------------------------------------------------------------ text that is said


def _say_pieces(site: Site) -> Replacement | None:
    """Appends a text that is put together piece by piece."""
    place, text = site.inputs
    if not isinstance(text.op, Concat) or not text.inputs:
        return None
    for piece in text.inputs:
        place = site.builder.node(site.node.op, (place, piece), site.node.line)
    return Replacement(place, place)


def merge_text(graph: Graph) -> PassResult:
    """Law: every prompt has the same parts (neighbouring text is one part anyway), every variable the same value.

    White space at the beginning and the end of a turn is the template's affair. The interpreter gives it the text of a
    turn in whatever pieces that comes (see `interpreter/position.py`).
    """
    runs = _runs(graph)
    swallowed = {node for run in runs.values() for node in run[:-1]}
    takes = takes_text(graph)

    def swallow(site: Site) -> Replacement | None:
        return Replacement(site.inputs[0], site.inputs[0]) if site.node in swallowed else None

    def join(site: Site) -> Node | None:
        run = runs.get(site.node)
        if run is None:
            return None
        text = "".join(_appended_text(node) or "" for node in run)
        constant = site.builder.node(Constant(text), (), run[0].inputs[1].line)
        return site.builder.node(Append(), (site.inputs[0], constant), run[0].line)

    def leave_out(site: Site) -> Replacement | None:
        """Leaves out empty text where nothing would be refused: after a turn that is owed it is an error, and stays
        one."""
        if _appended_text(site.node) != "" or site.node.before not in takes:
            return None
        return Replacement(site.inputs[0], site.inputs[0])

    graph, counts = apply_rules(
        graph,
        (
            Rule("merged into the next", (Append,), swallow),
            Rule("merged", (Append,), join),
            Rule("left out", (Append,), leave_out),
        ),
    )
    del counts["merged"]  # the same thing seen from its other end
    return PassResult(graph, counts)


def _runs(graph: Graph) -> dict[Node, list[Node]]:
    """Returns constants that can be appended at once, at least two, under the last of them."""
    runs: dict[Node, list[Node]] = {}
    for stream in graph.streams:
        run: list[Node] = []
        for node, following in zip_longest(stream, stream[1:]):
            text = _appended_text(node)
            if text is None:
                continue
            run.append(node)
            if graph.users[node] == (following,) and _appended_text(following) is not None:
                continue
            if len(run) > 1:
                runs[node] = run
            run = []
    return runs


def _appended_text(node: Node | None) -> str | None:
    """Returns the constant that a node appends."""
    if node is None or not isinstance(node.op, Append):
        return None
    said = node.inputs[1].op
    return said.value if isinstance(said, Constant) and isinstance(said.value, str) else None


def takes_text(graph: Graph) -> frozenset[Node]:
    """Returns places after which text is never refused: no turn is owed there. A template may refuse text after a turn
    that it shows only together with the next one (see `interpreter/position.py`)."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.in_stream:
            here = _takes(node)
            if here or (here is None and node.inputs[0] in found):
                found.add(node)
    return frozenset(found)


def _takes(node: Node) -> bool | None:
    """Returns whether the node takes text after it; None: as the node before."""
    match node.op:
        case RoleEnd():
            return False
        case Begin() | RoleBegin() | Append() | Generate() | Choose() | Look():
            return True
    return None
