"""What a prompt costs whose beginning was computed before: tokens in the usage, and the line in the log.

The scenarios are those by which articles on prefix caching show it: two questions about one table, and three times the
same short question to `/generate`, after a request that brought BOS.
"""

import asyncio
import re
from typing import Any

import pytest
from umbel.server.activity import Activity, read_status

from ..serving import until
from .client import AsgiClient, served
from .serving import Serving

ROWS = [f"| {n} | Person {n} | {20 + n} | Engineer | 555-{1000 + 37 * n} |" for n in range(1, 31)]
TABLE = "Here is a table.\n| ID | Name | Age | Occupation | Phone |\n|----|----|----|----|----|\n" + "\n".join(ROWS)
QUESTION = "What is the capital of France?"  # 7 tokens of the default model


def question(person: int) -> str:
    return f"{TABLE}\nQuestion: what is the age of Person {person}? Your answer: The age of Person {person} is "


def test_the_log_tells_new_tokens_from_cached_ones() -> None:
    """The oracle has a token for each byte."""

    async def line(client: AsgiClient, prompt: str) -> str:
        nonlocal seconds
        await client.post("/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 4}})
        status = await read_status(client.app.front.backend)
        assert status is not None
        seconds += 1.0
        return activity.line(status, seconds).partition("; ")[0]

    async def scenario() -> None:
        async with served() as client:
            await line(client, "an unrelated request")
            found = [await line(client, "capital") for _ in range(3)]
        assert found == [
            "prefill: 1 request, 7 new tokens, 1 cached",
            "prefill: 1 request, 1 new token, 7 cached",
            "prefill: 1 request, 1 new token, 7 cached",
        ]

    activity, seconds = Activity(), 0.0
    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.model
@pytest.mark.processes
@pytest.mark.nightly
def test_the_second_question_about_a_table_computes_the_question(model_server: Serving) -> None:
    def asked(person: int) -> Any:
        body = {"model": "gemma3-270m", "prompt": question(person), "max_tokens": 1, "cache_salt": "table"}
        return model_server.ask("/v1/completions", body)["usage"]

    first, second = asked(7), asked(28)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    computed = second["prompt_tokens"] - second["prompt_tokens_details"]["cached_tokens"]
    assert 3 * computed <= first["prompt_tokens"]
    assert computed < 30  # the question alone


@pytest.mark.model
@pytest.mark.processes
@pytest.mark.nightly
def test_a_repeated_request_logs_7_new_1_cached_then_1_and_7() -> None:
    serving = Serving("--model", "default", "--pool-tokens", "4096").ready()

    def lines() -> list[tuple[str, str]]:
        return re.findall(r"prefill: 1 request, (\d+) new tokens?, (\d+) cached", serving.log)

    try:
        for number, text in enumerate(["Once upon a time", QUESTION, QUESTION, QUESTION], 1):
            serving.ask("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}})
            until(lambda number=number: len(lines()) == number, "the request is not in the log")
        assert lines()[1:] == [("7", "1"), ("1", "7"), ("1", "7")], serving.log
    finally:
        serving.end()
