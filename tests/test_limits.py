"""The page of limits has the numbers of the code."""

import re
from pathlib import Path

from umbel.interpreter import batch, media
from umbel.interpreter.agents import agent
from umbel.lang import ops, sampling, state, tool_calls
from umbel.lang.runtime_options import RuntimeOptions
from umbel.server import command, limits

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
NUMBERS = {
    "`max_tokens` of a call": (sampling.MAX_TOKENS,),
    "continuations of one call": (sampling.MAX_N, limits.MAX_N),
    "branches of one fork": (state.MAX_BRANCHES,),
    "choices of a `select`": (ops.MAX_CHOICES, ops.MAX_CHOICE_LENGTH),
    "`stop` strings": (sampling.MAX_STOPS, sampling.MAX_STOP_LENGTH),
    "`top_logprobs_num`": (sampling.MAX_TOP_LOGPROBS, sampling.MAX_LOGIT_BIAS),
    "calls for one validated text": (ops.MAX_TRIES,),
    "regular expression; schema": (limits.MAX_REGEX, limits.MAX_SCHEMA >> 10),
    "tools of one call": (tool_calls.MOST_TOOLS, agent.MOST_CALLS),
    "bytes of a picture": (media.MAX_MEDIA_BYTES >> 20,),
    "results that `run_batch` returns": (batch.MAX_LISTED,),
    "programs of a batch in flight": (batch.MAX_IN_FLIGHT, batch.MAX_LIMIT),
    "requests that a gateway holds, running and waiting": (
        RuntimeOptions().max_queue,
        command.OWN_DEFAULTS["max_queue"],
    ),
    "body of a request over HTTP": (limits.MAX_BODY // 10**6, limits.MAX_MESSAGES),
    "programs that a server keeps": (limits.MAX_PROGRAMS, limits.MAX_PROGRAM_BYTES >> 20),
}


def test_the_page_has_the_numbers_of_the_code() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    found = {start: limit for start in NUMBERS for row, limit in rows if row.startswith(start)}
    assert found.keys() == NUMBERS.keys()
    wrong = {
        start: found[start]
        for start, numbers in NUMBERS.items()
        if not {f"{number:,}" for number in numbers} <= set(re.findall(r"[\d,]*\d", found[start]))
    }
    assert wrong == {}
