"""Echo: a scripted, deterministic backend without a model, which counts tokens; made for tests.

It ships with umbel, for tests of your own programs:

    echo = Echo({"capital of France?": " Paris."}, scores={"yes": -0.1, "no": -2.0})
    state = program.run(backend=echo)
    assert "France" in echo.prompts[0] and echo.requests[0].sampling.max_tokens == 16

A script's answer is the text of a model that nothing stops: `stop`, `stop_token_ids`,
`stop_regex`, `max_tokens`, `min_tokens`, `ignore_eos` and `n` are then applied as a real backend does. Parameters that
choose among tokens (temperature, penalties, logit_bias, seed) have nothing to choose from here.

A constrained answer has to satisfy the constraint (see `echo_answers`); one that does not is a RequestError. Without a
script, a shortest text that does is made up instead, where our automata read the constraint. Where
`max_tokens` cuts it, it ends with "length" in the middle, as hosted models do; a runtime would lead it to an end.
"""

import asyncio
import contextlib
import threading
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from os import PathLike

import msgspec

from ...lang import checks
from ...lang.chat_template import CHATML, ChatTemplate, read_chat_template
from ...lang.errors import CapabilityError, ParameterError, RequestError
from ...lang.prompt import Part, adapted_salt
from ...lang.protocol import (
    Capabilities,
    Chunk,
    Completion,
    Done,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Scored,
    ScoredChoice,
    ScoreRequest,
    Usage,
)
from ..loop import set_done
from .direct import DirectCalls
from .echo_answers import (
    Script,
    ScriptReader,
    checked_bounds,
    checked_scores,
    chunks,
    completed,
    fitting,
    hashed_logprobs,
    refuse_mistyped,
    scores_of,
)
from .echo_tokens import PrefixCache, located, pieces, prompt_path, prompt_text, prompt_tokens, token_id

Scores = Mapping[str, float | Sequence[float]]
Probabilities = Mapping[str, float | tuple[float, float]]
Faults = Callable[[str, int], None]

VERBS = ("start", "generate", "chunk", "score", "hint", "control")
MOST_CALLS = 10**9
MOST_RECORDED = 10**7  # requests, and tokens of the simulated cache: both are memory
_PATIENCE = 30.0  # seconds a test waits at a gate for what it expects before it fails


class Gate:
    """Holds the calls of a backend until a test lets them pass: no sleeps, no timing.

    It is closed at first. Every call, and every streamed piece, passes it once. `step` lets so many through, in the
    order in which they came; `open` lets everything through. Any thread may call it.

    Examples:
        >>> @ul.function
        ... def compare(s, question):
        ...     forks = s.fork(2)
        ...     forks += question + ul.gen("answer", max_tokens=4)
        ...     forks.join()
        >>> gate = ul.Gate()
        >>> state = compare.run("Why?", backend=ul.Echo(gate=gate), stream=True)
        >>> gate.wait_for(2)
        >>> gate.waiting  # the branches run in parallel: neither has an answer, and both have asked
        2
        >>> gate.open()
        >>> state.sync()
        >>> state.usage.calls
        2
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._permits = 0
        self._open = False
        self._arrived = 0

    @property
    def waiting(self) -> int:
        """Number of calls that wait at the gate."""
        with self._condition:
            return len(self._waiting)

    @property
    def arrived(self) -> int:
        """Number of calls that have come to the gate, passed ones included."""
        with self._condition:
            return self._arrived

    def step(self, count: int = 1) -> None:
        """Lets some calls pass: waiting ones, then later ones.

        Args:
            count: of calls and streamed pieces, 1 or more.
        """
        permits = checks.integer("Gate.step(): count", count, 1, MOST_CALLS)
        with self._condition:
            self._permits += permits
            self._release()

    def open(self) -> None:
        """Lets all calls pass, waiting and later ones, until `close`."""
        with self._condition:
            self._open = True
            self._release()

    def close(self) -> None:
        """Holds the calls that come from now on, after `open`."""
        with self._condition:
            self._open = False

    def wait_for(self, arrived: int) -> None:
        """Blocks until so many calls have come to the gate in all.

        Args:
            arrived: of calls and streamed pieces, those that have passed included.

        Raises:
            AssertionError: for 30 s none came any more.
        """
        arrived = checks.integer("Gate.wait_for(): arrived", arrived, 0, MOST_CALLS)
        with self._condition:
            while self._arrived < arrived:
                if not self._condition.wait_for(partial(self._more_than, self._arrived), _PATIENCE):
                    raise AssertionError(f"{self._arrived} came to the gate, {arrived} were expected")

    def _more_than(self, arrived: int) -> bool:
        return self._arrived > arrived

    async def passes(self) -> None:
        """Waits to pass, on the backend's loop. A cancelled call gives its place up."""
        loop = asyncio.get_running_loop()
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
            if self._open:
                return
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
            self._release()
        try:
            await future
        finally:
            with self._condition, contextlib.suppress(ValueError):
                self._waiting.remove((loop, future))

    def _release(self) -> None:
        while self._waiting and (self._open or self._permits):
            loop, future = self._waiting.popleft()
            self._permits -= 0 if self._open else 1
            loop.call_soon_threadsafe(set_done, future)


