"""`POST /v1/chat/completions`: answers to conversations, with tools, formats and reasoning."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec

from ...interpreter.tool_reader import ArgumentsPiece, CallBegins, CallEnds, ContentPiece
from ...lang.caching import CacheMark, CacheObject
from ...lang.conversations.messages import Message, Option
from ...lang.errors import CapabilityError
from ...lang.prompt import Media
from ...lang.protocol import CacheKeeping, CacheRequest, Caches, Origin, ReadCaches
from ...lang.tool_calls import Tool, ToolCall, ToolChoice
from ..bodies import Body, Json, Label, Regex, ToolName, TopLogprobs, wrong
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
from ..errors import HttpError
from ..front import Front
from ..http import DONE, JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from ..limits import MAX_MESSAGES, MAX_TOOLS
from ..marks import TOOLS, Breakpoint, CacheControl, CacheOptions, Marks
from .conversations import (
    ANY_OBJECT,
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
from .fields import NOT_OFFERED, GenerationFields, Metadata, TokenUsage, TopTokenEntry, token_entries, token_usage

# ------------------------------------------------------------------------------------------------ messages


class ImageUrl(Body, frozen=True):
    """A picture as a data URL."""

    url: str
    detail: Detail | None = None


class TextBlock(Body, frozen=True, tag="text", tag_field="type"):
    """Text of a message."""

    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


class ImageBlock(Body, frozen=True, tag="image_url", tag_field="type"):
    """A picture of a message."""

    image_url: ImageUrl
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Breakpoint | None = None


Block = TextBlock | ImageBlock | RefusalBlock
Content = str | Annotated[tuple[Block, ...], msgspec.Meta(max_length=MAX_MESSAGES)]


class CalledFunction(Body, frozen=True):
    """Name and arguments of a call, the arguments as JSON text. Clients that read them send what they read, too."""

    name: ToolName
    arguments: str
    parsed_arguments: Any = None  # JSON


class ChatCall(Body, frozen=True):
    """A call that an earlier answer made."""

    id: Label
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # clients that put a stream together send it back


class _ChatMessage(Body, frozen=True, tag_field="role"):
    """Base of the messages of a conversation."""


class SystemMessage(_ChatMessage, frozen=True, tag="system"):
    """Instructions."""

    content: Content
    name: Label | None = None


class DeveloperMessage(_ChatMessage, frozen=True, tag="developer"):
    """Instructions, under their newer name."""

    content: Content
    name: Label | None = None


class UserMessage(_ChatMessage, frozen=True, tag="user"):
    """A question."""

    content: Content
    name: Label | None = None


class AssistantMessage(_ChatMessage, frozen=True, tag="assistant"):
    """An earlier answer. What clients send back of one and no prompt holds is taken and left out."""

    content: Content | None = None
    tool_calls: Annotated[tuple[ChatCall, ...], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None  # JSON: the content, as the client has read it
    name: Label | None = None
    annotations: Annotated[tuple[Json, ...], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_ChatMessage, frozen=True, tag="tool"):
    """The result of a call."""

    content: Content
    tool_call_id: Label
    name: Label | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage

# --------------------------------------------------------------------------------------------------- tools


class FunctionFacts(Body, frozen=True):
    """A function that the model may call. `strict` changes nothing: arguments always follow their schema."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FunctionTool(Body, frozen=True):
    """A tool."""

    function: FunctionFacts
    type: Literal["function"] = "function"
    cache_control: CacheControl | None = None


class NamedFunction(Body, frozen=True):
    """The name of a function."""

    name: ToolName


class ForcedFunction(Body, frozen=True, tag="function", tag_field="type"):
    """The one function that is called."""

    function: NamedFunction

    def choice(self, parallel: bool) -> ToolChoice:
        return ToolChoice.only(self.function.name)


