"""A soak and a shortage of memory: whether a runtime in two processes stays right under what comes at once.

The soak sends forks, constrained texts, long prompts, priorities and calls that are given up, for so many seconds, and
among them controls: greedy texts that are checked afterwards, on an empty cache and alone. Their tokens must be the
most likely ones, each after those before it, but for what rounding in batches of another size may change.

The shortage takes the device's memory until a step finds none. The runtime is to try again with fewer rows, and to
answer every call.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import Chunk, ConstraintSpec, Done, Final, GenRequest, Origin
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits, Runner
from umbel.srt.runners.memory import room_for_step

from ..figures import Figure, Unit

GROUP = "soak"
SAID = " the quick brown fox jumps over a lazy dog while seven small birds sing about rain and bread"
MOST_GAP = {"bfloat16": 0.25, "float32": 2e-3}  # of log-probabilities, from the most likely token to the one that came
GROWTH, GROWTH_BYTES = 0.10, 64 << 20  # that processes may grow by after the first third of a soak, the larger of both
_CHECKS = 200  # looks at the pool after a soak, and the pause between two
_PAUSE = 0.05
_LEAVING = tuple(size << 20 for size in (192, 96, 48, 16))  # bytes of the device that a shortage leaves, by turns


class Backend(Protocol):
    """The part of a runtime that is used."""

    def generate(self, request: GenRequest, /) -> AsyncGenerator[Chunk | Final, None]: ...

    async def control(self, verb: str, /) -> Done: ...


@dataclass(frozen=True, slots=True)
class SoakSizes:
    """
    Attributes:
        seconds: in which calls are sent; those that run then are waited for.
        concurrency: calls at once, a fork counted as one.
        long: words of long prompts. tokens: of an answer at most.
        controls: texts that are checked, at most.
    """

    seconds: float
    concurrency: int
    long: int
    tokens: int
    controls: int
    dtype: str


def on_device(seconds: float) -> SoakSizes:
    return SoakSizes(seconds, 48, 6_000, 96, 64, "bfloat16")


def on_host(seconds: float) -> SoakSizes:
    return SoakSizes(seconds, 4, 120, 8, 6, "float32")


@dataclass(frozen=True, slots=True)
class Control:
    """A greedy text that came while all else ran."""

    prompt: str
    prompt_tokens: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What became of the calls of a soak, by kind."""

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    tokens: int = 0


