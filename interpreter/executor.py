"""Executes the steps of one stream, in order, on the streams' loop: steps → requests → bindings.

    pushed by the program's thread → [step step step] → one task while there are steps → Executor → bindings
                                        StepQueue

Each kind of operation has one method of `Executor`; an operation without one is an error, never skipped.

A queue fails as a whole: the first error is recorded, then every pending and later binding carries it, and later steps
do nothing else. The queue of a branch waits until its parent reaches the fork.
"""

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..lang import ops
from ..lang.agents.dialogue import with_dialogue
from ..lang.chat_template import ChatTemplate
from ..lang.errors import BranchCancelledError, CancelledError, CapabilityError, ProgramError, UmbelError
from ..lang.prompt import Generated, Part, Source, SourceKind, Text
from ..lang.protocol import Capabilities, Chunk, Completion, Final, FinishReason, GenRequest, Hint, Usage
from . import loop, media, selecting
from .cache_explain.history import Intent
from .calls import OnChunk
from .guarantees import capturing, guarantee
from .guarantees.guarantee import Reply
from .loop import Signal
from .position import Position, Reached, media_text, since, text_of
from .reasoning import ReasoningTags, Split, Splitter, split_reasoning
from .run import Run
from .speculation.speculator import Speculator
from .steps import BranchOff, Concatenate, Converse, Elsewhere, Gather, Joined, Keep, Late, Mark, Recall, Step
from .variables import Binding, Feed, Meta, meta_of_chunk, meta_of_completion

if TYPE_CHECKING:
    from .observing.spans import StreamSpan