class AllowedFunctions(Body, frozen=True):
    """Functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ForcedFunction, ...], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body, frozen=True, tag="allowed_tools", tag_field="type"):
    """A choice among some of the tools."""

    allowed_tools: AllowedFunctions

    def choice(self, parallel: bool) -> ToolChoice:
        names = dict.fromkeys(each.function.name for each in self.allowed_tools.tools)
        return ToolChoice(self.allowed_tools.mode, tuple(names), parallel)


class JsonSchemaFacts(Body, frozen=True):
    """A schema. `name`, `description` and `strict` change nothing: answers always follow their schema."""

    schema: Json | None = None
    name: Label | None = None
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Body, frozen=True, tag="json_schema", tag_field="type"):
    """JSON by a schema."""

    json_schema: JsonSchemaFacts

    @property
    def schema(self) -> Json:
        """The schema; that of any object where there is none."""
        return ANY_OBJECT if self.json_schema.schema is None else self.json_schema.schema


class KeptTurns(Body, frozen=True):
    """The messages and tools of a cache (`/v1/caches`)."""

    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=MAX_MESSAGES)] = ()
    tools: Annotated[tuple[FunctionTool, ...], msgspec.Meta(max_length=MAX_TOOLS)] = ()


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    """Asks for answers to a conversation.

    Attributes:
        max_completion_tokens, max_tokens: of each answer; without them it may fill the context.
        tools, tool_choice, parallel_tool_calls: functions that may be called. Arguments follow their schema.
        response_format: of the answer's text; calls of tools are not bound by it.
        reasoning_effort: "none" and "minimal" turn reasoning off where the chat template can.
        regex: a regular expression that the answer matches.
        continue_final_message: the last message is the beginning of the answer.
        chat_template_kwargs: variables of the chat template.
        cache_control: a mark on the last block. prompt_cache_options: of breakpoints on blocks.
        cached_content: the name of a cache whose messages and tools come before these.
    """

    told_as = {"prompt": "messages", "json_schema": "response_format", "options": "chat_template_kwargs"}

    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=CONTEXT_LEFT)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=CONTEXT_LEFT)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[tuple[FunctionTool, ...], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolWord | ForcedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    reasoning_effort: Effort | None = None
    regex: Regex | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Label, Option] | None = None
    cache_control: CacheControl | None = None
    prompt_cache_options: CacheOptions | None = None
    cached_content: Label | None = None
    # Labels, and a hint, without effect; a header says so of the hint.
    metadata: Metadata | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    verbosity: Verbosity | None = None
    # At their defaults only.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: tuple[Literal["text"]] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    audio: None = None
    prediction: None = None
    moderation: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    def field_of(self, parameter: str) -> str | None:
        if parameter == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().field_of(parameter)

    @property
    def most_tokens(self) -> int:
        """Most tokens of an answer. Raises HttpError where the two fields for it differ."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise wrong("max_tokens", f"it is {older}, and max_completion_tokens is {newer}; give one of them")
        return newer or older or CONTEXT_LEFT


