"""The base of all fake providers: a server that reads a script, checks requests, counts, and breaks on demand.

Scripts are asked about the text that Echo would have been asked: conversations are written as ChatML here, as the
hosted backends have them (`hosted/conversation.py`), so that one script answers Echo and every fake.

A dialect says which fields a request may have (`fitted`), what it refuses of them (`refuse`), which form an answer must
have (`Form`), and how answers and errors are written.
"""

import asyncio
import base64
import binascii
import contextlib
import inspect
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

import msgspec

from ...lang import checks
from ...lang.agents.dialogue import with_calls
from ...lang.errors import RequestError, unknown_option
from ...lang.prompt import Media, Part, Text, media_of
from ...lang.protocol import ConstraintSpec, Usage
from ...lang.runtime_options import MAX_MODEL_LENGTH
from ...lang.sampling import MAX_TOKENS, SamplingParams
from ...lang.tool_calls import FENCED, ToolCall
from ..backends.echo import MOST_RECORDED, Gate
from ..backends.echo_answers import Script, ScriptReader, check, cut
from ..backends.echo_tokens import prompt_text
from ..backends.hosted.conversation import Content, Conversation, Message, PlainText, asked_to_continue
from .server import AnswerEvents, Exchange, Faults, HttpRequest, Scene, Server, checked_faults, event, fault_at

MOST_MODELS = 10_000

T = TypeVar("T")
Schema = dict[str, Any]  # Any: JSON Schema


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
    """An answer of a provider, as it is sent, and its cost."""

    events: AnswerEvents
    usage: Usage


