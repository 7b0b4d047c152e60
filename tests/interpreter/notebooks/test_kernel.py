"""Programs in the cells of a real kernel: interrupts, async cells, bars, lines of cells."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.processes

PATIENCE = 60  # seconds that a message may take on a machine under load
# A backend that says when it is asked and never answers. `ended` is set when a request ends.
PROGRAMS = """
import asyncio, os, sys, threading
import umbel as ul

@ul.function
def waits(s):
    s += "Say:" + ul.gen("a", max_tokens=8)
    s["a"]

@ul.function
def says(s, topic):
    s += f"On {topic}:" + ul.gen("a", max_tokens=8)

class Silent(ul.Echo):
    def __init__(self):
        super().__init__(gate=ul.Gate())
        self.ended = threading.Event()

    async def generate(self, request):
        print("asked", flush=True)
        try:
            async for piece in super().generate(request):
                yield piece
        finally:
            self.ended.set()

silent = Silent()

def tell_of_wait():  # writes "waits" once the main thread blocks in a read
    main = threading.main_thread().ident

    def tell():
        while sys._current_frames()[main].f_code.co_name != "wait_until":
            os.sched_yield()
        print("waits", flush=True)

    threading.Thread(target=tell).start()
"""


@dataclass
class Shown:
    """What a cell showed: its texts, its outputs by kind in order, its error's name."""

    text: str = ""
    outputs: list[dict[str, str]] = field(default_factory=list)
    updates: list[dict[str, str]] = field(default_factory=list)
    error: str = ""

    @property
    def html(self) -> str:
        return "\n".join(output.get("text/html", "") for output in self.outputs)


class Kernel:
    """A kernel of this environment, and its client."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def run(self, code: str, *, interrupt_at: tuple[str, ...] = ()) -> Shown:
        """Runs a cell to its end. `interrupt_at`: the kernel is interrupted once all of these were written."""
        sent = self.client.execute(code)
        shown = Shown()
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=PATIENCE)
            content = message["content"]
            if message["msg_type"] == "stream":  # also of threads, which are of no cell
                shown.text += content["text"]
                if interrupt_at and all(text in shown.text for text in interrupt_at):
                    interrupt_at = ()
                    self.manager.interrupt_kernel()
            if message["parent_header"].get("msg_id") != sent:
                continue
            match message["msg_type"]:
                case "display_data" | "execute_result":
                    shown.outputs.append(content["data"])
                case "update_display_data":
                    shown.updates.append(content["data"])
                case "error":
                    shown.error = content["ename"]
                case "status" if content["execution_state"] == "idle":
                    return shown

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        assert kernel.run(PROGRAMS).error == ""
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("waits.run(backend=silent)", "KeyboardInterrupt"),
        ("waits.run_batch([{}], backend=silent)", "KeyboardInterrupt"),
        (
            "for piece in waits.run(backend=silent, stream=True).text_iter(): tell_of_wait()",
            "KeyboardInterrupt",
        ),
        ("await waits.run_async(backend=silent)", "CancelledError"),
    ],
    ids=["run", "batch", "stream", "async"],
)
def test_an_interrupt_ends_the_request_and_the_next_cell_runs(kernel: Kernel, cell: str, error: str) -> None:
    kernel.run("silent = Silent()")
    written = ("asked", "waits") if "tell" in cell else ("asked",)  # between its reads a loop's body is interrupted
    assert kernel.run(cell, interrupt_at=written).error == error
    assert kernel.run(f"print(silent.ended.wait({PATIENCE}))").text == "True\n"
    assert kernel.run('print(says.run(topic="x", backend=ul.Echo([" fine"]))["a"])').text == " fine\n"


READ = """
state = await waits.run_async(backend=silent, stream=True)
reading = asyncio.ensure_future(state._sink.read_async("a", None))
await asyncio.sleep(0)
await asyncio.sleep(0)
print("reads", flush=True)
await reading
"""


def test_an_interrupt_stops_the_run_that_a_coroutine_reads(kernel: Kernel) -> None:
    kernel.run("silent = Silent()")
    assert kernel.run(READ, interrupt_at=("asked", "reads")).error.endswith("CancelledError")
    assert kernel.run(f"print(silent.ended.wait({PATIENCE}))").text == "True\n"
    assert "interrupted by KeyboardInterrupt" in kernel.run("print(repr(state))").text


def test_async_cells_run_programs(kernel: Kernel) -> None:
    shown = kernel.run(
        'state = await says.run_async(topic="x", backend=ul.Echo([" fine"]))\n'
        'print(await state["a"])\n'
        'async for piece in says.run(topic="y", backend=ul.Echo([" so"]), stream=True).text_async_iter():\n'
        '    print(piece, end="|")'
    )
    assert shown.text == " fine\nOn y:| so|"
    assert shown.error == ""


def test_a_batch_has_a_bar_that_is_replaced_and_stays(kernel: Kernel) -> None:
    shown = kernel.run(
        'results = says.run_batch([{"topic": "a"}, {"topic": "b"}], backend=ul.Echo([" 1", " 2"]), progress=True)\n'
        "results"
    )
    bar, table = shown.outputs
    assert 'value="0" max="2"' in bar["text/html"]
    assert 'value="2" max="2"' in shown.updates[-1]["text/html"]
    assert shown.updates[-1]["text/plain"].startswith("programs 2/2  ")
    assert "2 results" in table["text/html"]
    assert shown.text == ""


def test_lines_of_a_cell_are_named_as_in_its_tracebacks(kernel: Kernel) -> None:
    assert (
        "In[1]:11 in says"
        in kernel.run('state = says.run(topic="x", backend=ul.Echo([" fine"]))\nprint(state.explain_cache())').text
    )


def test_graphs_name_lines_of_cells(kernel: Kernel) -> None:
    listing = kernel.run("print(says.trace().text())").text
    assert "  In[1]\n" in listing
    assert "line 11" in listing
    assert "In[1]:11" in kernel.run("says.trace()").html


def test_states_and_usages_are_shown_as_html(kernel: Kernel) -> None:
    kernel.run('state = says.run(topic="<b>", backend=ul.Echo([" fine"])); state.sync()')
    content = kernel.run("state").html
    assert "On <span" in content
    assert "&lt;b&gt;" in content
    assert "<small>" in content  # the legend
    assert "<td" in kernel.run("state.usage").html


def test_a_verbose_run_is_one_text_in_the_colours_of_a_terminal(kernel: Kernel) -> None:
    shown = kernel.run('says.run(topic="x", backend=ul.Echo([" fine and well"]), verbose=True).sync()')
    assert shown.outputs == []
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown.text).rstrip().endswith("\nOn x: fine and well")
    assert "\x1b[" in shown.text
