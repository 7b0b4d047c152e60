"""Serves requests by an umbel server: its runtime takes the messages of `lang/protocol.py` over HTTP (`/runtime`).

What the runtime can do, an endpoint can do: prompts keep their parts, constraints are enforced, choices are scored at
once, whole programs run in one request, and errors have their class. A message travels as base64 of msgpack in JSON,
which has neither bytes nor infinities itself; the answers are server-sent events.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from ....lang.errors import BackendError, UmbelError
from ....lang.programs import ProgramEnded, ProgramEvent, RunProgram
from ....lang.prompt import Part, tokens_at_most
from ....lang.protocol import (
    CacheRequest,
    Caches,
    Capabilities,
    Chunk,
    ConstraintKind,
    Control,
    Detokenize,
    Detokenized,
    Done,
    Embedded,
    EmbedRequest,
    Failure,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Ranked,
    RankRequest,
    ReadStatus,
    Release,
    Scored,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
    Tokenize,
    Tokenized,
    VocabularyInfo,
)
from ....lang.status import RuntimeStatus, TreeSurvey
from .session import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream

PATH = "/runtime"
_MOST_SECONDS_FOR_HINT = 60.0

Answer = (
    Chunk
    | Final
    | Scored
    | Embedded
    | Ranked
    | Caches
    | Located
    | Tokenized
    | Detokenized
    | Done
    | StatusRead
    | Surveyed
    | Failure
    | ProgramEvent
)
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class UmbelFacts(msgspec.Struct, frozen=True):
    """The server's description of its runtime, as far as it is used."""

    version: str
    model: str
    capabilities: Capabilities
    vocabulary: VocabularyInfo
    chat_template: str | None
    template_tokens: dict[str, str]
    template_options: dict[str, Any]  # Any: JSON


class _Envelope(msgspec.Struct, frozen=True):
    message: bytes


def expected_capabilities(name: str, *, programs: bool) -> Capabilities:
    """Returns what a server of umbel is taken to offer before it was asked. `programs`: as of `UmbelServer`."""
    return Capabilities(
        name,
        score=True,
        hint=True,
        pins=True,
        caching=True,
        token_ids=True,
        logprobs=True,
        probability=True,
        stop_regex=True,
        adapters=None,
        programs=programs,
        constraints=get_args(ConstraintKind),
    )


