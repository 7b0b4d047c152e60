"""FakeSGLang: an SGLang server on loopback, for tests of programs.

It ships with umbel, as `umbel.testing.FakeSGLang`:

    from umbel.testing import FakeSGLang

    with FakeSGLang({"capital of France?": "Paris."}) as server:
        backend = ul.RuntimeEndpoint(server.address, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."

It has the server's own API (`/generate`, `/get_model_info`, `/get_server_info`, `/health`, `/flush_cache`) and its
OpenAI dialect, that of FakeOpenAI. Tokens are Echo's, after one that begins every text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

import msgspec
from msgspec import Meta

from ...lang.prompt import Part, Text
from ...lang.protocol import ConstraintSpec, TokenLogprob, Usage
from ...lang.sampling import SamplingParams
from ..backends.echo_answers import Script, cut, hashed_logprobs
from ..backends.echo_tokens import PrefixCache, pieces, token_id
from .openai import FakeOpenAI, Json, Said, Scores, checked_grammar, prompt_logprobs, said_of
from .openai_requests import SGLANG, EndingFields, OpenAIFeatures
from .provider import Answered, FakeOptions, Form, JsonBody, Misfit, Question, Refused, fitted, of_schema, refuse
from .server import DONE, AnswerEvents, Exchange, HttpRequest, at_once, event

_Natural = Annotated[int, Meta(ge=0)]


class SGLangSampling(EndingFields, kw_only=True):
    """`sampling_params` of a request; the defaults are the server's."""

    max_new_tokens: _Natural = 128
    min_new_tokens: _Natural = 0
    n: Annotated[int, Meta(ge=1)] = 1
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] = 1.0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None


