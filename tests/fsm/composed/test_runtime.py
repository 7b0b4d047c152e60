"""A runtime says only texts of an expression: a scheduler with the oracle model, token by token."""

import asyncio
import dataclasses
import itertools
import random
import re
from collections.abc import Sequence

import umbel as ul
from umbel.fsm.composed.expression import Expression
from umbel.lang.prompt import Text
from umbel.lang.protocol import Completion, ConstraintSpec, Final, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

from .random_expressions import Reference, built, composition


@dataclasses.dataclass
class Book:
    title: str
    year: int


def answers(expressions: Sequence[Expression]) -> list[Completion]:
    """Returns an answer under each expression, drawn with a seed of its own; all on one runtime in this process."""

    async def ask(backend: LocalBackend, index: int, expression: Expression) -> Completion:
        spec = ConstraintSpec("expression", expression.source)
        sampling = SamplingParams(max_tokens=60, seed=index, temperature=1.0)
        async for event in backend.generate(GenRequest(str(index), (Text("Say: "),), sampling, constraint=spec)):
            if isinstance(event, Final):
                return event.completions[0]
        raise AssertionError("a stream without an end")

    async def run() -> list[Completion]:
        backend = LocalBackend(seed=1, max_running=64, debug={"check_every_step": False})
        try:
            return list(await asyncio.gather(*(ask(backend, *each) for each in enumerate(expressions))))
        finally:
            await backend.close()

    return asyncio.run(run())


EXPRESSIONS = [
    ul.regex("[0-9]+").capture("count") + " " + (ul.choice(["apples", "pears"]) | ul.json(Book)).capture("what"),
    ul.json(Book).capture("book").repeat(1, 3, separator=", ") + ul.regex("!+").capture("shout").optional(),
    ul.recursive(lambda e: ul.regex("[0-9]").capture("digit") | "(" + e + ul.regex("[-+*]") + e + ")"),
    ul.substring("the quick brown fox jumps over the lazy dog", by="words").capture("quote"),
    ul.triggered("<t>", ul.json(Book).capture("book"), "</t>", required=True, once=True),
    ul.until("</think>") + ul.regex(re.compile("yes|no", re.IGNORECASE)).capture("answer"),
]


def test_every_kind_of_part_is_enforced() -> None:
    expressions = EXPRESSIONS * 2
    for expression, completion in zip(expressions, answers(expressions), strict=True):
        assert completion.guarantee == "enforced", completion
        assert expression.match(completion.text) is not None, (expression, completion.text)


def test_texts_under_random_compositions_are_read_by_the_reference() -> None:
    parts = [
        composition(random.Random(seed), (f"c{count}" for count in itertools.count())) for seed in range(5_000, 5_100)
    ]
    for part, completion in zip(parts, answers([built(part) for part in parts]), strict=True):
        assert completion.guarantee == "enforced", completion
        assert Reference(completion.text).read(part) is not None, (part, completion.text)
