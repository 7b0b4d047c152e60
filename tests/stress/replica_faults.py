"""Mixed traffic on a server whose engines are killed and stopped at random, compared with a server of one engine.

    python -m tests.stress.replica_faults --replicas 3 --seconds 300

Each client asks, reads to the end, notes what came, and asks again. What came is judged at the end: a text that ended
is that of the server without faults, a stream that was cut has a beginning of it and an error that says so, and what
had sent no byte was answered.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .serving import Answer, Serving, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WHOLE = {"model": "oracle", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
HANGS = 60.0  # seconds without an end; the longest answer takes some seconds, a restart included


def _bodies() -> list[dict[str, Any]]:
    """Returns the requests: some share a long prefix, some share nothing."""
    shared = "A long text that many requests begin with, so that it lies in a cache. " * 4
    found: list[dict[str, Any]] = []
    for number in range(8):
        prompt = (shared if number % 2 else "") + f"{number} is a number: "
        found.append({**WHOLE, "prompt": prompt})
        found.append({**WHOLE, "prompt": prompt, "stream": True})
        found.append({**WHOLE, "prompt": prompt, "n": 3, "temperature": 1.0, "seed": number})
        found.append({**WHOLE, "prompt": prompt, "stream": True, "n": 2, "temperature": 0.7, "seed": number})
        chat = {"model": "oracle", "max_tokens": 64, "temperature": 0, "response_format": SCHEMA_FORMAT}
        found.append({**chat, "messages": [{"role": "user", "content": prompt}]})
    return found


BODIES = _bodies()
BAD = (
    {**WHOLE, "prompt": "a", "max_tokens": -1},
    {**WHOLE, "prompt": "a" * 40_000},
    {**WHOLE, "prompt": "a", "nonsense": 1},
    {"model": "other", "prompt": "a"},
)


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def texts_of(answer: Answer) -> list[str]:
    """Returns the texts of an answer, as far as they came, by their index."""
    found: dict[int, str] = {}
    streamed = "event-stream" in answer.headers["content-type"]
    for event in answer.events if streamed else [answer.json]:
        for choice in event.get("choices", ()):
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True, slots=True)
class Ending:
    """One request and what came of it. `answer`: None for one that was given up on purpose."""

    number: int  # of BODIES; -1 for a bad one
    answer: Answer | None
    seconds: float


class Traffic:
    """Clients that ask until they are told to stop."""

    def __init__(self, server: Serving, clients: int, draw: random.Random) -> None:
        self.endings: list[Ending] = []
        self.hanging = 0
        self._server = server
        self._draws = [random.Random(draw.random()) for _ in range(clients)]
        self._stopped = False

    async def run(self, seconds: float) -> None:
        clients = [asyncio.create_task(self._client(draw)) for draw in self._draws]
        await asyncio.sleep(seconds)
        self._stopped = True
        await asyncio.gather(*clients)

    async def _client(self, draw: random.Random) -> None:
        while not self._stopped:
            began, kind = time.monotonic(), draw.random()
            number = -1 if kind < 0.08 else draw.randrange(len(BODIES))
            body: dict[str, Any] = draw.choice(BAD) if number < 0 else BODIES[number]
            try:
                async with asyncio.timeout(HANGS):
                    if number >= 0 and kind < 0.2:
                        await self._give_up(body, draw)
                        answer = None
                    else:
                        answer = await self._server.post(_path(body), body)
            except TimeoutError:
                self.hanging += 1
                continue
            self.endings.append(Ending(number, answer, time.monotonic() - began))
            if answer is not None and answer.status == 503:
                await asyncio.sleep(float(answer.headers.get("retry-after", "1")))

    async def _give_up(self, body: dict[str, Any], draw: random.Random) -> None:
        """Sends a request, and leaves after a moment."""
        async with self._server.sending("POST", _path(body), body):
            await asyncio.sleep(draw.random() * 0.5)


class Losses:
    """Kills or stops an engine every two seconds or so, sometimes all of them.

    Only engines that were ready are chosen: one that dies three times while it starts is given up.
    """

    def __init__(self, server: Serving, draw: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._server = server
        self._draw = draw
        self._ready: dict[int, psutil.Process] = {}

    async def run(self, seconds: float) -> None:
        draw, end = self._draw, time.monotonic() + seconds
        while time.monotonic() < end - 5.0:
            again = time.monotonic() + 1.0 + 2.0 * draw.random()
            while time.monotonic() < again:
                await self._look()
                await asyncio.sleep(0.1)
            living = [each for each in self._ready.values() if each.is_running()]
            by, name = (signal.SIGKILL, "killed") if draw.random() < 0.6 else (signal.SIGSTOP, "stopped")
            if draw.random() < 0.1:
                name = f"all {name}"
            else:
                living = [draw.choice(living)] if living else []
            for engine in living:
                del self._ready[engine.pid]
                with suppress(psutil.NoSuchProcess):
                    engine.send_signal(by)
            self.done[name] += bool(living)

    async def _look(self) -> None:
        """Notes who is ready, when as many are as there are engines."""
        states = (await self._server.ask("GET", "/health")).json.get("replicas", [])
        engines = self._server.engines()
        if states.count("ready") == len(engines):
            self._ready |= {engine.pid: engine for engine in engines}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of all requests. `wrong`, `lost`: a line for each that must not be."""

    counts: Counter[str]
    wrong: list[str]
    lost: list[str]
    hanging: int
    slowest: float
    slowest_refusal: float

    @property
    def is_clean(self) -> bool:
        return not self.wrong and not self.lost and not self.hanging

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return (
            f"{sum(self.counts.values())} requests: {counts}\n"
            f"wrong {len(self.wrong)}, lost {len(self.lost)}, hanging {self.hanging}; slowest answer "
            f"{self.slowest:.2f} s, slowest 503 of a server without an engine {self.slowest_refusal:.3f} s\n"
            + "\n".join([*self.wrong[:10], *self.lost[:10]])
        )


