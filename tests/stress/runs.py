"""What is asked of a runtime while the machine is busy. Every figure is an argument."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
from umbel.interpreter.backends.runtime import Runtime
from umbel.lang.errors import UmbelError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Chunk, ConstraintSpec, Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.lang.transport.process_life import read_process

CONSTRAINTS = (
    ConstraintSpec("regex", r"[a-c]{2,4}"),
    ConstraintSpec("regex", r"-?(0|[1-9][0-9]{0,5})"),
    ConstraintSpec("regex", r"(yes|no|perhaps), because [a-z ]{5,20}\."),
    ConstraintSpec("regex", r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    ConstraintSpec("json_schema", '{"type": "integer", "minimum": 0, "maximum": 1000}'),
    ConstraintSpec("json_schema", '{"enum": ["red", "green", {"mixed": [1, 2]}]}'),
    ConstraintSpec("json_schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
    '"age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], '
    '"additionalProperties": false}'),
    ConstraintSpec("json_schema", '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}'),
)  # fmt: skip
TOKENS = 24  # of an answer at most; a constrained one is closed there


def requests(count: int, *, constrained: bool) -> Iterator[GenRequest]:
    """Every one of them has its own prompt and seed, so that no cache answers it; constraints take turns."""
    kinds = itertools.cycle(CONSTRAINTS)
    for number in range(count):
        sampling = SamplingParams(max_tokens=TOKENS * (2 if constrained else 1), temperature=0.7, seed=number)
        prompt = (Text(f"Question {number} of {'a form' if constrained else 'many'}: what comes next? "),)
        kind = next(kinds) if constrained else None
        yield GenRequest(f"{'c' if constrained else 'f'}{number}", prompt, sampling, constraint=kind)


def texts(runtime: Runtime, asked: list[GenRequest], *, at_once: int) -> list[str]:
    """The text of each request, or the error it ended with."""

    async def one(request: GenRequest, places: asyncio.Semaphore) -> str:
        async with places:
            try:
                async for event in runtime.generate(request):
                    if isinstance(event, Final):
                        return event.completions[0].text
            except UmbelError as error:
                return f"{type(error).__name__}: {error}"
        return "no ending"

    async def run() -> list[str]:
        places = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(one(request, places) for request in asked))

    return asyncio.run(run())


def losses(runtime: Runtime) -> tuple[int, int, int]:
    """Engines that ended, and requests that were asked a second engine or gateway."""
    facts = runtime.get_server_info()
    names = ("gateway_engine_losses", "gateway_retried_requests", "client_retried_requests")
    first, second, third = (int(facts.get(name, 0)) for name in names)
    return first, second, third


def gateway_of(runtime: Runtime) -> psutil.Process:
    assert runtime._process is not None
    return psutil.Process(runtime._process.process_id)


def engine_of(runtime: Runtime) -> psutil.Process:
    (engine,) = (
        child for child in gateway_of(runtime).children() if "umbel.srt.engine.process" in " ".join(child.cmdline())
    )
    return engine


def seconds_to_notice(runtime: Runtime, stop: Callable[[], psutil.Process], error: type[UmbelError]) -> float:
    """Stops a process while a text streams → seconds until the stream ends with `error`. What this program and the
    gateway waited for a core meanwhile is left out: they could not notice anything."""

    async def run() -> float:
        sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        request = GenRequest("long", (Text("prompt: "),), sampling, stream=True)
        stopped_at, before = 0.0, 0.0
        observers = (os.getpid(), gateway_of(runtime).pid)
        try:
            async for event in runtime.generate(request):
                if isinstance(event, Chunk) and not stopped_at:
                    stop().suspend()
                    stopped_at, before = time.monotonic(), _waited(observers)
        except error:
            return time.monotonic() - stopped_at - (_waited(observers) - before)
        raise AssertionError("the stream ended without an error")

    return asyncio.run(run())


def _waited(processes: tuple[int, ...]) -> float:
    return sum(read_process(process).waited for process in processes)


@contextmanager
def runtime_of(model: str, startup_timeout: float = 900.0) -> Iterator[Runtime]:
    with Runtime(model, startup_timeout=startup_timeout) as runtime:
        yield runtime.wait_ready()
