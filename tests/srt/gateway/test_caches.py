"""Explicit caching through gateway and engine, under a virtual clock: what marks read and create, and until when."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from umbel.lang.caching import Begun, CacheMark, CacheObject, Caching, CachingUsage, MarkUsage
from umbel.lang.errors import UmbelError
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import (
    Abort,
    CacheRequest,
    Caches,
    Chunk,
    Control,
    CreateCache,
    DeleteCache,
    Done,
    ExtendCache,
    Failure,
    Final,
    GenRequest,
    Origin,
    ReadCaches,
    Scored,
    ScoreRequest,
    Usage,
)
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.instruments import FailAt, VirtualClock, no_faults
from umbel.srt.core.messages import EngineGenerate, ToEngine
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.launch import open_engine
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import FakeFrontEnd

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
END = Text("</s>", control=True)
TOKENIZER = ByteTokenizer()
CODE = "<Your Code Here>" * 106 + "<Your Code"  # 1,600 tokens


def length(*blocks: str) -> int:
    """Tokens up to a mark after the last block: BOS, the blocks, and a control token between two of them."""
    return sum(len(TOKENIZER.encode(block, first=False)) + 1 for block in blocks)


class Machine:
    """A gateway and an engine on the oracle. Messages between them are carried when `run` is called."""

    def __init__(self, pool: int = 20_000, context: int = 6_000, **limits: object) -> None:
        options = RuntimeOptions(
            model="oracle",
            context_length=context,
            pool_tokens=pool,
            debug=DebugOptions(check_every_step=False),
        )
        self.clock = VirtualClock()
        self.front_end = FakeFrontEnd()
        self.sent: list[ToEngine] = []
        self.faults: Callable[[str], None] = no_faults
        self._options = options
        self._labels = 0
        self.start_engine()
        self.gateway = Gateway(
            TOKENIZER,
            model="oracle",
            to_engines=[self._send],
            clock=self.clock,
            limits=GatewayLimits(**limits),  # type: ignore[arg-type]
            faults=lambda point: self.faults(point),
            seed=1,
        )
        self.gateway.engine_ready(context)

    def start_engine(self) -> None:
        self.engine = open_engine(self._options, clock=self.clock, faults=no_faults, phase=lambda _: None).scheduler

    def _send(self, message: ToEngine) -> None:
        self.sent.append(message)
        self.engine.handle_message(message)

    def send(self, prompt: Sequence[Part], caching: Caching | None, salt: str = "", **fields: object) -> str:
        self._labels += 1
        label = f"r{self._labels}"
        request = GenRequest(label, tuple(prompt), ONE, False, Origin(salt=salt), caching=caching)
        self.gateway.receive(self.front_end.client(), msgspec.structs.replace(request, **fields))
        return label

    def run(self) -> None:
        while not self.engine.idle:
            for event in self.engine.step():
                self.gateway.engine_event(event)
            self.gateway.tick()
        self.engine.step()  # releases that the last answers brought
        self.engine.check()

    def ask(self, prompt: Sequence[Part], caching: Caching | None, salt: str = "", **fields: object) -> Final:
        label = self.send(prompt, caching, salt, **fields)
        self.run()
        answer = next(answer for answer in self.front_end.answers() if answer.id == label)
        assert isinstance(answer, Final), answer
        return answer

    def score(self, prompt: Sequence[Part], caching: Caching | None, **fields: Any) -> Scored:
        self._labels += 1
        request = ScoreRequest(f"s{self._labels}", tuple(prompt), ("yes", "yes!", "no"), caching=caching, **fields)
        self.gateway.receive(self.front_end.client(), request)
        self.run()
        answer = self.front_end.answers()[-1]
        assert isinstance(answer, Scored), answer
        return answer

    def figures(
        self, blocks: Sequence[str], *marks: int, salt: str = "", ttl: float = 300.0, look_back: int | None = 20
    ) -> tuple[int, int]:
        """Sends blocks of text with marks after some of them, counted from 1 → (created, read)."""
        prompt = [part for block in blocks for part in (Text(block), END)]
        places = tuple(range(1, 2 * len(blocks), 2))
        caching = Caching(tuple(CacheMark(2 * mark - 1, ttl) for mark in marks), places, look_back)
        final = self.ask(prompt, caching, salt)
        assert final.caching is not None
        assert final.usage.cache_write_tokens == final.caching.created
        return final.caching.created, final.caching.read

    def caches(self, request: CacheRequest) -> Caches:
        self.gateway.receive(self.front_end.client(), request)
        self.run()
        answer = self.front_end.answers()[-1]
        assert isinstance(answer, Caches), answer
        return answer

    def refused(self, request: CacheRequest) -> str:
        self.gateway.receive(self.front_end.client(), request)
        self.run()
        answer = self.front_end.answers()[-1]
        assert isinstance(answer, Failure), answer
        return f"{answer.kind}: {answer.message}"

    @property
    def kept(self) -> int:
        return self.engine.kv.cache.kept_tokens


# -------------------------------------------------------------------------------- the seed's figures


def test_a_marked_system_message_is_created_once_and_then_read() -> None:
    machine = Machine()
    system = CODE + "Code"
    assert machine.figures([system, "What does it do?"], 1) == (1605, 0)
    assert machine.figures([system, "And what does it not do?"], 1) == (0, 1605)


def test_a_longer_prefix_creates_what_is_new() -> None:
    machine = Machine()
    head, rest = "a" * 1199, "b" * 299  # with BOS, and the token between them
    assert machine.figures([head], 1) == (1200, 0)
    assert machine.figures([head, rest], 2) == (300, 1200)
    assert machine.figures([head, rest], 1, 2) == (0, 1500)


def test_a_dialogue_reads_the_turn_before_and_creates_its_own() -> None:
    machine = Machine()
    turns = [CODE, "question 1"]
    before = 0
    for turn in range(2, 7):
        marks = [*range(2, 2 * turn - 1, 2)]  # those of earlier turns stay
        assert machine.figures(turns, *marks) == (length(*turns) - before, before)
        before = length(*turns)
        turns += [f"answer {turn}", f"question {turn}"]


@pytest.mark.parametrize(
    ("apart", "look_back", "found"), [(20, 20, True), (21, 20, False), (21, None, True), (0, 0, True)]
)
def test_a_mark_looks_back_over_twenty_blocks(apart: int, look_back: int | None, found: bool) -> None:
    machine = Machine()
    blocks = ["c" * 1100, *(f"block {number}" for number in range(apart))]
    assert machine.figures(blocks[:1], 1) == (1101, 0)
    created, read = machine.figures(blocks, len(blocks), look_back=look_back)
    assert read == (1101 if found else 0)
    assert created == length(*blocks) - read


def test_of_five_marks_the_first_creates_and_reads_nothing() -> None:
    machine = Machine()
    blocks = [letter * 1100 for letter in "abcde"]
    assert machine.figures(blocks[:1], 1) == (1101, 0)
    final = machine.figures([*blocks[:1], *(block.upper() for block in blocks[1:])], 1, 2, 3, 4, 5)
    assert final == (4404, 1101), "the second mark looks back to the first block"
    machine = Machine()
    assert machine.figures(blocks, 1, 2, 3, 4, 5) == (5505, 0)
    assert machine.figures([*blocks[:1], "x" * 1100], 1) == (1101, 0), "no entry ends at the first mark"
    assert machine.figures([*blocks[:2], "x" * 1100], 2) == (0, 2202)


def test_a_changed_tool_is_a_miss() -> None:
    machine = Machine()
    add, sub = ["tool: add " + CODE, "system"], ["tool: sub " + CODE, "system"]
    assert machine.figures(add, 2) == (length(*add), 0)
    assert machine.figures(sub, 2) == (length(*sub), 0)
    assert machine.figures(add, 2) == (0, length(*add))


def test_only_a_strict_prefix_is_read() -> None:
    machine = Machine()
    a, b, c = ("a" * 1100, "b" * 1100, "c" * 1100)
    assert machine.figures([a, b], 1, 2) == (2202, 0)
    assert machine.figures([a, b, "e"], 3) == (2, 2202)
    assert machine.figures(["x", a, b], 3) == (2204, 0)
    assert machine.figures([a, b, c], 3) == (1101, 2202)
    assert machine.figures([a, "x", b, c], 4) == (2204, 1101), "only the first block stands where it stood"


def test_a_layer_that_changes_leaves_the_layers_before_it() -> None:
    machine = Machine()
    persona, history = "p" * 1100, "h" * 500
    assert machine.figures([persona, "k" * 900, history, "question"], 1, 2, 3) == (2503, 0)
    assert machine.figures([persona, "l" * 900, history, "question"], 1, 2, 3) == (1402, 1101)


def test_the_time_to_live_ends_and_is_restarted_by_a_hit() -> None:
    machine = Machine()

    def asked_after(seconds: float) -> tuple[int, int]:
        machine.clock.advance(seconds)
        return machine.figures([CODE, "question"], 1)

    assert asked_after(0.0) == (1601, 0)
    assert asked_after(299.0) == (0, 1601)
    assert asked_after(299.0) == (0, 1601)
    assert machine.kept == 1601
    assert asked_after(301.0) == (1601, 0)
    machine.clock.advance(300.0)
    assert machine.gateway.next_deadline <= machine.clock.now()
    machine.gateway.tick()
    assert machine.kept == 0, "the engine is told, though nothing asks for it"
    assert machine.gateway._caches.next_end == float("inf")


def test_each_mark_has_its_own_time_and_reading_never_shortens_one() -> None:
    machine = Machine()
    prompt = (Text(CODE), END, Text("x" * 99), END)
    both = Caching((CacheMark(1, 3600.0), CacheMark(3, 300.0)))
    final = machine.ask(prompt, both)
    assert final.caching == CachingUsage((MarkUsage(1601, 0, 1601, 3600.0), MarkUsage(1701, 0, 100, 300.0)))
    machine.clock.advance(301.0)
    assert machine.figures([CODE], 1, ttl=300.0) == (0, 1601)
    machine.clock.advance(3500.0)
    assert machine.figures([CODE, "x" * 99], 1, 2) == (100, 1601)


def test_what_is_shorter_than_the_minimum_is_not_kept() -> None:
    machine = Machine()
    short, enough = "s" * 1022, "s" * 1023  # 1,023 and 1,024 tokens with BOS
    assert [machine.figures([short], 1), machine.figures([enough], 1)] == [(0, 0), (1024, 0)]
    prompt, mark = (Text(short), END), (CacheMark(1),)
    final = machine.ask(prompt, Caching(mark, minimum=1023))
    assert (final.usage.cache_write_tokens, final.usage.cached_tokens) == (1023, 1023)
    below = machine.ask(prompt, Caching(mark))
    assert (below.caching, below.usage.cache_write_tokens) == (CachingUsage(), 0)
    assert machine.ask(prompt, None).caching is None


# -------------------------------------------------------------------------------- what is promised, and what is reused


def test_the_figures_of_marks_are_not_those_of_the_cache() -> None:
    machine = Machine()
    prompt = (Text(CODE), END)
    first = machine.ask(prompt, None)
    second = machine.ask(prompt, Caching((CacheMark(1),)))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 1601)
    assert second.caching == CachingUsage((MarkUsage(1601, 0, 1601, 300.0),))


def test_a_flood_leaves_what_is_marked_and_another_salt_has_none_of_it() -> None:
    machine = Machine(pool=8_000, context=2_500)
    assert machine.figures([CODE], 1, salt="a") == (1601, 0)
    for number in range(40):
        machine.ask((Text(f"{number} " + "f" * 2000),), None, salt="b")
    assert machine.figures([CODE], 1, salt="b") == (1601, 0)
    final = machine.ask((Text(CODE), END), Caching((CacheMark(1),)), salt="a")
    assert final.caching is not None
    assert (final.caching.read, final.usage.cached_tokens) == (1601, 1601)


def test_beyond_the_share_nothing_is_created() -> None:
    machine = Machine(pool=6_000, context=3_500)  # 2,500 tokens may be kept
    assert machine.figures([CODE], 1) == (1601, 0)
    assert machine.figures(["z" * 1500], 1, salt="z") == (0, 0)
    assert machine.figures([CODE, "y" * 500, "x" * 1000], 1, 2, 3) == (501, 1601)
    assert machine.kept == 2102


@pytest.mark.parametrize("limits", [{"max_caches": 1}, {"max_salt_caches": 1}])
def test_the_ledger_is_bounded(limits: dict[str, int]) -> None:
    machine = Machine(**limits)
    assert machine.figures(["a" * 1100, "b" * 1100], 1, 2) == (1101, 0)
    assert machine.figures(["a" * 1100, "b" * 1100], 1, 2) == (0, 1101)
    assert machine.figures(["c" * 1100], 1, salt="c") == ((0, 0) if "max_caches" in limits else (1101, 0))
    machine.clock.advance(301.0)
    assert machine.figures(["c" * 1100], 1) == (1101, 0)


def test_of_requests_at_once_one_creates_what_they_share() -> None:
    machine = Machine()
    caching = Caching((CacheMark(1), CacheMark(3)))
    branches = ["a" * 100, "b" * 200, "c" * 300]
    labels = [machine.send((Text(CODE), END, Text(branch), END), caching) for branch in branches]
    machine.run()
    finals = {answer.id: answer for answer in machine.front_end.answers()}
    answers = [finals[label] for label in labels]
    created = [answer.caching.created for answer in answers if isinstance(answer, Final) and answer.caching]
    assert created == [1601 + 101, 201, 301]
    assert machine.engine.kv.pins.keeps == 4
    assert machine.kept == sum(created) - 2, "the control token after the code is one node of the tree"
    assert machine.figures([CODE, branches[2]], 2) == (0, 1601 + 301)


def test_a_request_creates_what_one_before_it_has_not_after_all() -> None:
    machine = Machine()
    caching = Caching((CacheMark(1),))
    first = machine.send((Text(CODE), END), caching)
    machine.gateway.receive(machine.front_end.client(), Abort(first))
    machine.run()
    assert machine.kept == 0
    assert machine.figures([CODE], 1) == (1601, 0)


def test_continuations_of_one_prompt_share_its_marks() -> None:
    machine = Machine()
    sampling = SamplingParams(max_tokens=3, n=3, temperature=0.0, ignore_eos=True)
    final = machine.ask((Text(CODE), END), Caching((CacheMark(1),)), sampling=sampling)
    assert (len(final.completions), final.usage.cache_write_tokens, machine.engine.kv.pins.keeps) == (3, 1601, 1)


def test_a_prompt_can_be_cached_without_an_answer() -> None:
    machine = Machine()
    prewarm = SamplingParams(max_tokens=0)
    final = machine.ask((Text(CODE), END), Caching((CacheMark(1),)), sampling=prewarm)
    assert (final.usage.cache_write_tokens, final.usage.completion_tokens) == (1601, 0)
    assert machine.figures([CODE, "question"], 1) == (0, 1601)


def test_a_mark_after_text_that_goes_on_covers_its_last_certain_token() -> None:
    machine = Machine()
    text = "word " * 300
    prompt = (Text(text + "an"), Text("other word."), END)
    first = machine.ask(prompt, Caching((CacheMark(1),)))
    again = machine.ask((Text(text + "an"), Text(" apple."), END), Caching((CacheMark(1),)))
    certain = length("word " * 299 + "word")
    assert first.usage.cache_write_tokens == certain
    assert again.caching == CachingUsage((MarkUsage(certain, certain, 0, 300.0),))


# -------------------------------------------------------------------------------- choices


@pytest.mark.parametrize("how", [{}, {"unconditional": True}, {"probability": "overshoot"}, {"probability": "exact"}])
def test_a_score_reads_and_creates_what_its_prompt_marks(how: dict[str, Any]) -> None:
    """Its usage is the sum over the sequences, and what it has created counts once."""
    machine = Machine()
    prompt = (Text(CODE), END, Text("Is it good?"))
    caching = Caching((CacheMark(2),))
    plain = machine.score(prompt, None, **how)
    machine.engine.kv.flush()
    first, second = (machine.score(prompt, caching, **how) for _ in range(2))
    assert (plain.caching, plain.usage.cache_write_tokens) == (None, 0)
    assert plain.choices == first.choices == second.choices
    assert (plain.usage.prompt_tokens, plain.evaluations) == (first.usage.prompt_tokens, first.evaluations)
    assert first.caching == CachingUsage((MarkUsage(1602, 0, 1602, 300.0),))
    assert second.caching == CachingUsage((MarkUsage(1602, 1602, 0, 300.0),))
    assert (first.usage.cache_write_tokens, second.usage.cache_write_tokens) == (1602, 0)
    assert first.usage.cached_tokens <= plain.usage.cached_tokens < second.usage.cached_tokens
    assert machine.kept == 1602
    assert machine.ask(prompt, caching).caching == second.caching, "a text reads it, too"


@pytest.mark.parametrize("method", ["", "exact"])
def test_a_score_that_is_cancelled_keeps_nothing(method: Any) -> None:
    machine = Machine()
    request = ScoreRequest("s", (Text(CODE), END), ("a", "b"), probability=method, caching=Caching((CacheMark(2),)))
    machine.gateway.receive(machine.front_end.client(), request)
    machine.gateway.receive(machine.front_end.client(), Abort("s"))
    machine.run()
    assert isinstance(machine.front_end.answers()[-1], Failure)
    assert (machine.kept, len(machine.gateway._caches)) == (0, 0)


# -------------------------------------------------------------------------------- names


def test_a_cache_with_a_name_is_read_by_a_mark_and_looked_up_by_its_salt_only() -> None:
    machine = Machine()
    prompt = (Text(CODE), END)
    made = machine.caches(CreateCache("c", "doc", prompt, 600.0, record=b"body", origin=Origin(salt="a")))
    assert (made.caching, made.usage) == (CachingUsage((MarkUsage(1602, 0, 1602, 600.0),)), Usage(1602, 0, 0, 1, 1602))
    machine.clock.advance(100.0)
    assert machine.caches(ReadCaches("r", "doc", Origin(salt="a"))).caches == (
        CacheObject("doc", 1602, 600.0, 500.0, 100.0, b"body"),
    )
    assert machine.caches(ReadCaches("r", origin=Origin(salt="a"))).caches == (
        CacheObject("doc", 1602, 600.0, 500.0, 100.0),
    )
    for other in (ReadCaches("r", "doc"), ReadCaches("r"), DeleteCache("d", "doc"), ExtendCache("e", "doc", 9.0)):
        assert machine.caches(other).caches == ()
    caching = Caching((CacheMark(2),), look_back=None)
    final = machine.ask((*prompt, Text("question")), caching, salt="a")
    assert final.caching == CachingUsage((MarkUsage(1602, 1602, 0, 300.0),))
    assert machine.caches(ReadCaches("r", "doc", Origin(salt="a"))).caches[0].seconds_left == 600.0, "it was hit"


def test_a_cache_ends_when_it_is_deleted_or_its_extended_time_is_over() -> None:
    machine = Machine()
    for name in ("a", "b"):
        machine.caches(CreateCache("c", name, (Text(name * 1100), END), 300.0))
    machine.caches(ExtendCache("e", "b", 1000.0))
    assert machine.caches(DeleteCache("d", "a")).caches[0].name == "a"
    machine.run()
    assert machine.kept == 1102
    machine.clock.advance(999.0)
    assert [cache.name for cache in machine.caches(ReadCaches("r")).caches] == ["b"]
    machine.caches(ExtendCache("e", "b", 5.0))
    machine.clock.advance(5.0)
    assert machine.caches(ReadCaches("r")).caches == ()
    machine.run()
    assert machine.kept == 0


def test_a_name_and_a_mark_on_one_prefix_share_its_pin_and_end_apart() -> None:
    machine = Machine()
    prompt = (Text(CODE), END)
    mark = Caching((CacheMark(2),), minimum=1)
    machine.ask((*prompt, Text("question")), mark)
    made = machine.caches(CreateCache("c", "doc", prompt, 900.0))
    assert made.caching == CachingUsage((MarkUsage(1602, 1602, 0, 900.0),))
    assert machine.engine.kv.pins.keeps == 1
    machine.clock.advance(301.0)
    machine.gateway.tick()
    assert machine.kept == 1602
    machine.ask((*prompt, Text("question")), mark)
    machine.caches(DeleteCache("d", "doc"))
    assert machine.kept == 1602, "the mark keeps it"
    machine.clock.advance(301.0)
    machine.gateway.tick()
    assert (machine.kept, len(machine.gateway._caches)) == (0, 0)


def test_a_cache_that_cannot_be_kept_is_an_error() -> None:
    machine = Machine(pool=6_000, context=3_500, max_cache_records=5, max_salt_caches=2)
    prompt = (Text(CODE), END)
    assert machine.refused(CreateCache("c", "n", (Text("short"),))).startswith("RequestError: a cache keeps at least")
    machine.caches(CreateCache("c", "one", prompt, record=b"four"))
    assert machine.refused(CreateCache("c", "one", prompt)).startswith("ParameterError: name: cache 'one' exists")
    assert "records" in machine.refused(CreateCache("c", "two", prompt, record=b"to"))
    assert "no room in the share" in machine.refused(CreateCache("c", "two", (Text("z" * 1500), END)))
    assert "longer context" in machine.refused(CreateCache("c", "two", (Text("z" * 3600), END)))
    machine.caches(CreateCache("c", "two", prompt))
    assert "no more caches may have names" in machine.refused(CreateCache("c", "three", prompt))
    assert machine.kept == 1602
    for wrong in (CreateCache("c", "", prompt), CreateCache("c", "n" * 257, prompt), DeleteCache("d", "")):
        assert "1 to 256 characters" in machine.refused(wrong)
    for wrong in (CreateCache("c", "n", prompt, 0.0), ExtendCache("e", "one", 90_000.0)):
        assert "ttl=" in machine.refused(wrong)
    assert "minimum=0" in machine.refused(CreateCache("c", "n", prompt, minimum=0))


def test_another_engine_has_no_caches() -> None:
    machine = Machine()
    machine.caches(CreateCache("c", "doc", (Text(CODE), END), record=b"body"))
    machine.gateway.engine_lost("killed")
    machine.start_engine()
    machine.gateway.engine_ready(6_000)
    assert machine.caches(ReadCaches("r")).caches == ()
    machine.caches(CreateCache("c", "doc", (Text(CODE), END)))


# -------------------------------------------------------------------------------- when the engine loses what it keeps


def test_a_flushed_cache_has_nothing_to_read() -> None:
    machine = Machine()
    assert machine.figures([CODE], 1) == (1601, 0)
    machine.gateway.receive(machine.front_end.client(), Control("c", "flush_cache"))
    machine.run()
    assert isinstance(machine.front_end.answers()[-1], Done)
    assert (machine.figures([CODE], 1), machine.gateway.counters["caches_lost"]) == ((1601, 0), 1)


def test_another_engine_has_nothing_to_read_and_a_call_on_its_way_creates_there() -> None:
    machine = Machine()
    assert machine.figures([CODE], 1) == (1601, 0)
    label = machine.send((Text(CODE), END), Caching((CacheMark(1),)))
    machine.gateway.engine_lost("killed")
    machine.start_engine()
    machine.gateway.engine_ready(6_000)
    machine.run()
    final = machine.front_end.answers()[-1]
    assert isinstance(final, Final)
    assert (final.id, final.usage.cache_write_tokens, machine.kept) == (label, 1601, 1601)
    assert machine.figures([CODE], 1) == (0, 1601)


def test_lost_frames_release_everything() -> None:
    machine = Machine()
    machine.figures([CODE], 1)
    machine.send((Text("n" * 1100), END), Caching((CacheMark(1),)))
    machine.gateway.events_lost(1)
    machine.run()
    assert (machine.kept, machine.figures([CODE], 1)) == (1101, (1601, 0))


def steps(machine: Machine, count: int) -> None:
    for _ in range(count):
        for event in machine.engine.step():
            machine.gateway.engine_event(event)


LONG = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)


def test_a_prefix_is_read_while_the_answer_of_its_creator_goes_on() -> None:
    machine = Machine()
    machine.send((Text(CODE), END), Caching((CacheMark(1),)), sampling=LONG, stream=True, begun=True)
    steps(machine, 7)
    first, *others = machine.front_end.answers()
    assert isinstance(first, Chunk)
    assert first.begun == Begun(1602, 0, CachingUsage((MarkUsage(1601, 0, 1601, 300.0),)))
    assert others
    assert all(isinstance(chunk, Chunk) and chunk.begun is None for chunk in others)
    second = machine.send((Text(CODE), END), Caching((CacheMark(1),)), stream=True, begun=True)
    steps(machine, 5)
    began = [
        answer.begun for answer in machine.front_end.answers() if isinstance(answer, Chunk) and answer.id == second
    ]
    assert began == [Begun(1602, 1601, CachingUsage((MarkUsage(1601, 1601, 0, 300.0),)))]
    (final,) = [answer for answer in machine.front_end.answers() if isinstance(answer, Final)]
    assert final.caching is not None
    assert (final.id, final.caching.created, final.caching.read) == (second, 0, 1601)


def test_the_figures_of_a_prompt_come_with_its_first_chunk_where_they_are_asked_for() -> None:
    machine = Machine()
    prompt = (Text(CODE), END)
    machine.send(prompt, None, sampling=LONG, stream=True)
    machine.send(prompt, Caching((CacheMark(1),)), sampling=LONG, stream=True)
    steps(machine, 9)
    assert all(isinstance(chunk, Chunk) and chunk.begun is None for chunk in machine.front_end.answers())
    label = machine.send(prompt, None, stream=True, begun=True)
    machine.run()
    chunk, final = (answer for answer in machine.front_end.answers() if answer.id == label)
    assert isinstance(chunk, Chunk)
    assert isinstance(final, Final)
    assert chunk.begun == Begun(final.usage.prompt_tokens, final.usage.cached_tokens)
    for fields in ({"stream": False}, {"stream": True, "sampling": msgspec.structs.replace(LONG, n=2)}):
        refused = machine.send(prompt, None, begun=True, **fields)
        (failure,) = (answer for answer in machine.front_end.answers() if answer.id == refused)
        assert isinstance(failure, Failure)
        assert failure.message.startswith("begun is for the first chunk")


def test_what_is_computed_stays_kept_though_its_call_does_not_end_well() -> None:
    machine = Machine()
    caching = Caching((CacheMark(1),))
    machine.send((Text(CODE), END), caching, sampling=LONG)
    steps(machine, 7)
    machine.gateway.client_lost(machine.front_end.client())
    machine.run()
    assert (machine.kept, len(machine.gateway._caches)) == (1601, 1)
    assert machine.figures([CODE], 1) == (0, 1601)


@pytest.mark.parametrize("end", ["lost", "late", "aborted"])
def test_calls_that_end_before_their_prompt_is_computed_leave_no_pin(end: str) -> None:
    machine = Machine()
    label = machine.send(
        (Text(CODE), END),
        Caching((CacheMark(1),)),
        sampling=LONG,
        origin=Origin(timeout=5.0 if end == "late" else None),
    )
    steps(machine, 2)
    match end:
        case "lost":
            machine.gateway.client_lost(machine.front_end.client())
        case "late":
            machine.clock.advance(7.0)
            machine.gateway.tick()
        case _:
            machine.gateway.receive(machine.front_end.client(), Abort(label))
    machine.run()
    assert (machine.kept, len(machine.gateway._caches), machine.gateway._caches._creating) == (0, 0, {})
    assert machine.figures([CODE], 1) == (1601, 0)


def test_a_message_that_cannot_be_sent_costs_no_call() -> None:
    machine = Machine()
    machine.figures([CODE], 1)
    healthy = machine.engine.handle_message

    def broken(message: ToEngine) -> None:
        if not isinstance(message, EngineGenerate):
            raise OSError
        healthy(message)

    machine.engine.handle_message = broken  # type: ignore[method-assign]
    assert machine.figures([CODE], 1) == (0, 1601)
    machine.engine.handle_message = healthy  # type: ignore[method-assign]
    machine.faults = FailAt("gateway.send", 1, OSError())
    machine.send((Text("m" * 1100), END), Caching((CacheMark(1),)))
    machine.run()
    assert isinstance(machine.front_end.answers()[-1], Failure)
    assert machine.kept == 1601


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("caching", "word"),
    [
        (Caching((CacheMark(2), CacheMark(1))), "ascend"),
        (Caching((CacheMark(1), CacheMark(1))), "ascend"),
        (Caching((CacheMark(3),)), "1 to 2"),
        (Caching((CacheMark(0),)), "1 to 2"),
        (Caching((CacheMark(1),), (0,)), "blocks"),
        (Caching((CacheMark(1, 0.0),)), "ttl=0.0"),
        (Caching((CacheMark(1, float("nan")),)), "ttl=nan"),
        (Caching((CacheMark(1, 90_000.0),)), "86400"),
        (Caching((CacheMark(1),), (), -1), "look_back"),
        (Caching((CacheMark(1),), minimum=0), "minimum"),
    ],
)
def test_wrong_marks_are_refused_with_what_to_write(caching: Caching, word: str) -> None:
    machine = Machine()
    machine.send((Text("a"), END), caching)
    (failure,) = machine.front_end.answers()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error(), UmbelError)
    assert word in failure.message
    assert failure.kind == "ParameterError"


def test_a_request_without_marks_that_count_is_served() -> None:
    final = Machine().ask((Text("a"), END), Caching(()))
    assert (final.caching, final.usage) == (CachingUsage(), Usage(3, 0, 1, 1))
