"""Checks the attributes of one operation, which a tracer, a pass or a file has made."""

from collections.abc import Mapping
from typing import Any, get_args

from ...lang import ops, sampling
from ...lang.chat_template import ROLES
from ...lang.errors import GraphError, ParameterError, remedy
from ...lang.ops import RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ...lang.protocol import ConstraintSpec
from ...lang.result import Result
from ...lang.state import JOIN_MODES
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
    Look,
    Object,
    Operation,
    StreamText,
    Structure,
    Variable,
)
from ..text_functions import FUNCTIONS

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


def check(op: Operation) -> None:
    """Checks what can be checked of an operation without its inputs.

    Raises:
        GraphError: an attribute that the operation cannot have; the message says which, and what to write.
    """
    match op:
        case Append() | StreamText() | Concat() | Constant() | Structure():
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


def _gen(gen: object) -> None:
    if not isinstance(gen, ops.Gen):
        raise GraphError(f"gen={gen!r}; write an umbel.gen(...)")
    if gen.name is not None:
        _text("gen.name", gen.name)
    _switch("gen.text_in_logprobs", gen.text_in_logprobs)
    _kind("gen.constraint", gen.constraint, ConstraintSpec | None)
    _kind("gen.result", gen.result, Result | None)
    _kind("gen.token_healing", gen.token_healing, bool | None)
    _tries("gen", gen.max_tries, gen.allow_best_effort)


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
        raise GraphError(f"{function} takes {wanted} constants behind the value, got {len(arguments)}")
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
