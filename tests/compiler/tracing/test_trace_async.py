"""Async programs are traced to their end, here and now: what they await of their own is there at once."""

import asyncio
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.operations import Append, Argument, Begin, Generate

from .traces import refused, said


@ul.function(temperature=0.5, max_tokens=7)
def inner(s, word):
    s += f"<{word}>" + ul.gen("inner", top_p=0.5)
    return s["inner"]


def generates(graph: ul.Graph) -> list[Generate]:
    return [node.op for node in graph.nodes if isinstance(node.op, Generate)]


@ul.function(temperature=0.5)
async def asking(s, word):
    s += f"<{word}>" + ul.gen("x") + ul.gen("y", dtype=int)
    x, y = await asyncio.gather(s["x"], s.get_var("y"))
    s += x + f"{await s.value('y')}"
    await s.sync()
    return [y, await s.text()]


def test_async_programs_are_traced_to_their_end() -> None:
    graph = asking.trace()
    assert len(graph.result.inputs) == 2
    assert [type(node.op) for node in graph.streams[0]] == [Begin, *[Append] * 3, Generate, Generate, Append, Append]


def test_inside_a_running_loop() -> None:
    async def main() -> ul.Graph:
        graph = asking.trace()
        await asyncio.sleep(0)  # the loop is still there
        return graph

    assert len(asyncio.run(main()).nodes) == len(asking.trace().nodes)


def test_async_programs_inside_async_programs() -> None:
    @ul.function
    async def outer(s, q):
        [y, _] = await asking(s, q)
        states = await asyncio.gather(*(asking.run_async(word) for word in ("a", q)))
        plain = await inner.run_async(y)
        s += states[0].ret_value[0] + await states[1]["x"] + await plain["inner"] + plain.ret_value

    graph = outer.trace()
    assert [stream[0].op for stream in graph.streams] == [
        Begin("outer", 0), Begin("asking", 1), Begin("asking", 2), Begin("inner", 3),
    ]  # fmt: skip
    assert [node.defaults.get("temperature") for node in generates(graph)] == [0.5] * 7
    assert graph.streams[2][2].inputs[1].op == Argument("q")


def test_async_programs_inside_sync_programs() -> None:
    def nested(s):
        asking(s, "a")

    def run(s):
        asking.run("a")  # here

    with pytest.raises(ul.ParameterError, match="is an async program"):
        ul.function(nested).trace()
    assert refused(run).startswith("asking is an async program")


def test_tasks_of_the_program_are_run() -> None:
    @ul.function
    async def program(s):
        async def branch(b):
            b += ul.gen("x")
            return await b["x"]

        forks = s.fork(2)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branch(fork)) for fork in forks]
        s += "".join(task.result() for task in tasks)
        async with asyncio.timeout(5):
            await asyncio.wait_for(forks[0]["x"], 1)

    assert said(program.trace(), x="X") == "XX"


@pytest.mark.parametrize(
    "wait",
    [
        lambda: asyncio.sleep(1),
        lambda: asyncio.Event().wait(),
        lambda: asyncio.to_thread(len, "a"),
        lambda: asyncio.open_connection("localhost", 1),
    ],
    ids=["a timer", "an event", "a thread", "a connection"],
)
def test_awaiting_anything_else(wait: Any) -> None:
    async def program(s):
        s += ul.gen("x")
        await wait()  # here

    assert refused(program).startswith("the program awaits what is not its own")


def test_errors_of_async_programs_are_their_own() -> None:
    async def program(s):
        await s["x"]

    with pytest.raises(ul.VariableError):
        ul.function(program).trace()

    async def raising(s):
        raise NotImplementedError("of the program")

    with pytest.raises(NotImplementedError, match="of the program"):
        ul.function(raising).trace()


def test_looks_in_async_programs() -> None:
    async def program(s):
        s += ul.gen("x")
        if await s["x"] == "yes":  # here
            s += "!"

    assert refused(program).startswith("== looks at variable 'x'")
