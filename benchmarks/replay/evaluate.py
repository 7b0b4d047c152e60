"""A workload over any engine that completes text: the evaluator for peers, and the oracle for `program.py`.

It keeps a state as one string and follows the same rules: branches run at once, a parent waits where it needs a
branch's variable, where the file says `join`, and at its end.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from umbel.srt.simulator.workload import (
    Branch,
    Fork,
    Gen,
    Image,
    Op,
    Ops,
    Program,
    Schema,
    Select,
    Text,
    Values,
    Var,
    key_of,
    keys_of,
    scope_of,
)


class Completer(Protocol):
    """What a peer is asked. Prompts are plain text; the engine puts BOS before them if its model has one."""

    async def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stop: Sequence[str],
        temperature: float,
        ignore_eos: bool,
        regex: str | None = None,
        json_schema: Schema | None = None,
    ) -> str:
        """The continuation, its stop string cut away."""

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        """The number of the most likely choice."""


async def evaluate(program: Program, completer: Completer) -> Values:
    """One program to its end."""
    evaluation = _Evaluation(program.ops, completer)
    try:
        async with asyncio.TaskGroup() as evaluation.tasks:
            await evaluation.run("", program.ops, ())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # the first failure cancelled the rest
    return {key: value.result() for key, value in evaluation.values.items()}


async def evaluate_all(programs: Iterable[Program], completer: Completer, concurrency: int) -> list[Values | Exception]:
    """Every program, `concurrency` at once, begun in order; the error in place of a program that failed."""
    room = asyncio.Semaphore(concurrency)

    async def one(program: Program) -> Values | Exception:
        async with room:
            try:
                return await evaluate(program, completer)
            except Exception as error:
                return error

    return await asyncio.gather(*(one(program) for program in programs))


class _Evaluation:
    """One run of one program."""

    def __init__(self, ops: Ops, completer: Completer) -> None:
        loop = asyncio.get_running_loop()
        self.values: dict[str, asyncio.Future[str]] = {key: loop.create_future() for key in keys_of(ops)}
        self.completer = completer
        self.tasks = asyncio.TaskGroup()

    async def run(self, text: str, ops: Ops, branch: Branch) -> None:
        for op in ops:
            text += await self._one(text, op, branch)

    async def _one(self, text: str, op: Op, branch: Branch) -> str:
        """What the operation appends."""
        match op:
            case Text(constant):
                return constant
            case Image(path):
                raise ValueError(f"image {path.name!r}: peers are asked for text only")
            case Gen():
                value = await self.completer.generate(
                    text,
                    max_tokens=op.max_tokens,
                    stop=op.stop,
                    temperature=op.temperature,
                    ignore_eos=op.ignore_eos,
                    regex=op.regex,
                    json_schema=op.json_schema,
                )
                self.values[key_of(branch, op.name)].set_result(value)
                return value
            case Select(name, choices):
                value = choices[await self.completer.score(text, choices)]
                self.values[key_of(branch, name)].set_result(value)
                return value
            case Var(name):
                return await self.values[scope_of(self.values, branch, name)]
            case Fork(branches, join):
                started = [
                    self.tasks.create_task(self.run(text, inner, (*branch, number)))
                    for number, inner in enumerate(branches)
                ]
                if join:
                    await asyncio.gather(*started)
                    for number, inner in enumerate(branches):
                        for key in keys_of(inner, (*branch, number)):
                            await self.values[key]
                return ""
