"""The base of all fake providers: a server that reads a script, counts, and breaks on demand.

Scripts are asked about the text that Echo would have been asked: conversations are written as ChatML here, as the
hosted backends have them (`hosted/conversation.py`), so that one script answers Echo and every fake.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from ...lang import checks
from ...lang.prompt import Part, Text
from ...lang.protocol import Usage
from ...lang.runtime_options import MAX_MODEL_LENGTH
from ..backends.echo import MOST_RECORDED, Gate
from ..backends.echo_answers import Script, ScriptReader
from ..backends.echo_tokens import prompt_text
from ..backends.hosted.conversation import Content, Conversation, Message, PlainText, asked_to_continue
from . import faults as broken
from .faults import Fault, Faults, Scene
from .server import AnswerEvents, Exchange, HttpRequest, Server


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request for text, as it came.

    Attributes:
        path: where it went, such as "/v1/chat/completions".
        headers: names in lower case.
        body: the parsed JSON.
        text: what the script was asked; "" where the request was refused.
    """

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]  # Any: JSON
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of a provider: the JSON of an answer that comes at once, its events when it is streamed, its cost."""

    whole: object
    told: AnswerEvents | None
    usage: Usage


class Refused(Exception):
    """The provider does not take this request.

    Args:
        status: of HTTP.
        message: what is wrong with it, as the provider says it.
        kind: the provider's name for such errors.
        parameter: which parameter is wrong, where the provider says so.
        code: the provider's code for it.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "", parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.parameter, self.code = status, message, kind, parameter, code


MOST_MODELS = 10_000


class FakeProvider(ABC):
    """A provider on loopback, from `with` to the end of its block.

    Attributes:
        api_key: made up for this server; requests without it are refused.
        requests: those for text, in the order in which they came, also those that a fault or a refusal met.
        calls: how many of them the script answered.
        usage: what those cost: tokens as Echo counts them.
        concurrent: the most that were answered at the same time.
        abandoned: how many clients left before the end of their answer.
        errors: what went wrong with the script, in order; leaving the `with` block raises the first. Remove what a
            test expects.
        elsewhere: requests that followed a redirect to the other host, as they came; there must be none.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: Sequence[str],
        faults: Faults = (),
        gate: Gate | None = None,
        retry_after: str = "1",
        record: int = 1000,
    ) -> None:
        name = type(self).__name__
        self._script = ScriptReader(script, name)
        self.models = tuple(
            checks.text("models: a name", model, MAX_MODEL_LENGTH)
            for model in checks.members("models", models, MOST_MODELS, "a list of names of models")
        )
        self._faults = broken.checked_faults(faults)
        checks.instance("gate", gate, Gate | None)
        checks.text("retry_after", retry_after, 256, "the value of a header, such as '1'")
        self._gate = gate
        self._retry_after = retry_after
        self._server = Server(self._serve, name)
        self._other_host = Server(self._serve_elsewhere, f"{name}, another host")
        self.api_key = f"sk-fake-{secrets.token_hex(12)}"
        self.requests: deque[ReceivedRequest] = deque(maxlen=checks.integer("record", record, 0, MOST_RECORDED))
        self.calls = 0
        self.usage = Usage()
        self.concurrent = 0
        self.abandoned = 0
        self.errors: list[Exception] = []
        self.elsewhere: list[HttpRequest] = []
        self._number = 0
        self._active = 0

    # -------------------------------------------------------------------------------- of tests

    @property
    def address(self) -> str:
        """http://host:port"""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    @abstractmethod
    def base_url(self) -> str:
        """The address that clients of the provider use."""

    def __enter__(self) -> Self:
        self._server.start()
        self._other_host.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close()
        if self.errors and kind is None:
            raise AssertionError(f"{type(self).__name__}: {self.errors[0]}") from self.errors[0]

    def close(self) -> None:
        """Idempotent. Clients that wait for an answer lose the connection."""
        self._server.close()
        self._other_host.close()

    # -------------------------------------------------------------------------------- of dialects

    @abstractmethod
    def _authorised(self, request: HttpRequest) -> bool: ...

    @abstractmethod
    def _listing(self, path: str) -> object | None:
        """Returns the answer to a GET; None for an unknown path."""

    @abstractmethod
    def _question(self, path: str, body: object) -> "Question":
        """Parses a request. Raises Refused for one that the provider does not take."""

    @abstractmethod
    def _failure(self, refused: Refused) -> object:
        """Writes an error in the provider's format."""

    @abstractmethod
    def _error_event(self, refused: Refused) -> bytes:
        """Writes an error inside a stream."""

    # -------------------------------------------------------------------------------- the walk of a request

    async def _serve(self, request: HttpRequest, exchange: Exchange) -> None:
        self._active += 1
        self.concurrent = max(self.concurrent, self._active)
        try:
            await self._respond(request, exchange)
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self._active -= 1

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        path = request.path.partition("?")[0]
        try:
            if not self._authorised(request):
                raise Refused(401, "", kind="key")
            if request.method == "GET":
                listing = self._listing(path)
                if listing is None:
                    raise Refused(404, f"Not found: GET {path}", kind="path")
                await _json(exchange, 200, listing)
                return
            await self._generate(request, path, exchange)
        except Refused as refused:
            await _json(exchange, refused.status, self._failure(refused))

    async def _generate(self, request: HttpRequest, path: str, exchange: Exchange) -> None:
        self._number += 1
        try:
            body = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(400, f"The body of the request is no JSON: {error}") from None
        question: Question | Refused
        try:
            question = self._question(path, body)
        except Refused as refused:
            question = refused
        text = prompt_text(question.meant) if isinstance(question, Question) else ""
        self.requests.append(ReceivedRequest(path, request.headers, body if isinstance(body, dict) else {}, text))
        fault = broken.at(self._faults, self._number)  # it may look at the requests, this one the last
        if self._gate is not None:
            await self._gate.passes()
        scene = self._scene(request, exchange)
        if await scene.instead(fault):
            return
        if isinstance(question, Refused):
            raise question
        await self._tell(self._answered(question, text), fault, scene)

    def _answered(self, question: "Question", text: str) -> Answered:
        """Answers a question. Raises Refused (500) if the script has no answer that the provider could give."""
        try:
            said = self._script.answers(text, question.meant, question.n) if question.n else []
            answered = question.answer(said)
        except Exception as error:  # of the script, which is the test's: the test is told, and the client gets a 500
            self.errors.append(error)
            raise Refused(500, f"the script of the test failed: {error}", kind="script") from None
        self.calls += 1
        self.usage += answered.usage
        return answered

    async def _tell(self, answered: Answered, fault: Fault | int | None, scene: Scene) -> None:
        whole = msgspec.json.encode(answered.whole)
        match answered.told, fault:
            case None, None:
                await _json(scene.exchange, 200, answered.whole)
            case None, _:
                await scene.whole(fault, whole)
            case told, None:
                await scene.exchange.start(200, {**_HEADERS, "content-type": "text/event-stream; charset=utf-8"})
                for event in told.all():
                    if self._gate is not None and event in told.pieces:
                        await self._gate.passes()
                    await scene.exchange.send(event)
                await scene.exchange.end()
            case told, _:
                await scene.stream(fault, told)

    def _scene(self, request: HttpRequest, exchange: Exchange) -> Scene:
        """Makes a scene whose errors repeat the request, key included, so that tests see whether logs leak it."""
        trouble = f"upstream failed for {request.headers.get('authorization') or request.headers.get('x-api-key')}"
        return Scene(
            exchange,
            _HEADERS,
            lambda status: msgspec.json.encode(self._failure(Refused(status, trouble))),
            self._error_event(Refused(500, trouble)),
            self._retry_after,
            f"http://localhost:{self._other_host.port}{request.path}",
        )

    async def _serve_elsewhere(self, request: HttpRequest, exchange: Exchange) -> None:
        self.elsewhere.append(request)
        await _json(exchange, 404, {"error": {"message": "nobody should have come here"}})


