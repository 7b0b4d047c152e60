"""A journal on a runtime, whose prompts hold the token ids of its answers."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import umbel as ul
from umbel.interpreter import loop
from umbel.srt.in_process import LocalBackend

from .test_journal import lines_of


@contextlib.contextmanager
def oracle() -> Iterator[LocalBackend]:
    backend = LocalBackend(seed=3)
    try:
        yield backend
    finally:
        loop.streams.run(backend.close(), 60.0)


def test_a_runtime_goes_on_from_texts_it_has_not_generated(tmp_path: Path) -> None:
    path = str(tmp_path / "run.jsonl")

    @ul.function
    def program(s):
        s += "A tale: " + ul.gen("a", max_tokens=8) + " and " + ul.gen("b", max_tokens=8)
        s += " so " + ul.select("c", ["yes", "no"]) + " " + ul.gen("d", max_tokens=8)

    for count in range(4):
        with oracle() as backend:
            whole = program.run(backend=backend, journal=f"{path}{count}", seed=1)
        lines = lines_of(f"{path}{count}")
        calls = [index for index, line in enumerate(lines) if json.loads(line)["type"] == "call"]
        Path(f"{path}{count}").write_bytes(b"".join(lines[: calls[count]]))
        with oracle() as backend:
            again = program.run(backend=backend, journal=f"{path}{count}", seed=1)
        assert again.text() == whole.text()
        assert again.cost.usage.calls == 4 - count
