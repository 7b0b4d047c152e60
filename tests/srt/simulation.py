"""The whole runtime in one process under a virtual clock, with faults drawn from a seed.

Real parts: gateway, scheduler with the oracle model, frames and their codecs. Played parts: clients,
channels that delay, repeat and lose frames, an engine that is killed, a compiler of constraints that takes its time,
and time. Everything that clients
see goes into a history, which `verify` judges; the same seed gives the same history.
"""

import asyncio
import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import pytest
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.errors import ConstraintError
from umbel.lang.prompt import Text
from umbel.lang.protocol import (
    Abort,
    Chunk,
    ConstraintSpec,
    Failure,
    Final,
    FinishReason,
    FromBackend,
    GenRequest,
    Hint,
    Origin,
    Release,
    Scored,
    ScoreRequest,
)
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.lang.transport.link import FromGateway, Inbound, Outbound, Pong, ToGateway
from umbel.srt.constraints.compiler import CompiledCache
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.instruments import VirtualClock, no_faults
from umbel.srt.core.messages import (
    EngineFrame,
    ToEngine,
    from_engine_codec,
    from_gateway_codec,
    to_engine_codec,
    to_gateway_codec,
)
from umbel.srt.gateway.calls import Answer, Client
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.gateway.replicas import HINT_SECONDS
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import ORACLE_FAVOURITES, Engine, open_engine
from umbel.srt.testing.oracle import OracleModel, reference_generate
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from .patient_compiler import PatientCompiler
from .tree_copy import nodes_of, read

TICK = 0.01  # virtual seconds
PONG = 100  # ticks between the gateway's signs of life
CONTEXT = 160
POOL = 300
ADAPTERS = ("sql", "law")
OPTIONS = RuntimeOptions(
    adapters=dict.fromkeys(ADAPTERS, "of the oracle"),
    model="oracle",
    context_length=CONTEXT,
    pool_tokens=POOL,
    max_running=6,
    chunk_size=16,
    debug=DebugOptions(check_every_step=True),
)
LIMITS = GatewayLimits(request_timeout=20.0, max_queue=24)
SLACK = 2.0  # virtual seconds a message may be late by, above deadline and grace
TOKENIZER = ByteTokenizer()
ENCODER = PromptEncoder(TOKENIZER)
MODEL = OracleModel(TOKENIZER.vocab_size, ORACLE_FAVOURITES)

# Forced runs, free strings, and an end that the model has to choose.
CONSTRAINTS = (
    ConstraintSpec("regex", r"(an|in) the (end|umbel), [a-z ]{2,12}\.?"),
    ConstraintSpec("json_schema", '{"type": "object", "properties": {"an": {"type": "integer", "minimum": 1}, "the":'
    ' {"type": "string", "maxLength": 8}}, "required": ["an"], "additionalProperties": false}'),
    ConstraintSpec("regex", "the only one"),
)  # fmt: skip

Frames = tuple[bytes, bytes]


class Channel:
    """Frames in order, some late, some twice, some never."""

    def __init__(self, world: "World", *, loss: float) -> None:
        self._world = world
        self._loss = loss
        self._frames: deque[tuple[float, Frames]] = deque()

    def put(self, frames: Frames) -> None:
        dice = self._world.dice
        if dice.random() < self._loss:
            self._world.note("lost")
            return
        now = self._world.clock.now()
        due = max(now + dice.choice((0.0, 0.0, TICK, 5 * TICK)), self._frames[-1][0] if self._frames else 0.0)
        for _ in range(2 if dice.random() < 0.02 else 1):
            self._frames.append((due, frames))

    def take(self) -> list[Frames]:
        due = []
        while self._frames and self._frames[0][0] <= self._world.clock.now():
            due.append(self._frames.popleft()[1])
        return due


@dataclass
class Record:
    """One request as its client saw it."""

    request: GenRequest | ScoreRequest
    sent: float
    chunks: dict[int, str] = field(default_factory=dict)
    endings: list[tuple[float, FromBackend | None]] = field(default_factory=list)  # None: the client lost its link
    aborted: bool = False


