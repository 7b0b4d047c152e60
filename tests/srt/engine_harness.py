"""A scheduler on the oracle model under a virtual clock, and the judge of what it answers."""

from collections.abc import Callable, Iterable

import numpy as np
from umbel.lang.protocol import FinishReason
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.matcher import MatcherCache
from umbel.srt.core.batch import WindowPool
from umbel.srt.core.instruments import FaultHook, VirtualClock, no_faults
from umbel.srt.core.messages import (
    CacheEvents,
    ControlEnded,
    Ended,
    EngineConstraint,
    EngineEmbed,
    EngineFailed,
    EngineGenerate,
    EngineMark,
    EnginePrefill,
    EngineRelease,
    EngineRenew,
    EngineScore,
    FromEngine,
    KeepsEnded,
    MarksPlaced,
    Schedule,
    ScoreEnded,
    Tokens,
)
from umbel.srt.placement.meta_tree import MetaTree
from umbel.srt.scheduler.guesses import Guesser
from umbel.srt.scheduler.page_cache import PageTiers
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig
from umbel.srt.testing.launched_oracle import Computes, LaunchedOracle
from umbel.srt.testing.oracle import OracleRunner, Reference, reference_generate
from umbel.srt.weights.vector_head import LoadedHead

from .tree_copy import TreeCopy, nodes_of, read

POINTS = ["engine.plan", "engine.forward", "engine.sample", "engine.commit", "memory.allocate"]  # of faults
VOCABULARY = 24
EOS = frozenset({0})
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

Ending = Ended | ScoreEnded | ControlEnded | EngineFailed


def letters(token: int) -> bytes:
    """Tokens of one to three bytes, so that stop strings begin and end inside tokens; end-of-sequence has none."""
    return b"" if token in EOS else (b"abcab"[token % 3 : token % 3 + 1 + token % 3])


