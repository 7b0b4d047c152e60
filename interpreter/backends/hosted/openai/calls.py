"""One call over the wire, plain or streamed: what the SDK gives → pieces of an answer."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from .....lang.errors import BackendError
from .....lang.protocol import Chunk, GenRequest
from ..failures import Provider
from ..line import Line
from ..translated import TranslatedStream, Translator
from .answers import Answer, Given
from .requests import Plan
from .wire import Piece, parsed

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream

# JSON of a server, whole or of an event → a piece of an answer. Raises BackendError for what is none.
Reading = Callable[[object, Provider], Piece]


async def chunks(
    line: "Line[AsyncOpenAI]", plan: Plan, answer: Answer, request: GenRequest, read: Reading = parsed
) -> AsyncGenerator[Chunk, None]:
    """A call from its beginning to its end: what goes into `answer`, as chunks where the request asks for them."""
    deadline = line.deadline(request.origin.timeout)
    async with line.place(deadline) as client:
        if not plan.streams:
            await line.tried(lambda: _whole(client, plan, answer, line.provider, read), deadline)
            return
        events = await line.tried(lambda: _begin(client, plan, answer, line.provider, read), deadline)
        async with contextlib.aclosing(events):
            while (given := await line.once(events.next(), deadline)) is not None:
                for each in given if request.stream else ():
                    yield Chunk(request.id, each.index, each.text, logprobs=each.logprobs)


async def _whole(client: "AsyncOpenAI", plan: Plan, answer: Answer, provider: Provider, read: Reading) -> None:
    """A call without streaming. Raises what the SDK raises, and as `_take` says."""
    _take(read(await client.post(plan.path, cast_to=object, body=plan.body), provider), answer, provider)


async def _begin(client: "AsyncOpenAI", plan: Plan, answer: Answer, provider: Provider, read: Reading) -> "Events":
    """A streamed call, until its answer begins: so far it may be tried again."""
    events = Events(await _streamed(client, plan), answer, provider, read)
    try:
        events.check_kind()
    except BackendError:
        await events.aclose()
        raise
    return events


async def _streamed(client: "AsyncOpenAI | Translator", plan: Plan) -> "AsyncStream[object] | TranslatedStream":
    if isinstance(client, Translator):
        return TranslatedStream(await client.stream(plan.body))
    from openai import AsyncStream

    return await client.post(plan.path, cast_to=object, body=plan.body, stream=True, stream_cls=AsyncStream[object])


class Events:
    """The events of a stream."""

    def __init__(
        self, stream: "AsyncStream[object] | TranslatedStream", answer: Answer, provider: Provider, read: Reading
    ) -> None:
        self._stream, self._answer, self._provider, self._read = stream, answer, provider, read

    def check_kind(self) -> None:
        """Raises BackendError for what is no stream of events, such as a page of a web site."""
        kind = self._stream.response.headers.get("content-type", "")
        if kind and not kind.startswith("text/event-stream"):
            raise BackendError(
                f"{self._provider.name}: {self._provider.host} sent {kind.split(';')[0]} where a stream of events was "
                "asked for; check base_url"
            )

    async def next(self) -> list[Given] | None:
        """What the next event gives; None at the end.

        What goes wrong once every continuation has ended changes nothing any more.
        """
        if self._answer.cut:
            return None
        try:
            data = await anext(self._stream, None)
        except Exception as error:
            if self._answer.whole:
                return None
            told = getattr(error, "body", None)
            if told is None:
                raise
        else:
            if data is None:
                return None
            return _take(self._read(data, self._provider), self._answer, self._provider)
        raise self._provider.of_event(told)

    async def aclose(self) -> None:
        await self._stream.close()


def _take(piece: Piece, answer: Answer, provider: Provider) -> list[Given]:
    """Raises as Answer.take does, and as the server's own error inside an answer says."""
    if piece.error is not None:
        raise provider.of_event(_object(piece.error))
    return answer.take(piece)


def _object(error: Any) -> object:  # Any: whatever a server puts there
    return error if isinstance(error, dict) else {"message": str(error)}