class SimulatedClient:
    """One client: its requests, its frames."""

    def __init__(self, world: "World", name: bytes, *, loss: float) -> None:
        self.world, self.name = world, name
        self.records: dict[str, Record] = {}
        self.counters: Counter[str] = Counter()
        self.down = Channel(world, loss=0.0)  # a lost request would never be answered, nor end at the gateway
        self.up = Channel(world, loss=loss)
        self.outbound: Outbound[ToGateway] = Outbound(to_gateway_codec())
        self.inbound: Inbound[FromGateway] = Inbound(from_gateway_codec(), self.counters)
        self.gateway_inbound: Inbound[ToGateway] = Inbound(to_gateway_codec(), Counter())
        self.gateway_outbound: Outbound[FromGateway] = Outbound(from_gateway_codec())
        self.gone = False

    def say(self, message: ToGateway) -> None:
        self.down.put(self.outbound.write([message]))

    def ask(self, request: GenRequest | ScoreRequest) -> None:
        self.records[request.id] = Record(request, self.world.clock.now())
        self.say(request)

    def hear(self, message: FromGateway) -> None:
        if not isinstance(message, Chunk | Final | Scored | Failure):
            return
        record = self.records[message.id]
        if isinstance(message, Chunk):
            record.chunks[message.index] = record.chunks.get(message.index, "") + message.text
        else:
            record.endings.append((self.world.clock.now(), message))
        self.world.note(f"{message.id} {type(message).__name__} {getattr(message, 'message', '')}")

    def link_broken(self) -> None:
        """As the real client does when it misses a frame: everything in flight ends, and it leaves."""
        self.gone = True
        for record in self.records.values():
            if not record.endings:
                record.endings.append((self.world.clock.now(), None))
        self.world.gateway.client_lost(Client(self.world, self.name))


class SimulatedEngine:
    """The place of one engine: its scheduler while it lives, and its frames."""

    def __init__(self, world: "World", index: int) -> None:
        self.world, self.index = world, index
        self.engine: Engine | None = None
        self.restart_at = 0.0

    def start(self) -> None:
        world = self.world
        self.engine = open_engine(world.options, clock=world.clock, faults=no_faults, phase=lambda _: None)
        self.counters: Counter[str] = Counter()
        self.down, self.up = Channel(world, loss=world.loss), Channel(world, loss=world.loss)
        self._down_out: Outbound[ToEngine] = Outbound(to_engine_codec())
        self._down_in: Inbound[ToEngine] = Inbound(to_engine_codec(), Counter())
        self._up_out: Outbound[EngineFrame] = Outbound(from_engine_codec())
        self._up_in: Inbound[EngineFrame] = Inbound(from_engine_codec(), self.counters)
        world.gateway.engine_ready(CONTEXT, self.index)

    def kill(self) -> None:
        self.world.kills += 1
        self.engine = None
        self.world.note("kill")
        self.world.gateway.engine_lost("killed by the simulation", self.index)
        self.restart_at = self.world.clock.now() + self.world.dice.choice((0.05, 1.0))

    def send(self, message: ToEngine) -> None:
        assert self.engine is not None, "the gateway sends only to engines that are ready"
        self.down.put(self._down_out.write([message]))

    def tick(self) -> None:
        if self.engine is None:
            if self.world.clock.now() < self.restart_at:
                return
            self.start()
        assert self.engine is not None, "it was started"
        for frames in self.down.take():
            for message in self._down_in.read(frames):
                self.engine.scheduler.handle_message(message)
        events = self.engine.scheduler.step()
        if events:
            self.up.put(self._up_out.write(list(events)))
        for frames in self.up.take():
            lost = self.counters["lost"]
            received = self._up_in.read(frames)
            if self.counters["lost"] > lost:
                self.world.gateway.events_lost(self.counters["lost"] - lost, self.index)
            for event in received:
                self.world.gateway.engine_event(event, self.index)  # type: ignore[arg-type]  # phases are not sent here