class GenerateBody(JsonBody):
    """POST /generate. A list of texts or of token ids asks for all of them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: str | list[str | list[str]] | None = None
    sampling_params: SGLangSampling = msgspec.field(default_factory=SGLangSampling)
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Meta(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None

    @property
    def several(self) -> bool:
        """True if the request is a list, which is answered by a list."""
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and (self.text is not None or isinstance(given[0], list))


def read(body: object) -> GenerateBody:
    """Parses a request.

    Raises:
        Refused: with what is wrong.
    """
    request = fitted(body, GenerateBody, _misfit)
    refuse((request.text is None) == (request.input_ids is None), "Either text or input_ids should be provided.")
    refuse(request.text == [] or request.input_ids == [], "The input is empty.")
    asked = request.sampling_params
    constraints = [each for each in (asked.regex, asked.json_schema, asked.ebnf) if each is not None]
    refuse(len(constraints) > 1, "Only one of regex, json_schema, or ebnf can be set.")
    return request


def _misfit(found: Misfit) -> Refused:
    return Refused(400, f"{found.problem} - at `$.{found.place}`" if found.place else found.problem)


BEGINNING = (1, "")  # id and text of the token that begins every text

_Token = list[object]  # logarithm of its probability, id, text


class FakeSGLang(FakeOpenAI):
    """Plays a server of SGLang: its own API, and OpenAI's dialect.

    Args:
        script: the answers, as Echo's.
        features: what its OpenAI dialect can do.
        scores: log-probabilities of choices, as Echo's.
        cache_tokens: tokens that the simulated prefix cache holds; 0 for none.
        model: the path of the model, by which clients know its chat template.
        native: it has its own API; without, it is any server of the OpenAI dialect.
        incremental: streams have what is new, instead of all of the text so far.
        deterministic: it takes seeds.
        options: faults, a gate and others, as of `FakeOptions`.

    Attributes:
        flushes: how often the cache was emptied.

    Examples:
        >>> from umbel.testing import FakeSGLang
        >>> @ul.function
        ... def check(s, claim):
        ...     s += claim + " Is it true?" + ul.select("verdict", choices=[" yes", " no"])
        >>> with FakeSGLang(scores={" yes": -0.1, " no": -2.3}) as server:
        ...     model = ul.RuntimeEndpoint(server.address, api_key=server.api_key)
        ...     check.run("Venice sinks.", backend=model)["verdict"]
        ...     [request.path for request in server.requests]  # the prompt, then the choices on it
        ' yes'
        ['/generate', '/generate']
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        model: str = "Qwen/Qwen2.5-7B-Instruct",
        native: bool = True,
        incremental: bool = False,
        deterministic: bool = True,
        features: OpenAIFeatures = SGLANG,
        scores: Scores | None = None,
        cache_tokens: int = 20_000,
        **options: Unpack[FakeOptions],
    ) -> None:
        self.check_options(options)  # before `models`, which is no option here
        super().__init__(script, models=[model], features=features, scores=scores, cache_tokens=cache_tokens, **options)
        self._model, self._native, self._incremental = model, native, incremental
        self._deterministic = deterministic
        self._known = {BEGINNING[0]: BEGINNING[1]}  # texts of the tokens that were told
        self.flushes = 0  # of the cache

    # -------------------------------------------------------------------------------- the dialect

    def _listing(self, path: str) -> object | None:
        if not self._native:
            return super()._listing(path)
        match path:
            case "/get_model_info" | "/model_info":
                return {"model_path": self._model, "tokenizer_path": self._model, "is_generation": True}
            case "/get_server_info" | "/server_info":
                return {
                    "model_path": self._model,
                    "context_length": None,
                    "enable_deterministic_inference": self._deterministic,
                    "incremental_streaming_output": self._incremental,
                    "internal_states": [{"cached": len(self._cache)}],
                }
            case "/health" | "/health_generate":
                return {}
            case _:
                return super()._listing(path)

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        path = request.path.partition("?")[0]
        if self._native and path == "/flush_cache" and self._authorised(request):
            self._cache.clear()
            self.flushes += 1
            await exchange.respond(200, {"content-type": "text/plain; charset=utf-8"}, b"Cache flushed.\n")
            return
        await super()._respond(request, exchange)

    def _question(self, path: str, body: object) -> Question:
        if not self._native or path != "/generate":
            return super()._question(path, body)
        asked = read(body)
        texts = self._texts(asked)
        meant: tuple[Part, ...] = (Text(texts[0]),)
        generates = asked.sampling_params.max_new_tokens > 0
        words = "FakeSGLang generates for one text at a time; send the others as requests of their own"
        refuse(generates and len(texts) > 1, words)
        rows = [self._row(text, asked) for text in texts]
        n = asked.sampling_params.n if generates else 0
        return _GenerateQuestion(meant, n, self._cache, asked, rows, _form(asked.sampling_params), self._incremental)

    def _texts(self, asked: GenerateBody) -> list[str]:
        if asked.text is not None:
            return asked.text if isinstance(asked.text, list) else [asked.text]
        rows: Any = asked.input_ids if asked.several else [asked.input_ids]  # Any: lists of numbers
        for token in (token for row in rows for token in row):
            refuse(token not in self._known, f"FakeSGLang knows the ids that it has told; it has not told {token}")
        return ["".join(self._known[token] for token in row) for row in rows]

    def _row(self, text: str, asked: GenerateBody) -> "_Row":
        texts = pieces(text)
        ids = [token_id(piece) for piece in texts]
        self._known.update(zip(ids, texts, strict=True))
        hashed = [token.logprob for token in hashed_logprobs(0, zip(ids, texts, strict=True), 1)]
        told = prompt_logprobs(text, hashed, self._scores if asked.text is not None else {})
        values = [hashed[0] if own is None else own for _, own in told] if told else []
        tokens = [BEGINNING, *zip(ids, texts, strict=True)]
        return _Row(tokens, [None, *values])


@dataclass(frozen=True, slots=True)
class _Row:
    """One text of a request: its tokens, and the logarithms of their probabilities (None for the first)."""

    tokens: Sequence[tuple[int, str]]
    logprobs: Sequence[float | None]

    @property
    def ids(self) -> list[int]:
        return [token for token, _ in self.tokens]


