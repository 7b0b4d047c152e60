"""FakeOpenAI: a server of the OpenAI dialect on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeOpenAI`:

    from umbel.testing import FakeOpenAI

    with FakeOpenAI({"capital of France?": "Paris."}) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."
        assert server.calls == 1 and server.usage.prompt_tokens < 100
        assert server.requests[0].body["messages"][-1]["role"] == "user"

The script is Echo's: a dict, a list, or a function of the text. The text is what Echo would be asked: conversations are
written as ChatML, and a continuation request is the open turn that it quotes. So one script answers for Echo, for both
APIs here, and for FakeAnthropic.

Requests come first: the fields that each API takes, with their types and ranges, and what is refused of them.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Unpack

import msgspec
from msgspec import Meta

from ...lang import checks
from ...lang.errors import UmbelError
from ...lang.prompt import Media, Part, Text
from ...lang.protocol import ConstraintSpec, Usage
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ..backends.echo import MOST_RECORDED
from ..backends.echo_answers import Script, checked_scores, hashed_logprobs
from ..backends.echo_tokens import PrefixCache, prompt_tokens
from ..backends.hosted.conversation import Content, Conversation, Message
from ..guarantees import expressions
from .openai_replies import ChatChoices, Said, Scores, Telling, TextChoices, prompt_logprobs, said_of
from .provider import (
    Answered,
    FakeOptions,
    FakeProvider,
    Form,
    Misfit,
    Question,
    Refused,
    fitted,
    meant,
    of_any_object,
    of_schema,
    picture,
    refuse,
    written,
)

Count = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Schema = dict[str, Any]  # Any: JSON Schema


@dataclass(frozen=True, slots=True)
class OpenAIFeatures:
    """The abilities of a server of the OpenAI dialect; the defaults are OpenAI's own recent models.

    Attributes:
        chat, completions, models: which routes there are.
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

    def __post_init__(self) -> None:
        checks.record(self)


OPENAI = OpenAIFeatures()


