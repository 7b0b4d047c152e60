"""Simulates a runtime exactly: the real gateway, schedulers and radix trees, under a virtual clock.

    session ──▶ Gateway ──▶ Scheduler of a replica ──▶ SimulatedRunner: its step takes as long as the step model says
            ◀──────────────────────────────────────────  answers reach the gateway when the step has ended

What is left out: the time that the gateway and the sockets take, that of saving pages, and the text of answers.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import EngineError, ParameterError
from ...lang.prompt import Generated, Part
from ...lang.protocol import Failure, Final, GenRequest, Hint, Origin, Scored, ScoreRequest
from ...lang.sampling import SamplingParams
from ..cache.pool_pages import CopiedPages
from ..constraints.matcher import OPENING_POLL
from ..core.batch import (
    DUMMY_SLOT,
    Batch,
    Draws,
    Logits,
    PagePart,
    RowNeed,
    SavedPages,
    StepShape,
    Summary,
    WindowPool,
)
from ..core.config import GatewayLimits, SupervisionLimits
from ..core.messages import (
    Ended,
    EngineGenerate,
    EngineScore,
    FromEngine,
    Heartbeat,
    ScoreEnded,
    ToEngine,
)
from ..gateway.calls import Answer, Client
from ..gateway.gateway import Gateway
from ..launch import LEAST_AHEAD
from ..scheduler.page_cache import PageTiers
from ..scheduler.policy import PolicyName
from ..scheduler.scheduler import Scheduler, SchedulerConfig
from ..tiers.names import PAGE_TOKENS, PageScheme
from ..tiers.tier import Payload
from ..tokenizer.tokenizer import Tokenizer
from .answers import AnswerTokens, hash_rows, mix
from .calls import Answered, SimulatedCall
from .events import EventClock, Events
from .measurements import Measurements
from .replayed_guesses import ReplayedGuesses
from .step_model import StepModel
from .tiers import TOKEN_BYTES, TierModel, open_access, rooms_of

CONTEXT = 1 << 20  # tokens; the pool is the limit
MOST_REPLICAS = 64  # as RuntimeOptions.replicas
_STUCK = 1_000  # steps in a row that compute nothing
_FOREVER = 1e9  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """Describes each replica.

    Attributes:
        pool: tokens of its KV pool.
        max_running, chunk, policy: as the runtime's options of these names (chunk_size).
        window: the pool of window layers; None: the model has none of its own.
        least_ahead: hints that miss fewer tokens are dropped.
    """

    pool: int = 32_768
    max_running: int = 64
    chunk: int | None = 512
    policy: str = "lpm"
    window: WindowPool | None = None
    least_ahead: int = LEAST_AHEAD


class SimulatedRunner:
    """Implements `batch.Runner`: computes nothing, and moves the clock by the time that the step takes.

    A slot holds a hash of the tokens up to it, of which the next token is chosen.
    """

    trie_walk = None
    pictures = None
    num_states = 0

    def __init__(self, settings: ReplicaShape, model: StepModel, tokens: AnswerTokens, vocab: int) -> None:
        self.vocab_size = vocab
        self.context_length = CONTEXT
        self.num_slots = settings.pool + 1
        self.window_pool = settings.window
        self.clock = EventClock()
        self.busy = 0.0  # seconds
        self.pages = SimulatedPages(self)
        self.model = model
        self._tokens = tokens
        self.guesses = ReplayedGuesses(tokens, vocab)
        self._chooser = _EvenChooser()
        self.clear()

    @property
    def chooser(self) -> "_EvenChooser":
        return self._chooser

    def clear(self) -> None:
        self.hashes = np.zeros(self.num_slots, dtype=np.uint64)

    def facts(self) -> Mapping[str, str | int | float]:
        return {"kernels": "simulated"}

    def forward(self, batch: Batch) -> Logits:
        shape = batch.shape
        seconds = self.model.seconds(shape._replace(logits=shape.logits - self.guesses.forced_rows))
        self.busy += seconds
        self.clock.move_to(self.clock.now() + seconds)
        of_rows = self._write(batch)
        asked, last = batch.row_requests, of_rows[batch.logit_rows]
        chooses = np.zeros(len(last), dtype=np.bool_) if asked is None else asked.kinds != RowNeed.LOGITS
        tokens = np.full(len(last), -1, dtype=np.int64)
        if asked is not None and chooses.any():
            drawn = asked.kinds == RowNeed.SAMPLE
            tokens[chooses] = self._tokens.pick(mix(np.where(drawn, last ^ asked.keys, last)))[chooses]
        places = np.where(chooses, -1, np.cumsum(~chooses) - 1)
        values = torch.zeros(1, 1).expand(int((~chooses).sum()), self.vocab_size)
        return Logits(values, places, tokens)

    def _write(self, batch: Batch) -> NDArray[np.uint64]:
        """Stores the hash of each row's history in its slot → the hashes. [R]"""
        with np.errstate(over="ignore"):
            sums = np.cumsum(hash_rows(batch.token_ids, batch.positions), dtype=np.uint64)
            first, before = 0, np.uint64(0)
            for slots, prefix, rows in zip(
                batch.slots, batch.prefix_lengths.tolist(), batch.query_lengths.tolist(), strict=True
            ):
                start = self.hashes[slots[prefix - 1]] if prefix else np.uint64(0)
                own = sums[first : first + rows]
                following, before = start - before, own[-1].copy()
                own += following
                # In order: a sequence may begin with rows that an earlier one of this step has written.
                self.hashes[batch.write_slots[first : first + rows]] = own
                first += rows
        self.hashes[DUMMY_SLOT] = 0
        return sums


