"""`Runtime`: a model on this machine, run by a gateway and an engine process that live as long as the program.

Making one checks the arguments and starts nothing; the first use starts the processes. Each event
loop that uses it gets a socket of its own, so one runtime serves the interpreter's streams, a test's
`asyncio.run` and blocking helpers alike.

With `address=` it joins the gateway of another process instead, which that process shares (`Runtime.share`).
"""

import asyncio
import importlib.util
import inspect
import itertools
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, get_args

import msgspec

from ...lang import checks, ops
from ...lang.chat_template import ChatTemplate, read_chat_template
from ...lang.errors import (
    BackendError,
    ConnectionLostError,
    DeadlineError,
    MissingExtraError,
    ParameterError,
    UmbelError,
    shown,
    unknown_option,
)
from ...lang.programs import ProgramEvent, RunProgram
from ...lang.prompt import Part, Text, tokens_at_most
from ...lang.protocol import (
    CacheRequest,
    Caches,
    Capabilities,
    Chunk,
    ConstraintKind,
    Detokenize,
    Detokenized,
    Done,
    Embedded,
    EmbedRequest,
    Facts,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Ranked,
    RankRequest,
    Scored,
    ScoreRequest,
    Survey,
    Tokenize,
    Tokenized,
    VocabularyInfo,
)
from ...lang.runtime_options import (
    DEFAULT,
    MAX_MODEL_LENGTH,
    ORACLE,
    KeywordOptions,
    RuntimeOptions,
    described_options,
    facts_of,
    most_of_salt,
    options_of,
    plain_options,
    spell_out,
)
from ...lang.sampling import SamplingParams, merge, overrides
from ...lang.status import RisingCounters, RuntimeHealth, RuntimeState, RuntimeStatus, TreeSurvey
from ...lang.transport.exchange import Exchange
from ...lang.transport.keys import Listen, read_clients, read_key
from ...lang.transport.link import Welcome
from ..loop import streams
from .direct import DirectCalls
from .runtime_gateway import IPC, GatewayHandle, GatewayProcess, NoGatewayError, SharedFolder, join
from .runtime_link import Link, context
from .runtime_remote import TCP, client_key, reach

STARTUP_TIMEOUT = 900.0  # seconds; the first start of a GGUF file converts it
RESTART_PAUSE = 5.0  # seconds between two starts of a shared gateway, the first of which has failed
_TCP_ADDRESS = re.compile(r"tcp://[^\s/]+:(\d{1,5}|\*)")
NEEDED = ("numpy", "torch")  # by every engine
NEEDED_BY_MODELS = ("tokenizers", "safetensors", "gguf")

Show = Callable[[str], None]
# A str: the verb of a control request.
R = TypeVar(
    "R",
    GenRequest,
    RunProgram,
    ScoreRequest,
    EmbedRequest,
    RankRequest,
    CacheRequest,
    Locate,
    Tokenize,
    Detokenize,
    Survey,
    str,
)
T = TypeVar("T")


