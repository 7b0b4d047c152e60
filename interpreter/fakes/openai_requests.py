"""Reads requests of the OpenAI dialect: the fields that each API takes, with types and ranges, and what is refused.

A server to play is an `OpenAIFeatures`: the same fields, of which it takes more or fewer.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from ...lang import checks
from ...lang.prompt import Media, Text
from ...lang.sampling import SamplingParams
from ...lang.tool_calls import ToolCall
from ..backends.hosted.conversation import Content, Message
from .provider import JsonBody, Misfit, Refused, Schema, SentTurn, fitted, picture, refuse, shown_turns

Count = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


@dataclass(frozen=True, slots=True)
class OpenAIFeatures:
    """Says what a FakeOpenAI can do. The defaults are those of OpenAI's own recent models.

    `VLLM`, `SGLANG`, `LLAMA_CPP`, `OPENROUTER` and `REASONING` are such features.

    Attributes:
        chat: the route /v1/chat/completions is there.
        completions: the route /v1/completions is there.
        models: the route /v1/models is there.
        response_format: structured outputs; without, the parameter is refused, as older models do.
        stops: most stop strings of a request; reasoning models take none.
        temperature: reasoning models take the default alone (and top_p, penalties).
        max_tokens: reasoning models take max_completion_tokens alone.
        logprobs: of chat requests, and of completion requests.
        images: parts of messages.
        prompt_logprobs: echo together with logprobs; OpenAI has ended it, vLLM and llama-cpp-python have it.
        extras: parameters of other servers: "structured_outputs", "continue_final_message", "top_k", "grammar", ...
        names_stop: answers say which stop ended them, as vLLM's.
        owned_by: what GET /v1/models says.
        tools: chat requests may offer tools; the model's calls are those that the script spells in umbel's fence.
        supported_parameters: that GET /v1/models names for each model, with prices, as OpenRouter; none for neither.
        reasoning: the field of answers for thoughts, which a script writes in `<think>` and `</think>` before its
            answer: "reasoning" as OpenRouter, "reasoning_content" as SGLang; "" leaves them in the text.
        breakpoints: parts of messages, answers apart, may have a `prompt_cache_breakpoint`.

    Examples:
        >>> from umbel.testing import VLLM, FakeOpenAI
        >>> with FakeOpenAI(["B-07"], models=["my-model"], features=VLLM) as server:
        ...     model = ul.OpenAI("my-model", base_url=server.base_url, api_key=server.api_key)
        ...     model("On which shelf is Walden?", regex="[A-F]-[0-9]{2}")
        ...     server.requests[0].body["structured_outputs"]  # as vLLM takes it
        'B-07'
        {'regex': '[A-F]-[0-9]{2}'}
    """

    chat: bool = True
    completions: bool = True
    models: bool = True
    response_format: bool = True
    stops: int = 4
    temperature: bool = True
    max_tokens: bool = True
    logprobs: bool = True
    images: bool = True
    prompt_logprobs: bool = True
    extras: frozenset[str] = frozenset()
    names_stop: bool = False
    owned_by: str = "system"
    breakpoints: bool = False
    supported_parameters: frozenset[str] = frozenset()
    tools: bool = True
    reasoning: Literal["", "reasoning", "reasoning_content"] = ""

    def __post_init__(self) -> None:
        checks.record(self)


OPENAI = OpenAIFeatures()


class StreamOptions(JsonBody):
    include_usage: bool = False


class StructuredOutputs(JsonBody):
    """vLLM's; exactly one of them."""

    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json: Schema | str | None = None
    json_object: bool | None = None
    grammar: str | None = None


