"""The page of a run or of a batch: one HTML file with its data, its style and its code. It loads nothing.

    run ─► data.py: lines ─► RunRecord ─► save(): a file of lines ─► umbel view
                                      └─► show(): page.html with the lines in it
    batch ─► batch_file.py: a file that grows ─► umbel view, and live.py, which serves the page while it grows

Text of models is in the data alone. There `<` is written as \\u003c, so no text ends the element that holds it; the
page puts it on screen as text, never as HTML.
"""

import argparse
import html
import json
import os
import tempfile
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ..notebooks.display import displayed
from .data import BATCH_BEGINNING, BATCH_VERSION, ORIGINS, VERSION, Line, written

_DATA = "<!-- the data of the run -->"
MOST_BYTES = 1 << 30  # of a saved run
_FRAME = "width:100%;height:720px;border:1px solid rgba(138,143,153,.5);border-radius:8px"


class RunRecord:
    """The record of a run so far, or the view of a batch: what `state.record()` returns, and `umbel view` opens.

        record = state.record()
        record.save("before.jsonl")
        record.show(against=RunRecord.load("other.jsonl"))

    Args:
        text: its lines, as `data.py` describes them.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "RunRecord":
        return cls(written(lines))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RunRecord":
        """Reads a file that `save` wrote, or the `view=` of a batch, which may be running.

        Raises:
            ParameterError: no such file, or one of something else.
        """
        file = Path(checks.path("path", path))
        try:
            if file.stat().st_size > MOST_BYTES:
                raise ParameterError(f"{shown(str(file))} is larger than {MOST_BYTES} bytes; no record of a run is")
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ParameterError(
                f"{shown(str(file))}: there is no such file; write the path of one that state.save(FILE) or "
                "run_batch(..., view=FILE) wrote"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"{shown(str(file))} cannot be read as the record of a run: {error}") from None
        if text.startswith(BATCH_BEGINNING):
            text = text[: text.rfind("\n") + 1]  # the last line may be half written
        try:
            lines = [json.loads(line) for line in text.splitlines() if line]
        except (ValueError, RecursionError):
            lines = []
        known = bool(lines) and all(isinstance(line, dict) for line in lines)
        if not known or (lines[0].get("umbel_run"), lines[0].get("umbel_batch")) not in (
            (VERSION, None),
            (None, BATCH_VERSION),
        ):
            raise ParameterError(f"{shown(str(file))} holds no record of a run; write one with state.save(path)")
        damage = _damage(lines)
        if damage:
            raise ParameterError(f"{shown(str(file))}, {damage}; the file is torn or was edited: save it again")
        return cls(written(lines))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The data, one dict for each line of the file."""
        return [json.loads(line) for line in self._text.splitlines()]

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the record into a file, for `umbel view`. Returns its path. Raises ParameterError where it cannot."""
        return _write(path, self._text)

    def page(self, against: "RunRecord | None" = None) -> str:
        """Returns the page as HTML. `against`: another run, whose prompts and texts are compared with this one's.

        Raises:
            ParameterError: `against` is the view of a batch.
        """
        if against is not None and against._text.startswith(BATCH_BEGINNING):
            raise ParameterError("against= is the view of a batch; write the record of one run: state.save(path)")
        template = (files(__package__) / "page.html").read_text(encoding="utf-8")
        head, tail = template.split(_DATA)
        other = "" if against is None else _embedded("other", against._text)
        return "".join([head, _embedded("meanings", json.dumps(ORIGINS)), _embedded("run", self._text), other, tail])

    def show(self, path: str | os.PathLike[str] | None = None, *, against: "RunRecord | None" = None) -> str:
        """Writes the page into a file and returns its path. Without a path it goes into a temporary file and is opened:
        in the output of a notebook's cell, else in a browser."""
        if against is not None and not isinstance(against, RunRecord):
            raise ParameterError(f"against={shown(against)}; give a state's record() or RunRecord.load(path)")
        page = self.page(against)
        if path is not None:
            return _write(path, page)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="umbel-run-", suffix=".html", delete=False
        ) as temporary:
            temporary.write(page)
        if displayed(_framed(page), "the page of a run") is None:
            webbrowser.open(Path(temporary.name).as_uri())
        return temporary.name

    def _repr_html_(self) -> str:
        return _framed(self.page())

    def __repr__(self) -> str:
        return f"<RunRecord of {self._text.count(chr(10))} lines; .show() opens it>"


def _damage(lines: Sequence[Line]) -> str:
    """Says which line of a run, or of a run in a batch, the page cannot place; "" for none."""
    begun: set[object] = set()
    for number, line in enumerate(lines, 1):
        if "of" in line:
            inner = line.get("run")
            if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
                return f"line {number}: has no run"
            damage = _damage(inner)
            if damage:
                return f"line {number}: {damage}"
        elif "op" in line:
            if str(line.get("stream")) not in begun:
                return f"line {number}: operation {shown(line['op'])} is of a stream that was not begun"
            if not all(isinstance(line.get(name), int | float) for name in ("op", "from", "to")):
                return f"line {number}: operation {shown(line['op'])} has no times"
        elif "stream" in line:
            begun.add(str(line["stream"]))
    return ""


def _embedded(name: str, text: str) -> str:
    """Returns lines as an element of the page. In JSON `<` stands in strings only, where it may be escaped."""
    return f'<script type="application/jsonl" id="{name}">\n{text.replace("<", chr(92) + "u003c")}</script>\n'


def _framed(page: str) -> str:
    """Returns a page as a frame of a notebook's cell: its style and code do not meet those of the notebook."""
    return f'<iframe sandbox="allow-scripts" style="{_FRAME}" srcdoc="{html.escape(page)}"></iframe>'


def _write(path: object, text: str) -> str:
    """Writes a file. Returns its path; raises ParameterError where it cannot be written."""
    file = Path(checks.path("path", path))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"{shown(str(file))} cannot be written: {error.strerror}; write another path") from None
    return str(file)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="umbel view", description="Opens the page of a run or of a batch.")
    made.add_argument("run", metavar="RUN", help="the file that state.save(FILE) or run_batch(..., view=FILE) wrote")
    made.add_argument("--against", metavar="RUN", help="compare it with another run, text by text")
    made.add_argument("--output", metavar="FILE", help="write the page there instead of opening it")
    made.add_argument("--live", action="store_true", help="follow the file of a batch, run_batch(..., view=FILE)")
    made.add_argument("--port", type=int, help="of the live page; default: any that is free")
    made.add_argument("--no-open", action="store_true", help="print the address of the live page, open no browser")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs `umbel view`."""
    options = parser().parse_args(list(arguments))
    if options.live:
        if options.against is not None or options.output is not None:
            raise ParameterError("--live serves a page; leave --against and --output out")
        from .live import follow  # which imports this module

        return follow(options.run, options.port or 0, opens=not options.no_open)
    if options.no_open or options.port is not None:
        raise ParameterError("--port and --no-open are for --live; write --output FILE to open no browser")
    if options.output is not None:
        _check_output(options.output, options.run, options.against)
    against = None if options.against is None else RunRecord.load(options.against)
    print(RunRecord.load(options.run).show(options.output, against=against))
    return 0


def _check_output(output: str, *read: str | None) -> None:
    """Raises ParameterError for an output that is one of the files that are read: the page would replace it."""
    if any(path is not None and checks.is_one_file(output, path) for path in read):
        raise ParameterError(f"--output {output} is the file that is read; write the path of a page: run.html")
