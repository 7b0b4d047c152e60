"""One call over the wire, plain or streamed: what the SDK gives → pieces of an answer."""

from typing import TYPE_CHECKING, Any

from .....lang.errors import BackendError
from ..failures import Provider
from .answers import Answer, Given
from .requests import Plan
from .wire import Piece, parsed

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream


async def whole(client: "AsyncOpenAI", plan: Plan, answer: Answer, provider: Provider) -> None:
    """A call without streaming. Raises what the SDK raises, and as `_take` says."""
    _take(parsed(await client.post(plan.path, cast_to=object, body=plan.body), provider), answer, provider)


async def begin(client: "AsyncOpenAI", plan: Plan, answer: Answer, provider: Provider) -> "Events":
    """A streamed call, until its answer begins: so far it may be tried again."""
    from openai import AsyncStream

    stream = await client.post(plan.path, cast_to=object, body=plan.body, stream=True, stream_cls=AsyncStream[object])
    events = Events(stream, answer, provider)
    try:
        events.check_kind()
    except BackendError:
        await events.aclose()
        raise
    return events


class Events:
    """The events of a stream."""

    def __init__(self, stream: "AsyncStream[object]", answer: Answer, provider: Provider) -> None:
        self._stream, self._answer, self._provider = stream, answer, provider

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
            return _take(parsed(data, self._provider), self._answer, self._provider)
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
