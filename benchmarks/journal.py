"""The cost of a journal: the same calls with and without one.

    python -m benchmarks.journal                     # a provider over HTTP, and the default model; two minutes
    python -m benchmarks.journal --rounds 21         # narrower intervals

The cheapest calls that are worth keeping: a provider on this machine that answers at once, one call after the other,
and the default model with 8 tokens. Rounds with and without a journal alternate; the figures are medians over rounds,
in milliseconds a call, and the overhead is the median of the ratios of neighbouring rounds. `writing` is what a
journal itself takes of a call: digests, JSON, a line. It is measured alone, as the difference drowns in the noise of
a socket.
"""

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import umbel as ul
from umbel.interpreter.journal.stored import StoredCalls
from umbel.lang.protocol import Backend, Final, GenRequest, Scored, ScoreRequest
from umbel.testing import FakeOpenAI

_fresh = itertools.count()


@ul.function
def ask(s: ul.State, number: int) -> None:
    s += ul.user(f"Question {number}: tell me a story.") + ul.assistant(ul.gen("answer", max_tokens=8))


class Clock:
    """Adds up the seconds that journals take of calls, as a block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._write, self._read = StoredCalls.write, StoredCalls.read

    def __enter__(self) -> "Clock":
        def write(stored: StoredCalls, request: GenRequest | ScoreRequest, result: Final | Scored) -> None:
            began = time.perf_counter()
            self._write(stored, request, result)
            self.seconds += time.perf_counter() - began

        def read(stored: StoredCalls, request: GenRequest | ScoreRequest, kind: type) -> Final | Scored | None:
            began = time.perf_counter()
            found: Final | Scored | None = self._read(stored, request, kind)
            self.seconds += time.perf_counter() - began
            return found

        StoredCalls.write, StoredCalls.read = write, read  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        StoredCalls.write, StoredCalls.read = self._write, self._read  # type: ignore[method-assign]


def seconds_of(backend: Backend, calls: int, journal: Path | None) -> float:
    """Runs a round of so many calls, and returns its seconds."""
    numbers = [{"number": next(_fresh)} for _ in range(calls)]  # no prompt is cached as a whole
    began = time.perf_counter()
    ask.run_batch(numbers, backend=backend, journal=journal, num_threads=1)
    return time.perf_counter() - began


def measured(name: str, backend: Backend, calls: int, rounds: int, folder: Path) -> str:
    """Measures one backend. Returns a line of the table."""
    seconds_of(backend, calls, None)
    plain, kept = [], []
    with Clock() as clock:
        for number in range(rounds):
            plain.append(seconds_of(backend, calls, None))
            kept.append(seconds_of(backend, calls, folder / f"{name.replace(' ', '_')}_{number}.jsonl"))
    overhead = statistics.median(with_ / without for with_, without in zip(kept, plain, strict=True)) - 1
    each, written = (1e3 * statistics.median(figures) / calls for figures in (plain, kept))
    writing = 1e3 * clock.seconds / (calls * rounds)
    return f"{name:24} {each:9.3f} {written:9.3f} {100 * overhead:8.1f} % {writing:9.3f} {100 * writing / each:8.1f} %"


def backends(stack: ExitStack) -> Iterator[tuple[str, Backend, int]]:
    """Yields the name of each backend, the backend, and calls of a round."""
    server = stack.enter_context(FakeOpenAI(lambda text: "It is what it is, and so on.", record=0))
    yield "provider over HTTP", ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key), 100
    try:
        yield "default model, 8 tokens", stack.enter_context(ul.Runtime()), 20
    except ul.MissingExtraError as error:
        print(f"without the default model: {error}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.journal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="of each kind; default: 11")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ul.TemplateWarning)  # what is said does not matter here
    print(f"{'ms a call':24} {'without':>9} {'with':>9} {'overhead':>10} {'writing':>9} {'of a call':>10}")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name, backend, calls in backends(stack):
            print(measured(name, backend, calls, options.rounds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
