"""The command umbel simulate."""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...lang.errors import ParameterError, shown
from ...lang.runtime_options import RuntimeOptions
from ...lang.traces.calls import CallTrace
from ..launch import LEAST_AHEAD, open_tokenizer
from ..placement.policies import POLICIES
from ..scheduler.policy import PolicyName
from ..tokenizer.tokenizer import Tokenizer
from .answers import AnswerTokens, MadeUpTokens, NumberTokenizer, Words
from .arrivals import Arrivals, AtOnce, ClosedLoop, parse_arrivals, start_sessions
from .calls import Host, ProgramSession, Session, is_shape, parse_shape
from .coarse import CoarseSimulation
from .comparison import Compared, compared_page, draw_compared, lines_of_compared
from .events import Events, rare_collections
from .exact import ExactSimulation, ReplicaShape
from .measurements import Measurements, SimulationResult
from .options import check_options, check_use, file_named, parser
from .recorded import RecordingPlayer, is_recording, read_recording
from .report import draw_svg, lines_of, page_of, writable
from .step_model import (
    DEFAULT_STEPS,
    LEAST_STEPS,
    StepModel,
    fit,
    read_step_model,
    read_steps,
    this_machine,
    write_step_model,
)
from .tiers import TierModel, parse_tiers
from .traced import TraceSession
from .workload import first_programs, read_workload

MOST_TOKENS = 10**9  # of a pool, and rows of a step
MOST_ERROR = 0.15  # of the throughput of a recording that is checked
MOST_COUNTED = 20_000_000  # prompt tokens; the optimum of more is not counted


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload that can be simulated.

    Attributes:
        start: plans its beginning, and needs the tokenizer's simulation.
        counted: the optimum is counted.
        notes: what was left out or assumed, as sentences.
    """

    tokenizer: Tokenizer
    answers: AnswerTokens
    settings: ReplicaShape
    start: Callable[[Events, Host], None]
    counted: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Says how to simulate: the mode, the replicas, and how their calls are placed."""

    coarse: bool = False
    replicas: int = 1
    policy: str = "added-delay"
    steps: StepModel = DEFAULT_STEPS
    tiers: tuple[TierModel, ...] = ()


def simulate(scenario: Scenario, plan: Plan) -> tuple[SimulationResult, Measurements]:
    """Runs a simulation to its end.

    Raises:
        ParameterError: the plan asks for what the mode does not do.
        UmbelError: a call cannot be served, such as one that is longer than the pool.
    """
    events = Events()
    measurements = Measurements(plan.replicas, keeps_sequences=scenario.counted)
    parts = (events, scenario.tokenizer, scenario.answers, plan.steps, scenario.settings, measurements)
    simulation = CoarseSimulation if plan.coarse else ExactSimulation
    host: ExactSimulation | CoarseSimulation = simulation(*parts, policy=plan.policy, tiers=plan.tiers)
    with rare_collections():
        scenario.start(events, host)
        events.run()
    host.finish()
    result = measurements.result("coarse" if plan.coarse else "exact", plan.policy, measurements.optimum())
    return result, measurements


@dataclass(frozen=True, slots=True)
class Check:
    """A recording next to its simulation. `counters`: name → recorded, simulated; `seconds` likewise."""

    calls: int
    counters: dict[str, tuple[int, int]]
    seconds: tuple[float, float]
    steps: StepModel

    @property
    def equal(self) -> bool:
        return all(recorded == simulated for recorded, simulated in self.counters.values())

    @property
    def throughput_error(self) -> float:
        """Of the simulated calls a second, relative to the recorded ones."""
        recorded, simulated = self.seconds
        return recorded / max(simulated, 1e-9) - 1


