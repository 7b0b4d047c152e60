"""The page of a run: escaped, self-contained, small; in a browser it draws, searches, folds and compares."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.cli import main
from umbel.interpreter.view import page as view
from umbel.interpreter.view.page import RunRecord

from .chromium import needs_chromium, run_in_page

NASTY = "</script><script>alert(1)</script> <!-- <img src=x onerror=alert(2)> \u2028\u2029 \ud800 \0 \"'&"


@ul.function
def nasty(s: ul.State, text: str) -> None:
    s += text + ul.gen("a", max_tokens=200)
    s += ul.select("b", choices=[text, "no"])


@ul.function
def think(s: ul.State, question: str, depth: int = 10, width: int = 12) -> None:
    """A tree of thought: at every level `width` steps, each with its worth, and the best one goes on."""
    s += "Think in steps.\n" * 20 + f"Question: {question}"
    for level in range(depth):
        forks = s.fork(width)
        forks += lambda i, level=level: f"\nStep {level}.{i}:" + ul.gen("step", max_tokens=16, seed=i)
        forks += "\nUseful?" + ul.select("useful", choices=[" yes", " no"])
        s += max(branch["step"] for branch in forks)


def tree_of_thought(question: str = "How many pens are left?") -> RunRecord:
    state = think.run(question=question, backend=ul.Echo())
    record = state.record()
    assert isinstance(record, RunRecord)
    assert state.usage.calls == 240
    return record


def synthetic(calls: int, streams: int) -> RunRecord:
    """A run of many calls, as lines: branches of one fork, each with as many calls."""
    lines: list[dict[str, Any]] = [{"umbel_run": 1, "program": "synthetic", "backend": "none", "caches": True}]
    lines.append({"line": 0, "file": "many.py", "number": 3, "function": "many", "code": "branch += gen('x')"})
    lines.append({"stream": 0, "parent": None, "after": None})
    head = {"op": 0, "stream": 0, "kind": "text", "from": 0.0, "to": 0.001, "text": [["literal", "Shared. " * 50]]}
    lines.append(head)
    lines.append(
        {"op": 1, "stream": 0, "kind": "fork", "from": 0.001, "to": 0.002, "others": list(range(1, streams + 1))}
    )
    lines += [{"stream": stream, "parent": 0, "after": 1} for stream in range(1, streams + 1)]
    for number in range(calls):
        stream = 1 + number % streams
        began = 0.002 + number * 0.0007
        call = {"sent": began, "came": began + 0.01, "prompt_tokens": 200, "cached_tokens": 150, "completion_tokens": 9}
        text = f" answer {number} of a model"
        lines.append(
            {
                "op": number + 2,
                "stream": stream,
                "kind": "gen",
                "name": "x",
                "from": began,
                "to": began + 0.011,
                "line": 0,
            }
            | {"calls": [call], "facts": {"completion_tokens": 9}, "text": [["generated", text, "x"]]}
        )
    lines.append({"end": 0.002 + calls * 0.0007, "usage": {"prompt_tokens": 200 * calls, "cached_tokens": 150 * calls}})
    return RunRecord.of(lines)


def test_no_text_of_a_model_ends_the_element_that_holds_it() -> None:
    record = nasty.run(text=NASTY, backend=ul.Echo([NASTY])).record()
    page = record.page()
    data = page.split('id="run">\n')[1].split("</script>")[0]
    assert "<" not in data
    assert "\u2028" not in data
    assert [json.loads(line) for line in data.splitlines()] == record.lines
    assert any(piece[:2] == ["generated", NASTY] for line in record.lines for piece in line.get("text", ()))


def test_a_page_loads_nothing() -> None:
    page = tree_of_thought().page()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)[^"'\s>]+""", page.split("<script")[0]) == []
    assert "default-src 'none'" in page
    for word in (
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "http://",
        "https://",
    ):
        assert word not in page, word


