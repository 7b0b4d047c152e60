"""FakeAnthropic: a server of the Anthropic dialect on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeAnthropic`:

    from umbel.testing import FakeAnthropic

    with FakeAnthropic({"capital of France?": "Paris."}) as server:
        backend = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."
        assert server.calls == 1 and server.usage.cached_tokens == 0
        assert server.requests[0].body["messages"][0]["role"] == "user"

The script is that of FakeOpenAI and of Echo. Requests come first: their fields, with types and ranges, what the
provider refuses of them, and its prompt cache:

blocks       [tools][system][turn 1]*[turn 2][turn 3]*        * a breakpoint: the prefix up to here is stored
read         the longest stored prefix that ends with one of the blocks, at most 20 before a breakpoint
written      what lies between that and the last breakpoint
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Unpack

from msgspec import Meta

from ...lang import checks
from ...lang.prompt import Media, Part, Text
from ...lang.protocol import Completion, FinishReason, Usage
from ...lang.sampling import SamplingParams
from ...lang.tool_calls import FENCED, ToolCall
from ..backends.echo_answers import Script, cut
from ..backends.echo_tokens import pieces, prompt_tokens
from ..backends.hosted.conversation import Content, Conversation, Message
from ..tool_reader import read_answer
from .provider import (
    Answered,
    FakeOptions,
    FakeProvider,
    Form,
    JsonBody,
    Misfit,
    Question,
    Refused,
    Schema,
    fitted,
    meant,
    of_schema,
    picture,
    refuse,
    written,
)
from .server import AnswerEvents, at_once, event

NonEmpty = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class AnthropicFeatures:
    """Says what the models of a FakeAnthropic can do. The defaults are those of recent models.

    Attributes:
        prefill: an assistant message at the end of a request is continued; newer models refuse it.
        structured_outputs: answers can be held to a JSON Schema.
        images: parts of messages.
        sampling: "all", "one" (temperature or top_p, not both), or "none" of temperature, top_p and top_k.
        thinks: thoughts come before the answer, unless the request switches them off.
        cache_minimum: tokens of the shortest prefix that is stored.
        models: GET /v1/models is there.

    Examples:
        >>> from umbel.testing import AnthropicFeatures, FakeAnthropic
        >>> with FakeAnthropic(["Paris"], features=AnthropicFeatures(sampling="none")) as server:
        ...     model = ul.Anthropic("claude-opus-4-6", base_url=server.base_url, api_key=server.api_key)
        ...     try:
        ...         model("What is the capital of France?", temperature=0)
        ...     except ul.CapabilityError as error:
        ...         print(error)
        anthropic claude-opus-4-6: ... (400: `temperature` is not supported for this model.); ...
    """

    prefill: bool = True
    structured_outputs: bool = True
    images: bool = True
    sampling: Literal["all", "one", "none"] = "one"
    thinks: bool = False
    cache_minimum: int = 0
    models: bool = True

    def __post_init__(self) -> None:
        checks.record(self)


CLAUDE = AnthropicFeatures()


class CacheControl(JsonBody):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(JsonBody, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageSource(JsonBody):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(JsonBody, tag="image"):
    source: ImageSource
    cache_control: CacheControl | None = None


class ToolUseBlock(JsonBody, tag="tool_use"):
    id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]+$")]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,200}$")]
    input: Schema
    cache_control: CacheControl | None = None


class ToolResultBlock(JsonBody, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


MessageBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock


class ClaudeMessage(JsonBody):
    role: Literal["user", "assistant"]
    content: str | list[MessageBlock]

    @property
    def blocks(self) -> list[MessageBlock]:
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


class ClaudeTool(JsonBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: Schema
    description: str = ""
    type: Literal["custom"] = "custom"
    cache_control: CacheControl | None = None


class ToolChoiceField(JsonBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(JsonBody):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(JsonBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ThinkingField(JsonBody):
    type: Literal["disabled"]


class Metadata(JsonBody):
    user_id: str | None = None


class MessagesBody(JsonBody, kw_only=True):
    """POST /v1/messages"""

    model: str
    messages: list[ClaudeMessage]
    max_tokens: Annotated[int, Meta(ge=0)]  # 0 stores the prompt and says nothing
    system: str | list[TextBlock] | None = None
    stop_sequences: list[NonEmpty] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: ToolChoiceField | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingField | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def system_blocks(self) -> list[TextBlock]:
        return [TextBlock(self.system)] if self.system and isinstance(self.system, str) else list(self.system or ())


_LOOKBACK = 20  # blocks before a breakpoint in which an earlier prefix is found


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A piece of a prompt.

    Attributes:
        ids: of its tokens, the scaffolding before it included.
        breakpoint: how long the prefix that ends here is stored; "" for none.
    """

    ids: tuple[int, ...]
    breakpoint: Literal["", "5m", "1h"] = ""


