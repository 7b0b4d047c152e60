"""The gateway without its sockets: text in, text out; tokens down to an engine, tokens back up.

It owns every call from its arrival to its one ending, and removes it in exactly one place (`_end`). Of several engines
(replicas.py) each call goes to one, and to another one when that is lost before the client has seen a part of it.
The carrier of its messages and the clock are arguments. So the same code runs on ZeroMQ sockets, in the
user's process, and under a virtual clock in a simulation. It is used from one thread.
"""

import itertools
import logging
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import assert_never

from ...lang.caching import Begun, CachingUsage
from ...lang.errors import (
    WIRE_ERRORS,
    BackendError,
    CancelledError,
    DeadlineError,
    EngineError,
    OverloadedError,
    ParameterError,
    UmbelError,
)
from ...lang.prompt import namespace
from ...lang.protocol import (
    Abort,
    Caches,
    ConstraintSpec,
    Control,
    CreateCache,
    DeleteCache,
    Detokenize,
    Done,
    EmbedRequest,
    ExtendCache,
    Facts,
    Failure,
    Final,
    FromBackend,
    GenRequest,
    Hint,
    Locate,
    Origin,
    RankRequest,
    ReadCaches,
    ReadStatus,
    Release,
    ScoreRequest,
    StatusRead,
    Survey,
    ToBackend,
    Tokenize,
)
from ...lang.status import EngineState, PoolGauges, ReplicaStatus, RuntimeStatus
from ..constraints.compiler import Answer, Compiled, CompiledCache, InlineCompiler, Refused
from ..core.config import CompilerLimits, GatewayLimits
from ..core.instruments import Clock, FaultHook, no_faults
from ..core.messages import (
    NO_TIERS,
    CacheEvents,
    Ended,
    EngineAbort,
    EngineControl,
    EngineFailed,
    EnginePrefill,
    EngineSurvey,
    FromEngine,
    Heartbeat,
    KeepsEnded,
    MarksPlaced,
    TierRooms,
    ToEngine,
)
from ..core.vectors import NO_VECTORS, VectorConfig
from ..multimodal.cache import PictureCache
from ..tokenizer.prompt import CACHE_BYTES, Prompted, PromptEncoder, Showable
from ..tokenizer.tokenizer import Tokenizer
from .caches import CacheLedger
from .calls import (
    BroadcastCall,
    CacheCall,
    CallIndex,
    CallPhase,
    Client,
    ControlCall,
    GenCall,
    PendingCall,
    ScoreCall,
    merged_facts,
    prompt_of,
)
from .hints import Hints
from .images import Images, PictureCall
from .replicas import Replicas
from .validation import Question, RequestValidator
from .vectors import EmbedCall, RankCall

log = logging.getLogger("umbel.gateway")

VERBS = ("flush_cache", "info")
COUNTED = ("requests", "finished", "failed", "refused", "aborts", "orphaned", "retried_requests", "engine_losses")
# Messages that become calls.
Arriving = GenRequest | ScoreRequest | EmbedRequest | RankRequest | CreateCache | Control | Survey