class Refused(Exception):
    """The provider does not take this request.

    Args:
        status: of HTTP.
        message: what is wrong with it, as the provider says it; "" for a missing key.
        parameter: which parameter is wrong, where the provider says so.
        code: the provider's code for it.
    """

    def __init__(self, status: int, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.parameter, self.code = status, message, parameter, code


def refuse(when: object, message: str, parameter: str | None = None, code: str | None = None) -> None:
    """Raises Refused (400) where something is wrong."""
    if when:
        raise Refused(400, message, parameter=parameter, code=code)


class FakeOptions(TypedDict, total=False):
    """Names the keyword options of every fake provider.

    Attributes:
        faults: for each request for text in order, or a function of its number (from 1): a `Fault`, a status of HTTP,
            or None.
        gate: if given, every request for text and every streamed piece waits at this `umbel.Gate`.
        retry_after: the value of the header that `Fault.RATE_LIMIT_AND_WHEN` sends; "1" if it is left out.
        record: how many requests `requests` keeps; 1,000 if it is left out.
    """

    faults: Faults
    gate: Gate | None
    retry_after: str
    record: int


class FakeProvider(ABC):
    """Is the base of all fake providers: a server on this machine, from `with` to the end of its block.

    Attributes:
        api_key: made up for this server; requests without it are refused, but for Ollama's.
        models: names that exist.
        requests: those for text, in the order in which they came, also those that a fault or a refusal met.
        calls: how many of them the script answered.
        usage: what those cost: tokens as Echo counts them.
        concurrent: the most that were answered at the same time.
        abandoned: how many clients left before the end of their answer.
        errors: what went wrong with the script, in order; leaving the `with` block raises the first. Remove what a
            test expects.
        elsewhere: requests that followed a redirect to the other host, as they came; there must be none.
    """

    KEY_HEADER: ClassVar[str]  # where the key may be, next to "authorization: Bearer"
    ERROR_EVENT: ClassVar[str] = ""  # the name of the event that tells an error
    STREAM_TYPE: ClassVar[str] = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        script: Script | None,
        models: Sequence[str],
        **options: Unpack[FakeOptions],
    ) -> None:
        name = type(self).__name__
        self.check_options(options)
        self._script = ScriptReader(script, name)
        self.models = tuple(
            checks.text("models: a name", model, MAX_MODEL_LENGTH)
            for model in checks.members("models", models, MOST_MODELS, "a list of names of models")
        )
        self._faults = checked_faults(options.get("faults", ()))
        self._gate = options.get("gate")
        checks.instance("gate", self._gate, Gate | None)
        self._retry_after = checks.text(
            "retry_after", options.get("retry_after", "1"), 256, "the value of a header, such as '1'"
        )
        self._server = Server(self._serve, name)
        self._other_host = Server(self._serve_elsewhere, f"{name}, another host")
        self.api_key = f"sk-fake-{secrets.token_hex(12)}"
        self.requests: deque[ReceivedRequest] = deque(
            maxlen=checks.integer("record", options.get("record", 1000), 0, MOST_RECORDED)
        )
        self.calls = 0
        self.usage = Usage()
        self.concurrent = 0
        self.abandoned = 0
        self.errors: list[Exception] = []
        self.elsewhere: list[HttpRequest] = []
        self._number = 0
        self._active = 0

    @classmethod
    def check_options(cls, options: FakeOptions) -> None:
        """Checks the names of options. Raises ParameterError for one that does not exist."""
        known = FakeOptions.__annotations__.keys()
        unknown = next((option for option in options if option not in known), None)
        if unknown is not None:
            names = {*inspect.signature(cls).parameters} | known
            raise unknown_option(f"{cls.__name__}()", unknown, names - {"options"})

    # -------------------------------------------------------------------------------- of tests

    @property
    def address(self) -> str:
        """The address of the server, as in "http://127.0.0.1:8000"."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    @abstractmethod
    def base_url(self) -> str:
        """The address for clients of the provider: what `base_url` of the backend takes."""

    def __enter__(self) -> Self:
        self._server.start()
        self._other_host.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close()
        if self.errors and kind is None:
            raise AssertionError(f"{type(self).__name__}: {self.errors[0]}") from self.errors[0]

    def close(self) -> None:
        """Ends the server; the end of the `with` block does so. Clients that wait for an answer lose the connection."""
        self._server.close()
        self._other_host.close()

    # -------------------------------------------------------------------------------- of dialects

    @abstractmethod
    def _listing(self, path: str) -> object | None:
        """Returns the answer to a GET; None for an unknown path."""

    @abstractmethod
    def _question(self, path: str, body: object) -> "Question":
        """Parses a request. Raises Refused for one that the provider does not take."""

    @abstractmethod
    def _failure(self, refused: Refused) -> object:
        """Writes an error in the provider's format."""

    # -------------------------------------------------------------------------------- the walk of a request

    async def _serve(self, request: HttpRequest, exchange: Exchange) -> None:
        self._active += 1
        self.concurrent = max(self.concurrent, self._active)
        try:
            try:
                await self._respond(request, exchange)
            except Refused as refused:
                await _json(exchange, refused.status, self._failure(refused))
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self._active -= 1

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answers a request. Raises Refused for one that the provider does not take."""
        path = request.path.partition("?")[0]
        if not self._authorised(request):
            raise Refused(401, "")
        if request.method != "GET":
            await self._generate(request, path, exchange)
            return
        listing = self._listing(path)
        if listing is None:
            raise Refused(404, f"Not found: GET {path}")
        await _json(exchange, 200, listing)

    def _authorised(self, request: HttpRequest) -> bool:
        headers = request.headers
        return headers.get("authorization") == f"Bearer {self.api_key}" or headers.get(self.KEY_HEADER) == self.api_key

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
        fault = fault_at(self._faults, self._number)  # it may look at the requests, this one the last
        await self._passes()
        scene = self._scene(request, exchange)
        if await scene.instead(fault):
            return
        if isinstance(question, Refused):
            raise question
        assert not isinstance(fault, int), "a status is played instead of an answer"
        await scene.play(self._answered(question, text).events, fault, self._passes)

    async def _passes(self) -> None:
        if self._gate is not None:
            await self._gate.passes()

    def _answered(self, question: "Question", text: str) -> Answered:
        """Answers a question. Raises Refused (500) if the script has no answer that the provider could give."""
        try:
            answered = question.answer(self._script.answers(text, question.meant, question.n) if question.n else [])
        except Exception as error:  # of the script, which is the test's: the test is told, and the client gets a 500
            self.errors.append(error)
            raise Refused(500, f"the script of the test failed: {error}") from None
        self.calls += 1
        self.usage += answered.usage
        return answered

    def _scene(self, request: HttpRequest, exchange: Exchange) -> Scene:
        """Makes a scene whose errors repeat the request, key included, so that tests see whether logs leak it."""
        headers = request.headers
        key = headers.get("authorization") or headers.get("x-api-key") or headers.get(self.KEY_HEADER)
        trouble = f"upstream failed for {key}"
        return Scene(
            exchange,
            _HEADERS,
            lambda status: msgspec.json.encode(self._failure(Refused(status, trouble))),
            self._piece(self._failure(Refused(500, trouble)), self.ERROR_EVENT),
            self._retry_after,
            f"http://localhost:{self._other_host.port}{request.path}",
            self.STREAM_TYPE,
        )

    def _piece(self, data: object, name: str) -> bytes:
        """Writes a piece of a stream."""
        return event(data, name)

    async def _serve_elsewhere(self, request: HttpRequest, exchange: Exchange) -> None:
        self.elsewhere.append(request)
        await _json(exchange, 404, {"error": {"message": "no request should have come here"}})


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


@dataclass(frozen=True, slots=True)
class SentTurn:
    """One message of a request.

    Attributes:
        calls: of tools, that the assistant has made.
        results: (name of the tool, text) of calls, where the message is theirs; it has no other content then.
    """

    role: str
    content: Content = ()
    calls: tuple[ToolCall, ...] = ()
    results: tuple[tuple[str, str], ...] = ()


def shown_turns(sent: Iterable[SentTurn]) -> tuple[Message, ...]:
    """Returns turns as Echo would be shown them: calls and results of tools as text in umbel's fence."""
    turns: list[Message] = []
    results: list[str] = []

    def tell() -> None:
        if results:
            turns.append(Message("user", (Text("\n".join(results)),)))
            results.clear()

    for each in sent:
        if each.results:
            results += [FENCED.spell_result(name, text) for name, text in each.results]
            continue
        tell()
        content = each.content
        if each.calls:
            before = "".join(part.text for part in content if isinstance(part, Text))
            content = (Text(with_calls(before, each.calls)),)
        turns.append(Message(each.role, content))
    tell()
    return tuple(turns)