class PrefixStore:
    """Prefixes that were stored, for as long as the server runs.

    Args:
        minimum: tokens of the shortest prefix that is stored.
    """

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self._stored: set[tuple[int, ...]] = set()

    def charge(self, blocks: Sequence[PromptBlock]) -> tuple[int, int, int]:
        """Returns the tokens a prompt reads from and writes to the cache, and those of them that it writes for an hour;
        stores its breakpoints."""
        ids: list[int] = []
        read = last = hour = 0
        ends: list[int] = []
        stored: list[tuple[int, ...]] = []
        for index, block in enumerate(blocks):
            ids.extend(block.ids)
            ends.append(len(ids))
            if not block.breakpoint or len(ids) < self._minimum:
                continue
            last = len(ids)
            hour = last if block.breakpoint == "1h" else hour
            stored.append(tuple(ids))
            for end in ends[max(0, index - _LOOKBACK) :]:
                if end > read and tuple(ids[:end]) in self._stored:
                    read = end
        self._stored.update(stored)
        return read, last - read, max(0, hour - read)


MOST_BREAKPOINTS = 4


def read(body: object, features: AnthropicFeatures, models: Sequence[str]) -> MessagesBody:
    """Parses and checks a request as the provider does before it runs its model.

    Raises:
        Refused: with the provider's words.
    """
    request = fitted(body, MessagesBody, _misfit)
    if request.model not in models:
        raise Refused(404, f"model: {request.model}")
    given = [name for name in ("temperature", "top_p", "top_k") if getattr(request, name) is not None]
    refuse(features.sampling == "none" and given, f"`{given[0] if given else ''}` is not supported for this model.")
    words = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    refuse(features.sampling == "one" and {"temperature", "top_p"} <= set(given), words)
    _check_messages(request, features)
    blank = any(not stop.strip() for stop in request.stop_sequences or ())
    refuse(blank, "stop_sequences: each stop sequence must contain non-whitespace")
    times = [block.breakpoint for block in blocks(request) if block.breakpoint]
    found = len(times)
    words = "A ttl='1h' cache_control block must not come after a ttl='5m' cache_control block."
    refuse(times != sorted(times), words)
    words = f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. Found {found}."
    refuse(found > MOST_BREAKPOINTS, words)
    if request.output_config is not None and request.output_config.format is not None:
        words = "output_config.format: This model does not support structured outputs."
        refuse(not features.structured_outputs, words)
        words = "Prefilling assistant messages is not supported together with output_config.format."
        refuse(request.messages[-1].role == "assistant", words)
    return request


def _check_messages(request: MessagesBody, features: AnthropicFeatures) -> None:
    refuse(not request.messages, "messages: at least one message is required")
    refuse(request.messages[0].role != "user", 'messages: first message must use the "user" role')
    lists = [request.system, *(said.content for said in request.messages)]
    for block in [block for given in lists if isinstance(given, list) for block in given]:
        if isinstance(block, TextBlock):
            refuse(not block.text, "messages: text content blocks must be non-empty")
            refuse(not block.text.strip(), "messages: text content blocks must contain non-whitespace text")
    _check_results(request)
    last = request.messages[-1]
    for index, said in enumerate(request.messages):
        words = "all messages must have non-empty content except for the optional final assistant message"
        refuse(not said.content and (said is not last or said.role != "assistant"), f"messages.{index}: {words}")
    if last.role == "assistant":
        words = "This model does not support assistant message prefill. The conversation must end with a user message."
        refuse(not features.prefill, words)
        ending = getattr(last.blocks[-1], "text", "") if last.content else ""
        refuse(ending != ending.rstrip(), "messages: final assistant content cannot end with trailing whitespace")


def _check_results(request: MessagesBody) -> None:
    """Refuses calls of tools without results right after them, and results of calls that were not made."""
    waiting: list[str] = []
    for index, said in enumerate(request.messages):
        answered = [block.tool_use_id for block in said.blocks if isinstance(block, ToolResultBlock)]
        first = isinstance(said.blocks[0], ToolResultBlock) if said.blocks else False
        words = "`tool_use` ids were found without `tool_result` blocks immediately after"
        refuse(waiting and (not first or sorted(answered) != sorted(waiting)), f"messages.{index - 1}: {words}")
        words = "unexpected `tool_use_id` found in `tool_result` blocks"
        refuse(answered and not waiting, f"messages.{index}: {words}")
        waiting = [block.id for block in said.blocks if isinstance(block, ToolUseBlock)]
        words = "messages: Requests which include `tool_use` blocks must define tools"
        refuse(waiting and not request.tools, words)


