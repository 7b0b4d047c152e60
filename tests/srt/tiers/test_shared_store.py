"""The tier in a shared store: a real Redis server, one that dies and comes back, and servers that are none."""

import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from umbel.lang.errors import ParameterError
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.tiers import shared_store
from umbel.srt.tiers.access import ThreadedAccess
from umbel.srt.tiers.page_format import PageFormat
from umbel.srt.tiers.shared_store import SharedStore
from umbel.srt.tiers.tier import Payload

from .pages import PAGE, chain, pages

redis = pytest.importorskip("redis", reason="the store extra is not installed")
pytest.importorskip("redis", reason="the store extra is not installed")

SCHEME = b"s" * 32
WAIT = 60.0  # seconds that a process may take on a busy machine


def values(found: list[Payload | None]) -> list[int | None]:
    return [None if page is None else int(page[0]) for page in found]


def store_at(url: str, scheme: bytes = SCHEME, clock: VirtualClock | None = None) -> SharedStore:
    made = SharedStore(url, scheme, clock=clock)
    made.open()
    return made


class RedisServer:
    """A redis-server process on a free port of the loopback."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self._options = options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--save", "", *self._options),
            ],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
        pytest.fail("the server does not listen")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)

    @property
    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    made = RedisServer(tmp_path)
    yield made
    made.kill()


class Peer:
    """A server on the loopback that handles each connection as the test says."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except OSError:
            return

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


@pytest.mark.processes
def test_another_engine_reuses_what_one_has_stored(server: RedisServer) -> None:
    names = chain("a", 4)
    store_at(server.url).store(names[:3], pages(3, 5))
    other = store_at(server.url)
    assert other.longest(names) == 3
    loaded = other.load(names)
    assert values(loaded) == [5, 6, 7, None]
    assert all(page is None or page.flags.writeable for page in loaded)
    other.forget(names[1:2])
    assert other.longest(names) == 1
    facts = other.facts()
    assert (facts.hits, facts.misses, facts.faults) == (3, 1, {})


@pytest.mark.processes
def test_engines_of_another_model_share_nothing(server: RedisServer) -> None:
    store_at(server.url).store(chain("a", 1), pages(1))
    other = store_at(server.url, b"o" * 32)
    assert other.longest(chain("a", 1)) == 0
    assert other.load(chain("a", 1)) == [None]
    (key,) = server.client.keys()
    assert key.decode() == f"umbel:1:{SCHEME.hex()[:32]}:{chain('a', 1)[0].hex()}"


@pytest.mark.processes
def test_a_page_after_a_gap_is_not_stored(server: RedisServer) -> None:
    one = store_at(server.url)
    names = chain("a", 3)
    one.store(names, pages(2))
    assert server.client.dbsize() == 0
    assert one.facts().dropped == 2
    store_at(server.url).store(names[:1], pages(1))
    one.store(names, pages(2))
    assert one.longest(names) == 3


@pytest.mark.processes
def test_more_than_one_exchange_holds_is_written_in_several(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "_BATCH_BYTES", 2 * PAGE + 1)
    one = store_at(server.url)
    one.store(chain("a", 7), pages(7))
    assert (one.longest(chain("a", 7)), one.facts().stored) == (7, 7)


def flipped(value: bytes) -> bytes:
    return value[:500] + bytes([value[500] ^ 1]) + value[501:]


def newer(value: bytes) -> bytes:
    return value[:8] + (99).to_bytes(4, "little") + value[12:]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda value: b"", "truncated"),
        (lambda value: value[:-1], "truncated"),
        (lambda value: b"x" * 2_000, "foreign"),
        (flipped, "damaged"),
        (lambda value: PageFormat(b"o" * 32).header(chain("a", 1)[0], pages(1)[0]) + bytes(PAGE), "other model"),
        (lambda value: PageFormat(SCHEME).header(b"o" * 32, pages(1)[0]) + bytes(PAGE), "other name"),
        (newer, "newer"),
    ],
)
def test_a_value_that_is_no_page_is_a_miss_counted_said_and_removed(
    server: RedisServer, caplog: pytest.LogCaptureFixture, harm: Callable[[bytes], bytes], kind: str
) -> None:
    one = store_at(server.url)
    one.store(chain("a", 1), pages(1))
    client = server.client
    (key,) = client.keys()
    client.set(key, harm(client.get(key)))
    with caplog.at_level(logging.WARNING, "umbel.engine"):
        assert one.load(chain("a", 1)) == [None]
    assert one.facts().faults == {kind: 1}
    assert len(caplog.messages) == 1
    assert client.exists(key) == (kind == "newer")
    other_type = SharedStore(server.url, SCHEME)
    client.delete(key)
    client.lpush(key, "x")
    assert other_type.load(chain("a", 1)) == [None]
    assert other_type.facts().misses == 1


