"""Python functions as tools: `@ul.tool` reads name, description and parameters from a function's own words.

    @ul.tool                                        name         "population"
    def population(country: str, year: int = 2024)  parameters   country: string; year: integer, need not be given
        \"\"\"Returns how many people live there.     description  "Returns how many people live there."

        Args:
            country: its English name.              description of the parameter
        \"\"\"

Types are read by `lang.typed`, so a tool takes what `gen(dtype=...)` gives: dataclasses, Pydantic models, Literal.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, NotRequired, ParamSpec, TypedDict, TypeVar, cast, overload

import msgspec

from ..errors import ParameterError, shortened, shown
from ..tool_calls import FENCED, Tool, ToolCall
from ..typed import Typed, typed

P = ParamSpec("P")
R = TypeVar("R")

_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Attributes|Note|Notes):\s*$"
)
_PARAMETER = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_ARGUMENTS = frozenset({"Args", "Arguments", "Parameters"})


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
        self.__doc__ = function.__doc__
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
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, which a call has to await."""
        return inspect.iscoroutinefunction(self._function)

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
        """Turns the JSON text of a call's arguments into keyword arguments.

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
        function: sync or async. Each parameter has an annotation with a JSON form; a default makes it optional.
        name: for the model; None: the function's.
        description: for the model; None: the docstring up to its first section. Lines of its `Args:` describe the
            parameters.

    Raises:
        ParameterError: a parameter without annotation, `*args`, `**kwargs` or a positional-only one, a type without a
            JSON form, or a name with other characters than A-Z, a-z, 0-9, _ and -.

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
    name = name if name is not None else str(getattr(function, "__name__", type(function).__name__))
    said, words = _docstring(inspect.getdoc(function) or "")
    arguments = _arguments(function, name)
    definition = Tool(name, said if description is None else description, _schema(arguments, words))
    return ToolFunction(function, definition, arguments)


def _arguments(function: Callable[..., Any], name: str) -> Typed:
    """Returns the parameters of a function as one object. Raises ParameterError for what cannot be a tool's."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name that does not exist, or whatever the annotation's code raises
        raise ParameterError(f"tool {name}: its annotations cannot be read ({type(error).__name__}: {error})") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
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
    """Returns what a docstring says before its first section, and its words about each parameter."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    words: dict[str, list[str]] = {}
    section, indent, current = "", 0, ""
    for line in lines[first:]:
        if (found := _SECTION.match(line)) is not None:
            section, indent, current = found[1], 0, ""
            continue
        if section not in _ARGUMENTS or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        found = _PARAMETER.match(line.strip()) if depth == indent else None
        if found is not None:
            current = found[1]
            words[current] = [found[2]]
        elif current:
            words[current].append(line.strip())
    said = {name: " ".join(filter(None, pieces)) for name, pieces in words.items()}
    return "\n".join(lines[:first]).strip(), {name: text for name, text in said.items() if text}


def result_text(value: object) -> str:
    """Returns the result of a tool as text for the model: strings as they are, JSON where there is any, else str()."""
    if isinstance(value, str):
        return value
    dump = getattr(value, "model_dump_json", None)  # of Pydantic, which is never imported here
    if callable(dump):
        return str(dump())
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(value)
