"""The engine process: a loop around a scheduler, a socket, and a heartbeat.

    read requests → scheduler.step() → write events        blocks, with a timeout, when there is nothing to do

A thread with a socket of its own sends the number of the current step twice a second, so a step may
take minutes and the process still counts as alive. Only the main thread uses the scheduler.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ...lang.errors import EngineError, UmbelError
from ...lang.sampling import SamplingParams
from ...lang.transport.inlet import prepare
from ...lang.transport.lifeline import read_line, watch
from ...lang.transport.link import FrameError, Inbound, Outbound
from ..constraints.matcher import OPENING_POLL
from ..core.config import MAX_ENGINE_FRAME, MAX_PULSE_FRAME, SupervisionLimits
from ..core.environment import fault_hook
from ..core.instruments import SystemClock
from ..core.messages import (
    Ended,
    EngineControl,
    EngineEnd,
    EngineFailed,
    EngineFrame,
    EngineGenerate,
    EnginePhase,
    EngineReady,
    EngineStart,
    EngineStartFailed,
    FromEngine,
    Heartbeat,
    ToEngine,
    from_engine_codec,
    to_engine_codec,
    too_large_for_gateway,
)
from ..launch import Engine, open_engine
from ..processes import child

YOUNG = 20_000  # objects made and still alive, before a young collection
DUE = 200_000  # before a full collection, as soon as no request waits
OVERDUE = 4_000_000  # before a full collection, although requests wait; some 400 MB


class StepCollector:
    """Runs Python's garbage collector between steps, and a full collection when no request waits.

    By itself the collector runs as soon as enough objects have been made: usually in the middle of a mask, since states
    of automata are objects. A full collection takes tens of milliseconds with a few large constraints in memory, and
    every request waits for it.

        young    objects made since the last time; a fraction of a millisecond
        full     also older objects that refer to themselves: constraints that were evicted

    It changes the whole process, so a process has one at most.
    """

    def __init__(self) -> None:
        self._made = 0  # since the last full collection

    def begin(self) -> None:
        """Stops automatic collections, and exempts all present objects from collections for good."""
        gc.disable()
        gc.freeze()

    def after_step(self, *, idle: bool) -> None:
        """Collects if it is due. `idle`: no request waits for the next step."""
        young = gc.get_count()[0]
        if young < YOUNG and not (idle and self._made >= DUE):
            return
        self._made += young
        if self._made >= (DUE if idle else OVERDUE):
            gc.collect()
            self._made = 0
        else:
            gc.collect(1)


log = logging.getLogger("umbel.engine")

BEAT_AGE = 0.05  # seconds between heartbeats made while requests run; making one takes 0.1 ms of a step of 10
IDLE_POLL = 1000  # milliseconds; an idle engine waits for messages only
WARM_UP = 0  # an id the gateway never uses


class EngineLink:
    """Sends and receives on the engine's end of the sockets; used by the main thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self._socket = prepare(context.socket(zmq.PAIR), MAX_ENGINE_FRAME)
        self._socket.connect(address)
        self.counters: Counter[str] = Counter()
        self._inbound: Inbound[ToEngine] = Inbound(to_engine_codec(), self.counters)
        self._outbound: Outbound[EngineFrame] = Outbound(from_engine_codec(), too_large_for_gateway)

    def send(self, *messages: EngineFrame) -> None:
        for frames in self._outbound.write_all(messages):
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def receive(self, timeout: int) -> list[ToEngine]:
        """Returns the messages that have come; waits up to `timeout` milliseconds for the first frame."""
        messages: list[ToEngine] = []
        while self._socket.poll(timeout):
            timeout = 0
            try:
                messages += self._inbound.read(self._socket.recv_multipart(flags=zmq.NOBLOCK))
            except FrameError as error:
                log.error("a frame could not be read: %s", error)
        return messages


class Pulse:
    """Sends heartbeats from a thread. The main thread replaces `beat`; the thread sends the latest one."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, period: float) -> None:
        self.beat = Heartbeat(0, 0, 0)
        self._context = context
        self._address = address
        self._period = period

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        socket = prepare(self._context.socket(zmq.PUSH), MAX_PULSE_FRAME)
        socket.connect(self._address)
        outbound: Outbound[EngineFrame] = Outbound(from_engine_codec())
        wait = threading.Event().wait
        while True:
            socket.send_multipart(outbound.write([self.beat]))
            wait(self._period)


def warm_up(engine: Engine) -> None:
    """Generates one token, so that the model, the kernels and the sampler have run before the engine reports "ready".

    Raises EngineError when no token comes.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    engine.scheduler.handle_message(EngineGenerate(WARM_UP, [engine.first_token], sampling, False))
    for event in _drain(engine):
        match event:
            case EngineFailed(message=message):
                raise EngineError(f"the model could not make its first token: {message}")
            case Ended(completion_tokens=1):
                break
    else:
        raise EngineError("the model made no first token")
    engine.scheduler.handle_message(EngineControl(WARM_UP, "flush_cache"))
    for _ in _drain(engine):
        pass
    engine.scheduler.reset_counters()  # it was no client's request, and slower than any


