"""Python functions as tools: `@ul.tool` reads name, description and parameters from a function's own words.

    @ul.tool                                        name         "population"
    def population(country: str, year: int = 2024)  parameters   country: string; year: integer, need not be given
        \"\"\"Returns how many people live there.     description  "Returns how many people live there."

        Args:
            country: its English name.              description of the parameter
        \"\"\"

Types are read by `lang.typed`, so a tool takes what `gen(dtype=...)` gives: dataclasses, Pydantic models, Literal.
"""

import functools
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NotRequired, ParamSpec, TypedDict, TypeVar, cast, overload

import msgspec

from ..errors import ParameterError, shortened, shown
from ..ops import Op, holds_operation
from ..tool_calls import FENCED, Tool, ToolCall
from ..typed import Typed, typed

P = ParamSpec("P")
R = TypeVar("R")

_SECTION = re.compile(
    r"(?:Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Attributes|Notes?|Warnings?|See Also|References)"
    r"(:?)$"
)
_ARGUMENTS = re.compile("(?:Args|Arguments|Parameters):?$")
_UNDERLINE = re.compile("-{3,}$")
_OF_GOOGLE = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")  # "days (int): how many"
_OF_NUMPY = re.compile(r"(\w+)(?:\s*:.*)?()$")  # "days : int" over "    how many"
_FIELD = re.compile(r"\s*:(param|type|returns?|rtype|raises?|yields?)(?:\s[^:]*?)??(?:\s+(\w+))?:\s*(.*)$")  # of Sphinx


