"""Finds the common prefix (the head) of many runs of one program, and keeps it in a backend's cache.

    system("You are ...") + user("Rules: ... " + question) + assistant(gen("answer"))
    |------------------ head -----------------|  argument: here runs part

A head is built by the interpreter's own `Position`, so its parts are those that a run will send: template scaffolding,
trimmed white space and turns included. Arguments that are the same in all runs belong to it.

    with program.cache(backend, ttl=600) as cached:        one head for as long as the block takes
        program.run_batch([...], backend=backend)          (a batch of a compiled program pins its own head by itself)

A pin is a hint with a time to live. It costs no request its place, so it cannot make a run fail or differ. `BatchPlan`
pins the head of a batch, and starts programs so that what they may hold fits the backend's pool:

    begin    the head that all have in common goes to the backend once, pinned
    admits   a program starts when the peaks of those in flight leave room for its own: nothing is computed twice
    leaves   its room is free
    end      the head may be evicted

    pool     [ head, once | rest of program 3 | rest of program 4 | rest of 5 |   6 does not fit yet   ]
"""

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import BoundArguments
from types import TracebackType
from typing import Any, Self

from ..interpreter import loop
from ..interpreter.body import RunOptions
from ..interpreter.position import Position
from ..lang.chat_template import ChatTemplate
from ..lang.errors import BackendError, CapabilityError, ParameterError, TemplateError, UmbelError
from ..lang.ops import CachePoint, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ..lang.prompt import Part
from ..lang.protocol import Backend, Final, GenRequest, Hint, Origin, Pinning
from ..lang.sampling import SamplingParams
from .graph import Graph, Node, frozen
from .memory import peak_tokens
from .operations import Append, Apply, Argument, Begin, Choose, Concat, Constant, Fork, Generate, Join, Look, Structure
from .values import Values

SHORTEST = 16  # tokens; a head that is computed in no time is not worth a message
LONGEST_PIN = 86_400.0  # seconds
_ASKS = (Generate, Choose, Fork)  # here the prompt so far goes to the backend


