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

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .choice_texts import NOTHING, Log, Texts
from .spelling import nodes_of_prefixes
from .trie import Trie

Path = tuple[int, ...]  # tokens behind those that all texts share


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a search ends.

    Attributes:
        epsilon: what is not found is less than this share of what is found, for every text;
        patience: or the order of the texts is certain, and so many nodes have been evaluated;
        most: or so many have, whatever is known. The usual tokens of the texts are evaluated first, and do not count.
        together: nodes that are evaluated at a time; up to four times as many when so many texts are not settled.
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
            wrong = [token for token in choice if not self._is_text(token)]
            if wrong or not choice:
                raise ValueError(f"choice {index} has a token that is no text: {wrong}")
        self._texts = texts = Texts(spelled[: len(choices)], spelled[-1] if said else b"")
        self._found: Log = np.full(len(texts), NOTHING)
        self._usual: Log = np.full(len(texts), NOTHING)
        self._masses: dict[Path, float] = {(): 0.0}
        self._open: list[_Open] = []
        self._asked: dict[Path, Question] = {}
        self._answers: dict[Path, Log] = {}
        self._ranges: dict[bytes, NDArray[np.int32]] = {}
        self._usual_paths: dict[Path, _Usual] = {}
        places = texts.of_choices + ([] if texts.of_condition is None else [texts.of_condition])
        for choice, text in zip(self._choices, places, strict=True):
            for length, token in enumerate(choice):
                usual = self._usual_paths.setdefault(choice[:length], _Usual())
                usual.texts.add(text)
                usual.tokens[token] = None
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
        together = min(max(self.limits.together, int(unsettled.sum())), 4 * self.limits.together)
        chosen = self._best(frontier, unsettled, min(together, self.limits.most - spent))
        self._masses.update((node.path, node.mass) for node in chosen)
        self._open = [node for node in self._open if node.path not in self._masses]
        return [node.path for node in chosen]

    @property
    def probabilities(self) -> Probabilities:
        """As far as they are known."""
        texts = self._texts
        lower = self._found
        upper = np.minimum(np.logaddexp(lower, self._frontier()), 0.0)
        only_lower, only_upper = texts.exclusive(lower, upper)
        usual = texts.exclusive(self._usual, self._usual)[0]
        if (said := texts.of_condition) is not None:
            only_lower, only_upper, usual = (
                only_lower - upper[said],
                only_upper - lower[said],
                usual - self._usual[said],
            )
        places = texts.of_choices
        return Probabilities(
            only_lower[places],
            np.minimum(only_upper, 0.0)[places],
            np.minimum(usual, 0.0)[places],
            [
                [self._logprobs[path[: place + 1]] for place in range(len(path))]
                for path in self._choices[: len(places)]
            ],
        )

    # ------------------------------------------------------------------------------------------ one node

    def _ask(self, path: Path) -> Question:
        done = self._spell(path)
        first, last = self._texts.behind(done)
        texts = [self._texts[place] for place in range(first, last)]
        reached = [self._beginning_with(text[len(done) :]) for text in texts]
        bounds = np.cumsum([0, *map(len, reached)])
        inside: dict[int, None] = {}  # nodes of the trie, each once
        for text in texts:
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
            self._open.append(_Open(path, mass, *self._texts.behind(self._spell(path))))

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
        gains = np.append(np.where(unsettled, -np.logaddexp(self._found, frontier), NOTHING), NOTHING)
        edges = np.array([(node.first, node.last) for node in self._open]).ravel()
        shares = np.array([node.mass for node in self._open]) + np.maximum.reduceat(gains, edges)[::2]
        entries = [
            (-share, node.path, node)
            for share, node in zip(shares.tolist(), self._open, strict=True)
            if share > NOTHING and len(node.path) <= self._longest
        ]
        return [node for _, _, node in heapq.nsmallest(count, entries, key=lambda entry: entry[:2])]

    def _ordered(self, frontier: Log) -> bool:
        """No two choices can change places."""
        lower, upper = self._texts.exclusive(self._found, np.logaddexp(self._found, frontier))
        places = set(self._texts.of_choices)
        order = sorted(places, key=lambda place: (lower[place], upper[place]))
        return all(upper[low] < lower[high] for low, high in itertools.pairwise(order))

    # ------------------------------------------------------------------------------------------ texts

    def _is_text(self, token: int) -> bool:
        data = self._token_bytes(token)
        node = self._trie.find(data) if data else None
        return node is not None and token in self._trie.tokens_at(node)

    def _spell(self, path: Iterable[int]) -> bytes:
        return b"".join(map(self._token_bytes, path))

    def _beginning_with(self, rest: bytes) -> NDArray[np.int32]:
        ids = self._ranges.get(rest)
        if ids is None:
            ids = self._ranges[rest] = self._trie.tokens_below(rest)
        return ids


@dataclass(slots=True)
class _Usual:
    """Of a path that lies on the usual tokens of some choices: those texts, and the tokens that come next."""

    texts: set[int] = field(default_factory=set)
    tokens: dict[int, None] = field(default_factory=dict)  # a set in order