class ToolFunction(Generic[P, R]):
    """A function that a model may call, made by `ul.tool`. Called by the program it is the function itself.

    Args:
        function: of keyword arguments, or a coroutine function.
        definition: its name, description and parameters.
        arguments: turns JSON of the arguments into values; None: they are given as they are.

    Examples:
        >>> @ul.tool
        ... def population(country: str) -> int:
        ...     "Returns how many people live in a country."
        ...     return {"Iceland": 383_726}[country]
        >>> population("Iceland")
        383726
        >>> population.name, population.description
        ('population', 'Returns how many people live in a country.')
        >>> population.schema["properties"], population.schema["required"]
        ({'country': {'type': 'string'}}, ['country'])
    """

    def __init__(self, function: Callable[P, R], definition: Tool, arguments: Typed | None = None) -> None:
        self._function = function
        self._arguments = arguments
        self.definition = definition
        self.__name__ = definition.name
        self.__doc__ = _written(function).__doc__
        self.__wrapped__ = function

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return self.definition.name

    @property
    def description(self) -> str:
        """The text that tells the model what it does."""
        return self.definition.description

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments, which are one object."""
        return dict(self.definition.parameters)

    @property
    def typed_schema(self) -> str | None:
        """JSON text of the schema whose values `read` makes; None where arguments are given as they are."""
        return None if self._arguments is None else self._arguments.schema

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, which a call has to await."""
        return inspect.iscoroutinefunction(_written(self._function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Raises ParameterError for a tool of a class that is called on an instance: it has no `self`."""
        if instance is None:
            return self
        raise ParameterError(f"tool {self.name} is no method; write ul.tool(instance.{self.name}) of a plain method")

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    def read(self, arguments: str) -> dict[str, Any]:  # Any: values of the parameters' types
        """Turns the JSON text of a call's arguments into keyword arguments. Limits of the schema are not looked at.

        Args:
            arguments: a JSON object; "" is an empty one.

        Raises:
            ValueError: it is no JSON object, or a value is not of its parameter's type.
        """
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments are no JSON: {shortened(arguments, 200)}") from None
        if not isinstance(given, dict):
            raise ValueError(f"the arguments are no JSON object: {shortened(arguments, 200)}")
        if self._arguments is None:
            return given
        return cast(dict[str, Any], self._arguments.form.read(given, "$"))

    def spelled(self, **arguments: Any) -> str:  # Any: JSON values
        """Returns the text of a call in umbel's own format, for scripts of `ul.Echo`.

        Args:
            arguments: of the call, by name: JSON values.
        """
        return FENCED.spell([ToolCall(self.name, json.dumps(arguments, ensure_ascii=False))])


@overload
def tool(function: Callable[P, R], /) -> ToolFunction[P, R]: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None
) -> Callable[[Callable[P, R]], ToolFunction[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None, /, *, name: str | None = None, description: str | None = None
) -> ToolFunction[P, R] | Callable[[Callable[P, R]], ToolFunction[P, R]]:
    """Makes a tool of a function, which a model may call in `s.call_tools`.

    Written `@ul.tool`, `@ul.tool(name="search")` or `ul.tool(client.search)`.

    Args:
        function: sync or async; also a `functools.partial`, whose given arguments the model does not see, and an
            object with `__call__`. Each parameter has an annotation with a JSON form; a default makes it optional.
        name: for the model; None: the function's.
        description: for the model; None: the docstring up to its first section. What it says of the parameters
            describes them, in the style of Google, NumPy or Sphinx.

    Raises:
        ParameterError: a parameter without annotation, `*args`, `**kwargs` or a positional-only one, a type without a
            JSON form, a function that yields, or a name with other characters than A-Z, a-z, 0-9, _ and -.

    Examples:
        >>> @ul.tool
        ... def population(country: str) -> int:
        ...     '''Returns how many people live in a country.
        ...
        ...     Args:
        ...         country: its English name.
        ...     '''
        ...     return {"Iceland": 383_726}[country]
        >>> @ul.function
        ... def ask(s, question):
        ...     s += ul.user(question)
        ...     s.call_tools([population], "answer")
        >>> echo = ul.Echo([population.spelled(country="Iceland"), "383,726 people."])
        >>> state = ask.run("How many people live in Iceland?", backend=echo)
        >>> state["answer"], [call.arguments for call in state["answer_calls"]]
        ('383,726 people.', [{'country': 'Iceland'}])
    """
    if function is None:
        return lambda given: _made(given, name, description)
    return _made(function, name, description)


def _made(function: Callable[P, R], name: str | None, description: str | None) -> ToolFunction[P, R]:
    if isinstance(function, ToolFunction | type) or not callable(function):
        raise ParameterError(f"tool({shown(function)}): write a function, such as def search(query: str) -> str: ...")
    written = _written(function)
    if name is None:
        inside = _without_partials(function)
        name = str(getattr(inside, "__name__", type(inside).__name__))
    if inspect.isgeneratorfunction(written) or inspect.isasyncgenfunction(written):
        raise ParameterError(f"tool {name}: it yields, and a result is one value; collect a list, and return it")
    said, words = _docstring(_words_of(function))
    arguments = _arguments(function, name)
    definition = Tool(name, said if description is None else description, _schema(arguments, words))
    return ToolFunction(function, definition, arguments)


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function whose code, annotations and docstring a callable has: of a partial the one inside, of an
    object its `__call__`."""
    inside = _without_partials(function)
    own = hasattr(inside, "__wrapped__") or inspect.isroutine(inside)  # functools.wraps copies the annotations
    return inside if own else inside.__call__  # type: ignore[operator]  # callable, as all that comes here


def _without_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _words_of(function: Callable[..., Any]) -> str:
    """Returns the docstring of a callable; of an object without one at its `__call__`, that of its class."""
    written = _written(function)
    return inspect.getdoc(written if written.__doc__ else _without_partials(function)) or ""


def _arguments(function: Callable[..., Any], name: str) -> Typed:
    """Returns the parameters of a function as one object. Raises ParameterError for what cannot be a tool's."""
    given: Mapping[str, Any] = function.keywords if isinstance(function, functools.partial) else {}
    try:
        hints = typing.get_type_hints(_written(function), include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except Exception as error:  # a name that does not exist, or whatever the annotation's code raises
        raise ParameterError(f"tool {name}: its annotations cannot be read ({type(error).__name__}: {error})") from None
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in given:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ParameterError(
                f"tool {name}: a model gives arguments by name, and {str(parameter).split(':')[0]!r} takes none; write "
                "parameters with names, such as items: list[str]"
            )
        if parameter.name == "self" and parameter.name not in hints:
            raise ParameterError(
                f"tool {name}: a method has an object that the model cannot give; leave @ul.tool out, and write "
                f"ul.tool(client.{getattr(function, '__name__', name)}) with the object that it is called on"
            )
        if parameter.name not in hints:
            raise ParameterError(
                f"tool {name}: parameter {parameter.name!r} has no annotation; write its type, such as "
                f"{parameter.name}: str"
            )
        annotation = hints[parameter.name]
        fields[parameter.name] = annotation if parameter.default is parameter.empty else NotRequired[annotation]
    try:
        return typed(TypedDict("Arguments", fields))  # type: ignore[operator]  # made while the program runs
    except ParameterError as error:
        raise ParameterError(f"tool {name}: {error}") from None


def _schema(arguments: Typed, words: Mapping[str, str]) -> dict[str, Any]:
    """Returns the schema of arguments with the object itself at its top, as providers want it."""
    schema = json.loads(arguments.schema)
    definitions = schema.get("$defs", {})
    top = definitions.pop("Arguments")
    properties = top.get("properties", {})
    for name, text in words.items():
        if name in properties:
            properties[name] = {**properties[name], "description": text}
    return {**top, "properties": properties} | ({"$defs": definitions} if definitions else {})


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns what a docstring says before its first section or field, and its words about each parameter. Sections are
    Google's or NumPy's, fields are Sphinx's."""
    lines = text.splitlines()
    rows = range(len(lines))
    first = next((row for row in rows if _header(lines, row) or _FIELD.match(lines[row])), len(lines))
    words: dict[str, list[str]] = {}
    header, indent, current = None, None, ""  # header: of the parameters in this section; None in any other one
    for row in rows[first:]:
        line, depth = lines[row].strip(), len(lines[row]) - len(lines[row].lstrip())
        field = _FIELD.match(lines[row])
        if begun := _header(lines, row):
            header, indent, current = begun if _ARGUMENTS.match(line) else None, None, ""
        elif field is not None:
            header, current = None, field[2] or "" if field[1] == "param" else ""
            words |= {current: [field[3]]} if current else {}
        elif line and not _UNDERLINE.match(line):
            indent = depth if indent is None else indent
            found = header.match(line) if header is not None and depth == indent else None
            if found is not None:
                current = found[1]
                words[current] = [found[2]]
            elif current:
                words[current].append(line)
    said = {name: " ".join(filter(None, pieces)) for name, pieces in words.items()}
    return "\n".join(lines[:first]).strip(), {name: text for name, text in said.items() if text}


def _header(lines: Sequence[str], row: int) -> re.Pattern[str] | None:
    """Returns how a section that begins at a line writes its parameters; None for any other line."""
    found = _SECTION.match(lines[row].strip())
    if found is None:
        return None
    underlined = row + 1 < len(lines) and _UNDERLINE.match(lines[row + 1].strip())
    return _OF_GOOGLE if found[1] else _OF_NUMPY if underlined else None


def result_text(value: object) -> str:
    """Returns the result of a tool as text for the model: strings as they are, JSON where there is any, else str().
    Numbers that JSON does not have are written as the texts "NaN", "Infinity" and "-Infinity".

    Raises:
        ParameterError: an operation, a state or a generator, or one of them in a list or dict.
        Exception: of the code of an object that is written.
    """
    if isinstance(value, str):
        text = str.__str__(value)
    else:
        try:
            _refuse_operations(value)
            plain = msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)
            text = msgspec.json.encode(_finite(plain)).decode()
        except ParameterError:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = str(value)
    if holds_operation(text):
        raise _no_result(value)
    return text


def _refuse_operations(value: object) -> None:
    """Raises ParameterError for an operation, also in lists and dicts: it would be written as its fields."""
    if isinstance(value, Op):
        raise _no_result(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for member in inside:
        _refuse_operations(member)


def _plain(value: object) -> Any:  # Any: JSON
    """Returns an object that msgspec does not know as JSON. Raises TypeError where it has none."""
    dump = getattr(value, "model_dump", None)  # of Pydantic, which is never imported here
    if callable(dump):
        return dump(mode="json")
    if inspect.isgenerator(value) or inspect.isasyncgen(value) or holds_operation(str(value)):
        raise _no_result(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _finite(value: Any) -> Any:  # Any: JSON
    match value:
        case dict():
            return {key: _finite(member) for key, member in value.items()}
        case list() | tuple():
            return [_finite(member) for member in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _no_result(value: object) -> ParameterError:
    what = shown(value) if isinstance(value, str) else f"an object of the class {type(value).__name__}"
    return ParameterError(f"{what} is no result of a tool; return text, or what JSON has, such as list(...)")
