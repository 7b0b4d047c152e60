"""Sixteen faults of providers, twenty times each, at both backends, every other time streamed.

What must hold: every call ends; a text is the provider's text, whole and once; no call is made more than four times,
and none again once its answer has begun; a key is told to nobody.
"""

import asyncio
import logging
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import umbel as ul
from umbel.interpreter.backends.hosted import transport
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.fakes.provider import FakeProvider
from umbel.lang.chat_template import Turn
from umbel.lang.errors import UmbelError
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import Backend, Chunk, Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.testing import FakeAnthropic, FakeOpenAI, Fault, Unreachable

TIMES = 20
FEW = 4
ANSWER = "Zwölf Boxkämpfer jagen Víktor quer über den großen Sylter Deich."
TRIES = 4  # the first one and three more
QUICK = 0.05  # seconds that a call waits for what never comes
PATIENT = 0.5  # the same, where it comes at the second try
LONG = 30.0  # seconds that no call needs

AGAIN = {
    Fault.RATE_LIMIT_AND_WHEN,
    Fault.RATE_LIMIT,
    Fault.SERVER_ERROR,
    Fault.UNAVAILABLE,
    Fault.DISCONNECT,
    Fault.SILENCE,
}
LEGAL = {Fault.SPLIT_UTF8, Fault.SPLIT_JSON}


@dataclass
class World:
    """One fake with a backend on it, and what was slept.

    Attributes:
        stays: every request meets the fault; else those that come for the first time.
    """

    kind: str
    fault: Fault
    stays: bool
    waits: list[float] = field(default_factory=list)
    chance: Callable[[], float] = field(default_factory=lambda: random.Random(7).random)

    def server(self) -> FakeProvider:
        seen: set[str] = set()

        def faults(number: int) -> Fault | None:
            text = server.requests[-1].text
            met = self.stays or text not in seen
            seen.add(text)
            return self.fault if met else None

        make = FakeAnthropic if self.kind == "anthropic" else FakeOpenAI
        server: FakeProvider = make(lambda text: ANSWER, faults=faults)
        return server

    def backend(self, base_url: str, api_key: str, connect: float = LONG) -> Backend:
        async def sleep(seconds: float) -> None:
            self.waits.append(seconds)

        quick = QUICK if self.stays else PATIENT
        limits = {
            "timeout": LONG,
            "connect_timeout": connect,
            "first_byte_timeout": quick if self.fault is Fault.SILENCE else LONG,
            "idle_timeout": quick if self.fault is Fault.IDLE else LONG,
        }
        around = Environment(sleep=sleep, chance=self.chance)
        if self.kind == "anthropic":
            return ul.Anthropic("claude-haiku-4-5", base_url=base_url, api_key=api_key, environment=around, **limits)
        return ul.OpenAI("gpt-4o", base_url=base_url, api_key=api_key, environment=around, **limits)


def prompt_of(backend: Backend, number: int) -> tuple[Part, ...]:
    template = backend.chat_template
    asked = f"Write pangram {number}."
    turn = Turn("user", asked)
    return (*template.open([], "user"), Text(asked), *template.close([turn]), *template.open([turn], "assistant"))


async def ask(backend: Backend, number: int) -> tuple[str, Final | UmbelError]:
    """What was streamed, and how it ended. Every other call streams."""
    seen: list[str] = []
    request = GenRequest("1", prompt_of(backend, number), SamplingParams(max_tokens=40), stream=number % 2 == 1)
    try:
        async for event in backend.generate(request):
            if isinstance(event, Chunk):
                seen.append(event.text)
            else:
                return "".join(seen), event
    except UmbelError as error:
        return "".join(seen), error
    raise AssertionError("the call ended without an ending")