def test_a_page_of_240_calls_is_small() -> None:
    assert len(tree_of_thought().page()) < 2 * 2**20


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    content = RunRecord.of([{"umbel_run": 1, "program": '"><b>'}])._repr_html_()
    assert content.count("<iframe") == 1
    assert "<b>" not in content
    assert 'sandbox="allow-scripts"' in content


def test_show_writes_a_page(tmp_path: Path) -> None:
    state = nasty.run(text="a", backend=ul.Echo())
    path = state.show(tmp_path / "run.html")
    assert Path(path).read_text() == state.record().page()
    other = nasty.run(text="b", backend=ul.Echo())
    state.show(path, against=other)
    assert 'id="other"' in Path(path).read_text()


def test_show_without_a_path_opens_a_temporary_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[str] = []
    monkeypatch.setattr(view.webbrowser, "open", opened.append)
    monkeypatch.setattr(view.tempfile, "tempdir", str(tmp_path))
    path = nasty.run(text="a", backend=ul.Echo()).show()
    assert Path(path).parent == tmp_path
    assert opened == [Path(path).as_uri()]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    state = nasty.run("a", backend=ul.Echo())
    for write in (state.save, state.show):
        with pytest.raises(ul.ParameterError, match=r"none/run\.html' cannot be written: No such file"):
            write(tmp_path / "none" / "run.html")


def test_the_command_shows_a_saved_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = nasty.run(text="a", backend=ul.Echo())
    saved = state.save(tmp_path / "run.jsonl")
    assert main(["view", saved, "--against", saved, "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert 'id="other"' in (tmp_path / "page.html").read_text()
    assert main(["view", str(tmp_path / "none")]) == 1
    assert "there is no such file; write the path of one that state.save(FILE)" in capsys.readouterr().err


def test_the_page_does_not_replace_a_run_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = nasty.run(text="a", backend=ul.Echo()).save(tmp_path / "one.jsonl")
    two = nasty.run(text="b", backend=ul.Echo()).save(tmp_path / "two.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(one)
    before = [Path(one).read_bytes(), Path(two).read_bytes()]
    for output in (one, two, str(link), str(tmp_path / "." / "one.jsonl")):
        assert main(["view", one, "--against", two, "--output", output]) == 1
        assert "is the file that is read; write the path of a page" in capsys.readouterr().err
    assert [Path(one).read_bytes(), Path(two).read_bytes()] == before


def test_options_of_the_live_page_are_refused_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--no-open"], ["--port", "0"]):
        assert main(["view", "run.jsonl", *options]) == 1
        assert "--port and --no-open are for --live" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["", "a\0b.html", "a\ud800.html", 5])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    state = nasty.run(text="a", backend=ul.Echo())
    for write in (state.save, state.show, RunRecord.load):
        with pytest.raises(ul.ParameterError, match=r"path=.*; write a path"):
            write(path)


TORN = '{"op":3,"stream":9,"kind":"gen","from":0,"to":1}'


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"umbel_run":1}', TORN], "line 2: operation 3 is of a stream that was not begun"),
        (['{"umbel_run":1}', '{"stream":9,"parent":null,"after":null}', TORN[:31] + "}"], "line 3: .* has no times"),
        (['{"umbel_batch":1}', '{"of":7,"run":[' + TORN + "]}"], "line 2: line 1: operation 3"),
        (['{"umbel_batch":1}', '{"of":7,"run":[3]}'], "line 2: has no run"),
    ],
)
def test_a_torn_file_is_refused_with_its_line(tmp_path: Path, lines: list[str], told: str) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ul.ParameterError, match=told):
        RunRecord.load(path)


