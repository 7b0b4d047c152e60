"""Checks one node: its attributes, which a tracer, a pass or a file has made, and its inputs, as many and of such kinds
as `operations.py` says."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from ...fsm.composed import nodes as expressions
from ...interpreter.stream import REASONING_SUFFIX
from ...lang import ops, sampling
from ...lang.chat_template import ROLES
from ...lang.errors import ConstraintError, GraphError, ParameterError, remedy
from ...lang.ops import LONGEST_TTL, CachePoint, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ...lang.prompt import checked_tenant
from ...lang.protocol import ConstraintSpec
from ...lang.result import Captures, Result
from ...lang.sampling import MAX_N
from ...lang.state import JOIN_MODES
from ..graph import Node
from ..operations import (
    FUNCTIONS,
    MAX_NESTING,
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
    Operation,
    StreamText,
    Structure,
    Variable,
    captured_names,
)

OPERATIONS: Mapping[str, type] = {operation.__name__: operation for operation in get_args(Operation)}
# Function → the kinds of constants that it takes after the value, in order. Those after "|" may be left out; a
# letter stands for text, an Integer, Either of them or None, or any Key.
_ARGUMENTS: Mapping[str, str] = {
    "center": "i|t",
    "expandtabs": "|i",
    "format": "t",
    "item": "k",
    "ljust": "i|t",
    "lstrip": "|n",
    "multiply": "i",
    "removeprefix": "t",
    "removesuffix": "t",
    "replace": "tt|i",
    "rjust": "i|t",
    "rstrip": "|n",
    "slice": "ooo",
    "strip": "|n",
    "zfill": "i",
}
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "t": ((str,), "text"),
    "n": ((str, type(None)), "text or None"),
    "i": ((int,), "an integer"),
    "o": ((int, type(None)), "an integer or None"),
    "k": ((str, int, type(None), tuple), "text, an integer, None or a tuple of these"),
}


def check_attributes(op: Operation) -> None:
    """Checks what can be checked of an operation without its inputs.

    Raises:
        GraphError: an attribute that the operation cannot have; the message says which, and what to write.
    """
    match op:
        case Append() | Isolate() | StreamText() | Concat() | Constant() | Structure():
            pass
        case Begin(program, number):
            _text("program", program, empty=True)
            _integer("number", number, 0)
        case Generate(gen, defaults, tags):
            _gen(gen)
            _sampling(defaults, gen.options)
            _tags(tags)
        case Choose(select, defaults):
            _select(select)
            _sampling(defaults, {})
        case Look(num_frames):
            if num_frames is not None:
                _integer("num_frames", num_frames, 1)
        case RoleBegin(role) | RoleEnd(role):
            _one_of("role", role, ROLES)
        case VarScopeBegin(name) | VarScopeEnd(name) | Argument(name) | Object(name):
            _text("name", name)
        case CachePoint(ttl):
            if not isinstance(ttl, float) or not 0 < ttl <= LONGEST_TTL:
                raise GraphError(f"ttl={ttl!r}; write seconds as a float, up to {LONGEST_TTL:g}")
        case Fork(size):
            _integer("size", size, 1)
        case GetForkItem(index):
            _integer("index", index, 0)
        case Join(mode):
            _one_of("mode", mode, JOIN_MODES)
        case Variable(name, index):
            _text("name", name)
            if index is not None:
                _integer("index", index, 0)
        case Apply(function, arguments):
            _application(function, arguments)
        case _:
            raise GraphError(f"{type(op).__name__} is no operation of a graph; write one of {', '.join(OPERATIONS)}")


def check_inputs(node: Node) -> None:
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
        case Isolate():
            _count(node, 2)
            _check_tenant(node.inputs[1])
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


def _gen(gen: object) -> None:
    if not isinstance(gen, ops.Gen):
        raise GraphError(f"gen={gen!r}; write an umbel.gen(...)")
    if gen.name is not None:
        _text("gen.name", gen.name)
    _switch("gen.text_in_logprobs", gen.text_in_logprobs)
    _kind("gen.constraint", gen.constraint, ConstraintSpec | None)
    _kind("gen.result", gen.result, Result | None)
    _captured(gen)
    _kind("gen.token_healing", gen.token_healing, bool | None)
    _tries("gen", gen.max_tries, gen.allow_best_effort)


def _captured(gen: ops.Gen) -> None:
    _kind("gen.captures", gen.captures, Captures | None)
    if gen.captures is None:
        return
    if gen.constraint is None:
        raise GraphError("gen.captures: they are parts of a constraint, and there is none; leave them out")
    for name in gen.captures.results:
        _text("gen.captures: a name", name)
        if name == gen.name:
            raise GraphError(f"gen.captures: {name!r} is the name of the gen, too; rename one of them")
    if gen.constraint.kind == "expression":
        try:
            known = expressions.capture_names(expressions.read(gen.constraint.source))
        except ConstraintError as error:
            raise GraphError(f"gen.constraint: {error}") from None
        if known != set(gen.captures.results):
            raise GraphError(f"gen.captures: the constraint captures {sorted(known)}; write these")


def _select(select: object) -> None:
    if not isinstance(select, ops.Select):
        raise GraphError(f"select={select!r}; write an umbel.select(...)")
    if select.name is not None:
        _text("select.name", select.name)
    if select.choices != ():
        raise GraphError(f"select.choices={select.choices!r}; choices are inputs of the node, and stand nowhere else")
    _one_of("select.method", select.method, ops.CHOICES_METHODS)
    temperature = select.temperature
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
        raise GraphError(f"select.temperature={temperature!r}; write a number from 0 to 100")
    _tries("select", select.max_tries, select.allow_best_effort)
    if select.adapter is not None:
        _field("select", "adapter", select.adapter)


def _tries(owner: str, max_tries: object, allow_best_effort: object) -> None:
    _integer(f"{owner}.max_tries", max_tries, 1, ops.MAX_TRIES)
    _switch(f"{owner}.allow_best_effort", allow_best_effort)


def _tags(tags: object) -> None:
    match tags:
        case None:
            pass
        case (str(open_tag), str(close_tag)) if isinstance(tags, tuple) and open_tag and close_tag:
            pass
        case _:
            raise GraphError(f"tags={tags!r}; write two texts such as ('<think>', '</think>'), or None")


def _sampling(defaults: object, options: object) -> None:
    """Checks layers of sampling fields. A run adds its own between them, so fields are compared with each other only
    within the last layer."""
    for owner, layer in (("defaults", defaults), ("options", options)):
        if not isinstance(layer, Mapping):
            raise GraphError(f"{owner}={layer!r}; write a dict of sampling parameters")
        for name, value in layer.items():
            _field(owner, name, value)
    if isinstance(options, Mapping) and {"min_tokens", "max_tokens"} <= options.keys():
        _merged("options", {name: options[name] for name in ("min_tokens", "max_tokens")})


def _field(owner: str, name: object, value: Any) -> None:
    if not isinstance(name, str) or name not in sampling.FIELDS:
        raise GraphError(f"{owner} has no sampling parameter {name!r}; {remedy(str(name), sampling.FIELDS)}")
    if name in ("stop", "stop_regex", "stop_token_ids"):
        _kind(f"{owner}.{name}", value, tuple)
    elif name == "logit_bias":
        _kind(f"{owner}.{name}", value, dict)
    _merged(owner, {name: value} | ({"max_tokens": sampling.MAX_TOKENS} if name == "min_tokens" else {}))


def _merged(owner: str, fields: Mapping[str, Any]) -> None:
    try:
        sampling.merge(fields)
    except ParameterError as error:
        raise GraphError(f"{owner}: {error}") from None


def _application(function: object, arguments: object) -> None:
    if not isinstance(function, str) or function not in FUNCTIONS:
        raise GraphError(f"there is no function {function!r} of text; {remedy(str(function), FUNCTIONS)}")
    if not isinstance(arguments, tuple):
        raise GraphError(f"{function}: arguments={arguments!r}; write a tuple")
    required, _, optional = _ARGUMENTS.get(function, "").partition("|")
    if not len(required) <= len(arguments) <= len(required) + len(optional):
        most = len(required) + len(optional)
        wanted = str(most) if not optional else f"{len(required)} to {most}"
        raise GraphError(f"{function} takes {wanted} constants after the value, got {len(arguments)}")
    for letter, argument in zip(required + optional, arguments, strict=False):
        kinds, wanted = _KINDS[letter]
        if not isinstance(argument, kinds) or (isinstance(argument, tuple) and not _is_key(argument)):
            raise GraphError(f"{function} takes {wanted}, got {argument!r}")
    if function == "slice" and arguments[2] == 0:
        raise GraphError("slice takes a step other than 0; leave it out, which is None")


def _is_key(parts: tuple[object, ...]) -> bool:
    waiting: list[object] = list(parts)
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple):
            waiting.extend(part)
        elif not isinstance(part, str | int | None):
            return False
    return True


# ------------------------------------------------------------------------------------- single values


def _text(name: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise GraphError(f"{name}={value!r}; write a {'' if empty else 'non-empty '}string")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise GraphError(f"{name}={value!r}; write an integer {bound}")


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise GraphError(f"{name}={value!r}; write True or False")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise GraphError(f"{name}={value!r}; write one of {', '.join(known)}")


def _kind(name: str, value: object, kind: Any) -> None:  # Any: a class or a union of classes
    if not isinstance(value, kind):
        wanted = " or ".join(part.__name__ for part in (get_args(kind) or (kind,))).replace("NoneType", "None")
        raise GraphError(f"{name} is of type {type(value).__name__}; it has to be {wanted}")


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


def _check_tenant(taken: Node) -> None:
    _check_value(taken)
    if isinstance(taken.op, Constant):
        try:
            checked_tenant(taken.op.value)
        except ParameterError as error:
            raise GraphError(str(error)) from None


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
        case Generate(gen, _, tags):
            names = [] if gen.name is None else [gen.name]
            names += [gen.name + REASONING_SUFFIX] if tags is not None and gen.name is not None else []
            names += captured_names(gen)
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
