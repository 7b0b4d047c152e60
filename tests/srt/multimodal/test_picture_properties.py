"""Whatever happens in whatever order: the engine is asked about pictures that it has, every call ends once, and at the
end nothing is held."""

import random
from collections import Counter

import pytest
from umbel.lang.errors import RequestError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Abort, ConstraintSpec, Failure, Final, GenRequest, Hint, Origin, Scored, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.compiler import CompiledCache
from umbel.srt.core.batch import PICTURE_BASE
from umbel.srt.core.config import GatewayLimits, PictureLimits
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import (
    EngineAbort,
    EngineFailed,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EnginePrefill,
    EngineScore,
    ScoreEnded,
    ToEngine,
)
from umbel.srt.gateway.calls import Answer, Client
from umbel.srt.gateway.gateway import EngineState, Gateway
from umbel.srt.multimodal.cache import InlineDigests, PictureCache
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import ended
from ..patient_compiler import PatientCompiler
from .patient_decoder import PatientDecoder
from .samples import FORM, media, noise, saved

SHOWN = [media(saved(noise(20, 20, index))) for index in range(5)] + [media(b"no picture")]
PEERS = (b"one", b"two")
RASTER = 16 * 16 * 3


class Traffic:
    """A gateway, and all that is around it by lot."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = VirtualClock()
        self.decoder = PatientDecoder()
        self.compiler = PatientCompiler()
        limits = PictureLimits(cache_bytes=2 * RASTER, held_bytes=4 * RASTER, cache_sources=4, cache_numbers=3)
        self.cache = PictureCache(FORM, self.decoder, InlineDigests(), limits)
        self.engine: set[int] = set()  # pictures that it has
        self.running: list[EngineGenerate | EngineScore] = []
        self.aborted: set[int] = set()  # requests that the engine was asked to end
        self.engine_has_died = False
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.lost: set[str] = set()  # of peers that have gone
        self.endings: Counter[str] = Counter()
        self.gateway = Gateway(
            ByteTokenizer(),
            model="toy",
            to_engines=[self._to_engine],
            clock=self.clock,
            limits=GatewayLimits(max_queue=6, request_timeout=60.0),
            seed=7,
            constraints=CompiledCache(self.compiler, "fsm", entries=0, most_bytes=0),
            pictures=self.cache,
        )
        self.gateway.engine_ready(100)

    def _to_engine(self, message: ToEngine) -> None:
        match message:
            case EnginePicture(number):
                self.engine.add(number)
            case EngineForget(number):
                held = {number for asked in self.running if asked.id not in self.aborted for number in shown(asked)}
                self._hold(number in self.engine, f"picture {number} is forgotten twice")
                self._hold(number not in held, f"picture {number} is forgotten, and a request holds it")
                self.engine.discard(number)
            case EngineAbort(number):
                self.aborted.add(number)
            case EngineGenerate() | EngineScore() | EnginePrefill():
                self._hold(shown(message) <= self.engine, f"{message} came without its pictures")
                if not isinstance(message, EnginePrefill):
                    self.running.append(message)

    def _hold(self, true: bool, what: str) -> None:
        """The gateway catches what its channels raise."""
        if not true:
            self.wrong.append(what)

    def deliver(self, identity: bytes, message: Answer) -> None:
        if isinstance(message, Final | Scored | Failure):
            self.endings[message.id] += 1
        if isinstance(message, Failure) and "had the request's pictures" in message.message:
            self._hold(self.engine_has_died, "a request lost its pictures, and no engine died")

    # ------------------------------------------------------------------ what happens

    def step(self) -> None:
        acts = (self.ask, self.decode, self.decode_badly, self.compile_constraints, self.engine_ends, self.engine_turns)
        weights = (12, 6, 1, 3, 8, 0.5)
        others = (self.abort, self.peer_goes, self.time_passes)
        self.dice.choices((*acts, *others), (*weights, 1, 0.5, 0.5))[0]()

    def ask(self) -> None:
        dice = self.dice
        peer = dice.choice(PEERS)
        label = f"{peer.decode()}-{len(self.asked)}"
        prompt = (Text("x"), *dice.choices(SHOWN, k=dice.randrange(4)))
        origin = Origin(salt=dice.choice(("", "", "salt")), timeout=dice.choice((None, 1.0)))
        kind = dice.choice(("gen", "gen", "gen", "score", "hint", "constrained"))
        if kind == "hint":
            self.gateway.receive(Client(self, peer), Hint("hint", prompt, origin, pin=5.0))
            return
        self.asked.add(label)
        if kind == "score":
            self.gateway.receive(Client(self, peer), ScoreRequest(label, prompt, ("a", "b"), origin=origin))
            return
        constraint = ConstraintSpec("regex", "a+") if kind == "constrained" else None
        sampling = SamplingParams(max_tokens=4)
        self.gateway.receive(
            Client(self, peer), GenRequest(label, prompt, sampling, origin=origin, constraint=constraint)
        )

    def decode(self) -> None:
        self.decoder.work()

    def decode_badly(self) -> None:
        self.decoder.answers.append(RequestError("the process was killed"))
        self.decoder.work()
        self.decoder.answers.clear()

    def compile_constraints(self) -> None:
        self.compiler.work()

    def engine_ends(self) -> None:
        if not self.running:
            return
        message = self.running.pop(self.dice.randrange(len(self.running)))
        if self.dice.random() < 0.1:
            self.gateway.engine_event(EngineFailed(message.id, "RequestError", "a toy's reason"))
        elif isinstance(message, EngineGenerate):
            self.gateway.engine_event(ended(message.id, [97]))
        else:
            logprobs = [[-1.0] * (len(ids) - message.start) for ids in message.sequences]
            self.gateway.engine_event(ScoreEnded(message.id, logprobs, 9, 0))

    def engine_turns(self) -> None:
        """It dies, or comes back."""
        if self.gateway.state is EngineState.STARTING:
            self.gateway.engine_ready(100)
            return
        self.engine_has_died = True
        self.running.clear()
        self.engine.clear()
        self.gateway.engine_lost("killed")

    def abort(self) -> None:
        if self.asked:
            label = self.dice.choice(sorted(self.asked))
            self.gateway.receive(Client(self, label.partition("-")[0].encode()), Abort(label))

    def peer_goes(self) -> None:
        peer = self.dice.choice(PEERS)
        self.lost |= {label for label in self.asked if label.startswith(peer.decode()) and not self.endings[label]}
        self.gateway.client_lost(Client(self, peer))
        self._forget_ended()

    def time_passes(self) -> None:
        self.clock.advance(1.5)
        self.gateway.tick()
        self._forget_ended()

    def _forget_ended(self) -> None:
        self.running = [message for message in self.running if self.gateway._calls.of_request(message.id)]

    # ------------------------------------------------------------------ what holds

    def check(self) -> None:
        pictures = self.cache._pictures.values()
        limits = self.cache.limits
        assert self.wrong == []
        assert not self.gateway.counters["internal_errors"]
        assert all(count == 1 for count in self.endings.values())
        assert {picture.number for picture in pictures if picture.engines} == self.engine
        assert all(picture.raster is not None or picture.holders for picture in pictures)
        kept = [picture for picture in pictures if picture.raster is not None]
        assert self.cache._bytes == RASTER * len(kept) <= limits.held_bytes + limits.cache_bytes
        assert self.cache._held_bytes <= limits.held_bytes

    def end(self) -> None:
        """Everything ends."""
        self.decoder.work()
        self.compiler.work()
        if self.gateway.state is EngineState.STARTING:
            self.gateway.engine_ready(100)
        while self.running:
            self.engine_ends()
        self.clock.advance(100.0)
        self.gateway.tick()
        assert self.gateway.in_flight == 0
        assert set(self.endings) | self.lost == self.asked
        assert self.cache._held_bytes == 0
        assert self.cache._waiting_bytes == 0
        assert self.cache._bytes <= self.cache.limits.cache_bytes
        assert not any(picture.holders for picture in self.cache._pictures.values())


def shown(message: EngineGenerate | EngineScore | EnginePrefill) -> set[int]:
    ids = message.sequences[0] if isinstance(message, EngineScore) else message.token_ids
    return {token - PICTURE_BASE for token in ids if token >= PICTURE_BASE}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(4)
def test_any_traffic_ends_well(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(300):
        traffic.step()
        traffic.check()
    traffic.end()
    traffic.check()
    assert traffic.gateway.counters["finished"] > 5
    assert traffic.cache.counters["pictures_sent"] > 10
