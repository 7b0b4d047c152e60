"""Decides among branches: votes, best of n, beams and trees. All of it is forks, scores and `forks.until`.

    self_consistency    s ─┬─ ask ─ answer      until enough answers are equal; the other branches are cancelled
    best_of                ├─ ask ─ score       the branch with the highest score goes on
    beam_search         width states ─ expand each into branches ─ the best `width` of them ─ … ─ depth
    tree_search         the best open state ─ expand ─ … ─ until one is done

Each function serves sync and async programs: with an AsyncState it returns a coroutine. What they say is said by
functions of the caller: `ask(branch, number)` appends to a branch and returns nothing, `score(branch)` returns a
number, larger is better, and may read what the branch said. In async programs both may be coroutine functions.
"""

import heapq
import inspect
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from . import checks
from .errors import BranchCancelledError, ParameterError, shown
from .ops import checked_name
from .state import MAX_BRANCHES, AsyncState, BaseState, Ended

T = TypeVar("T")
Ask = Callable[[Any, int], object]
Score = Callable[[Any], object]
# What a search waits for: values of sync programs, awaitables of async ones. Any: each wait has its own result.
_Steps = Generator[Any, Any, T]

_MOST_STEPS = 1 << 20
_MOST_TOKENS = 1 << 53


@dataclass(frozen=True, slots=True)
class Vote:
    """Decides when enough branches have the same value of a variable: a rule for `forks.until`, made by `vote`.

    Args:
        name: of the variable.
        agree: so many equal values decide; None: as many as no other value can reach any more.
        key: makes of a value what is compared.

    Examples:
        >>> @ul.function
        ... def solve(s, question):
        ...     forks = s.fork(5)
        ...     forks += [f"{question} {i} " + ul.gen("answer", max_tokens=4) for i in range(5)]
        ...     rule = ul.vote("answer", agree=3)
        ...     ended = list(forks.as_completed())
        ...     print(rule(ended), rule.winner(ended), sorted(rule.counts(ended).items()))
        >>> answers = {"0 ": "7", "1 ": "8", "2 ": "7", "3 ": "7", "4 ": "6"}
        >>> _ = solve.run("3 + 4?", backend=ul.Echo(answers))
        True 7 [('6', 1), ('7', 3), ('8', 1)]
    """

    name: str
    agree: int | None
    key: Callable[[Any], Hashable]

    def __call__(self, ended: "Ended[Any]") -> bool:
        """Returns whether the vote is decided."""
        ranks = [votes for _, votes in self.counts(ended).most_common(2)] or [0]
        if self.agree is not None:
            return ranks[0] >= self.agree
        return ranks[0] > (ranks[1] if len(ranks) > 1 else 0) + ended.waiting

    def counts(self, ended: Sequence[BaseState]) -> Counter[Hashable]:
        """Returns the number of votes for each value, as `key` makes it.

        Args:
            ended: branches that have ended.

        Raises:
            ParameterError: `key` gave what cannot be counted, such as a list.
        """
        return Counter(key for _, key in self._votes(ended))

    def _votes(self, ended: Sequence[BaseState]) -> list[tuple[Any, Hashable]]:
        """Returns the value of each branch, and what it is compared as."""
        values = [branch._sink.value(self.name, 0) for branch in ended]
        votes = [(value, self.key(value)) for value in values]
        for _, key in votes:
            try:
                hash(key)
            except TypeError:
                raise ParameterError(
                    f"vote(key=...) gave {shown(key)}, which cannot be counted; return a text, a number or a tuple"
                ) from None
        return votes

    def winner(self, ended: Sequence[BaseState]) -> Any:
        """Returns the value with most votes, as the branch has it that ended first with it; of equal ones the first.

        Args:
            ended: branches that have ended, such as `forks.until(rule)` returned.

        Raises:
            ParameterError: no branch has ended; or as `counts`.
        """
        if not ended:
            raise ParameterError("vote: no branch has ended; give those that forks.until(...) returned")
        votes = self._votes(ended)
        most = Counter(key for _, key in votes).most_common(1)[0][0]
        return next(value for value, key in votes if key is most or key == most)


