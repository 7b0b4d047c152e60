"""The front page of a record: what we ask of a device, and whether it is met, not met or not measured.

A goal names figures of the record. Goals in tokens per second and in microseconds are those of an H100; on another
device they are the same share of what its memory, or its rate of products, allows.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .engine.shapes import LLAMA_3_8B, Shape
from .figures import Figure, Record, Unit, number
from .hardware import Limits

H100 = Limits(bandwidth=3.35e12, rate=989e12, stated=True)
# The ends of figures' names that the engine's groups share with this page.
DEVICE_BUSY = "device busy"
MEDIAN_OF_CACHE = "median that the cache gives where prompts share much"
_DRAWS, _VOCAB, _ITEM = 64, 128_256, 4  # rows of logits, their tokens, bytes of a number

Value = Callable[[Figure, Limits], float]  # a figure → the number that is asked about
Pick = Callable[[Sequence[float]], float]  # of several: the one that decides


@dataclass(frozen=True, slots=True)
class Goal:
    """
    Attributes:
        groups: in which its figures are.
        pattern: their names match it, in full.
        asked: of an H100.
        scale: how much more another device is asked for.
        smaller: less is better.
        value, pick: see above.
    """

    name: str
    groups: tuple[str, ...]
    pattern: str
    asked: float
    unit: str
    scale: Callable[[Limits], float] = lambda limits: 1.0
    smaller: bool = False
    value: Value = lambda figure, limits: figure.measured
    pick: Pick | None = None

    def answer(self, record: Record) -> "Answer":
        limits = record.hardware.limits
        asked = self.asked * (1.0 if record.dry else self.scale(limits))
        words = f"{'at most' if self.smaller else 'at least'} {number(asked)} {self.unit}"
        figures = [one for one in record.figures if self._is_asked(one)]
        if record.dry or not figures:
            return Answer(self.name, words, "", None)
        pick = self.pick or (max if self.smaller else min)
        measured = pick([self.value(one, limits) for one in figures])
        met = measured <= asked if self.smaller else measured >= asked
        of = f" ({len(figures)} figures)" if len(figures) > 1 else ""
        return Answer(self.name, words, f"{number(measured)}{of}", met)

    def _is_asked(self, figure: Figure) -> bool:
        known = figure.group in self.groups and not math.isnan(figure.measured)
        return known and re.fullmatch(self.pattern, figure.name) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """met: None: not measured."""

    name: str
    asked: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "NOT MET"


def _bandwidth(limits: Limits) -> float:
    return limits.bandwidth / H100.bandwidth


def _rate(limits: Limits) -> float:
    return limits.rate / H100.rate


def _less_time(limits: Limits) -> float:
    return H100.bandwidth / limits.bandwidth


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tokens(shape: Shape, sequences: int, keys: int) -> Value:
    """Of a decode step in bfloat16, whose figure is a share of the bandwidth."""
    size = 2 * shape.read_numbers(sequences * keys)
    return lambda figure, limits: sequences * figure.measured / 100 * limits.bandwidth / size


def _microseconds(figure: Figure, limits: Limits) -> float:
    """Of draws, whose figure is the share of the bandwidth that one read of the logits has."""
    return 1e6 * _DRAWS * _VOCAB * _ITEM / (limits.bandwidth * figure.measured / 100)


def _step(name: str, sequences: int, keys: int, asked: float) -> Goal:
    value, words = _tokens(LLAMA_3_8B, sequences, keys), f"decode, Llama 3 8B, {sequences} sequences of {keys} keys"
    return Goal(name, ("steps",), re.escape(words), asked, "tokens/s", _bandwidth, value=value)


def _fork(heads: str, branches: int, shared: int, asked: float) -> Goal:
    name = f"{branches} branches with {shared} shared keys, {heads} heads"
    pattern = rf"{branches} branches of \d+ keys behind {shared}, {heads} heads of 128"
    return Goal(name, ("attention",), pattern, asked, "×")


def _draw(name: str, wish: str, asked: float) -> Goal:
    pattern = rf"{re.escape(wish)}, {_DRAWS} rows of {_VOCAB}"
    return Goal(name, ("sampling",), pattern, asked, "µs", _less_time, smaller=True, value=_microseconds)


_ENGINES = ("runtime", "engine")
_BUSY = rf".*: {DEVICE_BUSY}"
GOALS = (
    Goal(
        "whole step, Llama 3 8B, one sequence",
        ("steps",),
        r"decode, Llama 3 8B, one sequence of 1024 keys",
        86.0,
        "% of bandwidth",
    ),
    _step("whole steps, Llama 3 8B, 64 sequences of 512 keys", 64, 512, 9_000),
    _step("whole steps, Llama 3 8B, 256 sequences of 512 keys", 256, 512, 20_000),
    Goal("prompts of 8k, Llama 3 8B", ("steps",), r"prompt of 8192 tokens, Llama 3 8B", 43_000, "tokens/s", _rate),
    Goal("attention of prompts, d128", ("attention",), r"prompt of 8192, \d+/\d+ heads of 128", 560, "TFLOPS", _rate),
    _fork("32/32", 32, 1024, 3.5),
    _fork("32/32", 32, 2048, 4.5),
    _fork("32/8", 32, 4096, 5.0),
    _fork("32/32", 128, 2048, 10.0),
    Goal("device busy, the least of the workloads", _ENGINES, _BUSY, 90.0, "%"),
    Goal("device busy, mean of the workloads", _ENGINES, _BUSY, 95.0, "%", pick=_mean),
    Goal("cache on against off, median where prompts share", ("engine",), rf".*, {MEDIAN_OF_CACHE}", 3.0, "×"),
    _draw("a plain draw, 64 rows of 128k", "a draw", 20.0),
    _draw("a draw of top_p, 64 rows of 128k", "a draw of top_p 0.9", 40.0),
)


def answers(record: Record) -> Iterator[Answer]:
    """Answers all goals, then whether what ran was right."""
    for goal in GOALS:
        yield goal.answer(record)
    yield _tests(record)
    for name, group in (("kernels give what their references give", "equality"), ("soak and shortage", "soak")):
        figures = [one for one in record.figures if one.group == group and not one.unit.is_timed]
        right = sum(not one.is_wrong for one in figures)
        met = None if record.dry or not figures else right == len(figures) and group not in record.broken
        yield Answer(name, "all", f"{right} of {len(figures)}" if figures else "", met)


def _tests(record: Record) -> Answer:
    """Tests that there was no time for, or no package, are not passed."""
    figures = [one for one in record.figures if one.group == "tests" and one.unit is Unit.PASSED]
    missing = [line for line in record.left_out.get("tests", []) if "skip themselves" not in line]
    if record.dry or not figures:
        return Answer("all tests of GPUs", "all", "", None)
    passed, ran = (
        int(sum(numbers)) for numbers in zip(*((one.measured, one.limit or 0) for one in figures), strict=True)
    )
    said = f"{passed} of {ran} that ran" + ("; others did not run" if missing else "")
    met = False if passed < ran else None if missing else "tests" not in record.broken
    return Answer("all tests of GPUs", "all", said, met)


def front_page(record: Record) -> str:
    """Returns the page as Markdown."""
    found = list(answers(record))
    counts = [sum(one.met is met for one in found) for met in (True, False, None)]
    lines = [f"# {record.hardware.name}", "", *record.hardware.lines(), ""]
    if record.dry:
        lines += ["**A dry run**: nothing was measured.", ""]
    lines += [f"Of {len(found)} goals {counts[0]} are met, {counts[1]} are not, {counts[2]} are not measured.", ""]
    lines += ["| goal | asked | measured | |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {one.name} | {one.asked} | {one.measured} | {one.word} |" for one in found]
    lines += ["", "`results.md` has every figure next to what the hardware allows."]
    if record.more:
        lines += [
            "",
            "More:",
            "",
            *(f"* [{name}]({name})" for name in sorted(record.more) if name.endswith((".md", ".svg"))),
        ]
    for title, texts in (
        ("Wrong", record.failed),
        ("Left out", [line for one in record.left_out.values() for line in one]),
    ):
        if texts:
            lines += ["", f"## {title}", "", *(f"* {line}" for line in texts)]
    return "\n".join([*lines, ""])