def check(path: Path, steps: StepModel | None = None) -> Check:
    """Simulates a recording on a replica like the one that was recorded.

    steps: None: a fit of the recording's own steps, or the usual model where these are too few.

    Raises:
        ParameterError: the file is no recording.
    """
    recording = read_recording(path)
    if steps is None:
        recorded, model = read_steps(path)
        enough = len(recorded) >= LEAST_STEPS
        steps = fit(recorded, machine=this_machine(), model=model) if enough else DEFAULT_STEPS
    result, measurements = simulate(open_scenario(str(path)), Plan(steps=steps))
    of_calls = {"prompt_tokens": result.prompt_tokens, "cached_tokens": measurements.found}  # without hints
    simulated = measurements.counters | of_calls
    counters = {name: (count, int(simulated[name])) for name, count in recording.totals.items()}
    return Check(result.calls, counters, (recording.seconds, result.seconds), steps)


# ------------------------------------------------------------------------------------------------- workloads


def open_scenario(
    name: str,
    arrivals: Arrivals | None = None,
    *,
    model: str = "default",
    settings: ReplicaShape | None = None,
    first: int | None = None,
    trace: CallTrace | None = None,
) -> Scenario:
    """Opens a workload file, a recording, or a made-up shape such as "prefixes=64,prefix=1000".

    Args:
        arrivals: None: those of the workload.
        model: whose tokenizer a workload file or a trace is encoded with.
        settings: of the replicas; None: those of a recording, else the usual ones.
        first: takes so many programs of a workload file or a trace, 1 or more.
        trace: the calls of the file, where it is a journal or a saved run.

    Raises:
        ParameterError: there is no such workload, or arrivals of a recording are to be changed.
        ModelError: the tokenizer cannot be opened.
    """
    path = file_named(name)
    if trace is not None:
        return _traced(trace, arrivals or AtOnce(), model, settings or ReplicaShape(), first)
    if is_recording(path):
        return _recorded(path, arrivals, settings)
    settings = settings or ReplicaShape()
    if is_shape(name):
        shape = parse_shape(name)
        made_up = NumberTokenizer()
        counted = shape.requests * (shape.prefix + shape.own) <= MOST_COUNTED

        def sessions() -> Iterable[Session]:
            return shape.sessions()

        return Scenario(made_up, MadeUpTokens(), settings, _starting(arrivals or AtOnce(), sessions), counted)
    workload = read_workload(path).first(first)
    programs = [ProgramSession(program, number) for number, program in enumerate(workload.programs)]
    usual = ClosedLoop(1) if workload.serial else AtOnce()
    tokenizer = open_tokenizer(RuntimeOptions(model=model)).tokenizer
    return Scenario(tokenizer, Words(tokenizer), settings, _starting(arrivals or usual, lambda: programs), counted=True)


def _starting(arrivals: Arrivals, sessions: Callable[[], Iterable[Session]]) -> Callable[[Events, Host], None]:
    return lambda events, host: start_sessions(arrivals, sessions(), events, host)


def _traced(trace: CallTrace, arrivals: Arrivals, model: str, settings: ReplicaShape, first: int | None) -> Scenario:
    reading = open_tokenizer(RuntimeOptions(model=model))
    tokenizer, counted = reading.tokenizer, reading.name == trace.counts
    programs = first_programs(trace.programs, first)
    notes = trace.notes
    if not counted:
        notes = (
            f"{trace.backend} has answered the calls, and the tokens are those of {reading.name}: of the texts, with "
            "turns as they were written",
            *notes,
        )

    def sessions() -> Iterable[Session]:
        for number, calls in enumerate(programs):
            yield TraceSession(calls, number, tokenizer, counted=counted)

    return Scenario(tokenizer, Words(tokenizer), settings, _starting(arrivals, sessions), counted=True, notes=notes)


def _recorded(path: Path, arrivals: Arrivals | None, settings: ReplicaShape | None) -> Scenario:
    if arrivals is not None:
        raise ParameterError("a recording has its own arrivals; leave --arrivals out")
    recording = read_recording(path)
    skipped = recording.skipped
    notes = (f"{skipped} messages could not be recorded and are left out",) if skipped else ()
    tokenizer = NumberTokenizer()

    def start(events: Events, host: Host) -> None:
        RecordingPlayer(recording, tokenizer, events, host).begin()

    return Scenario(tokenizer, MadeUpTokens(), settings or recording.settings, start, counted=True, notes=notes)