def vote(name: str, agree: int | None = None, *, key: Callable[[Any], Hashable] | None = None) -> Vote:
    """Makes a rule for `forks.until`: branches vote with their value of a variable.

    Args:
        name: of the variable. Values with a type count as objects, such as `dtype=int`; texts without space around.
        agree: so many equal values decide; None: as many as no other value can reach any more.
        key: makes of a value what is compared; None: the value itself, a text without the space around it.

    Returns:
        A Vote: the rule, whose `winner(ended)` and `counts(ended)` tell the result.

    Raises:
        ParameterError: no name, or not a number of branches.

    Examples:
        >>> @ul.function
        ... def solve(s, question):
        ...     s += question
        ...     forks = s.fork(8)
        ...     forks += ul.gen("answer", max_tokens=4, temperature=0.8)
        ...     ended = forks.until(ul.vote("answer", agree=3))  # cancels the other branches
        ...     s["answer"] = ul.vote("answer").winner(ended)
        >>> solve.run("3 + 4 =", backend=ul.Echo(lambda prompt: " 7"))["answer"]
        ' 7'
    """
    if agree is not None:
        agree = checks.integer("agree", agree, 1, MAX_BRANCHES, "a number of branches, such as 3")
    return Vote(checked_name(name), agree, key or _stripped)


def _stripped(value: Any) -> Hashable:
    if isinstance(value, str):
        return value.strip()
    try:
        hash(value)
    except TypeError:  # a list, or a tuple with one in it
        return repr(value)
    return value  # type: ignore[no-any-return]  # it has just been hashed


@dataclass(frozen=True, slots=True)
class Majority:
    """Describes what `self_consistency` has found.

    Attributes:
        value: the answer of most branches, as the first of them has it.
        votes: number of votes for each answer, as they are compared.
        ended: number of branches that ended well before the vote was decided.
        cancelled: number of branches that were cancelled then; those that failed are in neither.

    Examples:
        >>> @ul.function
        ... def solve(s, question):
        ...     s += question
        ...     def ask(branch, number):
        ...         branch += f" Try {number}:" + ul.gen("answer", max_tokens=4, temperature=0.8)
        ...     return ul.self_consistency(s, ask, branches=3, agree=3)
        >>> model = ul.Echo(lambda prompt: " 8" if prompt.endswith("Try 0:") else " 7")
        >>> majority = solve.run("3 + 4?", backend=model).ret_value
        >>> majority.value, sorted(majority.votes.items()), majority.ended, majority.cancelled
        (' 7', [('7', 2), ('8', 1)], 3, 0)
    """

    value: Any
    votes: dict[Hashable, int]
    ended: int
    cancelled: int


def self_consistency(
    s: BaseState,
    ask: Ask,
    answer: str = "answer",
    *,
    branches: int = 8,
    agree: int | None = None,
    key: Callable[[Any], Hashable] | None = None,
) -> Any:
    """Asks the same in several branches until enough of them agree, and sets `s[answer]` to what they say.

    Args:
        s: the state.
        ask: `ask(branch, number)` appends the question to a branch, and sets `answer` there. Its calls need a
            temperature above 0. In an async program it may be a coroutine function.
        answer: name of the variable.
        branches: number of branches; default: 8.
        agree: so many equal answers decide; None: as many as no other answer can reach any more.
        key: makes of an answer what is compared; see `vote`.

    Returns:
        A Majority; in an async program, a coroutine of it.

    Raises:
        ParameterError: a size that is no number of branches, or `agree` is more than `branches`.
        Exception: the error of a branch, where none ended well.

    Examples:
        >>> @ul.function
        ... def solve(s, question):
        ...     s += question
        ...     def ask(branch, number):
        ...         branch += ul.gen("answer", max_tokens=4, temperature=0.8)
        ...     majority = ul.self_consistency(s, ask, branches=8, agree=3)
        ...     return majority.ended, majority.cancelled
        >>> state = solve.run("3 + 4 =", backend=ul.Echo(lambda prompt: " 7"))
        >>> state["answer"], state.ret_value
        (' 7', (3, 5))
    """
    rule = vote(answer, agree, key=key)
    branches = checks.integer("branches", branches, 1, MAX_BRANCHES, "a number of branches, such as 8")
    if agree is not None:
        checks.integer("agree", agree, 1, branches, f"a number of branches, up to {branches}")

    def steps() -> _Steps[Majority]:
        forks = yield from _asked(s, branches, ask)
        ended = yield forks.until(rule)
        value = rule.winner(ended)
        s[rule.name] = value
        return Majority(value, dict(rule.counts(ended)), len(ended), len(forks) - len(ended) - _failed(forks))

    return _run(s, steps())


