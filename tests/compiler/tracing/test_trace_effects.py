"""What a program does beside saying things is told, with the line, and done once."""

import cProfile
import datetime
import gc
import io
import json
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.tracing.effects import Effect
from umbel.compiler.tracing.trace import trace

HERE = Path(__file__)


def effects_of(body: Callable[..., Any], **static: Any) -> tuple[Effect, ...]:
    return trace(ul.function(body), static_args=static).effects


def noticed(act: Callable[[], object]) -> set[tuple[str, str]]:
    def program(s):
        act()

    return {(effect.what, effect.kind) for effect in effects_of(program)}


def _written(path: Path) -> None:
    with open(path, "w") as file:
        file.write("a")


EFFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "print": (lambda place: print("a", file=io.StringIO()), "print()"),
    "a file": (lambda place: _written(place / "b"), "TextIOWrapper.write()"),
    "bytes": (lambda place: (place / "b").write_bytes(b"a"), "pathlib.write_bytes()"),
    "json": (lambda place: json.dump([1], (place / "b").open("w")), "json.dump()"),
    "remove": (lambda place: os.remove(place / "a"), "os.remove()"),
    "mkdir": (lambda place: (place / "d").mkdir(), "pathlib.mkdir()"),
    "makedirs": (lambda place: os.makedirs(place / "d" / "e"), "os.makedirs()"),
    "copy": (lambda place: shutil.copyfile(place / "a", place / "b"), "shutil.copyfile()"),
    "rmtree": (lambda place: shutil.rmtree(place), "shutil.rmtree()"),
    "system": (lambda place: os.system("true"), "os.system()"),
    "subprocess": (lambda place: subprocess.run([sys.executable, "-c", ""], check=True), "subprocess.run()"),
    "logging": (lambda place: logging.getLogger("umbel.test").warning("a"), "logging.warning()"),
    "sleep": (lambda place: time.sleep(0), "time.sleep()"),
    "a thread": (lambda place: threading.Thread(target=int).start(), "threading.start()"),
}


