"""Constraints as programs write them → what the engine enforces. Who does the work is a seam: `ConstraintCompiler`.

The fronts of `fsm` are pure and may take long, or want much memory, for a source that is made to: the runtime has them
run in a process that can be killed (compiler_process.py). Tests, simulations and the embedded backend run them where
they are called, with `InlineCompiler`.
"""

import importlib.util
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Literal, Protocol, assert_never

import msgspec

from ..fsm.errors import ConstraintRefused, Unsupported
from ..lang.errors import ConstraintError, UmbelError
from ..lang.protocol import ConstraintEngine, ConstraintSpec
from .engine_protocol import EnforcedBy, EngineConstraint

_NAMES = {"regex": "regex", "json_schema": "json_schema", "lark": "grammar"}
_PACKAGES = {"llguidance": "llguidance", "outlines-core": "outlines_core", "interegular": "interegular"}
MAX_COMPILED = 16 << 20  # bytes of a grammar; it travels with every request


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A constraint that can be enforced.

    `close`: a shortest text that satisfies it, for the least number of tokens; None when the engine cannot tell.
    `unenforced`: (keyword, path) of what a schema demands beyond it.
    """

    constraint: EngineConstraint
    close: str | None
    unenforced: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """About the memory it takes to be kept."""
        return len(self.constraint.data) + len(self.close or "") + 500


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A constraint that cannot, and why. The same source is refused again."""

    message: str

    def error(self) -> ConstraintError:
        return ConstraintError(self.message)


Answer = Compiled | Refused | UmbelError  # an UmbelError: the work failed, and might succeed another time


class ConstraintCompiler(Protocol):
    """Compiles constraints, one after the other."""

    counters: Counter[str]

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Calls `answer` once, now or later on the caller's loop.

        Args:
            wanted: asked when the work would begin; without it the answer is None.

        Raises:
            OverloadedError: too much work is waiting.
        """


class InlineCompiler:
    """Compiles where it is called, without a limit of time."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        answer(compile_constraint(spec, engine))


def compile_constraint(spec: ConstraintSpec, engine: ConstraintEngine) -> Compiled | Refused:
    """All of the work. `engine`: as the runtime's option says; the request's own choice goes before it."""
    chosen = spec.engine or engine
    try:
        match chosen:
            case "auto" if spec.kind == "lark":
                return _foreign(spec, "llguidance")
            case "auto":
                return _own_or_llguidance(spec)
            case "fsm":
                return _own(spec)
            case "llguidance" | "outlines-core" | "interegular":
                return _foreign(spec, chosen)
            case _:
                assert_never(chosen)
    except ConstraintRefused as error:
        return Refused(f"{_NAMES[spec.kind]}: {error}")
    except RecursionError:
        return Refused(f"{_NAMES[spec.kind]}: it is nested too deeply; write a flatter one")


def _own_or_llguidance(spec: ConstraintSpec) -> Compiled:
    """What our automata do not honour, llguidance may. Raises ConstraintRefused, ours."""
    try:
        return _own(spec)
    except Unsupported:
        if spec.allow_unenforced or importlib.util.find_spec(_PACKAGES["llguidance"]) is None:
            raise
    return _foreign(spec, "llguidance")


def _own(spec: ConstraintSpec) -> Compiled:
    """By our own automata. Raises ConstraintRefused."""
    from ..fsm.automaton import Automaton
    from ..fsm.boolean import resolve
    from ..fsm.language import Grammar
    from ..fsm.limits import Limits
    from ..fsm.regex_parser import parse_regex

    limits = Limits()
    unenforced: tuple[tuple[str, str], ...] = ()
    match spec.kind:
        case "regex":
            grammar = Grammar(parse_regex(spec.source, limits))
        case "json_schema":
            from ..fsm.schema import SchemaOptions, compile_schema

            options = SchemaOptions(whitespace=spec.whitespace, allow_unenforced=spec.allow_unenforced)
            compiled = compile_schema(spec.source, options, limits)
            grammar = compiled.grammar
            unenforced = tuple((keyword, path) for keyword, path in compiled.unenforced)
        case "lark":
            raise Unsupported("umbel's automata read no Lark grammars; leave constraint_engine out", keyword="lark")
        case _:
            assert_never(spec.kind)
    grammar = resolve(grammar, limits)
    automaton = Automaton(grammar, limits)
    close = automaton.close(automaton.start).decode()
    data = msgspec.msgpack.encode(grammar)
    if len(data) > MAX_COMPILED:
        raise ConstraintRefused(f"it takes {len(data)} bytes compiled, more than {MAX_COMPILED}; write a smaller one")
    return Compiled(_engine_constraint(spec, "fsm", data), close, unenforced)


def _foreign(spec: ConstraintSpec, engine: Literal["llguidance", "outlines-core", "interegular"]) -> Compiled:
    """By another package, which reads the source where it enforces it. Raises ConstraintRefused."""
    package = _PACKAGES[engine]
    if importlib.util.find_spec(package) is None:
        raise ConstraintRefused(f"constraint_engine={engine!r} needs a package: run pip install {engine}")
    if spec.allow_unenforced:
        raise ConstraintRefused(f"allow_unenforced is for umbel's own automata; leave it out for {engine}")
    if spec.kind == "lark" and engine != "llguidance":
        raise ConstraintRefused(f"{engine} reads no Lark grammars; write constraint_engine='llguidance'")
    return Compiled(_engine_constraint(spec, engine, spec.source.encode()), None)


def _engine_constraint(spec: ConstraintSpec, engine: EnforcedBy, data: bytes) -> EngineConstraint:
    digest = sha256(b"\0".join((engine.encode(), spec.kind.encode(), spec.whitespace.encode(), data))).hexdigest()
    return EngineConstraint(digest, engine, spec.kind, data, spec.whitespace)