class Runtime(DirectCalls):
    """Runs programs on a model on this machine, in processes of its own.

    The processes start at the first use, or at `wait_ready`, and end with the `with` block, with `shutdown`, or with
    this process.

    Args:
        model: "default" (Gemma 3 270M, embedded), a folder of safetensors, a GGUF file, "org/repo" or
            "org/repo:Q4_K_M" of the Hugging Face hub, or "ollama:NAME"; see docs/models.md. A model of the hub that is
            not on this machine is downloaded at the start.
        model_path: the same, under SGLang's name.
        chat_template: replaces the model's own: Jinja source, the name of a format such as "chatml", the path of a file
            with Jinja source, or a ChatTemplate.
        template_options: extra variables of the template, such as `enable_thinking`.
        startup_timeout: seconds until a start counts as failed (900), the download of a model not counted; otherwise
            only the end or the stop of a process ends a start.
        progress: prints the phases of a start to standard error; None does so when it is a terminal. The progress of a
            download is shown in any case.
        address: joins the runtime of another process instead of starting one: the address that its `share()` returned,
            or "tcp://HOST:PORT" of one that listens. Model and options are those of the owner, and only the owner can
            end or restart it.
        key: for a tcp address: the path of this client's key file, which names the server's public key, too.
        listen: lets clients of other machines join: {"address": "tcp://HOST:PORT", "key": PATH, "clients": PATH}, with
            the server's key file and the list of the clients that are admitted. `umbel keys` makes both.

    Options, the fields of `RuntimeOptions`. They may also be given in groups, as in
    `cache={"pool_tokens": 65536}, scheduling={"policy": "fcfs"}`:
        {options}

    Raises:
        ParameterError: an unknown option, a wrong type or range; the message names the nearest option.
        MissingExtraError: torch or another package of the `runtime` extra is not installed.
        TemplateError: the chat template does not compile.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"France: Paris, Italy: Rome, Egypt: Cairo, {country}:"
        ...     s += ul.gen("city", max_tokens=4, stop=",", temperature=0)
        >>> with ul.Runtime() as model:  # the default model, Gemma 3 270M
        ...     spain = capital.run("Spain", backend=model)
        ...     greece = capital.run("Greece", backend=model)
        ...     spain["city"], greece["city"]
        ...     greece.usage.prompt_tokens, greece.usage.cached_tokens  # the examples were computed once
        (' Madrid', ' Athens')
        (15, 13)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_path: str | None = None,
        chat_template: str | PathLike[str] | ChatTemplate | None = None,
        template_options: Mapping[str, Any] | None = None,  # Any: whatever the template understands
        startup_timeout: float = STARTUP_TIMEOUT,
        progress: bool | None = None,
        address: str | None = None,
        key: str | PathLike[str] | None = None,
        listen: Listen | Mapping[str, str] | None = None,
        **options: Unpack[KeywordOptions],
    ) -> None:
        names = [
            checks.text(name, given, MAX_MODEL_LENGTH, "a name or a path, or leave it out for the default model")
            for name, given in (("model", model), ("model_path", model_path))
            if given is not None
        ]
        if len({*names}) == 2:
            raise ParameterError(f"model={names[0]!r} and model_path={names[1]!r} name two models; give one")
        chosen = names[0] if names else None
        checked = plain_options(options_of("Runtime()", DEFAULT if chosen is None else chosen, options, _PARAMETERS))
        others = [name for name, given in (("model", chosen), ("listen", listen)) if given is not None]
        self._join = None if address is None else _way_to(address, key, [*others, *options])
        if address is None and key is not None:
            raise ParameterError("key= is for an address of another machine; write address='tcp://HOST:PORT', too")
        self._listen = None if listen is None else _checked_listen(listen)
        self._address = address
        self._options = checked if address is None else None  # of a joined one the owner says them
        self._startup_timeout = checks.seconds("startup_timeout", startup_timeout)
        if progress is not None:
            checks.switch("progress", progress)
        self._template_options = _checked_template_options(template_options, chat_template)
        self._template = self._given(chat_template)
        # The gateway knows the model's own template only, so programs that need another one stay here.
        self._ships_programs = chat_template is None and not template_options
        self._show: Show = _print_phase if (_on_terminal() if progress is None else progress) else _say_nothing
        self._lock = threading.Lock()  # guards the process and the links: loops of several threads may start it
        self._completions = itertools.count(1)
        self._processes: list[GatewayProcess] = []  # none or one; the finalizer keeps it
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._welcome: Welcome | None = None
        self._closed = False
        self._retried = 0  # requests sent to a second gateway
        self._counters = RisingCounters()  # of all gateways
        self._shared: SharedFolder | None = None
        self._keeping: Future[None] | None = None  # of a shared one
        if address is None:
            _check_extras(checked.model)
        # A runtime that is not referenced any more does not keep its model in memory until the program ends.
        weakref.finalize(self, _end_forgotten, self._links, self._processes).atexit = False

    def __repr__(self) -> str:
        return f"Runtime(address={self._address!r})" if self._options is None else f"Runtime({self._options.model!r})"

    # ------------------------------------------------------------------ Backend

    @property
    def options(self) -> RuntimeOptions:
        """The options of the runtime. Those of a joined one are its owner's, and known once it is ready."""
        if self._options is not None:
            return self._options
        if self._welcome is None:
            raise BackendError("the options of a joined runtime are known once it is ready; call wait_ready() first")
        return self._welcome.options

    @property
    def capabilities(self) -> Capabilities:
        """The features that the model and its options offer; some are known once the runtime has started."""
        welcome = self._welcome
        options = self._options if welcome is None else welcome.options
        caches = options is None or options.radix_cache
        named = welcome.model if welcome is not None else options.model if options is not None else self._address
        return Capabilities(
            name=f"runtime {named}",
            score=True,
            hint=True,
            pins=caches,
            token_ids=True,
            prefix_cache=caches,
            cache_maximum=welcome.pool_tokens if welcome else 0,
            caching=caches,
            logprobs=True,
            probability=True,
            stop_regex=True,
            adapters=None if options is None else tuple(options.adapters),
            programs=self._ships_programs,
            max_context=_longest(welcome) if welcome else None,
            constraints=get_args(ConstraintKind),
            images=welcome is not None and welcome.image_tokens > 0,
            image_tokens=welcome.image_tokens if welcome else 0,
            embeds=welcome is not None and welcome.vectors.dimensions > 0,
            ranks=welcome is not None and welcome.vectors.ranks,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """The given template, or the model's own, which is known once the runtime has started."""
        if self._template is None:
            welcome = self._welcome
            if welcome is None:
                raise BackendError("the chat template is known once the runtime has started; call wait_ready() first")
            self._template = ChatTemplate(
                welcome.chat_template,
                tokens=welcome.template_tokens,
                options=self._template_options,
                name=welcome.model,
                checked=False,
            )
        return self._template

    @property
    def vocabulary(self) -> VocabularyInfo:
        """The model's vocabulary, which is known once the runtime has started."""
        if self._welcome is None:
            raise BackendError("the vocabulary is known once the runtime has started; call wait_ready() first")
        return self._welcome.vocabulary

    async def start(self) -> None:
        """Starts the processes unless they run, and waits for the first token. May be called again, from any loop.

        Raises:
            ModelError: the model is not there, or cannot be used.
            ParameterError: an option does not fit the model or the machine.
            MissingExtraError: a package that the model needs is not installed.
            DeadlineError: not ready within the startup timeout.
        """
        await self._connect()

    def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        """Yields chunks when `request.stream`, then one Final. Closing the generator early aborts the request."""
        return self._events(request, Exchange.generate)

    def run_program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        """Runs the program of a request in the gateway. Closing the generator early aborts the program."""
        return self._events(request, Exchange.program)

    async def score(self, request: ScoreRequest) -> Scored:
        """Scores the choices of a request; `select` is the call for programs."""
        return await self._answer(request, Exchange.score)

    async def embed(self, request: EmbedRequest) -> Embedded:
        """Computes the embeddings of a request; `umbel.embed` is the call for programs, and raises the same."""
        return await self._answer(request, Exchange.embed)

    async def rank(self, request: RankRequest) -> Ranked:
        """Computes the relevances of a request; `umbel.rerank` is the call for programs, and raises the same."""
        return await self._answer(request, Exchange.rank)

    def hint(self, hint: Hint) -> None:
        """Sends a hint when this loop has a socket; a hint never starts the runtime."""
        link = self._links.get(asyncio.get_running_loop())
        if link is not None and link.exchange is not None:
            link.exchange.hint(hint)

    def release(self, pinned: str) -> None:
        """Releases a pin, on the loop that sent its hint: a pin belongs to its socket.

        Args:
            pinned: the id of the hint.
        """
        link = self._links.get(asyncio.get_running_loop())
        if link is not None and link.exchange is not None:
            link.exchange.release(pinned)

    def abort(self, request_id: str) -> bool:
        """Ends a request that was made on this loop → whether it was running. What it has so far is its answer.

        Args:
            request_id: its id.
        """
        link = self._links.get(asyncio.get_running_loop())
        return link is not None and link.exchange is not None and link.exchange.abort(request_id)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        """Returns a bound on the tokens of a prompt, for budgets: never less than they are."""
        return tokens_at_most(prompt, self.capabilities.image_tokens)

    async def locate(self, question: Locate) -> Located:
        """Finds where tokens of the prompt of a question stand in its text; for `State.explain_cache`."""
        return await self._answer(question, Exchange.locate)

    async def caches(self, request: CacheRequest) -> Caches:
        """Creates, reads, extends or deletes prefixes that are kept under names of the request's salt.

        Args:
            request: what is asked for: CreateCache, ReadCaches, ExtendCache or DeleteCache of the protocol.

        Raises:
            RequestError: the prompt of a CreateCache is shorter than its minimum, or too long.
            ParameterError: the name exists, or a field is out of range.
            OverloadedError: the share of the KV pool for explicit caches, or the number of names, is used up.
        """
        return await self._answer(request, Exchange.caches)

    async def tokenize(self, question: Tokenize) -> Tokenized:
        """Encodes the prompt of a question → its token ids, BOS included.

        Raises:
            RequestError: the prompt holds media.
        """
        return await self._answer(question, Exchange.tokenize)

    async def detokenize(self, question: Detokenize) -> Detokenized:
        """Decodes the token ids of a question → their text.

        Raises:
            ParameterError: ids outside of the vocabulary.
        """
        return await self._answer(question, Exchange.detokenize)

    async def control(self, verb: str) -> Done:
        """Does what `flush_cache` and `get_server_info` ask for.

        Args:
            verb: "flush_cache" or "info".

        Raises:
            ParameterError: any other verb.
        """
        return await self._answer(verb, Exchange.control)

    def health(self) -> RuntimeHealth:
        """Tells at once whether the runtime answers calls; starts nothing and asks nothing. Any thread may call it.

        A runtime that is "broken" stays so until the next call, or `start`, starts another gateway.
        """
        with self._lock:
            closed, links = self._closed, [link for loop, link in self._links.items() if not loop.is_closed()]
        if closed or not links:
            cause = "it was closed" if closed else "no loop that runs has started it"
            return RuntimeHealth(RuntimeState.STOPPED, cause)
        known = [(link.health(), link) for link in links]
        health, link = min(known, key=lambda pair: (pair[0].state is RuntimeState.BROKEN, pair[0].silence))
        reason = link.gateway.exit_reason()
        return health if reason is None else RuntimeHealth(RuntimeState.BROKEN, f"its gateway is gone: {reason}")

    async def status(self) -> RuntimeStatus:
        """Reads gauges and counters of gateway and engine, also during a long step. It starts nothing.

        The counters add up over restarts of either.

        Raises:
            BackendError: the runtime is not ready on this loop; `health` has the reason.
            ConnectionLostError: its gateway is gone.
            DeadlineError: its gateway did not answer for 4 s.
        """
        exchange = self._connected()
        if exchange is None:
            health = self.health()
            if health.healthy:
                raise BackendError("this loop has not started the runtime; await runtime.start() on it first")
            raise BackendError(
                f"a runtime that is {health.state.value} has no status ({health.cause}); await runtime.start() first"
            )
        status = await exchange.status()
        with self._lock:
            self._counters.note(status.gateway, status.counters)
            return msgspec.structs.replace(status, counters=self._counters.sums)

    async def survey(self, most: int = 1_000, text: int = 0) -> TreeSurvey:
        """Reads the radix tree after the step that runs, for a view of the cache.

        Args:
            most: nodes, 1 to 5,000, of the branches that were used last.
            text: characters of the text of each node, 0 to 200. Prompts are private: 0 shows none.

        Raises:
            ParameterError: a number out of its range.
        """
        return await self._answer(Survey("", most, text), Exchange.survey)

    async def close(self) -> None:
        """Ends the processes; requests in flight end with an error. A closed runtime is not started again.

        With `disk_cache` or `shared_cache` the engines save pages of their caches first, for at most 5 s; cancelled
        meanwhile, or by Ctrl-C, they end at once. A joined one leaves the processes to their owner."""
        process = await self._take_apart()
        if process is not None:
            try:
                await asyncio.to_thread(process.close)
            except BaseException:
                process.end_at_once()
                raise

    async def end_at_once(self) -> None:
        """As `close`, without time for saving pages of the cache."""
        process = await self._take_apart()
        if process is not None:
            await asyncio.to_thread(process.end_at_once)

    async def _take_apart(self) -> GatewayProcess | None:
        """Ends the links → the gateway, which is to be ended."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._closed = True
            if self._keeping is not None:
                self._keeping.cancel()
            if self._shared is not None:
                self._shared.close()
            links = dict(self._links)
            self._links.clear()
            process = self._process
            self._processes.clear()
        for owner, link in links.items():
            if owner is loop:
                await link.close()
            elif owner.is_closed():
                link.abandon()
            else:
                asyncio.run_coroutine_threadsafe(link.close(), owner)
        return process

    @property
    def listens_on(self) -> str:
        """The TCP address on which the runtime listens, "" for none; known once it is ready."""
        return self._welcome.listens_on if self._welcome is not None else ""

    def share(self, path: str | PathLike[str] | None = None) -> str:
        """Lets other processes of this user join this runtime with `Runtime(address=...)` → the address.

            address = runtime.share()          # here
            runtime = ul.Runtime(address=...)  # in another process

        The address stays the same until this runtime is closed. A gateway is started now, and one that is lost is
        replaced at once, while this process asks for nothing, too: those that have joined find the next one.

        Args:
            path: of a folder that is made for the address; None takes one with a random name.

        Raises:
            ParameterError: the path is taken, or no folder can be made there.
            BackendError: this runtime is joined itself, or closed.
        """
        if self._join is not None:
            raise BackendError(f"this runtime has joined {self._address}; its owner alone can share it")
        with self._lock:
            if self._closed:
                raise BackendError("this runtime was closed; make a new Runtime()")
            if self._shared is None:
                self._shared = SharedFolder(None if path is None else Path(checks.path("path", path)))
                if self._process is not None:
                    self._shared.lead_to(self._process)
                self._begin_keeping()
            elif path is not None and Path(path).absolute() != self._shared.path:
                raise ParameterError(f"this runtime is shared at {self._shared.path} already; leave path= out")
            return self._shared.address

    # ------------------------------------------------------------------ blocking helpers

    def wait_ready(self) -> Self:
        """Blocks until the runtime is ready, and returns it.

        Raises:
            UmbelError: as `start` raises.
        """
        streams.run(self.start())
        return self

    # Any: see `sampling.overrides`
    def final_of(self, prompt: str, sampling_params: Mapping[str, Any] | None = None, /, **sampling: Any) -> Final:
        """Completes one prompt → all completions with their tokens, finish reasons and usage. Blocks.

        Args:
            prompt: text; continued as it is.
            sampling_params: sampling parameters as a dict, such as {"max_tokens": 8, "n": 2}.
            sampling: the same by keyword.

        Raises:
            ParameterError: a prompt that is no string, or a parameter that is unknown, wrong or given twice.
        """
        return self._ended(prompt, _asked("final_of", prompt, sampling_params, sampling))

    def _ended(self, prompt: str, sampling: SamplingParams) -> Final:
        async def last() -> Final:
            request = GenRequest(f"complete-{next(self._completions)}", (Text(prompt),), sampling)
            async with aclosing(self.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Final):
                        return event
            raise BackendError("the request ended without an answer")

        return streams.run(last())

    def flush_cache(self) -> None:
        """Drops every cached prefix that no running request uses."""
        streams.run(self.control("flush_cache"))

    def get_server_info(self) -> Facts:
        """Returns facts and counters of gateway and engine, with their options.

        `gateway_retried_requests` were sent to a second engine, `client_retried_requests` to a second gateway.
        """
        done = streams.run(self.control("info"))
        options = {f"option_{name}": value for name, value in facts_of(self.options).items()}
        return {**options, **done.result, "client_retried_requests": self._retried}

    def shutdown(self) -> None:
        """Blocks until both processes have ended."""
        streams.run(self.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ how

    @property
    def _process(self) -> GatewayProcess | None:
        return self._processes[0] if self._processes else None

    async def _events(
        self, request: R, ask: Callable[[Exchange, R], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Yields the answer to one request.

        When its gateway is lost before the first event, the request goes to another one, once: the caller has seen
        nothing of it, and a seed makes the same text there."""
        began = time.monotonic()
        lost: ConnectionLostError | None = None
        while True:
            given = False
            try:
                exchange = self._connected() or await self._connect()
                async with aclosing(ask(exchange, _sooner(request, began) if lost else request)) as events:
                    async for event in events:
                        given = True
                        yield event
                return
            except ConnectionLostError as error:
                if isinstance(error, NoGatewayError) and lost is not None:
                    raise ConnectionLostError(f"{lost}; then {error}") from error
                if lost is not None:
                    raise ConnectionLostError(
                        f"{lost}; a second one was asked, and it was lost, too: {error}"
                    ) from error
                if given or isinstance(error, NoGatewayError):
                    raise
                lost = error
                self._retried += 1

    async def _answer(self, request: R, ask: Callable[[Exchange, R], Awaitable[T]]) -> T:
        """Returns the answer to a request with one answer, retried as in `_events`."""

        async def events(exchange: Exchange, request: R) -> AsyncGenerator[T, None]:
            yield await ask(exchange, request)

        async with aclosing(self._events(request, events)) as answers:
            return await anext(answers)

    def _connected(self) -> Exchange | None:
        """Returns this loop's exchange if it is ready."""
        link = self._links.get(asyncio.get_running_loop())
        return link.exchange if link is not None and not link.broken else None

    async def _connect(self) -> Exchange:
        """Waits for this loop's exchange to be ready. Replaces a gateway that died."""
        if (connected := self._connected()) is not None:
            return connected
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None or link.broken:
            link = self._open_link(loop, None if self._join is None else await self._join())
        try:
            exchange = await link.ready(self._startup_timeout)
        except TimeoutError:
            report = link.start_in_words()
            await self._stop_failed_start(link)
            raise DeadlineError(
                f"the runtime was not ready within the startup_timeout of {self._startup_timeout:g} s: {report}; "
                "raise startup_timeout, or set log_level='info' to see more"
            ) from None
        except BaseException:
            if link.welcome is None and link.broken:
                await self._stop_failed_start(link)
            raise
        self._welcome = link.welcome
        return exchange

    def _open_link(self, loop: asyncio.AbstractEventLoop, joined: GatewayHandle | None) -> Link:
        with self._lock:
            if self._closed:
                raise BackendError("this runtime was closed; make a new Runtime()")
            link = self._links.get(loop)
            if link is not None and not link.broken:  # another task has opened it while this one waited to join
                return link
            for other in [other for other in self._links if other.is_closed() or other is loop]:
                self._links.pop(other).abandon()
            link = self._links[loop] = Link(self._running_process() if joined is None else joined, self._show)
            return link

    def _running_process(self) -> GatewayProcess:
        """Returns the gateway's process; starts one where there is none, or where it has ended."""
        process = self._process
        if process is not None and process.exit_reason() is not None:
            process.close()
            process = None
        if process is None:
            if self._listen is not None:
                # The port that the first gateway got is that of the next one: clients know no other.
                self._listen = Listen(self.listens_on or self._listen.address, self._listen.key, self._listen.clients)
                self._begin_keeping()
            process = GatewayProcess(self.options, self._startup_timeout, self._listen)
            self._processes[:] = [process]
            if self._shared is not None:
                self._shared.lead_to(process)
        return process

    def _begin_keeping(self) -> None:
        if self._keeping is None:
            self._keeping = streams.spawn(self._keep())

    async def _keep(self) -> None:
        """Keeps a gateway running, until the runtime is closed or cannot be started."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._connect()
            except (ConnectionLostError, DeadlineError):
                await asyncio.sleep(RESTART_PAUSE)
                continue
            except UmbelError:  # a model that is not there, or the runtime was closed: another start ends the same
                return
            link = self._links.get(loop)
            if link is None:
                return
            await link.ended()

    async def _stop_failed_start(self, link: Link) -> None:
        """Removes what a failed start left; the next one begins anew."""
        with self._lock:
            process = self._process if self._process is link.gateway else None
            if process is not None:
                self._processes.clear()
        if process is not None:
            await asyncio.to_thread(process.close)

    def _given(self, template: str | PathLike[str] | ChatTemplate | None) -> ChatTemplate | None:
        if template is None:
            return None
        return read_chat_template(template, options=self._template_options, name="chat_template=")


_PARAMETERS = tuple(inspect.signature(Runtime.__init__).parameters)[1:-1]  # parameters that are no options
spell_out(Runtime.__init__)
Runtime.__doc__ = (Runtime.__doc__ or "").replace("{options}", described_options())


def _way_to(address: str, key: object, others: list[str]) -> Callable[[], Awaitable[GatewayHandle]]:
    """Returns the function that finds the gateway at an address.

    Args:
        others: options that were given with it.

    Raises:
        ParameterError: no address, or options next to it; no key for an address of another machine.
    """
    wanted = f"the {IPC} address that its owner's share() returned, or {TCP}HOST:PORT"
    checks.text("address", address, MAX_MODEL_LENGTH, wanted)
    if others:
        raise ParameterError(
            f"Runtime(address=...) joins a runtime that exists: {others[0]}= is its owner's to choose; leave it out"
        )
    if _TCP_ADDRESS.fullmatch(address):
        pair = client_key(key)
        return lambda: reach(address, pair, context())
    if not address.startswith(IPC):
        raise ParameterError(f"address={shown(address)} is none; write {wanted}")
    if key is not None:
        raise ParameterError(f"key= is for an address of another machine; leave it out for {shown(address)}")
    return partial(join, Path(address.removeprefix(IPC)))


def _checked_listen(given: Listen | Mapping[str, str]) -> Listen:
    """Checks address, key file and list, so that a mistake is an error here and not of a process that starts.

    Raises:
        ParameterError: one of them is missing or wrong. Without a list every client would be let in.
    """
    if not isinstance(given, Listen):
        fields = checks.entries("listen", given, 8, "a dict with address, key and clients")
        for name in Listen.__struct_fields__:
            checks.path(f"listen[{name!r}]", fields.get(name))
        for name in fields.keys() - set(Listen.__struct_fields__):
            raise unknown_option("listen=", name, Listen.__struct_fields__)
        given = Listen(**{name: os.fspath(value) for name, value in fields.items()})
    if not _TCP_ADDRESS.fullmatch(given.address):
        raise ParameterError(f"listen: address={shown(given.address)} is none; write {TCP}HOST:PORT, or * for the port")
    read_key(given.key)
    read_clients(given.clients)
    return Listen(given.address, os.path.abspath(given.key), os.path.abspath(given.clients))


def _checked_template_options(given: object, chat_template: object) -> dict[str, Any]:
    """Checks template variables. Raises ParameterError for wrong ones, or where a ChatTemplate has its own."""
    if given is None:
        return {}
    options = checks.entries("template_options", given, 256, "a dict such as {'enable_thinking': False}")
    for name in options:
        checks.text("a name in template_options", name, 256)
    if options and isinstance(chat_template, ChatTemplate):
        raise ParameterError(
            "template_options= next to a ChatTemplate does nothing; write ChatTemplate(source, options={...})"
        )
    return options


def _sooner(request: R, began: float) -> R:
    """Returns the request with the remaining time, if its time is limited."""
    if isinstance(request, str | Detokenize | Survey) or request.origin.timeout is None:
        return request
    left = max(0.0, request.origin.timeout - (time.monotonic() - began))
    return msgspec.structs.replace(request, origin=msgspec.structs.replace(request.origin, timeout=left))


def _asked(method: str, prompt: object, params: Mapping[str, Any] | None, given: Mapping[str, Any]) -> SamplingParams:
    """Makes sampling parameters. Raises ParameterError for a wrong prompt, and for wrong or repeated parameters."""
    if not isinstance(prompt, str):
        raise ParameterError(f"{method}() takes one prompt, a string; got {type(prompt).__name__} {prompt!r:.200}")
    ops.refuse_operations(prompt, "a prompt")
    params = {} if params is None else params
    both = sorted(given.keys() & params.keys()) if isinstance(params, Mapping) else []
    if both:
        raise ParameterError(f"{method}() is given {both[0]} twice, in the dict and by keyword; give one of them")
    return merge(overrides(params), overrides(given))


def _end_forgotten(links: dict[asyncio.AbstractEventLoop, Link], processes: list[GatewayProcess]) -> None:
    """Ends the processes of a runtime that was garbage collected. Its links notice that by themselves."""
    for loop, link in links.items():
        if loop.is_closed():
            link.abandon()
    for process in processes:
        process.end_at_once()


def _check_extras(model: str) -> None:
    for package in NEEDED if model == ORACLE else (*NEEDED, *NEEDED_BY_MODELS):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "runtime")


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None where a program has no console


def _print_phase(phase: str) -> None:
    print(f"umbel: {phase} …", file=sys.stderr, flush=True)


def _say_nothing(phase: str) -> None:
    """Ignores a phase: progress is not shown."""


def _longest(welcome: Welcome) -> int:
    """Returns the most tokens of a prompt and its answer."""
    return min(welcome.context_length, most_of_salt(welcome.options.salt_share, welcome.pool_tokens))
