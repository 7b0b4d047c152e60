"""Tools as chat templates are given them: with placeholders for every text that a caller chose.

Templates compare the keywords of a schema and the types of JSON, and look up names of properties in `required`. So
keywords and types stay, and equal texts of one tool have the same placeholder. Texts are numbered in the order of
Jinja's `dictsort`, which some templates write properties in.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import ParameterError
from ..templates.placeholders import placeholder, spelled
from ..tool_calls import Tool

FIRST_TEXT = 1_000_000  # number of the first placeholder of a tool's text

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_NAMED = frozenset({"$defs", "definitions", "dependentRequired", "dependentSchemas", "patternProperties", "properties"})
_KEYWORDS = _DATA | _NAMED | {
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "$vocabulary",
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentEncoding", "contentMediaType",
    "contentSchema", "dependencies", "deprecated", "description", "else", "exclusiveMaximum", "exclusiveMinimum",
    "format", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
    "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "nullable", "oneOf", "pattern",
    "prefixItems", "propertyNames", "readOnly", "required", "strict", "then", "title", "type", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "writeOnly",
}  # fmt: skip

Give = Callable[[str], str]  # a caller's text → its placeholder

# What a template writes between two texts of a tool, if it writes JSON and nothing of its own.
_WORD = "|".join(map(re.escape, sorted(_KEYWORDS | _TYPES | {"name", "parameters"})))
_ONLY_JSON = re.compile(rf'"?(?:[\s{{}}\[\],:]|-?[0-9][0-9.eE+-]*+|true|false|null|"(?:{_WORD})?")*+"?')


@dataclass(frozen=True, slots=True)
class ShownTools:
    """Tools as a template takes them, and the texts that its placeholders stand for.

    Attributes:
        outlines: the tools, with placeholders.
        texts: of the placeholders, from number FIRST_TEXT on; with the index of the tool.
        names: tool → number of its name.
        rests: tool → its JSON after the last text, as a whole and without the object around the function.
        digest: of the outlines.
    """

    outlines: tuple[dict[str, Any], ...] = ()  # Any: JSON
    texts: tuple[tuple[str, int], ...] = ()
    names: tuple[int, ...] = ()
    rests: tuple[tuple[str, str], ...] = ()
    digest: bytes = b""
    _spelled: dict[tuple[int, str], str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The length of all texts, in characters."""
        return sum(len(text) for text, _ in self.texts)

    def tool_of(self, number: int) -> int | None:
        """Returns the index of the tool that has a text; None for the number of another text."""
        index = number - FIRST_TEXT
        return self.texts[index][1] if 0 <= index < len(self.texts) else None

    def text(self, number: int, codes: str) -> str:
        """Returns a text as the template writes it."""
        known = self._spelled.get((number, codes))
        if known is None:
            known = spelled(self.texts[number - FIRST_TEXT][0], codes)
            self._spelled[number, codes] = known
        return known


NO_SHOWN_TOOLS = ShownTools()


def show_tools(tools: Sequence[Tool]) -> ShownTools:
    """Returns tools as a template takes them.

    Raises:
        ParameterError: a schema is nested too deeply, or has a number of more than 64 bits.
    """
    outlines, texts, names = list[dict[str, Any]](), list[tuple[str, int]](), list[int]()
    for index, tool in enumerate(tools):
        first = FIRST_TEXT + len(texts)
        outline, own = _outline(tool, first)
        outlines.append(outline)
        texts.extend((text, index) for text in own)
        names.append(first + own.index(tool.name))
    rests = tuple((_rest(outline), _rest(outline["function"])) for outline in outlines)
    return ShownTools(tuple(outlines), tuple(texts), tuple(names), rests, digest_of(outlines))


def digest_of(value: object) -> bytes:
    """Returns a digest of JSON. Raises ParameterError for a number of more than 64 bits."""
    try:
        return hashlib.sha256(msgspec.msgpack.encode(value)).digest()
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ParameterError(f"tools: they, or calls of them, hold what is no plain JSON ({error})") from None


@lru_cache(4096)
def is_only_json(gap: str) -> bool:
    """Returns whether scaffolding between two texts of a tool is punctuation and keywords: then no part of it is a
    control token, and it is one text with what stands around it."""
    return len(gap) < 4096 and _ONLY_JSON.fullmatch(gap) is not None


def _outline(tool: Tool, first: int) -> tuple[dict[str, Any], list[str]]:  # Any: JSON
    """Returns a tool as templates take it, and its texts, whose placeholders are numbered from `first` on.

    Raises:
        ParameterError: the schema is nested too deeply.
    """
    texts = set[str]()

    def collect(text: str) -> str:
        texts.add(text)
        return text

    try:
        _function(tool, collect)
        ordered = sorted(texts, key=lambda text: (text.lower(), text))
        numbers = {text: placeholder(number) for number, text in enumerate(ordered, first)}
        return _function(tool, numbers.__getitem__), ordered
    except RecursionError:
        raise ParameterError(
            f"tools: the parameters of {tool.name} are nested too deeply; write a flatter schema"
        ) from None


def length_of_rest(rests: tuple[str, ...], gap: str) -> int:
    """Returns the length of what still belongs to a tool in the scaffolding after its last placeholder: numbers and
    brackets; 0 where the template writes tools in its own way. White space between them does not count."""
    for rest in rests:
        position = 0
        for character in gap:
            if not rest:
                return position
            if character == rest[0]:
                rest = rest[1:]
            elif not character.isspace():
                break
            position += 1
        if not rest:
            return position
    return 0


def _rest(value: object) -> str:
    return "".join(json.dumps(value, ensure_ascii=False).rpartition("\ue001")[2].split())


def _function(tool: Tool, give: Give) -> dict[str, Any]:
    description = give(tool.description) if tool.description else ""
    parameters = _schema(tool.parameters, give)
    return {
        "type": "function",
        "function": {"name": give(tool.name), "description": description, "parameters": parameters},
    }


def _schema(value: Any, give: Give) -> Any:
    match value:
        case Mapping():
            return {
                key if key in _KEYWORDS else give(str(key)): _of_keyword(key, item, give) for key, item in value.items()
            }
        case list() | tuple():
            return [_schema(item, give) for item in value]
        case _:
            return outline_of_data(value, give)


def _of_keyword(keyword: str, value: Any, give: Give) -> Any:
    if keyword == "type":
        if isinstance(value, str) and value in _TYPES:
            return value
        if isinstance(value, list) and all(isinstance(kind, str) and kind in _TYPES for kind in value):
            return value
    if keyword in _DATA:
        return outline_of_data(value, give)
    if keyword in _NAMED and isinstance(value, Mapping):
        return {give(str(name)): _schema(item, give) for name, item in value.items()}
    return _schema(value, give)


def outline_of_data(value: Any, give: Give) -> Any:  # Any: JSON
    """Returns JSON with placeholders for all of its strings and keys."""
    match value:
        case Mapping():
            return {give(str(key)): outline_of_data(item, give) for key, item in value.items()}
        case list() | tuple():
            return [outline_of_data(item, give) for item in value]
        case str() if value:  # templates ask whether there is any text
            return give(value)
        case _:
            return value
