"""Bounds how probable each of several texts is as what comes next, over all the ways to write it in tokens.

    P(the text goes on with c) = Σ over token sequences whose last token is the first to reach the end of c

That token may go past the end ("A" inside " An"). The sequences are too many to be listed, but few of them matter
(Zheng et al., SGLang, appendix B.3), and those left out can be bounded:

    ()  ──" Par"──▶ (" Par",) ──"i"──▶ …        a node: tokens that lie inside a text; its mass: their probability
     │                  └ reach("is")           of the next token to begin with "is": it ends the text or goes past it
     └ reach(" Paris")

    found    = Σ over the nodes that were evaluated, mass · reach(what is left of c)
    frontier = Σ over the nodes that were not, mass                  found ≤ P ≤ found + frontier

All texts are searched at once, so what they have in common is evaluated once. The texts are sorted, so those that go on
after some bytes are a range:

    A   A+   A++   B          "A" is chosen when the text goes on with it and not with "A+", the next longer choice
    └────┴────┘

All numbers are natural logarithms.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .tokens.trie import Trie, nodes_of_prefixes

Log = NDArray[np.float64]  # natural logarithms
NOTHING = -np.inf


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Says when a search ends.

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
class Probabilities:
    """Bounds, for each choice, that the text goes on with it and no longer choice. `usual`: counted along its
    usual tokens only, with the tokens that go past its end."""

    lower: Log  # [choices]
    upper: Log
    usual: Log
    logprobs: list[list[float]]  # of the usual tokens


class ChoiceSearch:
    """Searches best first: `begin`, `answer` the `question` of every node, `proceed` until that gives no more nodes.

    Args:
        trie: of the model's vocabulary.
        token_bytes: what its tokens spell.
        choices: the usual tokens of each, all of them after one beginning. They may begin with the same tokens.
        said: tokens that the prompt has there already: probabilities are under the condition that the text goes on
            with what they spell. Every choice begins with it.
        longest: tokens that a node may have.

    Raises:
        ValueError: a choice without tokens, or with one that stands for no text.
    """

    def __init__(
        self,
        trie: Trie,
        token_bytes: Callable[[int], bytes],
        choices: Sequence[Sequence[int]],
        said: Sequence[int] = (),
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
        for index, choice in enumerate(self._choices):
            wrong = [token for token in choice if not self._is_text(token)]
            if wrong or not choice:
                raise ValueError(f"choice {index} has a token that is no text: {wrong}")
        spelled = [b"".join(map(token_bytes, choice)) for choice in self._choices]
        self._texts = Texts(spelled[: len(choices)], spelled[-1] if said else b"")
        self._found: Log = np.full(len(self._texts), NOTHING)
        self._usual: Log = np.full(len(self._texts), NOTHING)
        self._open: list[SearchNode] = []  # their mass is known, and they have not been asked about
        self._ranges: dict[bytes, NDArray[np.int32]] = {}
        self._root = SearchNode(None, -1, 0, 0, len(self._texts), Usual(), 0.0)
        self._first = self._usual_nodes()
        self._asked_first = sum(map(len, self._first))

    # ------------------------------------------------------------------------------------------ rounds

    def begin(self) -> list[list[SearchNode]]:
        """Gives the usual tokens, to be evaluated first: rows of nodes, each with the one before it as its parent."""
        return self._first

    def question(self, node: SearchNode) -> NDArray[np.int32]:
        """Returns the tokens of which the log-probabilities after a node are to be known."""
        if node.question is None:
            node.question = self._ask(node)
        return node.question.ids

    def answer(self, node: SearchNode, logprobs: Log) -> None:
        """Takes the log-probabilities of `question(node)`."""
        node.answer = logprobs
        ready = [node]
        while ready:
            node = ready.pop()
            if node.answer is not None and node.mass is not None:  # else its parent has no answer yet
                self._absorb(node, node.mass, node.answer)
                if node.usual is not None:
                    ready += [child for child in node.usual.children.values() if child is not None]

    def proceed(self) -> list[SearchNode]:
        """Chooses the nodes to evaluate next, once everything has been answered; none: the search is done."""
        if not self._open:
            return []
        spent = self.evaluated - self._asked_first
        frontier = self._frontier()
        unsettled = frontier > np.log(self.limits.epsilon) + self._found
        if not unsettled.any() or spent >= self.limits.most:
            return []
        if spent >= self.limits.patience and self._ordered(frontier):
            return []
        together = min(max(self.limits.together, int(unsettled.sum())), 4 * self.limits.together)
        chosen = self._best(frontier, unsettled, min(together, self.limits.most - spent))
        gone = set(map(id, chosen))
        self._open = [node for node in self._open if id(node) not in gone]
        return chosen

    @property
    def probabilities(self) -> Probabilities:
        """As far as they are known."""
        texts = self._texts
        lower = self._found
        upper = np.minimum(np.logaddexp(lower, self._frontier()), 0.0)
        only_lower, only_upper = texts.exclusive(lower, upper)
        usual = texts.exclusive(self._usual, self._usual)[0]
        said = texts.of_condition
        if said is not None:
            only_lower, only_upper = only_lower - upper[said], only_upper - lower[said]
            usual = usual - self._usual[said]
        places = texts.of_choices
        return Probabilities(
            only_lower[places],
            np.minimum(only_upper, 0.0)[places],
            np.minimum(usual, 0.0)[places],
            [self._logprobs(choice) for choice in self._choices[: len(places)]],
        )

    # ------------------------------------------------------------------------------------------ usual tokens

    def _usual_nodes(self) -> list[list[SearchNode]]:
        """Makes the nodes on the usual tokens of the texts → those that each text adds."""
        texts = self._texts
        places = texts.of_choices + ([] if texts.of_condition is None else [texts.of_condition])
        rows = []
        new = [self._root]
        for choice, place in zip(self._choices, places, strict=True):
            node = self._root
            for token in choice[:-1]:
                assert node.usual is not None, "all of them are made here"
                node.usual.texts.add(place)
                child = node.usual.children.get(token)
                if child is None:
                    child = self._child(node, token, place)
                    child.usual = Usual()
                    node.usual.children[token] = child
                    new.append(child)
                node = child
            assert node.usual is not None, "all of them are made here"
            node.usual.texts.add(place)
            node.usual.children.setdefault(choice[-1])
            if new:
                rows.append(new)
            new = []
        return rows

    def _logprobs(self, choice: Sequence[int]) -> list[float]:
        node: SearchNode | None = self._root
        values = []
        for token in choice:
            assert node is not None, "a choice is made of usual tokens"
            assert node.usual is not None, "a choice is made of usual tokens"
            values.append(node.usual.logprobs[token])
            node = node.usual.children[token]
        return values

    # ------------------------------------------------------------------------------------------ one node

    def _child(self, node: SearchNode, token: int, place: int) -> SearchNode:
        """Returns the node after one more token, with which text `place` goes on."""
        length = node.length + len(self._token_bytes(token))
        alone = node.last - node.first == 1
        first, last = (node.first, node.last) if alone else self._texts.extending(self._texts[place][:length])
        return SearchNode(node, token, length, first, last)

    def _ask(self, node: SearchNode) -> Question:
        done = node.length
        reached = [self._reaching(self._texts[place], done) for place in range(node.first, node.last)]
        inside: dict[int, int] = {}  # node of the trie → a text
        for place in range(node.first, node.last):
            text = self._texts[place]
            for _, found in nodes_of_prefixes(self._trie, text, done, len(text) - 1):
                inside.setdefault(found, place)
        onward = [(token, place) for found, place in inside.items() for token in self._trie.tokens_at(found)]
        wanted = [token for token, _ in onward] + (list(node.usual.children) if node.usual is not None else [])
        bounds = np.cumsum([0, *map(len, reached)])
        ids = np.concatenate([*reached, np.array(wanted, np.int32)])
        return Question(ids, bounds, [place for _, place in onward])

    def _reaching(self, text: bytes, done: int) -> NDArray[np.int32]:
        """Returns the tokens with which a text of which `done` bytes are there is complete, or more than that."""
        if len(text) - done > self._trie.depth:
            return np.empty(0, np.int32)
        rest = text[done:]
        ids = self._ranges.get(rest)
        if ids is None:
            ids = self._ranges[rest] = self._trie.tokens_below(rest)
        return ids

    def _absorb(self, node: SearchNode, mass: float, logprobs: Log) -> None:
        question, usual = node.question, node.usual
        assert question is not None, "an answer is to a question"
        self.evaluated += 1
        bounds = question.bounds
        for text, (begin, end) in enumerate(itertools.pairwise(bounds.tolist()), node.first):
            if begin < end:
                more = mass + np.logaddexp.reduce(logprobs[begin:end])
                self._found[text] = np.logaddexp(self._found[text], more)
                if usual is not None and text in usual.texts:
                    self._usual[text] = np.logaddexp(self._usual[text], more)
        tokens, values = question.ids[bounds[-1] :].tolist(), logprobs[bounds[-1] :].tolist()
        onward = len(question.places)
        for token, value, place in zip(tokens[:onward], values[:onward], question.places, strict=True):
            self._push(node, token, mass + value, place)
        if usual is not None:
            usual.logprobs.update(zip(tokens[onward:], values[onward:], strict=True))
        node.question = node.answer = None

    def _push(self, node: SearchNode, token: int, mass: float, place: int) -> None:
        self.tokens += 1
        child = node.usual.children.get(token) if node.usual is not None else None
        if child is None:
            child = self._child(node, token, place)
            self._open.append(child)
        child.mass = mass  # one on usual tokens is evaluated in the first round

    # ------------------------------------------------------------------------------------------ all of them

    def _frontier(self) -> Log:
        """Sums, for each text, what may still be found."""
        sums: Log = np.full(len(self._texts), NOTHING)
        if self._open:
            first = np.array([node.first for node in self._open])
            counts = np.array([node.last for node in self._open]) - first
            ends = np.cumsum(counts)
            texts = np.arange(int(ends[-1])) - np.repeat(ends - counts - first, counts)
            np.logaddexp.at(sums, texts, np.repeat(self._masses(), counts))
        return sums

    def _masses(self) -> Log:
        return np.array([node.mass for node in self._open], np.float64)

    def _best(self, frontier: Log, unsettled: NDArray[np.bool_], count: int) -> list[SearchNode]:
        """Chooses the open nodes with the largest shares of what is not settled; those too long to run stay open."""
        gains = np.append(np.where(unsettled, -np.logaddexp(self._found, frontier), NOTHING), NOTHING)
        edges = np.array([(node.first, node.last) for node in self._open]).ravel()
        shares = self._masses() + np.maximum.reduceat(gains, edges)[::2]
        entries = [
            (-share, place, node)
            for place, (share, node) in enumerate(zip(shares.tolist(), self._open, strict=True))
            if share > NOTHING and node.depth <= self._longest
        ]
        return [node for _, _, node in heapq.nsmallest(count, entries)]

    def _ordered(self, frontier: Log) -> bool:
        """Tells whether no two choices can change places."""
        lower, upper = self._texts.exclusive(self._found, np.logaddexp(self._found, frontier))
        places = set(self._texts.of_choices)
        order = sorted(places, key=lambda place: (lower[place], upper[place]))
        return all(upper[low] < lower[high] for low, high in itertools.pairwise(order))

    def _is_text(self, token: int) -> bool:
        data = self._token_bytes(token)
        node = self._trie.find(data) if data else None
        return node is not None and token in self._trie.tokens_at(node)


class Texts:
    """The texts of a search, each once, in order; a place is an index into them.

    Args:
        choices: what each spells; several may spell the same.
        condition: a text that is no choice and that all choices begin with; b"" for none.
    """

    def __init__(self, choices: Sequence[bytes], condition: bytes = b"") -> None:
        self._texts = sorted({*choices, condition} - {b""})
        self.of_choices = [bisect.bisect_left(self._texts, text) for text in choices]
        self.of_condition = bisect.bisect_left(self._texts, condition) if condition else None
        self._longer = self._next_longer(set(self.of_choices))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> bytes:
        return self._texts[place]

    def extending(self, done: bytes) -> tuple[int, int]:
        """Returns the texts [first, last) that begin with these bytes and are longer."""
        first = bisect.bisect_right(self._texts, done)
        return first, bisect.bisect_left(self._texts, True, lo=first, key=lambda text: not text.startswith(done))

    def exclusive(self, lower: Log, upper: Log) -> tuple[Log, Log]:
        """Bounds for "begins with it" → bounds for "and with no longer choice". Both: [texts]"""
        if not self._longer:
            return lower, upper
        only_lower, only_upper = lower.copy(), upper.copy()
        for place, longer in self._longer.items():
            only_lower[place] = _less(lower[place], np.logaddexp.reduce(upper[longer]))
            only_upper[place] = _less(upper[place], np.logaddexp.reduce(lower[longer]))
        return only_lower, only_upper

    def _next_longer(self, choices: set[int]) -> dict[int, list[int]]:
        """Maps a choice to those that begin with it, and with no other choice between; only where there are some."""
        longer: dict[int, list[int]] = {}
        stack: list[int] = []  # each begins with the one before it
        for place in sorted(choices):
            while stack and not self._texts[place].startswith(self._texts[stack[-1]]):
                stack.pop()
            if stack:
                longer.setdefault(stack[-1], []).append(place)
            stack.append(place)
        return longer


def _less(whole: float, part: float) -> float:
    """Computes log(exp(whole) − exp(part)); nothing when that is not positive."""
    return whole + float(np.log1p(-np.exp(part - whole))) if part < whole else NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Asks for the log-probabilities of `ids` after a node.

    ids     [ reaching text first | … | reaching text last − 1 | tokens to go on with | usual tokens ]
    bounds    ^0                    ^                          ^ one more than texts
    places                                                       of each: a text that it goes on with
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    places: list[int]


@dataclass(slots=True, eq=False)
class Usual:
    """Marks a node on the usual tokens of some texts: which texts, and what comes next: another node, or their end."""

    texts: set[int] = field(default_factory=set)
    children: dict[int, SearchNode | None] = field(default_factory=dict)  # by token
    logprobs: dict[int, float] = field(default_factory=dict)  # of those tokens, when they are known


@dataclass(slots=True, eq=False)
class SearchNode:
    """Some tokens after those that all texts share: one more than its parent has.

    Texts [first, last) begin with their `length` bytes, and are longer.
    """

    parent: SearchNode | None  # None: the root, without tokens
    token: int
    length: int
    first: int
    last: int
    usual: Usual | None = None
    mass: float | None = None  # log-probability; None until the parent has its answer
    depth: int = field(init=False)  # tokens
    question: Question | None = None
    answer: Log | None = None

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    @property
    def tokens(self) -> list[int]:
        """All of them, in order."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]
