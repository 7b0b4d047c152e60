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
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

import msgspec

from ...lang import checks
from ...lang.errors import UmbelError
from ...lang.ops import REASONING_TAGS
from ...lang.prompt import Part, Text
from ...lang.protocol import Completion, ConstraintSpec, FinishReason, TokenLogprob, Usage
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ...lang.tool_calls import FENCED, ToolCall
from ..backends.echo import MOST_RECORDED
from ..backends.echo_answers import Script, checked_scores, cut, hashed_logprobs, scores_of
from ..backends.echo_tokens import PrefixCache, pieces, prompt_tokens
from ..backends.hosted.conversation import Conversation
from ..guarantees import expressions
from ..reasoning import ReasoningTags, Split, split_reasoning
from ..tool_reader import read_answer
from .openai_requests import (
    OPENAI,
    ChatBody,
    CompletionBody,
    ObjectFormat,
    OpenAIFeatures,
    SchemaFormat,
    StructuredOutputs,
    offered,
    read_chat,
    read_completion,
    strict_schemas,
    turns_of,
)
from .provider import (
    Answered,
    FakeOptions,
    FakeProvider,
    Form,
    Question,
    Refused,
    meant,
    of_any_object,
    of_schema,
    written,
)
from .server import DONE, AnswerEvents, at_once, event

Json = dict[str, object]
Scores = Mapping[str, float | Sequence[float]]

_MADE = 1_700_000_000  # seconds since 1970, of every answer
_ROUTE = re.compile(r"/(?:v1|openai/v1|openai/deployments/[^/]+|openai)/(.*)")
_TAGS = ReasoningTags(*REASONING_TAGS["qwen3"])
_KINDS = {401: "invalid_request_error", 429: "rate_limit_exceeded", 500: "server_error", 503: "server_error"}


@dataclass(frozen=True, slots=True)
class Said:
    """One continuation.

    Attributes:
        completion: what is left of the script's answer.
        texts: of its tokens.
        calls: of tools, where some are offered.
        content: the text without them.
        thoughts: in a field of their own, before the text.
    """

    completion: Completion
    texts: list[str]
    calls: tuple[ToolCall, ...] = ()
    content: str = ""
    thoughts: str = ""

    @property
    def tokens(self) -> list[tuple[str, str, TokenLogprob | None]]:
        """Returns (text, visible part, log-probability) of the tokens that are visible at least in part."""
        kept, logprobs = self.completion.kept, self.completion.logprobs
        seen = [(text, text) for text in self.texts[:kept]]
        if self.completion.tail:
            seen.append((self.texts[kept], self.completion.tail))
        return [(text, part, logprobs[i] if logprobs else None) for i, (text, part) in enumerate(seen)]


def said_of(text: str, prompt: str, form: Form | None, sampling: SamplingParams, tools: Sequence[str] = ()) -> Said:
    """Cuts a script's answer as the server does, with log-probabilities where they are asked for.

    Args:
        prompt: seeds the log-probabilities.
        tools: names of those that may be called.
    """
    completion, texts = cut(text if form is None else form.shaped(text, sampling), sampling)
    if sampling.logprobs:
        seed = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
        tokens = zip(completion.token_ids, texts, strict=True)
        logprobs = hashed_logprobs(seed, tokens, sampling.top_logprobs)
        completion = msgspec.structs.replace(completion, logprobs=logprobs)
    read = read_answer(FENCED, tools, completion.text)
    return Said(completion, texts, read.calls, read.content)


def split_thoughts(text: str) -> Split:
    """Splits a script's answer into thoughts and answer, for servers that have a field for each.

    An answer without the tag that ends thoughts is left as it is."""
    if _TAGS.close not in text:
        return Split("", text)
    return split_reasoning(_TAGS, "", text, opened=True)