class Soak:
    """Sends calls to a backend. Prompts and kinds come from a seed.

    Args:
        clock: seconds that pass.
    """

    def __init__(self, backend: Backend, sizes: SoakSizes, clock: Callable[[], float]) -> None:
        self.outcome = Outcome()
        self._backend = backend
        self._sizes = sizes
        self._clock = clock
        self._random = random.Random(7)
        self._numbers = itertools.count()
        self._prefixes = [self._words(40) for _ in range(4)]

    async def run(self) -> None:
        """Sends calls for the seconds of the sizes, and waits for the last of them."""
        end = self._clock() + self._sizes.seconds
        kinds = [self._control, self._fork, self._constrained, self._long, self._given_up, self._urgent]

        async def worker(number: int) -> None:
            for turn in itertools.count(number):
                await self._counted(kinds[turn % len(kinds)])
                if self._clock() >= end:
                    return

        await asyncio.gather(*(worker(number) for number in range(self._sizes.concurrency)))

    async def check(self) -> list[float]:
        """Returns for each control the most that one of its tokens is behind the most likely one, alone and on an empty
        cache."""
        await self._backend.control("flush_cache")
        return [await self._gap(control) for control in self.outcome.controls]

    async def squeezed(self, squeeze: "Squeeze") -> tuple[str, int]:
        """Sends long prompts and controls at once while memory is taken, by turns, until a step found none.

        Returns:
            How much was left in the last turn, and how many calls were sent in all.
        """
        before, sent, turns = await facts(self._backend), 0, list[str]()
        for block in squeeze.turns():
            with block as left:
                turns.append(left)
                calls = [self._counted(kind) for kind in (self._long, self._control) for _ in range(8)]
                sent += len(calls)
                await asyncio.gather(*calls)
            if (await facts(self._backend))["memory_shortages"] > before["memory_shortages"]:
                break
        return turns[-1], sent

    async def _counted(self, kind: Callable[[], Awaitable[None]]) -> None:
        name = kind.__name__.removeprefix("_")  # type: ignore[attr-defined]  # each is a method
        self.outcome.asked[name] += 1
        try:
            await kind()
        except Exception as error:
            self.outcome.errors.append(f"{name}: {type(error).__name__}: {error}")
        else:
            self.outcome.answered[name] += 1

    # ------------------------------------------------------------------ kinds of calls

    async def _control(self) -> None:
        prompt = self._prefix() + self._words(6)
        final = await self._final(prompt, self._greedy())
        if len(self.outcome.controls) < self._sizes.controls:
            answer = final.completions[0]
            self.outcome.controls.append(
                Control(prompt, final.usage.prompt_tokens, answer.text, tuple(answer.token_ids))
            )

    async def _fork(self) -> None:
        prefix, group = self._prefix() + self._words(30), f"fork-{next(self._numbers)}"
        branches = [prefix + self._words(3) for _ in range(4)]
        origin = Origin(program_id=group, fork_group=group)
        await asyncio.gather(*(self._final(text, self._drawn(), origin=origin) for text in branches))

    async def _constrained(self) -> None:
        source = self._random.choice(["[0-9]{2}-[a-z]{3}", "(yes|no|perhaps)( please)?"])
        await self._final(self._prefix(), self._drawn(), constraint=ConstraintSpec("regex", source))

    async def _long(self) -> None:
        await self._final(self._words(self._sizes.long), self._drawn())

    async def _given_up(self) -> None:
        """Ends the call after its first piece."""
        request = self._request(self._words(20), self._drawn(), stream=True)
        events = self._backend.generate(request)
        async for _ in events:
            break
        await events.aclose()

    async def _urgent(self) -> None:
        origin = Origin(priority=self._random.randint(-3, 3))
        await self._final(self._prefix() + self._words(4), self._drawn(), origin=origin)

    # ------------------------------------------------------------------ how

    async def _gap(self, control: Control) -> float:
        if not control.token_ids:
            return 0.0
        prompt = (Text(control.prompt), Generated(control.text, control.token_ids))
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=1, prompt_logprobs_from=control.prompt_tokens
        )
        final = await self._end(GenRequest(f"check-{next(self._numbers)}", prompt, sampling))
        told = final.prompt_logprobs
        assert [one.token_id for one in told] == list(control.token_ids), "all of them are told"
        return max(one.top[0][2] - one.logprob for one in told)

    async def _final(self, prompt: str, sampling: SamplingParams, **more: object) -> Final:
        final = await self._end(self._request(prompt, sampling, **more))
        self.outcome.tokens += final.usage.completion_tokens
        return final

    def _request(self, prompt: str, sampling: SamplingParams, **more: object) -> GenRequest:
        return GenRequest(f"soak-{next(self._numbers)}", (Text(prompt),), sampling, **more)  # type: ignore[arg-type]

    async def _end(self, request: GenRequest) -> Final:
        async for event in self._backend.generate(request):
            if isinstance(event, Final):
                return event
        raise AssertionError("a request without an end")

    def _greedy(self) -> SamplingParams:
        return SamplingParams(max_tokens=self._sizes.tokens, temperature=0.0, ignore_eos=True)

    def _drawn(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._sizes.tokens, temperature=0.8, top_p=0.95, seed=self._random.getrandbits(31)
        )

    def _prefix(self) -> str:
        return self._random.choice(self._prefixes)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(SAID.split(), k=count)) + " "


async def facts(backend: Backend) -> dict[str, float]:
    """Returns the numbers that a runtime tells of itself."""
    told = (await backend.control("info")).result
    return {name: value for name, value in told.items() if isinstance(value, int | float)}


async def whole_pool(backend: Backend) -> tuple[bool, str]:
    """Waits until an idle runtime has checked its pool and tree; returns whether all slots are accounted for."""
    found = await facts(backend)
    for _ in range(_CHECKS):
        found = await facts(backend)
        resting = not found["running"] and not found["waiting"]
        if resting and found["idle_checks"] > 0:
            break
        await asyncio.sleep(_PAUSE)
    slots = found["free_slots"] + found["cached_slots"]
    right = slots == found["total_slots"] and not found["integrity_failures"] and not found["running"]
    said = (
        f"{found['free_slots']:.0f} free and {found['cached_slots']:.0f} cached of {found['total_slots']:.0f} slots, "
        f"{found['idle_checks']:.0f} checks, {found['integrity_failures']:.0f} contradictions"
    )
    return right, said