def common_head(graph: Graph, template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> tuple[Part, ...]:
    """Returns the common prefix of the prompts of the program's own stream, up to its last call in it.

    Args:
        template: of the backend that the runs use.
        arguments: by name, those that all runs are given alike.
    """
    return _Walk(graph, template, arguments or {}).head()


def shared_arguments(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the arguments that are in all items, equal and of the same type."""
    if not items:
        return {}
    first, *others = items
    shared: dict[str, Any] = {}
    for name, value in first.items():
        same = frozen(value)
        if all(name in other and frozen(other[name]) == same for other in others):
            shared[name] = value
    return shared


class _Walk:
    """Walks the program's own stream, as far as it is known."""

    def __init__(self, graph: Graph, template: ChatTemplate, arguments: Mapping[str, Any]) -> None:
        self._stream = graph.streams[graph.stream_of[graph.ends[0]]]
        self._template = template
        self._arguments = arguments
        self._values = Values({}, {}, (), arguments)
        self._position = Position()

    def head(self) -> tuple[Part, ...]:
        asked: tuple[Part, ...] = ()  # with these at the last place of the walk
        for number, node in enumerate(self._stream):
            goes_on = self._follow(node)
            if isinstance(node.op, _ASKS) or not goes_on:
                later = any(isinstance(after.op, _ASKS) for after in self._stream[number:])
                asked = self._position.prompt.parts if later else asked
            if not goes_on:
                break
        return asked

    def _follow(self, node: Node) -> bool:
        """Appends the node's text; returns False where runs diverge after it, or would end with an error."""
        position = self._position
        try:
            match node.op:
                case Append():
                    return self._say(node.inputs[1])
                case RoleBegin(role):
                    position.open_turn(self._template, role)
                case RoleEnd():
                    position.close_turn(self._template)
                case Generate() | Choose() | Look():
                    position.settle("gen()")
                    return False
                case Join(mode):
                    return mode == "gather_variable"
                case Begin() | Fork() | VarScopeBegin() | VarScopeEnd() | CachePoint():
                    pass
                case _:
                    return False
        except TemplateError:
            return False
        return True

    def _say(self, text: Node) -> bool:
        pieces: Iterable[Node] = text.inputs if isinstance(text.op, Concat) else (text,)
        for piece in pieces:
            if not self._is_known(piece):
                return False
            value = self._values.value(piece)
            if not isinstance(value, str):  # the run says what is wrong with it
                return False
            self._position.append_text(value)
        return True

    def _is_known(self, node: Node) -> bool:
        return all(_known_here(value, self._arguments) for value in _with_inputs(node))


def _known_here(node: Node, arguments: Mapping[str, Any]) -> bool:
    match node.op:
        case Constant() | Concat() | Apply() | Structure():
            return True
        case Argument(name):
            return name in arguments
    return False


def _with_inputs(node: Node) -> Iterator[Node]:
    """Yields the node and what it is computed from. No recursion: a text may be joined out of thousands."""
    waiting = [node]
    while waiting:
        top = waiting.pop()
        yield top
        waiting.extend(top.inputs)


# ------------------------------------------------------------------------------------ keeping a head


class Cached:
    """Keeps the common prefix of a program's runs in a backend's cache; made by `program.cache()`.

    A context manager: leaving the block releases the prefix.

    Args:
        backend: that keeps it.
        pinned: the backend's name for it; "" for none.
        parts: of the prefix.
        tokens: of the prefix.

    Attributes:
        parts (tuple[Part, ...]): of the prefix, as prompts have them.
        tokens (int): number of tokens of the prefix; 0 when there was nothing worth keeping.

    Examples:
        >>> @ul.function
        ... def classify(s, rules, text):
        ...     s += ul.system(rules) + ul.user(text)
        ...     s += ul.assistant(ul.select("label", choices=["spam", "mail"]))
        >>> rules = "Spam sells something, asks for money, or hides its sender. Mail is all else that comes."
        >>> with classify.bind(rules=rules).cache(ttl=3600) as cached:
        ...     print(cached)
        ...     state = classify.run(rules, "Buy now!")
        ...     state.sync()
        <cached head of 40 tokens>
        >>> state.usage.cached_tokens
        40
    """

    def __init__(self, backend: Backend, pinned: str, parts: tuple[Part, ...], tokens: int) -> None:
        self.parts = parts
        self.tokens = tokens
        self._backend = backend
        self._pinned = pinned  # "": nothing is

    @property
    def text(self) -> str:
        """Text of the prefix."""
        return "".join(getattr(part, "text", f"<{getattr(part, 'kind', '')}>") for part in self.parts)

    def release(self) -> None:
        """Releases the prefix, which may be evicted from now on. A second call does nothing."""
        pinned, self._pinned = self._pinned, ""
        if pinned and isinstance(self._backend, Pinning):
            loop.streams.call(self._backend.release, pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<cached head of {self.tokens} tokens{'' if self._pinned else ', not pinned'}>"


def first_adapter(graph: Graph, options: Mapping[str, Any]) -> str:
    """Returns the adapter of the first call of a graph: a head is kept as that one computes it.

    Args:
        options: sampling fields of the run.
    """
    for node in graph.nodes:
        match node.op:
            case Generate(gen, defaults):
                given = gen.options
            case Choose(select, defaults):
                given = select.options
            case _:
                continue
        adapter: str = {**defaults, **options, **given}.get("adapter", "")
        return adapter
    return ""


def pin(
    backend: Backend, parts: Sequence[Part], *, salt: str = "", adapter: str = "", seconds: float = LONGEST_PIN
) -> Cached:
    """Asks the backend to compute a head and to keep it; waits for nothing. For the time of a batch.

    A backend without pins, and a head that is not worth it, give a `Cached` of 0 tokens. `tokens` is the backend's
    bound here, since no answer is waited for. The backend has been started.
    """
    head, tokens = tuple(parts), 0
    if head and isinstance(backend, Pinning) and backend.capabilities.pins:
        tokens = backend.tokens_at_most(head)
    if tokens < SHORTEST:
        return Cached(backend, "", (), 0)
    name = _name()
    loop.streams.call(_advise, backend, Hint(name, head, Origin(salt=salt, adapter=adapter), seconds))
    return Cached(backend, name, head, tokens)


async def cache_head(graph: Graph, backend: Backend, *, salt: str = "", ttl: float | None = None) -> Cached:
    """Computes the head that all runs of a graph share, and pins it. On the streams' loop.

    Args:
        ttl: seconds after its last use for which it is kept; None: until it is released, or this process ends.

    Raises:
        CapabilityError: the backend keeps nothing that it is asked to keep.
        ParameterError: `ttl` is no number of seconds.
    """
    seconds = _checked_ttl(ttl)
    await backend.start()
    capabilities = backend.capabilities
    if not (capabilities.pins and isinstance(backend, Pinning)):
        raise CapabilityError(
            f"{capabilities.name} has no cache that a program could fill; leave cache() out (hosted models cache what "
            "they see by themselves, see state.usage.cached_tokens), or run the program on umbel.Runtime()"
        )
    head = await backend.chat_template.away(common_head, graph, backend.chat_template)
    if not head or backend.tokens_at_most(head) < SHORTEST:
        return Cached(backend, "", (), 0)
    name = _name()
    origin = Origin(salt=salt, adapter=first_adapter(graph, {}))
    tokens = await _computed(backend, f"{name}-head", head, origin)
    if tokens < SHORTEST:
        return Cached(backend, "", (), 0)
    _advise(backend, Hint(name, head, origin, seconds))
    return Cached(backend, name, head, tokens)


def _advise(backend: Backend, hint: Hint) -> None:
    """Sends the backend a hint. If it is refused, runs are as without it."""
    with contextlib.suppress(UmbelError):
        backend.hint(hint)


async def _computed(backend: Backend, request_id: str, head: tuple[Part, ...], origin: Origin) -> int:
    """Computes a prompt; returns its tokens, whose keys the backend has then."""
    request = GenRequest(request_id, head, SamplingParams(max_tokens=0, temperature=0.0), origin=origin)
    async for event in backend.generate(request):
        if isinstance(event, Final):
            return event.usage.prompt_tokens
    raise BackendError(f"{backend.capabilities.name} ended request {request_id} without a result")


def _checked_ttl(ttl: object) -> float:
    if ttl is None:
        return LONGEST_PIN
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= LONGEST_PIN:
        raise ParameterError(f"ttl={ttl!r}; write seconds above 0 and up to {LONGEST_PIN:g}, or None")
    return float(ttl)


def _name() -> str:
    return f"pin-{secrets.token_hex(8)}"


# ------------------------------------------------------------------------------------ a batch


class BatchPlan:
    """Plans one call of run_batch: pins the common head, and bounds the memory of programs. A `batch.Companion`.

    Args:
        defaults: arguments that may be left out.
        pin_head: keep the common head in the backend's cache while the batch runs, where it can be kept.
        plan_memory: start programs so that what they may hold fits the backend's pool.

    Attributes:
        head: what was pinned.
        most_tokens: that programs in flight were allowed to hold, the head counted once.
        waited: programs that did not start as soon as they could have.
    """

    def __init__(
        self, graph: Graph, options: RunOptions, defaults: Mapping[str, Any], *, pin_head: bool, plan_memory: bool
    ) -> None:
        self._graph = graph
        self._options = options
        self._defaults = defaults
        self._pins_head = pin_head
        self._plans_memory = plan_memory
        self._lock = threading.Lock()  # programs leave on the streams' loop
        self._rests: dict[int, int] = {}  # program → tokens that it may hold after the head
        self._pool: int | None = None
        self._head_tokens = 0
        self._turned_away = -1
        self.head: Cached | None = None
        self.most_tokens = 0
        self.waited = 0

    def begin(self, calls: Sequence[BoundArguments] | None) -> None:
        """Prepares the batch, before the first program starts. `calls`: all of them, where they are known.

        Raises:
            CapabilityError: memory is to be planned, and the backend has no pool.
        """
        alone = calls is not None and len(calls) < 2
        if self._plans_memory or (self._pins_head and not alone):
            loop.streams.run(self._prepare(calls))

    def admits(self, index: int, call: BoundArguments) -> bool:
        """Returns whether the program may start now; then its room is taken. One that is alone always may."""
        if self._pool is None:
            return True
        rest = self._rest(call)
        with self._lock:
            held = self._head_tokens + sum(self._rests.values()) + rest
            if self._rests and held > self._pool:
                self.waited += index != self._turned_away
                self._turned_away = index
                return False
            self._rests[index] = rest
            self.most_tokens = max(self.most_tokens, held)
            return True

    def leaves(self, index: int) -> None:
        with self._lock:
            self._rests.pop(index, None)

    def end(self) -> None:
        if self.head is not None:
            self.head.release()

    # -------------------------------------------------------------------------------- how

    async def _prepare(self, calls: Sequence[BoundArguments] | None) -> None:
        backend = self._options.backend
        try:
            await backend.start()
        except Exception:  # every program will raise it itself
            return
        shared = shared_arguments([self._arguments(call) for call in calls]) if calls else {}
        template = backend.chat_template
        parts = await template.away(common_head, self._graph, template, shared)
        if parts:
            self._head_tokens = backend.tokens_at_most(parts)
        if self._pins_head:
            adapter = first_adapter(self._graph, self._options.sampling)
            self.head = pin(backend, parts, salt=self._options.salt, adapter=adapter)
        if self._plans_memory:
            size = (await backend.control("info")).result.get("total_slots")
            if not isinstance(size, int | float):
                raise CapabilityError(
                    f"{backend.capabilities.name} tells of no KV pool whose memory could be planned; leave out "
                    "plan_memory=True, or run the batch on umbel.Runtime()"
                )
            self._pool = int(size)

    def _rest(self, call: BoundArguments) -> int:
        try:
            peak = peak_tokens(self._graph, self._options.backend, self._arguments(call), self._options.sampling)
        except UmbelError:  # the run will say what is wrong
            return 0
        return max(0, peak - self._head_tokens)

    def _arguments(self, call: BoundArguments) -> dict[str, Any]:
        return {**self._defaults, **call.arguments}