class UmbelServer:
    """Serves requests by messages to the runtime of a server.

    Args:
        session: to the server.
        facts: about its runtime.
        programs: whole programs may run there; False where the roles are written by another template than there.
    """

    def __init__(self, session: "Session[AsyncOpenAI]", facts: UmbelFacts, *, programs: bool) -> None:
        self._session = session
        self._provider = session.provider
        self._sent: set[asyncio.Task[None]] = set()  # hints; asyncio keeps only weak references to tasks
        self._order = asyncio.Lock()  # of hints and releases: a release never overtakes its hint
        self._numbers = itertools.count(1)  # of questions without an id of their caller
        self._calls = 0
        self.vocabulary = facts.vocabulary
        theirs = facts.capabilities
        self.capabilities = msgspec.structs.replace(
            theirs, name=f"umbel {facts.model} at {self._provider.host}", programs=theirs.programs and programs
        )

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        async with contextlib.aclosing(self._answers(request, request.origin.timeout)) as answers:
            async for answer in answers:
                if not isinstance(answer, Chunk | Final):
                    raise self._unexpected(answer)
                yield answer
                if isinstance(answer, Final):
                    return
        raise self._cut_off()

    async def run_program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        """Runs a whole program in one request. Closing the generator early aborts it."""
        async with contextlib.aclosing(self._answers(request, request.origin.timeout)) as answers:
            async for answer in answers:
                if not isinstance(answer, ProgramEvent):
                    raise self._unexpected(answer)
                yield answer
                if isinstance(answer, ProgramEnded):
                    return
        raise self._cut_off()

    async def score(self, request: ScoreRequest) -> Scored:
        return await self._answer(request, Scored, request.origin.timeout)

    async def embed(self, request: EmbedRequest) -> Embedded:
        return await self._answer(request, Embedded, request.origin.timeout)

    async def rank(self, request: RankRequest) -> Ranked:
        return await self._answer(request, Ranked, request.origin.timeout)

    async def locate(self, question: Locate) -> Located:
        return await self._answer(question, Located, question.origin.timeout)

    async def tokenize(self, question: Tokenize) -> Tokenized:
        return await self._answer(question, Tokenized, question.origin.timeout)

    async def detokenize(self, question: Detokenize) -> Detokenized:
        return await self._answer(question, Detokenized, None)

    async def caches(self, request: CacheRequest) -> Caches:
        return await self._answer(request, Caches, request.origin.timeout)

    async def status(self) -> RuntimeStatus:
        """Raises CapabilityError without the server's admin key, where it has keys."""
        return (await self._answer(ReadStatus(f"status-{next(self._numbers)}"), StatusRead, None)).status

    async def survey(self, most: int, text: int) -> TreeSurvey:
        """Raises CapabilityError without the server's admin key, where it has keys."""
        return (await self._answer(Survey(f"survey-{next(self._numbers)}", most, text), Surveyed, None)).survey

    async def control(self, verb: str) -> Done:
        """Raises CapabilityError without the server's admin key, where it has keys."""
        done = await self._answer(Control(f"control-{next(self._numbers)}", verb), Done, None)
        if verb != "info":
            return done
        retries = {f"retries_{reason}": count for reason, count in sorted(self._session.counts.items())}
        ours = {"host": self._provider.host, "calls": self._calls, **retries}
        return msgspec.structs.replace(done, result={**done.result, **ours})

    def hint(self, hint: Hint) -> None:
        self._send(hint)

    def release(self, pinned: str) -> None:
        self._send(Release(pinned))

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt, self.capabilities.image_tokens)

    async def close(self) -> None:
        for task in tuple(self._sent):
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)

    # -------------------------------------------------------------------------------- how

    async def _answer(self, question: msgspec.Struct, kind: type[T], timeout: float | None) -> T:
        async with contextlib.aclosing(self._answers(question, timeout)) as answers:
            async for answer in answers:
                if not isinstance(answer, kind):
                    raise self._unexpected(answer)
                return answer
        raise self._cut_off()

    async def _answers(self, question: msgspec.Struct, timeout: float | None) -> AsyncGenerator[Answer, None]:
        """Yields the answers to a message. It is sent again only until its answer begins.

        Args:
            timeout: seconds that it has left; None for no limit but the session's own.

        Raises:
            UmbelError: the runtime's error, with its class; or that of the connection.
        """
        self._calls += 1
        body = msgspec.to_builtins(_Envelope(_encode(question)))
        deadline = self._session.deadline(timeout)
        async with self._session.slot(deadline, getattr(question, "origin", None)) as client:
            stream = await self._session.retried(lambda: _opened(client, body), deadline)
            try:
                while (said := await self._session.once(_next(stream), deadline)) is not None:
                    answer = self._read(said)
                    if isinstance(answer, Failure):
                        raise answer.error()
                    yield answer
            finally:
                await stream.close()

    def _read(self, said: object) -> Answer:
        try:
            return _decoder.decode(msgspec.convert(said, _Envelope).message)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BackendError(f"{self._provider.name}: {self._provider.host} sent no message: {error}") from None

    def _send(self, message: Hint | Release) -> None:
        """Sends what has no answer, at once. Errors are dropped: the requests that follow raise theirs."""

        async def send() -> None:
            with contextlib.suppress(UmbelError):
                async with self._order, contextlib.aclosing(self._answers(message, _MOST_SECONDS_FOR_HINT)) as answers:
                    async for _ in answers:
                        pass

        task = asyncio.ensure_future(send())
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    def _unexpected(self, answer: Answer) -> BackendError:
        return BackendError(f"{self._provider.name}: {self._provider.host} answered by a {type(answer).__name__}")

    def _cut_off(self) -> BackendError:
        return BackendError(f"{self._provider.name}: {self._provider.host} ended its answer without an ending")


async def _opened(client: "AsyncOpenAI", body: Mapping[str, str]) -> "AsyncStream[object]":
    from openai import AsyncStream

    return await client.post(PATH, cast_to=object, body=body, stream=True, stream_cls=AsyncStream[object])


async def _next(stream: "AsyncStream[object]") -> object | None:
    return await anext(stream, None)
