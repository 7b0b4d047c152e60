"""`POST /v1/completions`: texts after prompts, with the log-probabilities of both.

Special tokens in a prompt are read as such: the prompt is the caller's own, as the text of a chat message is not.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec

from ...lang.prompt import Generated, Part, Text
from ...lang.protocol import (
    MAX_DETOKENIZED,
    Chunk,
    Completion,
    ConstraintSpec,
    Detokenize,
    Final,
    GenRequest,
    TokenLogprob,
    Usage,
)
from ..bodies import Regex, TokenCount, TopLogprobs, wrong
from ..front import Front
from ..http import DONE, JSON_OR_EVENTS, Answer, Asked, Endpoint, EventStream, Reply, sse
from ..tokens import check_ids, tokenizing
from .fields import (
    NOT_OFFERED,
    GenerationFields,
    TextsOrTokens,
    TokenLists,
    TokenUsage,
    TokenWriter,
    characters,
    finish_reason,
    parts_of,
    token_usage,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(GenerationFields, frozen=True):
    """Asks for texts after prompts.

    Attributes:
        prompt: a text, a list of texts, token ids, or a list of those. null begins a document.
        max_tokens: of each text; 0 computes the prompt and generates nothing, for its log-probabilities with echo.
        echo: the answer begins with the prompt.
        logprobs: so many alternatives for each token, 0 to 20.
        best_of: only as many as n.
        regex: a regular expression that each text matches.
    """

    prompt: TextsOrTokens | None = None
    max_tokens: TokenCount | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: None = None
    regex: Regex | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text. Of a stream: a piece of it."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TokenLists | None = None


class CompletionAnswer(msgspec.Struct, frozen=True):
    """All texts, prompt by prompt. Of a stream: an event."""

    id: str
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class _Completions:
    """One request: its prompts, and its answer in both forms."""

    def __init__(self, asked: Asked[CompletionBody], prompts: Sequence[tuple[Part, ...]], texts: list[str]) -> None:
        body, front = asked.body, asked.front
        self._body = body
        self._front = front
        self._head = ("cmpl-" + asked.id, front.now(), body.model)
        self._echo = bool(body.echo)
        self._texts = texts  # of the prompts, to be echoed
        self._names = {} if body.logprobs is None else front.token_names
        self._begun = [_begun_for_it(prompt, front) for prompt in prompts]
        sampling = body.sampling(
            DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs_from=0 if self._echo and body.logprobs is not None else None,
        )
        self._requests = [
            GenRequest(
                f"{asked.id}-{number}",
                prompt,
                sampling,
                stream=bool(body.stream),
                origin=front.origin(asked.caller, body.umbel, body.cache_salt, body.model),
                constraint=None if body.regex is None else ConstraintSpec("regex", body.regex),
            )
            for number, prompt in enumerate(prompts)
        ]

    @property
    def count(self) -> int:
        """Texts that are asked for."""
        return len(self._requests) * self._body.count

    async def whole(self) -> CompletionAnswer:
        with self._front.open(self.count):
            finals = await self._front.finals(self._requests)
        choices = [
            CompletionChoice(
                prompt * self._body.count + number,
                (self._texts[prompt] if self._echo else "") + completion.text,
                finish_reason(completion),
                self._lists(prompt, final, completion.logprobs),
            )
            for prompt, final in enumerate(finals)
            for number, completion in enumerate(final.completions)
        ]
        return self._event(choices, token_usage(sum((final.usage for final in finals), Usage())))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the events: pieces of texts, the end of each text, and usage when it is asked for."""
        front, count = self._front, self._body.count
        usage = Usage()
        with front.open(self.count):
            requests = self._requests
            prefixes: list[Final] = []
            if self._echo and self._body.logprobs is not None:  # the prompt's come before the first token does
                prefixes = await front.compute_ahead([_prefix_of(request) for request in requests])
                requests = [_without_prompt_logprobs(request) for request in requests]
            writers = [TokenWriter(self._names, len(text)) for text in self._texts for _ in range(count)]
            echoed: set[int] = set()
            async with aclosing(front.events(requests, prefixes)) as events:
                async for prompt, event in events:
                    if self._echo and prompt not in echoed:
                        echoed.add(prompt)
                        yield self._echo_event(prompt, prefixes)
                    if isinstance(event, Chunk):
                        index = prompt * count + event.index
                        lists = None
                        if self._body.logprobs is not None:
                            lists = writers[index].lists(event.logprobs)
                        yield sse(self._event([CompletionChoice(index, event.text, None, lists)]))
                    else:
                        usage += event.usage
                        ends = [
                            self._end(prompt * count + number, completion, writers)
                            for number, completion in enumerate(event.completions)
                        ]
                        yield sse(self._event(ends))
        if self._body.wants_usage:
            yield sse(self._event([], token_usage(usage)))
        yield DONE

    @staticmethod
    def _end(index: int, completion: Completion, writers: Sequence[TokenWriter]) -> CompletionChoice:
        """Returns the end of a text, with the tokens that had no text to come with: its end-of-sequence token."""
        left = completion.logprobs[writers[index].written_tokens :]
        return CompletionChoice(index, "", finish_reason(completion), writers[index].lists(left) if left else None)

    def _echo_event(self, prompt: int, prefixes: list[Final]) -> bytes:
        """Returns the event with which every text of a prompt begins when it is echoed."""
        lists = None
        if prefixes:
            lists = self._prompt_lists(prompt, prefixes[prompt])
        first = prompt * self._body.count
        return sse(
            self._event(
                [CompletionChoice(first + n, self._texts[prompt], None, lists) for n in range(self._body.count)]
            )
        )

    def _lists(self, prompt: int, final: Final, generated: tuple[TokenLogprob, ...]) -> TokenLists | None:
        """Returns the lists of a whole text: of its prompt, when that is echoed, and of what was generated."""
        if self._body.logprobs is None:
            return None
        own = TokenWriter(self._names, len(self._texts[prompt])).lists(generated)
        if not self._echo:
            return own
        before = self._prompt_lists(prompt, final)
        return TokenLists(
            *(left + right for left, right in zip(*map(msgspec.structs.astuple, (before, own)), strict=True))
        )

    def _prompt_lists(self, prompt: int, final: Final) -> TokenLists:
        """Returns the lists of a prompt. Its first token has no log-probability: nothing comes before it.

        Its text is what the others leave of the prompt's: none, where it is a beginning-of-sequence token that the
        prompt does not write. Token ids have an entry each, and none for such a token."""
        entries = final.prompt_logprobs
        if self._begun[prompt]:
            return TokenWriter(self._names, written=True).lists(entries)
        text = self._texts[prompt]
        first = text[: max(0, len(text) - characters(entries, self._names))]
        rest = TokenWriter(self._names, len(first), written=True).lists(entries)
        return TokenLists(
            [first, *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            [0, *rest.text_offset],
        )

    def _event(self, choices: Sequence[CompletionChoice], usage: TokenUsage | None = None) -> CompletionAnswer:
        """Makes an answer, or one event of a stream, in which usage is null until the last where it was asked for."""
        name, created, model = self._head
        shown = usage is not None or (self._body.stream and self._body.wants_usage)
        return CompletionAnswer(name, created, model, choices, usage=usage if shown else msgspec.UNSET)


def _begun_for_it(prompt: tuple[Part, ...], front: Front) -> bool:
    """Returns whether the runtime puts BOS before token ids that do not begin with it."""
    (part,) = prompt
    bos = tokenizing(front).vocabulary.bos_id if isinstance(part, Generated) else None
    return bos is not None and isinstance(part, Generated) and part.token_ids[:1] != (bos,)


async def _texts(asked: Asked[CompletionBody], prompts: Sequence[tuple[Part, ...]]) -> list[str]:
    """Returns the texts of the prompts; those of token ids only when they are echoed."""
    found = []
    for number, (part,) in enumerate(prompts):
        if not isinstance(part, Generated):
            assert isinstance(part, Text), "a prompt is a text, or ids"
            found.append(part.text)
            continue
        check_ids(asked.front, "prompt", part.token_ids)
        if asked.body.echo and len(part.token_ids) > MAX_DETOKENIZED:
            raise wrong("prompt", f"{len(part.token_ids)} token ids; at most {MAX_DETOKENIZED} are echoed")
        question = Detokenize(f"{asked.id}-{number}-text", part.token_ids, control=True)
        found.append((await tokenizing(asked.front).detokenize(question)).text if asked.body.echo else "")
    return found


def _prefix_of(request: GenRequest) -> GenRequest:
    """Returns the request for a prompt's log-probabilities alone."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=0, min_tokens=0, n=1)
    return msgspec.structs.replace(request, id=f"{request.id}-prompt", sampling=sampling, stream=False, constraint=None)


def _without_prompt_logprobs(request: GenRequest) -> GenRequest:
    return msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs_from=None)
    )


async def complete(asked: Asked[CompletionBody]) -> Answer:
    """Completes prompts."""
    body, front = asked.body, asked.front
    model = front.model(body.model)
    if model.program:
        raise wrong("model", f"{model.name!r} is a program; ask it by /v1/chat/completions or /v1/programs")
    if body.best_of not in (None, body.count):
        raise wrong("best_of", "texts are not ranked; leave it out, or give the value of n")
    prompts = parts_of("prompt", "" if body.prompt is None else body.prompt, control=True)
    job = _Completions(asked, prompts, await _texts(asked, prompts))
    return EventStream(job.stream()) if body.stream else Reply(await job.whole())


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/completions",
        complete,
        "Continue prompts",
        body=CompletionBody,
        answer=CompletionAnswer,
        media=JSON_OR_EVENTS,
        errors=(404, 504),
        not_offered={**NOT_OFFERED, "suffix": "texts are not filled into the middle; leave it out"},
    ),
)
