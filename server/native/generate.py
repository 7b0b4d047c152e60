"""`POST /generate`: texts after prompts, in SGLang's shape.

    {"text" | "input_ids" | "parts", "sampling_params", ...} ─▶ {"text", "output_ids", "meta_info": {...}}

A list of prompts, and several continuations, have a list of answers: those of the first prompt come first. An event of
a stream has all of a text so far, as SGLang's has; with "incremental": true it has what is new.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from ...lang.prompt import Media, Part, Parts
from ...lang.protocol import (
    Chunk,
    Completion,
    ConstraintSpec,
    Detokenize,
    Final,
    FinishReason,
    GenRequest,
    Placed,
    Tokenize,
    TokenLogprob,
)
from ...lang.sampling import MAX_TOKEN_ID
from ..bodies import Label, TokenId, TopLogprobs, wrong
from ..diagnosis.comparison import PlacedFacts, placed_facts
from ..front import Front
from ..http import DONE, JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from ..limits import MAX_BATCH, check_constraint
from ..tokens import tokenizing
from .fields import (
    NOT_OFFERED,
    NativeFields,
    SamplingFields,
    TokenList,
    check_model,
    ids_prompt,
    one_of,
    text_prompt,
)

Start = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKEN_ID)]
Batch = msgspec.Meta(max_length=MAX_BATCH)


class GenerateBody(NativeFields, frozen=True):
    """Asks for texts after prompts. Fields with a list have an entry for each prompt.

    Attributes:
        text: one prompt or several; names of control tokens in it become these tokens.
        input_ids: the same as token ids.
        parts: one prompt, of constant text, generated ids, pictures, and places where a private part opens.
        return_logprob: the log-probability of each generated token.
        logprob_start_len: of the prompt's tokens, too, from this one on; -1 for none.
        top_logprobs_num: so many alternatives for each token.
        return_text_in_logprobs: the text of each of these tokens.
        incremental: events of a stream have what is new, not all so far.
        rid: the caller's name for a request, to abort it. One name of several prompts aborts all of them, and with
            `_0`, `_1` after it one of them.
        constraint, token_healing: as of the runtime; instead of the constraints in `sampling_params`.
    """

    told_as = {
        name: f"sampling_params.{field}"
        for name, field in (
            *((field, field) for field in SamplingFields.__struct_fields__),
            ("max_tokens", "max_new_tokens"),
            ("min_tokens", "min_new_tokens"),
            ("seed", "sampling_seed"),
            ("grammar", "ebnf"),
        )
    }

    text: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1), Batch] | None = None
    input_ids: Annotated[tuple[TokenId | TokenList, ...], msgspec.Meta(min_length=1, max_length=1 << 20)] | None = None
    parts: Parts | None = None
    sampling_params: SamplingFields | Annotated[tuple[SamplingFields, ...], Batch] | None = None
    return_logprob: bool | Annotated[tuple[bool, ...], Batch] | None = None
    logprob_start_len: Start | Annotated[tuple[Start, ...], Batch] | None = None
    top_logprobs_num: TopLogprobs | Annotated[tuple[TopLogprobs, ...], Batch] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    incremental: bool = False
    rid: Label | Annotated[tuple[Label, ...], Batch] | None = None
    constraint: ConstraintSpec | None = None
    token_healing: bool | None = None
    # At their defaults only: gateways and SGLang's clients add them.
    image_data: None = None
    video_data: None = None
    audio_data: None = None
    input_embeds: None = None
    lora_path: None = None
    session_params: None = None
    token_ids_logprob: None = None
    custom_logit_processor: None = None
    log_metrics: Literal[True] | None = None
    no_logs: Literal[False] | None = None
    background: Literal[False] | None = None
    return_hidden_states: Literal[False] | None = None
    return_bytes: Literal[False] | None = None
    return_entropy: Literal[False] | None = None

    def field_of(self, parameter: str) -> str | None:
        if self.constraint is not None and parameter in (self.constraint.kind, "grammar"):
            return "constraint"
        return super().field_of(parameter)


GENERATE_NOT_OFFERED = {
    **NOT_OFFERED,
    **dict.fromkeys(("image_data", "video_data"), "write pictures as parts: ['m', 'image', DIGEST, BASE64]"),
    "audio_data": "no model here listens; leave it out",
    "input_embeds": "embeddings are not taken; send text, input_ids or parts",
    "lora_path": "an adapter is a model of the routes of /v1: write its name as model there",
    "session_params": "sessions are not kept, the prefix cache is; send the whole prompt",
    "token_ids_logprob": "log-probabilities of given tokens are not given; see /score",
    "custom_logit_processor": "code is not taken; leave it out",
    "log_metrics": "counting cannot be turned off; leave it out",
    "no_logs": "prompts are never logged; leave it out",
    "background": "answers are not kept for later; leave it out",
    "return_bytes": "they are not given; see output_ids",
    "return_entropy": "it is not given; leave it out",
}

# (log-probability, token id, text); the first token of a prompt has no log-probability.
LogprobTriple = tuple[float | None, int, str | None]


class FinishFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a text. `matched`: the stop, or the id of the token; `length`: of the text, in tokens."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None


class CompletionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that SGLang does not have, as of `protocol.Completion`.

    `placed`: the engine that computed it, of several.
    """

    kept: int = 0
    tail: str = ""
    forced_tokens: int = 0
    guarantee: str = ""
    unenforced: tuple[tuple[str, str], ...] = ()
    narrowed: tuple[tuple[str, str, str], ...] = ()
    placed: PlacedFacts | msgspec.UnsetType = msgspec.UNSET


