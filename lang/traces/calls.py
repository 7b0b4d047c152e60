"""Holds the calls that programs have made, as plain data.

program   call 0 ──┬─► call 1 ──┬─► call 3      `after`: the calls that have to end before it
                   └─► call 2 ──┘
prompt    "Q: …"  0  " Why? "                   texts, and numbers of calls whose answers stand there
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """Text of a prompt. `control`: names of control tokens in it are these tokens."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of a program.

    Attributes:
        prompt: texts, and numbers of earlier calls of the program whose answers stand there.
        after: numbers of the calls of the program that have to end before it begins.
        answer: its text; "" for a select.
        tokens: of the answer, as the model counted them; 0 where that is not known.
        kept: the first tokens of them that lie wholly inside the answer; None where that is not known.
        tail: text of the answer after these.
        choices: of a select.
        sampled: equal calls may get different answers.
        branch: the fork that its stream is a branch of; "" for none.
    """

    prompt: tuple[Written | int, ...]
    after: tuple[int, ...] = ()
    answer: str = ""
    tokens: int = 0
    kept: int | None = None
    tail: str = ""
    choices: tuple[str, ...] = ()
    sampled: bool = False
    branch: str = ""


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The calls of some programs.

    Attributes:
        backend: the name of the one that answered.
        counts: the name of the model whose tokens `tokens` and `kept` are; "" for that of a provider.
        programs: each with its calls; a call comes after those that it waits for.
        notes: what was left out or assumed, as sentences.
    """

    backend: str
    counts: str
    programs: tuple[tuple[TracedCall, ...], ...]
    notes: tuple[str, ...]
