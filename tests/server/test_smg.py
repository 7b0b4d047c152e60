"""A foreign gateway in front of two servers: `smg`, the Shepherd Model Gateway.

It reads bodies into types of its own and writes them again, so it adds fields at their defaults, and drops what it does
not know inside of messages. The tests run where its command is on the PATH, or named by UMBEL_TEST_SMG (`pip install
smg`, 102 MB).
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import umbel as ul

from ..serving import until
from .serving import ADMIN_KEY, KEY, Serving

pytestmark = [pytest.mark.processes, pytest.mark.nightly]
CHAT = {"model": "oracle", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def free_port() -> int:
    """Returns a port that was free a moment ago: the gateway takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Serving]]:
    command()
    with two_servers() as serving:
        yield serving


@contextlib.contextmanager
def two_servers() -> Iterator[list[Serving]]:
    serving = [Serving("--model", "oracle") for _ in range(2)]
    try:
        yield [each.ready() for each in serving]
    finally:
        for each in serving:
            each.end()


def command() -> str:
    """Returns the gateway's command. Skips where there is none."""
    found = os.environ.get("UMBEL_TEST_SMG") or shutil.which("smg")
    if found is None:
        pytest.skip("smg is not installed")
    return found


@pytest.fixture(scope="module")
def gateway(servers: list[Serving], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a gateway that knows both servers and asks them in turn."""
    with running(servers, tmp_path_factory.mktemp("smg"), "--policy", "round_robin") as client:
        yield client


@contextlib.contextmanager
def running(servers: list[Serving], folder: Path, *options: str) -> Iterator[openai.OpenAI]:
    """Runs a gateway that knows the servers → a client of it."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    line = [command(), "launch", "--host", "127.0.0.1", "--port", str(port), *options, "--api-key", KEY]
    line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    line += ["--worker-urls", *(each.address for each in servers)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, cwd=folder)
    try:
        until(lambda: ready(process, address, len(servers)), f"smg does not serve: {folder / 'log'}")
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            yield client
    finally:
        process.kill()
        process.wait()


def ready(process: "subprocess.Popen[bytes]", address: str, count: int) -> bool:
    """Whether the gateway has found the model on all servers."""
    assert process.poll() is None, "smg has ended"
    request = urllib.request.Request(f"{address}/workers", headers={"authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request) as answer:
            workers = json.loads(answer.read())["workers"]
    except OSError:
        return False
    return [(each["model_id"], each["is_healthy"]) for each in workers] == [("oracle", True)] * count


def finished(server: Serving) -> int:
    """Requests that a server's engine has finished; it tells twice a second."""

    def counters() -> Any:
        facts = server.ask("/server_info", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        return facts if "finished" in facts else None

    return int(until(counters, "the engine tells no counters")["finished"])


def test_the_gateway_finds_the_model(gateway: openai.OpenAI) -> None:
    assert [model.id for model in gateway.models.list()] == ["oracle"]


def test_both_servers_answer_and_say_the_same(gateway: openai.OpenAI, servers: list[Serving]) -> None:
    before = [finished(each) for each in servers]
    answers = [gateway.chat.completions.create(**CHAT) for _ in range(2)]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    until(lambda: [finished(each) for each in servers] == [count + 1 for count in before], "one request each")


def test_completions(gateway: openai.OpenAI, servers: list[Serving]) -> None:
    asked = {"model": "oracle", "prompt": "hello world", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 3}
    answer = gateway.completions.create(**asked)
    own = servers[0].ask("/v1/completions", asked)
    assert answer.choices[0].model_dump(mode="json") == own["choices"][0]
    events = list(gateway.completions.create(**asked, stream=True))
    assert "".join(event.choices[0].text for event in events) == answer.choices[0].text


def test_chat_whole_and_streamed(gateway: openai.OpenAI) -> None:
    asked = CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "extra_body": {"regex": "[a-z]{5}"}}
    whole = gateway.chat.completions.create(**asked)
    with gateway.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert [each.message.content for each in streamed.choices] == [each.message.content for each in whole.choices]
    assert [each.logprobs for each in streamed.choices] == [each.logprobs for each in whole.choices]
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_a_tool_is_called(gateway: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "boolean"}}, "required": ["days"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    asked = CHAT | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    calls = gateway.chat.completions.create(**asked).choices[0].message.tool_calls
    with gateway.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert streamed is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        (call.function.name, call.function.arguments) for call in streamed
    ]


def test_responses(gateway: openai.OpenAI) -> None:
    asked: Any = {"model": "oracle", "input": "hello", "max_output_tokens": 8, "temperature": 0}
    whole = gateway.responses.create(**asked)
    with gateway.responses.stream(**asked) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text != ""


def test_messages_and_generate(gateway: openai.OpenAI, servers: list[Serving]) -> None:
    for path, body in (
        ("/v1/messages", {"model": "oracle", "max_tokens": 8, "temperature": 0, "messages": CHAT["messages"]}),
        ("/generate", {"text": "hello world", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}),
    ):
        address = str(gateway.base_url).removesuffix("/v1/") + path
        given = gateway.post(address, body=body, cast_to=dict[str, Any])
        own = servers[0].ask(path, body)
        assert given.get("text", given.get("content")) == own.get("text", own.get("content"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"umbel": {"timeout": "soon"}}, "umbel.timeout"), ({"cache_salt": "a b"}, "cache_salt"), ({"other": 1}, "other")],
    ids=str,
)
def test_fields_of_ours_reach_the_server(gateway: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        gateway.chat.completions.create(**CHAT, extra_body=fields)
    assert raised.value.param == param
    assert gateway.chat.completions.create(**CHAT, extra_body={"umbel": {"timeout": 60}, "cache_salt": "a"}).choices


# ------------------------------------------------------------------------------------------- where requests go


def prefills(server: Serving) -> list[tuple[int, int]]:
    """New and cached tokens of each line of the log."""
    found = re.findall(r"prefill: \d+ requests?, (\d+) new tokens?, (\d+) cached", server.log)
    return [(int(new), int(cached)) for new, cached in found]


def told(servers: list[Serving], before: list[int]) -> int:
    """Lines of prefills that the servers have logged since."""
    return sum(len(prefills(server)) - count for server, count in zip(servers, before, strict=True))


def test_three_equal_requests_are_computed_by_one_server(servers: list[Serving], tmp_path: Path) -> None:
    """The oracle has a token for each byte. Another request has brought BOS to both servers, as start-up removes it."""
    one = {"sampling_params": {"max_new_tokens": 1}}
    with running(servers, tmp_path, "--policy", "cache_aware") as gateway:
        address = str(gateway.base_url).removesuffix("/v1/") + "/generate"
        for server in servers:
            before = len(prefills(server))
            server.ask("/generate", {"text": "Once upon a time", **one})
            until(lambda server=server, before=before: len(prefills(server)) > before, "it is not in the log")
        lines = [len(prefills(server)) for server in servers]
        for number in range(3):
            gateway.post(address, body={"text": "capital", **one}, cast_to=dict[str, Any])
            until(lambda number=number: told(servers, lines) > number, "the request is not in the log")
        there = [prefills(server)[count:] for server, count in zip(servers, lines, strict=True)]
        assert sorted(there) == [[], [(7, 1), (1, 7), (1, 7)]], [server.log for server in servers]


@ul.function
def advise(s: ul.State, number: int) -> list[str]:
    s += f"{number} " * 8
    branches = s.fork(6)
    for branch in branches:
        branch += ul.gen("tip", 4)
    return [branch["tip"] for branch in branches]


def test_the_calls_of_a_fork_go_to_one_server(servers: list[Serving], tmp_path: Path) -> None:
    """By the key's hash: --routing-key-override spreads calls that arrive before it has a server for their key."""
    with running(servers, tmp_path, "--policy", "consistent_hashing") as gateway:
        model = ul.RuntimeEndpoint(
            str(gateway.base_url), server="openai", model="oracle", api_key=KEY, routing_key_header="X-SMG-Routing-Key"
        )
        for number in range(4):
            before = [finished(server) for server in servers]
            assert len(advise.run(number, backend=model).ret_value) == 6
            until(lambda before=before: sum(map(finished, servers)) == sum(before) + 6, "six calls have ended")
            grown = [finished(server) - count for server, count in zip(servers, before, strict=True)]
            assert sorted(grown) == [0, 6], f"fork {number}"


def test_a_wrong_request_is_answered_by_400_and_counts_against_no_server(
    servers: list[Serving], tmp_path: Path
) -> None:
    options = ("--cb-failure-threshold", "2", "--retry-max-retries", "1", "--policy", "round_robin")
    with running(servers, tmp_path, *options) as gateway:
        for _ in range(8):
            with pytest.raises(openai.BadRequestError):
                gateway.chat.completions.create(**CHAT, extra_body={"other": 1})
        before = [finished(server) for server in servers]
        for _ in range(2):
            assert gateway.chat.completions.create(**CHAT).choices
        until(lambda: [finished(each) for each in servers] == [count + 1 for count in before], "one request each")


def test_requests_go_on_when_a_server_is_killed(tmp_path: Path) -> None:
    command()
    with two_servers() as servers, running(servers, tmp_path, "--policy", "round_robin") as gateway:
        servers[0].process.kill()
        servers[0].process.wait()
        answers = [gateway.chat.completions.create(**CHAT) for _ in range(6)]
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        until(lambda: finished(servers[1]) >= 6, "the other server has answered all")