class Gateway:
    """Owns the calls of all clients, and sends them to the engines.

    Args:
        tokenizer: that of the engines' model.
        model: the model's name, for messages.
        to_engines: for each engine what carries a message to it. May raise; that call then fails.
        seed: seeds the generator of seeds for requests without one; None takes the system's entropy.
        token_cache_bytes: memory for the tokens of earlier texts; 0 encodes every text whole and anew.
        constraints: compiles the constraints of requests; None compiles them inline.
        pictures: decodes and caches the pictures of requests; None for a model that reads text only.
        adapters: names that requests may give.
        vectors: how the model makes vectors of texts.
        placement: name of the policy that chooses one of several engines.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        to_engines: Sequence[Callable[[ToEngine], None]],
        clock: Clock,
        limits: GatewayLimits,
        faults: FaultHook = no_faults,
        seed: int | None = None,
        token_cache_bytes: int = CACHE_BYTES,
        constraints: CompiledCache | None = None,
        pictures: PictureCache | None = None,
        adapters: Sequence[str] = (),
        vectors: VectorConfig = NO_VECTORS,
        placement: str = "added-delay",
    ) -> None:
        self._model = model
        self._clock = clock
        self._limits = limits
        self._faults = faults
        seeds = random.Random(seed)
        self._ids: Iterator[int] = itertools.count(1)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))  # known before anything is counted
        self._replicas = Replicas(to_engines, clock, placement, self.counters)
        self._pictures = Images(pictures, to_engines)
        form = None if pictures is None else pictures.form
        self.encoder = PromptEncoder(tokenizer, cache_bytes=token_cache_bytes, pictures=form)
        self._validator = RequestValidator(
            self.encoder,
            limits,
            ids=self._ids,
            draw_seed=lambda: seeds.getrandbits(63),
            pictures=None if pictures is None else (pictures.form, pictures.limits),
            adapters=adapters,
            vectors=vectors,
        )
        self._constraints = constraints or CompiledCache(
            InlineCompiler(), "auto", entries=256, most_bytes=CompilerLimits().kept_bytes
        )
        self._calls = CallIndex()
        self._context_length: int | None = None
        self._start_id = uuid.uuid4().hex
        self._hints = Hints(
            self._validator,
            most_pins=limits.max_pins,
            to_engines=to_engines,
            place=self._place_hint,
            upload=self._pictures.upload,
            clock=clock,
            faults=faults,
            counters=self.counters,
        )
        self._caches = CacheLedger(
            new_id=lambda: next(self._ids),
            to_engines=to_engines,
            clock=clock,
            limits=limits,
            counters=self.counters,
        )

    @property
    def state(self) -> EngineState:
        """Ready when one of the engines is, and the first start is over; failed when none can be started."""
        return self._replicas.state

    @property
    def states(self) -> tuple[EngineState, ...]:
        """Returns the state of each of several engines; () where there is one."""
        return self._replicas.states

    @property
    def in_flight(self) -> int:
        """Calls without an ending."""
        return len(self._calls)

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last heartbeat of an engine; None while none is ready."""
        return self._replicas.heartbeat_age

    # ------------------------------------------------------------------ from clients

    def receive(self, client: Client, message: ToBackend) -> None:
        """Handles one message of one client. Every content ends with an answer, never with an exception."""
        if isinstance(message, Arriving):
            self.counters["requests"] += 1
        if self._pictures.has_media(message):
            assert isinstance(message, Showable), "it shows media"
            self._show(client, message)
        else:
            self._take(client, message)

    def _take(self, client: Client, message: ToBackend) -> None:
        """Handles a message whose media, if any, are decoded."""
        match message:
            case GenRequest() | ScoreRequest() | EmbedRequest() | RankRequest() | CreateCache() | Control() | Survey():
                self._accept(client, message)
            case Locate() | Tokenize() | Detokenize():
                self._answer(client, message)
            case ReadCaches() | ExtendCache() | DeleteCache():
                self._answer_about_caches(client, message)
            case ReadStatus(request_id):
                client.deliver(StatusRead(request_id, self.status()))
            case Hint():
                if self.state is EngineState.READY:
                    self._hints.take(client, message, self._context_length)
                else:
                    self._hints.unused()
            case Release(request_id):
                self._release(client, request_id)
            case Abort(request_id):
                for call in self._calls.with_id(client, request_id):
                    self._abort(call)
            case _:
                assert_never(message)

    def is_long(self, message: ToBackend) -> bool:
        """Returns whether its new text should be tokenized in a thread first (see `clients.LongPrompts`)."""
        if not isinstance(message, Prompted):
            return False
        try:
            self._validator.check_least(message)
            return self.encoder.of(message).is_long(message.prompt)
        except UmbelError:  # it will be refused at once
            return False

    def client_lost(self, client: Client) -> None:
        """Stops computing the answers of a client that is gone."""
        for call in self._calls.of_client(client):
            self._abort_engine_requests(call)
            self._end(call, None)
            self.counters["orphaned"] += 1
        self._hints.client_lost(client)

    # ------------------------------------------------------------------ from the engines

    def engine_ready(self, context_length: int, replica: int = 0, tiers: TierRooms = NO_TIERS) -> None:
        """Sends the held calls to the engines, in order of arrival; later calls go out at once.

        At the first start they are held until all engines are ready or have failed, see `replicas.GATHERING`."""
        self._context_length = self._validator.context_length = context_length
        self._replicas.became_ready(replica, tiers)
        if self.state is EngineState.READY:
            self._dispatch_held()

    def _dispatch_held(self) -> None:
        for call in self._calls:
            if call.phase is CallPhase.HELD and not call.waits_for:
                self._dispatch(call)

    def engine_event(self, event: FromEngine, replica: int = 0) -> None:
        """Handles one event of an engine. An event that does not fit its call ends that call only."""
        if isinstance(event, Heartbeat):
            self._replicas.heard(replica, event)
            return
        if isinstance(event, KeepsEnded):
            self._caches.keeps_ended(event.ids)
            return
        if isinstance(event, CacheEvents):
            self._replicas.note_changes(replica, event.events)
            return
        call = self._calls.of_request(event.id)
        if call is None:
            self.counters["late_events"] += 1
            return
        self._replicas.began(call.place)
        if isinstance(event, MarksPlaced):
            self._marks_placed(call, event)
            return
        if isinstance(event, EngineFailed):
            call.open.discard(event.id)
            self._abort_engine_requests(call)
            self._pictures.failed(call, replica)
            kind = event.kind if event.kind in WIRE_ERRORS else EngineError.__name__
            self._end(call, Failure(call.request_id, kind, event.message))
            return
        try:
            if isinstance(event, Ended) and call.marked is not None and event.id == call.messages[0].id:
                self._caches.settle(call.marked, ())  # unless MarksPlaced has come: it was aborted before
            messages = call.accept(event)
        except Exception:
            self._internal(call, "reading the engine's answer")
            return
        if event.id not in call.open:
            self._calls.request_ended(event.id)
        if call.open:
            for message in messages:
                call.client.deliver(message)
            return
        *chunks, ending = messages
        for message in chunks:
            call.client.deliver(message)
        self._end(call, ending)

    def _marks_placed(self, call: PendingCall, event: MarksPlaced) -> None:
        if call.marked is not None:
            self._caches.settle(call.marked, event.placed)
        if isinstance(call, GenCall) and call.tells_begun:
            caching = CachingUsage() if call.marked is None else call.marked.usage
            call.begun = Begun(event.prompt_tokens, event.cached_tokens, caching)

    def engine_lost(self, reason: str, replica: int = 0) -> None:
        """Fails the calls of an engine whose clients have seen a part of the answer.

        The others go to another engine at once, or are held for the next one."""
        self._replicas.lost(replica)
        self._hints.engine_lost(replica)
        self._caches.engine_lost(replica)
        self._pictures.engine_lost(replica)
        self.counters["engine_losses"] += 1
        for call in self._calls:
            if call.is_at(replica):
                self._leave(call, replica, f"the engine died while the request was running: {reason}")
        if self.state is EngineState.READY:
            self._dispatch_held()

    def events_lost(self, frames: int, replica: int = 0) -> None:
        """Aborts everything an engine has, after frames of it were lost, and repeats or fails each call.

        It is unknown whose tokens the frames held, and a text must not have a gap."""
        self.counters["lost_frames"] += frames
        self._caches.events_lost(replica)
        self._replicas.changes_lost(replica)
        for call in self._calls:
            if call.is_at(replica) and call.phase is CallPhase.DISPATCHED:
                self._abort_engine_requests(call)
                self._leave(call, replica, "a message of the engine was lost")
        self._dispatch_held()

    def _leave(self, call: PendingCall, replica: int, reason: str) -> None:
        """Takes back a call whose work an engine has lost: to be sent again, or failed where that is not possible."""
        if call.phase is CallPhase.HELD:  # its constraint is being compiled, and its prompt was a hint
            call.place = None
            if isinstance(call, GenCall):
                call.hint = None
        elif isinstance(call, BroadcastCall) and (answer := call.without(replica)) is not None:
            self._end(call, answer)
        elif not isinstance(call, BroadcastCall) or not call.open:
            self._repeat(call, reason)

    def _repeat(self, call: PendingCall, reason: str) -> None:
        """Holds a call whose work an engine has lost, to be sent again; fails it where that is not possible."""
        call.losses.append(reason)
        if isinstance(call, ControlCall) and call.alone is not None:
            self._end(call, Done(call.request_id, call.alone()))
        elif call.aborted:
            self._fail(call, CancelledError(f"the request was cancelled; {reason}"))
        elif len(call.losses) > 1:
            first, second = call.losses
            self._fail(call, EngineError(f"{first}; it was asked again, and once more {second}; it may be the cause"))
        elif call.repeatable:
            self.counters["retried_requests"] += 1
            self._replicas.ended(call.place)
            self._calls.repeat(call, self._ids)
        else:
            self._fail(call, EngineError(f"{reason}; a part of the text was delivered before, so run it again"))

    def engine_given_up(self, cause: str, replica: int = 0) -> None:
        """Notes that an engine cannot be started again; fails all calls when it was the last one."""
        self._replicas.given_up(replica, cause)
        if self.state is EngineState.FAILED:
            for call in self._calls:
                self._fail(call, self._dead())
        elif self._replicas.gather():
            self._dispatch_held()

    # ------------------------------------------------------------------ time

    @property
    def next_deadline(self) -> float:
        """Time of the next `tick` that may be needed; infinite when nothing is in flight and nothing is kept."""
        return min(self._calls.next_due, self._caches.next_end, self._replicas.gathered_by)

    def tick(self) -> None:
        """Ends calls whose deadline has passed and that the engine has not ended, and caches whose time is over."""
        now = self._clock.now()
        self._replicas.read_changes()
        if self._replicas.gather():
            self._dispatch_held()
        self._caches.tick()
        for call in self._calls.due(now):
            due = call.deadline + (self._limits.deadline_grace if call.phase is CallPhase.DISPATCHED else 0.0)
            if due > now:
                self._calls.watch(call, due)
                continue
            self._abort_engine_requests(call)
            self._fail(call, DeadlineError(f"the deadline passed {_waiting_for(call)}"))

    def info(self) -> Facts:
        """Returns facts of the gateway, and the counters of the engines from their last heartbeats."""
        facts: Facts = {
            "model": self._model,
            "engine": self.state.value,
            "engine_cause": self._replicas.cause,
            "context_length": self._context_length,
            "in_flight": self.in_flight,
        }
        if len(self._replicas) > 1:
            facts |= {"replicas": len(self._replicas), "ready_replicas": len(self._replicas.ready)}
        facts |= self._own_counters()
        beats = self._replicas.heartbeats
        return facts | merged_facts(
            [{"running": beat.running, "waiting": beat.waiting, **beat.counters} for beat in beats]
        )

    def status(self) -> RuntimeStatus:
        """Returns the state of gateway and engines, from the gateway's own memory."""
        replicas, beats = self._replicas, self._replicas.heartbeats
        return RuntimeStatus(
            model=self._model,
            gateway=self._start_id,
            engine=self.state,
            engine_cause=replicas.cause,
            generation=sum(replica.generation for replica in replicas.all),
            heartbeat_age=self.heartbeat_age,
            in_flight=self.in_flight,
            max_queue=self._limits.max_queue,
            running=sum(beat.running for beat in beats),
            waiting=sum(beat.waiting for beat in beats),
            pool=PoolGauges.sum_of([beat.pool for beat in beats]),
            counters={**replicas.counters, **self._own_counters()},
            replicas=self._statuses() if len(replicas) > 1 else (),
        )

    def _statuses(self) -> tuple[ReplicaStatus, ...]:
        calls = Counter(call.replica for call in self._calls if call.phase is CallPhase.DISPATCHED)
        return tuple(replica.status(calls[replica.index]) for replica in self._replicas.all)

    def _own_counters(self) -> dict[str, int]:
        parts = (self.counters, self.encoder.counters, self._constraints.counters, self._pictures.counters)
        counters = {name: count for part in parts for name, count in part.items()}
        return {f"gateway_{name}": count for name, count in sorted(counters.items())}

    # ------------------------------------------------------------------ arrival

    def _accept(self, client: Client, message: Arriving) -> None:
        try:
            self._check_open(message)
            call = self._admit(client, message)
        except UmbelError as error:
            self._refuse(client, message.id, error)
            return
        except Exception:
            log.exception("a request could not be admitted")
            self.counters["internal_errors"] += 1
            client.deliver(_failure(message.id, BackendError("internal error while reading the request; see the log")))
            return
        if call is None:
            client.deliver(Done(message.id, self.info()))
            return
        self._calls.add(call)
        if isinstance(message, GenRequest | ScoreRequest | CreateCache):
            self._pictures.hold(call, message)
        if isinstance(message, GenRequest) and isinstance(call, GenCall) and call.spec is not None:
            self._compile(call, call.spec, namespace(message.origin.salt, message.prompt))
        elif self.state is EngineState.READY:
            self._dispatch(call)

    def _compile(self, call: GenCall, spec: ConstraintSpec, salt: str) -> None:
        """Holds the call until its constraint is compiled; the engine computes its prompt meanwhile."""
        try:
            self._faults("gateway.compile")
            inquiry = self._constraints.find(spec, salt, lambda answer: self._compiled(call, answer))
            if not call.waits_for or call not in self._calls:
                return  # it was answered at once
            call.inquiry = inquiry
            if self.state is EngineState.READY:
                replica = self._place(call)
                self._pictures.upload(call.pictures, replica)
                hint = self._validator.prefill(call)
                call.hint = hint.id
                self._replicas[replica].send(hint)
        except UmbelError as error:
            self._fail(call, error)
        except Exception:
            self._internal(call, "compiling the request's constraint")

    def _compiled(self, call: GenCall, answer: Answer) -> None:
        try:
            match answer:
                case Compiled():
                    call.constrain(answer)
                case Refused():
                    raise answer.error()
                case _:
                    raise answer
        except UmbelError as error:
            self._fail(call, error)
            return
        if self.state is EngineState.READY:
            self._dispatch(call)

    def _check_open(self, message: Showable | EmbedRequest | RankRequest | Control | Survey) -> None:
        if self.state is EngineState.FAILED and not isinstance(message, Control):
            raise self._dead()
        if self.in_flight >= self._limits.max_queue:
            raise OverloadedError(
                f"{self._limits.max_queue} requests are in flight, the most this runtime holds; "
                "try again when some have ended, or raise max_queue"
            )

    def _admit(self, client: Client, message: Arriving) -> PendingCall | None:
        """Makes a call; None for a control request that the gateway has answered itself."""
        self._faults("gateway.tokenize")
        now = self._clock.now()
        match message:
            case GenRequest():
                call: PendingCall = self._validator.generate(message, client=client, now=now)
            case ScoreRequest():
                call = self._validator.score(message, client=client, now=now)
            case EmbedRequest():
                call = self._validator.embed(message, client=client, now=now)
            case RankRequest():
                call = self._validator.rank(message, client=client, now=now)
            case CreateCache(name=name, origin=Origin(salt=salt)):
                find = partial(self._caches.find, salt, name)
                call = self._validator.create_cache(message, client=client, now=now, find=find)
                self._caches.check_name(salt, name, message.record)
            case Control(request_id, verb):
                if verb not in VERBS:
                    raise ParameterError(f"unknown control verb {verb!r}; write one of {', '.join(VERBS)}")
                if self.state is not EngineState.READY:
                    if verb == "info":
                        return None
                    if self.state is EngineState.FAILED:
                        raise self._dead()
                question = EngineControl(next(self._ids), verb)
                alone = self.info if verb == "info" else None
                call = ControlCall(client, request_id, (question,), now + self._limits.request_timeout, alone)
            case Survey():
                call = self._validator.survey(message, client=client, now=now)
            case _:
                assert_never(message)
        self._check_length(call)
        return call

    def _check_length(self, call: PendingCall) -> None:
        if self._context_length is not None and isinstance(
            call, GenCall | ScoreCall | CacheCall | EmbedCall | RankCall
        ):
            self._validator.check_length(call, self._context_length, self._model)

    def _release(self, client: Client, request_id: str) -> None:
        for call in self._calls.with_id(client, request_id):
            if isinstance(call, PictureCall) and isinstance(call.message, Hint):
                self._end(call, None)
        self._hints.release(client, request_id)

    def _answer_about_caches(self, client: Client, message: ReadCaches | ExtendCache | DeleteCache) -> None:
        """Answers at once from the ledger, without a call."""
        try:
            self._validator.check_cache(message)
        except UmbelError as error:
            client.deliver(_failure(message.id, error))
            return
        salt = message.origin.salt
        match message:
            case ReadCaches(name=""):
                client.deliver(Caches(message.id, self._caches.objects(salt)))
                return
            case ReadCaches(name=name):
                found = self._caches.find(salt, name)
            case ExtendCache(name=name, ttl=ttl):
                found = self._caches.extend(salt, name, ttl)
            case DeleteCache(name=name):
                found = self._caches.delete(salt, name)
            case _:
                assert_never(message)
        client.deliver(Caches(message.id, () if found is None else (found,)))

    def _answer(self, client: Client, question: Question) -> None:
        """Answers at once from the tokenizer, without a call."""
        try:
            answer = self._validator.answer(question)
        except UmbelError as error:
            answer = _failure(question.id, error)
        except Exception:
            log.exception("a question about tokens could not be answered")
            self.counters["internal_errors"] += 1
            answer = _failure(question.id, BackendError("internal error while reading tokens; see the log"))
        client.deliver(answer)

    # ------------------------------------------------------------------ pictures

    def _show(self, client: Client, message: Showable) -> None:
        """Holds the message until its media are decoded, which may be at once."""
        hint = isinstance(message, Hint)
        if hint and self.state is not EngineState.READY:
            self._hints.unused()
            return
        try:
            self._check_open(message)
            deadline = self._validator.show(message, now=self._clock.now())
        except UmbelError as error:
            if hint:
                self._hints.unused()
            else:
                self._refuse(client, message.id, error)
            return
        call = self._pictures.wait(client, message, deadline)
        self._calls.add(call)
        call.showing.begin(lambda error: self._shown(call, error))

    def _shown(self, call: PictureCall, error: UmbelError | None) -> None:
        try:
            if error is not None:
                self._fail(call, error)
                return
            self._calls.remove(call)
            try:
                self._take(call.client, call.shown(self._clock.now()))
            finally:
                self._pictures.settle(call)
        except Exception:
            log.exception("a message with pictures could not be received")
            self.counters["internal_errors"] += 1

    # ------------------------------------------------------------------ on the way and at the end

    def _dispatch(self, call: PendingCall) -> None:
        try:
            self._check_length(call)  # the context was not known while the first engine started
            if isinstance(call, BroadcastCall):
                self._calls.spread(call, self._replicas.ready, self._ids)
            else:
                replica = self._place(call)
                self._pictures.upload(call.pictures, replica)
                call.mark(partial(self._caches.grant, replica=replica))
            call.phase = CallPhase.DISPATCHED
            targets = dict(call.targets())
            for message in call.outgoing(self._clock.now()):
                self._faults("gateway.send")
                self._replicas[targets[message.id]].send(message)
        except UmbelError as error:
            self._abort_engine_requests(call)
            self._fail(call, error)
        except Exception:
            self._internal(call, "sending the request to the engine")

    def _place(self, call: PendingCall) -> int:
        """Returns the engine that gets a call, and keeps to it until that is lost."""
        if call.place is None:
            first = call.messages[0]
            assert not isinstance(first, EngineControl | EngineSurvey), "these go to all"
            home, tokens = None, prompt_of(first)
            if call.marked is not None and len(self._replicas) > 1:
                home = self._caches.home(call.marked, tokens, first.schedule.private)
            call.place = self._replicas.place(tokens, first.schedule, work=call.work, home=home)
        return call.place.replica

    def _place_hint(self, message: EnginePrefill) -> int:
        return self._replicas.place_hint(message.token_ids, message.schedule)

    def _abort(self, call: PendingCall) -> None:
        """Asks the engine to end a call that was sent, with its text so far; ends any other call here."""
        self.counters["aborts"] += 1
        if call.phase is CallPhase.HELD:
            self._fail(call, CancelledError("the request was cancelled before the engine had it"))
        else:
            call.aborted = True
            self._abort_engine_requests(call)

    def _abort_engine_requests(self, call: PendingCall) -> None:
        self._end_hint(call)
        if call.phase is CallPhase.HELD:
            return
        for id, replica in call.targets():
            try:
                self._replicas[replica].send(EngineAbort(id))
            except Exception:
                log.exception("abort of engine request %d could not be sent", id)

    def _end_hint(self, call: PendingCall) -> None:
        """Ends the hint of a call's prompt, which only this call sent: other calls with this prompt have their own."""
        if isinstance(call, GenCall) and call.hint is not None and call.replica is not None:
            self._hints.end(call.replica, call.hint)
            call.hint = None

    def _internal(self, call: PendingCall, doing: str) -> None:
        """Ends this call only, after a mistake of ours."""
        log.exception("internal error while %s", doing)
        self.counters["internal_errors"] += 1
        self._abort_engine_requests(call)
        self._fail(call, BackendError(f"internal error while {doing}; see the log"))

    def _refuse(self, client: Client, request_id: str, error: UmbelError) -> None:
        self.counters["refused"] += 1
        client.deliver(_failure(request_id, error))

    def _fail(self, call: PendingCall, error: UmbelError) -> None:
        self._end(call, call.failure(error))

    def _end(self, call: PendingCall, ending: FromBackend | None) -> None:
        """Removes a call and sends its client the ending, unless the client is gone. No other place removes calls."""
        self._calls.remove(call)
        self._replicas.ended(call.place, ending.usage.completion_tokens if isinstance(ending, Final) else None)
        if call.marked is not None:
            self._caches.cancel(call.marked)
        self._end_hint(call)
        if isinstance(call, GenCall) and call.inquiry is not None:
            call.inquiry.forget()
            call.inquiry = None  # it refers to the call
        if isinstance(call, PictureCall):
            self._pictures.settle(call)
            if isinstance(call.message, Hint):
                self._hints.unused()
        self._pictures.release(call)
        if ending is None:
            return
        self.counters["failed" if isinstance(ending, Failure) else "finished"] += 1
        call.client.deliver(ending)

    def _dead(self) -> EngineError:
        return EngineError(f"the engine could not be restarted: {self._replicas.cause}; make a new Runtime")


def _waiting_for(call: PendingCall) -> str:
    if call.phase is not CallPhase.HELD:
        return "before the answer was complete"
    return f"waiting for {call.waits_for or 'the engine to start'}"


def _failure(request_id: str, error: UmbelError) -> Failure:
    return Failure(request_id, type(error).__name__, str(error))