class JsonSchema(JsonBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextFormat(JsonBody, tag="text"):
    pass


class ObjectFormat(JsonBody, tag="json_object"):
    schema: Schema | None = None  # llama.cpp's


class SchemaFormat(JsonBody, tag="json_schema"):
    json_schema: JsonSchema


class PromptCacheBreakpoint(JsonBody):
    mode: Literal["explicit"]
    ttl: Literal["30m"] | None = None


class TextPart(JsonBody, tag="text"):
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ImageUrl(JsonBody):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(JsonBody, tag="image_url"):
    image_url: ImageUrl
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ToolFunction(JsonBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    parameters: Schema | None = None
    description: str = ""
    strict: bool | None = None


class OfferedTool(JsonBody):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(JsonBody):
    name: str


class NamedTool(JsonBody):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(JsonBody):
    name: str
    arguments: str


class MadeCall(JsonBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(JsonBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MadeCall], Meta(min_length=1)] | None = None
    tool_call_id: str | None = None


class EndingFields(JsonBody, kw_only=True):
    """The fields that end an answer, of all servers of the dialect and of SGLang's own API."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def ending(self, max_tokens: int, min_tokens: int | None, logprobs: bool, top_logprobs: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens or 0, max_tokens),
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


class _Sampled(EndingFields, kw_only=True):
    """The fields that both routes have in common."""

    model: str
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    user: str | None = None
    # Of other servers; refused where `features.extras` does not name them.
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: Probability | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    cache_salt: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None
    ebnf: str | None = None


class ChatBody(_Sampled, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    tools: Annotated[list[OfferedTool], Meta(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Of other servers, too.
    provider: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(_Sampled, kw_only=True):
    """POST /v1/completions"""

    prompt: str
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16

    @property
    def scores(self) -> bool:
        """True if only the prompt's log-probabilities are requested; a generated token is ignored."""
        return bool(self.echo) and self.logprobs is not None and self.max_tokens is not None and self.max_tokens <= 1


_SAMPLING = {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"}
_ROUTED = {"provider", "reasoning"}
_CONTINUING = {"continue_final_message", "add_generation_prompt"}
EXTRAS = frozenset(
    {*_SAMPLING, *_CONTINUING, *_ROUTED, "structured_outputs", "cache_salt", "regex", "json_schema", "grammar", "ebnf"}
)

# Servers and models to play.
REASONING = OpenAIFeatures(completions=False, stops=0, temperature=False, max_tokens=False, logprobs=False)
"""Features of OpenAI's reasoning models, which take no stops, no temperature and no `max_tokens`."""
VLLM = OpenAIFeatures(
    stops=16,
    extras=frozenset({*_SAMPLING, *_CONTINUING, "structured_outputs", "cache_salt"}),
    names_stop=True,
    owned_by="vllm",
)
"""Features of vLLM: more sampling parameters, and `structured_outputs`."""
SGLANG = OpenAIFeatures(
    stops=16, extras=frozenset({*_SAMPLING, *_CONTINUING, "regex", "json_schema", "ebnf"}), owned_by="sglang"
)
"""Features of SGLang's OpenAI dialect: more sampling parameters, `regex`, `json_schema` and `ebnf`."""
LLAMA_CPP = OpenAIFeatures(stops=16, extras=frozenset({"top_k", "min_p", "grammar"}), owned_by="llamacpp")
"""Features of the server of llama.cpp: `top_k`, `min_p` and grammars of GBNF."""
OPENROUTER = OpenAIFeatures(
    completions=False,
    extras=frozenset({*_ROUTED, "top_k", "min_p", "repetition_penalty"}),
    supported_parameters=frozenset(
        {
            *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("seed", "stop", "max_tokens", "response_format", "structured_outputs", "tools", "tool_choice"),
        }
    ),
    reasoning="reasoning",
)
"""Features of OpenRouter: its list of models tells their parameters and prices, and answers have their reasoning."""

B = TypeVar("B", ChatBody, CompletionBody)

MOST_LOGPROBS = 5  # alternatives in completion mode, at OpenAI

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,(.*)", re.DOTALL)
_DEFAULT_ALONE = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}

# Keywords that OpenAI's strict mode refuses.
_NOT_STRICT = (
    "allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "patternProperties",
)  # fmt: skip


def read(body: object, kind: type[B], features: OpenAIFeatures, models: tuple[str, ...]) -> B:
    """Parses a request and checks each field.

    Raises:
        Refused: with the provider's words, and the parameter that is wrong.
    """
    request = fitted(body, kind, _misfit)
    if request.model not in models:
        message = f"The model `{request.model}` does not exist or you do not have access to it."
        raise Refused(404, message, parameter="model", code="model_not_found")
    given = {name for name in kind.__struct_fields__ if getattr(request, name) is not None}
    for name in sorted(given & (EXTRAS - features.extras)):
        raise _unknown(name)
    unstreamed = "stream_options" in given and not request.stream
    refuse(unstreamed, "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")
    refuse("" in request.stops, "Invalid 'stop': empty string.", "stop")
    _unsupported(request.stops and not features.stops, "stop")
    too_long = f"Invalid 'stop': array too long. Expected an array with maximum length {features.stops}."
    refuse(len(request.stops) > features.stops, too_long, "stop", "array_above_max_length")
    _unsupported(request.logprobs and not features.logprobs, "logprobs")
    for name in _DEFAULT_ALONE if not features.temperature else ():
        value = getattr(request, name)
        refuse(
            name in given and value != _DEFAULT_ALONE[name],
            f"Unsupported value: '{name}' does not support {value} with this model. Only the default (1) value is "
            "supported.",
            name,
            "unsupported_value",
        )
    return request


def read_chat(body: object, features: OpenAIFeatures, models: tuple[str, ...]) -> ChatBody:
    """Parses a chat request as `read` does, and checks its fields together."""
    request = read(body, ChatBody, features, models)
    words = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    limited = request.max_tokens is not None
    refuse(limited and not features.max_tokens, words, "max_tokens", "unsupported_parameter")
    words = "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported."
    refuse(limited and request.max_completion_tokens is not None, words, "max_tokens")
    words = "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."
    refuse(request.top_logprobs is not None and not request.logprobs, words, "top_logprobs")
    if request.continue_final_message:
        words = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        refuse(request.add_generation_prompt is not False, words)
        words = "Cannot set `continue_final_message` when the last message is not from the assistant."
        refuse(request.messages[-1].role != "assistant", words)
    _check_format(request, features)
    _check_tools(request, features)
    return request


def _check_tools(request: ChatBody, features: OpenAIFeatures) -> None:
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        given = getattr(request, name) is not None
        _unsupported(given and not features.tools, name)
        words = f"'{name}' is only allowed when 'tools' are specified."
        refuse(given and request.tools is None, words, name)
    for tool in request.tools or ():
        problem = strictness(tool.function.parameters or {}) if tool.function.strict else None
        refuse(problem, f"Invalid schema for function '{tool.function.name}': {problem}", "tools")
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        words = f"Tool choice '{name}' not found in 'tools' parameter."
        refuse(name not in offered(request), words, "tool_choice")
    waiting: list[str] = []
    for said in request.messages:
        words = "Invalid value for 'content': expected a string, got null."
        refuse(said.content is None and said.tool_calls is None, words, "messages")
        if said.role == "tool":
            words = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
            refuse(said.tool_call_id not in waiting, f"Invalid parameter: {words}", "messages")
            waiting.remove(said.tool_call_id or "")
            continue
        words = "An assistant message with 'tool_calls' must be followed by tool messages to each 'tool_call_id'."
        refuse(waiting, words, "messages")
        refuse(said.tool_calls and said.role != "assistant", "tool_calls are of assistant messages.", "messages")
        waiting = [call.id for call in said.tool_calls or ()]
    refuse(waiting, "An assistant message with 'tool_calls' must be followed by tool messages.", "messages")


def offered(request: ChatBody) -> tuple[str, ...]:
    """Returns the names of the tools that the model may call."""
    if request.tool_choice == "none":
        return ()
    return tuple(tool.function.name for tool in request.tools or ())


def strict_schemas(request: ChatBody) -> dict[str, Schema]:
    """Returns the schemas of functions whose arguments the server enforces: those of strict ones, one at a time."""
    one = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
    functions = [tool.function for tool in request.tools or () if one and tool.function.strict]
    return {each.name: each.parameters or {} for each in functions}


def turns_of(request: ChatBody, features: OpenAIFeatures) -> tuple[Message, ...]:
    """Returns the turns as Echo would be shown them."""
    sent: list[SentTurn] = []
    names: dict[str, str] = {}
    for said in request.messages:
        content = content_of(said, features)
        if said.role == "tool":
            text = "".join(part.text for part in content if isinstance(part, Text))
            sent.append(SentTurn("tool", results=((names[said.tool_call_id or ""], text),)))
            continue
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in said.tool_calls or ())
        names |= {call.id: call.function.name for call in said.tool_calls or ()}
        sent.append(SentTurn(said.role, content, calls))
    return shown_turns(sent)


def read_completion(body: object, features: OpenAIFeatures, models: tuple[str, ...]) -> CompletionBody:
    """Parses a completion request as `read` does, and checks its fields together."""
    request = read(body, CompletionBody, features, models)
    if request.logprobs is not None:
        words = f"Invalid 'logprobs': the maximum is {MOST_LOGPROBS}."
        refuse(request.logprobs > MOST_LOGPROBS and not features.extras, words, "logprobs")
        words = "Setting 'echo' and 'logprobs' at the same time is not supported for this model."
        refuse(request.echo and not features.prompt_logprobs, words)
    return request


def _check_format(request: ChatBody, features: OpenAIFeatures) -> None:
    asked = request.response_format
    _unsupported(asked is not None and not features.response_format, "response_format")
    match asked:
        case ObjectFormat(None):
            said = " ".join(str(message.content) for message in request.messages).lower()
            words = (
                "'messages' must contain the word 'json' in some form, to use 'response_format' of type 'json_object'."
            )
            refuse("json" not in said, words, "messages")
        case SchemaFormat(form) if form.strict:
            problem = strictness(form.schema)
            refuse(problem, f"Invalid schema for response_format '{form.name}': {problem}", "response_format")


def content_of(said: ChatMessage, features: OpenAIFeatures) -> Content:
    given = [TextPart(said.content)] if isinstance(said.content, str) else said.content or []
    parts: list[Text | Media] = []
    for part in given:
        taken = features.breakpoints and said.role != "assistant"
        words = "Unknown parameter: 'messages.content.prompt_cache_breakpoint'."
        refuse(part.prompt_cache_breakpoint is not None and not taken, words, "messages", "unknown_parameter")
        match part:
            case TextPart(text):
                parts += [Text(text)] if text else []
            case ImagePart(image):
                taken = features.images and said.role == "user"
                refuse(not taken, f"Invalid content type. image_url is not supported for {said.role} messages.")
                found = _DATA_URL.fullmatch(image.url)
                words = "Invalid image URL: this server takes data URLs of png, jpeg, gif and webp in base64."
                refuse(found is None, words, "messages", "invalid_image_url")
                assert found is not None, "else it was refused"
                broken = Refused(400, "Invalid base64 image_url.", parameter="messages", code="invalid_base64")
                parts.append(picture(found[1], broken))
    return tuple(parts)


def _misfit(found: Misfit) -> Refused:
    if found.unknown and not found.place:
        return _unknown(found.unknown)
    place = found.place or None
    return Refused(400, f"Invalid value for '{place}': {found.problem}", parameter=place)


def _unknown(name: str) -> Refused:
    return Refused(400, f"Unrecognized request argument supplied: {name}", parameter=name, code="unknown_parameter")


def _unsupported(when: object, name: str) -> None:
    words = f"Unsupported parameter: '{name}' is not supported with this model."
    refuse(when, words, name, "unsupported_parameter")


def strictness(schema: dict[str, Any]) -> str | None:
    """Returns OpenAI's error for a schema outside its strict mode; None for a valid one."""
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{schema.get('type')}\"'."
    return _strictness(schema, ())


def _strictness(schema: object, context: tuple[str, ...]) -> str | None:
    if not isinstance(schema, dict):
        return None
    if found := [keyword for keyword in _NOT_STRICT if keyword in schema]:
        return f"In context={context}, '{found[0]}' is not permitted."
    properties = schema.get("properties", {})
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False:
            return f"In context={context}, 'additionalProperties' is required to be supplied and to be false."
        if missing := [name for name in properties if name not in schema.get("required", ())]:
            return (
                f"In context={context}, 'required' is required to be supplied and to be an array including every key "
                f"in properties. Missing '{missing[0]}'."
            )
    inner = [((*context, "properties", name), value) for name, value in properties.items()]
    inner += [((*context, "$defs", name), value) for name, value in schema.get("$defs", {}).items()]
    inner += [((*context, "anyOf", str(i)), value) for i, value in enumerate(schema.get("anyOf", ()))]
    inner.append(((*context, "items"), schema.get("items")))
    return next((problem for place, value in inner if (problem := _strictness(value, place)) is not None), None)
