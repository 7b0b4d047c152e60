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
modes here, and for FakeAnthropic.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ....lang import checks
from ....lang.errors import UmbelError
from ....lang.prompt import Part, Text
from ....lang.protocol import ConstraintSpec, Usage
from ....lang.sampling import MAX_TOKENS, SamplingParams
from ...backends.echo import MOST_RECORDED, Gate
from ...backends.echo_answers import Script, checked_scores, cut, hashed_logprobs
from ...backends.echo_tokens import PrefixCache, prompt_tokens
from ...backends.hosted.conversation import Conversation
from ...guarantees import expressions
from .. import provider
from ..faults import Faults
from ..provider import Answered, FakeProvider, Question, Refused
from ..server import HttpRequest, event
from ..structured import Form, of_any_object, of_literals, of_schema
from .replies import ChatChoices, Mode, Said, Scores, Telling, TextChoices, prompt_logprobs
from .requests import (
    OPENAI,
    ChatBody,
    CompletionBody,
    ObjectFormat,
    OpenAIFeatures,
    SchemaFormat,
    StructuredOutputs,
    messages,
    read_chat,
    read_completion,
)

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
        faults: for each request for text in order, or a function of its number (from 1): a Fault, a status of HTTP,
            or None.
        gate: if given, every request for text and every streamed piece waits at it.
        retry_after: the header's value, for the fault that has one.
        record: how many requests `requests` keeps.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str] = ("gpt-4o", "gpt-4o-mini", "gpt-3.5-turbo-instruct"),
        features: OpenAIFeatures = OPENAI,
        scores: Scores | None = None,
        cache_tokens: int = 20_000,
        faults: Faults = (),
        gate: Gate | None = None,
        retry_after: str = "1",
        record: int = 1000,
    ) -> None:
        super().__init__(script, models=models, faults=faults, gate=gate, retry_after=retry_after, record=record)
        checks.instance("features", features, OpenAIFeatures)
        self.features = features
        self._scores: Scores = checked_scores("scores", scores)
        self._cache = PrefixCache(checks.integer("cache_tokens", cache_tokens, 0, MOST_RECORDED))

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    # -------------------------------------------------------------------------------- the dialect

    def _authorised(self, request: HttpRequest) -> bool:
        """Checks the key in OpenAI's header, or in Azure's."""
        headers = request.headers
        return headers.get("authorization") == f"Bearer {self.api_key}" or headers.get("api-key") == self.api_key

    def _listing(self, path: str) -> object | None:
        route = _route(path)
        if not self.features.models:
            return None
        entries = {
            model: {"id": model, "object": "model", "created": 0, "owned_by": self.features.owned_by}
            for model in self.models
        }
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
                raise Refused(404, f"Invalid URL (POST {path})", kind="invalid_request_error")

    def _failure(self, refused: Refused) -> object:
        message, code = refused.message, refused.code
        if refused.status == 401 and not message:
            message, code = (
                "Incorrect API key provided. You can find your API key at the server's owner.",
                "invalid_api_key",
            )
        kind = refused.kind or _KINDS.get(refused.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": refused.parameter, "code": code}}

    def _error_event(self, refused: Refused) -> bytes:
        return event(self._failure(refused))

    # -------------------------------------------------------------------------------- questions

    def _chat(self, body: ChatBody) -> Question:
        turns = messages(body, self.features)
        if body.continue_final_message:
            sent = meant = provider.written(Conversation(turns[:-1], turns[-1].content))
        else:
            sent, meant = provider.sent(turns), provider.meant(turns)
        most = body.max_completion_tokens or body.max_tokens or MAX_TOKENS
        sampling = body.sampling(most, bool(body.logprobs), body.top_logprobs or 0)
        mode = ChatChoices(bool(body.logprobs))
        modes = [mode] * (body.n or 1)
        stops = self.features.names_stop
        return _OpenAIQuestion(meant, len(modes), self._cache, sent, sampling, _form(body), body, modes, stops)

    def _completion(self, body: CompletionBody) -> Question:
        most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(most, body.logprobs is not None, body.logprobs or 0)
        prompt = (Text(body.prompt),)
        modes = [self._text_choices(body)] * (body.n or 1)
        n = 0 if body.scores else len(modes)
        return _OpenAIQuestion(
            prompt, n, self._cache, prompt, sampling, _form(body), body, modes, self.features.names_stop
        )

    def _text_choices(self, body: CompletionBody) -> TextChoices:
        echo = None
        if body.echo:
            hashed = [token.logprob for token in hashed_logprobs(0, prompt_tokens([Text(body.prompt)]), 1)]
            echo = prompt_logprobs(body.prompt, hashed, self._scores)
        return TextChoices(body.prompt, echo, body.logprobs)


@dataclass(frozen=True, slots=True)
class _OpenAIQuestion(Question):
    """A request of either mode.

    Attributes:
        cache: of the server.
        sent: all that it says, for counting.
        sampling: where answers end.
        form: what they must be.
        body: as it came.
        modes: how each of them is written.
        names_stop: they say which stop ended them.
    """

    cache: PrefixCache
    sent: tuple[Part, ...]
    sampling: SamplingParams
    form: Form | None
    body: ChatBody | CompletionBody
    modes: Sequence[Mode]
    names_stop: bool

    def answer(self, said: list[str]) -> Answered:
        continuations = [self._said(text) for text in said or [""] * len(self.modes)]
        salt = self.body.cache_salt or ""
        ids = [token for token, _ in prompt_tokens(self.sent)]
        cached = self.cache.match(salt, ids)
        self.cache.insert(salt, ids)
        for one in continuations:
            self.cache.insert(salt, [*ids, *one.completion.token_ids])
        usage = Usage(len(ids), cached, sum(len(one.completion.token_ids) for one in continuations), 1)
        options = self.body.stream_options
        include = options is not None and options.include_usage
        telling = Telling(self.body.model, self.modes, usage, include, self.names_stop)
        told = telling.events(continuations) if self.body.stream else None
        return Answered(telling.whole(continuations), told, usage)

    def _said(self, text: str) -> Said:
        if self.form is not None:
            text = self.form.shaped(text, self.sampling)
        completion, texts = cut(text, self.sampling)
        if self.sampling.logprobs:
            seed = zlib.crc32("".join(_text(part) for part in self.meant).encode("utf-8", "surrogatepass"))
            tokens = zip(completion.token_ids, texts, strict=True)
            logprobs = hashed_logprobs(seed, tokens, self.sampling.top_logprobs)
            completion = msgspec.structs.replace(completion, logprobs=logprobs)
        return Said(completion, texts)


def _text(part: Part) -> str:
    return part.text if isinstance(part, Text) else ""


def _route(path: str) -> str:
    found = _ROUTE.fullmatch(path)
    return found[1] if found is not None else path


def _wrong_route(what: str, route: str, other: str) -> Refused:
    message = f"This is {what} model and thus not supported in the v1/{route} endpoint. Did you mean to use v1/{other}?"
    return Refused(404, message, kind="invalid_request_error", parameter="model")


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
        yield of_literals(asked.grammar) or checked_grammar(asked.grammar)


def checked_grammar(grammar: str) -> Form:
    """Parses a grammar. Raises Refused for an invalid one."""
    try:
        expressions.check("gbnf", grammar)
    except UmbelError as error:
        raise Refused(400, f"The grammar is none: {error}") from None
    return Form(ConstraintSpec("gbnf", grammar))
