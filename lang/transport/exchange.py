"""Messages ↔ calls: the half of a `Backend` that is the same in process and over a socket.

A backend that talks in the messages of `protocol` sends requests down one channel and gets events from
another. `Exchange` keeps a mailbox per request, so that each caller awaits its own answer: chunks in
order, exactly one ending, an abort when the caller loses interest. It owns no channel and does no I/O;
it lives on one event loop.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import msgspec

from ..errors import BackendError, DeadlineError, ParameterError, UmbelError
from ..programs import FromPrograms, GraphWanted, ProgramEnded, ProgramEvent, RunProgram
from ..protocol import (
    Abort,
    CacheRequest,
    Caches,
    Chunk,
    Control,
    Detokenize,
    Detokenized,
    Done,
    Embedded,
    EmbedRequest,
    Failure,
    Final,
    FromBackend,
    GenRequest,
    Hint,
    Locate,
    Located,
    Origin,
    Ranked,
    RankRequest,
    ReadStatus,
    Release,
    Scored,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
    ToBackend,
    Tokenize,
    Tokenized,
)
from ..status import RuntimeStatus, TreeSurvey

# The other side ends every request by its deadline; this much later we stop believing that it will.
GRACE = 5.0  # seconds
LONGEST = 600.0  # seconds for a request without a deadline of its own; the gateway's limit is the same
STATUS_SECONDS = 4.0  # for a status, which needs no engine
LONGEST_PROGRAM = 86_400.0  # seconds for a program without a deadline; its calls have the limit above, each for itself
KNOWN_GRAPHS = 1024  # digests of graphs that the other side was sent; one that it forgot it asks for again

T = TypeVar("T")

Incoming = FromBackend | FromPrograms
Outgoing = ToBackend | RunProgram
# Requests with one answer.
Asked = CacheRequest | ScoreRequest | EmbedRequest | RankRequest | Control | Locate | Tokenize | Detokenize | Survey


class _Box:
    """The mailbox of one request: any number of messages, one reader. Cheaper than a queue and a timeout per message,
    of which a stream would need one for every token."""

    __slots__ = ("_messages", "_reader", "alarm")

    def __init__(self) -> None:
        self._messages: deque[Incoming | UmbelError] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.alarm: asyncio.TimerHandle | None = None

    def put(self, message: Incoming | UmbelError) -> None:
        self._messages.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Incoming:
        """The next message; raises it if it is an error."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message = self._messages.popleft()
        if isinstance(message, UmbelError):
            raise message
        return message


