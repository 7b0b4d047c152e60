"""Captures of constraints in graphs: compiled programs have the variables of interpreted ones, from a file as well."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import pytest
import umbel as ul
from umbel.srt.in_process import LocalBackend


class Book(TypedDict):
    title: str
    year: int


COUNT = ul.regex("[0-9]+").capture("count")
KIND = ul.choice(["apples", "pears"]).capture("kind")
ORDER = COUNT + " " + KIND + (" for " + ul.regex("[A-Z][a-z]+").capture("whom")).optional()
BOOKS = "Books: " + ul.json(Book).capture("book").repeat(1, 3, separator="; ")


@ul.function
def order(s: ul.State, shop: str) -> str:
    s += ul.user("At " + shop + "?") + ul.assistant(ul.gen("order", constraint=ORDER))
    s += ul.user(f"So {s['count']} {s['kind'].upper()}?") + ul.assistant(ul.gen("sure", choices=["yes", "no"]))
    return s["count"]


@ul.function
def whole(s: ul.State, shop: str) -> None:
    s += shop + ul.gen(constraint=ul.regex("[a-c]+").capture("word"))


@ul.function
def books(s: ul.State, shop: str) -> None:
    s += shop + ": " + ul.gen("books", constraint=BOOKS)


@ul.function
def branches(s: ul.State, shop: str) -> list[str]:
    s += shop
    forks = s.fork(3)
    forks += ul.gen("order", constraint=ORDER, temperature=0)
    forks.join()
    return s["count"]


@ul.function
def several(s: ul.State, shop: str) -> None:
    s += shop + ul.gen("order", constraint=ORDER, n=2, temperature=1.0)


PROGRAMS: dict[str, tuple[Any, list[str]]] = {
    "a part that is said again": (order, ["3 pears", "yes"]),
    "an optional part": (order, ["12 apples for Ada", "no"]),
    "all of a text": (whole, ["abba"]),
    "objects, several times": (books, ['Books: {"title": "A", "year": 1}; {"title": "B", "year": 2}']),
    "branches": (branches, ["1 pears", "2 pears for Bo", "3 apples"]),
    "continuations": (several, ["1 pears", "2 apples for Cy"]),
}
NAMES = ("order", "count", "kind", "whom", "sure", "word", "books", "book")


def seen(state: Any) -> dict[str, Any]:
    """All that a state tells of its variables."""
    told: dict[str, Any] = {
        "text": state.text(),
        "result": state.ret_value,
        "names": [name for name in NAMES if name in state],
    }
    for name in NAMES:
        if name in state:
            told[name] = state[name], state.value(name), facts(state.get_meta_info(name))
    return told


def facts(meta: Any) -> Any:
    if isinstance(meta, list):
        return [facts(each) for each in meta]
    return meta and {key: meta.get(key) for key in ("guarantee", "finish_reason", "tries", "completion_tokens")}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", ["compiled", "file"])
def test_a_graph_has_the_variables_of_its_program(name: str, how: str, tmp_path: Path) -> None:
    program, script = PROGRAMS[name]
    wanted = seen(program.run("the shop", backend=ul.Echo(list(script))))
    if how == "file":
        path = tmp_path / "program.umbel.json"
        program.trace().save(path)
        runner = ul.load(path)
    else:
        runner = program.compile()
    assert seen(runner.run("the shop", backend=ul.Echo(list(script)))) == wanted


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")
def test_on_a_runtime_they_are_the_same_text_for_text() -> None:
    """The oracle's texts are as good as random. Captures are read here: such a graph is not sent to the runtime."""
    backend = LocalBackend()
    options = {"seed": 5, "max_tokens": 120, "backend": backend}
    for program in (whole, books):
        first, second = program.run("x", **options), program.compile().run("x", **options)
        assert seen(first) == seen(second)
    with pytest.raises(ul.GraphError, match="captures 'word', which is read here; write server=False"):
        whole.compile(server=True).run("x", backend=backend)


def test_async_programs_have_them() -> None:
    async def run() -> Any:
        state = await order.compile().run_async("x", backend=ul.Echo(["3 pears", "yes"]))
        return await state["count"], await state["whom"]

    assert asyncio.run(run()) == ("3", None)


@pytest.mark.parametrize("make", [lambda: order, lambda: order.compile()], ids=["interpreted", "compiled"])
def test_a_text_that_breaks_the_constraint_has_none(make: Callable[[], Any]) -> None:
    @ul.function
    def kept(s: ul.State) -> None:
        s += ul.gen("order", constraint=ORDER, allow_best_effort=True, max_tokens=1)

    program = kept if make() is order else kept.compile()
    echo = ul.Echo(["3 pears"], capabilities=ul.lang.protocol.Capabilities("plain"))
    state = program.run(backend=echo)
    with pytest.raises(ul.ResultError, match="variable 'count' is captured from the text of gen"):
        _ = state["count"]


def test_a_part_that_may_be_left_out_is_no_text_in_a_body() -> None:
    @ul.function
    def asks(s: ul.State) -> None:
        s += ul.gen("order", constraint=ORDER)
        s += "For " + s["whom"]

    with pytest.raises(ul.TraceError, match=r"s\['whom'\] is captured from a part that may be left out"):
        asks.trace()


def test_the_listing_names_them() -> None:
    assert "(captures: count, kind, whom)" in order.trace().text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda gen: gen["captures"].pop("count"),
            r"the constraint captures \['count', 'kind', 'whom'\]",
        ),
        (lambda gen: gen["captures"].update(order=gen["captures"].pop("count")), "'order' is the name of the gen"),
        (lambda gen: gen.pop("constraint"), "parts of a constraint, and there is none"),
        (lambda gen: gen.update(captures=["count"]), "captures"),
        (lambda gen: gen["constraint"].update(source="{}"), "constraint"),
    ],
)
def test_a_file_with_wrong_captures_is_refused(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "program.umbel.json"
    order.trace().save(path)
    whole = json.loads(path.read_text())
    assert whole["version"] == 2
    change(next(node["gen"] for node in whole["nodes"] if node["op"] == "Generate" and node["gen"]["name"] == "order"))
    path.write_text(json.dumps(whole))
    with pytest.raises(ul.GraphError, match=message):
        ul.load(path)