# ------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str], read_trace: Callable[[Path], CallTrace | None] = lambda _: None) -> int:
    """Runs the command. Returns the exit status; raises UmbelError.

    read_trace: reads a journal or a saved run, which the runtime does not know; None for any other file.
    """
    options = parser().parse_args(arguments)
    check_options(options)
    command = writable(shlex.join(["umbel", "simulate", *arguments]))
    if options.measure is not None or options.fit is not None:
        return _make_steps(options, file_named(options.steps))
    steps = None if options.steps is None else read_step_model(file_named(options.steps))
    if options.check:
        return _check(options, steps, command)
    plan = Plan(
        coarse=options.coarse,
        replicas=options.replicas,
        policy=options.placement,
        steps=DEFAULT_STEPS if steps is None else steps,
        tiers=parse_tiers(options.tiers),
    )
    shapes = _shapes(options)
    trace = read_trace(file_named(options.workload))
    check_use(options, trace)
    if len(shapes) > 1:
        _compare(options, plan, shapes, command, trace)
        return 0
    scenario = _scenario(options, shapes[0], trace)
    _print_notes(scenario)
    result, measurements = simulate(scenario, plan)
    print("\n".join(lines_of(result)))
    title = writable(Path(options.workload).name)
    picture = draw_svg(result, measurements, title) if options.svg or options.html else ""
    figures = msgspec.to_builtins(result) | {"hit_rate": result.hit_rate, "command": command}
    _write(options, figures, picture, lambda: page_of(result, picture, title, command))
    return 0


def _print_notes(scenario: Scenario) -> None:
    for note in scenario.notes:
        print(f"umbel simulate: {note}", file=sys.stderr)


def _scenario(options: argparse.Namespace, settings: ReplicaShape | None, trace: CallTrace | None) -> Scenario:
    arrivals = None if options.arrivals is None else parse_arrivals(options.arrivals, options.seed)
    return open_scenario(
        options.workload, arrivals, model=options.model, settings=settings, first=options.first, trace=trace
    )


def _shapes(options: argparse.Namespace) -> list[ReplicaShape | None]:
    """Returns the settings to simulate, policy by policy and by pool; None: nothing is given."""
    given = {"max_running": options.max_running, "chunk": options.chunk}
    named = {name: value for name, value in given.items() if value is not None}
    pools = [] if options.pool is None else [_whole("--pool", text) for text in options.pool.split(",")]
    policies = [] if options.policy is None else options.policy.split(",")
    for name, value in [*named.items(), *(("pool", pool) for pool in pools)]:
        least = 2 if name == "pool" else 1
        if not least <= value <= MOST_TOKENS:
            raise ParameterError(f"--{name.replace('_', '-')} {value}; write {least} to {MOST_TOKENS:,}")
    known = [policy.value for policy in PolicyName]
    for policy in policies:
        if policy not in known:
            more = f"--placement {policy} places calls on replicas; " if policy in POLICIES else ""
            raise ParameterError(f"--policy {shown(policy)}; {more}write {' or '.join(known)}, or {','.join(known)}")
    if options.coarse and any(policy != PolicyName.LPM for policy in policies):
        raise ParameterError("--coarse orders calls by their longest prefix; leave --policy out, or --coarse")
    if not (named or pools or policies):
        return [None]
    path = file_named(options.workload)
    base = read_recording(path).settings if is_recording(path) else ReplicaShape(least_ahead=LEAST_AHEAD)
    base = replace(base, **named)
    return [
        replace(base, policy=policy, pool=pool)
        for policy in dict.fromkeys(policies or [base.policy])
        for pool in sorted(set(pools or [base.pool]))
    ]