def conversation(request: MessagesBody, features: AnthropicFeatures) -> tuple[tuple[Message, ...], Content | None]:
    """Returns the turns, system first, and the content that the answer continues: None without a last answer."""
    turns: list[Message] = []
    if request.system:
        turns.append(Message("system", tuple(Text(block.text) for block in request.system_blocks)))
    names = {
        block.id: block.name for said in request.messages for block in said.blocks if isinstance(block, ToolUseBlock)
    }
    turns.extend(Message(said.role, content(said, features, names)) for said in request.messages)
    if turns[-1].role == "assistant":
        return tuple(turns[:-1]), turns[-1].content
    return tuple(turns), None


def content(said: ClaudeMessage, features: AnthropicFeatures, names: Mapping[str, str]) -> Content:
    """Returns a turn's content, calls and results of tools as text in umbel's fence.

    Args:
        names: of the tools, by the ids of the calls.

    Raises:
        Refused: images that the model does not take.
    """
    parts: list[Text | Media] = []
    for block in said.blocks if said.content else ():
        if not isinstance(block, ImageBlock):
            between = "\n" if parts and not isinstance(block, TextBlock) else ""
            parts.append(Text(between + _text_of(block, names)))
            continue
        taken = features.images and said.role == "user"
        refuse(not taken, f"messages: images are not supported in {said.role} messages of this model")
        parts.append(picture(block.source.data, Refused(400, "messages: image source data is no valid base64")))
    return tuple(parts)


def _text_of(block: TextBlock | ToolUseBlock | ToolResultBlock, names: Mapping[str, str]) -> str:
    match block:
        case TextBlock():
            return block.text
        case ToolUseBlock():
            return FENCED.spell([ToolCall(block.name, json.dumps(block.input, ensure_ascii=False))])
        case ToolResultBlock():
            told = block.content if isinstance(block.content, str) else "".join(part.text for part in block.content)
            return FENCED.spell_result(names[block.tool_use_id], told)


def blocks(request: MessagesBody) -> list[PromptBlock]:
    """Returns the prompt's blocks in cache order: tools, system, messages."""
    told: list[PromptBlock] = []
    for tool in request.tools or ():
        text = json.dumps([tool.name, tool.description, tool.input_schema])
        told.append(_block("", Text(text), tool.cache_control))
    names = {each.id: each.name for said in request.messages for each in said.blocks if isinstance(each, ToolUseBlock)}
    before = ""  # scaffolding that stands before the next block
    if request.system:
        before = "<|im_start|>system\n"
        for block in request.system_blocks:
            told.append(_block(before, Text(block.text), block.cache_control))
            before = ""
        before = "<|im_end|>\n"
    for said in request.messages:
        before += f"<|im_start|>{said.role}\n"
        for each in said.blocks:
            part: Part
            if not isinstance(each, ImageBlock):
                part = Text(_text_of(each, names))
            else:
                part = Media("image", hashlib.sha256(each.source.data.encode()).hexdigest(), b"")
            told.append(_block(before, part, each.cache_control))
            before = ""
        before += "<|im_end|>\n" if said is not request.messages[-1] or said.role == "user" else ""
    ending = "<|im_start|>assistant\n" if request.messages[-1].role == "user" else ""
    return [*told, _block(before + ending, Text(""), None)]


def _block(before: str, part: Part, cached: CacheControl | None) -> PromptBlock:
    ids = tuple(token for token, _ in prompt_tokens((Text(before, control=True), part)))
    return PromptBlock(ids, "" if cached is None else cached.ttl)


def _misfit(found: Misfit) -> Refused:
    place = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", found.place)
    if found.unknown:
        return Refused(400, f"{place}.{found.unknown}: Extra inputs are not permitted".lstrip("."))
    if found.missing:
        return Refused(400, f"{place}.{found.missing}: Field required".lstrip("."))
    return Refused(400, f"{place}: {found.problem}")


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}
_THOUGHT = "Let me think about this."

Json = dict[str, object]


