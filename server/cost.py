"""Records the tokens of requests (`umbel serve --record`), and says what providers would have charged (`umbel cost`).

A record has numbers only, no text. Providers charge input tokens at a price P, and cached ones at a part of it:

    implicit caching   (other + 0.2 · reused) · P
    explicit caching   (other + 0.1 · read + 1.25 · created) · P        2 · created for an hour
"""

import argparse
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..lang.errors import ParameterError
from ..lang.protocol import Usage

log = logging.getLogger("umbel.server")

REUSED, READ, CREATED, CREATED_FOR_AN_HOUR = 0.2, 0.1, 1.25, 2.0  # parts of the price of an input token


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The tokens of one request.

    Attributes:
        prompt: of the input, all of them.
        completion: generated.
        reused: of the prompt, by whatever right.
        read, created, created_for_an_hour: of the prompt, by its marks.
    """

    prompt: int
    completion: int
    reused: int = 0
    read: int = 0
    created: int = 0
    created_for_an_hour: int = 0

    def __add__(self, other: "Recorded") -> "Recorded":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Recorded(*(one + two for one, two in pairs))

    @property
    def implicit(self) -> float:
        """The cost of the input under implicit caching, as a part of that without a cache."""
        return (self.prompt - self.reused + REUSED * self.reused) / self.prompt

    @property
    def explicit(self) -> float:
        """The cost of the input under explicit caching, as a part of that without a cache."""
        other = self.prompt - self.read - self.created - self.created_for_an_hour
        kept = READ * self.read + CREATED * self.created + CREATED_FOR_AN_HOUR * self.created_for_an_hour
        return (other + kept) / self.prompt


def recorded(usage: Usage) -> Recorded:
    """Returns the tokens of a request, or of a program's run, that has ended."""
    return Recorded(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens - usage.long_write_tokens,
        usage.long_write_tokens,
    )


class Recorder:
    """Appends a line of JSON for each request to a file.

    Raises:
        ParameterError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)  # a line is one write: several processes may share the file
            self._failed = False
        except OSError as error:
            raise ParameterError(f"--record {path}: {error.strerror}") from None

    def note(self, usage: Usage) -> None:
        """Appends a request. A file that cannot be written costs no answer; the log says so once."""
        try:
            self._file.write(msgspec.json.encode(recorded(usage)) + b"\n")
        except OSError as error:
            if not self._failed:
                log.error("%s has not all requests: %s", self._file.name, error.strerror)
            self._failed = True

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[Recorded]:
    """Reads a file of records.

    Raises:
        ParameterError: it cannot be read, or a line of it is no record.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ParameterError(f"{path}: {error.strerror}") from None
    decoder = msgspec.json.Decoder(Recorded)
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ParameterError(
                f"{path}, line {number}: {error}; the file is written by umbel serve --record"
            ) from None
    return found


def report(records: Iterable[Recorded], price: float | None = None) -> str:
    """Describes the cost of a run, with the formulas filled in.

    Args:
        price: dollars for a million input tokens; None leaves dollars out.
    """
    all_of = list(records)
    total = sum(all_of, Recorded(0, 0))
    if not total.prompt:
        return "no input tokens were recorded"
    other = total.prompt - total.read - total.created - total.created_for_an_hour
    lines = [
        f"{len(all_of)} requests, {total.prompt:,} input tokens, {total.completion:,} generated",
        f"reused {total.reused:,}; by marks: read {total.read:,}, created {total.created:,} "
        f"and {total.created_for_an_hour:,} for an hour",
        "",
        f"implicit caching: ({total.prompt - total.reused:,} + {REUSED} · {total.reused:,}) / {total.prompt:,}"
        f" = {_percent(total.implicit)}",
        f"explicit caching: ({other:,} + {READ} · {total.read:,} + {CREATED} · {total.created:,}"
        f" + {CREATED_FOR_AN_HOUR:g} · {total.created_for_an_hour:,}) / {total.prompt:,} = {_percent(total.explicit)}",
    ]
    if price is not None:
        whole = total.prompt * price / 1e6
        lines.append(
            f"at ${price:g} a million: ${whole:.4f} without a cache, ${whole * total.implicit:.4f} implicit, "
            f"${whole * total.explicit:.4f} explicit"
        )
    return "\n".join(lines)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} % of the price without a cache"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel cost",
        description="Says what providers would have charged for the input tokens of a recorded run.",
        epilog="umbel serve --record FILE writes the file.",
    )
    made.add_argument("file", type=Path, help="what umbel serve --record has written")
    made.add_argument("--price", type=float, help="dollars for a million input tokens")
    return made


def main(arguments: Sequence[str]) -> int:
    """Runs `umbel cost`. Returns the exit status."""
    options = parser().parse_args(arguments)
    print(report(read_records(options.file), options.price))
    return 0