@dataclass(frozen=True, slots=True)
class _GenerateQuestion(Question):
    """A request of `/generate`.

    Attributes:
        cache: of the server.
        body: as it came.
        rows: its texts.
        form: what answers must be.
        incremental: events have what is new.
    """

    cache: PrefixCache
    body: GenerateBody
    rows: Sequence[_Row]
    form: Form | None
    incremental: bool

    def answer(self, said: list[str]) -> Answered:
        cached = [self._cached(row) for row in self.rows]
        asked = self.body
        given = asked.sampling_params
        sampling = given.ending(
            given.max_new_tokens, given.min_new_tokens, asked.return_logprob, asked.top_logprobs_num
        )
        prompt = "".join(piece for _, piece in self.rows[0].tokens)
        continuations = [said_of(text, prompt, self.form, sampling) for text in said]
        for one in continuations:
            self.cache.insert("", [*self.rows[0].ids, *one.completion.token_ids])
        rows = [
            (row, have, one) for row, have in zip(self.rows, cached, strict=True) for one in continuations or [_EMPTY]
        ]
        told = [self._told(row, have, one, len(one.tokens), index) for index, (row, have, one) in enumerate(rows)]
        usage = Usage(
            sum(len(row.tokens) for row in self.rows),
            sum(cached),
            sum(len(one.completion.token_ids) for one in continuations),
            1,
        )
        if asked.stream:
            return Answered(self._events(rows), usage)
        return Answered(at_once(told if asked.several or len(told) > 1 else told[0]), usage)

    # -------------------------------------------------------------------------------- how

    def _cached(self, row: _Row) -> int:
        matched = self.cache.match("", row.ids)
        self.cache.insert("", row.ids)
        return matched

    def _events(self, rows: Sequence[tuple[_Row, int, Said]]) -> AnswerEvents:
        """Makes the events, token by token, the continuations in turn."""
        last = max(len(one.tokens) for *_, one in rows)
        growing = [
            event(self._told(row, have, one, place, index, ended=False))
            for place in range(1, last + 1)
            for index, (row, have, one) in enumerate(rows)
            if place <= len(one.tokens)
        ]
        closing = [
            event(self._told(row, have, one, len(one.tokens), index)) for index, (row, have, one) in enumerate(rows)
        ]
        return AnswerEvents((), tuple(growing), tuple(closing), (DONE,))

    def _told(self, row: _Row, cached: int, one: Said, tokens: int, index: int, *, ended: bool = True) -> Json:
        """Writes an object of the answer after so many tokens of a continuation."""
        seen = one.tokens[:tokens]
        text = "".join(part for _, part, _ in seen)
        if self.incremental and self.body.stream:
            text = "" if ended else seen[-1][1]
        meta: Json = {
            "id": "fake-1",
            "prompt_tokens": len(row.tokens),
            "completion_tokens": len(one.completion.token_ids) if ended else tokens,
            "cached_tokens": cached,
            "finish_reason": _finish(one) if ended else None,
        }
        if self.body.return_logprob:
            meta |= self._logprobs(row, [token for *_, token in seen if token is not None])
        return {"text": text, "index": index, "meta_info": meta}

    def _logprobs(self, row: _Row, output: Sequence[TokenLogprob]) -> Json:
        start = len(row.tokens) if self.body.logprob_start_len < 0 else self.body.logprob_start_len
        given = list(zip(row.logprobs, row.tokens, strict=True))[start:]
        # As the server has it: the first token that is told has none, whatever stands before it.
        values = [None if place == 0 else own for place, (own, _) in enumerate(given)]
        told: Json = {
            "input_token_logprobs": [
                self._token(own, token, text) for own, (_, (token, text)) in zip(values, given, strict=True)
            ],
            "output_token_logprobs": [self._token(token.logprob, token.token_id, token.text) for token in output],
        }
        if self.body.top_logprobs_num:
            told["output_top_logprobs"] = [
                [self._token(own, token, text) for token, text, own in each.top] for each in output
            ]
        return told

    def _token(self, logprob: float | None, token: int, text: str) -> _Token:
        return [logprob, token, text if self.body.return_text_in_logprobs else None]


def _finish(one: Said) -> Json:
    completion = one.completion
    if completion.finish_reason == "length":
        return {"type": "length", "length": len(completion.token_ids)}
    return {"type": "stop", "matched": 2 if completion.matched_stop is None else completion.matched_stop}


_EMPTY = Said(cut("", SamplingParams(max_tokens=0))[0], [])


def _form(asked: SGLangSampling) -> Form | None:
    """Returns the required form. Raises Refused for an invalid grammar."""
    if asked.regex is not None:
        return Form(ConstraintSpec("regex", asked.regex))
    if asked.json_schema is not None:
        return of_schema(msgspec.json.decode(asked.json_schema))
    return None if asked.ebnf is None else checked_grammar(asked.ebnf)