class Executor:
    """Executes the steps of one stream, and keeps its position.

    Args:
        queue: holds the steps, and receives the appended text.
        run: has backend, deadline and ledger.
        position: of the stream's beginning; owned by the executor from now on.
        adapter: of the last call before it, which a hint is computed with; None: that of the run.
        ready: whether the backend has been started for this stream's ancestors.
        path: of the stream through the forks of its run: "0", its second branch of the third fork "0.2_1".
    """

    __slots__ = (
        "_adapter",
        "_calls",
        "_forks",
        "_path",
        "_queue",
        "_ready",
        "_run",
        "_speculator",
        "_start",
        "_start_held",
        "_start_turns",
        "intent",
        "position",
        "spoken",
    )

    def __init__(
        self,
        queue: "StepQueue",
        run: Run,
        position: Position,
        adapter: str | None = None,
        *,
        ready: bool = False,
        path: str,
    ) -> None:
        self.position = position
        self._path = path
        self._calls = self._forks = 0  # so far
        self.intent: Intent | None = None  # of the call that runs, or was the last one
        self._adapter = run.adapter if adapter is None else adapter
        self.spoken = queue.spoken
        self._queue = queue
        self._run = run
        self._start = position.prompt  # inherited from the parent stream
        self._start_held = position.held
        self._start_turns = len(position.turns)
        self._ready = ready
        shared = run.speculation
        self._speculator = None if shared is None else Speculator(run, shared, queue, position)

    def execute(self, step: Step) -> Awaitable[None] | None:
        """Executes a step; returns an awaitable for the part that has to wait. If it raises, the queue fails the
        step's bindings."""
        method = _METHODS.get(type(step.op))
        if method is None:
            raise ProgramError(f"the interpreter cannot run {type(step.op).__name__}; its operations are in umbel.lang")
        return method(self, step.op, step)

    async def late(self, op: Late, step: Step) -> None:
        work = self.execute(replace(step, op=await op.known()))
        if work is not None:
            await work

    async def elsewhere(self, op: Elsewhere, step: Step) -> None:
        await self._start_backend()
        await op.play(self)

    # -------------------------------------------------------------------------------- text and roles

    def text(self, op: ops.ConstantText, step: Step) -> None:
        self.spoken.append(self.position.append_text(op.text, step.source), {})

    def role_begin(self, op: ops.RoleBegin, step: Step) -> Awaitable[None] | None:
        if not self._ready:
            return self._role_begin_later(op, step)
        template = self._run.backend.chat_template
        if not template.opens_at_once(self.position.turns, op.role):
            return self._role_begin_later(op, step)
        self._drop_surplus()
        self._speak(self.position.open_turn(template, op.role, step.source))
        return None

    async def _role_begin_later(self, op: ops.RoleBegin, step: Step) -> None:
        await self._start_backend()
        self._drop_surplus()
        template = self._run.backend.chat_template
        self._speak(await template.away(self.position.open_turn, template, op.role, step.source))

    def role_end(self, op: ops.RoleEnd, step: Step) -> Awaitable[None] | None:
        self._drop_surplus()
        self._lead_in()
        template = self._run.backend.chat_template
        if template.is_foreign:
            return self._role_end_later(template, step)
        self._speak(self.position.close_turn(template, step.source))
        return None

    async def _role_end_later(self, template: ChatTemplate, step: Step) -> None:
        self._speak(await template.away(self.position.close_turn, template, step.source))

    def scope_begin(self, op: ops.VarScopeBegin, step: Step) -> None:
        self._lead_in()
        self.position.scopes = (*self.position.scopes, (op.name, self.position.prompt))

    def scope_end(self, op: ops.VarScopeEnd, step: Step) -> None:
        self._lead_in()
        *rest, (name, start) = self.position.scopes
        assert name == op.name, "the stream checks scopes when they are submitted"
        self.position.scopes = tuple(rest)
        _given(step.binding).resolve(text_of(since(start, self.position.prompt)))

    async def cache_point(self, op: ops.CachePoint, step: Step) -> None:
        """Notes the point, and tells the place to a backend that keeps prefixes by rules of its own."""
        capabilities = await self._start_backend()
        self.position.set_point(op.ttl)
        if capabilities.hint and not capabilities.caching and self.position.prompt.parts:
            self._hint(self._queue.fork_group, op.ttl)

    def private(self, op: ops.PrivateBegin, step: Step) -> None:
        self._drop_surplus()
        self.spoken.append(self.position.open_private(op.tenant, step.source), {})

    async def media(self, op: ops.Image | ops.Video, step: Step) -> None:
        capabilities = await self._start_backend()
        kind = type(op).__name__.lower()
        if not capabilities.images:
            raise CapabilityError(
                f"{capabilities.name} takes no images; remove {kind}(...) or run the program on a vision model"
            )
        part = await asyncio.to_thread(media.load, op)
        self.spoken.append(self.position.settle(f"{kind}()"), {})
        self.position.append(part, step.source)
        self.spoken.append(media_text(part), {})

    # -------------------------------------------------------------------------------- calls

    async def generate(self, op: ops.Gen, step: Step) -> None:
        capabilities = await self._start_backend()
        sampling = step.sampling
        assert sampling is not None, "a Gen is submitted with its merged parameters"
        guarantee.check_gen(capabilities, op, sampling)
        self._adapter = sampling.adapter
        self.spoken.append(self.position.settle("gen()"), {})
        parts, caching = self.position.marked() if capabilities.caching else (self.position.prompt.parts, None)
        request = GenRequest(
            self._run.request_id(),
            parts,
            sampling,
            stream=self._run.streaming or self._queue.streaming,
            origin=self._run.origin(self._queue.fork_group, self._adapter, step.ahead),
            constraint=op.constraint,
            token_healing=op.token_healing,
            caching=caching,
        )
        place = self._next_place()
        intent = self._run.log.intend(request.id, "gen", op.name, self.position.prompt, step.source, place)
        self.intent = intent
        delivery = _Delivery(self, step)
        reply = await self._ask(op, request, delivery.piece, thinks=step.tags is not None)
        intent.settle()
        if op.captures is not None:
            await capturing.resolve(op, step.captured, reply)
        delivery.finish(reply.final, reply.facts, capabilities)

    async def select(self, op: ops.Select, step: Step) -> None:
        capabilities = await self._start_backend()
        sampling = step.sampling
        assert sampling is not None, "a Select is submitted with its merged parameters"
        guarantee.check_select(capabilities, op, sampling.adapter)
        self._adapter = sampling.adapter
        self.spoken.append(self.position.settle("select()"), {})
        request_id, place, seed = self._run.request_id(), self._next_place(), sampling.seed
        intent = self._run.log.intend(request_id, "select", op.name, self.position.prompt, step.source, place)
        self.intent = intent
        if seed is None and capabilities.score and self._run.stored is not None:
            seed = self._run.stored.seed(place)
        chosen, facts = await selecting.choose(
            self._run.calls,
            capabilities,
            op,
            request_id,
            self._run.origin(self._queue.fork_group, self._adapter, step.ahead),
            self.position,
            seed,
            self._ask,
        )
        intent.settle()
        self.position.append(Text(chosen), _written(SourceKind.CHOSEN, op.name, step))
        if self._speculator is not None:
            self._speculator.note_answer(self.position)
        self.spoken.append(chosen, facts)
        _given(step.binding).resolve(chosen, facts)

    # -------------------------------------------------------------------------------- agents

    async def converse(self, op: Converse, step: Step) -> None:
        capabilities = await self._start_backend()
        sampling = step.sampling
        assert sampling is not None, "a Converse is submitted with its merged parameters"
        guarantee.check_gen(capabilities, ops.Gen(op.name), sampling)
        self._adapter = sampling.adapter
        self.spoken.append(self.position.settle("call_tools()"), {})
        written = await op.write(self._run.backend, self.position)
        stops = tuple(stop for stop in written.stops if stop not in sampling.stop)
        request = GenRequest(
            self._run.request_id(),
            written.prompt,
            msgspec.structs.replace(sampling, stop=(*sampling.stop, *stops)),
            origin=self._run.origin(self._queue.fork_group, self._adapter, step.ahead),
            constraint=written.constraint,
        )
        request = with_dialogue(request, written.dialogue)
        prompt, place = self.position.prompt, self._next_place()
        intent = self._run.log.intend(request.id, "gen", op.name, prompt, step.source, place)
        self.intent = intent
        delivery = _Delivery(self, step)
        final = await self._run.calls.generate(request, delivery.piece)
        intent.settle()
        op.answered(final.completions[0])
        facts = meta_of_completion(final, final.completions[0], with_text=True)
        delivery.finish(final, [facts], capabilities)

    def recall(self, op: Recall, step: Step) -> None:
        """Resolves the binding to (number of the call, result) for each call; the result is None for a new one."""
        found: list[tuple[str, str | None]] = []
        for call in op.calls:
            number, place = self._run.request_id(), self._next_place()
            known: Final | None = None
            if (stored := self._run.stored) is not None:
                self._run.log.intend(number, "tool", None, self.position.prompt, step.source, place)
                known = stored.read(GenRequest(number, (Text(call),)), Final)
            found.append((number, None if known is None else known.completions[0].text))
        _given(step.binding).resolve(found)

    def keep(self, op: Keep, step: Step) -> None:
        stored = self._run.stored
        if stored is not None:
            for number, call, result in op.results:
                completion = Completion(result, (), 0, result, FinishReason.STOP)
                stored.write(GenRequest(number, (Text(call),)), Final(number, (completion,), Usage()))
        _given(step.binding).resolve(None)

    # -------------------------------------------------------------------------------- branches

    async def branch_off(self, op: BranchOff, step: Step) -> None:
        if len(op.branches) > 1 and self.position.prompt.parts:
            capabilities = await self._start_backend()
            if capabilities.hint:
                self._hint(op.branches[0].fork_group)
        self._lead_in()
        for index, branch in enumerate(op.branches):
            path = f"{self._path}.{self._forks}_{index}"
            if self._run.spans is not None and self._queue.span is not None:
                branch.span = self._run.spans.branch(self._queue.span, path)
            branch.start(self.position.copy(), self._adapter, ready=self._ready, path=path)
        self._forks += 1

    def _hint(self, fork_group: str, pin: float | None = None) -> None:
        """Sends a prefix hint to the backend. Errors are dropped: the requests of the branches raise theirs."""
        if self._run.stored is not None and self._run.stored.reads:
            return
        prompt, origin = self.position.prompt.parts, self._run.origin(fork_group, self._adapter)
        with contextlib.suppress(UmbelError):
            self._run.backend.hint(Hint(self._run.request_id(), prompt, origin, pin))

    def mark(self, op: Mark, step: Step) -> None:
        _given(step.binding).resolve(self.reached())

    def reached(self) -> Reached:
        """Returns the current position of the stream."""
        return Reached(self._start, self._start_turns, self.position.copy(), self._start_held, self._queue.number)

    async def gather(self, op: Gather, step: Step) -> None:
        counted = await _ended(op.branches)
        for gathered, branches in op.columns:
            gathered.resolve_gathered(tuple(branches[index] for index in counted))

    async def concatenate(self, op: Concatenate, step: Step) -> None:
        for index in await _ended(op.branches):
            reached = cast(Reached, op.branches.marks[index].value())
            self.spoken.append(self.position.take_over(reached), {})
            self.spoken.append(text_of([prompt.part for prompt in reached.said if prompt.part is not None]), {})

    # -------------------------------------------------------------------------------- helpers

    async def _ask(self, op: ops.Gen, request: GenRequest, on_chunk: OnChunk, *, thinks: bool = False) -> Reply:
        """Answers a gen from speculated text or from the backend. `thinks`: the program separates the reasoning."""
        capabilities = self._run.backend.capabilities
        if self._speculator is not None and capabilities.speculation:
            return await self._speculator.reply(op, request, self.position, on_chunk, thinks=thinks)
        return await guarantee.ask(self._run.calls, capabilities, op, request, on_chunk, self.position)

    def _next_place(self) -> str:
        """Returns the place of the next call in the run: the same in every run of a program that does the same."""
        self._calls += 1
        return f"{self._path}/{self._calls - 1}"

    def _drop_surplus(self) -> None:
        if self._speculator is not None:
            self._speculator.drop()

    def _lead_in(self) -> None:
        self.spoken.append(self.position.lead_in(), {})

    def _speak(self, scaffolding: tuple[Part, ...]) -> None:
        self.spoken.append(text_of(list(scaffolding)), {})

    async def _start_backend(self) -> Capabilities:
        """Starts the backend once. Shielded: a cancelled run does not cancel the start that other runs wait for."""
        backend = self._run.backend
        if not self._ready:
            if not loop.has_started(backend):
                record = self._run.record
                began = 0.0 if record is None else record.clock()
                start = asyncio.ensure_future(backend.start())
                start.add_done_callback(_retrieve)
                await asyncio.shield(start)
                loop.note_started(backend)
                if record is not None:
                    record.start_seconds = record.clock() - began
            self._ready = True
        return backend.capabilities


