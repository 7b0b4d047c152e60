"""One SGLang server, by its own API."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from .....lang.errors import CapabilityError, UmbelError
from .....lang.prompt import Media, Part
from .....lang.protocol import (
    Capabilities,
    Chunk,
    ConstraintSpec,
    Done,
    Facts,
    Final,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
)
from .. import content
from ..openai import answers
from ..openai.answers import Answer
from ..session import Session
from . import scores
from .requests import PATH, SGLangPlanner, constraint_fields
from .wire import Reader

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
        self._calls += 1
        return await scores.score(self._session, self._planner, request, self._session.deadline(request.origin.timeout))

    def hint(self, hint: Hint) -> None:
        """Has the server compute a prefix that several requests will begin with. It costs the prompt's tokens once."""
        task = asyncio.ensure_future(self._prefill(hint.prompt))
        self._hints.add(task)
        task.add_done_callback(self._hints.discard)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        return constraint_fields(constraint) is not None

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        bound = content.text_tokens_at_most(prompt, content.count_bytes)
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

    async def _prefill(self, prompt: tuple[Part, ...]) -> None:
        """Computes a prefix. Errors are dropped: the requests that follow raise theirs."""
        with contextlib.suppress(UmbelError):
            body = self._planner.body(self._planner.prompt(prompt), {"max_new_tokens": 0, "temperature": 0.0})
            deadline = self._session.deadline(_MOST_SECONDS_FOR_HINT)
            async with self._session.slot(deadline) as client:
                await self._session.retried(lambda: client.post(PATH, cast_to=object, body=body), deadline)


def _scalars(said: object) -> Facts:
    """Returns the facts that are scalars."""
    given = said if isinstance(said, Mapping) else {}
    return {str(key): value for key, value in given.items() if value is None or isinstance(value, str | int | float)}