@pytest.mark.parametrize(("act", "what"), EFFECTS.values(), ids=EFFECTS)
def test_what_is_done(act: Callable[[Path], object], what: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    assert (what, "effect") in noticed(lambda: act(tmp_path))


def test_a_connection_is_an_effect() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def connect() -> None:
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(b"a")

    with server:
        found = noticed(connect)
    assert {("socket.create_connection()", "effect"), ("socket.sendall()", "effect")} <= found


VOLATILE: dict[str, tuple[Callable[[], object], str]] = {
    "time": (time.time, "time.time()"),
    "perf_counter": (time.perf_counter_ns, "time.perf_counter_ns()"),
    "now": (datetime.datetime.now, "datetime.now()"),
    "utcnow": (lambda: datetime.datetime.now(datetime.UTC), "datetime.now()"),
    "today": (datetime.date.today, "date.today()"),
    "uuid1": (uuid.uuid1, "uuid.uuid1()"),
    "uuid4": (uuid.uuid4, "uuid.uuid4()"),
    "choice": (lambda: random.choice([1, 2]), "random.choice()"),
    "random": (random.random, "Random.random()"),
    "shuffle": (lambda: random.shuffle([1, 2]), "random.shuffle()"),
    "secrets": (secrets.token_hex, "secrets.token_hex()"),
    "urandom": (lambda: os.urandom(1), "os.urandom()"),
    "getpid": (os.getpid, "os.getpid()"),
    "environ": (lambda: os.environ["PATH"], "os.environ"),
    "getenv": (lambda: os.getenv("PATH"), "os.getenv()"),
    "id": (lambda: id(0), "id()"),
}


@pytest.mark.parametrize(("act", "what"), VOLATILE.values(), ids=VOLATILE)
def test_what_is_different_each_time(act: Callable[[], object], what: str) -> None:
    assert (what, "volatile") in noticed(lambda: act())


@pytest.mark.parametrize(
    "act",
    [
        lambda: random.Random(3).choice([1, 2]),
        lambda: io.StringIO().write("a"),
        lambda: io.BytesIO().write(b"a"),
        lambda: HERE.read_text(),
        lambda: json.dumps({"a": [1]}),
        lambda: datetime.date.fromisoformat("2024-01-01").isoformat(),
        lambda: logging.getLogger("umbel.test").debug("not shown"),
        lambda: sorted([3, 1]),
    ],
)
def test_what_is_neither(act: Callable[[], object]) -> None:
    assert noticed(act) == set()


def test_an_effect_is_done_once_and_has_its_line() -> None:
    done: list[str] = []

    def program(s, q):
        for _ in range(3):
            s += q + f"{done.append('x')}"
            print("hello", file=io.StringIO())

    found = effects_of(program)
    assert done == ["x"] * 3
    first = program.__code__.co_firstlineno
    assert [str(effect) for effect in found] == [f"{__file__}:{first + 3}: print()"]
    assert found[0].line.function == "program"


def test_what_the_recorder_itself_does_is_not_told() -> None:
    """It asks for the ids of nodes, say."""

    def program(s, q):
        s += f"{q} {q!r}" + ul.gen("x") + ul.select("y", ["a", q])
        with s.fork(2) as forks:
            forks += ul.gen("z", dtype=int)
        s["w"] = [s["x"], *s["z"]]

    assert effects_of(program) == ()


def test_the_collector_does_nothing_of_the_program() -> None:
    def hook(phase: str, info: object) -> None:
        time.time()

    class Closing:
        def __del__(self) -> None:
            time.time()

    def program(s):
        Closing()
        gc.collect()

    gc.callbacks.append(hook)
    try:
        assert effects_of(program) == ()
    finally:
        gc.callbacks.remove(hook)


def test_programs_inside_are_watched() -> None:
    @ul.function
    def inner(s):
        s += f"{time.time()}"

    def program(s):
        inner(s)
        inner.run()

    found = effects_of(program)
    assert [effect.line.number for effect in found] == [inner.body.function.__code__.co_firstlineno + 2]


def test_async_programs_are_watched() -> None:
    async def program(s):
        s += ul.gen("x")
        await s["x"]
        print("done", file=io.StringIO())

    assert [effect.what for effect in effects_of(program)] == ["print()"]


def test_one_warning_names_all_lines() -> None:
    def program(s):
        print("a", file=io.StringIO())
        s += f"{time.time()}"

    first = program.__code__.co_firstlineno
    for ask in (ul.function(program).trace, ul.function(program).compile):
        with pytest.warns(ul.TraceWarning) as caught:
            ask()
        assert len(caught) == 1
        assert caught[0].filename == __file__
    assert str(caught[0].message) == (
        f"program was traced. What it does is done once, now, and never when the graph runs: {__file__}:{first + 1}: "
        f"print(); different each time, and kept in the graph as it is now: {__file__}:{first + 2}: time.time(). "
        "Move it out of the program, and give the program what it needs as an argument"
    )


def test_no_effects_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ul.function(lambda s, q: None).trace()


# ------------------------------------------------------------------------------------------ other profilers


@pytest.mark.parametrize("failing", [False, True])
def test_the_hook_is_gone_afterwards(failing: bool) -> None:
    def program(s):
        assert sys.getprofile() is not None
        if failing:
            raise KeyError

    before = sys.getprofile()
    with suppress(KeyError):
        ul.function(program).trace()
    assert sys.getprofile() is before


def test_another_profiler_goes_on() -> None:
    seen: list[str] = []

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            seen.append(getattr(argument, "__name__", ""))

    def program(s):
        print("a", file=io.StringIO())

    sys.setprofile(profiler)
    try:
        found = trace(ul.function(program))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert [effect.what for effect in found.effects] == ["print()"]
    assert found.watched
    assert "print" in seen


def test_next_to_cprofile_effects_are_seen_where_it_leaves_the_hook_free() -> None:
    """Since Python 3.12 cProfile listens to `sys.monitoring`; before, it takes the one hook there is."""
    free = sys.version_info >= (3, 12)

    def program(s):
        print("a", file=io.StringIO())

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        found = trace(ul.function(program))
    finally:
        profiler.disable()
    assert [effect.what for effect in found.effects] == ["print()"] * free
    assert found.watched == free


def test_other_threads_are_not_watched() -> None:
    seen: list[object] = []

    def program(s):
        thread = threading.Thread(target=lambda: seen.append(sys.getprofile()))
        thread.start()
        thread.join()

    effects_of(program)
    assert seen == [None]
