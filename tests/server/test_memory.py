"""No structure grows with what clients make up: salts, programs, fork groups, ids, prompts, constraints.

Front, gateway and scheduler run in this process. All containers that can be reached from the front are counted, before
and after a number of requests each of which has names of its own. A container that has grown by an entry for each of
them is found in the table below, with the test or the limit that bounds it; any other one is a leak.
"""

import asyncio
import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Set
from functools import _lru_cache_wrapper
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
from umbel.srt.in_process import LocalBackend

from .client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")

REQUESTS = 12  # of each kind, before the first count and between the two
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.ndarray)


def attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def reached(value: object, label: str) -> Iterator[tuple[object, str]]:
    """Yields what a value refers to, each with the attribute that holds it."""
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield from ((key, label), (each, label))
    elif isinstance(value, (list, tuple, Set, deque)):
        yield from ((each, label) for each in list(value))
    elif isinstance(value, MethodType):
        yield value.__self__, label
    elif isinstance(value, FunctionType):
        yield from ((cell.cell_contents, label) for cell in value.__closure__ or () if cell != type(cell)())
    elif type(value).__module__.startswith(("umbel.", "tests.", "asyncio")):
        for name, each in attributes(value):
            yield each, f"{type(value).__name__}.{name}"


def entries(root: object) -> Counter[str]:
    """Counts the entries of all containers that can be reached, by the attribute that holds them; and of all caches of
    functions."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[tuple[object, str]] = [(root, "")]
    keep = []  # so that no id is used twice
    while left:
        value, label = left.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, (Mapping, list, Set, deque)):
            found[label] += len(value)
        left.extend(reached(value, label))
    for each in gc.get_objects():
        if type(each) is _lru_cache_wrapper and str(each.__module__).startswith("umbel."):
            found[each.__qualname__] += each.cache_info().currsize
    return found


async def ask(client: AsgiClient, number: int) -> None:
    """Sends a request of each kind, with names that no other has."""
    place = {"program": f"program {number}", "fork_group": f"group {number}"}
    own = {"model": "oracle", "max_tokens": 4, "cache_salt": f"salt-{number}", "umbel": place}
    chat = own | {"messages": [{"role": "system", "content": f"a {number}\nb"}, {"role": "user", "content": "hello"}]}
    response = {"model": "oracle", "max_output_tokens": 4, "input": f"hello {number}", "cache_salt": own["cache_salt"]}
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", own | {"prompt": f"a text {number}", "user": f"{number}", "n": 2, "stop": [f"{number}"]}),
        ("/v1/completions", own | {"prompt": "once", "regex": f"x{number}", "max_tokens": 9}),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/responses", response),
        ("/generate", {"text": f"more {number}", "rid": f"rid {number}", "sampling_params": {"max_new_tokens": 2}}),
        ("/hints", {"text": f"a hint {number}", "id": f"hint {number}", "cache_salt": own["cache_salt"]}),
    ]  # fmt: skip
    for path, body in bodies:
        answer = await client.post(path, body)
        assert answer.status == 200, answer.content
    refused = await client.post("/v1/completions", own | {"prompt": "a", f"field_{number}": 1})
    assert refused.status == 400


# What has an entry for a request of its own, or for its salt, program or text, and what bounds it.
BOUNDED = {
    "AnswerHistory._salts": "server/limits.py: ALL_ANSWERS",
    "_Answers._kept": "server/limits.py: SALT_ANSWERS",
    "Exchanges._salts": "server/limits.py: ALL_EXCHANGES",
    "Exchanges._sizes": "server/limits.py: ALL_EXCHANGES",
    "ChangingLines._salts": "server/limits.py: WATCHED_SALTS",
    "_Watched.recent": "server/limits.py: WATCHED_REQUESTS",
    "TokenCache._entries": "srt/tokenizer/prompt.py: CACHE_BYTES",
    "PromptEncoder._pieces": "srt/tokenizer/prompt.py: _SCAFFOLDINGS",
    "CompiledStops._kept": "srt/tokenizer/tokenizer.py: MOST_STOPS, MOST_STOP_CHARACTERS",
    "StopAutomaton._goto": "srt/tokenizer/tokenizer.py: MOST_STOP_CHARACTERS",
    "StopAutomaton._fail": "srt/tokenizer/tokenizer.py: MOST_STOP_CHARACTERS",
    "StopAutomaton._depth": "srt/tokenizer/tokenizer.py: MOST_STOP_CHARACTERS",
    "StopAutomaton._output": "srt/tokenizer/tokenizer.py: MOST_STOP_CHARACTERS",
    "remembered.<locals>.tokens_of": "fsm/tokens/vocabulary.py: MOST_ENCODED, LONGEST_ENCODED",
    "CompiledCache._kept": "RuntimeOptions.constraint_cache, srt/core/config.py: CompilerLimits.kept_bytes",
    "MatcherCache._open": "RuntimeOptions.constraint_cache, srt/constraints/matcher.py: most_bytes",
    "CallIndex._deadlines": "srt/gateway/calls.py: _CLEARED_AT; a time and a number each",
    "ProgramUsage._rows": "srt/scheduler/policy.py: MOST_PROGRAMS",
    "OracleRunner.batches": "srt/testing/oracle.py: _REMEMBERED",
}


def test_only_bounded_structures_have_an_entry_for_each_request() -> None:
    async def scenario() -> set[str]:
        async with served(LocalBackend(pool_tokens=512, context_length=256)) as client:
            for number in range(REQUESTS):
                await ask(client, number)
            before = entries(client.app.front)
            for number in range(REQUESTS, 2 * REQUESTS):
                await ask(client, number)
            after = entries(client.app.front)
        return {label for label, count in (after - before).items() if count > REQUESTS / 2}

    grown = asyncio.run(scenario())
    assert grown <= BOUNDED.keys(), "what bounds them?"
    assert len(grown) > 12, "the requests leave traces, or nothing was counted"
