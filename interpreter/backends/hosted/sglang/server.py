"""Serves requests by one SGLang server's own API.

Scoring takes two requests. The first computes the prompt, so that the server has it in its cache, and says how many
tokens it has. The second sends the prompt, and the prompt with each choice, and asks for the log-probabilities of their
last tokens. The tokens of a choice are those from the first one that differs from the prompt's own:

    prompt            [Ans][wer][:][ ]
    prompt + choice   [Ans][wer][:][ yes][.]
                                   ^ a token that begins before the border, and holds some of the choice: counted
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .....lang.errors import BackendError, CapabilityError, UmbelError
from .....lang.prompt import Media, Part, namespace
from .....lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintSpec,
    Done,
    Facts,
    Final,
    GenRequest,
    Hint,
    Origin,
    Scored,
    ScoredChoice,
    ScoreRequest,
    Usage,
)
from .. import conversation
from ..constraint_params import Fields
from ..openai import answers
from ..openai.answers import Answer
from ..session import Session
from .wire import PATH, Meta, Reader, SGLangPlanner, Token, constraint_fields, told

if TYPE_CHECKING:
    from openai import AsyncOpenAI


_MOST_SECONDS_FOR_HINT = 60.0
_IMAGE_TOKENS = 4096  # of one picture at most: the server counts them itself, and says so afterwards
_INCREMENTAL = ("incremental_streaming_output", "stream_output")  # options of a server that streams what is new


class SGLangServer:
    """Serves requests by `/generate`.

    Args:
        session: to the server.
        planner: of requests.
        model: its path, as reported by the server.
        info: facts reported by the server; {} for none.
    """

    def __init__(
        self, session: "Session[AsyncOpenAI]", planner: SGLangPlanner, model: str, info: Mapping[str, Any]
    ) -> None:
        self._session, self._planner, self._model, self._info = session, planner, model, info
        self._hints: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
        self._calls = 0
        context = info.get("context_length")
        self.capabilities = Capabilities(
            planner.backend,
            score=True,
            hint=True,
            logprobs=True,
            images=True,
            image_tokens=_IMAGE_TOKENS,
            max_context=context if type(context) is int and context > 0 else None,
            constraints=("regex", "json_schema", "gbnf"),
            asks_again=True,
        )

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        plan = self._planner.plan(request)
        incremental = any(self._info.get(option) is True for option in _INCREMENTAL)
        reader = Reader(request.sampling.stop, request.sampling.n, incremental=incremental)
        constrained = request.constraint is not None
        answer = Answer(plan, self._session.provider, self.tokens_at_most(request.prompt), constrained=constrained)
        self._calls += 1
        async with contextlib.aclosing(answers.chunks(self._session, plan, answer, request, reader)) as chunks:
            async for chunk in chunks:
                yield chunk
        answer.check_whole()
        yield Final(request.id, answer.completions(), answer.usage(), reader.prompt_logprobs)

    async def score(self, request: ScoreRequest) -> Scored:
        """Scores the choices of a request.

        Raises:
            CapabilityError: the probability of choices over all their tokens, or choices after no prompt.
        """
        if request.probability:
            raise CapabilityError(
                f"{self._planner.backend} cannot give {request.probability}; write select() with its default method, "
                "or run the program on a Runtime"
            )
        self._planner.check_shared(request)
        self._calls += 1
        return await score_choices(
            self._session, self._planner, request, self._session.deadline(request.origin.timeout)
        )

    def hint(self, hint: Hint) -> None:
        """Has the server compute a prefix that several requests will begin with. It costs the prompt's tokens once.

        A prefix that may not be shared is not sent: the requests with it are refused.
        """
        if namespace(hint.origin.salt, hint.prompt):
            return
        task = asyncio.ensure_future(self._prefill(hint))
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        return constraint_fields(constraint) is not None

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        bound = conversation.text_tokens_at_most(prompt, conversation.count_bytes)
        return bound + sum(_IMAGE_TOKENS for part in prompt if isinstance(part, Media))

    async def control(self, verb: str) -> Done:
        """Raises CapabilityError for a verb that is not "info" or "flush_cache"."""
        deadline = self._session.deadline(None)
        match verb:
            case "info":
                async with self._session.slot(deadline) as client:
                    path = "/get_server_info"
                    said = await self._session.retried(lambda: client.get(path, cast_to=object), deadline)
                retries = {f"retries_{reason}": count for reason, count in sorted(self._session.counts.items())}
                ours: Facts = {
                    "model": self._model,
                    "host": self._session.provider.host,
                    "calls": self._calls,
                    **retries,
                }
                return Done("sglang", {**_scalars(said), **ours})
            case "flush_cache":
                async with self._session.slot(deadline) as client:
                    await self._session.retried(lambda: client.post("/flush_cache", cast_to=object, body={}), deadline)
                return Done("sglang", {})
            case _:
                raise CapabilityError(
                    f"{self._planner.backend} has no control verb {verb!r}; write 'info' or 'flush_cache'"
                )

    async def close(self) -> None:
        for task in tuple(self._hints):
            task.cancel()
        await asyncio.gather(*self._hints, return_exceptions=True)

    async def _prefill(self, hint: Hint) -> None:
        """Computes a prefix. Errors are dropped: the requests that follow raise theirs."""
        with contextlib.suppress(UmbelError):
            body = self._planner.body(self._planner.prompt(hint.prompt), {"max_new_tokens": 0, "temperature": 0.0})
            deadline = self._session.deadline(_MOST_SECONDS_FOR_HINT)
            async with self._session.slot(deadline, hint.origin) as client:
                await self._session.retried(lambda: client.post(PATH, cast_to=object, body=body), deadline)


def _scalars(said: object) -> Facts:
    """Returns the facts that are scalars."""
    given = said if isinstance(said, Mapping) else {}
    return {str(key): value for key, value in given.items() if value is None or isinstance(value, str | int | float)}


_BORDER = 4  # tokens of the prompt's end that are compared, at first; all of them where these differ

_NOTHING: Fields = {"max_new_tokens": 0, "temperature": 0.0}


async def score_choices(
    session: "Session[AsyncOpenAI]", planner: SGLangPlanner, request: ScoreRequest, deadline: float
) -> Scored:
    """Scores all choices of a request, by two or three calls.

    Raises:
        CapabilityError: there is nothing before the choices, or no beginning of texts to compare them after.
        BackendError: log-probabilities are missing, or a call failed.
    """
    scoring = _Scoring(session, planner, deadline, request.origin)
    prompt = planner.prompt(request.prompt)
    if not prompt["text"]:
        raise CapabilityError(f"{planner.backend} scores choices after a prompt only; write some text before them")
    head = await scoring.one(prompt)
    texts = [prompt["text"], *(prompt["text"] + choice for choice in request.choices)]
    found = await scoring.choices(prompt, texts, max(0, head.prompt_tokens - _BORDER))
    if found is None:
        found = await scoring.choices(prompt, texts, 0)
    if found is None:
        raise BackendError(f"{planner.backend}: the server told no log-probabilities of the choices")
    unconditional: Sequence[tuple[float, ...]] = [()] * len(found)
    if request.unconditional:
        unconditional = await scoring.unconditional([[token for _, token, _ in tokens] for tokens in found])
    choices = tuple(
        ScoredChoice(tuple(token for _, token, _ in tokens), tuple(value or 0.0 for value, _, _ in tokens), alone)
        for tokens, alone in zip(found, unconditional, strict=True)
    )
    return Scored(request.id, choices, scoring.usage)


class _Scoring:
    """Makes the calls for one request. `usage`: their sum."""

    def __init__(
        self, session: "Session[AsyncOpenAI]", planner: SGLangPlanner, deadline: float, origin: Origin
    ) -> None:
        self._session, self._planner, self._deadline, self._origin = session, planner, deadline, origin
        self.usage = Usage()

    async def asked(self, prompt: Fields, **more: object) -> list[Meta]:
        """Requests facts about texts without generating. Returns one entry per text."""
        body = {**self._planner.body(prompt, _NOTHING), **more}
        async with self._session.slot(self._deadline, self._origin) as client:
            data = await self._session.retried(lambda: client.post(PATH, cast_to=object, body=body), self._deadline)
        facts = [each.meta_info for each in told(data, self._session.provider)]
        self.usage += Usage(
            sum(meta.prompt_tokens for meta in facts),
            sum(min(meta.cached_tokens, meta.prompt_tokens) for meta in facts),
            0,
            1,
        )
        return facts

    async def one(self, prompt: Fields, **more: object) -> Meta:
        """Requests facts about one text."""
        facts = await self.asked(prompt, **more)
        if len(facts) != 1:
            raise BackendError(
                f"{self._planner.backend}: the server answered {len(facts)} times where one was asked for"
            )
        return facts[0]

    async def choices(self, prompt: Fields, texts: list[str], start: int) -> list[list[Token]] | None:
        """Returns the tokens of each choice; None: they may begin before `start`."""
        asked = {**prompt, "text": texts}
        if "image_data" in prompt:
            asked["image_data"] = [prompt["image_data"]] * len(texts)
        facts = await self.asked(asked, **_told_from(start))
        if len(facts) != len(texts):
            raise BackendError(f"{self._planner.backend}: the server scored {len(facts)} of {len(texts)} texts")
        head, *tails = [_placed(meta) for meta in facts]
        found = [_tokens_after(head, tail, facts[0].prompt_tokens) for tail in tails]
        known = [tokens for tokens in found if tokens and all(value is not None for value, _, _ in tokens)]
        return known if len(known) == len(found) else None

    async def unconditional(self, choices: list[list[int]]) -> list[tuple[float, ...]]:
        """Scores each choice's tokens after the beginning-of-text token alone.

        Raises:
            CapabilityError: the model's texts have no token that they begin with.
        """
        probe = await self.one({"text": "a"}, **_told_from(0))
        begun = probe.input_token_logprobs or []
        if len(begun) != 2:
            raise CapabilityError(
                f"{self._planner.backend} begins texts with no token of its own, so a choice cannot be scored without "
                'the prompt; write method="token_length_normalized"'
            )
        first = begun[0][1]
        facts = await self.asked({"input_ids": [[first, *ids] for ids in choices]}, **_told_from(0))
        alone = [tuple(value for value, _, _ in (meta.input_token_logprobs or [])[1:]) for meta in facts]
        known = [tuple(value for value in values if value is not None) for values in alone]
        if [len(values) for values in known] != [len(ids) for ids in choices]:
            raise BackendError(f"{self._planner.backend}: the server told no log-probabilities of the choices alone")
        return known


def _told_from(start: int) -> Fields:
    return {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": start}


def _placed(meta: Meta) -> dict[int, Token]:
    """Returns the tokens with log-probabilities, the last ones, by position."""
    tokens = meta.input_token_logprobs or []
    return dict(enumerate(tokens, meta.prompt_tokens - len(tokens)))


def _tokens_after(head: dict[int, Token], tail: dict[int, Token], prompt_tokens: int) -> list[Token] | None:
    """Returns the tokens of a text from the first that differs from the prompt's. None: they may differ before the
    first returned token."""
    differing = (
        place for place in tail if place >= prompt_tokens or tail[place][1] != head.get(place, (0.0, -1, ""))[1]
    )
    first = next(differing, None)
    if first is None or (first == min(tail) and 0 < first < prompt_tokens):
        return None
    return [token for place, token in tail.items() if place >= first]