@dataclass(frozen=True, slots=True)
class Telling:
    """Writes what both APIs have around their choices.

    Attributes:
        mode: how each choice is written.
        usage: of the request.
        include_usage: streams end with it.
        names_stop: choices say which stop ended them.
    """

    model: str
    mode: "ChatChoices | TextChoices"
    usage: Usage
    include_usage: bool
    names_stop: bool

    def whole(self, said: Sequence[Said]) -> AnswerEvents:
        choices = [{"index": index, **self.mode.whole(one), **self._ending(one)} for index, one in enumerate(said)]
        return at_once({**self._head(self.mode.NAME), "choices": choices, "usage": self._usage})

    def events(self, said: Sequence[Said]) -> AnswerEvents:
        """Makes the events of the continuations, token by token in turn, as if computed in one batch."""
        mode = self.mode
        opening = [self._event(index, each) for index in range(len(said)) for each in mode.opening()]
        told = [mode.pieces(one) for one in said]
        between = [
            self._event(index, piece[place])
            for place in range(max(map(len, told), default=0))
            for index, piece in enumerate(told)
            if place < len(piece)
        ]
        closing = [self._event(index, {**mode.closing(), **self._ending(one)}) for index, one in enumerate(said)]
        if self.include_usage:
            closing.append(event({**self._head(mode.EVENT), "choices": [], "usage": self._usage}))
        return AnswerEvents(tuple(opening), tuple(between), tuple(closing), (DONE,))

    def _event(self, index: int, choice: Json) -> bytes:
        return event({**self._head(self.mode.EVENT), "choices": [{"index": index, "finish_reason": None, **choice}]})

    def _ending(self, said: Said) -> Json:
        ended = "tool_calls" if said.calls else "stop"
        reason = "length" if said.completion.finish_reason is FinishReason.LENGTH else ended
        return {"finish_reason": reason} | ({"stop_reason": said.completion.matched_stop} if self.names_stop else {})

    def _head(self, name: str) -> Json:
        return {"id": "fake-1", "object": name, "created": _MADE, "model": self.model}

    @property
    def _usage(self) -> Json:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """Choices of a chat request.

    Attributes:
        logprobs: they are asked for.
        reasoning: the field for thoughts.
    """

    NAME: ClassVar[str] = "chat.completion"
    EVENT: ClassVar[str] = "chat.completion.chunk"
    logprobs: bool
    reasoning: str = ""

    def whole(self, said: Said) -> Json:
        message: Json = {"role": "assistant", "content": said.completion.text, "refusal": None}
        if said.thoughts:
            message[self.reasoning] = said.thoughts
        if said.calls:
            calls = [_made(number, call) for number, call in enumerate(said.calls)]
            return {"message": {**message, "content": said.content or None, "tool_calls": calls}, "logprobs": None}
        return {"message": message, "logprobs": self._logprobs([token for *_, token in said.tokens])}

    def opening(self) -> list[Json]:
        return [{"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}]

    def pieces(self, said: Said) -> list[Json]:
        thoughts: list[Json] = [{"delta": {self.reasoning: text}, "logprobs": None} for text in pieces(said.thoughts)]
        return thoughts + self._pieces(said)

    def _pieces(self, said: Said) -> list[Json]:
        if said.calls:
            told: list[Json] = [{"content": text} for text in pieces(said.content)]
            for number, call in enumerate(said.calls):
                begun = {**_made(number, ToolCall(call.name, "")), "index": number}
                told.append({"tool_calls": [begun]})
                rest = [{"index": number, "function": {"arguments": text}} for text in pieces(call.arguments)]
                told += [{"tool_calls": [each]} for each in rest]
            return [{"delta": each, "logprobs": None} for each in told]
        return [{"delta": {"content": seen}, "logprobs": self._logprobs([token])} for _, seen, token in said.tokens]

    def closing(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, tokens: Sequence[TokenLogprob | None]) -> Json | None:
        if not self.logprobs:
            return None
        content = [
            {**_token(token.text, token.logprob), "top_logprobs": [_token(text, own) for _, text, own in token.top]}
            for token in tokens
            if token is not None
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class TextChoices:
    """Choices of a completion request.

    Attributes:
        prompt: its text; offsets count from its beginning.
        echo: the prompt's tokens and their log-probabilities (None for the first), where they are given back.
        logprobs: how many alternatives are told; None for no log-probabilities at all.
    """

    NAME: ClassVar[str] = "text_completion"
    EVENT: ClassVar[str] = "text_completion"
    prompt: str
    echo: Sequence[tuple[str, float | None]] | None
    logprobs: int | None

    def whole(self, said: Said) -> Json:
        told = self._logprobs([(text, token) for text, _, token in said.tokens], len(self.prompt), self.echo or ())
        return {"text": ("" if self.echo is None else self.prompt) + said.completion.text, "logprobs": told}

    def opening(self) -> list[Json]:
        if self.echo is None:
            return []
        return [{"text": self.prompt, "logprobs": self._logprobs([], len(self.prompt), self.echo)}]

    def pieces(self, said: Said) -> list[Json]:
        start = len(self.prompt)
        told: list[Json] = []
        for text, seen, token in said.tokens:
            told.append({"text": seen, "logprobs": self._logprobs([(text, token)], start)})
            start += len(text)
        return told

    def closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(
        self,
        tokens: Sequence[tuple[str, TokenLogprob | None]],
        start: int,
        echo: Sequence[tuple[str, float | None]] = (),
    ) -> Json | None:
        """Writes log-probabilities of tokens from the character `start` on, after those of an echoed prompt."""
        if self.logprobs is None:
            return None
        rows = [(text, own, None if own is None else {text: own}) for text, own in echo]
        rows += [
            (text, own.logprob, {each: its for _, each, its in own.top}) for text, own in tokens if own is not None
        ]
        offsets = []
        place = 0 if echo else start
        for text, _, _ in rows:
            offsets.append(place)
            place += len(text)
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [top for *_, top in rows] if self.logprobs else None,
            "text_offset": offsets,
        }


def prompt_logprobs(prompt: str, hashed: Sequence[float], scores: Scores) -> list[tuple[str, float | None]]:
    """Returns the tokens of a prompt with their log-probabilities; None for the first.

    Args:
        hashed: one for each token, where nothing else is known.
        scores: of choices, as Echo has them; the longest one that the prompt ends with counts, for its tokens.
    """
    texts = pieces(prompt)
    logprobs = list(hashed)
    choice = max((choice for choice in scores if choice and prompt.endswith(choice)), key=len, default="")
    if choice:
        given = scores_of(scores[choice], choice, 0)
        logprobs[-len(given) :] = given  # a choice's first token may begin before it, and is one token all the same
    return [(text, own if i else None) for i, (text, own) in enumerate(zip(texts, logprobs, strict=True))]


def _made(number: int, call: ToolCall) -> Json:
    return {
        "id": f"call_fake_{number}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}


class FakeOpenAI(FakeProvider):
    """Plays a server of OpenAI's dialect: /v1/chat/completions, /v1/completions, /v1/models.

    Args:
        script: as Echo's. With a response_format, the answer has to satisfy it; a bare one is put into the object
            {"answer": ...} where the schema asks for that.
        models: names that exist.
        features: what the server can do, to play older models, reasoning models, and vLLM.
        scores: log-probabilities of choices, as Echo's, for prompts that are given back with theirs.
        cache_tokens: tokens that the simulated prefix cache holds; 0 for none.
        options: faults, a gate and others, as of `FakeOptions`.

    Examples:
        >>> from umbel.testing import FakeOpenAI
        >>> with FakeOpenAI({"capital of France": "Paris"}) as server:
        ...     model = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        ...     model("What is the capital of France?", max_tokens=8)
        ...     server.requests[0].body["messages"]
        'Paris'
        [{'role': 'user', 'content': 'What is the capital of France?'}]
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
        if self.features.supported_parameters:
            for entry in entries.values():
                entry |= {
                    "supported_parameters": sorted(self.features.supported_parameters),
                    "context_length": 128_000,
                    "pricing": {"prompt": "0.000001", "completion": "0.000002", "input_cache_read": "0.0000005"},
                    "architecture": {"input_modalities": ["text", "image"]},
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
        turns = turns_of(body, self.features)
        if body.continue_final_message:
            sent = asked = written(Conversation(turns[:-1], turns[-1].content))
        else:
            sent, asked = written(Conversation(turns, ())), meant(turns)
        most = body.max_completion_tokens or body.max_tokens or MAX_TOKENS
        sampling = body.ending(most, body.min_tokens, bool(body.logprobs), body.top_logprobs or 0)
        mode = ChatChoices(bool(body.logprobs), self.features.reasoning)
        n = body.n or 1
        return _OpenAIQuestion(asked, n, self._cache, sent, sampling, _form(body), body, mode, n, self.features)

    def _completion(self, body: CompletionBody) -> Question:
        most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.ending(most, body.min_tokens, body.logprobs is not None, body.logprobs or 0)
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
        tools = offered(self.body) if isinstance(self.body, ChatBody) else ()
        apart = isinstance(self.mode, ChatChoices) and self.features.reasoning
        splits = [split_thoughts(text) if apart else Split("", text) for text in texts]
        continuations = [
            replace(said_of(split.answer, prompt, self.form, self.sampling, tools), thoughts=split.reasoning)
            for split in splits
        ]
        strict = strict_schemas(self.body) if isinstance(self.body, ChatBody) else {}
        for call in (call for one in continuations for call in one.calls if call.name in strict):
            of_schema(strict[call.name]).shaped(call.arguments, SamplingParams(max_tokens=MAX_TOKENS))
        salt = self.body.cache_salt or ""
        ids = [token for token, _ in prompt_tokens(self.sent)]
        cached = self.cache.match(salt, ids)
        self.cache.insert(salt, ids)
        for one in continuations:
            self.cache.insert(salt, [*ids, *one.completion.token_ids])
        generated = sum(len(one.completion.token_ids) + len(pieces(one.thoughts)) for one in continuations)
        usage = Usage(len(ids), cached, generated, 1)
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