class Engine:
    """Drives a scheduler and keeps what it sends, by request, and two copies of its tree: a plain one, and the
    gateway's.

    With check_every_step, which is the default, both must equal the tree after every step.
    """

    def __init__(
        self,
        pool: int = 200,
        context: int = 120,
        faults: FaultHook = no_faults,
        vocabulary: int = VOCABULARY,
        token_bytes: Callable[[int], bytes] = letters,
        eos_ids: frozenset[int] = EOS,
        constraints: MatcherCache | None = None,
        computes: Computes = "when asked",
        forward_seconds: float = 0.0,
        states: int = 0,
        windows: tuple[int, int] | None = None,
        vectors: LoadedHead | None = None,
        meta_tree: MetaTree | None = None,
        replica: int = 0,
        tiers: PageTiers | None = None,
        guesser: Guesser | None = None,
        **settings: object,
    ) -> None:
        """`computes`, `forward_seconds`: of a LaunchedOracle, which runs the steps where they overlap, or take time.

        `windows`: window slots, without the dummy, and how far rows see in window layers. `meta_tree`: has the copies
        of several engines; this one is `replica`.
        """
        self.clock = VirtualClock()
        self.runner = OracleRunner(
            vocabulary,
            context,
            pool + 1,
            num_states=states + 1 if states else 0,
            window_pool=None if windows is None else WindowPool(windows[0] + 1, windows[1]),
        )
        config = SchedulerConfig(**{"check_every_step": True, "cache_events": True, **settings})  # type: ignore[arg-type]
        steps: OracleRunner | LaunchedOracle = self.runner
        if config.overlap or forward_seconds:
            steps = LaunchedOracle(self.runner, computes=computes, clock=self.clock, seconds=forward_seconds)
        self.scheduler = Scheduler(
            steps,
            token_bytes,
            eos_ids,
            config,
            self.clock,
            faults,
            constraints,
            vectors=vectors,
            tiers=tiers,
            guesser=guesser,
        )
        steps.expected = self.scheduler.planned_tokens
        self.token_bytes = token_bytes
        self.endings: dict[int, Ending] = {}
        self.streamed: dict[int, list[int]] = {}
        self.ended_in: dict[int, int] = {}  # id → step
        self.lost_keeps: list[int] = []
        self.placed: dict[int, list[bool]] = {}  # by request: its marks
        self.steps = 0
        self.copy, self.meta_tree, self.replica = TreeCopy(), meta_tree or MetaTree(), replica
        self._next_id = 0

    # -- requests

    def generate(
        self,
        tokens: Iterable[int],
        sampling: SamplingParams = GREEDY,
        *,
        stream: bool = False,
        **schedule: object,
    ) -> int:
        message_id = self._id()
        self.scheduler.handle_message(
            EngineGenerate(message_id, list(tokens), sampling, stream, Schedule(**schedule))  # type: ignore[arg-type]
        )
        return message_id

    def mark(
        self,
        tokens: Iterable[int],
        *lengths: int,
        sampling: SamplingParams = GREEDY,
        seconds: float = 60.0,
        **schedule: object,
    ) -> tuple[int, list[int]]:
        """Sends a generation with marks at these lengths → its id, and those of the marks."""
        message_id = self._id()
        marks = [EngineMark(self._id(), length, seconds) for length in lengths]
        self.scheduler.handle_message(
            EngineGenerate(message_id, list(tokens), sampling, False, Schedule(**schedule), marks=marks)  # type: ignore[arg-type]
        )
        return message_id, [mark.id for mark in marks]

    def renew(self, mark: int, seconds: float) -> None:
        self.scheduler.handle_message(EngineRenew(mark, seconds))

    def constrain(
        self,
        tokens: Iterable[int],
        constraint: EngineConstraint,
        sampling: SamplingParams,
        *,
        stream: bool = False,
        heal: bool = False,
        **schedule: object,
    ) -> int:
        message_id = self._id()
        message = EngineGenerate(
            message_id,
            list(tokens),
            sampling,
            stream,
            Schedule(**schedule),  # type: ignore[arg-type]
            constraint,
            heal,
        )
        self.scheduler.handle_message(message)
        return message_id

    def score(self, sequences: Iterable[Iterable[int]], start: int, **schedule: object) -> int:
        message_id = self._id()
        wanted = [list(sequence) for sequence in sequences]
        self.scheduler.handle_message(EngineScore(message_id, wanted, start, Schedule(**schedule)))  # type: ignore[arg-type]
        return message_id

    def embed(self, tokens: Iterable[int]) -> int:
        message_id = self._id()
        self.scheduler.handle_message(EngineEmbed(message_id, list(tokens)))
        return message_id

    def hint(self, tokens: Iterable[int], *, pin: float | None = None, **schedule: object) -> int:
        message_id = self._id()
        self.scheduler.handle_message(EnginePrefill(message_id, list(tokens), Schedule(**schedule), pin))  # type: ignore[arg-type]
        return message_id

    def release(self, message_id: int) -> None:
        self.scheduler.handle_message(EngineRelease(message_id))

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    # -- steps

    def step(self) -> list[FromEngine]:
        events = self._follow(self.scheduler.step())
        self.steps += 1
        for event in events:
            if isinstance(event, KeepsEnded):
                self.lost_keeps += event.ids
                continue
            if isinstance(event, MarksPlaced):
                assert event.id not in self.placed, "marks are placed once"
                assert event.id not in self.endings.keys() | self.streamed.keys(), "before the first token"
                self.placed[event.id] = event.placed
                continue
            assert event.id not in self.endings, f"request {event.id} was answered after its end"
            if isinstance(event, Tokens):
                self.streamed.setdefault(event.id, []).extend(event.token_ids)
            else:
                self.endings[event.id] = event
                self.ended_in[event.id] = self.steps
        return events

    def _follow(self, events: list[FromEngine]) -> list[FromEngine]:
        """Changes the copy of the tree as the events say → the other events."""
        changes = [event for event in events if isinstance(event, CacheEvents)]
        assert events[: len(changes)] == changes, "the tree's changes come before what the step computed"
        for message in changes:
            self.copy.apply(message)
            for change in message.events:
                self.meta_tree.apply(self.replica, change)
        if self.scheduler.config.check_every_step and self.scheduler.config.cache_events:
            self.check_copies()
        return events[len(changes) :]

    def check_copies(self) -> None:
        """Compares the copies with the tree; the changes of the last step must have been followed."""
        tree = self.scheduler.kv.tree
        truth = {} if tree is None else nodes_of(tree)  # blocks tell nothing
        assert self.copy.nodes() == truth
        nodes = self.meta_tree.nodes_of(self.replica)
        copied = {node.id: (node.parent, node.salt, read(node.tokens)) for node in nodes}
        assert copied == {number: (parent, salt, tokens) for number, (parent, _, salt, tokens) in truth.items()}
        self.meta_tree.check()

    def run(self, limit: int = 3000) -> "Engine":
        for _ in range(limit):
            if self.scheduler.idle:
                self.scheduler.check()
                return self
            self.step()
        raise AssertionError(f"not idle after {limit} steps")

    # -- answers

    def tokens(self, message_id: int) -> list[int]:
        ending = self.endings[message_id]
        assert isinstance(ending, Ended), f"request {message_id} ended with {ending}"
        return self.streamed.get(message_id, []) + ending.token_ids

    def cached(self, message_id: int) -> int:
        ending = self.endings[message_id]
        assert isinstance(ending, Ended | ScoreEnded), f"request {message_id} ended with {ending}"
        return ending.cached_tokens

    def marks(self, message_id: int) -> list[bool]:
        """Which of its marks were placed; none if its prompt was not computed."""
        return self.placed.get(message_id, [])

    def count(self, name: str) -> float:
        return self.scheduler.counters[name]

    def reference(self, tokens: Iterable[int], sampling: SamplingParams = GREEDY) -> Reference:
        longest = self.scheduler.kv.longest
        return reference_generate(
            self.runner.model, list(tokens), sampling, eos_ids=EOS, token_bytes=self.token_bytes, longest=longest
        )

    def reference_score(self, sequence: list[int], start: int) -> list[float]:
        values = []
        for position in range(start, len(sequence)):
            logits = self.runner.model.reference(sequence[:position]).astype(np.float64)
            values.append(float(logits[sequence[position]] - np.log(np.exp(logits).sum())))
        return values

    def assert_equals_reference(self, message_id: int, tokens: list[int], sampling: SamplingParams = GREEDY) -> None:
        ending = self.endings[message_id]
        assert isinstance(ending, Ended), f"request {message_id} ended with {ending}"
        truth = self.reference(tokens, sampling)
        if ending.finish_reason is FinishReason.ABORT:
            mine = self.tokens(message_id)
            assert mine == truth.token_ids[: len(mine)]
            return
        assert self.tokens(message_id) == truth.token_ids
        assert (ending.finish_reason, ending.text_bytes) == (truth.finish_reason, truth.text_bytes)
        assert ending.completion_tokens == len(truth.token_ids)