def check(outcome: tuple[str, Final | UmbelError]) -> bool:
    """Whether a call gave the text; what it gave is honest in any case."""
    seen, ending = outcome
    assert (ANSWER + ANSWER[-1] * len(seen)).startswith(seen), "an answer that never ends repeats its last token"
    if isinstance(ending, Final):
        assert ending.completions[0].text == ANSWER
        assert seen in ("", ANSWER)
    return isinstance(ending, Final)


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the bytes of an answer is met sooner: what happens there does not depend on its size."""
    monkeypatch.setattr(transport, "MOST_BYTES", 1 << 15)


@pytest.fixture(params=["openai", "anthropic"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that anybody logs."""
    with caplog.at_level(logging.DEBUG):
        for name in ("openai", "anthropic", "httpx2", "httpcore2", "asyncio", "umbel"):
            logging.getLogger(name).setLevel(logging.DEBUG)
        yield caplog
        for name in ("openai", "anthropic", "httpx2", "httpcore2", "asyncio", "umbel"):
            logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_one_fault_costs_one_more_call_or_an_error(kind: str, fault: Fault) -> None:
    world = World(kind, fault, stays=False)

    async def run() -> int:
        with world.server() as server:
            backend = world.backend(server.base_url, server.api_key)
            try:
                await backend.start()
                outcomes = await asyncio.gather(*(ask(backend, number) for number in range(TIMES)))
                well = [check(outcome) for outcome in outcomes]
                made = len(server.requests)
                assert check(await ask(backend, 0)), "the backend is well when its provider is"
                assert server.elsewhere == []
            finally:
                await backend.close()
        assert all(well) or fault not in AGAIN | LEGAL
        assert not any(well) or fault in AGAIN | LEGAL | {Fault.NO_DONE}
        return made

    made = asyncio.run(run())
    assert made == TIMES * (2 if fault in AGAIN else 1) or (fault is Fault.SILENCE and made <= TIMES * TRIES)
    assert len(world.waits) == made - TIMES


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_a_fault_that_stays_ends_every_call_and_tells_no_key(
    kind: str, fault: Fault, told: pytest.LogCaptureFixture
) -> None:
    world = World(kind, fault, stays=True)
    errors: list[UmbelError] = []

    async def run() -> str:
        with world.server() as server:
            backend = world.backend(server.base_url, server.api_key)
            try:
                await backend.start()
                outcomes = await asyncio.gather(*(ask(backend, number) for number in range(FEW)))
                for outcome in outcomes:
                    check(outcome)
                    if isinstance(outcome[1], UmbelError):
                        errors.append(outcome[1])
                assert len(server.requests) == FEW * (TRIES if fault in AGAIN else 1)
                assert server.elsewhere == []
                assert server.api_key not in repr(backend)
                return server.api_key
            finally:
                await backend.close()

    key = asyncio.run(run())
    if fault not in LEGAL | {Fault.NO_DONE}:
        assert len(errors) == FEW
    for error in errors:
        story = "".join(traceback.format_exception(error))
        assert key not in story
        assert key not in repr(error.__dict__)
        assert all(key not in repr(each) for each in chain(error))
    assert key not in told.text
    assert all(key not in str(vars(record)) for record in told.records)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def test_waits_spread_and_grow_and_heed_the_server(kind: str) -> None:
    world = World(kind, Fault.RATE_LIMIT, stays=True)
    heeded = World(kind, Fault.RATE_LIMIT_AND_WHEN, stays=True)

    async def run(world: World, times: int) -> None:
        with world.server() as server:
            backend = world.backend(server.base_url, server.api_key)
            await asyncio.gather(*(ask(backend, number) for number in range(times)))
            await backend.close()

    asyncio.run(run(world, TIMES))
    assert len(set(world.waits)) == 3 * TIMES
    assert 0 <= min(world.waits) < 0.1
    assert 1.5 < max(world.waits) <= 2.0, "the bound doubles from half a second"
    asyncio.run(run(heeded, FEW))
    assert all(wait >= 1 for wait in heeded.waits), "the server says one second"


def test_a_server_that_cannot_be_reached_is_tried_four_times(kind: str) -> None:
    world = World(kind, Fault.DISCONNECT, stays=True)

    async def run() -> list[tuple[str, Final | UmbelError]]:
        with Unreachable() as nowhere:
            backend = world.backend(nowhere.base_url, "sk-never-told-to-anybody", connect=QUICK)
            try:
                return await asyncio.gather(*(ask(backend, number) for number in range(FEW)))
            finally:
                await backend.close()

    for seen, ending in asyncio.run(run()):
        assert seen == ""
        assert isinstance(ending, ul.ConnectionLostError | ul.DeadlineError)
        assert "sk-never-told-to-anybody" not in "".join(traceback.format_exception(ending))
    assert len(world.waits) == FEW * (TRIES - 1)
