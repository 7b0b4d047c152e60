"""`Front`: what all endpoints of a server process share, from its start to its end.

endpoint ─▶ Front.open(...)    counts the request in, or refuses it with 503
         ─▶ Front.backend      the runtime: generate, score, run_program, locate
         ─▶ Front.origin(...)  whose cache, whose fairness, whose deadline
"""

import asyncio
import datetime
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import cached_property

import msgspec

from ..lang.chat_template import ChatTemplate
from ..lang.errors import BackendError, CapabilityError, ParameterError
from ..lang.protocol import Aborting, Backend, Chunk, Final, GenRequest, Origin, RequestTimes, Tokenizing, Usage
from ..lang.status import Observable, RuntimeHealth, RuntimeState
from . import tracing
from .access import Access, Caller
from .activity import Activity, Counted, Counts
from .bodies import UmbelFields
from .cost import Recorder
from .diagnosis.exchanges import Exchanges
from .diagnosis.head import ChangingLines, IgnoredLines
from .errors import HttpError, busy_headers
from .history import AnswerHistory
from .limits import HttpLimits
from .program_store import OfferedProgram, ProgramStore, SharedPrograms


class ServedModel(msgspec.Struct, frozen=True):
    """A name that clients may ask for: the model, one of its adapters, or a program that is offered as one."""

    name: str
    created: int  # seconds since 1970, for clients that list models
    program: str = ""  # the name of the program that answers; "" for the model itself
    adapter: str = ""  # computes its requests; "" for the model as it is