class GenerateMeta(msgspec.Struct, frozen=True):
    """Facts of one text. Of an event before the last: the first three.

    Attributes:
        finish_reason: null while the text goes on.
        prompt_tokens, cached_tokens: of the prompt, however many texts follow it.
        e2e_latency: seconds.
    """

    id: str
    finish_reason: FinishFacts | None
    completion_tokens: int
    prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[LogprobTriple] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[LogprobTriple] | None] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[LogprobTriple] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[LogprobTriple] | None] | msgspec.UnsetType = msgspec.UNSET
    umbel: CompletionFacts | msgspec.UnsetType = msgspec.UNSET


class GenerateAnswer(msgspec.Struct, frozen=True):
    """One text, or one event of it. `index`: which of the texts of a request."""

    text: str
    output_ids: Sequence[int]
    meta_info: GenerateMeta
    index: int = 0


@dataclass(frozen=True, slots=True)
class _Query:
    """One prompt of a request: its request to the runtime, and whether log-probabilities are part of its answer."""

    request: GenRequest
    label: str
    told: bool  # log-probabilities are

    @property
    def top(self) -> bool:
        return self.request.sampling.top_logprobs > 0


class _Generation:
    """One request: its prompts, and its answer in both forms."""

    def __init__(self, asked: Asked[GenerateBody]) -> None:
        self._asked = asked
        self._body = asked.body
        self._front = asked.front
        self._began = asyncio.get_running_loop().time()
        prompts, self._several = _prompts(asked.body, asked.front)
        labels = _labels(asked, len(prompts))
        each = range(len(prompts))
        self._queries = [_query(asked, number, prompts[number], labels[number], len(prompts)) for number in each]
        counts = {query.request.sampling.n for query in self._queries}
        if len(counts) > 1:
            raise wrong("sampling_params", "n differs between the prompts; send a request for each n")
        (self._n,) = counts
        self._names = asked.front.token_names if any(query.told for query in self._queries) else {}

    @property
    def requests(self) -> list[GenRequest]:
        return [query.request for query in self._queries]

    async def whole(self) -> Any:
        """Returns the answer, a list where several texts are asked for."""
        with self._running():
            first = await self._first_tokens()
            finals = await self._front.finals(self.requests)
        answers = [answer for number, final in enumerate(finals) for answer in self._ends(number, final, first)]
        return answers if self._several or self._n > 1 else answers[0]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields an event for each piece of a text, and one for its end."""
        shown: dict[int, _Shown] = {}
        with self._running():
            first = await self._first_tokens()
            async with aclosing(self._front.events(self.requests)) as events:
                async for number, event in events:
                    if isinstance(event, Chunk):
                        index = number * self._n + event.index
                        piece = self._piece(number, event, shown.setdefault(index, _Shown()))
                        if piece is not None:
                            yield sse(msgspec.structs.replace(piece, index=index))
                        continue
                    for answer in self._ends(number, event, first):
                        yield sse(self._rest(answer, shown.get(answer.index)))
        yield DONE

    @contextmanager
    def _running(self) -> Iterator[None]:
        names = [(query.label, query.request.id) for query in self._queries]
        shared = self._body.rid
        if shared and isinstance(shared, str) and len(names) > 1:
            names += [(shared, request_id) for _, request_id in names]
        front = self._front
        with front.open(len(self._queries) * self._n), front.named(self._asked.caller, names):
            yield

    # ------------------------------------------------------------------ whole texts

    def _ends(self, number: int, final: Final, first: dict[int, LogprobTriple]) -> list[GenerateAnswer]:
        query = self._queries[number]
        seconds = round(asyncio.get_running_loop().time() - self._began, 6)
        start = query.request.sampling.prompt_logprobs_from
        given = [first[number]] if number in first else []
        before = self._triples(final.prompt_logprobs)
        answers = []
        for index, completion in enumerate(final.completions, number * self._n):
            meta = GenerateMeta(
                query.label,
                _finish(completion),
                len(completion.token_ids),
                prompt_tokens=final.usage.prompt_tokens,
                cached_tokens=final.usage.cached_tokens,
                e2e_latency=seconds,
                umbel=_facts(completion, final.placed),
            )
            if query.told:
                meta = msgspec.structs.replace(
                    meta,
                    input_token_logprobs=[*given, *before],
                    output_token_logprobs=self._triples(completion.logprobs),
                )
            if query.told and query.top:
                none: list[list[LogprobTriple] | None] = [None for _ in given]
                meta = msgspec.structs.replace(
                    meta,
                    input_top_logprobs=none + self._tops(final.prompt_logprobs) if start is not None else [],
                    output_top_logprobs=self._tops(completion.logprobs),
                )
            answers.append(GenerateAnswer(completion.text, completion.token_ids, meta, index))
        return answers

    async def _first_tokens(self) -> dict[int, LogprobTriple]:
        """Returns the first token of each prompt whose log-probabilities begin there: it has none."""
        found: dict[int, LogprobTriple] = {}
        for number, query in enumerate(self._queries):
            request = query.request
            if request.sampling.prompt_logprobs_from != 0 or any(isinstance(part, Media) for part in request.prompt):
                continue
            backend = tokenizing(self._front)
            ids = (await backend.tokenize(Tokenize(f"{request.id}-ids", request.prompt, request.origin))).token_ids
            if ids:
                question = Detokenize(f"{request.id}-text", ids[:1], control=True)
                text = (await backend.detokenize(question)).text if self._body.return_text_in_logprobs else None
                found[number] = (None, ids[0], text)
        return found

    # ------------------------------------------------------------------ streams

    def _piece(self, number: int, chunk: Chunk, shown: "_Shown") -> GenerateAnswer | None:
        """Returns the event of a chunk; None for one that is too small to repeat a long text for."""
        query = self._queries[number]
        shown.add(chunk)
        if not shown.due(incremental=self._body.incremental):
            return None
        meta = GenerateMeta(query.label, None, len(shown.ids))
        text, ids, logprobs = shown.take(incremental=self._body.incremental)
        if query.told:
            meta = msgspec.structs.replace(meta, output_token_logprobs=self._triples(logprobs))
        if query.told and query.top:
            meta = msgspec.structs.replace(meta, output_top_logprobs=self._tops(logprobs))
        return GenerateAnswer(text, ids, meta)

    def _rest(self, answer: GenerateAnswer, shown: "_Shown | None") -> GenerateAnswer:
        """Returns the last event of a text: all of it, or what no event had."""
        if shown is None or not self._body.incremental:
            return answer
        meta = answer.meta_info
        if meta.output_token_logprobs is not msgspec.UNSET:
            told = shown.told
            meta = msgspec.structs.replace(meta, output_token_logprobs=meta.output_token_logprobs[told:])
            if meta.output_top_logprobs is not msgspec.UNSET:
                meta = msgspec.structs.replace(meta, output_top_logprobs=meta.output_top_logprobs[told:])
        return GenerateAnswer(answer.text[shown.characters :], answer.output_ids[len(shown.ids) :], meta, answer.index)

    # ------------------------------------------------------------------ log-probabilities

    def _triples(self, tokens: Sequence[TokenLogprob]) -> list[LogprobTriple]:
        return [(token.logprob, token.token_id, self._named(token.token_id, token.text)) for token in tokens]

    def _tops(self, tokens: Sequence[TokenLogprob]) -> list[list[LogprobTriple] | None]:
        return [
            [(logprob, token_id, self._named(token_id, text)) for token_id, text, logprob in token.top]
            for token in tokens
        ]

    def _named(self, token_id: int, text: str) -> str | None:
        """Returns the text of a token, or the name of a control token; None where texts are not asked for."""
        return (text or self._names.get(token_id, "")) if self._body.return_text_in_logprobs else None


# An event has all of a text so far. It is sent once this share of the text is new, so that a text costs in all no more
# than so many times its length; texts below 4,096 characters have an event for each chunk.
SNAPSHOT = 256
SHORT = 4_096


@dataclass(slots=True)
class _Shown:
    """Collects the chunks of a text that is streamed."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    characters: int = 0
    waiting: int = 0  # characters that no event had
    sent: int = 0  # tokens
    told: int = 0  # log-probabilities

    def add(self, chunk: Chunk) -> None:
        self.pieces.append(chunk.text)
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.characters += len(chunk.text)
        self.waiting += len(chunk.text)

    def due(self, *, incremental: bool) -> bool:
        return incremental or self.characters < SHORT or self.waiting * SNAPSHOT >= self.characters

    def take(self, *, incremental: bool) -> tuple[str, list[int], list[TokenLogprob]]:
        """Returns what an event has: all so far, or what is new."""
        start, told = (self.sent, self.told) if incremental else (0, 0)
        text = self.pieces[-1] if incremental else "".join(self.pieces)
        self.sent, self.told, self.waiting = len(self.ids), len(self.logprobs), 0
        return text, self.ids[start:], self.logprobs[told:]


