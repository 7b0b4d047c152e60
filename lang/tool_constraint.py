"""The constraint under which a model calls tools: built by servers, read by the compiler of constraints.

Its source is JSON, as everything that travels in a `ConstraintSpec`:

    {"format": "hermes", "tools": [{"name": "search", "schema": {...}}], "choice": "auto", "parallel": true}

"auto" admits texts in which the format's mark does not occur, and such a text followed by calls; "required" calls
alone; "none" texts alone. `thinking` admits the model's reasoning before all of that, and `answer` is a schema that
takes the place of free text, for which "none" needs no tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from .errors import ConstraintError, ParameterError, shown
from .generation import demand_of
from .protocol import ConstraintSpec
from .tool_calls import FORMATS, MOST_TOOLS, CallFormat, ChoiceMode, Tool, ToolChoice, checked_tool_name

MOST_TOOL_BYTES = 64 << 10  # of a constraint's source
LONGEST_TAG = 64  # characters
_Tag = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_TAG)]


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tags around a model's reasoning. `begun`: the prompt ends with the opening one, so the text begins inside."""

    open: _Tag
    close: _Tag
    begun: bool = False


class ToolSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool's name, and the JSON Schema of its arguments as JSON text."""

    name: str
    schema: msgspec.Raw


class AnswerSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON Schema of an answer, as JSON text."""

    schema: msgspec.Raw


class ToolGrammar(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The source of a constraint of the kind "tools".

    Attributes:
        format: name of a `CallFormat`.
        tools: those that may be called.
        choice: see `ToolChoice.mode`.
        parallel: several calls in one answer.
        thinking: admits reasoning before the answer.
        answer: of the answer where no tool is called; None: free text.
    """

    format: str
    tools: Annotated[tuple[ToolSchema, ...], msgspec.Meta(max_length=MOST_TOOLS)]
    choice: ChoiceMode = "auto"
    parallel: bool = True
    thinking: Thinking | None = None
    answer: AnswerSchema | None = None

    @property
    def call_format(self) -> CallFormat:
        return FORMATS[self.format]


def tools_constraint(
    tools: Sequence[Tool],
    choice: ToolChoice,
    call_format: CallFormat,
    *,
    thinking: Thinking | None = None,
    answer: Mapping[str, Any] | bool | None = None,  # Any: JSON values
    allow_unenforced: bool = False,
) -> ConstraintSpec:
    """Returns the constraint of an answer that may call tools.

    Args:
        tools: all of the request; `choice` says which may be called.
        call_format: the spelling, as the chat template taught it to the model.
        thinking: the model's tags of reasoning, which may come first.
        answer: JSON Schema of the text, when no tool is called; None: any text.
        allow_unenforced: schema keywords that cannot be enforced are reported instead of refused.

    Raises:
        ParameterError: there is no tool for a call, `choice` names another one, or arguments that are no object.
        ConstraintError: a schema cannot be written as JSON, or all together have more than 64 KiB.
    """
    allowed = choice.among(tools)
    if not allowed and (choice.mode != "none" or answer is None):
        raise ParameterError("tools: a constraint on their calls needs some; give at least one")
    if answer is not None and choice.mode != "none" and not call_format.has_mark:
        raise ParameterError(
            f"tools: this model spells calls as JSON without a mark ({call_format.name}), so an answer in JSON could "
            'be read as a call; write tools or a JSON schema, or the tool choice "none"'
        )
    grammar = ToolGrammar(
        call_format.name,
        tuple(ToolSchema(tool.name, msgspec.Raw(_arguments_schema(tool))) for tool in allowed),
        choice.mode,
        choice.parallel,
        thinking,
        None if answer is None else AnswerSchema(msgspec.Raw(_json(answer).encode())),
    )
    source = msgspec.json.encode(grammar)
    if len(source) > MOST_TOOL_BYTES:
        raise ConstraintError(
            f"tools: their schemas have {len(source)} bytes without descriptions; at most {MOST_TOOL_BYTES} are "
            "allowed: give fewer tools, or allow fewer by the tool choice"
        )
    return ConstraintSpec("tools", source.decode(), allow_unenforced=allow_unenforced)


def read_tool_grammar(source: str) -> ToolGrammar:
    """Reads the source of a constraint of the kind "tools".

    Raises:
        ConstraintError: it is too long, not of this shape, names no known format, or has a wrong or repeated name.
    """
    if len(source.encode("utf-8", "surrogatepass")) > MOST_TOOL_BYTES:
        raise ConstraintError(f"tools: the source has more than {MOST_TOOL_BYTES} bytes; give fewer tools")
    try:
        grammar = msgspec.json.decode(source, type=ToolGrammar)
        names = [checked_tool_name(tool.name) for tool in grammar.tools]
    except (ValueError, RecursionError, ParameterError) as error:
        raise ConstraintError(f"tools: {error}; lang.tool_constraint.tools_constraint writes the source") from None
    if not grammar.tools and (grammar.choice != "none" or grammar.answer is None):
        raise ConstraintError("tools: there is none to call; lang.tool_constraint.tools_constraint writes the source")
    if grammar.format not in FORMATS:
        raise ConstraintError(f"tools: the format {shown(grammar.format)} is not known; write one of {list(FORMATS)}")
    if len(set(names)) < len(names):
        raise ConstraintError("tools: two tools have one name; give each its own")
    return grammar


def _arguments_schema(tool: Tool) -> bytes:
    """Returns the schema of a tool's arguments, without descriptions, which no text depends on.

    Raises:
        ParameterError: its values are no objects.
        ConstraintError: it cannot be written as JSON.
    """
    try:
        _json(tool.parameters)
        schema = {**_bare(tool.parameters)}
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise ParameterError(
                f'the arguments are one JSON object, and the schema\'s type is {shown(kinds)}; write type "object"'
            )
        if schema.get("properties") == {} and schema.keys() <= {"$schema", "type", "properties"}:
            schema["additionalProperties"] = False  # a function without parameters
        return json.dumps({**schema, "type": "object"}, ensure_ascii=False).encode()
    except ParameterError as error:
        raise ParameterError(f"tools: {tool.name}: {error}") from None
    except ConstraintError as error:
        raise ConstraintError(f"tools: {tool.name}: {error}") from None


def _json(schema: Mapping[str, Any] | bool) -> str:
    """Returns a schema as JSON text. Raises ConstraintError; what it lets through is safe to recurse into."""
    demand = demand_of({"json_schema": schema})
    assert demand is not None, "a schema was given"
    return demand.spec.source


_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_INNER = frozenset(
    ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "contains", "additionalProperties", "not")
) | frozenset(("propertyNames", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"))


def _bare(schema: Any) -> Any:  # Any: a schema, a list of them, or a boolean
    """Leaves annotations out, wherever a schema stands. Properties may be called as they are."""
    if isinstance(schema, list | tuple):
        return [_bare(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _BY_NAME and isinstance(value, Mapping):
            kept[key] = {name: _bare(each) for name, each in value.items()}
        else:
            kept[key] = _bare(value) if key in _INNER else value
    return kept
