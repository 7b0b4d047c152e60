"""The view of a batch: a file that grows, its page, and the server that a browser follows it with."""

import http.client
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import umbel as ul
from umbel.interpreter.cli import main
from umbel.interpreter.view import live
from umbel.interpreter.view.batch_file import BatchFile
from umbel.interpreter.view.live import LiveServer
from umbel.interpreter.view.page import RunRecord
from umbel.lang.protocol import Capabilities

from .chromium import FOUND, needs_chromium, run_in_page


@ul.function
def check(s: ul.State, text: str) -> None:
    s += f"Text: {text}" + ul.gen("answer", max_tokens=8)
    if text == "bad":
        s["answer"]
        raise ValueError("asked to")


def batch(path: Path, texts: list[str]) -> list[dict[str, Any]]:
    check.run_batch([{"text": text} for text in texts], backend=ul.Echo(), view=path, on_error="return")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_beginning_record_and_end(tmp_path: Path) -> None:
    lines = batch(tmp_path / "batch.jsonl", ["good", "bad"])
    assert (lines[0]["umbel_batch"], lines[0]["program"], lines[0]["total"]) == (1, "check", 2)
    begun = {line["row"]: line["input"] for line in lines if "from" in line}
    ended = {line["row"]: line for line in lines if "to" in line}
    records = {line["of"]: line["run"] for line in lines if "of" in line}
    assert begun == {0: "text='good'", 1: "text='bad'"}
    assert ended[1]["error"] == "ValueError: asked to"
    assert "error" not in ended[0]
    assert ended[0]["prompt_tokens"] > 0
    assert ended[0]["values"] == {"answer": "'Text: good'"}
    assert records[0][0]["umbel_run"] == 1
    assert any(line.get("kind") == "gen" for line in records[0])
    assert "ended" in lines[-1]


def test_a_backend_that_gets_its_name_when_it_starts_is_named_anew(tmp_path: Path) -> None:
    class Model(ul.Echo):
        @property
        def capabilities(self) -> Capabilities:
            found = super().capabilities
            return msgspec.structs.replace(found, name="loaded" if self.calls else "default")

    path = tmp_path / "batch.jsonl"
    check.run_batch([{"text": text} for text in "abc"], backend=Model(), view=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["backend"] for line in lines if "backend" in line] == ["default", "loaded"]
    assert RunRecord.load(path).page()


def test_it_is_begun_anew_and_no_other_file_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    batch(path, ["a", "b"])
    assert len(batch(path, ["c"])) == 5
    path.write_text('{"row": 1}\n')
    with pytest.raises(ul.ParameterError, match="file of something else"):
        batch(path, ["c"])
    assert path.read_text() == '{"row": 1}\n'
    with pytest.raises(ul.ParameterError, match="cannot be written"):
        batch(tmp_path / "none" / "batch.jsonl", ["c"])


