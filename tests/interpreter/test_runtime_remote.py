"""Runtimes on other machines: keys, what a client finds out about its server, and equal texts."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from umbel.interpreter.backends import runtime_link, runtime_remote
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.backends.runtime_remote import RemoteGateway, client_key, make_key, reach
from umbel.lang.errors import BackendError, CapabilityError, ConnectionLostError, ParameterError
from umbel.lang.transport.keys import KeyPair, read_clients, read_key
from umbel.lang.transport.process_life import TimeSpent

from .conftest import PATIENCE


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keys() -> KeyPair:
    """Makes the keys of a server, a client it admits and one that it does not → those of the server."""
    server = make_key("server.key")
    make_key("laptop.key", server="server.key", clients="clients")
    make_key("stranger.key", server=server.public)
    return server


def test_keys_are_made_for_a_server_and_the_clients_that_it_admits() -> None:
    server = keys()
    laptop = read_key("laptop.key")
    assert server.server is None
    assert laptop.server == read_key("stranger.key").server == server.public
    assert read_clients("clients") == {laptop.public: "laptop"}
    assert os.stat("laptop.key").st_mode & 0o777 == 0o600


ADDRESS = "tcp://127.0.0.1:1"
LISTEN = {"address": ADDRESS, "key": "server.key", "clients": "clients"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": ADDRESS}, "a tcp address needs key="),
        ({"address": ADDRESS, "key": "none.key"}, "'none.key' cannot be read as a key file"),
        ({"address": ADDRESS, "key": "server.key"}, "names no server; add a line: server ="),
        ({"address": ADDRESS, "key": 3}, "key=3 is no path"),
        (
            {"address": "tcp://127.0.0.1", "key": "laptop.key"},
            "is none; write the ipc:// address .* or tcp://HOST:PORT",
        ),
        ({"address": "ipc:///x", "key": "laptop.key"}, "key= is for an address of another machine; leave it out"),
        ({"model": "oracle", "key": "laptop.key"}, "key= is for an address of another machine; write address="),
        ({"address": ADDRESS, "key": "laptop.key", "listen": LISTEN}, "listen= is its owner's to choose"),
        ({"model": "oracle", "listen": {**LISTEN, "clients": "none"}}, "'none' cannot be read as a list of clients"),
        ({"model": "oracle", "listen": {"address": ADDRESS, "key": "server.key"}}, r"listen\['clients'\]=None"),
        ({"model": "oracle", "listen": {**LISTEN, "port": "1"}}, "listen= has no option 'port'"),
        ({"model": "oracle", "listen": {**LISTEN, "address": "ipc:///x"}}, "write tcp://HOST:PORT, or . for the port"),
        ({"model": "oracle", "listen": {**LISTEN, "key": "clients"}}, "may be read by other users|is no key file"),
        ({"model": "oracle", "listen": "tcp://x:1"}, "listen must be a dict with address, key and clients"),
    ],
)
def test_a_wrong_key_address_or_list_is_refused_before_anything_starts(options: dict[str, object], says: str) -> None:
    keys()
    with pytest.raises(ParameterError, match=says):
        Runtime(**options)  # type: ignore[arg-type]  # wrong on purpose


# ------------------------------------------------------------------------------------ a server that is a socket


@asynccontextmanager
async def server(
    pair: KeyPair, admits: str = "200", address: str = "tcp://127.0.0.1:*"
) -> AsyncIterator[tuple[str, "zmq.Socket[bytes]"]]:
    """A CURVE server that admits every client, or none → its address and its socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap, router = context.socket(zmq.REP), context.socket(zmq.ROUTER)
    zap.bind("inproc://zeromq.zap.01")
    router.curve_server, router.curve_secretkey = True, pair.secret.encode()
    router.setsockopt(zmq.ZAP_DOMAIN, b"test")
    router.bind(address)

    async def answer() -> None:
        while True:
            if zap.poll(0):
                _, request, *_ = zap.recv_multipart()
                zap.send_multipart([b"1.0", request, admits.encode(), b"", b"", b""])
            await asyncio.sleep(0)

    answering = asyncio.create_task(answer())
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    try:
        yield bound.rstrip(b"\0").decode(), router
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        context.destroy(linger=0)


def play(story: Callable[["zmq.Context[zmq.Socket[bytes]]"], Awaitable[None]]) -> None:
    async def told() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            async with asyncio.timeout(20):
                await story(context)
        finally:
            context.destroy(linger=0)

    asyncio.run(told())