def test_importing_umbel_does_not_load_the_page() -> None:
    code = (
        "import sys, umbel; umbel.function; print([m for m in sys.modules if m.endswith(('view.page', 'view.data'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -------------------------------------------------------------------------------- in a browser

MOST_WORK = 3000  # ms of the main thread until all is drawn; some 40 on two quiet cores


@needs_chromium
@pytest.mark.processes
def test_a_tree_of_thought_is_drawn_searched_folded_and_compared(tmp_path: Path) -> None:
    page = tree_of_thought().page(against=tree_of_thought("How many pens are lost?"))
    script = """
        const found = {drawn: Number(document.documentElement.dataset.drawn), rows: rows.length};
        found.ink = new Set(pen.getImageData(0, 0, lanes.width, lanes.height).data).size;
        found.first = [$("call-title").textContent, $("text").textContent.includes("How many pens are left?")];
        found.argument = [...document.querySelectorAll("#text .argument")].map((each) => each.textContent);
        $("search").value = "STEP 3.7:"; $("search").dispatchEvent(new Event("input")); await pause();
        found.search = [$("found").textContent, $("results").children.length];
        $("results").firstChild.click();
        found.chosen = [chosen.stream.path, $("text-of").textContent];
        lanes.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        found.moved = $("call-title").textContent;
        $("fold").click(); found.folded = rows.length;
        $("results").firstChild.click(); found.unfolded = rows.length;
        const place = Math.round(xOf(chosen.from));
        $("in").click(); found.zoom = [zoom > 1, Math.abs(xOf(chosen.from) - place) < 3];
        found.pairs = [$("compared").textContent.slice(0, 30), $("pairs").firstChild.firstChild.textContent];
        found.marks = [...document.querySelectorAll("#sides mark.first")].map((each) => each.textContent);
        return found;"""
    found = run_in_page(page, script, tmp_path)
    print(f"drawn after {found['drawn']} ms")
    assert found["drawn"] < MOST_WORK
    assert found["ink"] > 10
    assert found["rows"] == 121
    assert found["first"] == ["gen step", True]
    assert found["argument"] == ["How many pens are left?"]
    assert found["search"] == ["1 operation found", 1]
    assert found["chosen"] == ["/3.7", "branch 3.7: step, with what it inherited"]
    assert found["moved"] == "gen step"
    assert found["folded"] == 1
    assert found["unfolded"] == 121
    assert found["zoom"] == [True, True]  # what is chosen stays where it is
    assert found["pairs"] == ["240 calls, 240 of them differ;", "prompt differs"]
    assert found["marks"] == ["e", "o"]  # left, lost: the same up to "l"


@needs_chromium
@pytest.mark.processes
def test_the_time_axis_begins_where_the_backend_had_started(tmp_path: Path) -> None:
    call = {"sent": 9.95, "came": 12.0, "first": 10.0, "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 9}
    lines: list[dict[str, Any]] = [
        {"umbel_run": 1, "program": "slow", "backend": "none", "caches": True},
        {"stream": 0, "parent": None, "after": None},
        {"op": 0, "stream": 0, "kind": "text", "from": 0.01, "to": 9.92, "text": [["literal", "Shared."]]},
        {"op": 1, "stream": 0, "kind": "gen", "name": "x", "from": 9.93, "to": 12.1, "calls": [call], "text": []},
        {"end": 12.1, "usage": {}, "backend_start": 9.9},
    ]
    script = """
        return {bar: (xOf(12.1) - xOf(9.93)) / widthOfTime(), text: xOf(9.92) - xOf(0.01), at: timeAt(xOf(11)),
                legend: $("bars").textContent, facts: $("facts").textContent};"""
    found = run_in_page(RunRecord.of(lines).page(), script, tmp_path)
    assert found["bar"] > 0.98
    assert found["text"] < 10
    assert found["at"] == pytest.approx(11)
    assert found["legend"].endswith("0 is where the backend had started, after 9.91 s")
    assert "the backend started in 9.90 s" in found["facts"]
    del lines[-1]["backend_start"]
    found = run_in_page(RunRecord.of(lines).page(), script, tmp_path)
    assert found["bar"] < 0.2
    assert "had started" not in found["legend"]


@needs_chromium
@pytest.mark.processes
def test_ten_thousand_calls_stay_usable(tmp_path: Path) -> None:
    script = """
        const found = {drawn: Number(document.documentElement.dataset.drawn), rows: rows.length};
        let began = performance.now();
        $("search").value = "answer 9999"; search(); found.search = performance.now() - began;
        found.found = $("found").textContent;
        began = performance.now();
        $("results").firstChild.click(); found.choose = performance.now() - began;
        found.text = $("text").textContent.endsWith(" answer 9999 of a model");
        began = performance.now();
        scroller.scrollTop = 20000; draw(); found.scroll = performance.now() - began;
        found.elements = document.querySelectorAll("*").length;
        return found;"""
    found = run_in_page(synthetic(10_000, 2_500).page(), script, tmp_path)
    print({name: value for name, value in found.items() if name in ("drawn", "search", "choose", "scroll")})
    assert found["drawn"] < MOST_WORK
    assert found["rows"] == 2_501
    assert found["found"] == "1 operation found"
    assert found["text"] is True
    assert found["elements"] < 1_000  # what is not seen is not in the document
    assert max(found["search"], found["choose"], found["scroll"]) < MOST_WORK


@needs_chromium
@pytest.mark.processes
def test_text_of_models_is_shown_as_text(tmp_path: Path) -> None:
    page = nasty.run(text=NASTY, backend=ul.Echo([NASTY])).record().page()
    script = """
        return {text: $("text").textContent, images: document.images.length, scripts: document.scripts.length};"""
    plain = run_in_page(nasty.run(text="a", backend=ul.Echo(["b"])).record().page(), script, tmp_path)
    found = run_in_page(page, script, tmp_path)
    assert found["text"].startswith(NASTY + NASTY)
    assert found["images"] == 0
    assert found["scripts"] == plain["scripts"]


@needs_chromium
@pytest.mark.processes
def test_a_torn_file_is_not_compared(tmp_path: Path) -> None:
    script = """
        const read = (text) => $("file").onchange({target: {files: [new File([text], "run.jsonl")]}});
        const found = [];
        for (const text of ['{"umbel_run":1}\\n' + %s, '{"a":1}', $("run").textContent]) {
          await read(text); found.push($("compared").textContent);
        }
        return found;"""
    page = nasty.run(text="a", backend=ul.Echo(["b"])).record().page()
    torn, other, same = run_in_page(page, script % json.dumps(TORN), tmp_path)
    assert torn == "that file is torn: operation 3 is of a stream that was not begun"
    assert other == "that file holds no record of a run"
    assert same.startswith("2 calls, 0 of them differ")


@needs_chromium
@pytest.mark.processes
def test_signs_that_turn_the_direction_of_text_are_spelled_out(tmp_path: Path) -> None:
    signs = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

    @ul.function
    def fail(s: ul.State, text: str) -> None:
        s += text + ul.gen("a", max_tokens=99, stop=signs)
        s["a"]
        raise ValueError(text)

    def record(text: str) -> RunRecord:
        return fail.run_batch([(text,)], backend=ul.Echo([text]), on_error="return")[0].state.record()

    script = """
        $("search").value = "b"; search();
        const titles = [...document.querySelectorAll("[title]")].map((each) => each.title);
        const found = {page: document.body.innerText + titles};
        found.parts = ["trouble", "text", "call", "results", "sides"].map((id) => $(id).innerText);
        found.isolated = getComputedStyle($("text").firstChild).unicodeBidi;
        return found;"""
    found = run_in_page(record(f"{signs}b").page(against=record(f"{signs}c")), script, tmp_path)
    assert [sign for sign in signs if sign in found["page"]] == []
    spelled = "".join(f"\\u{ord(sign):04x}" for sign in signs)
    assert [part for part in found["parts"] if spelled not in part] == []
    assert found["isolated"] == "isolate"


@ul.function
def nested(s: ul.State, review: str, depth: int = 4) -> None:
    s += review + ul.gen("a", max_tokens=4)
    if depth:
        for branch in s.fork(2):
            nested(branch, review, depth - 1)


@needs_chromium
@pytest.mark.processes
def test_branches_of_nested_forks_have_names_of_their_own(tmp_path: Path) -> None:
    script = """
        const streams = [...run.streams.values()];
        const deep = streams.find((one) => one.depth === 4);
        return {names: streams.map((one) => nameOf(one)), lanes: [400, 90, 1].map((room) => laneNameOf(deep, room))};"""
    found = run_in_page(nested.run(review="Good.", backend=ul.Echo()).record().page(), script, tmp_path)
    assert len(found["names"]) == len(set(found["names"])) == 31
    assert {"branch 0.1: a", "branch 0.0/0.1/0.0: a"} <= set(found["names"])
    assert found["lanes"] == ["branch 0.0/0.0/0.0/0.0: a", "…/0.0/0.0: a", "…/0.0: a"]


@needs_chromium
@pytest.mark.processes
def test_the_axis_has_each_label_once_and_none_where_nothing_lasted(tmp_path: Path) -> None:
    script = """
        const found = {};
        let words = [];
        pen.fillText = (text, x) => {
          if (x > margin) words.push(text);
          if (x + pen.measureText(text).width > lanes.clientWidth) found.cut = text;
        };
        const axis = () => { words = []; drawAxis(lanes.clientWidth); return [...words]; };
        for (const last of [1e-6, 0.0042, 0.97, 1.83, 250]) {
          run.last = last;
          for (const zoomed of [1, 37, 1500]) {
            setZoom(zoomed); scroller.scrollLeft = 1e6;
            found[`${last} × ${zoomed}`] = axis();
          }
        }
        run.last = 0; found.nothing = axis();
        return found;"""
    found = run_in_page(nasty.run(text="a", backend=ul.Echo()).record().page(), script, tmp_path)
    assert found.pop("nothing") == []
    assert "cut" not in found
    assert {name: words for name, words in found.items() if len(words) < 2 or len(words) != len(set(words))} == {}
    assert found["1.83 × 1"][:3] == ["0", "200 ms", "400 ms"]
    assert found["1.83 × 37"][-1].startswith("1.8")


@needs_chromium
@pytest.mark.processes
def test_the_names_become_narrow_with_the_window(tmp_path: Path) -> None:
    script = """
        const wide = margin;
        Object.defineProperty(window, "innerWidth", {value: 400}); resize();
        return [wide, margin];"""
    assert run_in_page(nasty.run(text="a", backend=ul.Echo()).record().page(), script, tmp_path) == [220, 130]


@needs_chromium
@pytest.mark.processes
@pytest.mark.parametrize("text", ["İİ a WORD b", "ẞΣ a WORD b", "😀İ a wOrd b"])
def test_a_match_is_marked_where_it_stands(tmp_path: Path, text: str) -> None:
    script = """
        $("search").value = "word"; search();
        return $("results").querySelector("mark").textContent.toLowerCase();"""
    assert run_in_page(nasty.run(text=text, backend=ul.Echo()).record().page(), script, tmp_path) == "word"


@needs_chromium
@pytest.mark.processes
def test_the_header_has_the_arguments_folded(tmp_path: Path) -> None:
    script = 'return [$("arguments").textContent, $("arguments").open, $("arguments").hidden];'
    page = think.run(question="Why?", depth=1, backend=ul.Echo()).record().page()
    assert run_in_page(page, script, tmp_path) == ["2 argumentsquestion'Why?'depth1", False, False]
    assert run_in_page(RunRecord.of([{"umbel_run": 1}]).page(), script, tmp_path)[2] is True


@needs_chromium
@pytest.mark.processes
def test_the_comparison_is_a_button_that_opens_a_file(tmp_path: Path) -> None:
    script = """
        let opened = 0;
        $("file").click = () => opened++;
        [...document.querySelectorAll("button")].find((each) => each.textContent.startsWith("Compare with")).click();
        return [opened, document.querySelectorAll("label[tabindex]").length];"""
    assert run_in_page(nasty.run(text="a", backend=ul.Echo()).record().page(), script, tmp_path) == [1, 0]