# ------------------------------------------------------------------------------------------------ the body


def _prompts(body: GenerateBody, front: Front) -> tuple[list[tuple[Part, ...]], bool]:
    """Returns the prompts, and whether they came in a list."""
    one_of(text=body.text, input_ids=body.input_ids, parts=body.parts)
    if body.text is not None:
        texts = (body.text,) if isinstance(body.text, str) else body.text
        return [text_prompt(text) for text in texts], not isinstance(body.text, str)
    if body.parts is not None:
        return [body.parts], False
    assert body.input_ids is not None, "one of them is given"
    ids = [each for each in body.input_ids if isinstance(each, int)]
    if len(ids) == len(body.input_ids):
        return [ids_prompt(front, "input_ids", ids)], False
    lists = [each for each in body.input_ids if not isinstance(each, int)]
    if ids or len(lists) > MAX_BATCH:
        raise wrong("input_ids", f"write a list of token ids, or a list of up to {MAX_BATCH} of such lists")
    return [ids_prompt(front, f"input_ids[{number}]", each) for number, each in enumerate(lists)], True


def _labels(asked: Asked[GenerateBody], count: int) -> list[str]:
    """Returns the caller's name of each prompt's request; that of the whole request where it gave none."""
    rid = asked.body.rid
    if rid is None or isinstance(rid, str):
        label = rid or asked.id
        return [label] if count == 1 else [f"{label}_{number}" for number in range(count)]
    return [_of("rid", rid, number, count) for number in range(count)]


