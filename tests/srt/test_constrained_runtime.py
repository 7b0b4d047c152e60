"""Constraints through the whole runtime, on the oracle model: every text satisfies what was asked of it."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import jsonschema
import pytest
from umbel.lang.errors import ConstraintError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Completion, ConstraintSpec, Final, FinishReason, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.local import LocalBackend

from .random_schemas import Schema, random_schema, text_of

SCHEMAS = [random_schema(random.Random(seed)) for seed in range(64)]


def request(label: str, spec: ConstraintSpec, prompt: str = "Answer: ", **sampling: object) -> GenRequest:
    return GenRequest(label, (Text(prompt),), SamplingParams(**sampling), constraint=spec)  # type: ignore[arg-type]


def schema_spec(schema: Schema) -> ConstraintSpec:
    return ConstraintSpec("json_schema", text_of(schema))


async def ask(backend: LocalBackend, asked: GenRequest) -> Final | ConstraintError:
    try:
        async for event in backend.generate(asked):
            if isinstance(event, Final):
                return event
    except ConstraintError as error:
        return error
    raise AssertionError("a stream without an end")


def answers(
    requests: Sequence[GenRequest], look: Callable[[dict[str, object]], None] | None = None, **options: object
) -> list[Final | ConstraintError]:
    """All requests together, on one backend. `look` is given its facts at the end."""

    async def run() -> list[Final | ConstraintError]:
        backend = LocalBackend(seed=1, **{"check_every_step": False, **options})  # type: ignore[arg-type]
        try:
            finals = await asyncio.gather(*(ask(backend, asked) for asked in requests))
            if look is not None:
                look(dict((await backend.control("info")).result))
            return finals
        finally:
            await backend.close()

    return asyncio.run(run())


def only(final: Final | ConstraintError) -> Completion:
    assert isinstance(final, Final), final
    (completion,) = final.completions
    return completion


def validates(schema: Schema, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_every_text_of_random_schemas_validates() -> None:
    asked = [
        (schema, request(f"{index}-{seed}", schema_spec(schema), max_tokens=160, seed=seed, temperature=1.0))
        for index, schema in enumerate(SCHEMAS)
        for seed in range(8)
    ]
    reasons: Counter[FinishReason] = Counter()
    for (schema, _), final in zip(asked, answers([one for _, one in asked], max_running=256), strict=True):
        completion = only(final)
        validates(schema, completion.text)
        assert completion.guarantee == "enforced"
        reasons[completion.finish_reason] += 1
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH_CLOSED}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jumps_change_nothing(temperature: float) -> None:
    asked = [
        request(str(index), schema_spec(schema), max_tokens=120, seed=index, temperature=temperature)
        for index, schema in enumerate(SCHEMAS)
    ]
    steps: list[object] = []
    seen = []
    for jump_forward in (True, False):
        finals = answers(asked, lambda facts: steps.append(facts["steps"]), jump_forward=jump_forward)
        seen.append([(c.text, c.token_ids, c.finish_reason, c.forced_tokens) for c in map(only, finals)])
    assert seen[0] == seen[1]


def test_every_budget_from_the_least_on_gives_a_whole_text() -> None:
    for index, schema in enumerate(SCHEMAS[:24]):
        (refused,) = answers([request("a", schema_spec(schema), max_tokens=0, seed=1)])
        if isinstance(refused, Final):
            assert only(refused).finish_reason is FinishReason.STOP
            continue
        found = re.search(r"write max_tokens=(\d+) or more", str(refused))
        assert found is not None, refused
        least = int(found[1])
        asked = [
            request(f"{most}", schema_spec(schema), max_tokens=most, seed=index, temperature=1.0)
            for most in range(least - 1, least + 9)
        ]
        short, *whole = answers(asked)
        assert isinstance(short, ConstraintError)
        for one, final in zip(asked[1:], whole, strict=True):
            completion = only(final)
            validates(schema, completion.text)
            assert len(completion.token_ids) <= one.sampling.max_tokens