def meant(messages: tuple[Message, ...]) -> tuple[Part, ...]:
    """Returns the prompt that the messages ask to continue: a quoted turn becomes an open turn again."""
    return written(asked_to_continue(messages))


def written(asked: Conversation | PlainText) -> tuple[Part, ...]:
    """Returns the parts of a prompt as the interpreter writes it."""
    if isinstance(asked, PlainText):
        return asked.content
    parts: list[Part] = []
    for turn in asked.turns:
        parts += [Text(f"<|im_start|>{turn.role}\n", control=True), *turn.content, Text("<|im_end|>\n", control=True)]
    return (*parts, Text("<|im_start|>assistant\n", control=True), *asked.begun)


class JsonBody(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything that a client sends: the table of its fields, with their types and ranges."""


_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


@dataclass(frozen=True, slots=True)
class Misfit:
    """Describes what is wrong with a field of a request.

    Attributes:
        place: its path, such as "messages[0].role"; "" for the body itself.
        unknown, missing: the name of a field that there is not, or that must be there.
        problem: in words.
    """

    place: str
    unknown: str
    missing: str
    problem: str


def fitted(body: object, kind: type[T], words: Callable[[Misfit], Refused]) -> T:
    """Parses a body by the table of its fields: names, types and ranges.

    Raises:
        Refused: as `words` says it of the first field that is wrong.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        said = str(error)
    place, unknown, missing = (pattern.search(said) for pattern in (_PLACE, _UNKNOWN, _MISSING))
    raise words(
        Misfit(
            place[1] if place else "",
            unknown[1] if unknown else "",
            missing[1] if missing else "",
            _PLACE.sub("", said),
        )
    )


def picture(data: str, broken: Refused) -> Media:
    """Returns an image of a message. Raises `broken` where the data is no base64."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        raise broken from None
    return media_of("image", decoded)


@dataclass(frozen=True, slots=True)
class Form:
    """The form that an answer must have. `kind` and `source` as of a ConstraintSpec."""

    constraint: ConstraintSpec

    def shaped(self, said: str, sampling: SamplingParams) -> str:
        """Writes a script's answer as the model does: as it is, or wrapped into the requested object.

        A script may say what comes after a stop as well, as without a form.

        Raises:
            AssertionError: no model that is held to the form says this.
        """
        try:
            check(said, self.constraint)
        except RequestError as error:
            problem = error
        else:
            return said
        bounded = SamplingParams(stop=sampling.stop, max_tokens=MAX_TOKENS)
        for text in dict.fromkeys((said, cut(said, bounded)[0].text)):
            for candidate in (text, *self._wrapped(text)):
                if self._holds(candidate):
                    return candidate
        raise AssertionError(f"the script breaks the form that the request asks for: {problem}")

    def _wrapped(self, text: str) -> list[str]:
        """Wraps a bare answer, where the schema has one member: a string, or a value spelled as JSON."""
        if self.constraint.kind != "json_schema":
            return []
        schema = json.loads(self.constraint.source)
        members = list(schema.get("properties", ()))
        if len(members) != 1:
            return []
        values: list[Any] = [text]  # Any: JSON
        with contextlib.suppress(ValueError):
            values.append(json.loads(text))
        return [json.dumps({members[0]: value}, ensure_ascii=False) for value in values]

    def _holds(self, text: str) -> bool:
        try:
            check(text, self.constraint)
        except RequestError:
            return False
        return True


def of_schema(schema: object) -> Form:
    return Form(ConstraintSpec("json_schema", json.dumps(schema)))


def of_any_object() -> Form:
    return of_schema({"type": "object"})