# Any: a value of the field, or a tuple of such values
def _of(name: str, given: Any, number: int, count: int) -> Any:
    """Returns the entry of a field for one of the prompts. Raises HttpError for a list of another length."""
    if not isinstance(given, tuple):
        return given
    if len(given) != count:
        raise wrong(name, f"it has {len(given)} entries and there are {count} prompts; write one for each")
    return given[number]


def _query(asked: Asked[GenerateBody], number: int, prompt: tuple[Part, ...], label: str, count: int) -> _Query:
    body, front = asked.body, asked.front
    fields = _of("sampling_params", body.sampling_params, number, count) or SamplingFields()
    told = bool(_of("return_logprob", body.return_logprob, number, count))
    start = _of("logprob_start_len", body.logprob_start_len, number, count)
    top = _of("top_logprobs_num", body.top_logprobs_num, number, count) or 0
    constraint = fields.constraint()
    if constraint is not None and body.constraint is not None:
        raise wrong("constraint", "sampling_params have another one; give one of them")
    if body.constraint is not None:
        check_constraint("constraint.source", body.constraint)
    sampling = fields.params(
        logprobs=told,
        top_logprobs=top if told else 0,
        prompt_logprobs_from=start if told and start is not None and start >= 0 else None,
    )
    request = GenRequest(
        f"{asked.id}-{number}",
        prompt,
        sampling,
        stream=body.stream,
        origin=front.origin(asked.caller, body.umbel, body.cache_salt, body.model),
        constraint=constraint or body.constraint,
        token_healing=body.token_healing,
    )
    return _Query(request, label, told)


def _finish(completion: Completion) -> FinishFacts:
    match completion.finish_reason:
        case FinishReason.STOP:
            return FinishFacts("stop", matched=completion.matched_stop)
        case FinishReason.ABORT:
            return FinishFacts("abort", message="the request was aborted")
        case _:
            return FinishFacts("length", length=len(completion.token_ids))


def _facts(completion: Completion, placed: Placed | None) -> CompletionFacts:
    return CompletionFacts(
        completion.kept,
        completion.tail,
        completion.forced_tokens,
        completion.guarantee,
        completion.unenforced,
        completion.narrowed,
        placed_facts(placed),
    )


async def generate(asked: Asked[GenerateBody]) -> Answer:
    """Continues prompts."""
    check_model(asked.front, asked.body.model)
    job = _Generation(asked)
    return EventStream(job.stream()) if asked.body.stream else Reply(await job.whole())


ENDPOINTS = (
    Endpoint(
        "POST",
        "/generate",
        generate,
        "Continue prompts, in SGLang's shape",
        body=GenerateBody,
        answer=GenerateAnswer | list[GenerateAnswer],
        media=JSON_OR_EVENTS,
        errors=(404, 504),
        not_offered=GENERATE_NOT_OFFERED,
    ),
)