class World:
    """Everything, driven by `run`."""

    def __init__(self, seed: int, *, loss: float = 0.0, overlap: bool = False, replicas: int = 1) -> None:
        self.dice = random.Random(seed)
        self.options = msgspec.structs.replace(OPTIONS, overlap=overlap, replicas=replicas)
        self.clock = VirtualClock()
        self.loss = loss
        self.trace = hashlib.sha256()
        self.kills = self.ticks = 0
        self.clients = [SimulatedClient(self, f"client-{index}".encode(), loss=loss) for index in range(3)]
        self.compiler = PatientCompiler()
        self.engines = [SimulatedEngine(self, index) for index in range(replicas)]
        self.gateway = Gateway(
            TOKENIZER,
            model="oracle",
            to_engines=[engine.send for engine in self.engines],
            clock=self.clock,
            limits=LIMITS,
            seed=seed,
            constraints=CompiledCache(self.compiler, "fsm", entries=2, most_bytes=1 << 20),
        )
        for engine in self.engines:
            engine.start()

    def note(self, what: str) -> None:
        self.trace.update(f"{self.clock.now():.3f} {what}\n".encode())

    def deliver(self, identity: bytes, message: Answer) -> None:
        client = next(client for client in self.clients if client.name == identity)
        client.up.put(client.gateway_outbound.write([message]))

    # ------------------------------------------------------------------ time

    def run(self, events: int) -> None:
        for index in range(events):
            self._act(index)
            for _ in range(self.dice.randint(1, 8)):
                self.tick()
        self.clock.advance(max(0.0, *(engine.restart_at - self.clock.now() for engine in self.engines)))
        for _ in range(int((LIMITS.request_timeout + SLACK + LIMITS.deadline_grace) / TICK)):
            self.tick()
            if not self.gateway.in_flight and all(r.endings for c in self.clients for r in c.records.values()):
                break

    def tick(self) -> None:
        self.clock.advance(TICK)
        for client in self.clients:
            for frames in client.down.take():
                for message in client.gateway_inbound.read(frames):
                    if not client.gone:
                        self.gateway.receive(Client(self, client.name), message)  # type: ignore[arg-type]  # clients send requests
        if self.ticks % 7 == 0:
            self.compiler.work()
        for engine in self.engines:
            engine.tick()
        self.gateway.tick()
        self.ticks += 1
        for client in self.clients:
            if self.ticks % PONG == 0:  # the answer to a ping; its number tells that a frame before it was lost
                client.up.put(client.gateway_outbound.write([Pong(self.gateway.state)]))
            for frames in client.up.take():
                messages = client.inbound.read(frames)
                if client.counters["lost"] and not client.gone:
                    client.link_broken()
                for message in [] if client.gone else messages:
                    client.hear(message)

    # ------------------------------------------------------------------ what happens

    def _act(self, index: int) -> None:
        dice = self.dice
        here = [client for client in self.clients if not client.gone]
        if not here:
            return
        client = dice.choice(here)
        kinds = ("generate", "score", "hint", "release", "abort", "kill", "leave")
        match dice.choices(kinds, (60, 12, 6, 4, 12, 1.5, 0.3))[0]:
            case "generate":
                client.ask(self._generate(f"g{index}"))
            case "score":
                methods: tuple[Literal["", "overshoot", "exact"], ...] = ("", "overshoot", "exact")
                prompt, choices = (Text(self._text()),), ("yes", "no", "in a")
                client.ask(ScoreRequest(f"s{index}", prompt, choices, True, self._origin(), methods[index % 3]))
            case "hint":
                client.say(Hint(f"h{index}", (Text(self._text()),), pin=dice.choice((None, 0.5, 30.0))))
            case "release":
                client.say(Release(f"h{dice.randrange(index + 1)}"))
            case "abort" if client.records:
                label = dice.choice(list(client.records))
                client.records[label].aborted = True
                client.say(Abort(label))
            case "kill" if living := [engine for engine in self.engines if engine.engine is not None]:
                dice.choice(living).kill()
            case "leave":
                client.link_broken()

    def _text(self) -> str:
        return "the umbel " * self.dice.randint(0, 6) + self.dice.choice(("", "sings", "is an", "é"))

    def _origin(self) -> Origin:
        return Origin(
            timeout=self.dice.choice((None, None, 5.0, 0.2)),
            salt=self.dice.choice(("", "s")),
            adapter=self.dice.choice(("", "", "", *ADAPTERS)),
        )

    def _generate(self, label: str) -> GenRequest:
        dice = self.dice
        sampling = SamplingParams(
            max_tokens=dice.choice((0, 1, 5, 40)),
            n=dice.choice((1, 1, 1, 3)),
            stop=dice.choice(((), (), ("a", "zz"))),
            temperature=dice.choice((0.0, 0.8)),
            seed=dice.randrange(1000),
        )
        constraint = dice.choice((None, None, *CONSTRAINTS))
        prompt = (Text(self._text()), Text(dice.choice(("", " lives"))))
        marks = tuple(CacheMark(place, dice.choice((0.3, 30.0))) for place in dice.choice(((), (1,), (1, 2))))
        caching = Caching(marks, minimum=2) if marks else None
        return GenRequest(label, prompt, sampling, dice.random() < 0.5, self._origin(), constraint, caching=caching)


# ------------------------------------------------------------------------------------------ the judge


def verify(world: World) -> Counter[str]:
    """Checks what has to hold over the history. Returns how the requests ended, to be looked at."""
    outcomes: Counter[str] = Counter()
    for client in world.clients:
        for label, record in client.records.items():
            assert len(record.endings) == 1, f"{label} ended {len(record.endings)} times"
            when, ending = record.endings[0]
            seconds = record.request.origin.timeout or LIMITS.request_timeout
            assert when - record.sent <= seconds + LIMITS.deadline_grace + SLACK, f"{label} ended too late"
            _verify_text(record, ending)
            outcomes[ending.kind if isinstance(ending, Failure) else type(ending).__name__] += 1
    assert world.gateway.in_flight == 0
    for _ in range(50):  # for messages that are on their way, and caches whose time is nearly over
        world.tick()
    schedulers = [engine.engine.scheduler for engine in world.engines if engine.engine is not None]
    assert len(schedulers) == len(world.engines)
    if not world.loss:
        kept = {pin for scheduler in schedulers for pin in scheduler.kv.pins._kept}
        assert set(world.gateway._caches._pins) == kept, "gateway and engines keep the same"
        _verify_copies(world)
    for scheduler in schedulers:
        while not scheduler.idle:
            scheduler.step()
        scheduler.check()
        assert scheduler.kv.pool.free + scheduler.kv.cache.total_tokens == POOL
    return outcomes


