"""Random programs without data-dependent control flow: what a graph can say, said by one function.

Depth up to 4, width up to 8. Values are read at one place and said at another, cut and joined with arguments; branches
are joined both ways or not at all; programs run inside others, in their state or in one of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import umbel as ul
from hypothesis import strategies as st


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class SayArgument:
    form: int


@dataclass(frozen=True)
class Ask:
    name: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Choose:
    name: str
    temperature: float


@dataclass(frozen=True)
class ChooseOf:
    """Among texts that the program has."""

    name: str
    of: str


@dataclass(frozen=True)
class Use:
    """Say a variable, in one of some forms."""

    name: str
    form: int


@dataclass(frozen=True)
class Assign:
    name: str
    of: str
    form: int


@dataclass(frozen=True)
class Keep:
    """Read here, return at the end."""

    name: str


@dataclass(frozen=True)
class Point:
    ttl: float


@dataclass(frozen=True)
class Isolate:
    """A private part. `of`: which tenant's."""

    of: str


@dataclass(frozen=True)
class Turn:
    role: str
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Scope:
    name: str
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Fork:
    """`every`: how many branches there are from one that runs the body to the next one that does."""

    width: int
    body: tuple[Any, ...]
    join: str
    every: int = 1


@dataclass(frozen=True)
class Copy:
    body: tuple[Any, ...]
    joined: bool


@dataclass(frozen=True)
class Inside:
    """Another program in this state."""

    body: tuple[Any, ...]


@dataclass(frozen=True)
class Beside:
    """Another program in a state of its own, some of whose text is said here."""

    body: tuple[Any, ...]


NAMES = st.sampled_from("abcd")
OPTIONS = st.sampled_from(
    [
        (("max_tokens", 3), ("temperature", 0)),
        (("max_tokens", 3), ("temperature", 0), ("n", 2)),
        (("max_tokens", 2), ("temperature", 0.8), ("seed", 7)),
        (("max_tokens", 4), ("temperature", 1.0), ("seed", 3), ("n", 2)),
        (("max_tokens", 4), ("temperature", 0), ("stop", "e")),
        (("temperature", 0),),
    ]
)
LEAVES = st.one_of(
    st.builds(Point, st.sampled_from([0.5, 300.0])),
    st.builds(Isolate, NAMES),
    st.builds(Say, st.sampled_from(["hello ", "", "naïve ✓ ", "<|im_end|>", "\n", "  two words"])),
    st.builds(SayArgument, st.integers(0, 4)),
    st.builds(Ask, NAMES, OPTIONS),
    st.builds(Ask, NAMES, OPTIONS),
    st.builds(Choose, NAMES, st.sampled_from([0.0, 0.7])),
    st.builds(ChooseOf, NAMES, NAMES),
    st.builds(Use, NAMES, st.integers(0, 5)),
    st.builds(Assign, NAMES, NAMES, st.integers(0, 4)),
    st.builds(Keep, NAMES),
)


def bodies(depth: int, most: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    statement: st.SearchStrategy[Any] = LEAVES
    if depth > 1:
        inner = bodies(depth - 1, 3)
        modes = st.sampled_from(["gather_variable", "gather_variable", "concate_and_append", ""])
        widths = st.integers(1, 8 if depth == 4 else 3)
        statement = st.one_of(
            LEAVES,
            LEAVES,
            st.builds(Fork, widths, inner, modes, st.sampled_from([1, 1, 2])),
            st.builds(Copy, inner, st.booleans()),
            st.builds(Scope, NAMES, inner),
            st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), st.lists(LEAVES, max_size=3).map(tuple)),
            st.builds(Inside, inner),
            st.builds(Beside, inner),
        )
    return st.lists(statement, min_size=1, max_size=most).map(tuple)


@dataclass(frozen=True)
class Context:
    """What goes along with a body: arguments, what is returned, the states beside it, and whether a turn is open."""

    question: str
    shots: str
    kept: list[Any]
    beside: list[ul.State]
    in_turn: bool = False


def run_body(s: ul.State, body: tuple[Any, ...], context: Context) -> None:
    for statement in body:
        run_statement(s, statement, context)


def run_statement(s: ul.State, statement: Any, context: Context) -> None:
    match statement:
        case Say(text):
            s += text
        case SayArgument(form):
            question, shots = context.question, context.shots
            s += [question, f"Q: {question!r}", shots[:4] + question, f"{question:>12}|", [shots.upper(), question]][
                form
            ]
        case Ask(name, options):
            s += ul.gen(name, **dict(options))
        case Choose(name, temperature):
            s += ul.select(name, ["yes", "no way"], temperature=temperature)
        case ChooseOf(name, of):
            for value in texts(s, of):
                s += ul.select(name, [f"1{value}", f"2{value}", context.question + "3"])
        case Use(name, form):
            for value in texts(s, name):
                s += [value, f"[{value}]", value[1:3], value.strip() + "!", f"{value:.2}", s.text()[-3:]][form]
        case Assign(name, of, form):
            for value in texts(s, of):
                s[name] = [value, value.upper(), 7, {"of": [value, context.question]}, context.question][form]
        case Keep(name):
            if name in s:
                context.kept.append([s[name], *(f"<{value}>" for value in texts(s, name))])
        case Point(ttl):
            s += ul.cache_point(ttl)
        case Isolate(of):
            s.private(["acme", f"of-{of}", context.shots[:3], f"{context.shots[:3]}_{of}"][ord(of) % 4])
        case Turn(role, inner):
            if not context.in_turn:
                with getattr(s, role)():
                    run_body(s, inner, replace(context, in_turn=True))
        case Scope(name, inner):
            with s.var_scope(name):
                run_body(s, inner, context)
        case Fork(width, inner, join, every):
            forks = s.fork(width)
            for number, branch in enumerate(forks):
                branch += f"{number}."
                if number % every == 0:
                    run_body(branch, inner, context)
            if join:
                forks.join(join)
        case Copy(inner, True):
            with s.copy() as branch:
                run_body(branch, inner, context)
        case Copy(inner, False):
            run_body(s.copy(), inner, context)
        case Inside(inner):
            helper(s, inner, context)
        case Beside(inner):
            beside = helper.run(inner, replace(context, in_turn=False), temperature=0)
            context.beside.append(beside)
            s += beside.text()[:8]


@ul.function(max_tokens=5, seed=11)
def helper(s: ul.State, body: tuple[Any, ...], context: Context) -> None:
    run_body(s, body, context)


def texts(s: ul.State, name: str) -> Iterator[str]:
    """The first text that is in a variable, if there is one."""
    waiting = [s[name]] if name in s else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(reversed(value))
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, str):
            yield value
            return


def program_of(body: tuple[Any, ...], beside: list[ul.State]) -> ul.Program:
    """`beside`: the states of runs inside of it are put there."""

    @ul.function(stop="~", seed=5)
    def program(s: ul.State, question: str, shots: str = "Two shots.") -> Any:
        context = Context(question, shots, [], beside)
        run_body(s, body, context)
        s += ul.gen("last", max_tokens=2, temperature=0)
        return context.kept, {"question": question}

    return program
