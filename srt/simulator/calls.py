"""The calls that a simulated program makes, and the programs that make them: workload files, made-up shapes.

    ProgramSession    a program of a workload file: its forks, and what waits for which answer, as the language runs it
    TokenSession      one call with given tokens

A session asks its `Host`, which is the exact or the coarse simulation, and tells when its last answer has come. No text
is generated: an answer has as many tokens as the program allows at most, and of a select the choice is drawn by the
name of its variable.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import CapabilityError, ParameterError
from ...lang.prompt import Generated, Part
from ...lang.prompt import Text as PromptText
from ...lang.protocol import Origin
from .workload import Branch, Fork, Gen, Image, Ops, Program, Select, Text, Var, key_of, keys_of, scope_of

TokenArray = NDArray[np.int32]


class RowsAhead(NamedTuple):
    """Rows of a text after that of its newest token, in one step.

    Attributes:
        forced: those of tokens that a constraint has forced.
        guessed, right: those of guesses, and the first ones of them that the text has repeated.
        source: of the guesses.
    """

    forced: int
    guessed: int
    right: int
    source: str


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """A call of a program: a generation, or with `choices` a select.

    `prompt`: parts, or the token ids.
    `sampled`: equal calls get different answers.
    `ahead`: where rows run after that of the newest token, by the tokens of the answer so far.
    `tail`: tokens at the end of the answer, after the `max_tokens`, that are forced: none of their rows runs.
    """

    prompt: tuple[Part, ...] | TokenArray
    max_tokens: int = 0
    sampled: bool = False
    choices: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)
    ahead: Mapping[int, RowsAhead] = field(default_factory=dict)
    tail: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    text: str = ""
    token_ids: tuple[int, ...] = ()


class Host(Protocol):
    """Runs the calls of sessions."""

    def ask(self, call: SimulatedCall, then: Callable[[Answered], None]) -> None:
        """Starts a call; `then` is called when it has ended."""

    def hint(self, prompt: tuple[Part, ...], origin: Origin) -> None:
        """Says that several calls will begin with this prompt."""


class Session(Protocol):
    """A client's work from its arrival to its last answer."""

    def begin(self, host: Host, ended: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenSession:
    """One call."""

    call: SimulatedCall

    def begin(self, host: Host, ended: Callable[[], None]) -> None:
        host.ask(self.call, lambda _: ended())


class ProgramSession:
    """Runs a program of a workload file.

    A state says its operations one after the other. A fork starts its branches and goes on; it waits for them where it
    needs a variable of theirs or where the file says `join`. Branches of one fork share a fork group, and a prompt that
    more than one branch begins with is announced by a hint: all as the interpreter does it.

    Raises (when it is made):
        CapabilityError: the program shows an image.
    """

    def __init__(self, program: Program, number: int) -> None:
        _require_text(program.ops)
        self._program = program
        self._number = number
        self._keys = dict.fromkeys(program.keys)
        self._values: dict[str, Answered] = {}
        self._waiting: dict[str, list[Iterator[str]]] = {}
        self._forks = count(1)
        self._states = 0  # that have not said all of theirs

    def begin(self, host: Host, ended: Callable[[], None]) -> None:
        self._host, self._ended = host, ended
        self._start(self._program.ops, (), (), "")

    def _start(self, ops: Ops, branch: Branch, prompt: tuple[Part, ...], fork_group: str) -> None:
        self._states += 1
        self._go_on(self._say(ops, branch, prompt, fork_group))

    def _go_on(self, state: Iterator[str]) -> None:
        """Runs a state up to the next variable that has no value yet, or to its end."""
        for key in state:
            if key not in self._values:
                self._waiting.setdefault(key, []).append(state)
                return
        self._states -= 1
        if not self._states:
            self._ended()

    def _say(self, ops: Ops, branch: Branch, prompt: tuple[Part, ...], fork_group: str) -> Iterator[str]:
        """Says the operations of a state; yields the variables that it needs."""
        origin = Origin(program_id=f"p{self._number}", fork_group=fork_group)
        for op in ops:
            match op:
                case Text(text):
                    prompt = (*prompt, PromptText(text))
                case Var(name):
                    key = scope_of(self._keys, branch, name)
                    yield key
                    prompt = (*prompt, PromptText(self._values[key].text))
                case Gen(name=name):
                    key = key_of(branch, name)
                    call = SimulatedCall(prompt, op.max_tokens, op.temperature > 0, origin=origin)
                    self._host.ask(call, partial(self._answered, key))
                    yield key
                    value = self._values[key]
                    prompt = (*prompt, Generated(value.text, value.token_ids))
                case Select(name=name, choices=choices):
                    key = key_of(branch, name)
                    chosen = choices[zlib.crc32(f"{self._number} {key}".encode()) % len(choices)]
                    call = SimulatedCall(prompt, choices=choices, origin=origin)
                    self._host.ask(call, partial(self._chosen, key, chosen))
                    yield key
                    prompt = (*prompt, PromptText(chosen))
                case Fork(branches=branches, join=join):
                    group = f"p{self._number}.{next(self._forks)}"
                    if len(branches) > 1 and prompt:
                        self._host.hint(prompt, Origin(program_id=origin.program_id, fork_group=group))
                    for number, inner in enumerate(branches):
                        self._start(inner, (*branch, number), prompt, group)
                    if join:
                        for number, inner in enumerate(branches):
                            yield from keys_of(inner, (*branch, number))
                case Image():
                    raise AssertionError("refused when the session was made")

    def _chosen(self, key: str, choice: str, _: Answered) -> None:
        self._answered(key, Answered(choice))

    def _answered(self, key: str, value: Answered) -> None:
        self._values[key] = value
        for state in self._waiting.pop(key, ()):
            self._go_on(state)


def _require_text(ops: Ops) -> None:
    for op in ops:
        if isinstance(op, Image):
            raise CapabilityError(f"image {op.path.name!r}: a simulation takes text only")
        if isinstance(op, Fork):
            for branch in op.branches:
                _require_text(branch)


# ------------------------------------------------------------------------------------------ made-up shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Calls that begin with one of some prefixes and go on with tokens of their own.

    Attributes:
        prefixes, prefix: how many there are, and the tokens of each.
        own: tokens of a call after its prefix.
        output: tokens of its answer.
        requests: calls.
        skew: how much more often the first prefixes are used: prefix i has the weight 1 / i^skew. 0: all alike.
        seed: of the drawing.
    """

    prefixes: int = 64
    prefix: int = 1_000
    own: int = 60
    output: int = 1
    requests: int = 2_000
    skew: float = 0.0
    seed: int = 1

    def sessions(self) -> Iterator[TokenSession]:
        """Makes the calls, one at a time."""
        draw = np.random.default_rng(self.seed)
        weights = 1 / np.arange(1, self.prefixes + 1) ** self.skew
        chosen = draw.choice(self.prefixes, self.requests, p=weights / weights.sum())
        first = np.arange(self.prefixes * self.prefix, dtype=np.int32).reshape(self.prefixes, self.prefix)
        own = first.size
        for prefix in chosen.tolist():
            tokens = np.concatenate([first[prefix], np.arange(own, own + self.own, dtype=np.int32)])
            own += self.own
            yield TokenSession(SimulatedCall(tokens, self.output))


MOST_SKEW = 30  # i^skew is a number for each i below MADE_UP
MADE_UP = 1 << 29  # the ids of made-up prompts are below it, those of their answers from it on


def is_shape(name: str) -> bool:
    """Returns whether a workload is a made-up shape: it sets something, and no file is called so."""
    return "=" in name and not os.path.exists(os.path.expanduser(name))


def parse_shape(text: str) -> Shape:
    """Reads "prefixes=64,prefix=1000,own=60". Raises ParameterError."""
    known = Shape.__dataclass_fields__
    given: dict[str, int | float] = {}
    for entry in text.split(","):
        name, equals, value = entry.partition("=")
        if name not in known or not equals:
            raise ParameterError(
                f"{entry!r} in {text!r}; write some of {', '.join(f'{name}=NUMBER' for name in known)}"
            )
        try:
            given[name] = float(value) if name == "skew" else int(value.replace("_", ""))
        except ValueError:
            raise ParameterError(f"{entry!r} in {text!r}: {value!r} is no number") from None
        least = 0 if name in ("skew", "output", "seed") else 1
        if not least <= given[name] <= (MOST_SKEW if name == "skew" else math.inf):  # NaN is not
            range = f"{least} to {MOST_SKEW}" if name == "skew" else f"{least} or more"
            raise ParameterError(f"{entry!r} in {text!r}: write {range}")
    shape = Shape(**given)  # type: ignore[arg-type]  # each is of its field's type
    if (tokens := shape.prefixes * shape.prefix + shape.requests * shape.own) > MADE_UP:
        raise ParameterError(
            f"{text!r} has {tokens:,} different tokens, and {MADE_UP:,} can be told apart; write fewer"
        )
    return shape
