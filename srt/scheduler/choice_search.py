"""Computes the probabilities of choices over all their tokenizations: runs fsm/choice_search.py in the scheduler.

hold        the request waits for the trie of the vocabulary
begin_step  the trie is ready: the usual tokens of the choices are queued, one request for each choice that has rows of
            its own
take        log-probabilities of a row go to the search
finish      all rows of a round are done: the next nodes become requests of the same message, or it is answered

Nodes share their prefixes through the radix tree, as the choices of a score do.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...fsm.choice_search import ChoiceSearch, SearchNode
from ...fsm.tokens.trie import Trie, grows
from ...lang.errors import CapabilityError, RequestError
from ..core.messages import ChooseEnded, EngineChoose
from .request import Choosing, Request
from .request_table import SchedulerContext


@dataclass(frozen=True, slots=True)
class _HeldSearch:
    request: Request
    message: EngineChoose
    trie: Future[Trie]


@dataclass(slots=True)
class _Running:
    """A running search with its token counts."""

    state: ChoiceSearch
    message: EngineChoose
    first: Request  # computes the shared tokens, which the others find
    shared: list[int]  # tokens before those of every node
    prompt_tokens: int = 0
    cached_tokens: int = 0


class ChoiceSearches:
    """Runs the searches of one scheduler. Without `context.constraints`, which has the trie, they are refused."""

    def __init__(self, context: SchedulerContext) -> None:
        self._matcher_cache = context.constraints
        self._table = context.table
        self._counters = context.counters
        self._token_bytes = context.token_bytes
        self._another = context.factory.another
        self._longest = context.factory.longest
        self._held: list[_HeldSearch] = []
        self._running: dict[int, _Running] = {}  # by message

    # ------------------------------------------------------------------------------------------ arrival

    def hold(self, request: Request, message: EngineChoose) -> None:
        """Keeps the request until the vocabulary's trie is ready.

        Raises:
            CapabilityError: this engine has no trie.
        """
        if self._matcher_cache is None:
            raise CapabilityError(
                'this engine has no table of its vocabulary; write method="token_length_normalized" in select'
            )
        self._held.append(_HeldSearch(request, message, self._matcher_cache.trie()))

    def begin_step(self) -> None:
        """Starts the searches whose trie is ready, and forgets those whose message has ended."""
        for message_id in [number for number in self._running if number not in self._table.alive]:
            del self._running[message_id]
        held, self._held = self._held, []
        for entry in held:
            if entry.request.number not in self._table.held:
                continue  # it has ended meanwhile
            if not entry.trie.done():
                self._held.append(entry)
                continue
            try:
                self._begin(entry.request, entry.message, entry.trie.result())
            except Exception as error:
                self._table.fail(entry.request, error)

    def _begin(self, request: Request, message: EngineChoose, trie: Trie) -> None:
        prompt, start, choices = message.prompt, message.start, message.choices
        rest = prompt[start:]
        if message.heal and start == len(prompt) > 1 and self._grows(trie, prompt[-1], choices):
            start, rest = start - 1, prompt[start - 1 :]
            choices = [[prompt[-1], *choice] for choice in choices]
        try:
            search = ChoiceSearch(trie, self._token_bytes, choices, rest, longest=self._longest - start)
        except ValueError as error:
            raise RequestError(f"the choices cannot be searched: {error}") from None
        running = self._running[message.id] = _Running(search, message, request, prompt[:start])
        self._counters.choice_searches += 1
        own, *others = search.begin()
        request.job = Choosing(search, own)
        running.prompt_tokens = request.prompt_length
        self._table.queue(request)
        self._add(request, running, others)

    def _grows(self, trie: Trie, last: int, choices: list[list[int]]) -> bool:
        data = self._token_bytes(last)
        texts = (b"".join(map(self._token_bytes, choice)) for choice in choices)
        return bool(data) and grows(trie, data, texts)

    # ------------------------------------------------------------------------------------------ rounds

    def take(self, request: Request, answers: Sequence[NDArray[np.float64]]) -> None:
        """Gives the log-probabilities of the request's next rows to its search."""
        job = request.job
        assert isinstance(job, Choosing), "only searches ask rows"
        assert job.search is not None, "it began before its rows ran"
        for logprobs in answers:
            job.search.answer(job.nodes[job.answered], logprobs)
            job.answered += 1

    def finish(self, request: Request) -> None:
        """Ends a request whose rows have all run. The last one of a round starts the next round or ends the search."""
        running = self._running[request.message_id]
        if request is running.first:
            running.cached_tokens = request.cached_tokens
        self._table.release(request)
        if self._table.alive[request.message_id]:
            return
        search, message = running.state, running.message
        nodes = search.proceed() if message.search else []
        if nodes:
            self._add(request, running, [[node] for node in nodes])
            return
        del self._running[request.message_id]
        self._counters.choice_evaluations += search.evaluated
        self._counters.choice_tokens += search.tokens
        self._counters.finished += 1
        self._table.end(request.message_id, _ended(running))

    def _add(self, request: Request, running: _Running, rows: Sequence[list[SearchNode]]) -> None:
        """Adds requests to the message of `request`, one for each list of nodes."""
        more = [
            self._another(request, [*running.shared, *nodes[-1].tokens], Choosing(running.state, nodes))
            for nodes in rows
        ]
        running.prompt_tokens += sum(map(len, rows))
        self._table.extend(request.message_id, more)


def questions(request: Request, start: int, end: int) -> list[NDArray[np.int32]]:
    """Returns, for each of the rows [start, end), the tokens whose log-probabilities the search needs."""
    job = request.job
    assert isinstance(job, Choosing), "only searches ask rows"
    assert job.search is not None, "it began before its rows ran"
    first = request.length - len(job.nodes)
    return [job.search.question(node) for node in job.nodes[start - first : end - first]]


def _ended(running: _Running) -> ChooseEnded:
    search, message = running.state, running.message
    found = search.probabilities
    healed = message.start - len(running.shared)  # tokens that the message does not count as the choices'
    return ChooseEnded(
        id=message.id,
        lower=(found.lower if message.search else found.usual).tolist(),
        upper=found.upper.tolist() if message.search else [],
        logprobs=[values[healed:] for values in found.logprobs],
        evaluations=search.evaluated,
        prompt_tokens=running.prompt_tokens,
        cached_tokens=running.cached_tokens,
    )
