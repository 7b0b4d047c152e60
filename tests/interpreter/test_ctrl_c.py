"""Ctrl-C while a person waits for a run ends the run: its request is aborted, and the process goes on living.

This file is also the program of the child process that is interrupted.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo, Gate

PATIENCE = 60.0

WAITS: dict[str, Callable[[ul.State], Any]] = {
    "a variable": lambda state: state["x"],
    "a variable with a timeout": lambda state: state.get_var("x", timeout=PATIENCE),
    "an object": lambda state: state.value("x"),
    "facts": lambda state: state.get_meta_info("x"),
    "the text": lambda state: state.text(),
    "messages": lambda state: state.messages(),
    "sync": lambda state: state.sync(),
    "the error": lambda state: state.error(),
    "usage": lambda state: state.usage,
    "cost": lambda state: state.cost,
    "the cache": lambda state: state.explain_cache(),
    "pieces of a variable": lambda state: list(state.text_iter("x")),
    "pieces of the text": lambda state: list(state.text_iter()),
    "a branch": lambda state: state.ret_value[1]["y"],
}


@ul.function
def outside(s: ul.State) -> Any:
    s += "a" + ul.gen("x")
    forks = s.fork(2)
    forks += ul.gen("y")
    return forks


@ul.function
def inside(s: ul.State) -> None:
    s += "a" + ul.gen("x")
    s += s["x"]


@ul.function
async def from_coroutine(s: ul.AsyncState) -> None:
    s += "a" + ul.gen("x")
    await s["x"]


@ul.function
def catching(s: ul.State) -> None:
    s += "a" + ul.gen("x")
    try:
        s += s["x"]
    except KeyboardInterrupt:
        s += ul.gen("never")
    s += s["never"]


def interrupted(read: Callable[[Echo], Any]) -> str:
    """How `read` ends when a signal comes while it waits for a request."""
    gate = Gate()
    echo = Echo(gate=gate)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        gate.wait_for(1)
        while not is_waiting(main):
            os.sched_yield()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # which does not wake up the thread that waits

    threading.Thread(target=interrupt).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        read(echo)
        ended = "was not interrupted"
    except KeyboardInterrupt:
        ended = "interrupted"
    except ul.CancelledError:
        ended = "cancelled"
    loop.streams.run(_turns(), PATIENCE)
    return f"{ended}; {len(echo.aborted)} aborted, {len(echo.active)} active, {echo.calls} called"


async def _turns() -> None:
    """Cancellation is a few turns of the loop away; a request that goes on never ends, since its gate stays shut."""
    for _ in range(100):
        await asyncio.sleep(0)


def is_waiting(thread: int) -> bool:
    """Whether it is inside of a wait of umbel's, or of the standard library's for an answer of another thread."""
    frame = sys._current_frames().get(thread)
    return frame is not None and (frame.f_code.co_name in ("wait_until", "wait"))


def read_outside(echo: Echo, wait: Callable[[ul.State], Any], states: list[ul.State]) -> None:
    states.append(outside.run(backend=echo))
    wait(states[-1])


def waits_for_an_event(echo: Echo) -> None:
    outside.run(backend=echo)
    loop.wait_for(threading.Event())


def child() -> None:
    loop._HEARING_SECONDS = 0.05
    states: list[ul.State] = []
    report: dict[str, Any] = {}
    for name, wait in WAITS.items():
        try:
            report[name] = interrupted(lambda echo, wait=wait: read_outside(echo, wait, states))
            assert states[-1].usage.calls == 0  # waits for the end of all that was in flight
            states[-1]["x"]
        except ul.CancelledError as error:
            report[name] += f"; then {error}"
    report["the body"] = interrupted(lambda echo: inside.run(backend=echo))
    report["a body that catches it"] = interrupted(lambda echo: catching.run(backend=echo))
    report["a batch"] = interrupted(lambda echo: inside.run_batch([{}], backend=echo))
    report["an async body"] = interrupted(lambda echo: from_coroutine.run(backend=echo))
    report["an event, as of a tool"] = interrupted(waits_for_an_event)
    report["a compiled program"] = interrupted(lambda echo: inside.compile().run(backend=echo))
    report["another run"] = inside.run(backend=Echo())["x"]
    print(json.dumps(report))


@pytest.mark.processes
def test_ctrl_c_ends_the_run_that_is_waited_for_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name in WAITS:
        assert report.pop(name) == (
            "interrupted; 1 aborted, 0 active, 1 called; then the run was interrupted by KeyboardInterrupt"
        ), name
    assert report == {
        "the body": "interrupted; 1 aborted, 0 active, 1 called",
        "a body that catches it": "cancelled; 1 aborted, 0 active, 1 called",
        "a batch": "interrupted; 1 aborted, 0 active, 1 called",
        "an async body": "interrupted; 1 aborted, 0 active, 1 called",
        "an event, as of a tool": "interrupted; 0 aborted, 1 active, 1 called",
        "a compiled program": "interrupted; 1 aborted, 0 active, 1 called",
        "another run": "a",
    }


if __name__ == "__main__":
    child()
