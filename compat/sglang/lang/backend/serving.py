"""Prompts outside of programs, answered as SGLang's server answers: JSON-like dictionaries."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from .....interpreter.meta import of_completion
from .....lang import checks
from .....lang.constraint import demand_of
from .....lang.errors import BackendError, ParameterError
from .....lang.prompt import Text
from .....lang.protocol import Backend, Chunk, Completion, Final, GenRequest
from .....lang.sampling import merge, overrides

_CONSTRAINTS = ("regex", "json_schema", "ebnf")
_ALWAYS_SO = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False}
_numbers = itertools.count(1)

Parameters = Mapping[str, Any] | None  # Any: as of umbel.gen


def request_of(
    prompt: str,
    sampling_params: Parameters = None,
    *,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    stream: bool = False,
) -> GenRequest:
    """
    Raises:
        ParameterError: a prompt that is no text, or a wrong parameter; the message says what to write.
        ConstraintError: a schema that is no JSON.
    """
    if not isinstance(prompt, str):
        raise ParameterError(f"a prompt is a string, got {type(prompt).__name__}; give texts one by one, or in a list")
    wanted = "a dict of sampling parameters, such as {'max_new_tokens': 16}"
    given = {} if sampling_params is None else checks.entries("sampling_params", sampling_params, 256, wanted)
    for name, usual in _ALWAYS_SO.items():
        if given.pop(name, usual) != usual:
            raise ParameterError(f"sampling_params[{name!r}] is always {usual}; leave it out")
    demand = demand_of({kind: given.pop(kind, None) for kind in _CONSTRAINTS})
    fields = overrides(given)
    fields |= overrides(
        {
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len if return_logprob else None,
            "top_logprobs_num": top_logprobs_num or None,
        }
    )
    constraint = demand.spec if demand is not None else None
    return GenRequest(
        f"generate-{next(_numbers)}", (Text(prompt),), merge(fields), stream=stream, constraint=constraint
    )


async def answer(backend: Backend, request: GenRequest) -> dict[str, Any] | list[dict[str, Any]]:
    """The whole answer; a list for n above 1."""
    await backend.start()
    async with aclosing(_events(backend, request)) as events:
        async for event in events:
            if isinstance(event, Final):
                answers = [_written(event, completion) for completion in event.completions]
                return answers if len(answers) > 1 else answers[0]
    raise BackendError("the request ended without an answer")


async def answers(backend: Backend, requests: list[GenRequest]) -> list[Any]:
    """All of them, at once."""
    return list(await asyncio.gather(*(answer(backend, request) for request in requests)))


async def pieces(backend: Backend, request: GenRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The answer as it comes: each piece has all of the text so far, and the last one what it cost."""
    await backend.start()
    text = ""
    async with aclosing(_events(backend, request)) as events:
        async for event in events:
            if isinstance(event, Final):
                yield _written(event, event.completions[0])
            elif event.index == 0:
                text += event.text
                yield {"text": text, "meta_info": {"id": event.id, "finish_reason": None}}


def _events(backend: Backend, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
    events: Any = backend.generate(request)  # Any: backends give generators, where the protocol says iterators
    return events  # type: ignore[no-any-return]


def _written(final: Final, completion: Completion) -> dict[str, Any]:
    meta = of_completion(final, completion, with_text=True)
    reason = meta.pop("finish_reason")
    matched = meta.pop("matched_stop")
    length = meta["completion_tokens"]
    told = {"type": "length", "length": length} if reason.startswith("length") else {"type": reason, "matched": matched}
    return {
        "text": completion.text,
        "output_ids": list(completion.token_ids),
        "meta_info": {**meta, "finish_reason": told},
    }
