"""The live page: what it may load, whom it shows what, and its data."""

import asyncio
import json
import re
import tomllib
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.lang.prompt import Text
from umbel.lang.protocol import Hint
from umbel.lang.status import MOST_NODES, MOST_SHOWN, EngineState, PoolGauges, RuntimeStatus, TreeSurvey
from umbel.server.access import Access
from umbel.server.limits import READINGS
from umbel.server.ui.page import PAGE, LiveState
from umbel.srt.in_process import LocalBackend

from ...serving import until
from ..client import AsgiClient, served
from ..serving import ADMIN_KEY, KEY, Serving
from .browser import CHROMIUM, Browser

COMPLETION = {"model": "oracle", "prompt": "a private text", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
KEYS = {"team": KEY}


def on_a_server(work: Callable[[AsgiClient], Awaitable[None]], **front: Any) -> None:
    async def run() -> None:
        async with served(**front) as client:
            await asyncio.wait_for(work(client), 60)

    asyncio.run(run())


class Tags(HTMLParser):
    """Collects what an HTML file has: tags, attributes, ids, and ids that labels and descriptions name."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(PAGE.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def values(self, *names: str) -> list[str]:
        return [word for _, name, value in self.attributes if name in names for word in value.split()]


# ------------------------------------------------------------------------------------------ the file


def test_the_page_names_no_other_place() -> None:
    """The one address in it is the name of SVG, which is fetched by nothing."""
    assert re.findall(rb"[a-z]+://[^\s\"'`]*", PAGE) == [b"http://www.w3.org/2000/svg"]
    assert re.search(rb"@import|url\(|importScripts|\bimport\(|WebSocket|EventSource|sendBeacon", PAGE) is None
    tags = Tags()
    assert not {"iframe", "object", "embed", "base", "img", "video"} & set(tags.tags)
    links = [(tag, value) for tag, name, value in tags.attributes if name in ("src", "href", "action")]
    assert links == [("link", "data:,"), ("a", "#tree-title")]


def test_the_page_reads_no_text_as_html() -> None:
    """Prompts and answers of all callers come into it."""
    assert re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE) is None
    assert not [name for _, name, _ in Tags().attributes if name.startswith("on") or name == "style"]


def test_what_is_named_by_a_label_or_the_script_is_there() -> None:
    tags = Tags()
    ids = tags.values("id")
    assert len(ids) == len(set(ids))
    named = {
        *tags.values("for", "aria-labelledby", "aria-describedby"),
        *re.findall(r'\$\("([\w-]+)"\)', PAGE.decode()),
    }
    assert named <= set(ids)
    fields = {value for tag, name, value in tags.attributes if tag in ("input", "select", "textarea") and name == "id"}
    assert fields - set(tags.values("for")) == {"show-text"}  # which is inside of its label


def test_the_file_ships_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["umbel.server.ui"] == ["page.html"]


# ------------------------------------------------------------------------------------------ the routes


def test_the_policy_lets_the_page_run_its_own_script_and_ask_its_own_server() -> None:
    async def work(client: AsgiClient) -> None:
        answer = await client.get("/ui")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert (
            policy["default-src"]
            == policy["base-uri"]
            == policy["form-action"]
            == policy["frame-ancestors"]
            == "'none'"
        )
        assert policy["connect-src"] == "'self'"
        for name in ("script-src", "style-src"):
            assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[name]), name
        assert answer.headers["x-content-type-options"] == "nosniff"

    on_a_server(work)


@pytest.mark.parametrize(
    ("access", "told", "statuses"),
    [
        (Access(), b'data-keyed="false" data-figures="open"', {"": 200}),
        (Access(admin_key=ADMIN_KEY), b'data-keyed="false" data-figures="admin"', {"": 403, ADMIN_KEY: 200}),
        (Access(KEYS), b'data-keyed="true" data-figures="none"', {"": 404, KEY: 404}),
        (Access(KEYS, ADMIN_KEY), b'data-keyed="true" data-figures="admin"', {"": 401, KEY: 403, ADMIN_KEY: 200}),
    ],
    ids=["no key", "an admin key", "keys", "keys and an admin key"],
)
def test_the_page_needs_no_key_and_its_data_the_admin(access: Access, told: bytes, statuses: dict[str, int]) -> None:
    async def work(client: AsgiClient) -> None:
        answer = await client.get("/ui")
        assert answer.status == 200
        assert told in answer.content
        for key, status in statuses.items():
            headers = {"x-api-key": key} if key else {}
            for path in ("/ui/state", "/ui/tree"):
                data = await client.get(path, **headers)
                assert data.status == status, (path, key)
                assert status == 200 or set(data.json) == {"error"}

    on_a_server(work, access=access)


def test_a_page_of_another_site_gets_nothing() -> None:
    async def work(client: AsgiClient) -> None:
        for path in ("/ui", "/ui/state", "/ui/tree"):
            assert (await client.get(path, origin="https://evil.example")).status == 403
            assert (await client.get(path, host="evil.example")).status == 403

    on_a_server(work)


def test_the_state_has_what_was_done_and_no_text() -> None:
    async def work(client: AsgiClient) -> None:
        for _ in range(2):
            assert (await client.post("/v1/completions", COMPLETION)).status == 200
        answer = await client.get("/ui/state")
        state = msgspec.json.decode(answer.content, type=LiveState)
        assert (state.state, state.cause, state.models, state.programs) == ("ready", "", ["oracle"], [])
        (reading,) = state.readings
        assert 0 < reading.at <= state.now
        assert reading.free + reading.cached == reading.total
        assert (reading.running, reading.waiting, reading.pinned) == (0, 0, 0)
        prompt = len(str(COMPLETION["prompt"])) + 1
        assert reading.prompt_tokens == reading.cached_tokens + reading.computed_tokens == 2 * prompt
        assert (reading.cached_tokens, reading.generated_tokens) == (prompt - 1, 10)
        assert b"private" not in answer.content
        assert answer.headers["cache-control"] == "no-store"

    on_a_server(work)


def test_the_state_has_the_last_minutes_and_no_reading_twice() -> None:
    async def work(client: AsgiClient) -> None:
        now = asyncio.get_running_loop().time()
        for second in range(READINGS + 5):
            status = RuntimeStatus("m", "0", EngineState.READY, running=second, pool=PoolGauges(total=9, free=9))
            client.app.front.activity.line(status, now - 1 + second / 1_000)  # a clock may have just begun
        state = (await client.get("/ui/state")).json
        assert [each["running"] for each in state["readings"]] == [*range(5, READINGS + 5), 0]
        later = (await client.get(f"/ui/state?after={state['readings'][-3]['at']!r}")).json
        assert [each["running"] for each in later["readings"]][:1] == [READINGS + 4]

    on_a_server(work)


def test_a_server_that_loads_its_model_has_a_state_and_no_tree_yet() -> None:
    async def work(client: AsgiClient) -> None:
        client.app.front.started = False
        await client.app.front.backend.close()
        state = (await client.get("/ui/state")).json
        assert (state["state"], state["models"], state["readings"]) == ("stopped", [], [])
        tree = await client.get("/ui/tree")
        assert (tree.status, tree.json["error"]["code"]) == (503, "not_ready")

    on_a_server(work)


def test_the_tree_has_its_nodes_and_texts_only_when_asked() -> None:
    async def work(client: AsgiClient) -> None:
        backend = client.app.front.backend
        for salt in ("one", "two"):
            assert (await client.post("/v1/completions", {**COMPLETION, "cache_salt": salt})).status == 200
        backend.hint(Hint("pinned", (Text("a pinned text"),), pin=60.0))
        while backend.engine.scheduler.counters["pins_placed"] < 1:
            await asyncio.sleep(0)
        answer = await client.get("/ui/tree")
        survey = msgspec.json.decode(answer.content, type=TreeSurvey)
        assert sum(node.tokens for node in survey.nodes) == survey.pool.cached
        assert len({node.salt for node in survey.nodes}) == 3
        assert {node.pins for node in survey.nodes} == {0, 1}
        assert b"private" not in answer.content
        assert b"private" in (await client.get("/ui/tree?text=50")).content
        assert len((await client.get("/ui/tree?most=2")).json["nodes"]) == 2

    on_a_server(work)


def test_the_tree_names_the_engine_of_each_node_and_a_salt_alike_in_all() -> None:
    async def work(client: AsgiClient) -> None:
        for number in range(4):
            for salt in ("one", "two", "three"):  # in turn, so that each comes to both
                body = COMPLETION | {"prompt": f"{number}{salt}", "cache_salt": salt}
                assert (await client.post("/v1/completions", body)).status == 200
        survey = msgspec.json.decode((await client.get("/ui/tree")).content, type=TreeSurvey)
        assert sum(node.tokens for node in survey.nodes) == survey.pool.cached
        salts = [{node.salt for node in survey.nodes if node.replica == engine} for engine in range(2)]
        assert salts[0] == salts[1]
        assert len(salts[0]) == 3
        assert max(salts[0]) < 1 << 53, "JavaScript has no larger whole numbers"

    on_a_server(work, backend=LocalBackend(replicas=2, placement="round-robin"))


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/ui/state?since=1", "since"),
        ("/ui/state?after=-1", "after"),
        ("/ui/state?after=nan", "after"),
        (f"/ui/tree?most={MOST_NODES + 1}", "most"),
        ("/ui/tree?most=0", "most"),
        ("/ui/tree?most=1.5", "most"),
        ("/ui/tree?text=yes", "text"),
        (f"/ui/tree?text={MOST_SHOWN + 1}", "text"),
        ("/ui/tree?text=٣", "text"),
    ],
)
def test_an_odd_query_is_refused_by_name(path: str, param: str) -> None:
    async def work(client: AsgiClient) -> None:
        answer = await client.get(path)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)

    on_a_server(work)


# ------------------------------------------------------------------------------------------ in a browser


@ul.function(temperature=0)
def sides(s: ul.State) -> None:
    s += "An essay."
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"\n{number}:" + ul.gen("side", max_tokens=4, ignore_eos=True)
    branches.join()
    s += "\nVerdict:" + ul.gen("verdict", max_tokens=4, ignore_eos=True)


COLUMNS = "[...document.querySelectorAll('#branches .branch')]"
TITLES = ["main stream", "branch 0", "branch 1", "branch 2"]


def run_branches(page: Browser) -> None:
    """Runs the program with branches: each has a column, with the text of its call."""
    until(lambda: page.value("$('program').value") == "sides", "it does not list the program")
    page.value("$('program-form').requestSubmit()")
    until(lambda: "4 calls" in page.value("$('run-facts').textContent"), "the program does not end")
    assert page.value(f"{COLUMNS}.map(each => each.querySelector('h3').textContent)") == TITLES
    names = page.value(f"{COLUMNS}.map(each => [...each.querySelectorAll('h4')].map(name => name.textContent))")
    assert names == [["side", "verdict"], ["side"], ["side"], ["side"]]  # the joined ones are a list
    joined, _, *texts = page.value("[...document.querySelectorAll('#branches .text')].map(each => each.textContent)")
    assert json.loads(joined) == texts
    assert all(texts)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")
def test_chromium_draws_a_thousand_nodes_within_a_second_and_complains_of_nothing(tmp_path: Path) -> None:
    """From a server that still starts to one that has answered, and has run a program."""
    program = tmp_path / "sides.umbel.json"
    program.write_bytes(serialise.encode(sides.trace()))
    serving = Serving("--model", "oracle", "--program", str(program))
    browser = None
    try:
        browser = page = Browser()
        page.open(serving.address + "/ui")
        health = "document.querySelector('#health')?.textContent"
        until(lambda: page.value(health) == "locked", "it asks for no key")
        page.type("#key", "sk-wrong")
        until(lambda: "no such key" in page.value("$('notice').textContent"), "it does not say that the key is wrong")
        page.complaints.clear()  # the answer 401
        page.type("#key", ADMIN_KEY)
        until(lambda: page.value(health) == "ready", "it does not see that the model is loaded")
        prompts = [f"{number % 7} is {number}, which is a number" for number in range(1_000)]
        serving.ask("/v1/completions", {"model": "oracle", "prompt": prompts, "max_tokens": 1, "temperature": 0})
        until(lambda: page.value("tree.shown.length") == 1_000, "1,000 nodes are not drawn")
        painted = "performance.getEntriesByName('umbel-tree-painted').filter(each => each.detail === 1000)"
        until(lambda: page.value(f"{painted}.length"), "the tree is not painted")
        assert page.value(f"Math.max(...{painted}.map(each => each.duration))") < 1_000  # ms
        page.type("#prompt", "The capital of France is")
        until(lambda: "generated token" in page.value("$('answer-facts').textContent"), "no answer is streamed")
        run_branches(page)
        page.value("$('tree').focus()")
        for key in ("ArrowDown", "ArrowRight", "Enter", " ", "Escape"):
            page.press(key)
        assert "folded" in page.value("$('tree').textContent")
        assert page.complaints == []
    finally:
        if browser is not None:
            browser.close()
        serving.end()