def soak_figures(
    outcome: Outcome, gaps: list[float], pool: tuple[bool, str], memory: tuple[int, int], sizes: SoakSizes
) -> list[Figure]:
    """Returns what a soak has shown. memory: bytes of the processes after a third of it and at its end."""
    asked, answered = sum(outcome.asked.values()), sum(outcome.answered.values())
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(outcome.answered.items()))
    first = f"; first: {outcome.errors[0]}" if outcome.errors else ""
    most = MOST_GAP[sizes.dtype]
    right, worst = sum(gap <= most for gap in gaps), max(gaps, default=0.0)
    early, late = memory
    calm = late - early <= max(GROWTH * early, GROWTH_BYTES)
    said = f"{early / 2**20:,.0f} MiB after a third, {late / 2**20:,.0f} at the end"
    return [
        _passed("calls answered", answered, asked, f"{kinds}, {outcome.tokens} tokens in {sizes.seconds:g} s{first}"),
        _passed(
            "controls as alone", right, len(gaps), f"at most {worst:.2g} behind the likeliest token, allowed {most:g}"
        ),
        _passed("pool whole", pool[0], 1, pool[1]),
        _passed("memory of the processes holds", calm, 1, said),
    ]


def _passed(name: str, count: float, of: int, note: str) -> Figure:
    return Figure(GROUP, name, Unit.PASSED, float(count), limit=float(of), must=float(of), note=note)


# ------------------------------------------------------------------------------------------ shortage

SHORTAGE = "calls answered while memory is short"


class Squeeze(Protocol):
    """Takes memory away."""

    def turns(self) -> Iterator[AbstractContextManager[str]]:
        """Yields blocks within which less and less is left; each says how much."""


class DeviceSqueeze:
    """Holds the memory of a CUDA device in a tensor of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def turns(self) -> Iterator[AbstractContextManager[str]]:
        for left in _LEAVING:
            yield self._held(left)

    @contextmanager
    def _held(self, left: int) -> Iterator[str]:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        held: list[torch.Tensor] = []
        with suppress(torch.OutOfMemoryError):  # less is free than it seems
            held.append(torch.empty(max(1, free - left), dtype=torch.uint8, device=self._device))
        try:
            yield f"{torch.cuda.mem_get_info(self._device)[0] >> 20} MiB left"
        finally:
            held.clear()
            torch.cuda.empty_cache()


class ScarceRunner:
    """A runner whose steps find no memory if they have more than `most` rows: a device with little, for dry runs.

    What it does not have is the other runner's.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.most: int | None = None

    def forward(self, batch: Batch) -> Logits:
        with room_for_step(batch.rows):
            if self.most is not None and batch.rows > self.most:
                raise MemoryError
        return self._runner.forward(batch)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def turns(self) -> Iterator[AbstractContextManager[str]]:
        for most in (16, 4):
            yield self._limited(most)

    @contextmanager
    def _limited(self, most: int) -> Iterator[str]:
        self.most = most
        try:
            yield f"steps of {most} rows at most"
        finally:
            self.most = None


async def shortage_figure(backend: Backend, squeeze: Squeeze, sizes: SoakSizes) -> Figure | None:
    """Returns what became of calls while a step found no memory; None where every step found some."""
    soak, before = Soak(backend, sizes, time.monotonic), await facts(backend)
    said, asked = await soak.squeezed(squeeze)
    after = await facts(backend)
    grown = {
        name: after[name] - before[name]
        for name in ("memory_shortages", "failed_steps", "pool_rebuilds", "recomputed_tokens")
    }
    if not grown["memory_shortages"]:
        return None
    counted = ", ".join(f"{name.replace('_', ' ')} {count:.0f}" for name, count in grown.items())
    first = f"; first: {soak.outcome.errors[0]}" if soak.outcome.errors else ""
    answered = asked - len(soak.outcome.errors)
    return _passed(SHORTAGE, answered, asked, f"{said}, {counted}{first}")
