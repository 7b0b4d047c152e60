"""Digests that tell whether a journal is of this program and of these arguments.

A program is its function and the functions that it calls, as far as they can be known: names of its module and of its
closure that hold functions or programs of the user's own files, and what those call in turn. Installed packages and
umbel are not in it. A function counts by its source without comments and blank lines, so that neither ends a run's use
of its journal; without a source, by its bytecode. What cannot be known (a method that is looked up on an object, a
value of a global variable) does no harm: calls are found by the digest of their prompt, too.

Arguments are digests by name. Of an object whose content cannot be known its class counts.
"""

import enum
import inspect
import io
import os
import sysconfig
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from inspect import BoundArguments
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from ...lang.agents.dialogue import dialogue_of
from ...lang.prompt import Generated, Media, Part, Private, Text
from ...lang.protocol import GenRequest, ScoreRequest

_ROOT = __name__.partition(".")[0]
_MOST_FUNCTIONS = 1_000  # of a program; more are not looked at
_MOST_DEPTH = 32  # of arguments inside of each other
_INSTALLED = tuple({os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values() if path})


def digest_of(data: bytes) -> str:
    """Returns 32 hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()


# -------------------------------------------------------------------------------- programs


def parts_of(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the digests of a function and of those it calls, by name."""
    found: dict[str, str] = {}
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(found) < _MOST_FUNCTIONS:
        each = inspect.unwrap(waiting.pop(0))
        if not isinstance(each, FunctionType) or id(each.__code__) in seen:
            continue
        seen.add(id(each.__code__))
        name = each.__qualname__ if each.__module__ == function.__module__ else f"{each.__module__}.{each.__qualname__}"
        while name in found:
            name += "'"
        found[name] = digest_of(_source_of(each).encode("utf-8", "surrogatepass"))
        waiting += _called_by(each)
    return found


def _source_of(function: FunctionType) -> str:
    """Returns the source without comments and blank lines; a text of the bytecode where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        return _without_comments(source)
    except (OSError, TypeError, tokenize.TokenError, SyntaxError):
        return "".join(f"{code.co_code.hex()} {code.co_names}" for code in _codes(function.__code__))


def _without_comments(source: str) -> str:
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _called_by(function: FunctionType) -> list[Any]:
    """Returns the functions of the user that `function` may call."""
    values: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    for code in _codes(function.__code__):
        named = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        modules = [vars(each) for each in named if isinstance(each, ModuleType)]
        values += named
        values += [module[name] for module in modules for name in code.co_names if name in module]
    return [each for each in map(_function_of, values) if each is not None]


def _function_of(value: Any) -> FunctionType | None:
    """Returns the function of a value: of a program its body's. None for what is not of the user's own files."""
    body = getattr(value, "body", None) if type(value).__module__.startswith(f"{_ROOT}.") else None
    candidate = getattr(body, "function", value)
    if not isinstance(candidate, FunctionType) or str(candidate.__module__).partition(".")[0] == _ROOT:
        return None
    file = os.path.realpath(candidate.__code__.co_filename)
    return None if file.startswith(_INSTALLED) else candidate


# -------------------------------------------------------------------------------- arguments


def arguments_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each argument."""
    return {name: digest_of(msgspec.msgpack.encode(_plain(value, 0))) for name, value in arguments.items()}


def _plain(value: Any, depth: int) -> Any:
    """Returns what tells a value apart, as data."""
    if depth > _MOST_DEPTH:
        return "..."
    match value:
        case enum.Enum():
            return ["enum", type(value).__qualname__, value.name]
        case bool() | None | float():
            return value
        case int():
            return value if abs(value) < 2**63 else ["int", hex(value)]
        case str():
            return value.encode("utf-8", "surrogatepass").decode("latin-1")
        case bytes() | bytearray():
            return ["bytes", digest_of(bytes(value))]
        case os.PathLike():
            return ["path", str(os.fspath(value))]
        case list() | tuple():
            return ["list", *(_plain(each, depth + 1) for each in value)]
        case set() | frozenset():
            return ["set", *sorted(msgspec.msgpack.encode(_plain(each, depth + 1)).hex() for each in value)]
        case Mapping():
            return ["dict", *([_plain(key, depth + 1), _plain(each, depth + 1)] for key, each in value.items())]
    named = [type(value).__module__, type(value).__qualname__]
    if is_dataclass(value) and not isinstance(value, type):
        return [*named, *(_plain(getattr(value, field.name), depth + 1) for field in fields(value))]
    if isinstance(value, msgspec.Struct):
        return [*named, *(_plain(getattr(value, name), depth + 1) for name in value.__struct_fields__)]
    return named


def json_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the values as JSON says them, with lists for tuples; None where one is no such value."""
    return dict(values) if all(map(_is_json, values.values())) else None


def given_of(call: BoundArguments) -> tuple[list[Any], dict[str, Any] | None]:
    """Returns the arguments of a call as `run` takes them again: positions, where a parameter has no name in a call,
    and names; None for the names where JSON cannot say a value."""
    parameters = call.signature.parameters.values()
    if any(each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL) for each in parameters):
        named = json_of(call.kwargs) if _is_json(call.args) else None
        return [] if named is None else list(call.args), named
    flat: dict[str, Any] = {}
    for name, value in call.arguments.items():
        flat |= value if call.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return [], json_of(flat)


def _is_json(value: Any, depth: int = 0) -> bool:
    if depth > _MOST_DEPTH:
        return False
    match value:
        case None | bool():
            return True
        case str() | int() | float():
            # Of a subclass or a number out of JSON's range something would be lost.
            whole = type(value) in (str, int, float)
            return whole and (isinstance(value, str) or abs(value) < 2**63)
        case list() | tuple():
            return all(_is_json(each, depth + 1) for each in value)
        case dict():
            return all(type(key) is str and _is_json(each, depth + 1) for key, each in value.items())
    return False


# -------------------------------------------------------------------------------- requests


def request_digest(request: GenRequest | ScoreRequest, model: str) -> str:
    """Returns the digest of what decides a result: prompt, parameters and constraint, and the backend's name."""
    prompt = [_marked(part) for part in request.prompt]
    if isinstance(request, GenRequest):
        asked: Any = [request.sampling, request.constraint, request.token_healing]
        if (dialogue := dialogue_of(request)) is not None:
            asked.append(dialogue.choice)
    else:
        asked = [request.choices, request.unconditional, request.probability, request.origin.adapter]
    return digest_of(msgspec.msgpack.encode([model, prompt, asked]))


def _marked(part: Part) -> Any:
    match part:
        case Media(kind=kind, digest=digest, num_frames=frames):
            return ["m", kind, digest, frames]
        case Text(text=text, control=control):
            return ["t", _bytes(text), control]
        case Generated(text=text, token_ids=ids):
            return ["g", _bytes(text), ids]
        case Private(tenant=tenant):
            return ["p", tenant]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
