"""Watches the head of prompts for a line that changes with every request, and drops lines that the operator names.

    x-anthropic-billing-header: cc_version=2.1; cch=fa690;     another one with every request
    You are a coding agent ...                                 thousands of tokens that could be reused

All that follows such a line is computed again. The head is the first 4,096 characters of the system text, and of the
first message after it.
"""

import logging
import operator
import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...lang.conversations.messages import Message
from ...lang.errors import ParameterError, shown
from ..limits import WATCHED_HEAD, WATCHED_LINES, WATCHED_REQUESTS, WATCHED_SALTS

log = logging.getLogger("umbel.server")
MOST_LINE = 1_000  # characters of a line that a pattern is tried on
MOST_PATTERN = 200  # characters
MOST_PATTERNS = 16
MOST_REPEATS = 2  # in a pattern: a line of 1,000 characters takes a million steps at worst
REQUESTS = 3  # in each of which a line has to differ
SAME_AFTER = 512  # characters of the head after the line that have to be the same

_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEAT = re.compile(r"[*+?]|\{\d*,\d*\}")
_LABEL = re.compile(r"[A-Za-z][A-Za-z_ .-]{0,63}:")


class IgnoredLines:
    """Drops lines from the head of a conversation.

    Args:
        patterns: regular expressions, each of a whole line.

    Raises:
        ParameterError: one that is none, too long, or may take more than quadratic time.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        if len(patterns) > MOST_PATTERNS:
            raise ParameterError(f"{len(patterns)} times --ignore-line; write at most {MOST_PATTERNS}")
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def dropped(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages without these lines. A block of nothing else becomes empty, and keeps its place."""
        if not self._patterns:
            return messages
        found = list(messages)
        for numbers in _heads(messages):
            room = WATCHED_HEAD
            for number in numbers:
                content = []
                for block in messages[number].content:
                    content.append(self._without(block, room) if isinstance(block, str) else block)
                    room -= len(block) if isinstance(block, str) else 0
                found[number] = replace(messages[number], content=tuple(content))
        return found

    def _without(self, text: str, room: int) -> str:
        kept, place = [], 0
        for line in _lines(text, room):
            place += len(line)
            bare = line.rstrip("\r\n")
            if len(bare) > MOST_LINE or not any(pattern.fullmatch(bare) for pattern in self._patterns):
                kept.append(line)
        return "".join(kept) + text[place:]


def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern whose time is bounded: single characters repeat, and few of them."""
    name = f"--ignore-line {shown(pattern)}"
    if not pattern or len(pattern) > MOST_PATTERN:
        raise ParameterError(f"{name}: write 1 to {MOST_PATTERN} characters")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ParameterError(f"{name}: {error}; write \\ before a character that stands for itself") from None
    plain = _ESCAPED_OR_CLASS.sub("x", pattern)
    if set("()|") & set(plain):
        raise ParameterError(
            f"{name}: groups and | are not taken; write \\( for the character, and --ignore-line again for another line"
        )
    if len(_REPEAT.findall(plain)) > MOST_REPEATS:
        raise ParameterError(
            f"{name}: at most {MOST_REPEATS} of * + ? {{m,n}}; the beginning of the line and .* will do"
        )
    return compiled


def _heads(messages: Sequence[Message]) -> Iterator[list[int]]:
    """Yields the numbers of the messages before the first one that is not of the system, then of that one."""
    first = next((number for number, each in enumerate(messages) if each.role != "system"), len(messages))
    yield list(range(first))
    yield [first] if first < len(messages) else []


def _lines(text: str, room: int) -> Iterator[str]:
    """Yields the lines that begin in the first `room` characters, with their ends."""
    place = 0
    while place < min(len(text), room):
        end = text.find("\n", place) + 1 or len(text)
        yield text[place:end]
        place = end


@dataclass(slots=True)
class _Watched:
    """Heads of the last requests of a salt, the latest last, and the places that it was warned of."""

    recent: deque[tuple[list[str], list[str]]] = field(default_factory=lambda: deque(maxlen=WATCHED_REQUESTS))
    warned: set[tuple[int, int]] = field(default_factory=set)


class ChangingLines:
    """Finds lines that change with every request of a salt.

    Their text lies in memory: the heads of the last WATCHED_REQUESTS of each of WATCHED_SALTS, 32 MB of ASCII at most.
    """

    def __init__(self) -> None:
        self._salts: OrderedDict[str, _Watched] = OrderedDict()

    def watch(self, salt: str, messages: Sequence[Message]) -> str | None:
        """Notes a request. Returns a warning for a line that has changed in each of the last 3, once for its place.

        The warning may hold the label of the line, and goes to the caller, who sent it. The log gets the place alone.
        """
        watched = self._salts.setdefault(salt, _Watched())
        self._salts.move_to_end(salt)
        if len(self._salts) > WATCHED_SALTS:
            self._salts.popitem(last=False)
        system, first = (_head(messages, numbers) for numbers in _heads(messages))
        warning = None
        for kind, (head, what) in enumerate(((system, "the system text"), (first, "the first message"))):
            earlier = [each[kind] for each in watched.recent]
            for place, variants in _changing(head, earlier):
                if warning is None and (kind, place) not in watched.warned:
                    watched.warned.add((kind, place))
                    log.warning("%s", _told(place, what, "REGEX"))
                    warning = _told(place, what, _suggested(variants))
        watched.recent.append((system, first))
        return warning


def _told(place: int, what: str, pattern: str) -> str:
    return (
        f"line {place + 1} of {what} changes with every request, so nothing after it is reused; "
        f"start umbel serve with --ignore-line {pattern}, or send the line last"
    )


def _head(messages: Sequence[Message], numbers: Sequence[int]) -> list[str]:
    found: list[str] = []
    room = WATCHED_HEAD
    for block in (block for number in numbers for block in messages[number].content if isinstance(block, str)):
        if room > 0 and len(found) < WATCHED_LINES:
            found += block[:room].split("\n", WATCHED_LINES - len(found) - 1)  # the rest counts as one line
        room -= len(block)
    return found


def _changing(head: list[str], earlier: list[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Yields the places of lines that differ in this head and the last ones like it, each with these lines.

    A head is like this one if most of its lines are: conversations with other heads may come in between. One that is
    the same means that no line of it changes with every request.
    """
    alike: list[list[str]] = []
    for each in reversed(earlier):
        if each == head:
            return
        if abs(len(each) - len(head)) <= 1 and sum(map(operator.eq, head, each)) * 2 >= len(head):
            alike.append(each)
            if len(alike) == REQUESTS - 1:
                break
    else:
        return
    agree = [all(same) for same in zip(*(map(operator.eq, head, each) for each in alike), strict=False)]
    for place in range(len(agree) - 1):
        if agree[place] or not agree[place + 1] or (place and not agree[place - 1]):
            continue
        variants = [each[place] for each in (*alike, head)]
        after = sum(len(head[number]) for number in range(place + 1, len(agree)) if agree[number])
        if len(set(variants)) == REQUESTS and after >= SAME_AFTER:
            yield place, variants


def _suggested(variants: list[str]) -> str:
    """Returns a pattern for lines, made of the label that they begin with; "REGEX" where they have none."""
    labels = {"" if label is None else label[0] for label in map(_LABEL.match, variants)}
    label = labels.pop() if len(labels) == 1 else ""
    return "'" + label.replace(".", "\\.") + ".*'" if label else "REGEX"