# ------------------------------------------------------------------------------------------------- answers


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of all generated tokens, those of reasoning and calls among them."""

    content: list[TopTokenEntry]
    refusal: None = None


class AnsweredFunction(msgspec.Struct, frozen=True):
    """Name and arguments of a call."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, frozen=True):
    """A call that the model made."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class AnsweredMessage(msgspec.Struct, frozen=True):
    """An answer. Reasoning stands under both of its names."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One of the answers."""

    index: int
    message: AnsweredMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatAnswer(msgspec.Struct, frozen=True):
    """All answers."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    object: Literal["chat.completion"] = "chat.completion"


# ------------------------------------------------------------------------------------------ body → question


def question_of(body: ChatBody, warnings: list[str], kept: int = 0) -> Question:
    """Returns the conversation that a body asks about.

    Args:
        warnings: for the caller, of calls that were cut.
        kept: so many of its messages are those of a cache, which have been checked; errors do not count them.

    Raises:
        HttpError: a field that is wrong, by its path.
    """
    tools = tools_of(body.tools or ())
    last = body.messages[-1]
    if body.continue_final_message and not isinstance(last, AssistantMessage):
        raise wrong("continue_final_message", "the last message is none of the assistant; leave it out")
    if body.add_generation_prompt is not None and body.add_generation_prompt == body.continue_final_message:
        raise wrong("add_generation_prompt", "it is the opposite of continue_final_message; leave it out")
    earlier: list[str] = []  # of messages of the cache, of which its creation has warned
    return Question(
        tuple(
            message_of(message, f"messages[{number}]", earlier if number < 0 else warnings)
            for number, message in enumerate(body.messages, -kept)
        ),
        tools,
        choice_of(body.tool_choice, body.parallel_tool_calls, tools),
        None if body.response_format is None else body.response_format.schema,
        body.regex,
        options_of(body.reasoning_effort, body.chat_template_kwargs),
        body.continue_final_message,
    )


def message_of(message: ChatMessage, param: str, warnings: list[str]) -> Message:
    """Returns a message in the words of the language. `warnings` are for the caller, of calls that were cut."""
    role = type(message).__struct_config__.tag
    assert isinstance(role, str), "every message has its role as its tag"
    content = _blocks(message.content, f"{param}.content")
    if isinstance(message, AssistantMessage):
        thoughts = {text for text in (message.reasoning, message.reasoning_content) if text}
        if len(thoughts) > 1:
            raise wrong(f"{param}.reasoning", "it differs from reasoning_content; send one of them")
        if message.refusal and not content:
            content = (message.refusal,)
        calls = tuple(
            whole_call(
                ToolCall(call.function.name, call.function.arguments, call.id),
                f"{param}.tool_calls[{number}].function.arguments",
                warnings,
            )
            for number, call in enumerate(message.tool_calls or ())
        )
        return Message("assistant", content, calls, name=message.name or "", reasoning="".join(thoughts))
    if isinstance(message, ToolMessage):
        return Message("tool", content, call_id=message.tool_call_id, name=message.name or "")
    return Message("system" if role == "developer" else role, content, name=message.name or "")


def marks_of(messages: Sequence[ChatMessage], tools: Sequence[FunctionTool]) -> Marks:
    """Returns the blocks of a conversation with their marks. Raises HttpError for marks of two kinds."""
    marks = Marks()
    for number, tool in enumerate(tools):
        marks.add((TOOLS, number), tool.cache_control)
    for number, message in enumerate(messages):
        content = message.content
        if content is None or isinstance(content, str):
            marks.add((number, 0), None)
            continue
        for index, block in enumerate(content):
            if isinstance(block, RefusalBlock):
                marks.add((number, index), None)
            else:
                marks.add((number, index), block.cache_control, block.prompt_cache_breakpoint)
    return marks


def _blocks(content: Content | None, param: str) -> tuple[str | Media, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,) if content else ()
    found: list[str | Media] = []
    for number, block in enumerate(content):
        match block:
            case TextBlock(text=text) | RefusalBlock(refusal=text):
                found.append(text)
            case ImageBlock(image_url=image):
                found.append(picture(image.url, f"{param}[{number}].image_url.url"))
    return tuple(found)


def tools_of(tools: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    """Returns tools in the words of the language. Raises ParameterError for a schema that is too large."""
    return tuple(
        tool_of(facts.name, facts.description, facts.parameters, f"tools[{number}].function.parameters")
        for number, facts in enumerate(tool.function for tool in tools)
    )


# ------------------------------------------------------------------------------------------------- answering


class _Chat:
    """One request and its answer in both forms."""

    def __init__(self, asked: Asked[ChatBody], dialogue: Dialogue) -> None:
        self._body = asked.body
        self._front = asked.front
        self._dialogue = dialogue
        self._id = "chatcmpl-" + asked.id
        self._created = asked.front.now()

    async def whole(self) -> ChatAnswer:
        with self._front.open(self._body.count):
            answers = await self._dialogue.whole()
        choices = [
            ChatChoice(
                index,
                self._message(index, said),
                said.reason,
                ChatLogprobs(token_entries(said.logprobs)) if self._body.logprobs else None,
            )
            for index, said in enumerate(answers)
        ]
        return ChatAnswer(self._id, self._created, self._body.model, choices, self._usage(answers))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the events: the role of each answer, its pieces, its end, and usage when it is asked for."""
        count = self._body.count
        begun = False
        with self._front.open(count):
            async with aclosing(self._dialogue.steps()) as steps:
                async for step in steps:
                    if not begun:
                        begun = True
                        for event in self._roles():
                            yield event
                    deltas = [delta for piece in step.pieces if (delta := self._delta(step.index, piece))]
                    if step.logprobs and self._body.logprobs and not deltas:
                        deltas = [{}]  # the tokens' log-probabilities are not held back with their text
                    for number, delta in enumerate(deltas):
                        told = self._body.logprobs and number == 0
                        logprobs = ChatLogprobs(token_entries(step.logprobs)) if told else None
                        yield self._event(step.index, delta, logprobs=logprobs)
        endings = [self._dialogue.ending(index) for index in range(count)]
        for index, said in enumerate(endings):
            yield self._event(index, {}, said.reason)
        if self._body.wants_usage:
            yield sse(self._head([]) | {"usage": self._usage(endings)})
        yield DONE

    def _roles(self) -> list[bytes]:
        """Returns the first event of each answer, in order: clients make their lists of answers by it."""
        return [self._event(index, {"role": "assistant", "content": ""}) for index in range(self._body.count)]

    # Any: JSON
    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case ReasoningPiece(text):
                return {"reasoning_content": text, "reasoning": text}
            case ContentPiece(text):
                return {"content": text}
            case CallBegins(call, name):
                function = {"name": name, "arguments": ""}
                begun = {"index": call, "id": self._call_id(index, call), "type": "function", "function": function}
                return {"tool_calls": [begun]}
            case ArgumentsPiece(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
            case CallEnds():
                return None

    def _event(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: ChatLogprobs | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        event = self._head([choice])
        return sse(event | {"usage": None} if self._body.wants_usage else event)

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _message(self, index: int, said: Said) -> AnsweredMessage:
        calls = [
            AnsweredCall(self._call_id(index, number), AnsweredFunction(call.name, call.arguments))
            for number, call in enumerate(said.calls)
        ]
        reasoning = said.reasoning or msgspec.UNSET
        content = said.content if said.content or not calls else None
        return AnsweredMessage(
            content, reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or msgspec.UNSET
        )

    def _call_id(self, index: int, call: int) -> str:
        return f"call_{self._id[-24:]}{index:x}{call:02x}"

    def _usage(self, answers: Sequence[Said]) -> TokenUsage:
        final = self._dialogue.final
        return token_usage(final.usage, sum(said.reasoning_tokens for said in answers))


def _warn(asked: Asked[ChatBody]) -> None:
    """Warns of fields that change nothing."""
    body = asked.body
    warn_of_effort(asked.front, "reasoning_effort", options_of(body.reasoning_effort), asked.warnings)
    blocks = (block for message in body.messages if isinstance(message.content, tuple) for block in message.content)
    details = (block.image_url.detail for block in blocks if isinstance(block, ImageBlock))
    warn_of_hints(body.verbosity, "verbosity", details, asked.warnings)


async def converse(asked: Asked[ChatBody]) -> Answer:
    """Answers a conversation."""
    body, front = asked.body, asked.front
    model = front.model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "it needs logprobs: true")
    _warn(asked)
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    cache: CacheObject | None = None
    kept = KeptTurns()
    if body.cached_content is not None:
        cache, kept = await _kept(asked, body.cached_content, origin)
        if kept.tools and body.tools:
            raise wrong("tools", f"the cache {cache.name!r} has tools of its own; leave these out")
        messages, tools = kept.messages + body.messages, kept.tools or body.tools
        body = msgspec.structs.replace(body, messages=messages, tools=tools)
    question = question_of(body, asked.warnings, len(kept.messages))
    sampling = body.sampling(body.most_tokens, logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0)
    dialogue = await open_dialogue(front, question, sampling, origin, asked.id, model=model, given=body.given())
    conversation = dialogue.conversation
    caching = marks_of(body.messages, body.tools or ()).caching(
        conversation,
        front.limits.cache_minimum,
        whole=body.cache_control,
        options=body.prompt_cache_options,
        kept=None if cache is None else CacheMark(marks_of(kept.messages, kept.tools).last(conversation), cache.ttl),
    )
    dialogue.mark(caching, asked.warnings)
    chat = _Chat(asked, dialogue)
    return EventStream(chat.stream()) if body.stream else Reply(await chat.whole())


async def _kept(asked: Asked[ChatBody], name: str, origin: Origin) -> tuple[CacheObject, KeptTurns]:
    """Returns a cache and its messages. Raises HttpError 404 for a name that the caller has not."""
    found = await ask_caches(asked.front, ReadCaches(f"{asked.id}-cache", name, origin)) if name else None
    if found is None or not found.caches:
        raise HttpError(
            404, f"no cache {name!r}; create it by POST /v1/caches", "cache_not_found", param="cached_content"
        )
    (cache,) = found.caches
    return cache, msgspec.json.decode(cache.record, type=KeptTurns)


async def ask_caches(front: Front, request: CacheRequest) -> Caches:
    """Asks the backend about caches. Raises CapabilityError for one that keeps none by name."""
    if not isinstance(front.backend, CacheKeeping):
        raise CapabilityError(f"{front.backend.capabilities.name} keeps no caches by name; mark blocks instead")
    return await front.backend.caches(request)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        converse,
        "Answer a conversation",
        body=ChatBody,
        answer=ChatAnswer,
        media=JSON_OR_EVENTS,
        errors=(404, 504),
        not_offered={
            **NOT_OFFERED,
            **CONVERSATION_NOT_OFFERED,
            "store": "answers are not stored; leave it out",
            "modalities": 'answers are text; write ["text"], or leave it out',
            "separate_reasoning": "reasoning is always a field of its own; leave it out",
            "stream_reasoning": "reasoning is always streamed; leave it out",
            "audio": "there is no audio; leave it out",
            "prediction": "predicted output is not offered; leave it out",
            "web_search_options": "the server searches nothing; offer a tool",
            "functions": "write tools",
            "function_call": "write tool_choice",
        },
    ),
)
