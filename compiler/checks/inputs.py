"""Checks the inputs of one node: as many, of such kinds, as `operations.py` says."""

from collections.abc import Iterable

from ...interpreter.stream import REASONING_SUFFIX
from ...lang.errors import GraphError
from ...lang.ops import VarScopeEnd
from ...lang.sampling import MAX_N
from ..graph import Node
from ..operations import (
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
    Leaf,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)

MAX_NESTING = 30  # of lists, tuples and dicts in one value; one that contains itself ends here, too


def check(node: Node) -> None:
    """Checks a node whose inputs have been checked, and whose attributes are right.

    Raises:
        GraphError: too many or too few inputs, one of a wrong kind, or one that does not set what is read of it.
    """
    match node.op:
        case Begin() | Constant() | Argument():
            _count(node, 0)
        case Append():
            _count(node, 2)
            _check_text(node.inputs[1])
        case Look():
            _count(node, 2)
            _check_value(node.inputs[1])
        case Choose():
            _count(node, 2, more=True)
            _check_choices(node.inputs[1:])
        case Join():
            _count(node, 2, more=True)
        case Variable() | Object():
            _count(node, 1)
            _check_setter(node.op, node.inputs[0])
        case Concat():
            for text in node.inputs:
                _check_text(text)
        case Structure(template):
            for value in node.inputs:
                _check_value(value)
            _check_leaves(template, len(node.inputs))
        case Apply():
            _count(node, 1)
            _check_value(node.inputs[0])
        case _:
            _count(node, 1)
    if isinstance(node.op, Join | StreamText) or node.before is not None:
        for taken in node.inputs if isinstance(node.op, Join) else node.inputs[:1]:
            _check_place(taken)
    if isinstance(node.op, GetForkItem):
        _check_branch(node.op, node.inputs[0])


def _count(node: Node, count: int, *, more: bool = False) -> None:
    if len(node.inputs) < count or (len(node.inputs) > count and not more):
        raise GraphError(f"it takes {count}{' or more' if more else ''} inputs, got {len(node.inputs)}")


def _check_place(taken: Node) -> None:
    if not taken.in_stream:
        raise GraphError(f"it takes a place of a stream where it has {type(taken.op).__name__}, which is a value")


def _check_value(taken: Node) -> None:
    if taken.in_stream:
        raise GraphError(f"it takes a value where it has {type(taken.op).__name__}, which is a place of a stream")


def _check_text(taken: Node) -> None:
    _check_value(taken)
    if isinstance(taken.op, Structure):
        raise GraphError("it takes text where it has a Structure; append its members one by one")
    if isinstance(taken.op, Constant) and not isinstance(taken.op.value, str):
        raise GraphError(f"it takes text where it has {taken.op.value!r}; write str(value)")


def _check_choices(choices: Iterable[Node]) -> None:
    written: set[str] = set()
    for choice in choices:
        _check_text(choice)
        if isinstance(choice.op, Constant):
            text = choice.op.value
            if not text or text in written:
                raise GraphError(f"the choice {text!r} is {'given twice' if text else 'empty'}; give different strings")
            written.add(text)


def _check_branch(item: GetForkItem, fork: Node) -> None:
    if not isinstance(fork.op, Fork):
        raise GraphError(f"a branch begins at a Fork, and not at a {type(fork.op).__name__}")
    if item.index >= fork.op.size:
        raise GraphError(f"a fork of {fork.op.size} has no branch {item.index}")


def _check_setter(op: Variable | Object, setter: Node) -> None:
    several = 0  # texts under one name
    match setter.op:
        case Generate(gen, _, tags) if gen.name is not None:
            names = [gen.name] if tags is None else [gen.name, gen.name + REASONING_SUFFIX]
            several = gen.options.get("n", MAX_N)  # a run may ask for more than the program does
        case Choose(select) if select.name is not None:
            names = [select.name]
        case VarScopeEnd(name):
            names = [name]
        case _:
            names = []
    if op.name not in names:
        sets = f"sets {' and '.join(map(repr, names))}" if names else "sets no variable"
        raise GraphError(f"it reads {op.name!r} of a {type(setter.op).__name__} that {sets}")
    if isinstance(op, Variable) and op.index is not None and (op.index >= several or several == 1):
        raise GraphError(f"it reads text {op.index} of {op.name!r}, which has {several if several > 1 else 'one only'}")


def _check_leaves(template: object, count: int) -> None:
    used: set[int] = set()
    waiting: list[tuple[object, int]] = [(template, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise GraphError(f"its template is nested deeper than {MAX_NESTING}, or contains itself")
        match part:
            case Leaf(index):
                if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
                    raise GraphError(f"its template has Leaf({index!r}) and it has {count} inputs")
                used.add(index)
            case list() | tuple():
                waiting.extend((member, depth + 1) for member in part)
            case dict():
                waiting.extend((member, depth + 1) for member in part.values())
    if len(used) < count:
        missing = next(index for index in range(count) if index not in used)
        raise GraphError(f"its template has no Leaf({missing}), and it has {count} inputs")