async def _ended(branches: Joined) -> list[int]:
    """Waits for the branches of a join → the places of those that count, in order.

    Raises the error of a branch that has failed, where all are wanted or too few others are left.
    """
    if branches.quorum is None:
        for index, mark in enumerate(branches.marks):
            await mark.settled_here()
            if not branches.leaves_out(index):
                mark.value()
        return [index for index in range(len(branches.marks)) if not branches.leaves_out(index)]
    ended = await _first(branches, branches.quorum)
    for index, queue in enumerate(branches.queues):
        if index not in ended:
            queue.stop(not_needed())
    return ended


async def _first(branches: Joined, wanted: int) -> list[int]:
    """Waits for so many branches that end well → their places, in order."""
    ended: list[int] = []
    waiting = set(range(len(branches.marks)))
    failed: BaseException | None = None
    while len(ended) < wanted:
        for index in sorted(waiting):
            mark = branches.marks[index]
            if mark.done:
                waiting.discard(index)
                if branches.leaves_out(index):
                    continue
                if mark.error is None:
                    ended.append(index)
                elif failed is None:
                    failed = mark.error
        if len(ended) + len(waiting) < wanted:
            raise failed or ProgramError(
                f"join(quorum={wanted}): {len(ended)} branches have ended, and the others were cancelled"
            )
        if len(ended) < wanted:
            await _any_settled([branches.marks[index] for index in waiting])
    return sorted(ended[:wanted])