class SimulatedPages:
    """Implements `batch.PagePort`: a page has the hashes of its slots; one of window layers is as large, and empty."""

    layout = "simulated"

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner

    def bytes_per_token(self, part: PagePart) -> int:
        return TOKEN_BYTES

    def save(self, slots: NDArray[np.int32], part: PagePart) -> SavedPages:
        if part is PagePart.WINDOWS:
            return CopiedPages([np.zeros(page.size * TOKEN_BYTES, dtype=np.uint8) for page in slots])
        return CopiedPages([self._runner.hashes[page].view(np.uint8) for page in slots])

    def load(self, slots: NDArray[np.int32], payloads: Sequence[Payload], part: PagePart) -> None:
        if part is PagePart.TOKENS:
            tokens = np.concatenate([payload.view(np.uint64) for payload in payloads])
            self._runner.hashes[slots] = tokens[-len(slots) :]


class _EvenChooser:
    """All tokens are alike: implements `batch.Chooser` for rows whose log-probabilities are asked for."""

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        raise AssertionError("the runner chooses all tokens")

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        shape = (len(rows), top)
        normalisers = np.full(len(rows), np.log(logits.shape[1]))
        return Summary(normalisers, np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32))


class _SimulatedReplica:
    """A scheduler that steps while it has work. `answer` is called with its messages when their step has ended, then
    `stepped`, before the next one begins.

    `beat` is its state when no step runs, as the heartbeats of an engine bring it.
    """

    def __init__(
        self,
        events: Events,
        runner: SimulatedRunner,
        settings: ReplicaShape,
        answer: Callable[[FromEngine], None],
        stepped: Callable[[], None],
        tiers: PageTiers | None,
        *,
        cache_events: bool,
    ) -> None:
        config = SchedulerConfig(
            max_running=settings.max_running,
            max_step_tokens=settings.chunk,
            max_step_logits=max(256, settings.max_running),
            policy=PolicyName(settings.policy),
            least_ahead=settings.least_ahead,
            cache_events=cache_events,
        )
        self.runner = runner
        self.scheduler = Scheduler(
            runner, lambda _: b" w", frozenset(), config, runner.clock, tiers=tiers, guesser=runner.guesses
        )
        if self.scheduler.kv.pages is not None:
            rows = config.max_step_tokens or PAGE_TOKENS  # a runtime measures them at its start
            seconds = runner.model.seconds(StepShape(rows, rows * (rows + 1) // 2, rows, 1, 1))
            self.scheduler.kv.pages.loads.rates.computed(rows, seconds)
        self.beat = self._heartbeat()
        self._events = events
        self._answer, self._stepped = answer, stepped
        self.steps = 0
        self._inbox: deque[ToEngine] = deque()
        self._stepping = False
        self._nothing_done = 0

    @property
    def works(self) -> bool:
        """Returns whether it has something to do."""
        return bool(self._inbox) or not self.scheduler.idle

    def receive(self, message: ToEngine) -> None:
        self._inbox.append(message)
        if not self._stepping:
            self._stepping = True
            self._events.at(self._events.now, self._step)

    def _step(self) -> None:
        clock = self.runner.clock
        clock.move_to(max(clock.now(), self._events.now))
        while self._inbox:
            self.scheduler.handle_message(self._inbox.popleft())
        began = clock.now()
        answers = self.scheduler.step()
        pages = self.scheduler.kv.pages
        if pages is not None and pages.loads.going and not answers and clock.now() == began:
            clock.move_to(began + OPENING_POLL)  # nothing can run before pages come: it looks again as an engine does
        self._nothing_done = 0 if answers or clock.now() > began else self._nothing_done + 1
        assert self._nothing_done < _STUCK, "requests wait and none of them can run"
        self._events.at(clock.now(), lambda: self._end_step(answers))

    def _end_step(self, answers: list[FromEngine]) -> None:
        self.beat = self._heartbeat()
        self.steps = int(self.scheduler.counters["steps"])
        for answer in answers:
            self._answer(answer)
        self._stepped()
        if self.works:
            self._step()
        else:
            self._stepping = False

    def _heartbeat(self) -> Heartbeat:
        scheduler = self.scheduler
        counters = scheduler.counters
        return Heartbeat(int(counters["steps"]), scheduler.running, scheduler.waiting, counters, scheduler.kv.gauges)


class ExactSimulation:
    """Implements `calls.Host` on a gateway and its replicas.

    Args:
        tokenizer, tokens: those of the prompts and of the answers.
        tiers: slower ones of the cache, the fastest first.
    """

    def __init__(
        self,
        events: Events,
        tokenizer: Tokenizer,
        tokens: AnswerTokens,
        model: StepModel,
        settings: ReplicaShape,
        measurements: Measurements,
        policy: str = "added-delay",
        tiers: Sequence[TierModel] = (),
    ) -> None:
        if measurements.replicas > MOST_REPLICAS:
            raise ParameterError(
                f"{measurements.replicas} replicas; a gateway has at most {MOST_REPLICAS}; write --coarse for more"
            )
        self._events = events
        self._measurements = measurements
        self._ids = count(1)
        self._waiting: dict[str, Callable[[Answered], None]] = {}
        self._client = Client(self, b"simulated")
        self._tokens = tokens
        self._tiers = tiers
        self.on_step: Callable[[], None] = _nothing  # called when a step has ended and was answered
        self._asked: SimulatedCall | None = None  # the call that is being asked
        self._tails: dict[str, int] = {}  # by the request's id
        self._stores = {tier.name: tier.memory() for tier in tiers if tier.shared}
        runners = [SimulatedRunner(settings, model, tokens, tokenizer.vocab_size) for _ in range(measurements.replicas)]
        self._replicas = [
            _SimulatedReplica(
                events,
                runner,
                settings,
                partial(self._engine_event, number),
                lambda: self.on_step(),
                self._open_tiers(runner),
                cache_events=measurements.replicas > 1,
            )
            for number, runner in enumerate(runners)
        ]
        self._gateway = Gateway(
            tokenizer,
            model="simulated",
            to_engines=[partial(self._to_engine, number) for number in range(measurements.replicas)],
            clock=events.clock,
            placement=policy,
            limits=GatewayLimits(max_queue=1 << 30, request_timeout=_FOREVER),
            seed=0,
        )
        for number in range(measurements.replicas):
            self._gateway.engine_ready(CONTEXT, number, rooms_of(tiers))
        self._next_heartbeats = 0.0

    def _open_tiers(self, runner: SimulatedRunner) -> PageTiers | None:
        if not self._tiers:
            return None
        scheme = PageScheme(b"simulated", "", runner.pages.layout)
        stores, events = self._stores, self._events
        return PageTiers(
            scheme, tuple(open_access(tier, stores.get(tier.name), events, runner.clock) for tier in self._tiers)
        )

    # ------------------------------------------------------------------ Host

    def ask(self, call: SimulatedCall, then: Callable[[Answered], None]) -> None:
        self._send_heartbeats()
        number = f"c{next(self._ids)}"
        self._waiting[number] = then
        if call.tail:
            self._tails[number] = call.tail
        prompt = _parts(call.prompt)
        request: GenRequest | ScoreRequest
        if call.choices:
            request = ScoreRequest(number, prompt, call.choices, origin=call.origin)
        else:
            sampling = SamplingParams(
                max_tokens=call.max_tokens, temperature=1.0 if call.sampled else 0.0, ignore_eos=True
            )
            request = GenRequest(number, prompt, sampling, origin=call.origin)
        self._asked = call
        self._gateway.receive(self._client, request)
        self._asked = None

    def hint(self, prompt: tuple[Part, ...], origin: Origin) -> None:
        self._send_heartbeats()
        self._gateway.receive(self._client, Hint(f"h{next(self._ids)}", prompt, origin))

    # ------------------------------------------------------------------ between gateway and replicas

    def _send_heartbeats(self) -> None:
        """Sends heartbeats that are due: they matter only when something is placed.

        From them placement knows the pool of a replica and how fast it computes."""
        if self._events.now < self._next_heartbeats:
            return
        self._next_heartbeats = self._events.now + SupervisionLimits().heartbeat_period
        for number, replica in enumerate(self._replicas):
            self._gateway.engine_event(replica.beat, number)

    def deliver(self, identity: bytes, message: Answer) -> None:
        """Passes an answer of the gateway to the session that asked."""
        match message:
            case Final(id, (completion, *_)):
                tail = _tail(completion.token_ids, self._tails.pop(id, 0), self._tokens)
                answer = Answered(completion.text, (*completion.token_ids, *tail))
            case Scored(id):
                answer = Answered()
            case Failure(id):
                raise EngineError(f"the simulated call {id} failed: {message.message}")
            case _:
                raise AssertionError(f"nothing asks for a {type(message).__name__}")
        self._waiting.pop(id)(answer)

    def _to_engine(self, replica: int, message: ToEngine) -> None:
        match message:
            case EngineGenerate(id=id, token_ids=token_ids):
                self._measurements.sent(id, replica, self._events.now, [token_ids])
                assert self._asked is not None, "a gateway sends a call without a constraint on at once"
                self._replicas[replica].runner.guesses.add(id, self._asked.ahead)
                self._measurements.forced += self._asked.tail
            case EngineScore(id=id, sequences=sequences):
                self._measurements.sent(id, replica, self._events.now, sequences)
        self._replicas[replica].receive(message)

    def _engine_event(self, replica: int, event: FromEngine) -> None:
        match event:
            case Ended(id=id, token_ids=answer, prompt_tokens=tokens, times=times):
                self._measurements.found += event.cached_tokens
                self._measurements.ended(id, self._events.now, tokens, answer, times)
            case ScoreEnded(id=id, prompt_tokens=tokens):
                self._measurements.found += event.cached_tokens
                self._measurements.ended(id, self._events.now, tokens)
        self._gateway.engine_event(event, replica)

    # ------------------------------------------------------------------ for recordings

    @property
    def single(self) -> bool:
        """Returns whether there is one replica, whose steps can be those of a recording."""
        return len(self._replicas) == 1

    @property
    def steps(self) -> int:
        """The steps that have ended, of all replicas."""
        return sum(replica.steps for replica in self._replicas)

    @property
    def works(self) -> bool:
        """Returns whether a replica has something to do."""
        return any(replica.works for replica in self._replicas)

    # ------------------------------------------------------------------ afterwards

    def finish(self) -> None:
        """Takes the counters of the replicas into the measurements. Every session has ended."""
        assert not self._waiting, f"{len(self._waiting)} calls have no answer"
        for number, replica in enumerate(self._replicas):
            replica.scheduler.check()
            self._measurements.worked(number, replica.runner.busy, replica.scheduler.counters)
        self._measurements.counters["completion_tokens"] += self._measurements.forced
        for tier in self._tiers:
            loaded = int(self._measurements.counters[f"loaded_{tier.medium}_tokens"])
            if loaded:
                self._measurements.tier_tokens[tier.name] = loaded


def _nothing() -> None:
    """Steps concern no one."""


def _tail(answer: Sequence[int], count: int, tokens: AnswerTokens) -> tuple[int, ...]:
    """Returns forced tokens after an answer: the same ones after equal answers."""
    if not count:
        return ()
    places = np.arange(len(answer), len(answer) + count)
    last = np.full(count, answer[-1] if answer else 0)
    return tuple(tokens.pick(mix(hash_rows(last, places))).tolist())


def _parts(prompt: tuple[Part, ...] | NDArray[np.int32]) -> tuple[Part, ...]:
    return prompt if isinstance(prompt, tuple) else (Generated("", tuple(prompt.tolist())),)
