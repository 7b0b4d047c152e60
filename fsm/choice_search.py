"""How probable each of several texts is as what comes next, over all the ways to write it in tokens.

    P(the text goes on with c) = Σ over token sequences whose last token is the first to reach the end of c

That token may go past the end ("A" inside " An"). The sequences are too many to be listed, but few of them matter
(Zheng et al., SGLang, appendix B.3), and those left out can be bounded:

    ()  ──" Par"──▶ (" Par",) ──"i"──▶ …        a node: tokens that lie inside a text; its mass: their probability
     │                  └ reach("is")           of the next token to begin with "is": it ends the text or goes past it
     └ reach(" Paris")

    found    = Σ over the nodes that were evaluated, mass · reach(what is left of c)
    frontier = Σ over the nodes that were not, mass                  found ≤ P ≤ found + frontier

All texts are searched at once, so what they have in common is evaluated once. All numbers are natural logarithms.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .spelling import nodes_of_prefixes
from .trie import Trie

Path = tuple[int, ...]  # tokens behind those that all texts share
Log = NDArray[np.float64]
NOTHING = -np.inf


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends.

    Attributes:
        epsilon: what is not found is less than this share of what is found, for every text;
        patience: or the order of the texts is certain, and so many nodes have been evaluated;
        most: or so many have, whatever is known. The usual tokens of the texts are evaluated first, and do not count.
        together: nodes that are evaluated at a time.
    """

    epsilon: float = 1e-4
    patience: int = 64
    most: int = 512
    together: int = 8


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is to be known of the model behind a path: the log-probabilities of `ids`.

    ids     [ reach of text first | … | reach of text last − 1 | tokens to go on with | wanted by themselves ]
    bounds    ^0                    ^                          ^ len(bounds) = last − first + 1
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    first: int  # texts [first, last) of the sorted ones go on behind the path
    last: int
    onward: int  # so many tokens lie inside a text


@dataclass(slots=True, eq=False)
class _Open:
    """A node that has not been evaluated."""

    path: Path
    mass: float
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Probabilities:
    """Of each choice: the text goes on with it, and with no longer one of the choices. `usual`: counted along its
    usual tokens only, with the tokens that go past its end."""

    lower: Log  # [choices]
    upper: Log
    usual: Log
    logprobs: list[list[float]]  # of the usual tokens


