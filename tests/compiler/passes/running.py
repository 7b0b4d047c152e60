"""What the tests of passes share: a program run as it is and as passes make it, and what was seen of both."""

import zlib
from dataclasses import dataclass
from typing import Any

import umbel as ul
from umbel.compiler.passes import Report

from ..watching import Watched, seen

PATIENCE = 20.0  # seconds, far above what any of these programs needs


@dataclass(frozen=True)
class Ran:
    """What a run showed, and what it asked of its backend, in an order of its own."""

    shown: dict[str, Any]
    asked: list[str]

    @property
    def variables(self) -> dict[str, Any]:
        return self.shown["variables"]


def answer(prompt: str) -> str:
    """Some words, others for every prompt."""
    number = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
    return " ".join(f"w{number >> shift & 255:x}e" for shift in range(0, 24, 4))


def ran(program: Any, backend: Watched, **options: Any) -> Ran:
    """Runs a program, compiled or not."""
    with ul.default_backend(backend):
        state = program.run(**options, timeout=PATIENCE)
    shown = seen(state)
    state._sink.run.wait_finished()
    return Ran(shown, backend.forget())


def both(program: ul.Program, backend: Watched, passes: Any, **options: Any) -> tuple[Ran, Ran, Report]:
    """The program run without passes, and with them."""
    told = {name: options.pop(name) for name in ("keep", "independent") if name in options}
    compiled = program.compile(passes=passes, **told)
    plain = ran(program.compile(passes="none"), backend, **options)
    return plain, ran(compiled, backend, **options), compiled.report
