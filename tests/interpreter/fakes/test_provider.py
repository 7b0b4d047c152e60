"""What both fakes have in common: counting, gates, clients that leave, scripts that fail, faults, and their manual."""

import asyncio
import re
import textwrap
from types import ModuleType

import pytest
import umbel as ul
import umbel.testing
from umbel.interpreter.backends.echo import Gate
from umbel.interpreter.fakes import anthropic, openai
from umbel.testing import FakeAnthropic, FakeOpenAI, FakeSGLang, Fault, Unreachable

from .wire import PATIENCE, chat, chat_body, headers, http, message_body, post

CHAT = "/v1/chat/completions"


@ul.function
def capital(s: ul.State, country: str) -> None:
    s += ul.user(f"What is the capital of {country}?")
    s += ul.assistant(ul.gen("answer", max_tokens=16))


@pytest.mark.parametrize("module", [umbel.testing, openai, anthropic], ids=lambda module: module.__name__)
def test_the_manual_does_what_it_says(module: ModuleType) -> None:
    found = re.search(r"\n\n((?:    .*\n|\n)+)", module.__doc__ or "")
    assert found is not None, "there is an example"
    exec(textwrap.dedent(found[1]), {"ul": ul, "capital": capital})


def test_answers_wait_at_a_gate_and_are_counted_while_they_do() -> None:
    gate = Gate()

    async def ask(server: FakeOpenAI, count: int) -> None:
        async with http.AsyncClient(headers=headers(server), timeout=PATIENCE) as client:
            asked = [asyncio.create_task(client.post(server.address + CHAT, json=chat_body())) for _ in range(count)]
            await asyncio.to_thread(gate.wait_for, count)
            gate.open()
            assert [response.status_code for response in await asyncio.gather(*asked)] == [200] * count

    with FakeOpenAI(lambda text: "yes", gate=gate) as server:
        asyncio.run(ask(server, 5))
        assert (server.concurrent, server.calls, server.abandoned) == (5, 5, 0)


def test_clients_that_leave_are_counted() -> None:
    gate = Gate()

    async def leave(server: FakeOpenAI) -> None:
        async with http.AsyncClient(headers=headers(server), timeout=PATIENCE) as client:
            asked = asyncio.create_task(client.post(server.address + CHAT, json=chat_body()))
            await asyncio.to_thread(gate.wait_for, 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    with FakeOpenAI(lambda text: "yes", gate=gate) as server:
        asyncio.run(leave(server))
        gate.open()
        chat(server)
        assert server.abandoned == 1


def test_a_script_that_fails_is_told_where_the_block_ends() -> None:
    with pytest.raises(AssertionError, match="list of answers is used up"), FakeOpenAI([]) as server:
        assert post(server, CHAT, chat_body()).status_code == 500


def test_an_error_that_the_test_expects_is_taken_out() -> None:
    with FakeOpenAI([]) as server:
        post(server, CHAT, chat_body())
        assert len(server.errors) == 1
        server.errors.clear()


def test_a_string_is_neither_a_script_nor_a_list_of_faults() -> None:
    with pytest.raises(ul.ParameterError, match="write a list of answers"):
        FakeOpenAI("yes")
    with pytest.raises(ul.ParameterError, match=r"faults must be \[Fault.CUT\]"):
        FakeOpenAI(faults=Fault.CUT)  # type: ignore[arg-type]  # the mistake that is tested


def test_a_list_of_faults_meets_the_requests_in_order_and_any_status_can_be_one() -> None:
    with FakeAnthropic(lambda text: "yes", faults=[Fault.RATE_LIMIT_AND_WHEN, 529, None], retry_after="7") as server:
        first, second, third = (post(server, "/v1/messages", message_body()) for _ in range(3))
        assert (first.status_code, first.headers["retry-after"]) == (429, "7")
        assert (second.status_code, second.json()["error"]["type"]) == (529, "overloaded_error")
        assert third.status_code == 200
        assert (len(server.requests), server.calls) == (3, 1)


@pytest.mark.parametrize("fault", [Fault.SPLIT_UTF8, Fault.SPLIT_JSON])
@pytest.mark.parametrize("stream", [False, True])
def test_legal_faults_change_no_byte(fault: Fault, stream: bool) -> None:
    with FakeOpenAI(lambda text: "zwölf Boxkämpfer", faults=[None, fault], cache_tokens=0) as server:
        whole, split = (post(server, CHAT, chat_body(stream=stream)) for _ in range(2))
        assert whole.content == split.content


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.NO_DONE, Fault.DISCONNECT])
def test_connections_end_before_their_answers(fault: Fault) -> None:
    with FakeOpenAI(lambda text: "yes", faults=[fault]) as server, pytest.raises(http.RemoteProtocolError):
        post(server, CHAT, chat_body())


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.IDLE])
def test_a_server_that_closes_lets_go_of_those_who_wait(fault: Fault) -> None:
    async def ask(server: FakeOpenAI) -> None:
        async with http.AsyncClient(headers=headers(server), timeout=PATIENCE) as client:
            asked = asyncio.create_task(client.post(server.address + CHAT, json=chat_body()))
            await asyncio.to_thread(gate.wait_for, 1)
            gate.open()
            await asyncio.to_thread(server.close)
            with pytest.raises(http.TransportError):
                await asked

    gate = Gate()
    with FakeOpenAI(lambda text: "yes", faults=[fault], gate=gate) as server:
        asyncio.run(ask(server))


def test_a_redirect_leads_to_another_host_that_remembers_who_came() -> None:
    with FakeOpenAI(lambda text: "yes", faults=[Fault.REDIRECT]) as server:
        response = post(server, CHAT, chat_body())
        assert response.status_code == 307
        assert response.headers["location"].startswith("http://localhost:")
        http.post(response.headers["location"], json={}, timeout=PATIENCE)
        assert [request.path for request in server.elsewhere] == [CHAT]


def test_nobody_can_connect_to_what_is_unreachable() -> None:
    with Unreachable() as nowhere, pytest.raises(http.ConnectTimeout):
        http.get(nowhere.base_url, timeout=0.05)


@pytest.mark.parametrize(
    ("fake", "option", "remedy"),
    [
        (FakeOpenAI, "fault", "did you mean 'faults'"),
        (FakeAnthropic, "recrod", "did you mean 'record'"),
        (FakeSGLang, "models", "did you mean 'model'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(fake: type, option: str, remedy: str) -> None:
    with pytest.raises(ul.ParameterError, match=rf"{fake.__name__}\(\) has no option '{option}'; {remedy}"):
        fake(**{option: 1})