async def _any_settled(marks: list[Binding]) -> None:
    """Waits until one of them is done. Runs on the loop that resolves them."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wake = functools.partial(loop.set_done, future)
    for mark in marks:
        mark.settled.add(wake)
    try:
        if not any(mark.done for mark in marks):
            await future
    finally:
        for mark in marks:
            mark.settled.discard(wake)


def not_needed() -> BranchCancelledError:
    """Returns the error of a branch whose siblings have decided."""
    return BranchCancelledError("the branch was cancelled: it was not needed any more")


class _Delivery:
    """Delivers the text of one request to readers: pieces as they come, then the rest."""

    __slots__ = ("_apart", "_executor", "_said", "_splitter", "_step", "_tail")

    def __init__(self, executor: Executor, step: Step) -> None:
        self._executor = executor
        self._step = step
        self._tail = ""
        self._splitter: Splitter | None = None
        self._apart = False  # the provider gives reasoning apart from the text
        if step.tags is not None:
            self._tail = executor.position.prompt.text[-len(step.tags.open) - 16 :]
            self._splitter = Splitter(step.tags, self._tail)
        self._said = 0  # characters of the answer that were delivered

    def piece(self, chunk: Chunk) -> None:
        """Delivers a piece of the first continuation, with which the program goes on; drops the others'."""
        if chunk.index != 0:
            return
        facts = meta_of_chunk(chunk)
        text = chunk.text
        self._apart = self._apart or bool(chunk.reasoning)
        if self._splitter is not None and self._apart:
            _given(self._step.reasoning).feed.append(chunk.reasoning, facts)
        elif self._splitter is not None:
            split = self._splitter.feed(text)
            _given(self._step.reasoning).feed.append(split.reasoning, facts)
            text = split.answer
        self._say(text, facts)
        _given(self._step.binding).feed.append(text, facts)

    def finish(self, final: Final, facts: list[Meta], capabilities: Capabilities) -> None:
        """Appends the text to the prompt and resolves the bindings. `facts`: about each continuation."""
        values = [completion.text for completion in final.completions]
        if self._step.tags is not None:
            splits = [self._split(completion, self._step.tags) for completion in final.completions]
            values = [split.answer for split in splits]
            _resolve(_given(self._step.reasoning), [split.reasoning for split in splits], facts)
        self._append(final.completions[0], values[0], capabilities)
        self._say(values[0][self._said :], facts[0])
        _resolve(_given(self._step.binding), values, facts)

    def _split(self, completion: Completion, tags: ReasoningTags) -> Split:
        if completion.reasoning:
            return Split(completion.reasoning, completion.text)
        return split_reasoning(tags, self._tail, completion.text)

    def _append(self, completion: Completion, text: str, capabilities: Capabilities) -> None:
        """Appends the text; as token ids as far as the backend keeps them, so that it need not tokenize again."""
        position = self._executor.position
        source = _written(SourceKind.GENERATED, cast(ops.Gen | Converse, self._step.op).name, self._step)
        if capabilities.token_ids and completion.kept and text == completion.text:
            kept = completion.text[: len(completion.text) - len(completion.tail)]
            position.append(Generated(kept, completion.token_ids[: completion.kept]), source)
            text = completion.tail
        if text:
            position.append(Text(text), source)

    def _say(self, text: str, facts: Meta) -> None:
        self._said += len(text)
        self._executor.spoken.append(text, facts)