@pytest.mark.processes
def test_a_server_that_died_is_left_alone_and_used_again_when_it_is_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    one = store_at(server.url, clock=clock)
    one.store(chain("a", 1), pages(1))
    server.kill()
    with caplog.at_level(logging.WARNING, "umbel.engine"):
        for _ in range(20):
            assert one.longest(chain("a", 1)) == 0
            assert one.load(chain("a", 1)) == [None]
            one.store(chain("b", 1), pages(1))
    assert one.facts().faults == {"unreachable": shared_store._OPEN_AFTER}
    assert len(caplog.messages) == 1
    assert f"127.0.0.1:{server.port} cannot be reached" in caplog.messages[0]
    clock.advance(shared_store._PAUSE)
    one.longest(chain("a", 1))
    one.longest(chain("a", 1))
    assert one.facts().faults == {"unreachable": shared_store._OPEN_AFTER + 1}, "one try a pause"
    server.start()
    clock.advance(shared_store._PAUSE)
    one.store(chain("c", 2), pages(2, 3))
    assert values(one.load(chain("c", 2))) == [3, 4]


@pytest.mark.processes
def test_a_full_server_is_a_cache_that_stores_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        one = store_at(server.url)
        with caplog.at_level(logging.WARNING, "umbel.engine"):
            for number in range(40):
                one.store(chain(f"n{number}-", 1), [np.full(200_000, number, dtype=np.uint8)])
        assert one.facts().faults["full"] > 0
        assert 0 < one.facts().stored < 40
        assert one.facts().dropped == 40 - one.facts().stored
        assert len(caplog.messages) == 1
        assert "no memory left" in caplog.messages[0]
        assert values(one.load(chain("n0-", 1))) == [0], "what is there is read"
    finally:
        server.kill()


@pytest.mark.processes
def test_a_wrong_password_is_said_without_the_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path, "--requirepass", "right")
    try:
        with caplog.at_level(logging.DEBUG):
            for url in (f"redis://127.0.0.1:{server.port}", f"redis://:wr%2Fong@127.0.0.1:{server.port}"):
                one = store_at(url)
                one.store(chain("a", 1), pages(1))
                assert one.longest(chain("a", 1)) == 0
                assert one.facts().faults["login"] > 0
            good = store_at(f"redis://:right@127.0.0.1:{server.port}")
            good.store(chain("a", 1), pages(1))
            assert good.longest(chain("a", 1)) == 1
        assert "refuses the login" in caplog.text
        assert "ong" not in caplog.text.replace("belongs", "")
        assert ":right" not in caplog.text
    finally:
        server.kill()


def greet(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    connection.recv(1)


def hang(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.recv(1 << 16)
    threading.Event().wait(WAIT)


def lie(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b":7\r\n")


@pytest.mark.processes
@pytest.mark.parametrize(("serve", "kind"), [(greet, "foreign"), (hang, "slow"), (lie, "slow")])
def test_servers_that_are_none_are_misses(
    serve: Callable[[socket.socket], None], kind: str, peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "SOCKET_SECONDS", 0.2)
    peers.append(Peer(serve))
    one = SharedStore(peers[0].url, SCHEME, clock=VirtualClock())
    for _ in range(6):
        assert one.longest(chain("a", 2)) == 0
        assert one.load(chain("a", 2)) == [None, None]
        one.store(chain("a", 2), pages(2))
    assert one.facts().stored == 0
    faults = one.facts().faults
    assert kind in faults
    assert set(faults) <= {kind, "foreign"}
    assert sum(faults.values()) == shared_store._OPEN_AFTER
    assert peers[0].connections <= shared_store._OPEN_AFTER
    one.close()


@pytest.mark.processes
def test_a_store_slowed_by_100_ms_a_page_is_measured_and_can_be_given_up(
    server: RedisServer, peers: list[Peer]
) -> None:
    """What is decided from it: test_rates.py. Nothing waits for it in the engine's thread."""

    def slow(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as real:

            def back() -> None:
                while data := real.recv(PAGE):  # about a page
                    time.sleep(0.1)
                    connection.sendall(data)

            threading.Thread(target=back, daemon=True).start()
            while data := connection.recv(1 << 16):
                real.sendall(data)

    store_at(server.url).store(chain("a", 3), pages(3, 5))
    peers.append(Peer(slow))
    came = threading.Semaphore(0)
    access = ThreadedAccess(SharedStore(peers[0].url, SCHEME), page_bytes=PAGE, notify=came.release)
    run = access.look(chain("a", 3))
    assert came.acquire(timeout=WAIT)
    assert run.found == 3
    run.load(0, 3)
    while not run.done:
        assert came.acquire(timeout=WAIT)
    assert values(list(run.take())) == [5, 6, 7]
    facts = access.facts()
    assert facts.latency >= 0.1
    assert facts.seconds_per_byte * PAGE >= 0.03
    access.close(WAIT)


@pytest.mark.parametrize(
    "url", ["http://x", "redis://host:port/0", "redis://[x", "127.0.0.1:6379", "redis://:se/cret@h:x"]
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ParameterError, match="shared_cache") as refused:
        SharedStore(url, SCHEME)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:pass@host:1/2?x=1", "host:1"),
        ("redis://:p/a#s@s@host", "host"),
        ("unix://user:pass@/run/redis.sock?db=1", "/run/redis.sock"),
        ("redis://", "localhost"),
    ],
)
def test_logs_name_the_host_alone(url: str, address: str) -> None:
    assert shared_store._address(url) == address