class Exchange:
    """Mailboxes of the requests in flight.

    Args:
        send: hands one message to the other side; must not block.
        window: most requests in flight; more of them wait here in the order of their calls, so that a
            program that starts thousands of requests at once is slowed down, not refused.
        programs: most programs in flight, likewise.
        longest: seconds after which a request without a timeout is given up.
    """

    def __init__(
        self,
        send: Callable[[Outgoing], None],
        *,
        window: int = 1024,
        programs: int = 64,
        longest: float = LONGEST,
    ) -> None:
        self._send = send
        self._longest = longest
        self._slots = asyncio.Semaphore(window)
        self._places = asyncio.Semaphore(programs)
        self._graphs: OrderedDict[str, None] = OrderedDict()  # digests that were sent with their bytes, oldest first
        self._boxes: dict[str, _Box] = {}
        self._controls = 0
        self._broken: Callable[[], UmbelError] | None = None

    @property
    def pending(self) -> int:
        """Requests that wait for their ending."""
        return len(self._boxes)

    # ------------------------------------------------------------------ what the other side says

    def deliver(self, message: Incoming) -> None:
        """Takes an event of the other side. Events of requests without a waiting caller are late, not wrong."""
        box = self._boxes.get(message.id)
        if box is not None:
            box.put(message)

    def fail(self, make_error: Callable[[], UmbelError]) -> None:
        """The other side is gone: every request in flight and every later one ends with this error."""
        self._broken = make_error
        for box in self._boxes.values():
            box.put(make_error())

    # ------------------------------------------------------------------ what callers ask for

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        """Chunks, then one Final; closing the iterator early aborts the request."""
        async with self._slots:
            box = self._open(request.id, self._patience(request.origin))
            ended = False
            try:
                self._send(request)
                while not ended:
                    message = await box.get()
                    ended = not isinstance(message, Chunk)
                    yield _generated(message)
            finally:
                self._close(request.id, ended)

    async def program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        """Events, then one ProgramEnded; closing the iterator early aborts the program.

        `request` has its graph. The bytes travel once; afterwards their digest does.
        """
        async with self._places:
            box = self._open(request.id, self._patience(request.origin, LONGEST_PROGRAM))
            ended = False
            try:
                known = request.digest in self._graphs
                self._send(msgspec.structs.replace(request, graph=b"") if known else request)
                self._note_graph(request.digest)
                while not ended:
                    message = await box.get()
                    if known and isinstance(message, GraphWanted):
                        known = False
                        self._send(request)
                        continue
                    ended = not isinstance(message, ProgramEvent) or isinstance(message, ProgramEnded)
                    yield _told(message)
            finally:
                self._close(request.id, ended)

    async def score(self, request: ScoreRequest) -> Scored:
        message = await self._ask(request, request.origin)
        return _expect(message, Scored)

    async def embed(self, request: EmbedRequest) -> Embedded:
        message = await self._ask(request, request.origin)
        return _expect(message, Embedded)

    async def rank(self, request: RankRequest) -> Ranked:
        message = await self._ask(request, request.origin)
        return _expect(message, Ranked)

    async def control(self, verb: str) -> Done:
        self._controls += 1
        message = await self._ask(Control(f"control-{self._controls}", verb), Origin())
        return _expect(message, Done)

    async def locate(self, question: Locate) -> Located:
        message = await self._ask(question, question.origin)
        return _expect(message, Located)

    async def caches(self, request: CacheRequest) -> Caches:
        message = await self._ask(request, request.origin)
        return _expect(message, Caches)

    async def tokenize(self, question: Tokenize) -> Tokenized:
        message = await self._ask(question, question.origin)
        return _expect(message, Tokenized)

    async def detokenize(self, question: Detokenize) -> Detokenized:
        message = await self._ask(question, Origin())
        return _expect(message, Detokenized)

    async def status(self) -> RuntimeStatus:
        """Reads the state of the other side. Takes no place in the window, which may be full of waiting requests."""
        self._controls += 1
        message = await self._answer(ReadStatus(f"status-{self._controls}"), STATUS_SECONDS)
        return _expect(message, StatusRead).status

    async def survey(self, question: Survey) -> TreeSurvey:
        """Reads the tree. The question gets an id here, as those of `control` do."""
        self._controls += 1
        question = msgspec.structs.replace(question, id=f"survey-{self._controls}")
        return _expect(await self._ask(question, Origin()), Surveyed).survey

    def hint(self, hint: Hint) -> None:
        """Sent when the channel is whole; a hint that is lost costs time only."""
        if self._broken is None:
            self._send(hint)

    def release(self, pinned: str) -> None:
        """Sends a hint, as `hint` does; a pin that is not released ends when its time is over."""
        if self._broken is None:
            self._send(Release(pinned))

    def abort(self, request_id: str) -> bool:
        """Asks for the end of a request, whose reader gets it: the text so far. Returns whether it was in flight."""
        if self._broken is not None or request_id not in self._boxes:
            return False
        self._send(Abort(request_id))
        return True

    # ------------------------------------------------------------------ how

    async def _ask(self, request: Asked, origin: Origin) -> Incoming:
        async with self._slots:
            return await self._answer(request, self._patience(origin))

    async def _answer(self, request: Asked | ReadStatus, seconds: float) -> Incoming:
        """Sends a request that has one answer, and waits for it, `seconds` at most."""
        box = self._open(request.id, seconds)
        ended = False
        try:
            self._send(request)
            message = await box.get()
            ended = True
            return message
        finally:
            self._close(request.id, ended)

    def _patience(self, origin: Origin, longest: float | None = None) -> float:
        """Returns the seconds until a request is given up."""
        most = self._longest if longest is None else longest
        return GRACE + (most if origin.timeout is None else min(origin.timeout, most))

    def _note_graph(self, digest: str) -> None:
        self._graphs[digest] = None
        self._graphs.move_to_end(digest)
        if len(self._graphs) > KNOWN_GRAPHS:
            self._graphs.popitem(last=False)

    def _open(self, id: str, seconds: float) -> _Box:
        if self._broken is not None:
            raise self._broken()
        if id in self._boxes:
            raise ParameterError(f"request id {id!r} is in use; give every request its own id")
        box = self._boxes[id] = _Box()
        late = DeadlineError(f"request {id!r}: no answer by its deadline")
        box.alarm = asyncio.get_running_loop().call_later(seconds, box.put, late)
        return box

    def _close(self, id: str, ended: bool) -> None:
        box = self._boxes.pop(id)
        if box.alarm is not None:
            box.alarm.cancel()
        if not ended and self._broken is None:
            self._send(Abort(id))


def _expect(message: Incoming, kind: type[T]) -> T:
    if isinstance(message, kind):
        return message
    if isinstance(message, Failure):
        raise message.error()
    raise BackendError(f"request {message.id!r} was answered by a {type(message).__name__}")


def _generated(message: Incoming) -> Chunk | Final:
    return message if isinstance(message, Chunk) else _expect(message, Final)


def _told(message: Incoming) -> ProgramEvent:
    return message if isinstance(message, ProgramEvent) else _expect(message, ProgramEnded)