class _OpenAIBody(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything a client sends."""


class StreamOptions(_OpenAIBody):
    include_usage: bool = False


class StructuredOutputs(_OpenAIBody):
    """vLLM's; exactly one of them."""

    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json: Schema | str | None = None
    json_object: bool | None = None
    grammar: str | None = None


class JsonSchema(_OpenAIBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextFormat(_OpenAIBody, tag="text"):
    pass


class ObjectFormat(_OpenAIBody, tag="json_object"):
    schema: Schema | None = None  # llama.cpp's


class SchemaFormat(_OpenAIBody, tag="json_schema"):
    json_schema: JsonSchema


class TextPart(_OpenAIBody, tag="text"):
    text: str


class ImageUrl(_OpenAIBody):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_OpenAIBody, tag="image_url"):
    image_url: ImageUrl


class ChatMessage(_OpenAIBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart]
    name: str | None = None


class _Sampled(_OpenAIBody, kw_only=True):
    """The fields that both routes have in common."""

    model: str
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
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
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None
    ebnf: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int, logprobs: bool, top_logprobs: int) -> SamplingParams:
        """Returns the request's parameters that end an answer."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


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
    # Of other servers, too.
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
_CONTINUING = {"continue_final_message", "add_generation_prompt"}
EXTRAS = frozenset(
    {*_SAMPLING, *_CONTINUING, "structured_outputs", "cache_salt", "regex", "json_schema", "grammar", "ebnf"}
)

# Servers and models to play.
REASONING = OpenAIFeatures(completions=False, stops=0, temperature=False, max_tokens=False, logprobs=False)
VLLM = OpenAIFeatures(
    stops=16,
    extras=frozenset({*_SAMPLING, *_CONTINUING, "structured_outputs", "cache_salt"}),
    names_stop=True,
    owned_by="vllm",
)
SGLANG = OpenAIFeatures(
    stops=16, extras=frozenset({*_SAMPLING, *_CONTINUING, "regex", "json_schema", "ebnf"}), owned_by="sglang"
)
LLAMA_CPP = OpenAIFeatures(stops=16, extras=frozenset({"top_k", "min_p", "grammar"}), owned_by="llamacpp")

B = TypeVar("B", "ChatBody", "CompletionBody")

MOST_LOGPROBS = 5  # alternatives in completion mode, at OpenAI

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,(.*)", re.DOTALL)
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
    return request


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


def _content(said: ChatMessage, features: OpenAIFeatures) -> Content:
    given = [TextPart(said.content)] if isinstance(said.content, str) else said.content
    parts: list[Text | Media] = []
    for part in given:
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


_ROUTE = re.compile(r"/(?:v1|openai/v1|openai/deployments/[^/]+|openai)/(.*)")
_KINDS = {401: "invalid_request_error", 429: "rate_limit_exceeded", 500: "server_error", 503: "server_error"}


class FakeOpenAI(FakeProvider):
    """A server of the OpenAI dialect: /v1/chat/completions, /v1/completions, /v1/models.

    Args:
        script: as Echo's. With a response_format, the answer has to satisfy it; a bare one is put into the object
            {"answer": ...} where the schema asks for that.
        models: names that exist.
        features: what the server can do, to play older models, reasoning models, and vLLM.
        scores: log-probabilities of choices, as Echo's, for prompts that are given back with theirs.
        cache_tokens: size of the simulated prefix cache; 0 for none.
        options: as of `FakeOptions`.
    """

    KEY_HEADER = "api-key"  # Azure's

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("gpt-4o", "gpt-4o-mini", "gpt-3.5-turbo-instruct"),
        features: OpenAIFeatures = OPENAI,
        scores: Scores | None = None,
        cache_tokens: int = 20_000,
        **options: Unpack[FakeOptions],
    ) -> None:
        super().__init__(script, models, **options)
        checks.instance("features", features, OpenAIFeatures)
        self.features = features
        self._scores: Scores = checked_scores("scores", scores)
        self._cache = PrefixCache(checks.integer("cache_tokens", cache_tokens, 0, MOST_RECORDED))

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    # -------------------------------------------------------------------------------- the dialect

    def _listing(self, path: str) -> object | None:
        if not self.features.models:
            return None
        entries = {
            model: {"id": model, "object": "model", "created": 0, "owned_by": self.features.owned_by}
            for model in self.models
        }
        route = _route(path)
        if route == "models":
            return {"object": "list", "data": list(entries.values())}
        return entries.get(route.removeprefix("models/"))

    def _question(self, path: str, body: object) -> Question:
        match _route(path):
            case "chat/completions":
                if not self.features.chat:
                    raise _wrong_route("not a chat", "chat/completions", "completions")
                return self._chat(read_chat(body, self.features, self.models))
            case "completions":
                if not self.features.completions:
                    raise _wrong_route("a chat", "completions", "chat/completions")
                return self._completion(read_completion(body, self.features, self.models))
            case _:
                raise Refused(404, f"Invalid URL (POST {path})")

    def _failure(self, refused: Refused) -> object:
        message, code = refused.message, refused.code
        if refused.status == 401 and not message:
            message = "Incorrect API key provided. You can find your API key at the server's owner."
            code = "invalid_api_key"
        kind = _KINDS.get(refused.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": refused.parameter, "code": code}}

    # -------------------------------------------------------------------------------- questions

    def _chat(self, body: ChatBody) -> Question:
        turns = tuple(Message(said.role, _content(said, self.features)) for said in body.messages)
        if body.continue_final_message:
            sent = asked = written(Conversation(turns[:-1], turns[-1].content))
        else:
            sent, asked = written(Conversation(turns, ())), meant(turns)
        most = body.max_completion_tokens or body.max_tokens or MAX_TOKENS
        sampling = body.sampling(most, bool(body.logprobs), body.top_logprobs or 0)
        mode = ChatChoices(bool(body.logprobs))
        n = body.n or 1
        return _OpenAIQuestion(asked, n, self._cache, sent, sampling, _form(body), body, mode, n, self.features)

    def _completion(self, body: CompletionBody) -> Question:
        most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(most, body.logprobs is not None, body.logprobs or 0)
        prompt = (Text(body.prompt),)
        mode, n = self._text_choices(body), body.n or 1
        generated = 0 if body.scores else n
        form = _form(body)
        return _OpenAIQuestion(prompt, generated, self._cache, prompt, sampling, form, body, mode, n, self.features)

    def _text_choices(self, body: CompletionBody) -> TextChoices:
        echo = None
        if body.echo:
            hashed = [token.logprob for token in hashed_logprobs(0, prompt_tokens([Text(body.prompt)]), 1)]
            echo = prompt_logprobs(body.prompt, hashed, self._scores)
        return TextChoices(body.prompt, echo, body.logprobs)


@dataclass(frozen=True, slots=True)
class _OpenAIQuestion(Question):
    """A request of either API.

    Attributes:
        cache: of the server.
        sent: all that it says, for counting.
        sampling: where answers end.
        form: what they must be.
        body: as it came.
        mode: how they are written.
        choices: how many.
    """

    cache: PrefixCache
    sent: tuple[Part, ...]
    sampling: SamplingParams
    form: Form | None
    body: ChatBody | CompletionBody
    mode: ChatChoices | TextChoices
    choices: int
    features: OpenAIFeatures

    def answer(self, said: list[str]) -> Answered:
        prompt = "".join(part.text for part in self.meant if isinstance(part, Text))
        texts = said or [""] * self.choices
        continuations: list[Said] = [said_of(text, prompt, self.form, self.sampling) for text in texts]
        salt = self.body.cache_salt or ""
        ids = [token for token, _ in prompt_tokens(self.sent)]
        cached = self.cache.match(salt, ids)
        self.cache.insert(salt, ids)
        for one in continuations:
            self.cache.insert(salt, [*ids, *one.completion.token_ids])
        usage = Usage(len(ids), cached, sum(len(one.completion.token_ids) for one in continuations), 1)
        options = self.body.stream_options
        include = options is not None and options.include_usage
        telling = Telling(self.body.model, self.mode, usage, include, self.features.names_stop)
        return Answered(telling.events(continuations) if self.body.stream else telling.whole(continuations), usage)


def _route(path: str) -> str:
    found = _ROUTE.fullmatch(path)
    return found[1] if found is not None else path


def _wrong_route(what: str, route: str, other: str) -> Refused:
    message = f"This is {what} model and thus not supported in the v1/{route} endpoint. Did you mean to use v1/{other}?"
    return Refused(404, message, parameter="model")


def _form(body: ChatBody | CompletionBody) -> Form | None:
    """Returns the required form of an answer, by OpenAI's parameter or those of other servers.

    Raises:
        Refused: a demand that nothing here can hold an answer against, or more than one.
    """
    asked = body.structured_outputs or StructuredOutputs(
        regex=body.regex, json=body.json_schema, grammar=body.grammar or body.ebnf
    )
    forms = [form for form in (_of_format(body), *_of_structured(asked)) if form is not None]
    if len(forms) > 1:
        raise Refused(400, "You can only use one kind of constraint but multiple are specified.")
    return forms[0] if forms else None


def _of_format(body: ChatBody | CompletionBody) -> Form | None:
    match body.response_format if isinstance(body, ChatBody) else None:
        case SchemaFormat(asked):
            return of_schema(asked.schema) if asked.strict else of_any_object()
        case ObjectFormat(schema):
            return of_any_object() if schema is None else of_schema(schema)
    return None


def _of_structured(asked: StructuredOutputs) -> Iterator[Form]:
    if asked.regex is not None:
        yield Form(ConstraintSpec("regex", asked.regex))
    if asked.choice is not None:
        yield Form(ConstraintSpec("choices", json.dumps(asked.choice)))
    if asked.json is not None:
        yield of_schema(json.loads(asked.json) if isinstance(asked.json, str) else asked.json)
    if asked.json_object:
        yield of_any_object()
    if asked.grammar is not None:
        yield checked_grammar(asked.grammar)


_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERALS = re.compile(rf"root ::= {_LITERAL.pattern}(?: \| {_LITERAL.pattern})*")


def checked_grammar(grammar: str) -> Form:
    """Parses a grammar; one rule of literals, as `root ::= "yes" | "no"`, is a choice. Raises Refused."""
    if _LITERALS.fullmatch(grammar) is not None:
        return Form(ConstraintSpec("choices", json.dumps([json.loads(each) for each in _LITERAL.findall(grammar)])))
    try:
        expressions.check("gbnf", grammar)
    except UmbelError as error:
        raise Refused(400, f"The grammar is none: {error}") from None
    return Form(ConstraintSpec("gbnf", grammar))