@pytest.mark.processes
def test_a_key_that_is_not_admitted_and_a_server_with_another_key_are_told_apart() -> None:
    pair = keys()

    async def story(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        async with server(pair, "400") as (address, _):
            with pytest.raises(BackendError, match=r"does not admit the public key .*; its owner adds it to the list"):
                await reach(address, client_key("stranger.key"), context)
        async with server(make_key("other.key")) as (address, _):
            with pytest.raises(BackendError, match=r"it has another key than .*, or is no runtime"):
                await reach(address, client_key("laptop.key"), context)

    play(story)


@pytest.mark.processes
def test_a_server_that_is_not_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = keys()

    async def story(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        async with server(pair) as (address, _):
            pass  # its port is free now
        waiting = asyncio.create_task(reach(address, client_key("laptop.key"), context))
        await asyncio.sleep(0)
        async with server(pair, address=address):
            assert (await waiting).exit_reason() is None
        monkeypatch.setattr(runtime_remote, "REACH_SECONDS", 0.0)
        with pytest.raises(ConnectionLostError, match="cannot be reached; is its owner running"):
            await reach(address, client_key("laptop.key"), context)

    play(story)


@pytest.mark.processes
def test_a_server_that_is_not_there_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys()
    monkeypatch.setattr(runtime_remote, "REACH_SECONDS", 0.0)
    with pytest.raises(
        ConnectionLostError, match=r"^tcp\S+ cannot be reached; is its owner running, and listening there"
    ):
        told(Runtime(address=ADDRESS, key="laptop.key"))


@pytest.mark.processes
def test_a_connection_that_is_lost_is_not_taken_up_again() -> None:
    """The gateway would take it for another client."""
    pair = keys()

    async def story(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        async with server(pair) as (address, router):
            gateway = RemoteGateway(address, client_key("laptop.key"))
            with context.socket(zmq.DEALER) as socket:
                gateway.attach(socket)
                await asyncio.to_thread(socket.send, b"hello")
                while not router.poll(0):
                    await asyncio.sleep(0)
                assert gateway.exit_reason() is None
                router.close(linger=0)
                while gateway.exit_reason() is None:
                    await asyncio.sleep(0)
                assert gateway.exit_reason() == f"the connection to {address} was lost"

    play(story)


def test_a_silent_server_is_given_up_after_longer_than_a_process_on_this_machine() -> None:
    gateway = RemoteGateway(ADDRESS, KeyPair("", "", ""))
    stay = TimeSpent()
    stay.idle = 31.0
    assert gateway.trouble(stay) is None  # it starts
    gateway.was_ready = True
    assert gateway.trouble(stay) == f"{ADDRESS} has not answered for 31 s"
    stay.idle = 29.0
    assert gateway.trouble(stay) is None
    gateway.end_hung("silent")
    assert gateway.exit_reason() == "silent; only its owner can end it and start another"


# ------------------------------------------------------------------------------------ with processes


@pytest.fixture
def owner() -> Iterator[Runtime]:
    keys()
    with Runtime("oracle", context_length=500, listen={**LISTEN, "address": "tcp://127.0.0.1:*"}) as owner:
        yield owner.wait_ready()


def told(runtime: Runtime, prompt: str = "hello") -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    final = runtime.final_of(prompt, max_tokens=20, temperature=0, ignore_eos=True)
    return final.completions[0].text, final.usage.cached_tokens


@pytest.mark.processes
def test_a_remote_client_gets_the_texts_of_a_local_one_and_a_cache_of_its_own(
    owner: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key("second.key", server="server.key", clients="clients")  # while the gateway runs
    first, second = (Runtime(address=owner.listens_on, key=f"{name}.key") for name in ("laptop", "second"))
    prompt = "a prompt that is long enough to be cached " * 3
    local, _ = told(owner, prompt)
    assert told(owner, prompt)[1] > 50
    for remote in (first, second):
        assert told(remote, prompt) == (local, 0)
        assert told(remote, prompt)[1] > 50
        assert remote.capabilities == owner.capabilities
        assert remote.options == owner.options
    with pytest.raises(CapabilityError, match="'flush_cache' is not for clients of other machines"):
        first.flush_cache()
    with pytest.raises(BackendError, match="does not admit"):
        told(Runtime(address=owner.listens_on, key="stranger.key"))
    with monkeypatch.context() as other:
        other.setattr(runtime_link, "__version__", "0.0.1")
        with pytest.raises(
            BackendError, match=r"the runtime is umbel \S+ and this program umbel 0\.0\.1; install the same"
        ):
            told(Runtime(address=owner.listens_on, key="laptop.key"))

    assert owner._process is not None
    address = owner.listens_on
    psutil.Process(owner._process.process_id).kill()
    assert told(first, prompt)[0] == local  # the owner has asked for nothing: it listens again by itself
    assert first.listens_on == address
    for remote in (first, second):
        remote.shutdown()
    assert told(owner, prompt)[0] == local


CLIENT = """
import sys
import umbel
from umbel.interpreter.backends import runtime_remote

runtime = umbel.Runtime(address=sys.argv[1], key=sys.argv[2])
for line in sys.stdin:
    seconds, _, prompt = line.partition(" ")  # to wait for a server, and what it is asked
    runtime_remote.REACH_SECONDS = float(seconds)
    try:
        print(runtime.complete(prompt, max_tokens=20, temperature=0, ignore_eos=True), flush=True)
    except umbel.UmbelError as error:
        print(type(error).__name__, flush=True)
runtime.shutdown()
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_two_processes_go_on_with_a_server_that_was_started_again() -> None:
    keys()
    make_key("second.key", server="server.key", clients="clients")
    listen = {**LISTEN, "address": "tcp://127.0.0.1:*"}
    with Runtime("oracle", context_length=500, listen=listen) as owner:
        address, expected = owner.wait_ready().listens_on, told(owner, "hello\n")[0]
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, address, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for key in ("laptop.key", "second.key")
        ]
        assert asked(clients, "hello") == [expected] * 2
    for client in clients:  # while no server is there; on a busy machine one starts in more than ten seconds
        assert client.stdin is not None
        print(f"{PATIENCE} hello", file=client.stdin, flush=True)
    with Runtime("oracle", context_length=500, listen={**listen, "address": address}) as owner:
        owner.wait_ready()
        assert [client.stdout.readline().rstrip("\n") for client in clients if client.stdout] == [expected] * 2
        assert asked(clients, "hello") == [expected] * 2
    assert asked(clients, "hello", 1.0) == ["ConnectionLostError"] * 2
    for client in clients:
        client.communicate()
        assert client.returncode == 0


def asked(clients: Sequence["subprocess.Popen[str]"], prompt: str, seconds: float = PATIENCE) -> list[str]:
    for client in clients:
        assert client.stdin is not None
        print(seconds, prompt, file=client.stdin, flush=True)
    return [client.stdout.readline().rstrip("\n") for client in clients if client.stdout]
