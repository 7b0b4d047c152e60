"""Gateways that another process owns: how they are found, left, and followed when their owner replaces them."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from umbel.interpreter.backends import runtime_gateway
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.backends.runtime_gateway import JoinedGateway, SharedFolder, join
from umbel.lang.errors import BackendError, ConnectionLostError, ParameterError


class LivingGateway:
    """The folder of a gateway that lives as long as its lock is held: here, until `end`."""

    def __init__(self) -> None:
        self.folder = runtime_gateway._private_folder()
        self._lock = runtime_gateway._hold_lock(self.folder)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def end(self) -> None:
        os.close(self._lock)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runtime_gateway, "MAX_FOLDER", 300)  # no socket is made in them


@pytest.fixture
def shared() -> Iterator[SharedFolder]:
    folder = SharedFolder(None)
    yield folder
    folder.close()


def lead(shared: SharedFolder, gateway: LivingGateway) -> None:
    shared.lead_to(SimpleNamespace(folder=gateway.folder))  # type: ignore[arg-type]  # its folder is what counts


def test_a_joined_gateway_is_the_one_that_the_owner_runs_now(shared: SharedFolder) -> None:
    first, second = LivingGateway(), LivingGateway()
    lead(shared, first)
    joined = asyncio.run(join(shared.path))
    assert joined.address == f"ipc://{first.folder}/clients"
    assert joined.process_id == os.getpid()
    assert joined.exit_reason() is None
    lead(shared, second)
    assert asyncio.run(join(shared.path)).address == f"ipc://{second.folder}/clients"
    assert joined.address == f"ipc://{first.folder}/clients"  # a link never changes its gateway
    first.end()
    assert shared.address in (joined.exit_reason() or "")
    second.end()


def test_a_process_that_joins_waits_for_the_gateway_that_replaces_a_lost_one(shared: SharedFolder) -> None:
    lost, next_one = LivingGateway(), LivingGateway()
    lead(shared, lost)
    lost.end()

    async def follow() -> JoinedGateway:
        waiting = asyncio.create_task(join(shared.path))
        await asyncio.sleep(0)
        assert not waiting.done()
        lead(shared, next_one)
        return await waiting

    assert asyncio.run(follow()).address == f"ipc://{next_one.folder}/clients"
    next_one.end()


def test_an_owner_that_does_not_replace_its_gateway_is_named(
    shared: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_gateway, "REPLACEMENT_SECONDS", 0.0)
    with pytest.raises(ConnectionLostError, match=f"{shared.path} has ended, and its owner has started no other"):
        asyncio.run(join(shared.path))


def test_an_owner_that_has_ended_is_named_at_once(shared: SharedFolder) -> None:
    os.close(shared._lock)  # as the end of its process does
    with pytest.raises(ConnectionLostError, match=r"shared its runtime at .* has ended; start it again, and share"):
        asyncio.run(join(shared.path))
    shared._lock = os.open(shared.path, os.O_RDONLY)


def test_a_path_at_which_nothing_is_shared_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"no runtime is shared at .*; its owner writes address = runtime.share\(\)"):
        asyncio.run(join(tmp_path / "nothing"))


def test_a_folder_that_others_may_read_is_not_joined(shared: SharedFolder) -> None:
    gateway = LivingGateway()
    gateway.folder.chmod(0o755)
    lead(shared, gateway)
    with pytest.raises(BackendError, match=r"cannot be joined: .* is not a private folder of this user"):
        asyncio.run(join(shared.path))
    gateway.end()


def test_a_joined_gateway_that_hangs_is_left_to_its_owner(shared: SharedFolder) -> None:
    gateway = LivingGateway()
    lead(shared, gateway)
    joined = JoinedGateway(shared.path)
    joined.end_hung("it has not answered for 3.0 s")
    assert joined.exit_reason() == (
        f"it has not answered for 3.0 s; only the owner of {shared.address} can end it and start another"
    )
    joined.close()
    assert gateway.folder.is_dir()
    gateway.end()


def test_a_shared_path_is_taken_over_from_an_owner_that_was_killed_and_from_no_other(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    first = SharedFolder(path)
    with pytest.raises(ParameterError, match="is taken; write a path at which nothing is"):
        SharedFolder(path)
    os.close(first._lock)
    second = SharedFolder(path)
    assert path.stat().st_mode & 0o077 == 0
    second.close()
    assert not path.exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ParameterError, match="is taken"):
        SharedFolder(tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": "/tmp/x"}, r"address='/tmp/x' is none; write the ipc:// address"),
        ({"address": ""}, "address=''"),
        ({"address": "ipc:///tmp/x", "pool_tokens": 100}, "pool_tokens= is its owner's to choose"),
        ({"address": "ipc:///tmp/x", "model": "oracle"}, "model= is its owner's to choose"),
    ],
)
def test_a_wrong_address_or_an_option_next_to_one_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        Runtime(**options)  # type: ignore[arg-type]  # wrong on purpose


def test_a_joined_runtime_does_not_share() -> None:
    with pytest.raises(BackendError, match="has joined ipc:///x; its owner alone can share it"):
        Runtime(address="ipc:///x").share()


# ------------------------------------------------------------------------------------ with processes

CHILD = """
    import json, sys
    from umbel.interpreter.backends.runtime import Runtime
    from umbel.lang.errors import UmbelError

    runtime = Runtime(address=sys.argv[1])
    for prompt in sys.stdin:
        try:
            answer = runtime.complete(prompt, max_tokens=20, temperature=0, ignore_eos=True)
        except UmbelError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps([answer, runtime.capabilities.max_context]), flush=True)
"""


class Joining:
    """A process that joins a runtime, and completes the prompts that it is given."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, prompt: str) -> tuple[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{prompt}\n")
        self._process.stdin.flush()
        text, context = json.loads(self._process.stdout.readline())
        return text, context

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.mark.processes
@pytest.mark.nightly
def test_a_process_joins_follows_a_replaced_gateway_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # real folders: sockets need short paths
    with Runtime("oracle", context_length=500) as owner:
        address = owner.share()
        assert owner.share() == address
        joining = Joining(address)
        text = owner.complete("hello\n", max_tokens=20, temperature=0, ignore_eos=True)
        assert joining.ask("hello") == (text, 500)
        assert owner._process is not None
        first = owner._process.process_id
        psutil.Process(first).kill()
        assert joining.ask("hello") == (text, 500)  # the owner asked for nothing meanwhile
        assert owner._process.process_id != first
        other = Joining(address)
        assert other.ask("hello") == (text, 500)
        other.end()
        assert joining.ask("hello") == (text, 500)
    error, _ = joining.ask("hello")
    assert f"no runtime is shared at {address}" in error
    joining.end()
