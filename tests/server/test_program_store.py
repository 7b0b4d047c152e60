"""The programs that a server keeps: bounded, replaced by name, opened from files at start."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.compiler.running.hosted import HostedGraph
from umbel.lang.errors import GraphError, ParameterError
from umbel.server import program_store
from umbel.server.errors import HttpError
from umbel.server.program_store import OfferedProgram, ProgramStore, SharedPrograms, open_program


@ul.function
def answer(s: ul.State, question: str) -> str:
    s += question + ul.gen("answer", max_tokens=4)
    return s["answer"]


FILE = serialise.encode(answer.trace())
GRAPH = HostedGraph.read(FILE, source="a test")


def offered(name: str, parameter: str = "") -> OfferedProgram:
    return OfferedProgram(name, GRAPH, 0, parameter)


def test_a_name_is_free_once() -> None:
    store = ProgramStore()
    assert store.put(offered("a"))
    assert not store.put(offered("a", "question"))
    assert [(each.name, each.parameter) for each in store] == [("a", "question")]
    store.remove("a")
    assert store.find("a") is None
    with pytest.raises(HttpError, match="none is kept so far"):
        store.remove("a")


def test_count_and_bytes_are_bounded_and_nothing_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ProgramStore()
    for number in range(program_store.MAX_PROGRAMS):
        store.put(offered(f"p{number}"))
    with pytest.raises(HttpError, match="128 programs are kept"):
        store.put(offered("one.more"))
    assert not store.put(offered("p0"))
    monkeypatch.setattr(program_store, "MAX_PROGRAM_BYTES", len(FILE) * program_store.MAX_PROGRAMS)
    store.remove("p1")
    store.put(offered("p1"))
    monkeypatch.setattr(program_store, "MAX_PROGRAM_BYTES", len(FILE) * program_store.MAX_PROGRAMS - 1)
    store.remove("p1")
    with pytest.raises(HttpError, match="are the most; delete one"):
        store.put(offered("p1"))
    assert len(list(store)) == program_store.MAX_PROGRAMS - 1


def test_a_program_that_can_take_no_message_is_no_model() -> None:
    store = ProgramStore()
    with pytest.raises(ParameterError, match="did you mean 'question'"):
        store.put(offered("a", "questions"))
    assert store.find("a") is None


def test_bytes_are_read_up_to_a_limit() -> None:
    store = ProgramStore()
    assert asyncio.run(store.read(FILE, source="x")).digest == GRAPH.digest
    with pytest.raises(GraphError, match="the most of one program"):
        asyncio.run(store.read(FILE + b" " * (8 << 20), source="x"))


def test_the_option_names_a_file_and_perhaps_a_parameter(tmp_path: Path) -> None:
    path = tmp_path / "ask.umbel.json"
    path.write_bytes(FILE)
    for given, parameter in ((f"{path}:question", "question"), (str(path), "")):
        opened = open_program(given, 7)
        assert (opened.name, opened.parameter, opened.created) == ("ask", parameter, 7)
        assert opened.graph.digest == GRAPH.digest


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ("ask.umbel.json:questions", ParameterError, "did you mean 'question'"),
        ("none.umbel.json:question", ParameterError, "No such file.* write FILE.umbel.json"),
        ("an ask.umbel.json", ParameterError, "cannot be called 'an ask'"),
        ("empty.umbel.json", GraphError, "empty.umbel.json"),
        (".", ParameterError, "Is a directory"),
        ("ask.py:question", ParameterError, "umbel compile .*ask.py:NAME -o NAME.umbel.json"),
    ],
)
def test_a_wrong_option_says_what_to_write(given: str, kind: type[Exception], says: str, tmp_path: Path) -> None:
    (tmp_path / "ask.umbel.json").write_bytes(FILE)
    (tmp_path / "an ask.umbel.json").write_bytes(FILE)
    (tmp_path / "empty.umbel.json").write_bytes(b"")
    with pytest.raises(kind, match=says):
        open_program(f"{tmp_path}/{given}", 0)


# ------------------------------------------------------------------------------------ several workers


@pytest.fixture
def folder() -> Iterator[Path]:
    made = program_store.open_folder(2)
    yield made
    shutil.rmtree(made)


def run(folder: Path, scenario: Callable[[ProgramStore, ProgramStore], Awaitable[None]]) -> None:
    """Two workers that offer `first` from their start."""

    async def told() -> None:
        stores = [ProgramStore([offered("first")], SharedPrograms(folder, row)) for row in range(2)]
        following = [asyncio.create_task(store.follow()) for store in stores]
        try:
            async with asyncio.timeout(60):
                await scenario(*stores)
        finally:
            for task in following:
                task.cancel()

    asyncio.run(told())


def names(store: ProgramStore) -> list[str]:
    return sorted(each.name for each in store)


def test_a_program_that_one_worker_keeps_or_forgets_is_known_to_all_when_it_answers(folder: Path) -> None:
    async def scenario(one: ProgramStore, other: ProgramStore) -> None:
        assert await one.keep(offered("a-b", "question"), FILE)
        assert other.get("a-b").parameter == "question"
        assert not await other.keep(offered("a-b"), FILE)
        assert one.get("a-b").parameter == ""
        await other.forget("a-b")
        await one.forget("first")
        assert names(one) == names(other) == []
        with pytest.raises(HttpError, match="there is no program 'a-b'"):
            await one.forget("a-b")
        await one.keep(offered("late"), FILE)
        again = ProgramStore([offered("first")], SharedPrograms(folder, 1))  # a worker that replaces the other one
        await again.take_over()
        assert names(again) == ["late"]
        assert sorted(path.name for path in folder.iterdir()) == ["4-first", "5-late", "changes"]

    run(folder, scenario)


def test_workers_that_change_at_once_agree_and_keep_no_more_than_one_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "MAX_PROGRAMS", 5)
    monkeypatch.setattr(program_store, "LOOK", 0.001)

    async def scenario(one: ProgramStore, other: ProgramStore) -> None:
        asked = [(one, other)[number % 2].keep(offered(f"p{number % 7}"), FILE) for number in range(14)]
        refused = [each for each in await asyncio.gather(*asked, return_exceptions=True) if each not in (True, False)]
        assert all(isinstance(each, HttpError) and each.status == 409 for each in refused)
        assert names(one) == names(other)
        assert len(names(one)) == 5

    run(folder, scenario)


def test_a_worker_that_hangs_is_not_waited_for_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "LONGEST_WAIT", 0.0)

    async def scenario() -> None:
        one = ProgramStore((), SharedPrograms(folder, 0))
        assert await one.keep(offered("a"), FILE)

    asyncio.run(scenario())