def _whole(option: str, text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ParameterError(f"{option} {shown(text)}; write a number of tokens, or several: 10000,20000") from None


def _compare(
    options: argparse.Namespace,
    plan: Plan,
    shapes: Sequence[ReplicaShape | None],
    command: str,
    trace: CallTrace | None,
) -> None:
    """Simulates several settings; prints a table of them, and writes it."""
    found: list[Compared] = []
    for shape in shapes:
        assert shape is not None, "several are given"
        scenario = _scenario(options, shape, trace)
        if not found:
            _print_notes(scenario)
        result, _ = simulate(scenario, plan)
        found.append(Compared(shape.policy, shape.pool, result))
    print("\n".join(lines_of_compared(found)))
    title = writable(Path(options.workload).name)
    picture = draw_compared(found, title) if options.svg or options.html else ""
    figures = [
        msgspec.to_builtins(result) | {"placement": result.policy, "policy": policy, "pool": pool}
        for policy, pool, result in found
    ]
    _write(options, figures, picture, lambda: compared_page(found, picture, title, command))


def _make_steps(options: argparse.Namespace, target: Path) -> int:
    """Fits a step model, prints how good it is, and writes it."""
    if options.measure is not None:
        from .measuring import measure

        recorded, model = measure(options.measure), options.measure
    else:
        recorded, model = read_steps(file_named(options.fit))
    found = fit(recorded, machine=this_machine(), model=model)
    write_step_model(found, target)
    error = found.held_out
    assert error is not None, "a fit has it"
    print(f"{len(recorded)} steps of {model} on {found.machine}")
    print(
        f"seconds = {found.step:.3g} + {found.row:.3g} rows + {found.key:.3g} keys"
        f" + {found.prefill_row:.3g} prefill rows + {found.sequence:.3g} sequences + {found.logit:.3g} logits"
    )
    print(
        f"on {error.steps} steps that were left out: median error {error.median:.1%}, mean {error.mean:.1%}, "
        f"of their sum {error.total:+.1%}"
    )
    return 0


def _check(options: argparse.Namespace, steps: StepModel | None, command: str) -> int:
    """Prints a recording next to its simulation. Returns 1 where they differ by more than they should."""
    path = file_named(options.workload)
    if not is_recording(path):
        given = shown(options.workload)
        raise ParameterError(f"{given} is no recording; --check takes one: debug={{'recording': FILE}}")
    found = check(path, steps)
    print("\n".join(lines_of_check(found)))
    rows = found.counters | {"seconds": found.seconds}
    figures = {name: {"recorded": one, "simulated": other} for name, (one, other) in rows.items()}
    about = {"calls": found.calls, "throughput_error": found.throughput_error, "steps": found.steps}
    _write(options, figures | about | {"command": command}, "", str)
    return 0 if found.equal and abs(found.throughput_error) <= MOST_ERROR else 1


def lines_of_check(found: Check) -> list[str]:
    """Returns a recording next to its simulation, as lines for a terminal."""
    recorded, simulated = found.seconds
    rows = [(name.replace("_", " "), f"{one:,}", f"{other:,}") for name, (one, other) in found.counters.items()]
    rows += [("seconds", f"{recorded:.3f}", f"{simulated:.3f}")]
    rates = [f"{found.calls / max(seconds, 1e-9):,.2f}" for seconds in found.seconds]
    error = found.steps.held_out
    return [
        f"{'':20}{'recorded':>12}{'simulated':>12}",
        *(f"{name:20}{one:>12}{other:>12}" for name, one, other in [*rows, ("calls a second", *rates)]),
        f"counters {'are equal' if found.equal else 'differ'}; throughput is off by {found.throughput_error:+.1%}"
        + ("" if error is None else f"; median error of a step that the fit left out: {error.median:.0%}"),
    ]


def _write(options: argparse.Namespace, figures: object, picture: str, page: Callable[[], str]) -> None:
    """Writes the files that were asked for. figures: of the JSON. page: makes the HTML. Raises ParameterError."""
    try:
        if options.json is not None:
            file_named(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
        if options.svg is not None:
            file_named(options.svg).write_text(picture, encoding="utf-8")
        if options.html is not None:
            file_named(options.html).write_text(page(), encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"the figures cannot be written: {error}") from error