def await_constraints(engine: Engine) -> None:
    """Waits for the vocabulary of constraints before the engine is "ready": opening it slows steps.

    Where it fails, the first constraint tries it again; other requests do not need it."""
    if engine.constraints_ready is None:
        return
    error = engine.constraints_ready.exception()
    if error is not None:
        log.warning("constraints could not be prepared; the first of them tries again", exc_info=error)


def _drain(engine: Engine) -> list[FromEngine]:
    events = engine.scheduler.step()
    while not engine.scheduler.idle:
        events += engine.scheduler.step()
    return events


def serve(engine: Engine, link: EngineLink, pulse: Pulse) -> None:
    """Runs the engine's loop until the gateway asks for its end. An exception here belongs to no request, and ends the
    process."""
    scheduler = engine.scheduler
    logged: Exception | None = None
    collector = StepCollector()
    collector.begin()
    prepared = False
    due = 0.0  # when the next heartbeat is to be made
    while True:
        resting = scheduler.idle and not scheduler.unchecked
        patience = IDLE_POLL if resting else round(1000 * OPENING_POLL) if scheduler.opening else 0
        messages = link.receive(patience)
        if resting and not messages and not prepared:
            prepared = True
            engine.constraints.prepare_llguidance()  # a request that comes just then waits for it, once
        for message in messages:
            if isinstance(message, EngineEnd):
                engine.save_cache()
                return
            scheduler.handle_message(message)
        now = time.monotonic()
        if resting or messages or now >= due:  # before the step: a long one shows as busy
            pulse.beat = engine.heartbeat()
            due = now + BEAT_AGE
        events = scheduler.step()
        if events:
            link.send(*events)
        if scheduler.idle:
            pulse.beat = engine.heartbeat()  # the last step counts before the next message comes
        collector.after_step(idle=scheduler.idle)
        if scheduler.last_failure is not logged:
            logged = scheduler.last_failure
            log.error("a request failed: %s", type(logged).__name__, exc_info=_ours_to_explain(logged))


def _ours_to_explain(error: Exception | None) -> Exception | None:
    """Returns the error if its traceback is to be logged. A refusal explains itself to its sender."""
    return None if isinstance(error, UmbelError) else error


def main() -> None:
    gc.disable()  # what a start makes stays: collections would only walk it, for a seventh of the time of all imports
    line = read_line()
    if not line:
        return  # the gateway ended before it had an engine started
    start = msgspec.json.decode(line, type=EngineStart)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program; this process ends when it ends
    child.die_with_parent_thread(start.parent)
    watch(start.parent, lambda: None)
    logging.basicConfig(
        level=start.options.log_level.upper(),
        stream=sys.stderr,
        format="umbel engine[%(process)d] %(levelname)s %(message)s",
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = EngineLink(context, start.events)
    try:
        engine = _start(start, link)
    except UmbelError as error:
        _report_and_wait(link, EngineStartFailed(type(error).__name__, str(error)))
        return
    except Exception as error:
        log.exception("the engine could not start")
        message = f"the engine could not start: {type(error).__name__}: {str(error)[:500]}"
        _report_and_wait(link, EngineStartFailed(EngineError.__name__, message))
        return
    except BaseException:  # ranks may wait for each other: only an exit ends them
        log.exception("the engine ends while it starts")
        os._exit(1)
    pulse = Pulse(context, start.pulse, SupervisionLimits().heartbeat_period)
    pulse.start()
    runner = engine.runner
    link.send(EngineReady(runner.context_length, runner.vocab_size, runner.num_slots - 1, engine.tiers))
    try:
        serve(engine, link, pulse)
        os._exit(0)  # its threads have nothing to end
    except BaseException:
        log.exception("the engine ends")
        os._exit(1)  # at once: the gateway sees the exit and answers every request


def _start(start: EngineStart, link: EngineLink) -> Engine:
    faults = fault_hook()
    faults("engine.start")

    def phase(text: str) -> None:
        link.send(EnginePhase(text))

    engine = open_engine(
        start.options,
        clock=SystemClock(),
        faults=faults,
        phase=phase,
        rendezvous=Path(start.rendezvous),
        replica=start.replica,
        lasting=gc.freeze,
        prepare_constraints=True,
    )
    phase("making the first token")
    warm_up(engine)
    phase("preparing constraints")
    await_constraints(engine)
    return engine


def _report_and_wait(link: EngineLink, failure: EngineStartFailed) -> None:
    """Reports a failed start and waits to be ended by the gateway: a last frame before an exit might be lost."""
    link.send(failure)
    patience: Callable[[float], bool] = threading.Event().wait
    patience(30.0)


if __name__ == "__main__":
    main()