class FailCall:
    """Raises an error at the k-th call of a backend, once: the `faults` of an Echo.

    Args:
        k: the number of the call, counted from 1 over all verbs together.
        error: raised by that call.
        verbs: the calls that count: "start", "generate", "chunk" (each streamed piece), "score", "hint", "control".

    Attributes:
        calls: how many calls of these verbs have been made.

    Examples:
        >>> busy = ul.FailCall(2, ul.OverloadedError("busy"))
        >>> model = ul.Echo(["Paris", "Rome", "Bern"], faults=busy)
        >>> model("The capital of France?")
        'Paris'
        >>> try:
        ...     model("The capital of Italy?")
        ... except ul.OverloadedError as error:
        ...     print(error)
        busy
        >>> model("The capital of Italy?"), busy.calls
        ('Rome', 3)
    """

    def __init__(self, k: int, error: BaseException, verbs: Sequence[str] = ("generate", "score")) -> None:
        self.k = checks.integer("FailCall(): k", k, 1, MOST_CALLS, "the number of a call, counted from 1")
        checks.instance("FailCall(): error", error, BaseException)
        named = checks.members("FailCall(): verbs", verbs, len(VERBS), "a list of verbs")
        self.error = error
        self.verbs = tuple(checks.one_of("FailCall(): verbs", verb, VERBS) for verb in named)
        self.calls = 0

    def __call__(self, verb: str, number: int) -> None:
        if verb in self.verbs:
            self.calls += 1
            if self.calls == self.k:
                raise self.error


