"""Tools a model may call, its calls, and how models spell them.

A model spells a call inside its answer. Qwen writes `<tool_call>\\n{"name": "search", "arguments": {}}\\n</tool_call>`,
Llama 3 one JSON object. A `CallFormat` is such a spelling. Three parts of umbel use the same one, so that the text
that is written is the text that is admitted and read: chat templates show earlier calls by it, the constraint admits
calls in it, and the reader finds calls in generated text by it.

    open  begin {"name": "search", "arguments": {"q": "umbel"}} end  between  begin {…} end  close
          └──────── header ───────────────────┘└─ arguments ─┘└ } ┘
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from . import checks
from .errors import ParameterError, shown

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

ChoiceMode = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: 1 to 64 of the characters A-Z, a-z, 0-9, "_" and "-".
        description: says to the model what the function does.
        parameters: JSON Schema of the arguments, which are one JSON object.

    Raises:
        ParameterError: a name of other characters, or parameters that are no JSON object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_NO_PARAMETERS))  # Any: JSON values

    def __post_init__(self) -> None:
        name = checked_tool_name(self.name)
        if not isinstance(self.description, str):
            raise ParameterError(f"tool {name}: description must be a string, got {shown(self.description)}")
        if not isinstance(self.parameters, Mapping):
            raise ParameterError(
                f"tool {name}: parameters must be a JSON Schema as a dict, got {shown(self.parameters)}"
            )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made.

    Attributes:
        name: of the tool.
        arguments: JSON text, as the model wrote it; a cut call has the beginning of one.
        id: names the call for the message with its result; "" where the format has no place for it.
        signature: opaque text of the provider, which wants it back with the call; "" where it gave none.
    """

    name: str
    arguments: str
    id: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Says whether the model calls tools, which, and how many at a time.

    Attributes:
        mode: "auto" leaves it to the model, "required" wants at least one call, "none" admits no call.
        allowed: names of the tools that may be called; None: all.
        parallel: several calls in one answer.

    Raises:
        ParameterError: an unknown mode, or `allowed` without a name.
    """

    mode: ChoiceMode = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True

    def __post_init__(self) -> None:
        checks.one_of("tool choice", self.mode, get_args(ChoiceMode))
        checks.switch("parallel tool calls", self.parallel)
        if self.allowed is not None and not self.allowed:
            raise ParameterError('tool_choice: it allows no tool; name one, or write the mode "none"')

    @classmethod
    def only(cls, name: str) -> "ToolChoice":
        """Exactly one call, of the tool with this name."""
        return cls("required", (name,), parallel=False)

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Returns the tools that may be called, in their own order.

        Raises:
            ParameterError: two tools have one name, there are more than 128, an allowed name is no tool's, or a call
                is required and there is no tool.
        """
        known = [tool.name for tool in tools]
        if len(known) > MOST_TOOLS:
            raise ParameterError(f"tools: {len(known)} are given; write at most {MOST_TOOLS}")
        twice = next((name for name in known if known.count(name) > 1), None)
        if twice is not None:
            raise ParameterError(f"tools: two are called {twice}; give each its own name")
        foreign = next((name for name in self.allowed or () if name not in known), None)
        if foreign is not None:
            raise ParameterError(
                f"tool_choice: {shown(foreign)} is no tool of this request; its tools are {shown(known)}"
            )
        if self.mode == "required" and not known:
            raise ParameterError("tool_choice: a call is required, and the request has no tools; give tools")
        return tuple(tool for tool in tools if self.allowed is None or tool.name in self.allowed)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A spelling of tool calls. The module's first lines show where each text stands.

    Attributes:
        name: "hermes", "llama-3", "mistral" or "fenced" (ours).
        begin, end: stand around each call; open, close: around all of them; between: between two.
        arguments_key: names the arguments in the JSON object of a call.
        has_mark: a call begins with a text that no answer has (`mark`), and may follow other text. Without a mark it
            is recognised by its header, and is the whole answer.
        parallel: several calls in one answer.
    """

    name: str
    begin: str = ""
    end: str = ""
    open: str = ""
    close: str = ""
    between: str = "\n"
    arguments_key: str = "arguments"
    has_mark: bool = True
    parallel: bool = True

    @property
    def mark(self) -> str:
        """The text that begins the first call, without white space at its end; "" without a mark."""
        return (self.open + self.begin).rstrip()

    @property
    def after_arguments(self) -> str:
        """The text from the end of the arguments to the end of the call."""
        return "}" + self.end

    @property
    def before_name(self) -> str:
        """The text of a call up to its name."""
        return f'{self.begin}{{"name": "'

    def header(self, name: str) -> str:
        """Returns the text of a call up to its arguments."""
        return f'{self.before_name}{name}", "{self.arguments_key}": '

    def spell(self, calls: Sequence[ToolCall]) -> str:
        """Returns the text of these calls; "" without calls."""
        if not calls:
            return ""
        spelled = [f"{self.header(call.name)}{call.arguments}{self.after_arguments}" for call in calls]
        return self.open + self.between.join(spelled) + self.close

    def spell_result(self, name: str, content: str) -> str:
        """Returns the text that gives a call's result to the model, for templates without messages of tools."""
        return f"```tool_result {name}\n{content}\n```"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Returns a system text that shows the tools and says how to call one, for templates that show no tools."""
        shown_tools = "\n".join(described(tool) for tool in tools)
        example = self.spell([ToolCall("tool_name", "{...}")])
        return (
            f"You can call these tools, each given as JSON with a JSON Schema of its arguments:\n\n{shown_tools}\n\n"
            f"To call one, write exactly this, with its name and its arguments:\n\n{example}\n\n"
            "Then stop: the result comes in the next message. Call a tool only when it helps to answer."
        )


HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA_3 = CallFormat("llama-3", arguments_key="parameters", has_mark=False, parallel=False)
MISTRAL = CallFormat("mistral", open="[TOOL_CALLS] [", close="]", between=", ")
FENCED = CallFormat("fenced", "```tool_call\n", "\n```")  # ours: no model has a special token that spells it

FORMATS: Mapping[str, CallFormat] = {known.name: known for known in (HERMES, LLAMA_3, MISTRAL, FENCED)}

# Templates that write the same mark and then no JSON: Qwen 3 Coder's and GLM's.
_NO_JSON = ("<function=", "<arg_key>")


def call_format_of(template_source: str | None, control_names: Collection[str] = ()) -> CallFormat:
    """Finds the format that a chat template writes calls in.

    Args:
        template_source: Jinja source; None: no template.
        control_names: special tokens without bytes. They are no text, so a call that begins with one can be neither
            admitted by a grammar nor found in the answer.

    Returns:
        `FENCED` where the template writes no calls, in none of the known formats, or with such a token.
    """
    source = (template_source or "").replace('\\"', '"')
    found = FENCED
    if "<tool_call>" in source:
        if '"name"' in source and '"arguments"' in source and not any(text in source for text in _NO_JSON):
            found = HERMES
    elif "[TOOL_CALLS] [" in source:
        found = MISTRAL
    elif '"name"' in source and '"parameters": ' in source and "tool_calls" in source:
        found = LLAMA_3
    written = found.open + found.begin + found.end + found.close
    return FENCED if any(name and name in written for name in control_names) else found


def is_object(arguments: str) -> bool:
    """Returns whether the arguments of a call are a JSON object."""
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def checked_tool_name(name: object) -> str:
    """Returns a tool's name.

    Raises:
        ParameterError: it is not 1 to 64 of the characters A-Z, a-z, 0-9, "_" and "-".
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParameterError(f"tool name {shown(name)} is not allowed; write 1 to 64 of A-Z, a-z, 0-9, _ and -")
    return checks.plain(name)


def described(tool: Tool) -> str:
    """Returns a tool as one line of JSON, as `CallFormat.instructions` shows it."""
    facts = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    if not tool.description:
        del facts["description"]
    return json.dumps(facts, ensure_ascii=False)
