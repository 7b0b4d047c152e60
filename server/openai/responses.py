"""`POST /v1/responses`: answers as lists of items. Stateless: the whole input comes with each request.

Items and events are what Codex and OpenAI's client read: reasoning, messages and calls are items of their own, each
with an event at its beginning and its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec

from ...interpreter.tool_reader import ArgumentsPiece, CallBegins, CallEnds, ContentPiece
from ...lang.cache_report import CacheCause
from ...lang.caching import Caching
from ...lang.conversations.messages import Message
from ...lang.prompt import Media
from ...lang.protocol import TokenLogprob, Usage
from ...lang.tool_calls import Tool, ToolCall, ToolChoice
from ..bodies import Body, Json, Label, ToolName, TopLogprobs, convert, wrong
from ..conversation import (
    CONTEXT_LEFT,
    Dialogue,
    Piece,
    Question,
    ReasoningPiece,
    Said,
    open_dialogue,
    picture,
    warn_of_effort,
    whole_call,
)
from ..diagnosis.comparison import Change, Comparison, PlacedFacts, compare, placed_facts
from ..errors import HttpError
from ..http import JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from ..limits import MAX_MESSAGES, MAX_NAME, MAX_TOOLS
from ..marks import Breakpoint, CacheOptions, Marks
from .conversations import (
    CONVERSATION_NOT_OFFERED,
    Detail,
    Effort,
    JsonFormat,
    RefusalBlock,
    TextFormat,
    ToolWord,
    Verbosity,
    choice_of,
    options_of,
    tool_of,
    warn_of_hints,
)
from .fields import AskingFields, Metadata, token_entries

NOT_OFFERED = {
    **CONVERSATION_NOT_OFFERED,
    "previous_response_id": "responses are not kept; send the whole input again",
    "conversation": "conversations are not kept; send the whole input again",
    "prompt": "prompts are not kept; send the input itself",
    "background": "responses are not kept; leave it out",
    "background_options": "responses are not kept; leave it out",
    "context_management": "the context is not managed; send what the model shall see",
    "max_tool_calls": "tools are called by the client; leave it out",
    "access_programs": "it is not offered; leave it out",
    "image": "pictures are not made; leave it out",
    "truncation": 'inputs are not cut; write "disabled", or leave it out',
    "defer_loading": "all tools are shown to the model; leave it out",
    "file_id": "files are not kept; send data",
    "file_url": "files are not fetched; send text",
}


# --------------------------------------------------------------------------------------------------- input


class InputText(Body, frozen=True, tag="input_text", tag_field="type"):
    """Text of a message."""

    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputText(Body, frozen=True, tag="output_text", tag_field="type"):
    """Text of an earlier answer. Clients that have read it send what they read, too."""

    text: str
    parsed: Any = None  # JSON
    annotations: tuple[Json, ...] | None = None
    logprobs: tuple[Json, ...] | None = None


class InputImage(Body, frozen=True, tag="input_image", tag_field="type"):
    """A picture, as a data URL."""

    image_url: str | None = None
    detail: Detail | None = None
    file_id: None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class ReasoningText(Body, frozen=True, tag="reasoning_text", tag_field="type"):
    """Text of earlier reasoning."""

    text: str


InputBlock = InputText | OutputText | RefusalBlock | InputImage | ReasoningText
Content = str | Annotated[tuple[InputBlock, ...], msgspec.Meta(max_length=MAX_MESSAGES)]


class InputItem(Body, frozen=True):
    """An item of the input: a message, a call, the result of one, or reasoning; `type` says which fields it has."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Label | None = None
    status: Label | None = None
    phase: Label | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Label | None = None
    name: ToolName | None = None
    namespace: ToolName | None = None
    arguments: str | None = None
    parsed_arguments: Any = None  # JSON: the arguments, as the client has read them
    output: Content | None = None
    summary: Annotated[tuple[Json, ...], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: str | None = None


# --------------------------------------------------------------------------------------------------- tools


FlatTool = Annotated[
    Json,
    msgspec.Meta(
        description="A function, a namespace of functions, or a tool of a provider, which is left out with a warning.",
        extra_json_schema={
            "properties": {"type": {"type": "string", "maxLength": MAX_NAME}},
            "required": ["type"],
        },
    ),
]


class FlatFunction(Body, frozen=True):
    """A function that the model may call. `strict` changes nothing: arguments always follow their schema."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None  # at its default only


class ToolSpace(Body, frozen=True):
    """Functions under one name."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[tuple[FlatTool, ...], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]
    description: str | None = None


class ForcedName(Body, frozen=True, tag="function", tag_field="type"):
    """The one function that is called."""

    name: ToolName

    def choice(self, parallel: bool) -> ToolChoice:
        return ToolChoice.only(self.name)


class AllowedNames(Body, frozen=True, tag="allowed_tools", tag_field="type"):
    """Functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ForcedName, ...], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]

    def choice(self, parallel: bool) -> ToolChoice:
        return ToolChoice(self.mode, tuple(dict.fromkeys(each.name for each in self.tools)), parallel)


class FlatSchema(Body, frozen=True, tag="json_schema", tag_field="type"):
    """JSON by a schema. `name`, `description` and `strict` change nothing: answers always follow their schema."""

    schema: Json
    name: Label | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body, frozen=True):
    """The form of the answer."""

    format: TextFormat | JsonFormat | FlatSchema | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Body, frozen=True):
    """The effort of reasoning, where the chat template has a switch. Its text is given as it is, without a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ComparedCacheOptions(CacheOptions, frozen=True):
    """Options of the cache, and the id of an earlier response that this one is compared with."""

    comparison_response_id: Label | None = None


class ResponsesBody(AskingFields, frozen=True):
    """Asks for an answer.

    Attributes:
        input: a text, or items in order.
        instructions: come before the input.
        max_output_tokens: without it the answer may fill the context.
        store: nothing is stored, whatever it says; the answer says so.
        prompt_cache_options: of the breakpoints on blocks of the input; its `comparison_response_id` asks why the
            prompt of an earlier response could not be reused.
        include: encrypted reasoning is never given; its text is.
    """

    told_as = {
        "prompt": "input",
        "messages": "input",
        "json_schema": "text.format",
        "max_tokens": "max_output_tokens",
    }

    input: str | Annotated[tuple[InputItem, ...], msgspec.Meta(max_length=MAX_MESSAGES)] = ()
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=CONTEXT_LEFT)] | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextOptions | None = None
    tools: Annotated[tuple[FlatTool, ...], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolWord | ForcedName | AllowedNames | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[tuple[Included, ...], msgspec.Meta(max_length=16)] | None = None
    store: bool | None = None
    prompt_cache_options: ComparedCacheOptions | None = None
    # Labels, without effect.
    metadata: Metadata | None = None
    client_metadata: Json | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    # At their defaults only: clients and gateways add them.
    priority: Literal[0] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background_options: None = None
    context_management: None = None
    max_tool_calls: None = None
    access_programs: None = None
    image: None = None
    moderation: None = None


# ------------------------------------------------------------------------------------------ body → question


@dataclass(slots=True)
class _Tools:
    """The functions of a request, those of namespaces among them, what was left out, and all of them as they were
    understood."""

    found: list[Tool] = field(default_factory=list)
    namespaces: dict[str, str] = field(default_factory=dict)  # name of a function → its namespace
    warnings: list[str] = field(default_factory=list)
    shown: list[Json] = field(default_factory=list)

    def add(self, tools: Sequence[Json], within: str, namespace: str = "") -> list[Json]:
        """Adds the tools of a list. Returns them as they were understood. Raises HttpError for one that is wrong."""
        shown: list[Json] = []
        for number, tool in enumerate(tools):
            param, kind = f"{within}[{number}]", tool.get("type")
            if not isinstance(kind, str) or len(kind) > MAX_NAME:
                raise wrong(f"{param}.type", 'it is the name of a type, such as "function"')
            if kind == "namespace" and not namespace:
                space = convert(tool, ToolSpace, param, NOT_OFFERED)
                inner = self.add(space.tools, f"{param}.tools", space.name)
                shown.append(msgspec.structs.asdict(space) | {"tools": inner})
            elif kind == "function":
                function = convert(tool, FlatFunction, param, NOT_OFFERED)
                self._add_function(function, param, namespace)
                shown.append(msgspec.structs.asdict(function))
            else:
                self.warnings.append(f"{param} {kind!r} is not offered here and was left out")
                shown.append({"type": kind})
        return shown

    def _add_function(self, tool: FlatFunction, param: str, namespace: str) -> None:
        if any(tool.name == known.name for known in self.found):
            raise wrong(f"{param}.name", f"another function is called {tool.name!r}, too")
        self.found.append(tool_of(tool.name, tool.description, tool.parameters, f"{param}.parameters"))
        if namespace:
            self.namespaces[tool.name] = namespace


Turn = tuple[Message, tuple[Breakpoint | None, ...]]  # a message, and the marks on its blocks


def _turns(body: ResponsesBody, warnings: list[str]) -> list[Turn]:
    """Returns the turns of the input: reasoning and calls join the assistant's turn that they are of.

    Args:
        warnings: for the caller, of calls that were cut.
    """
    turns: list[Turn] = [(Message("system", (body.instructions,)), ())] if body.instructions else []
    if isinstance(body.input, str):
        return [*turns, (Message("user", (body.input,)), ())]
    names: dict[str, str] = {}  # id of a call → its function
    for number, item in enumerate(body.input):
        param = f"input[{number}]"
        marks: tuple[Breakpoint | None, ...] = ()
        match item.type:
            case "message":
                message, marks = _message(item, param), _marks(item.content)
            case "reasoning":
                message = Message("assistant", reasoning=_reasoning(item))
            case "function_call":
                if item.name is None or item.call_id is None:
                    raise wrong(param, "a call has a name, a call_id and arguments", "missing_required_parameter")
                names[item.call_id] = item.name
                call = ToolCall(item.name, item.arguments or "{}", item.call_id)
                call = whole_call(call, f"{param}.arguments", warnings)
                message = Message("assistant", calls=(call,))
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise wrong(param, "a result has a call_id and an output", "missing_required_parameter")
                content, marks = _blocks(item.output, f"{param}.output"), _marks(item.output)
                message = Message("tool", content, call_id=item.call_id, name=names.get(item.call_id, ""))
        turns.append((message, marks))
    if not turns:
        raise wrong("input", "it is empty; write a text, or items")
    return _joined(turns)


def _marks(content: Content | None) -> tuple[Breakpoint | None, ...]:
    if content is None or isinstance(content, str):
        return ()
    return tuple(
        block.prompt_cache_breakpoint if isinstance(block, InputText | InputImage) else None for block in content
    )


def _caching(body: ResponsesBody, turns: Sequence[Turn], dialogue: Dialogue, minimum: int) -> Caching | None:
    marks = Marks()
    for number, (message, points) in enumerate(turns):
        for index in range(max(1, len(message.content))):
            marks.add((number, index), None, points[index] if index < len(points) else None)
    return marks.caching(dialogue.conversation, minimum, options=body.prompt_cache_options)


def _message(item: InputItem, param: str) -> Message:
    if item.role is None or item.content is None:
        raise wrong(param, "a message has a role and a content", "missing_required_parameter")
    role = "system" if item.role == "developer" else item.role
    return Message(role, _blocks(item.content, f"{param}.content"))


def _reasoning(item: InputItem) -> str:
    """Returns the text of earlier reasoning; what is encrypted is none of ours."""
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    return "".join(block.text for block in item.content if isinstance(block, ReasoningText))


def _blocks(content: Content, param: str) -> tuple[str | Media, ...]:
    if isinstance(content, str):
        return (content,) if content else ()
    found: list[str | Media] = []
    for number, block in enumerate(content):
        match block:
            case InputText(text=text) | OutputText(text=text) | RefusalBlock(refusal=text) | ReasoningText(text=text):
                found.append(text)
            case InputImage(image_url=url):
                if url is None:
                    raise wrong(f"{param}[{number}].image_url", "it is missing", "missing_required_parameter")
                found.append(picture(url, f"{param}[{number}].image_url"))
    return tuple(found)


def _joined(turns: Sequence[Turn]) -> list[Turn]:
    """Joins the assistant's messages that follow each other: reasoning, text and calls of one answer are one turn."""
    found: list[Turn] = []
    for message, marks in turns:
        last = found[-1][0] if found else None
        if last is None or message.role != "assistant" or last.role != "assistant" or (last.calls and message.content):
            found.append((message, marks))
        else:
            joined = Message(
                "assistant",
                last.content + message.content,
                last.calls + message.calls,
                reasoning=last.reasoning + message.reasoning,
            )
            found[-1] = (joined, ())
    return found


# ------------------------------------------------------------------------------------------------- answering


class InputDetails(msgspec.Struct, frozen=True):
    """Parts of the input's tokens: those reused by whatever right, those that marks of the request have made the cache
    keep, and those reused under marks that were made before."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_read_input_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Parts of the generated tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of one answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


_MISS_REASONS = {
    Change.MODEL: "model_changed",
    Change.TOOLS: "tools_changed",
    Change.SYSTEM: "input_changed",
    Change.MESSAGES: "input_changed",
    Change.OPTIONS: "reasoning_effort_changed",
}


class CacheDiagnosis(msgspec.Struct, frozen=True):
    """Says why the prompt of an earlier response could or could not be reused.

    Attributes:
        reason, cache_missed_tokens, comparison_reusable_tokens: of a miss: the first part that changed, the input's
            tokens after that place, and the tokens before it.
        cause: of "unavailable": "evicted" where nothing changed and the tokens were no longer there.
        placed: the engine that computed it, of several: each has a cache of its own.
    """

    type: Literal["cache_miss", "cache_hit", "comparison_response_not_found", "unavailable"]
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cause: CacheCause | msgspec.UnsetType = msgspec.UNSET
    placed: PlacedFacts | msgspec.UnsetType = msgspec.UNSET


def diagnosis_of(comparison: Comparison, usage: Usage) -> CacheDiagnosis:
    """Writes a comparison in OpenAI's shape."""
    match comparison.change:
        case Change.UNKNOWN:
            return CacheDiagnosis("comparison_response_not_found")
        case Change.UNCOMPARED:
            return CacheDiagnosis("unavailable")
        case Change.NONE:
            cause = comparison.lost(usage)
            return CacheDiagnosis("cache_hit") if cause is None else CacheDiagnosis("unavailable", cause=cause)
        case change:
            missed = usage.prompt_tokens - comparison.shared
            return CacheDiagnosis("cache_miss", _MISS_REASONS[change], missed, comparison.shared)


class ResponseAnswer(msgspec.Struct, frozen=True):
    """An answer: its items, and the request's fields as they were understood."""

    id: str
    created_at: int
    model: str
    output: list[Json]
    status: str
    parallel_tool_calls: bool
    tool_choice: Any  # JSON, as it came
    tools: list[Json]
    temperature: float
    top_p: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    text: Json
    reasoning: Json
    usage: ResponseUsage | None = None
    incomplete_details: Json | None = None
    error: Json | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    prompt_cache_options: ComparedCacheOptions | None = None
    prompt_cache_diagnostics: CacheDiagnosis | None = None
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"
    store: Literal[False] = False
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"


@dataclass(slots=True)
class _Item:
    """An item of the answer that is being written."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()

    def shape(self, status: str, logprobs: bool) -> Json:
        """Returns the item as JSON; one in progress has no content yet."""
        begun = status == "in_progress"
        if self.kind == "function_call":
            space = {"namespace": self.namespace} if self.namespace else {}
            facts = {"call_id": self.call_id, "name": self.name, "arguments": "" if begun else self.text}
            return {"id": self.id, "type": self.kind, "status": status, **facts, **space}
        content = [] if begun else [self.part(logprobs)]
        if self.kind == "reasoning":
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self, logprobs: bool, empty: bool = False) -> Json:
        """Returns the one content of a message or of reasoning."""
        text = "" if empty else self.text
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part: Json = {"type": "output_text", "text": text, "annotations": []}
        if logprobs:
            part["logprobs"] = [] if empty else token_entries(self.logprobs)
        return part


class _UntoldTokens:
    """Gives the log-probabilities of an answer to the pieces of its text.

    A piece may come after the tokens that it begins with, while these may have begun a call or a tag: they wait here.
    The tokens of tags and of headers of calls are of no piece.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._waiting += logprobs

    def take(self, text: str, *, last: bool = True) -> tuple[TokenLogprob, ...]:
        """Returns the tokens in which a piece lies, and drops those before it; of "" all that wait.

        Args:
            last: no other piece lies in the tokens that wait.
        """
        waiting, sought = self._waiting, text.encode()
        data = b"".join(entry.data for entry in waiting)
        start = data.rfind(sought) if last else data.find(sought)
        if not sought or start < 0:
            self._waiting = []
            return tuple(waiting)
        *begins, _ = places = [0, *accumulate(len(entry.data) for entry in waiting)]
        # A token without bytes is of the piece before which it stands.
        first = min(bisect_right(places, start, lo=1) - 1, bisect_left(begins, start))
        after = bisect_left(begins, start + len(sought))
        self._waiting = waiting[after:]
        return tuple(waiting[first:after])


class _Response:
    """One request and its answer in both forms: the whole one is what the stream's events have made."""

    def __init__(
        self, asked: Asked[ResponsesBody], dialogue: Dialogue, tools: _Tools, comparison: Comparison | None
    ) -> None:
        self._comparison = comparison
        self._body = asked.body
        self._front = asked.front
        self._dialogue = dialogue
        self._tools = tools
        self._key = asked.id
        self._created = asked.front.now()
        self._logprobs = dialogue.request.sampling.logprobs
        self._items: list[_Item] = []
        self._tokens = _UntoldTokens()
        self._sequence = 0
        self._ended: ResponseAnswer | None = None

    async def whole(self) -> ResponseAnswer:
        async with aclosing(self.stream()) as events:
            async for _ in events:
                pass
        assert self._ended is not None, "the stream is over"
        return self._ended

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the events in the order that clients rely on; each has its number."""
        begun = False
        with self._front.open():
            async with aclosing(self._dialogue.steps()) as steps:
                async for step in steps:
                    if not begun:
                        begun = True
                        for name in ("created", "in_progress"):
                            yield self._event(f"response.{name}", response=self._answer(None))
                    self._tokens.add(step.logprobs)
                    for number, piece in enumerate(step.pieces, 1):
                        for event in self._written(piece, last=number == len(step.pieces)):
                            yield event
        said = self._dialogue.ending(0)
        if not self._items:
            for event in self._written(ContentPiece("")):
                yield event
        for event in self._told():
            yield event
        for event in self._closed("incomplete" if said.reason == "length" else "completed"):
            yield event
        self._ended = answer = self._answer(said)
        yield self._event(f"response.{answer.status}", response=answer)

    def failure(self, error: HttpError) -> bytes:
        """Returns the event that ends a stream that failed."""
        code = "server_error" if error.status >= 500 else error.code
        answer = msgspec.structs.replace(
            self._answer(None), status="failed", error={"code": code, "message": error.message}
        )
        return self._event("response.failed", response=answer)

    # ------------------------------------------------------------------ items and their events

    def _written(self, piece: Piece, *, last: bool = True) -> list[bytes]:
        """Returns the events of one piece. `last`: of its step."""
        match piece:
            case ReasoningPiece(text):
                events = self._at("reasoning")
                self._tokens.take(text, last=last)
                self._items[-1].text += text
                return [*events, self._part_event("reasoning_text.delta", delta=text)]
            case ContentPiece(text):
                events = self._at("message")
                return [*events, self._said(text, self._tokens.take(text, last=last))]
            case CallBegins(_, name):
                return [*self._closed("completed"), *self._opened(self._begin("function_call", name))]
            case ArgumentsPiece(_, text):
                self._tokens.take(text, last=last)
                self._items[-1].text += text
                return [self._item_event("function_call_arguments.delta", delta=text)]
            case CallEnds():
                return []

    def _said(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> bytes:
        """Returns the event of more of a message."""
        item = self._items[-1]
        item.text += text
        item.logprobs += logprobs
        entries = token_entries(logprobs) if self._logprobs else []
        return self._part_event("output_text.delta", delta=text, logprobs=entries)

    def _told(self) -> list[bytes]:
        """Returns the event of the tokens that ended a message without a text of their own, if there are such."""
        rest = self._tokens.take("") if self._items[-1].kind == "message" else ()
        return [self._said("", rest)] if rest else []

    def _at(self, kind: Literal["reasoning", "message"]) -> list[bytes]:
        """Begins an item unless one of its kind is open."""
        if self._items and self._items[-1].kind == kind:
            return []
        return [*self._closed("completed"), *self._opened(self._begin(kind))]

    def _begin(self, kind: Literal["reasoning", "message", "function_call"], name: str = "") -> _Item:
        number = len(self._items)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = _Item(kind, f"{prefix}_{self._key[-24:]}{number:02x}")
        if kind == "function_call":
            item.call_id, item.name = f"call_{self._key[-24:]}{number:02x}", name
            item.namespace = self._tools.namespaces.get(name, "")
        self._items.append(item)
        return item

    def _opened(self, item: _Item) -> list[bytes]:
        shape = item.shape("in_progress", self._logprobs)
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=shape)]
        if item.kind != "function_call":
            events.append(self._part_event("content_part.added", part=item.part(self._logprobs, empty=True)))
        return events

    def _closed(self, status: str) -> list[bytes]:
        """Returns the events that end the last item."""
        if not self._items:
            return []
        item = self._items[-1]
        if item.kind == "function_call":
            events = [self._item_event("function_call_arguments.done", arguments=item.text)]
        else:
            part = item.part(self._logprobs)
            text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            if item.kind == "message":
                text.setdefault("logprobs", [])
            kind = "reasoning_text" if item.kind == "reasoning" else "output_text"
            events = [self._part_event(f"{kind}.done", **text), self._part_event("content_part.done", part=part)]
        shape = item.shape(status, self._logprobs)
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=shape)]

    # Any: JSON
    def _part_event(self, name: str, **facts: Any) -> bytes:
        return self._item_event(name, content_index=0, **facts)

    def _item_event(self, name: str, **facts: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(f"response.{name}", item_id=self._items[index].id, output_index=index, **facts)

    def _event(self, name: str, **facts: Any) -> bytes:
        event = {"type": name, "sequence_number": self._sequence, **facts}
        self._sequence += 1
        return sse(event, name)

    # ------------------------------------------------------------------ the whole

    def _answer(self, said: Said | None) -> ResponseAnswer:
        """Returns the answer; of None what it is while it is being written."""
        body = self._body
        cut = said is not None and said.reason == "length"
        status = "in_progress" if said is None else "incomplete" if cut else "completed"
        output: list[Json] = []
        if said is not None:
            last = len(self._items) - 1
            output = [
                item.shape("incomplete" if cut and index == last else "completed", self._logprobs)
                for index, item in enumerate(self._items)
            ]
        return ResponseAnswer(
            id=_name(self._key),
            created_at=self._created,
            model=body.model,
            output=output,
            status=status,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=self._tools.shown,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=dict(body.metadata or {}),
            text={"format": body.text.format if body.text and body.text.format else {"type": "text"}},
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            usage=None if said is None else self._usage(said),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if said is None else self._front.now(),
            prompt_cache_options=body.prompt_cache_options or ComparedCacheOptions(),
            prompt_cache_diagnostics=None if said is None else self._diagnosis(),
        )

    def _diagnosis(self) -> CacheDiagnosis | None:
        if self._comparison is None:
            return None
        final = self._dialogue.final
        found = diagnosis_of(self._comparison, final.usage)
        return msgspec.structs.replace(found, placed=placed_facts(final.placed))

    def _usage(self, said: Said) -> ResponseUsage:
        usage = self._dialogue.final.usage
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens, usage.cache_write_tokens, usage.cache_read_tokens),
            usage.completion_tokens,
            OutputDetails(said.reasoning_tokens),
            usage.total_tokens,
        )


def _name(key: str) -> str:
    return f"resp_{key}"


def _warn(asked: Asked[ResponsesBody]) -> None:
    """Warns of fields that change nothing."""
    body, warnings = asked.body, asked.warnings
    reasoning = body.reasoning or ReasoningOptions()
    warn_of_effort(asked.front, "reasoning.effort", options_of(reasoning.effort), warnings)
    if reasoning.summary or reasoning.generate_summary:
        warnings.append("reasoning.summary: reasoning is given as it is; there are no summaries")
    if "reasoning.encrypted_content" in (body.include or ()):
        warnings.append("include: reasoning is given as text; it is never encrypted")
    items = () if isinstance(body.input, str) else body.input
    contents = (content for item in items for content in (item.content, item.output) if isinstance(content, tuple))
    details = (block.detail for content in contents for block in content if isinstance(block, InputImage))
    warn_of_hints(body.text.verbosity if body.text else None, "text.verbosity", details, warnings)


async def respond(asked: Asked[ResponsesBody]) -> Answer:
    """Answers an input."""
    body, front = asked.body, asked.front
    tools = _Tools()
    tools.shown = tools.add(body.tools or (), "tools")
    model = front.model(body.model)
    asked.warnings += tools.warnings
    _warn(asked)
    turns = _turns(body, asked.warnings)
    question = Question(
        [message for message, _ in turns],
        tuple(tools.found),
        choice_of(body.tool_choice, body.parallel_tool_calls, tools.found),
        body.text.format.schema if body.text and body.text.format else None,
        options=options_of(body.reasoning.effort if body.reasoning else None),
    )
    wanted = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    sampling = body.sampling(
        body.max_output_tokens or CONTEXT_LEFT, logprobs=wanted, top_logprobs=body.top_logprobs or 0
    )
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    dialogue = await open_dialogue(front, question, sampling, origin, asked.id, model=model, given=body.given())
    caching = _caching(body, turns, dialogue, front.limits.cache_minimum)
    dialogue.mark(caching, asked.warnings)
    earlier = body.prompt_cache_options.comparison_response_id if body.prompt_cache_options else None
    comparison = await compare(asked, dialogue, _name(asked.id), earlier)
    response = _Response(asked, dialogue, tools, comparison)
    if body.stream:
        return EventStream(response.stream(), failure=response.failure)
    return Reply(await response.whole())


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        respond,
        "Answer an input, as items",
        body=ResponsesBody,
        answer=ResponseAnswer,
        media=JSON_OR_EVENTS,
        errors=(404, 504),
        not_offered=NOT_OFFERED,
    ),
)
