"""Random programs whose branches begin alike, as those do that ask one thing in several ways."""

from dataclasses import dataclass
from typing import Any

import umbel as ul
from hypothesis import strategies as st


@dataclass(frozen=True)
class Fork:
    branches: tuple[tuple[Any, ...], ...]
    join: str


# Letters are steps: A and B are said; x and y are deterministic calls, z and w sampled ones; u says what x is.
LETTERS = st.sampled_from("AABxxyzzu")


def bodies(depth: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    steps = st.lists(LETTERS, max_size=4).map(tuple)
    if depth == 0:
        return steps
    heads = st.lists(bodies(0), min_size=1, max_size=2)

    @st.composite
    def body(draw: st.DrawFn) -> tuple[Any, ...]:
        alike = draw(heads)
        tails = st.tuples(st.sampled_from(alike), bodies(depth - 1)).map(lambda pair: pair[0] + pair[1])
        branches = draw(st.lists(tails, min_size=1, max_size=4).map(tuple))
        fork = Fork(branches, draw(st.sampled_from(["gather_variable", "gather_variable", "concate_and_append", ""])))
        return (*draw(steps), fork, *draw(steps))

    return body()


def program_of(body: tuple[Any, ...]) -> ul.Program:
    @ul.function(max_tokens=4)
    def program(s: ul.State, topic: str) -> None:
        _run(s, body, topic)

    return program


def _run(s: ul.State, body: tuple[Any, ...], topic: str) -> None:
    for step in body:
        match step:
            case "A":
                s += "about " + topic
            case "B":
                s += " and. "
            case "x":
                s += ul.select("x", ["yes", "no", topic])
            case "y":
                s += ul.gen("y", temperature=0)
            case "z":
                s += ul.gen("z")
            case "w":
                s += ul.gen("w", temperature=0.5)
            case "u":
                if "x" in s and isinstance(s["x"], str):
                    s += s["x"]
            case Fork(branches, join):
                forks = s.fork(len(branches))
                for branch, inner in zip(forks, branches, strict=True):
                    _run(branch, inner, topic)
                if join:
                    forks.join(join)
