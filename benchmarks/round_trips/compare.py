"""What shipping a program saves: the ways between it and its model, one for every call it makes after another.

    python -m benchmarks.round_trips

The runtime is real but for its time, which is virtual: a step of the model takes a millisecond, and every message five
more on its way. So the numbers are exact, and the same on every machine; they tell of ways, and of nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import umbel as ul
from umbel.srt.in_process import LocalBackend

from .virtual_time import VirtualTime

STEP = 0.001  # seconds that the model takes for a token
LATENCY = 0.005  # seconds that a message takes, each way
LENGTHS = (1, 2, 5, 10, 25, 100)  # tokens of each answer


@dataclass(frozen=True, slots=True)
class Measured:
    """Virtual seconds of one run, and messages from the program to the runtime."""

    seconds: float
    messages: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One program, run both ways."""

    program: str
    tokens: int  # of each answer
    interpreted: Measured
    shipped: Measured

    @property
    def times(self) -> float:
        return self.interpreted.seconds / self.shipped.seconds


@ul.function(temperature=0, ignore_eos=True)
async def interview(s: ul.AsyncState, person: str, tokens: int) -> None:
    """Five answers, each after the one before."""
    s += f"An interview with {person}.\n"
    for question in ("name", "city", "work", "food", "wish"):
        s += f"{question}: " + ul.gen(question, max_tokens=tokens) + "\n"


@ul.function(temperature=0, ignore_eos=True)
async def tree(s: ul.AsyncState, person: str, tokens: int) -> None:
    """A plan, three branches of two steps each, and a choice."""
    s += f"Advice for {person}.\nplan: " + ul.gen("plan", max_tokens=tokens)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"\nway {number}: " + ul.gen("way", max_tokens=tokens)
        branch += "\nwhy: " + ul.gen("why", max_tokens=tokens)
    branches.join("concate_and_append")
    s += "\nthe best is " + ul.gen("best", max_tokens=tokens)


PROGRAMS = (interview, tree)


def measure(program: ul.Program, tokens: int, *, server: bool) -> Measured:
    """One run on a runtime that is new, shipped or a call at a time."""
    backend = LocalBackend(latency=LATENCY, step_seconds=STEP, debug={"check_every_step": False})
    compiled = program.compile(static_args={"tokens": tokens}, server=True) if server else None

    async def run() -> None:
        if compiled is not None:
            state = await compiled.run_async("Ada", backend=backend)
        else:
            state = await program.run_async("Ada", tokens, backend=backend)
        await state.sync()

    async def start() -> None:
        await backend.start()

    with VirtualTime() as time:
        time.run(start())
        seconds = time.run(run())
        messages = backend.down.carried
        time.run(backend.close())
    return Measured(seconds, messages)


def compare(program: ul.Program, tokens: int) -> Comparison:
    return Comparison(
        program.name, tokens, measure(program, tokens, server=False), measure(program, tokens, server=True)
    )


def table(found: Iterable[Comparison]) -> str:
    lines = [
        "| program | tokens per answer | interpreted | messages | shipped | messages | times |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        one, other = each.interpreted, each.shipped
        lines.append(
            f"| {each.program} | {each.tokens} | {one.seconds * 1000:.0f} ms | {one.messages} | "
            f"{other.seconds * 1000:.0f} ms | {other.messages} | {each.times:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table of all programs and lengths."""
    print(f"A step takes {STEP * 1000:g} ms, a message {LATENCY * 1000:g} ms each way; time is virtual.\n")
    print(table(compare(program, tokens) for program in PROGRAMS for tokens in LENGTHS))