class Echo(DirectCalls):
    """Plays a model for tests: answers from a script, the same ones each time, in milliseconds.

    It counts tokens, simulates a prefix cache, keeps every request, and fails on demand. Parameters such as
    temperature and seed have nothing to choose from here; `stop`, `max_tokens`, `n` and constraints are honoured.

    Args:
        script: the answers.
            A dict: the answer whose key stands last in the prompt. A list: one answer per continuation, in the
            order of the calls. A function of the prompt's text. An answer may be a list, one text per
            continuation of `n`; one text serves them all. None: the last piece of text that the program itself
            wrote is returned, or a shortest text that satisfies the constraint.
        scores: choice → its log-probability per token (a number for all its tokens, or one for each); other choices
            get a hash of prompt and choice. A score of a text that is nearly a choice is an error of its select.
        unconditional_scores: the same without the prompt.
        probabilities: of choices, for `select(method="overshoot" | "exact")`: a number from 0 to 1, or a pair of
            bounds. Without them Echo is a backend that has no such methods.
        chat_template: of the roles: a ChatTemplate, Jinja source, the name of a format, or the path of a file;
            ChatML if None.
        capabilities: to play a backend that can do less: `umbel.lang.protocol.Capabilities`; None: all that Echo can.
        cache_tokens: tokens that the simulated prefix cache holds; 0 for none.
        delay: seconds before each call and each streamed piece, slept by `sleep`.
        sleep: `asyncio.sleep`, or that of a virtual clock.
        gate: if given, every call and every streamed piece waits at it.
        faults: called with the verb of each call and its number (from 1) before it, such as `FailCall`; what it
            raises, the call raises.
        record: how many requests `requests` keeps.

    Attributes:
        requests: the last requests, with all their parameters, oldest first; hints among them.
        calls: how many texts and scores were asked for.
        active: ids of the requests that are running.
        aborted: ids of the requests that were left before their end.
        closed: whether `close` was called.

    Raises:
        ParameterError: a script that gives no answers, or another wrong value.
        TemplateError: the chat template does not compile.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4, stop=".")
        ...     s += " Is it large?" + ul.select("large", choices=[" yes", " no"])
        >>> answers = {"France is": " Paris. It lies on the Seine."}
        >>> model = ul.Echo(answers, scores={" yes": -0.1, " no": -2.0})
        >>> capital.run("France", backend=model).text()
        'The capital of France is Paris Is it large? yes'
        >>> model.prompts[0], model.calls
        ('The capital of France is', 2)
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        scores: Scores | None = None,
        unconditional_scores: Scores | None = None,
        probabilities: Probabilities | None = None,
        chat_template: str | PathLike[str] | ChatTemplate | None = None,
        capabilities: Capabilities | None = None,
        cache_tokens: int = 20_000,
        delay: float = 0.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        gate: Gate | None = None,
        faults: Faults | None = None,
        record: int = 1000,
    ) -> None:
        self._script = ScriptReader(script, "Echo")
        self._scores = checked_scores("scores", scores)
        self._unconditional = checked_scores("unconditional_scores", unconditional_scores)
        self._probabilities = checked_bounds(probabilities)
        checks.instance("capabilities", capabilities, Capabilities | None)
        checks.instance("gate", gate, Gate | None)
        checks.function("sleep", sleep)
        if faults is not None:
            checks.function("faults", faults)
        self._template = read_chat_template(CHATML if chat_template is None else chat_template, name="Echo")
        self._capabilities = capabilities or Capabilities(
            "Echo",
            score=True,
            hint=True,
            pins=True,
            token_ids=True,
            images=True,
            logprobs=True,
            constraints=("regex", "json_schema", "expression"),
            probability=probabilities is not None,
            stop_regex=True,
            adapters=None,
        )
        for option, given, able in (
            ("scores", scores, self._capabilities.score),
            ("unconditional_scores", unconditional_scores, self._capabilities.score),
            ("probabilities", probabilities, self._capabilities.probability),
        ):
            if given is not None and not able:
                raise ParameterError(
                    f"{option}= does nothing with capabilities that score no choices; remove one of them"
                )
        self._cache = PrefixCache(checks.integer("cache_tokens", cache_tokens, 0, MOST_RECORDED))
        self._delay = checks.number("delay", delay, 0, checks.LONGEST_SECONDS)
        if not self._delay and sleep is not asyncio.sleep:
            raise ParameterError("sleep= does nothing without a delay; write delay=1.0, or remove it")
        self._sleep = sleep
        self._gate = gate
        self._faults = faults
        self._visits: dict[str, int] = {}
        self.requests: deque[GenRequest | ScoreRequest | Hint] = deque(
            maxlen=checks.integer("record", record, 0, MOST_RECORDED)
        )
        self.calls = 0  # generate and score
        self.active: set[str] = set()  # ids of requests in flight
        self.aborted: list[str] = []  # ids of requests that were left before their end
        self.closed = False

    @property
    def prompts(self) -> list[str]:
        """The texts of the prompts that programs have sent, oldest first, with `<image>` or `<video>` for media.

        Each call has one. Hints, which announce the beginning of a fork's prompts, are in `requests` alone.
        """
        return [prompt_text(request.prompt) for request in list(self.requests) if not isinstance(request, Hint)]

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        """The features that it plays: the given ones, or all that Echo can do."""
        return self._capabilities

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that writes roles: the given one, or ChatML."""
        return self._template

    async def start(self) -> None:
        """Starts nothing; counts as a call of the verb "start" for `faults`."""
        self._visit("start")

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        """Yields the answer to a request of a program: pieces of one token when `request.stream`, then one Final."""
        self._enter(request)
        try:
            await self._pause("generate")
            tokens, cached = self._prefill(request)
            completions, texts = self._complete(request)
            if request.stream:
                for chunk in chunks(request.id, completions, texts):
                    await self._pause("chunk")
                    yield chunk
            self.active.discard(request.id)
            yield self._final(request, completions, tokens, cached)
        finally:
            self._leave(request.id)

    async def score(self, request: ScoreRequest) -> Scored:
        """Returns the log-probabilities of the choices of a request, as `select` asks for them."""
        self._enter(request)
        try:
            await self._pause("score")
            result = self._scored(request)
            self.active.discard(request.id)
            return result
        finally:
            self._leave(request.id)

    def hint(self, hint: Hint) -> None:
        """Puts the prompt of a hint into the simulated cache, and holds it there if the hint is a pin."""
        self._visit("hint")
        self.requests.append(hint)
        path = prompt_path(hint.prompt, prompt_tokens(hint.prompt))
        if hint.pin is not None:
            self._cache.pin(hint.id, _salt(hint), path)
        self._cache.insert(_salt(hint), path, by_hint=True)

    def release(self, pinned: str) -> None:
        """Lets the cache drop what the hint with the id `pinned` holds."""
        self._cache.unpin(pinned)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        """Counts the tokens of a prompt."""
        return len(prompt_tokens(prompt))

    async def locate(self, question: Locate) -> Located:
        """Finds where the tokens of the prompt of a question stand in its text; for `State.explain_cache`."""
        return located(question)

    async def control(self, verb: str) -> Done:
        """Does what `flush_cache` and `get_server_info` ask for.

        Args:
            verb: "flush_cache" or "info".

        Raises:
            CapabilityError: any other verb.
        """
        self._visit("control")
        match verb:
            case "flush_cache":
                self._cache.clear()
                return Done("echo")
            case "info":
                counts = {"calls": self.calls, "active": len(self.active), "cached_tokens": len(self._cache)}
                return Done("echo", {"model": "Echo", **counts})
            case _:
                raise CapabilityError(f"Echo has no control verb {verb!r}; write 'flush_cache' or 'info'")

    async def close(self) -> None:
        """Ends nothing; sets `closed`."""
        self.closed = True

    # -------------------------------------------------------------------------------- calls

    def _enter(self, request: GenRequest | ScoreRequest) -> None:
        self.calls += 1
        self.requests.append(request)
        self.active.add(request.id)

    def _leave(self, request_id: str) -> None:
        """Ends a request. One that is still active was cancelled, failed, or its iterator was closed."""
        if request_id in self.active:
            self.active.discard(request_id)
            self.aborted.append(request_id)

    async def _pause(self, verb: str) -> None:
        if self._delay:
            await self._sleep(self._delay)
        if self._gate is not None:
            await self._gate.passes()
        self._visit(verb)

    def _visit(self, verb: str) -> None:
        number = self._visits[verb] = self._visits.get(verb, 0) + 1
        if self._faults is not None:
            self._faults(verb, number)

    # -------------------------------------------------------------------------------- text

    def answer(self, prompt: str, parts: tuple[Part, ...], n: int) -> list[str]:
        """Returns the answers to a prompt. Subclasses may override it.

        Args:
            prompt: its text.
            parts: what it is made of: texts, pictures and clips.
            n: how many answers.

        Raises:
            RequestError: the script has no answer.
        """
        return self._script.answers(prompt, parts, n)

    def _complete(self, request: GenRequest) -> tuple[list[Completion], list[list[str]]]:
        """Returns the completions, and the texts of their tokens."""
        prompt = prompt_text(request.prompt)
        said = self.answer(prompt, request.prompt, request.sampling.n)
        if not self._script.given and request.constraint is not None:
            said = [fitting(text, request.constraint) for text in said]
        answers = [completed(text, request) for text in said]
        if request.sampling.logprobs or request.sampling.top_logprobs:
            seed = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
            top = request.sampling.top_logprobs
            answers = [
                (
                    msgspec.structs.replace(
                        c, logprobs=hashed_logprobs(seed, zip(c.token_ids, texts, strict=True), top)
                    ),
                    texts,
                )
                for c, texts in answers
            ]
        return [completion for completion, _ in answers], [texts for _, texts in answers]

    def _prefill(self, request: GenRequest | ScoreRequest) -> tuple[list[tuple[int, str]], int]:
        """Returns the prompt's tokens and the number of cached ones, and inserts them into the cache."""
        tokens = prompt_tokens(request.prompt)
        path = prompt_path(request.prompt, tokens)
        cached = self._cache.match(_salt(request), path)
        self._cache.insert(_salt(request), path)
        return tokens, cached

    def _final(
        self, request: GenRequest, completions: list[Completion], tokens: list[tuple[int, str]], cached: int
    ) -> Final:
        path = prompt_path(request.prompt, tokens)
        for completion in completions:
            self._cache.insert(_salt(request), [*path, *completion.token_ids])
        start = request.sampling.prompt_logprobs_from
        return Final(
            request.id,
            tuple(completions),
            Usage(len(tokens), cached, sum(len(c.token_ids) for c in completions), 1),
            () if start is None else hashed_logprobs(0, tokens[start:], request.sampling.top_logprobs),
        )

    def _scored(self, request: ScoreRequest) -> Scored:
        refuse_mistyped(self._scores, request.choices)
        tokens, cached = self._prefill(request)
        ids = [token for token, _ in tokens]
        path = prompt_path(request.prompt, tokens)
        seed = zlib.crc32(repr(ids).encode())
        choices = []
        for choice in request.choices:
            texts = pieces(choice)
            lower, upper = self._bounds(choice, request.probability)
            self._cache.insert(_salt(request), [*path, *map(token_id, texts)])
            choices.append(
                ScoredChoice(
                    tuple(map(token_id, texts)),
                    scores_of(self._scores.get(choice), choice, seed),
                    scores_of(self._unconditional.get(choice), choice, 0) if request.unconditional else (),
                    lower,
                    upper,
                )
            )
        return Scored(request.id, tuple(choices), Usage(len(ids), cached, 0, 1))

    def _bounds(self, choice: str, probability: str) -> tuple[float | None, float | None]:
        """Returns the bounds of a ScoredChoice."""
        if not probability:
            return None, None
        if choice not in self._probabilities:
            raise RequestError(f"Echo has no probability of {choice!r}; write probabilities={{{choice!r}: 0.5, ...}}")
        lower, upper = self._probabilities[choice]
        return lower, upper if probability == "exact" else None


def _salt(request: GenRequest | ScoreRequest | Hint) -> str:
    """Returns the namespace of the cache."""
    return adapted_salt(request.origin.salt, request.origin.adapter)