def _resolve(binding: Binding, values: list[str], facts: list[Meta]) -> None:
    if len(values) == 1:
        binding.resolve(values[0], facts[0])
    else:
        binding.resolve(values, facts)


def _written(kind: SourceKind, name: str | None, step: Step) -> Source | None:
    """Returns the source of generated text, as opposed to the program's own."""
    return None if step.source is None else step.source.of(kind, name or "")


def _given(binding: Binding | None) -> Binding:
    assert binding is not None, "this kind of step is submitted with its binding"
    return binding


def _retrieve(start: "asyncio.Future[None]") -> None:
    """Retrieves the error of a start, so that asyncio does not log it as never retrieved."""
    if not start.cancelled():
        start.exception()


# Operation → method. Any: each method takes its own kind of operation, which the key guarantees.
_METHODS = cast(
    dict[type[ops.Op], Callable[[Executor, Any, Step], Awaitable[None] | None]],
    {
        ops.ConstantText: Executor.text,
        ops.Gen: Executor.generate,
        ops.Select: Executor.select,
        ops.RoleBegin: Executor.role_begin,
        ops.RoleEnd: Executor.role_end,
        ops.VarScopeBegin: Executor.scope_begin,
        ops.VarScopeEnd: Executor.scope_end,
        ops.CachePoint: Executor.cache_point,
        ops.PrivateBegin: Executor.private,
        Converse: Executor.converse,
        Recall: Executor.recall,
        Keep: Executor.keep,
        ops.Image: Executor.media,
        ops.Video: Executor.media,
        BranchOff: Executor.branch_off,
        Mark: Executor.mark,
        Gather: Executor.gather,
        Concatenate: Executor.concatenate,
        Late: Executor.late,
        Elsewhere: Executor.elsewhere,
    },
)