def best_of(s: BaseState, n: int, ask: Ask, *, score: Score) -> Any:
    """Asks the same in several branches, and returns the one with the highest score, to go on with.

    Args:
        s: the state.
        n: number of branches.
        ask: `ask(branch, number)` appends the question to a branch. In an async program it may be a coroutine function.
        score: `score(branch)` returns a number, larger for what is better; it may ask the model in that branch. In an
            async program it may be a coroutine function.

    Returns:
        The branch, of two with the same score the one that ended earlier; in an async program, a coroutine of it.

    Raises:
        ParameterError: a score that is no number.
        Exception: the error of a branch, where none ended well.

    Examples:
        >>> @ul.function
        ... def slogan(s, product):
        ...     def ask(branch, number):
        ...         branch += f"{product}, slogan {number}:" + ul.gen("slogan", temperature=0.8)
        ...     s = ul.best_of(s, 2, ask, score=lambda branch: -len(branch["slogan"]))
        ...     return s["slogan"]
        >>> model = ul.Echo({"slogan 0:": " The tea that is tea.", "slogan 1:": " Just tea."})
        >>> slogan.run("Tea", backend=model).ret_value
        ' Just tea.'
    """

    def steps() -> _Steps[Any]:
        forks = yield from _asked(s, n, ask)
        found = yield from _scored((yield forks.until(_all)), score, None)
        return max(found, key=_by_score).state

    return _run(s, steps())


def beam_search(
    s: BaseState,
    expand: Ask,
    score: Score,
    *,
    width: int,
    depth: int,
    branches: int,
    tokens: int | None = None,
    done: Callable[[Any], object] | None = None,
) -> Any:
    """Searches by levels: each of the best states is expanded into branches, and the best of all go on.

    Args:
        s: the state that the search begins with.
        expand: `expand(branch, number)` appends the next step to a branch. In an async program it may be a coroutine
            function, as `score` and `done` may.
        score: `score(branch)` returns a number, larger for what is better; it may ask the model in that branch.
        width: number of states that go on from each level.
        depth: number of levels, at most.
        branches: number of branches of each state.
        tokens: number of tokens of the run, those of prompts included, after which no further level begins; None: no
            limit. `budget=` of a run is a limit that is never exceeded.
        done: `done(branch)` tells whether a state needs no further step: the search ends when the best one is done.
            None: none is, before the last level.

    Returns:
        The best state; in an async program, a coroutine of it.

    Raises:
        ParameterError: a size that is no number of states, or a score that is no number.
        Exception: the error of a branch, where none of a state's ended well.

    Examples:
        >>> @ul.function
        ... def climb(s):
        ...     s += "Path:"
        ...     def step(branch, number):
        ...         branch += [" left", " right"][number] + ul.gen("height", dtype=int)
        ...     def height(branch):
        ...         return branch.value("height")
        ...     return ul.beam_search(s, step, height, width=1, depth=2, branches=2).text()
        >>> climb.run(backend=ul.Echo({"left": "1", "right": "3"})).ret_value
        'Path: right3 right3'
    """
    width = checks.integer("width", width, 1, MAX_BRANCHES, "a number of states, such as 3")
    depth = checks.integer("depth", depth, 1, _MOST_STEPS, "a number of levels, such as 4")
    tokens = _tokens(tokens)

    def steps() -> _Steps[Any]:
        beam = [_Scored(0.0, s, done=False)]
        for _ in range(depth):
            groups = []
            for scored in beam:
                if not scored.done:
                    groups.append((yield from _asked(scored.state, branches, expand)))
            found = [scored for scored in beam if scored.done]
            for forks in groups:
                found += yield from _scored((yield forks.until(_all)), score, done)
            beam = sorted(found, key=_by_score, reverse=True)[:width]
            if beam[0].done or _is_spent(s, tokens):
                break
        return beam[0].state

    return _run(s, steps())