class Front:
    """The state of one server process.

    Args:
        backend: the runtime; started by `start`.
        access: keys, hosts and salts.
        limits: of this server.
        names: names of the model, the first of which is the main one; [] takes the model's own.
        alias: what the command line calls the model; answered, too, where there are no `names`, and not listed.
        programs: that are offered from the start.
        workers: processes that serve the same socket, each with a front of its own.
        recorder: notes the tokens of every request; closed by its owner.
        ignored: lines that are dropped from the head of conversations.
        counts: of requests, which the fronts of several workers share.
        shared: programs that they share.
    """

    in_flight = Counted()
    refused = Counted()  # for want of room
    disconnects = Counted()  # clients that went away before their answer had ended
    malformed = Counted()  # connections that ended with bytes that are no HTTP
    started = Counted()  # 1 once `start` has ended

    def __init__(
        self,
        backend: Backend,
        access: Access | None = None,
        limits: HttpLimits | None = None,
        names: tuple[str, ...] = (),
        programs: Iterable[OfferedProgram] = (),
        workers: int = 1,
        recorder: Recorder | None = None,
        ignored: IgnoredLines | None = None,
        counts: Counts | None = None,
        shared: SharedPrograms | None = None,
        alias: str = "",
    ) -> None:
        self.backend = backend
        self.access = access or Access()
        self.limits = limits or HttpLimits()
        self.draining = False
        self.activity = Activity()
        self.tracer = tracing.open_tracer()
        self.workers = workers
        self.counts = counts or Counts()
        self._recorder = recorder
        self.programs = ProgramStore(programs, shared)
        self.history = AnswerHistory()
        self.exchanges = Exchanges()
        self.changing = ChangingLines()
        self.ignored = ignored or IgnoredLines()
        self._names = names
        self.alias = "" if names else alias
        self._named: dict[tuple[str, str], list[str]] = {}  # (caller, its name for a request) → ids in flight
        self._models: dict[str, ServedModel] = {}
        self._created = self.now()

    @staticmethod
    def now() -> int:
        """Returns the seconds since 1970, a stamp for clients; nothing is decided by it."""
        return int(datetime.datetime.now(datetime.UTC).timestamp())

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Starts the backend and waits for its first token. Raises as `Runtime.start`, and ParameterError for a program
        or an adapter that has the model's name."""
        await self.backend.start()
        self.history = AnswerHistory(most=self.backend.capabilities.cache_maximum)
        own = self.backend.capabilities.name.rpartition(" ")[2]
        for name in self._names or (own,):
            if name in self._models:
                raise ParameterError(f"the model has the name {name!r} twice; write it once")
            self._models[name] = ServedModel(name, self._created)
        for name in self.backend.capabilities.adapters or ():
            if name in self._models:
                raise ParameterError(f"{name!r} is a name of the model itself; give the adapter another one")
            self._models[name] = ServedModel(name, self._created, adapter=name)
        for program in self.programs:
            self.check_program(program)
        self.started = 1

    def health(self) -> RuntimeHealth:
        """Returns the health of the runtime. A backend that tells none is ready."""
        backend = self.backend
        return backend.health() if isinstance(backend, Observable) else RuntimeHealth(RuntimeState.READY)

    def check_open(self) -> None:
        """Raises HttpError 503 while the model is being loaded and while the server ends."""
        if self.draining:
            raise self._busy("the server is stopping; another one may answer", "draining")
        if not self.started:
            raise self._busy("the model is being loaded", "starting")

    def _check_engines(self) -> None:
        """Raises HttpError 503 while all of several engines are down: another server may answer sooner."""
        health = self.health()
        if health.replicas and health.state is RuntimeState.RESTARTING:
            raise self._busy("all engines ended or hang, and others start; try again", "restarting")

    def cut_off(self) -> HttpError:
        """Returns the answer to a request that is in flight when the server ends."""
        return self._busy("the server ended before the answer did; another one may answer", "draining")

    def check_alone(self, instead: str) -> None:
        """Raises HttpError 400 where several workers serve: what one of them keeps the others do not know.

        Args:
            instead: what to do then.
        """
        if self.workers > 1:
            message = f"{self.workers} processes serve this address, and each keeps its own; {instead}"
            raise HttpError(400, message, "several_workers")

    # ------------------------------------------------------------------ admission

    @contextmanager
    def open(self, count: int = 1) -> Iterator[None]:
        """Counts a request in while the block runs.

        Args:
            count: the continuations it asks for, over all its prompts.

        Raises:
            HttpError: 503 when `most_in_flight` would be passed, at once: a client that waits in silence learns
                nothing. 400 for a request that would pass it alone, since no other time will do.
        """
        self.check_open()
        self._check_engines()
        most = self.limits.most_in_flight
        if count > most:
            raise HttpError(400, f"the request asks for {count} texts, and at most {most} run or wait here", "too_many")
        if self.in_flight + count > most:
            self.refused += 1
            raise self._busy(f"{self.in_flight} requests run or wait; try again", "overloaded")
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count

    @contextmanager
    def named(self, caller: Caller, names: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Lets a caller abort requests by its own names for them while the block runs.

        Args:
            names: (the caller's name, the id of the GenRequest); one name may stand for several requests.
        """
        for name, request_id in names:
            self._named.setdefault((caller.name, name), []).append(request_id)
        try:
            yield
        finally:
            for name, request_id in names:
                left = self._named[caller.name, name]
                left.remove(request_id)
                if not left:
                    del self._named[caller.name, name]

    def abort(self, caller: Caller, name: str) -> int:
        """Ends the requests to which this caller gave a name → how many of them were in flight.

        Their answers have the texts so far. Raises CapabilityError for a backend that cannot do it.
        """
        if not isinstance(self.backend, Aborting):
            raise CapabilityError(f"{self.backend.capabilities.name} ends no request early; hang up instead")
        return sum(self.backend.abort(each) for each in self._named.get((caller.name, name), ()))

    def _busy(self, message: str, code: str) -> HttpError:
        return HttpError(503, message, code, headers=busy_headers(self.limits.retry_after))

    # ------------------------------------------------------------------ generation

    async def events(
        self, requests: Sequence[GenRequest], ahead: Sequence[Final] = ()
    ) -> AsyncGenerator[tuple[int, Chunk | Final], None]:
        """Yields the events of several requests as they come, each with the index of its request.

        The first error ends all of them. Closing the generator aborts those that still run.

        Args:
            ahead: for each request the answer of `compute_ahead`: what its prompt cost counts in the usage.
        """
        async with aclosing(self._events(requests)) as events:
            async for index, event in events:
                if isinstance(event, Final):
                    if ahead:
                        event = _with_prompt(event, ahead[index].usage)
                    self.note(event.usage, event.times)
                yield index, event

    async def _events(self, requests: Sequence[GenRequest]) -> AsyncGenerator[tuple[int, Chunk | Final], None]:
        if len(requests) == 1:
            async with aclosing(_closable(self.backend, requests[0])) as events:
                async for event in events:
                    yield 0, event
            return
        arrived: asyncio.Queue[tuple[int, Chunk | Final | Exception]] = asyncio.Queue()

        async def pump(index: int, request: GenRequest) -> None:
            try:
                async with aclosing(_closable(self.backend, request)) as events:
                    async for event in events:
                        arrived.put_nowait((index, event))
            except Exception as error:
                arrived.put_nowait((index, error))

        pumps = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
        running = len(pumps)
        try:
            while running:
                index, next_event = await arrived.get()
                if isinstance(next_event, Exception):
                    raise next_event
                if isinstance(next_event, Final):
                    running -= 1
                yield index, next_event
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def finals(self, requests: Sequence[GenRequest]) -> list[Final]:
        """Runs requests that are not streamed → their answers in order."""
        return await _finals(self.events(requests), len(requests))

    async def compute_ahead(self, requests: Sequence[GenRequest]) -> list[Final]:
        """Runs requests for prompts whose texts are asked for afterwards, by `events`, which notes both as one."""
        return await _finals(self._events(requests), len(requests))

    def note(self, usage: Usage, times: RequestTimes | None = None) -> None:
        """Tells the tokens and times of a request that has ended to its span and to the record, if there are such."""
        tracing.note(usage, times)
        if self._recorder is not None:
            self._recorder.note(usage)

    # ------------------------------------------------------------------ models

    @property
    def models(self) -> list[ServedModel]:
        """The model under its names, then its adapters, then the programs that are offered as models."""
        return [*self._models.values(), *(_model_of(each) for each in self.programs if each.parameter)]

    def model(self, name: str) -> ServedModel:
        """Returns the model of that name. Raises HttpError 404 for one that is not served."""
        found = self._models.get(name)
        program = self.programs.find(name)
        if found is None and program is not None and program.parameter:
            found = _model_of(program)
        if found is None and name and name == self.alias:
            found = self.models[0]
        if found is None:
            known = ", ".join(repr(each.name) for each in self.models)
            raise HttpError(
                404, f"model: {name[:200]!r} is not served here; known are {known}", "model_not_found", param="model"
            )
        return found

    def check_program(self, program: OfferedProgram) -> None:
        """Raises ParameterError for a program that would be a model under a name of the model itself."""
        if program.parameter and program.name in self._models:
            raise ParameterError(f"{program.name!r} is a name of the model or an adapter; give the program another one")

    @cached_property
    def token_names(self) -> dict[int, str]:
        """Names of control tokens by id; {} for a backend that does not tell. Read it once the model is loaded."""
        backend = self.backend
        if not isinstance(backend, Tokenizing):
            return {}
        return {token: name for name, token in backend.vocabulary.control.items()}

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template, or our plain one."""
        return self.backend.chat_template

    # ------------------------------------------------------------------ the request's place

    def origin(
        self, caller: Caller, fields: UmbelFields | None, salt: str | None = None, model: str | None = None
    ) -> Origin:
        """Returns where a request stands: its namespace of the cache, its program, priority, deadline and adapter.

        Args:
            salt: the caller's `cache_salt`; None where it sent none.
            model: that the body names; None where it names none.
        """
        served = self._models.get(model) if model is not None else None
        given = fields or NO_FIELDS
        return Origin(
            program_id=given.program,
            fork_group=given.fork_group,
            salt=self.access.salt(caller, salt),
            priority=given.priority,
            timeout=given.timeout,
            ahead=given.ahead,
            adapter="" if served is None else served.adapter,
        )


NO_FIELDS = UmbelFields()


def _model_of(program: OfferedProgram) -> ServedModel:
    return ServedModel(program.name, program.created, program.name)


def _closable(backend: Backend, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
    events = backend.generate(request)
    assert isinstance(events, AsyncGenerator), "a backend that a server runs can abort"
    return events


async def _finals(events: AsyncGenerator[tuple[int, Chunk | Final], None], count: int) -> list[Final]:
    found: dict[int, Final] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Final):
                found[index] = event
    if len(found) != count:
        raise BackendError("a request ended without an answer")
    return [found[index] for index in range(count)]


def _with_prompt(final: Final, prompt: Usage) -> Final:
    """Returns an answer with the cost of its prompt, which was computed ahead and then found in the cache."""
    usage = msgspec.structs.replace(final.usage, cached_tokens=prompt.cached_tokens, loaded_tokens=prompt.loaded_tokens)
    return msgspec.structs.replace(final, usage=usage)