class FakeAnthropic(FakeProvider):
    """Plays a server of Anthropic's dialect: /v1/messages, /v1/models.

    Prompts are cached as the provider does it: where `cache_control` says so, and never else. `usage` counts what is
    read as `cached_tokens`, and what is written as `cache_write_tokens`.

    Args:
        script: as Echo's. With a schema, the answer has to satisfy it; a bare one is put into the object that the
            schema asks for where that has one member. So has the input of a tool that the model must use.
        models: names that exist.
        features: what the models can do, to play older and newer ones.
        options: faults, a gate and others, as of `FakeOptions`.

    Examples:
        >>> from umbel.testing import FakeAnthropic
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.system("Be brief.") + ul.user(f"The capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeAnthropic({"France": "Paris"}) as server:
        ...     model = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        ...     server.requests[0].body["system"]
        'Paris'
        [{'type': 'text', 'text': 'Be brief.'}]
    """

    KEY_HEADER = "x-api-key"
    ERROR_EVENT = "error"

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("claude-haiku-4-5", "claude-sonnet-4-5", "claude-opus-4-6"),
        features: AnthropicFeatures = CLAUDE,
        **options: Unpack[FakeOptions],
    ) -> None:
        super().__init__(script, models, **options)
        checks.instance("features", features, AnthropicFeatures)
        self.features = features
        self._store = PrefixStore(features.cache_minimum)

    @property
    def base_url(self) -> str:
        return self.address

    # -------------------------------------------------------------------------------- the dialect

    def _listing(self, path: str) -> object | None:
        entries: dict[str, Json] = {
            model: {"type": "model", "id": model, "display_name": model, "created_at": "2026-01-01T00:00:00Z"}
            for model in self.models
        }
        if not self.features.models:
            return None
        if path == "/v1/models":
            data = list(entries.values())
            return {"data": data, "has_more": False, "first_id": self.models[0], "last_id": self.models[-1]}
        return entries.get(path.removeprefix("/v1/models/"))

    def _question(self, path: str, body: object) -> Question:
        if path != "/v1/messages":
            raise Refused(404, f"Not found: POST {path}")
        request = read(body, self.features, self.models)
        turns, begun = conversation(request, self.features)
        asked = meant(turns) if begun is None else written(Conversation(turns, begun))
        thinks = self.features.thinks and request.thinking is None
        return _AnthropicQuestion(asked, 1, request, self._store, *_form(request), thinks)

    def _failure(self, refused: Refused) -> object:
        message = refused.message or "invalid x-api-key"
        kind = _KINDS.get(refused.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_fake"}


@dataclass(frozen=True, slots=True)
class _AnthropicQuestion(Question):
    """A request for a message.

    Attributes:
        body: as it came.
        store: the server's prompt cache.
        form: what the answer must be.
        tool: the tool that the model must use; "" for none.
        thinks: thoughts come before the answer.
    """

    body: MessagesBody
    store: PrefixStore
    form: Form | None
    tool: str
    thinks: bool

    def answer(self, said: list[str]) -> Answered:
        sampling = SamplingParams(max_tokens=self.body.max_tokens, stop=tuple(self.body.stop_sequences or ()))
        called = read_answer(FENCED, [self.tool] if self.tool else [], said[0]).calls
        given = called[0].arguments if called else said[0]
        text = given if self.form is None else self.form.shaped(given, sampling)
        completion, texts = cut(text, sampling)
        prompt = blocks(self.body)
        read, stored, hour = self.store.charge(prompt)
        thought = len(pieces(_THOUGHT)) if self.thinks else 0
        tokens = sum(len(block.ids) for block in prompt)
        usage = Usage(tokens, read, len(completion.token_ids) + thought, 1, stored, hour, read)
        message = self._message(usage)
        ending: Json = {"stop_reason": self._reason(completion), "stop_sequence": self._matched(completion)}
        calls = self._calls(completion)
        if calls:
            ending = {"stop_reason": "tool_use", "stop_sequence": None}
        if self.body.stream:
            return Answered(self._events(message, completion, texts, ending, usage), usage)
        if calls:
            return Answered(at_once({**message, "content": calls, **ending, "usage": _counted(usage)}), usage)
        content = [*self._thoughts(), *([self._block(completion.text)] if completion.text else [])]
        return Answered(at_once({**message, "content": content, **ending, "usage": _counted(usage)}), usage)

    def _events(
        self, message: Json, completion: Completion, texts: list[str], ending: Json, usage: Usage
    ) -> AnswerEvents:
        begun = {**message, "usage": {**_counted(usage), "output_tokens": 1}}
        opening = [event({"type": "message_start", "message": begun}, "message_start")]
        closing = []
        place = 0
        for thought in self._thoughts():
            opening += _at(place, "content_block_start", content_block={**thought, "thinking": ""})
            delta = {"type": "thinking_delta", "thinking": thought["thinking"]}
            opening += [*_at(place, "content_block_delta", delta=delta), *_at(place, "content_block_stop")]
            place += 1
        told: list[bytes] = []
        calls = self._calls(completion)
        for block in calls:
            told += _streamed_block(place, block)
            place += 1
        if completion.text and not calls:
            opening += _at(place, "content_block_start", content_block=self._block(""))
            opening.append(event({"type": "ping"}, "ping"))
            seen = [*texts[: completion.kept], *([completion.tail] if completion.tail else [])]
            told = [line for text in seen for line in _at(place, "content_block_delta", delta=self._delta(text))]
            closing += _at(place, "content_block_stop")
        cost = {"output_tokens": usage.completion_tokens}
        closing.append(event({"type": "message_delta", "delta": ending, "usage": cost}, "message_delta"))
        return AnswerEvents(
            tuple(opening), tuple(told), tuple(closing), (event({"type": "message_stop"}, "message_stop"),)
        )

    def _calls(self, completion: Completion) -> list[Json]:
        """Returns the blocks of an answer that calls offered tools in umbel's fence; none for another one."""
        choice = self.body.tool_choice
        free = not self.tool and (choice is None or choice.type != "none")
        names = [tool.name for tool in self.body.tools or () if free]
        read = read_answer(FENCED, names, completion.text)
        content: list[Json] = [{"type": "text", "text": read.content}] if read.content.strip() else []
        calls = [
            {"type": "tool_use", "id": f"toolu_fake_{number}", "name": call.name, "input": json.loads(call.arguments)}
            for number, call in enumerate(read.calls)
            if not read.cut
        ]
        return [*content, *calls] if calls else []

    def _message(self, usage: Usage) -> Json:
        """Writes a message without content."""
        return {
            "id": "msg_fake",
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counted(usage),
        }

    def _thoughts(self) -> list[Json]:
        return [{"type": "thinking", "thinking": _THOUGHT, "signature": "fake"}] if self.thinks else []

    def _block(self, text: str) -> Json:
        """Writes a block. A tool's input cut off by max_tokens is no object and is left out."""
        if not self.tool:
            return {"type": "text", "text": text}
        try:
            given = json.loads(text or "{}")
        except (ValueError, RecursionError):
            given = {}
        return {"type": "tool_use", "id": "toolu_fake", "name": self.tool, "input": given}

    def _delta(self, text: str) -> Json:
        return {"type": "input_json_delta", "partial_json": text} if self.tool else {"type": "text_delta", "text": text}

    def _reason(self, completion: Completion) -> str:
        if completion.matched_stop is not None:
            return "stop_sequence"
        reason = _REASONS[completion.finish_reason]
        return "tool_use" if self.tool and reason == "end_turn" else reason

    def _matched(self, completion: Completion) -> str | None:
        return str(completion.matched_stop) if completion.matched_stop is not None else None


def _form(request: MessagesBody) -> tuple[Form | None, str]:
    """Returns the required form of an answer, and the tool that must be used.

    Raises:
        Refused: a tool that is not there.
    """
    tools = {tool.name: tool for tool in request.tools or ()}
    match request.tool_choice:
        case None:
            pass
        case choice if choice.type == "tool" or (choice.type == "any" and len(tools) == 1):
            name = choice.name if choice.type == "tool" else next(iter(tools))
            if name not in tools:
                raise Refused(400, f"tool_choice.name: tool {name!r} is not in the list of tools")
            return of_schema(tools[name].input_schema), name
    if request.output_config is not None and request.output_config.format is not None:
        return of_schema(request.output_config.format.schema), ""
    return None, ""


def _streamed_block(place: int, block: Json) -> list[bytes]:
    """Makes the events of a block of text or a call."""
    if block["type"] == "text":
        begun, told = (
            {**block, "text": ""},
            [{"type": "text_delta", "text": text} for text in pieces(str(block["text"]))],
        )
    else:
        begun = {**block, "input": {}}
        written = json.dumps(block["input"], ensure_ascii=False)
        told = [{"type": "input_json_delta", "partial_json": text} for text in pieces(written)]
    events = _at(place, "content_block_start", content_block=begun)
    for delta in told:
        events += _at(place, "content_block_delta", delta=delta)
    return events + _at(place, "content_block_stop")


def _at(place: int, name: str, **fields: object) -> list[bytes]:
    """Makes an event about one block of the answer."""
    return [event({"type": name, "index": place, **fields}, name)]


def _counted(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_write_tokens - usage.long_write_tokens,
            "ephemeral_1h_input_tokens": usage.long_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
    }