class StepQueue:
    """Steps of one stream, in order.

    Args:
        run: the run the stream belongs to.
        fork_group: id shared by the siblings of one fork.
        waits: True for a branch, which its parent starts.
    """

    __slots__ = (
        "_executor",
        "_run",
        "_steps",
        "_task",
        "_traceback",
        "active",
        "branches",
        "error",
        "failed",
        "fork_group",
        "lock",
        "number",
        "pushed",
        "span",
        "spoken",
        "stopped",
        "streaming",
    )

    def __init__(self, run: Run, *, fork_group: str = "", waits: bool = False) -> None:
        self.lock = threading.Lock()  # held around `push`, so that what is pushed and what is bound agree
        self.active = waits  # a task runs or is about to, or the parent will begin one
        self.error: BaseException | None = None
        self.stopped: BranchCancelledError | None = None  # it was cancelled, alone or with what it was forked off
        self.branches: list[StepQueue] = []  # that were forked off a branch; those of the program are not kept
        self.failed = Signal()
        self.pushed = Signal()
        self.fork_group = fork_group
        self.number = 0 if run.record is None else run.record.number()  # of the stream, in the run's record
        self.span: StreamSpan | None = None  # where runs are observed; a branch has one once it begins
        if run.spans is not None and not waits:
            self.span = run.spans.root
        self.spoken = Feed()  # all text the stream appends
        self.streaming = False  # a reader takes pieces: requests from now on ask for chunks
        self._run = run
        self._steps: deque[Step] = deque()
        self._task: asyncio.Task[None] | None = None
        self._traceback: TracebackType | None = None
        self._executor: Executor | None = None if waits else Executor(self, run, Position(), path=run.next_path())

    # -------------------------------------------------------------------------------- any thread

    def push(self, step: Step) -> None:
        """Queues a step and returns at once. Called with the lock held."""
        self._steps.append(step)
        self.pushed.fire()
        if not self.active:
            self.active = True
            self._run.begin_work()
            self._run.home.call(self.launch)

    def load(self, steps: Iterable[Step]) -> None:
        """Queues all steps known ahead, before another thread has the queue. `launch` or the parent starts them."""
        self._steps.extend(steps)
        if not self.active:
            self.active = True
            self._run.begin_work()

    def upcoming(self) -> tuple[Step, ...]:
        """Returns the steps queued after the running one."""
        with self.lock:
            return tuple(self._steps)

    def stop(self, reason: BranchCancelledError) -> None:
        """Cancels a branch and those that it has forked off: the call in flight is aborted, steps fail with `reason`.

        What has ended keeps its values, and is left out of a join that comes later.
        """
        with self.lock:
            if self.stopped is not None:
                return
            self.stopped = reason
            branches = list(self.branches)
        for branch in branches:
            branch.stop(reason)
        self._run.home.call(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def standing(self) -> Reached | None:
        """Returns the position of an idle stream; None while it works or if it has failed. Called with the lock held.
        No other task uses the executor then: its last task is over, and the next one needs the lock to begin."""
        if self.active or self.error is not None or self._run.reason is not None or self._executor is None:
            return None
        return self._executor.reached()

    def raise_error(self) -> None:
        """Raises the error of the queue or of its run, if there is one, with its original traceback."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)
        if self._run.reason is not None:
            raise self._run.reason

    # -------------------------------------------------------------------------------- the streams' loop

    def start(self, position: Position, adapter: str, *, ready: bool, path: str) -> None:
        """Starts a branch: its parent has reached the fork, and `adapter` was that of its last call. `path`: as of
        Executor."""
        self._executor = Executor(self, self._run, position, adapter, ready=ready, path=path)
        self._released()

    def start_failed(self, error: BaseException) -> None:
        """Fails a branch: its parent failed before it reached the fork."""
        self._fail(error)
        self._released()

    def _released(self) -> None:
        with self.lock:
            self.active = bool(self._steps)
            if self.active:
                self._run.begin_work()
        if self.active:
            self.launch()
        else:
            self.spoken.changed.fire()

    def launch(self) -> None:
        """Starts the task. The queue is active, and its run counts it."""
        context = None if self.span is None else self.span.context
        task = self._task = asyncio.get_running_loop().create_task(self._drain(), context=context)
        self._run.track(task)
        task.add_done_callback(self._drained)

    async def _drain(self) -> None:
        record = self._run.record
        while (step := self._next()) is not None:
            error = self.error or self.stopped or self._run.reason
            if error is not None:
                self._leave(step)
            else:
                executor = self._executor
                assert executor is not None, "a branch that has failed to begin has an error"
                began, before = 0.0 if record is None else record.clock(), executor.position.prompt
                try:
                    work = executor.execute(step)
                    if work is not None:
                        await work
                    if record is not None:
                        record.add(self.number, step, began, before, executor.position.prompt, executor.intent)
                        executor.intent = None
                    continue
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    while task is not None and task.cancelling():
                        task.uncancel()
                    error = self.stopped or self._run.reason or CancelledError("the interpreter is shutting down")
                except BaseException as raised:  # whatever it is, the program's reads have to raise it
                    error = raised
                    step.note_place(error)
                if record is not None:
                    record.add(self.number, step, began, before, executor.position.prompt, executor.intent, error)
            self._fail(error)
            step.fail(error)
        self._empty()

    def _leave(self, step: Step) -> None:
        """Counts a call that a cancelled branch does not make."""
        if self.stopped is not None and step.sampling is not None:  # of a Gen or a Select, which generates nothing
            generates = isinstance(step.op, ops.Gen)
            self._run.ledger.cancelled(step.sampling.n * step.sampling.max_tokens if generates else 0)

    def _drained(self, task: "asyncio.Task[None]") -> None:
        """Ends a task. One cancelled before it began has failed none of its steps yet, so they fail here."""
        self._run.untrack(task)
        if self._task is task:
            self._task = None
        if task.cancelled():
            error = self.error or self.stopped or self._run.reason or CancelledError("the interpreter is shutting down")
            self._fail(error)
            while (step := self._next()) is not None:
                self._leave(step)
                step.fail(error)
            self._empty()

    def _next(self) -> Step | None:
        """Takes the next step. None ends the task; a later push starts a new one."""
        with self.lock:
            self.active = bool(self._steps)
            return self._steps.popleft() if self.active else None

    def _empty(self) -> None:
        if self.span is not None:
            self.span.worked()
        self._run.end_work()
        self.spoken.changed.fire()

    def _fail(self, error: BaseException) -> None:
        """Records the error, then wakes readers. The traceback goes first: a reader that sees the error takes both."""
        if self.error is None:
            self._traceback = error.__traceback__
            self.error = error
            if self.span is not None:
                self.span.fail(error)
        self.failed.fire()
        self.spoken.changed.fire()