def _verify_copies(world: World) -> None:
    """Compares the gateway's copies with the trees of the engines, once nothing is on its way."""
    placement = world.gateway._replicas._placement
    if placement is None:
        return
    while not all(engine.engine is None or engine.engine.scheduler.idle for engine in world.engines):
        world.tick()
    for _ in range(20 + round(HINT_SECONDS / TICK)):  # until frames have arrived, and hints count no more
        world.tick()
    placement.check()
    for engine in world.engines:
        assert engine.engine is not None, "it was started again"
        nodes = {node.id: (node.parent, node.salt, read(node.tokens)) for node in placement.tree.nodes_of(engine.index)}
        truth = nodes_of(engine.engine.scheduler.kv.cache)
        assert nodes == {number: (parent, salt, tokens) for number, (parent, _, salt, tokens) in truth.items()}
    assert all(replica.running == 0 for replica in placement.facts().replicas), "a call that ended still counts"


def _verify_text(record: Record, ending: FromBackend | None) -> None:
    request = record.request
    if not isinstance(request, GenRequest):
        if isinstance(ending, Scored):
            _verify_choices(request, ending)
        return
    if request.constraint is not None:
        texts = _constrained_reference(request)
    else:
        texts = [_reference(request, index) for index in range(request.sampling.n)]
    for index, shown in record.chunks.items():
        assert texts[index].startswith(shown), f"{request.id}: {shown!r} is no beginning of {texts[index]!r}"
    if not isinstance(ending, Final):
        return
    if ending.caching is not None:
        assert 0 <= ending.caching.read + ending.caching.created <= ending.usage.prompt_tokens
    for index, completion in enumerate(ending.completions):
        if completion.finish_reason is FinishReason.ABORT:
            assert record.aborted
            text = texts[index] if texts else ""  # a constraint that would have been refused
            assert text.startswith(completion.text.removesuffix("�"))
            continue
        assert completion.text == texts[index]
        if request.stream:
            assert record.chunks.get(index, "") == texts[index]


def _verify_choices(request: ScoreRequest, ending: Scored) -> None:
    """They are as probable as they are to a runtime that serves nothing else."""

    async def run() -> Scored:
        backend = LocalBackend(context_length=CONTEXT, pool_tokens=POOL, adapters=OPTIONS.adapters)
        try:
            return await backend.score(msgspec.structs.replace(request, origin=Origin(adapter=request.origin.adapter)))
        finally:
            await backend.close()

    for mine, alone in zip(ending.choices, asyncio.run(run()).choices, strict=True):
        assert mine.token_ids == alone.token_ids
        for name in ("logprobs", "unconditional", "lower", "upper"):
            assert getattr(mine, name) == pytest.approx(getattr(alone, name), abs=1e-6), f"{request.id}: {name}"


def _constrained_reference(request: GenRequest) -> list[str]:
    """The texts of the request alone, without faults and without jumps; none when it is refused."""
    assert request.sampling.seed is not None, "clients of the simulation name their seeds"
    alone = msgspec.structs.replace(request, origin=Origin(adapter=request.origin.adapter), stream=False)

    async def run() -> list[str]:
        backend = LocalBackend(jump_forward=False, context_length=CONTEXT, pool_tokens=POOL, adapters=OPTIONS.adapters)
        try:
            async for event in backend.generate(alone):
                if isinstance(event, Final):
                    return [completion.text for completion in event.completions]
        except ConstraintError:
            pass
        finally:
            await backend.close()
        return []

    return asyncio.run(run())


def _reference(request: GenRequest, index: int) -> str:
    """The fault-free text, computed without any cache."""
    seed = ((request.sampling.seed or 0) + index) % 2**63
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
    reference = reference_generate(
        replace(MODEL, adapter=("", *ADAPTERS).index(request.origin.adapter) - 1),
        ENCODER.encode(request.prompt),
        SamplingParams(**{**fields, "n": 1, "seed": seed}),
        eos_ids=TOKENIZER.eos_ids,
        token_bytes=TOKENIZER.token_bytes,
        longest=min(CONTEXT, POOL),
    )
    data = b"".join(map(TOKENIZER.token_bytes, reference.token_ids))[: reference.text_bytes]
    return data.decode("utf-8", "replace")