@dataclass(frozen=True, slots=True)
class Question(ABC):
    """A request that the provider takes.

    Attributes:
        meant: what it asks to be continued, for the script.
        n: answers wanted; 0 where the numbers of the prompt are all that is asked for.
    """

    meant: tuple[Part, ...]
    n: int

    @abstractmethod
    def answer(self, said: list[str]) -> Answered:
        """Writes the script's texts as the provider answers."""


_HEADERS = {"request-id": "req_fake", "x-request-id": "req_fake"}


async def _json(exchange: Exchange, status: int, data: object) -> None:
    headers = {**_HEADERS, "content-type": "application/json"}
    await exchange.respond(status, headers, msgspec.json.encode(data))


def meant(messages: tuple[Message, ...]) -> tuple[Part, ...]:
    """Returns the prompt that the messages ask to continue: a quoted turn becomes an open turn again."""
    return written(asked_to_continue(messages))


def written(asked: Conversation | PlainText) -> tuple[Part, ...]:
    """Returns the parts of a prompt as the interpreter writes it."""
    match asked:
        case PlainText(content):
            return content
        case Conversation(turns, begun):
            return (*_closed(turns), Text("<|im_start|>assistant\n", control=True), *begun)


def sent(messages: tuple[Message, ...], begun: Content = ()) -> tuple[Part, ...]:
    """Returns all parts of a request, for counting tokens."""
    return written(Conversation(messages, begun))


def _closed(turns: Iterable[Message]) -> Iterable[Part]:
    for turn in turns:
        yield Text(f"<|im_start|>{turn.role}\n", control=True)
        yield from turn.content
        yield Text("<|im_end|>\n", control=True)