class ChoiceSearch:
    """Best first: `begin`, then `answer` for every path, `absorb` and `proceed`, until that gives no more paths.

    Args:
        trie: of the model's vocabulary.
        token_bytes: what its tokens spell.
        choices: the usual tokens of each, all of them behind one beginning. They may begin with the same tokens.
        said: tokens that the prompt has there already: probabilities are under the condition that the text goes on
            with what they spell. Every choice begins with it.
        longest: tokens that a path may have.

    Raises:
        ValueError: a choice without tokens, or with one that stands for no text.
    """

    def __init__(
        self,
        trie: Trie,
        token_bytes: Callable[[int], bytes],
        choices: Sequence[Path],
        said: Path = (),
        *,
        longest: int,
        limits: SearchLimits | None = None,
    ) -> None:
        self.limits = limits or SearchLimits()
        self.evaluated = 0  # nodes
        self.tokens = 0  # token sequences that were weighed
        self._trie = trie
        self._token_bytes = token_bytes
        self._longest = longest
        self._choices = [*choices, said] if said else list(choices)
        spelled = [self._spell(choice) for choice in self._choices]
        for index, choice in enumerate(self._choices):
            wrong = [
                token
                for token, data in zip(choice, map(token_bytes, choice), strict=True)
                if not self._has(token, data)
            ]
            if wrong or not choice:
                raise ValueError(f"choice {index} has a token that is no text: {wrong}")
        self._condition = spelled[-1] if said else None
        self._texts = sorted(set(spelled))
        self._places = [bisect.bisect_left(self._texts, text) for text in spelled]
        self._below = self._nested(set(spelled[: len(choices)]))
        self._found: Log = np.full(len(self._texts), NOTHING)
        self._usual: Log = np.full(len(self._texts), NOTHING)
        self._masses: dict[Path, float] = {(): 0.0}
        self._open: list[_Open] = []
        self._asked: dict[Path, Question] = {}
        self._answers: dict[Path, Log] = {}
        self._ranges: dict[bytes, NDArray[np.int32]] = {}
        self._usual_paths: dict[Path, _Usual] = {}
        for index, choice in enumerate(self._choices):
            for place in range(len(choice)):
                usual = self._usual_paths.setdefault(choice[:place], _Usual())
                usual.texts.add(self._places[index])
                usual.tokens.setdefault(choice[place], len(usual.tokens))
        self._first_evaluated = len(self._usual_paths)
        self._logprobs: dict[Path, float] = {}

    # ------------------------------------------------------------------------------------------ rounds

    def begin(self) -> list[tuple[Path, int]]:
        """(path, how many of its beginnings, the longest ones, are to be evaluated): the usual tokens."""
        known: set[Path] = set()
        rounds = []
        for choice in self._choices:
            path = choice[:-1]
            new = [path[:length] for length in range(len(path) + 1) if path[:length] not in known]
            known.update(new)
            if new:
                rounds.append((path, len(new)))
        return rounds

    def question(self, path: Path) -> Question:
        """What is to be known behind a path."""
        question = self._asked.get(path)
        if question is None:
            question = self._asked[path] = self._ask(path)
        return question

    def answer(self, path: Path, logprobs: Log) -> None:
        """The log-probabilities of `question(path).ids`."""
        self._answers[path] = logprobs

    def absorb(self) -> None:
        """All that was asked for has been answered."""
        for path in sorted(self._answers, key=len):  # a path's mass is known from the answer of the path before it
            self._absorb(path, self._asked[path], self._answers[path])
        self._answers.clear()
        self._asked.clear()

    def proceed(self) -> list[Path]:
        """The paths that are to be evaluated next; none: the search is done."""
        if not self._open:
            return []
        spent = self.evaluated - self._first_evaluated
        frontier = self._frontier()
        unsettled = frontier > np.log(self.limits.epsilon) + self._found
        if not unsettled.any() or spent >= self.limits.most:
            return []
        if spent >= self.limits.patience and self._ordered(frontier):
            return []
        chosen = self._best(frontier, unsettled, min(self.limits.together, self.limits.most - spent))
        for node in chosen:
            self._open.remove(node)
            self._masses[node.path] = node.mass
        return [node.path for node in chosen]

    @property
    def probabilities(self) -> Probabilities:
        """As far as they are known."""
        lower = self._found
        upper = np.minimum(np.logaddexp(lower, self._frontier()), 0.0)
        only_lower, only_upper = self._exclusive(lower, upper)
        usual = self._exclusive(self._usual, self._usual)[0]
        count = len(self._choices)
        if self._condition is not None:
            count -= 1
            place = self._places[-1]
            only_lower, only_upper = only_lower - upper[place], np.minimum(only_upper - lower[place], 0.0)
            usual = usual - self._usual[place]
        places = self._places[:count]
        return Probabilities(
            only_lower[places],
            only_upper[places],
            np.minimum(usual, 0.0)[places],
            [[self._logprobs[path[: place + 1]] for place in range(len(path))] for path in self._choices[:count]],
        )

    # ------------------------------------------------------------------------------------------ one node

    def _ask(self, path: Path) -> Question:
        done = self._spell(path)
        first, last = self._going_on(done)
        reached = [self._beginning_with(text[len(done) :]) for text in self._texts[first:last]]
        bounds = np.cumsum([0, *map(len, reached)])
        inside: dict[int, None] = {}  # nodes of the trie, each once
        for text in self._texts[first:last]:
            inside.update((node, None) for _, node in nodes_of_prefixes(self._trie, text, len(done), len(text) - 1))
        onward = [token for node in inside for token in self._trie.tokens_at(node)]
        usual = self._usual_paths.get(path)
        wanted = list(usual.tokens) if usual is not None else []
        ids = np.concatenate([*reached, np.array(onward + wanted, np.int32)]).astype(np.int32)
        return Question(ids, bounds, first, last, len(onward))

    def _absorb(self, path: Path, question: Question, logprobs: Log) -> None:
        mass = self._masses.pop(path)
        self.evaluated += 1
        bounds, first, last = question.bounds, question.first, question.last
        usual = self._usual_paths.get(path)
        for text in range(first, last):
            reach = logprobs[bounds[text - first] : bounds[text - first + 1]]
            if len(reach):
                more = mass + np.logaddexp.reduce(reach)
                self._found[text] = np.logaddexp(self._found[text], more)
                if usual is not None and text in usual.texts:
                    self._usual[text] = np.logaddexp(self._usual[text], more)
        begin = int(bounds[-1])
        for place in range(begin, begin + question.onward):
            self._push((*path, int(question.ids[place])), mass + float(logprobs[place]))
        if usual is not None:
            for place in range(begin + question.onward, len(question.ids)):
                self._logprobs[(*path, int(question.ids[place]))] = float(logprobs[place])

    def _push(self, path: Path, mass: float) -> None:
        self.tokens += 1
        if path in self._usual_paths:  # those are evaluated in the first round
            self._masses[path] = mass
        else:
            self._open.append(_Open(path, mass, *self._going_on(self._spell(path))))

    # ------------------------------------------------------------------------------------------ all of them

    def _frontier(self) -> Log:
        """[texts] what may still be found."""
        sums: Log = np.full(len(self._texts), NOTHING)
        if self._open:
            first = np.array([node.first for node in self._open])
            counts = np.array([node.last for node in self._open]) - first
            ends = np.cumsum(counts)
            texts = np.arange(int(ends[-1])) - np.repeat(ends - counts - first, counts)
            np.logaddexp.at(sums, texts, np.repeat([node.mass for node in self._open], counts))
        return sums

    def _best(self, frontier: Log, unsettled: NDArray[np.bool_], count: int) -> list[_Open]:
        """The open nodes that are the largest shares of what is not settled; those too long to be run stay open."""
        gains = np.where(unsettled, -np.logaddexp(self._found, frontier), NOTHING)

        def share(node: _Open) -> float:
            return node.mass + float(gains[node.first : node.last].max())

        shares = [(share(node), node) for node in self._open if len(node.path) <= self._longest]
        shares = [entry for entry in shares if entry[0] > NOTHING]
        shares.sort(key=lambda entry: (-entry[0], entry[1].path))
        return [node for _, node in shares[:count]]

    def _ordered(self, frontier: Log) -> bool:
        """No two choices can change places."""
        lower, upper = self._exclusive(self._found, np.logaddexp(self._found, frontier))
        places = sorted(set(self._places[: len(self._choices) - (self._condition is not None)]))
        order = sorted(places, key=lambda place: (lower[place], upper[place]))
        return all(upper[low] < lower[high] for low, high in itertools.pairwise(order))

    def _exclusive(self, lower: Log, upper: Log) -> tuple[Log, Log]:
        """Of texts that longer choices begin with: without those."""
        if not self._below:
            return lower, upper
        only_lower, only_upper = lower.copy(), upper.copy()
        for place, longer in self._below.items():
            only_lower[place] = _less(lower[place], np.logaddexp.reduce(upper[longer]))
            only_upper[place] = _less(upper[place], np.logaddexp.reduce(lower[longer]))
        return only_lower, only_upper

    # ------------------------------------------------------------------------------------------ texts

    def _has(self, token: int, data: bytes) -> bool:
        node = self._trie.find(data) if data else None
        return node is not None and token in self._trie.tokens_at(node)

    def _spell(self, path: Iterable[int]) -> bytes:
        return b"".join(map(self._token_bytes, path))

    def _going_on(self, done: bytes) -> tuple[int, int]:
        """The texts that are longer than `done` and begin with it: a range, because they are sorted."""
        first = bisect.bisect_right(self._texts, done)
        return first, bisect.bisect_left(self._texts, True, lo=first, key=lambda text: not text.startswith(done))

    def _beginning_with(self, rest: bytes) -> NDArray[np.int32]:
        ids = self._ranges.get(rest)
        if ids is None:
            ids = self._ranges[rest] = self._trie.tokens_below(rest)
        return ids

    def _nested(self, choices: set[bytes]) -> dict[int, list[int]]:
        """Choice → the next longer choices that begin with it; only where there are some."""
        below: dict[int, list[int]] = {}
        stack: list[int] = []
        for place, text in enumerate(self._texts):
            if text not in choices:
                continue
            while stack and not text.startswith(self._texts[stack[-1]]):
                stack.pop()
            if stack:
                below.setdefault(stack[-1], []).append(place)
            stack.append(place)
        return below


@dataclass(slots=True)
class _Usual:
    """Of a path that lies on the usual tokens of some choices: those texts, and the tokens that come next."""

    texts: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)


def _less(whole: float, part: float) -> float:
    """log(exp(whole) − exp(part)); nothing when that is not positive."""
    return whole + float(np.log1p(-np.exp(part - whole))) if part < whole else NOTHING
