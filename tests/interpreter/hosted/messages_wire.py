"""A wire that answers as the Messages API does, event by event as a test says: no server, no sockets."""

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import umbel as ul
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.transport import http_library

http = http_library(anthropic)  # httpx or httpx2, as the SDK is written for

Event = dict[str, Any]  # Any: JSON


def events(
    pieces: Sequence[str],
    *,
    reason: str | None = "end_turn",
    sequence: str | None = None,
    usage: Event | None = None,
    before: Sequence[Event] = (),
) -> list[Event]:
    """A streamed answer whose text comes in these pieces."""
    counts = {"input_tokens": 10, "output_tokens": 1, **(usage or {})}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "claude", "usage": counts}
    return [
        {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}},
        *before,
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in pieces
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": {"output_tokens": 7},
        },
        {"type": "message_stop"},
    ]


class MessagesWire(http.AsyncBaseTransport):
    """Gives the answers in order, the last one again and again.

    An answer is a list of events, a text (which is streamed in characters), or a whole response.

    Attributes:
        bodies: of the requests.
        read: how many events of each answer were read before it ended or was left.
        closed: how many answers were closed.
    """

    def __init__(self, *answers: list[Event] | str | http.Response) -> None:
        self._answers = list(answers)
        self.bodies: list[Event] = []
        self.headers: list[http.Headers] = []
        self.read: list[int] = []
        self.closed = 0

    async def handle_async_request(self, request: http.Request) -> http.Response:
        self.bodies.append(json.loads(await request.aread()))
        self.headers.append(request.headers)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, http.Response):
            return answer
        told = events(list(answer)) if isinstance(answer, str) else answer
        self.read.append(0)
        return http.Response(200, headers={"content-type": "text/event-stream"}, stream=_Events(self, told))

    def claude(self, model: str = "claude-haiku-4-5", **options: Any) -> ul.Anthropic:
        """The backend at the other end."""
        return ul.Anthropic(model, api_key="sk-ant-secret", environment=self.environment(), **options)

    def environment(self) -> Environment:
        async def sleep(seconds: float) -> None:
            pass

        return Environment(sleep=sleep, chance=lambda: 0.5, wire=self)


class _Events(http.AsyncByteStream):
    def __init__(self, wire: MessagesWire, told: list[Event]) -> None:
        self._wire, self._told, self._number = wire, told, len(wire.read) - 1

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        for event in self._told:
            self._wire.read[self._number] += 1
            yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()

    async def aclose(self) -> None:
        self._wire.closed += 1