def judge(traffic: Traffic, expected: Sequence[Sequence[str]]) -> Verdict:
    """Compares what came with the texts of a server without faults."""
    counts: Counter[str] = Counter()
    wrong, lost = [], []
    slowest = slowest_refusal = 0.0
    for ending in traffic.endings:
        answer = ending.answer
        if answer is None:
            counts["given up by the client"] += 1
            continue
        slowest = max(slowest, ending.seconds)
        if ending.number < 0:
            refused = answer.status in (400, 404)
            counts["bad, refused" if refused else "bad, while no engine ran"] += 1
            if not refused and answer.status != 503:
                lost.append(f"a bad request got {answer.status}")
            continue
        body, right = BODIES[ending.number], expected[ending.number]
        if answer.status == 503 and answer.json["error"]["code"] == "restarting":
            counts["503, no engine ran"] += 1
            slowest_refusal = max(slowest_refusal, ending.seconds)
            if "retry-after" not in answer.headers:
                wrong.append("a 503 without Retry-After")
        elif answer.status == 503 and "it was asked again" in answer.json["error"]["message"]:
            counts["503, lost by two engines"] += 1
        elif answer.status != 200 or not answer.whole:
            lost.append(f"request {ending.number} {body}: {answer.status}, {answer.content[:300]!r}")
        elif answer.error:
            texts = texts_of(answer)
            counts["cut after its beginning, with an error"] += 1
            if not body.get("stream") or not any(texts) or "the engine died while" not in answer.error:
                lost.append(f"request {ending.number}: {texts} and {answer.error!r}")
            if not all(whole.startswith(text) for whole, text in zip(right, texts, strict=False)):
                wrong.append(f"request {ending.number}: {texts}, not the beginning of {right}")
        elif texts_of(answer) == right:
            counts["right"] += 1
        else:
            wrong.append(f"request {ending.number}: {texts_of(answer)}, not {right}")
    return Verdict(counts, wrong, lost, traffic.hanging, slowest, slowest_refusal)


async def stress(server: Serving, one: Serving, seconds: float, seed: int, clients: int = 12) -> Verdict:
    """Runs all of it. `one`: a server of one engine, for the texts that are right."""
    await one.ready()
    answers = await asyncio.gather(*(one.post(_path(body), body) for body in BODIES))
    expected = [texts_of(answer) for answer in answers]
    await server.ready()
    traffic, losses = Traffic(server, clients, random.Random(seed)), Losses(server, random.Random(seed))
    await asyncio.gather(losses.run(seconds), traffic.run(seconds))
    await server.ready()
    await server.rest()
    verdict = judge(traffic, expected)
    again = (await server.figures())["umbel_retried_requests_total"]
    print(f"\nengines: {dict(losses.done)}; sent again: {again:.0f}")
    print(verdict)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = {"debug": {"step_delay": 0.01}, "pool_tokens": 16_384}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        replicas = ("--replicas", str(given.replicas))
        with serving(Path(first), options, *replicas) as server, serving(Path(second), options) as one:
            try:
                assert asyncio.run(stress(server, one, given.seconds, given.seed)).is_clean
            except BaseException:
                print(server.log[-8000:], flush=True)
                raise


if __name__ == "__main__":
    main()