def tree_search(
    s: BaseState,
    expand: Ask,
    score: Score,
    *,
    branches: int,
    expansions: int,
    depth: int | None = None,
    tokens: int | None = None,
    done: Callable[[Any], object] | None = None,
) -> Any:
    """Searches best first: the open state with the highest score is expanded, until a branch is done.

    Args:
        s: the state that the search begins with.
        expand: `expand(branch, number)` appends the next step to a branch. In an async program it may be a coroutine
            function, as `score` and `done` may.
        score: `score(branch)` returns a number, larger for what is better; it may ask the model in that branch.
        branches: number of branches of each state.
        expansions: number of states that are expanded, at most.
        depth: number of levels, at most; None: no limit.
        tokens: number of tokens of the run, those of prompts included, after which no further state is expanded; None:
            no limit.
        done: `done(branch)` tells whether a branch is an answer: the search ends with it. None: none is.

    Returns:
        The best branch that is done, else the best of all; in an async program, a coroutine of it.

    Raises:
        ParameterError: a size that is no number of states, or a score that is no number.
        Exception: the error of a branch, where none of a state's ended well.

    Examples:
        >>> @ul.function
        ... def solve(s, puzzle):
        ...     s += puzzle
        ...     def step(branch, number):
        ...         branch += [" add:", " double:"][number] + ul.gen("value", dtype=int)
        ...     def score(branch):
        ...         return -abs(24 - branch.value("value"))
        ...     def done(branch):
        ...         return branch.value("value") == 24
        ...     return ul.tree_search(s, step, score, branches=2, expansions=9, done=done).text()
        >>> answers = {"6: add:": "7", "6: double:": "12", "12 add:": "13", "12 double:": "24"}
        >>> solve.run("24 of 6:", backend=ul.Echo(answers)).ret_value
        '24 of 6: double:12 double:24'
    """
    expansions = checks.integer("expansions", expansions, 1, _MOST_STEPS, "a number of states, such as 10")
    if depth is not None:
        depth = checks.integer("depth", depth, 1, _MOST_STEPS, "a number of levels, such as 4, or None")
    tokens = _tokens(tokens)

    def steps() -> _Steps[Any]:
        numbers = count()  # of two with the same score the earlier one is expanded
        opened: list[tuple[float, int, int, Any]] = [(0.0, next(numbers), 0, s)]
        every: list[_Scored] = []
        for _ in range(expansions):
            if not opened or _is_spent(s, tokens):
                break
            _, _, level, state = heapq.heappop(opened)
            forks = yield from _asked(state, branches, expand)
            found = yield from _scored((yield forks.until(_all)), score, done)
            every += found
            if any(scored.done for scored in found):
                break
            if depth is None or level + 1 < depth:
                for scored in found:
                    heapq.heappush(opened, (-scored.score, next(numbers), level + 1, scored.state))
        if not every:
            return s
        return max([scored for scored in every if scored.done] or every, key=_by_score).state

    return _run(s, steps())


# -------------------------------------------------------------------------------- how


@dataclass(frozen=True, slots=True)
class _Scored:
    """A state, its score, and whether it needs no further step."""

    score: float
    state: Any
    done: bool


def _by_score(scored: _Scored) -> float:
    return scored.score


def _all(ended: "Ended[Any]") -> bool:
    """The rule that waits for every branch."""
    return False


def _failed(forks: Sequence[BaseState]) -> int:
    errors = [branch._sink.error() for branch in forks]
    return sum(error is not None and not isinstance(error, BranchCancelledError) for error in errors)


def _asked(s: Any, branches: int, ask: Ask) -> _Steps[Any]:
    """Forks a state, and says the same to each branch → the branches."""
    forks = s.fork(branches)
    for number, branch in enumerate(forks):
        yield ask(branch, number)
    return forks


def _scored(states: Sequence[Any], score: Score, done: Callable[[Any], object] | None) -> _Steps[list[_Scored]]:
    found = []
    for state in states:
        value = yield score(state)
        found.append(_Scored(_number_of(value), state, bool((yield done(state))) if done is not None else False))
    return found


def _number_of(score: object) -> float:
    """Returns a score as a float. Raises ParameterError for what is none: a text, a bool, NaN, an int beyond floats."""
    number = math.nan
    if not isinstance(score, bool | str | bytes) and hasattr(score, "__float__"):
        try:
            number = float(score)
        except OverflowError:
            raise ParameterError(f"score returned {shown(score)}; return a number that a float holds") from None
        except Exception:  # of its own code: an array of several numbers
            number = math.nan
    if math.isnan(number):
        raise ParameterError(f"score returned {shown(score)}; return a number, larger for what is better")
    return number


def _tokens(given: int | None) -> int | None:
    wanted = "a number of tokens, such as 10_000, or None"
    return None if given is None else checks.integer("tokens", given, 0, _MOST_TOKENS, wanted)


def _is_spent(s: BaseState, tokens: int | None) -> bool:
    if tokens is None:
        return False
    usage = s.usage_so_far
    return usage.prompt_tokens + usage.completion_tokens >= tokens


def _run(s: BaseState, steps: _Steps[T]) -> T | Coroutine[Any, Any, T]:
    """Runs a search: it gets what it yields, awaited in async programs."""
    if isinstance(s, AsyncState):
        return _run_async(steps)
    value: Any = None
    while True:
        try:
            value = steps.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # the generator's type says it
        if inspect.isawaitable(value):
            steps.close()
            if inspect.iscoroutine(value):
                value.close()
            raise ParameterError("a coroutine function in a sync program; write def, or an async def program")


async def _run_async(steps: _Steps[T]) -> T:
    value: Any = None
    while True:
        try:
            value = steps.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # as above
        if inspect.isawaitable(value):
            value = await value