def test_a_compiled_program_has_a_view_and_rows_of_a_run_without_a_record(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"

    @ul.function
    def plain(s: ul.State, text: str) -> None:
        s += text + ul.gen("answer", max_tokens=8)

    plain.compile().run_batch([("a",)], backend=ul.Echo(), view=path)
    assert '"of":0' in path.read_text()
    plain.run_batch([("a",)], backend=ul.Echo(), view=path, record=False)
    assert '"of":0' not in path.read_text()
    assert '"to":' in path.read_text()


def test_a_half_written_line_does_not_keep_the_page_from_opening(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    batch(path, ["a"])
    whole = RunRecord.load(path).lines
    path.write_bytes(path.read_bytes() + b'{"row":9,"fr')
    assert RunRecord.load(path).lines == whole
    assert main(["view", str(path), "--output", str(tmp_path / "page.html")]) == 0


def test_a_run_is_not_compared_with_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    batch(path, ["a"])
    state = check.run(text="a", backend=ul.Echo())
    with pytest.raises(ul.ParameterError, match="against= is the view of a batch"):
        state.show(tmp_path / "page.html", against=RunRecord.load(path))


# -------------------------------------------------------------------------------- the server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "batch.jsonl") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: LiveServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host)
    connection.request("GET", path, headers={"Host": host or server.host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_lines_are_served_from_a_byte_on_as_far_as_they_are_complete(served: LiveServer) -> None:
    root = f"/{served.token}/"
    assert get(served, f"{root}0") == (200, b"")  # the batch has not begun
    served.path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c"')
    assert get(served, f"{root}0") == (200, b'{"a": 1}\n{"b": 2}\n')
    assert get(served, f"{root}9") == (200, b'{"b": 2}\n')
    assert get(served, f"{root}18") == (200, b"")
    status, page = get(served, root)
    assert status == 200
    assert b"connect-src 'self'" in page


def test_lines_name_the_batch_that_they_are_of(served: LiveServer) -> None:
    batch(served.path, ["a"])
    size = served.path.stat().st_size
    _, view = served.lines(0)
    assert served.lines(size) == (b"", view)
    assert served.lines(size + 1) == (b"", "")  # the file has become shorter
    batch(served.path, ["b", "c"])
    assert served.lines(size)[1] not in (view, "")


def test_neither_another_token_nor_another_host_is_answered(served: LiveServer) -> None:
    served.path.write_bytes(b'{"secret": 1}\n')
    assert get(served, "/0")[0] == 404
    assert get(served, f"/{'x' * 22}/0")[0] == 404
    assert get(served, f"/{served.token}/0", host="evil.example")[0] == 404
    assert get(served, f"/{served.token}/../batch.jsonl")[0] == 404


def test_the_command_refuses_what_live_does_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--live", str(tmp_path / "a.jsonl"), "--output", "page.html"]) == 1
    assert "--live serves a page" in capsys.readouterr().err
    assert main(["view", "--live", str(tmp_path / "none" / "a.jsonl")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["view", "--live", str(tmp_path)]) == 1
    assert "is a folder or a device" in capsys.readouterr().err
    saved = check.run(text="a", backend=ul.Echo()).save(tmp_path / "run.jsonl")
    assert main(["view", "--live", saved]) == 1
    assert "is not the view of a batch" in capsys.readouterr().err
    for port in ("99999", "-1"):
        assert main(["view", "--live", str(tmp_path / "a.jsonl"), "--port", port]) == 1
        assert f"--port={port} is out of range; write from 0 to 65535" in capsys.readouterr().err


def test_ctrl_c_ends_the_live_page_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: LiveServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LiveServer, "serve_forever", interrupted)
    assert main(["view", "--live", str(tmp_path / "a.jsonl"), "--no-open"]) == 0


# -------------------------------------------------------------------------------- in a browser

MOST_WORK = 3000  # ms of the main thread


@needs_chromium
@pytest.mark.processes
def test_programs_are_listed_filtered_and_opened(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    batch(path, ["one", "bad", "three"])
    script = """
        const found = {facts: $("facts").textContent, first: batch.chosen.row};
        const states = [...$("row-states").children];
        found.states = states.map((each) => each.textContent);
        states[3].click(); found.done = [...$("list-space").children].map((each) => each.dataset.row);
        $("row-search").value = "THREE"; $("row-search").dispatchEvent(new Event("input")); await pause();
        found.found = $("row-found").textContent;
        $("list-space").firstChild.click();
        found.text = $("text").textContent; found.hidden = document.querySelector(".of-run").hidden;
        found.rows = rows.length;
        take('{"row":7,"from":1,"input":"<b>x</b>"}\\n'); openRow(batch.byNumber.get(7));
        found.note = $("row-note").textContent; found.closed = document.querySelector(".of-run").hidden;
        return found;"""
    found = run_in_page(RunRecord.load(path).page(), script, tmp_path)
    assert "3 of 3 programs · 1 failed" in found["facts"]
    assert found["first"] == 1
    assert found["states"] == ["all 3", "no end 0", "failed 1", "done 2"]
    assert found["done"] == ["0", "2"]
    assert found["found"] == "1 program found"
    assert (found["text"], found["hidden"], found["rows"]) == ("Text: threeText: three", False, 1)
    assert (found["closed"], found["note"]) == (True, "Row 7 had not ended when this file was read.")


@needs_chromium
@pytest.mark.processes
def test_a_failed_row_opens_with_its_error(tmp_path: Path) -> None:
    @ul.function
    def fail(s: ul.State, text: str) -> None:
        s += text + ul.gen("answer", max_tokens=4)
        raise ValueError(f"{text}\n" + 1000 * "x" + " the end")

    path = tmp_path / "batch.jsonl"
    fail.run_batch([("a",)], backend=ul.Echo(), view=path, on_error="return")
    script = """
        const shown = () => [$("row-trouble").textContent, getComputedStyle($("row-trouble")).userSelect];
        const found = {kept: shown()};
        Object.assign(batch.rows[0], {record: undefined}); openRow(batch.rows[0]); found.bare = shown();
        batch.rows[0].record = '{"of":0,"run":[{"umbel_run":1},{"end":1,"left_out":3,"logprobs_left_out":1}]}';
        batch.rows[0].error = undefined; openRow(batch.rows[0]); found.left = shown()[0];
        return found;"""
    found = run_in_page(RunRecord.load(path).page(), script, tmp_path)
    error = f"ValueError: a\n{1000 * 'x'} the end"
    assert found["kept"] == found["bare"] == [error, "auto"]
    assert "3 operations left out" in found["left"]
    assert "log-probabilities of 1 token left out" in found["left"]


@needs_chromium
@pytest.mark.processes
def test_a_batch_that_was_killed_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    batch(path, ["one", "two"])
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"ended":' not in line))
    with path.open("a") as file:
        file.write('{"row":7,"from":0.1,"input":"a"}\n')
    script = 'return {facts: $("facts").textContent, page: $("batch").innerText};'
    found = run_in_page(RunRecord.load(path).page(), script, tmp_path)
    assert "not ended when this file was read" in found["facts"]
    assert "running" not in found["facts"] + found["page"]
    assert "no end 1" in found["page"]


def followed(server: LiveServer, folder: Path) -> tuple[str, str]:
    """Opens the live page for 20 seconds of virtual time. Returns its headline and its document."""
    command = [FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    facts = re.search(r'<span id="facts"[^>]*>(.*?)</span>', done.stdout)
    assert facts is not None, done.stderr[-2000:]
    return facts[1], done.stdout


@needs_chromium
@pytest.mark.processes
@pytest.mark.parametrize("texts", [["bad"], [f"second {number}" for number in range(9)]], ids=["shorter", "longer"])
def test_the_page_begins_anew_with_the_file(
    served: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    batch(served.path, ["one", "two", "three"])
    lines = served.lines
    begun: list[int] = []

    def lines_of_another_batch_at_the_end(start: int) -> tuple[bytes, str]:
        data, view = lines(start)
        if start and not data and not begun:
            begun.append(start)
            batch(served.path, texts)
        return data, view

    monkeypatch.setattr(served, "lines", lines_of_another_batch_at_the_end)
    facts, document = followed(served, tmp_path)
    assert f"{len(texts)} of {len(texts)} program" in facts
    assert len(re.findall(r'data-row="\d', document)) == len(texts)
    assert ("1 failed" in facts) == (texts == ["bad"])


@needs_chromium
@pytest.mark.processes
def test_the_page_follows_a_file_that_grows(
    served: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch(served.path, ["one", "bad", "three"])
    monkeypatch.setattr(live, "MOST_SENT", 100)  # so the page asks often, and gets a line or two at a time
    facts, document = followed(served, tmp_path)
    assert "3 of 3 programs · 1 failed" in facts
    assert "running" not in facts
    assert len(re.findall(r'data-row="\d', document)) == 3


@needs_chromium
@pytest.mark.processes
@pytest.mark.nightly
def test_ten_thousand_programs_stay_usable(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    state = check.run(text="one", backend=ul.Echo())
    record = json.dumps(state.record().lines)
    file = BatchFile(path, "check", "none", 10_000, clock=lambda: 0.0)
    for row in range(10_000):
        file.note_begin(row, {"text": f"number {row}"})
        file._write({"of": row, "run": json.loads(record)})
        file._write({"row": row, "to": 1.0, "prompt_tokens": 9, "cached_tokens": 3, "completion_tokens": 1})
    file.close(0)
    script = """
        const found = {drawn: Number(document.documentElement.dataset.drawn), rows: batch.shown.length};
        let began = performance.now();
        $("row-search").value = "number 9999"; filterRows(); found.search = performance.now() - began;
        began = performance.now();
        $("list-space").firstChild.click(); found.open = performance.now() - began;
        found.text = $("text").textContent;
        $("row-search").value = ""; filterRows(); $("list").scrollTop = 100000;
        began = performance.now(); drawRows(); found.scroll = performance.now() - began;
        found.elements = document.querySelectorAll("*").length;
        return found;"""
    found = run_in_page(RunRecord.load(path).page(), script, tmp_path)
    print({name: value for name, value in found.items() if name in ("drawn", "search", "open", "scroll")})
    assert (found["rows"], found["text"]) == (10_000, "Text: oneText: one")
    assert found["elements"] < 1_000
    assert max(found["drawn"], found["search"], found["open"], found["scroll"]) < MOST_WORK
