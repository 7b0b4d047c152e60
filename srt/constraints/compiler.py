"""Compiles constraints as programs write them for the engine, and caches them in the gateway.

The seam is `ConstraintCompiler`.

A hostile source can make the fronts of `fsm` take long or use much memory, so the runtime runs them in a process that
can be killed (compiler_process.py). Tests, simulations and the in-process backend call them directly, with
`InlineCompiler`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from ...fsm.errors import ConstraintRefused, LimitExceeded
from ...lang.errors import ConstraintError, UmbelError
from ...lang.generation import alternatives
from ...lang.protocol import ConstraintEngine, ConstraintSpec
from ..core.messages import EnforcedBy, EngineConstraint

if TYPE_CHECKING:
    from ...fsm.engines.source import Source
    from ...fsm.errors import Limits
    from ...fsm.language import Grammar
    from ...fsm.schema import SchemaGrammar


_NAMES = {
    "regex": "regex",
    "json_schema": "json_schema",
    "lark": "grammar",
    "gbnf": "grammar",
    "tools": "tools",
    "expression": "constraint",
}
_LLGUIDANCE_NARROWS = ("properties", "#", "llguidance enforces it: members come in the order of the schema")
_Choices = Annotated[list[str], msgspec.Meta(min_length=1)]
MAX_COMPILED = 16 << 20  # bytes of a grammar; it is sent with every request


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A constraint that can be enforced.

    `close`: a shortest text that satisfies it, though others may have fewer tokens; None when it is unknown.
    `unenforced`: (keyword, path) of demands of the schema that it does not enforce. `narrowed`: (keyword, path, how)
    where it admits less than the schema.
    """

    constraint: EngineConstraint
    close: str | None
    unenforced: tuple[tuple[str, str], ...] = ()
    narrowed: tuple[tuple[str, str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        return len(self.constraint.data) + len(self.close or "") + 500


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A constraint that cannot be enforced, and why. `lasting`: the same source is refused again."""

    message: str
    lasting: bool = True

    def error(self) -> ConstraintError:
        return ConstraintError(self.message)


Answer = Compiled | Refused | UmbelError  # an UmbelError: the work failed, and might succeed another time


class ConstraintCompiler(Protocol):
    """Compiles constraints."""

    @property
    def counters(self) -> Counter[str]:
        """Cumulative counters."""

    def compile(
        self,
        spec: ConstraintSpec,
        engine: ConstraintEngine,
        answer: Callable[[Answer | None], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Compiles a constraint; calls `answer` once, now or later on the caller's loop.

        Args:
            wanted: called when the work would begin; where it returns False the answer is None.

        Raises:
            OverloadedError: too much work is waiting.
        """


class InlineCompiler:
    """Compiles in the caller's thread, without a time limit."""

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
    """Compiles one constraint. `engine`: the runtime's option; the request's own choice takes precedence."""
    if spec.kind == "choices":
        try:
            texts = msgspec.json.decode(spec.source, type=_Choices)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            return Refused(f'choices: the source is no JSON array of texts ({error}); write ["yes", "no"]')
        spec = msgspec.structs.replace(spec, kind="regex", source=alternatives(texts))
    try:
        if spec.kind == "gbnf":
            from ...fsm.engines.source import lark_of_gbnf

            return _compile(
                msgspec.structs.replace(spec, kind="lark", source=lark_of_gbnf(spec.source)), spec.engine or engine
            )
        if spec.kind == "tools":
            return _compile_tools(spec)
        if spec.kind == "expression":
            return _compile_expression(spec)
        return _compile(spec, spec.engine or engine)
    except ConstraintRefused as error:
        return Refused(f"{_NAMES[spec.kind]}: {error}")
    except ConstraintError as error:  # of the source of tools, and of an expression
        return Refused(str(error))
    except RecursionError:
        return Refused(f"{_NAMES[spec.kind]}: it is nested too deeply; write a flatter one")


def _compile(spec: ConstraintSpec, engine: ConstraintEngine) -> Compiled:
    """Compiles with our automata or llguidance. Raises ConstraintRefused."""
    from ...fsm.engines.selection import compile_source
    from ...fsm.engines.source import Source
    from ...fsm.errors import Limits

    limits = Limits()
    schema = _own_reading(spec, engine, limits)
    if schema is not None:
        grammar = schema.grammar
    else:
        source = Source(_kind(spec), spec.source, spec.whitespace, spec.key_order)
        answer = compile_source(source, engine, limits)
        if isinstance(answer, Source):
            stands_in = engine != "llguidance" and spec.kind != "lark"
            return _rehearsed(spec, answer, _our_refusal(source, limits) if stands_in else None)
        grammar = answer
    compiled = _ours(spec, grammar, limits)
    if schema is None:
        return compiled
    return msgspec.structs.replace(compiled, unenforced=schema.unenforced, narrowed=schema.narrowed)


def _compile_tools(spec: ConstraintSpec) -> Compiled:
    """Compiles answers that may call tools, with our automata: no other engine counts free text and calls as one.

    Raises:
        ConstraintError, ConstraintRefused: the source is wrong, a schema is not supported, or another engine is asked.
    """
    from ...fsm.errors import Limits
    from ...fsm.schema import SchemaOptions
    from ...lang.tool_constraint import read_tool_grammar
    from .tool_grammar import answer_grammar

    if spec.engine not in (None, "auto", "fsm"):
        raise ConstraintRefused(f'engine="{spec.engine}" reads no calls of tools; leave it out')
    limits = Limits()
    options = SchemaOptions(spec.whitespace, allow_unenforced=spec.allow_unenforced, key_order=spec.key_order)
    found = answer_grammar(read_tool_grammar(spec.source), options, limits)
    compiled = _ours(spec, found.grammar, limits)
    return msgspec.structs.replace(compiled, unenforced=found.unenforced, narrowed=found.narrowed)


def _compile_expression(spec: ConstraintSpec) -> Compiled:
    """Compiles an expression, with our automata: its parts may be of any kind, and no other engine takes them all.

    Raises:
        ConstraintError, ConstraintRefused: the source is wrong, a part is not supported, or another engine is asked.
    """
    from ...fsm.composed.grammars import expression_grammar
    from ...fsm.composed.nodes import read
    from ...fsm.errors import Limits

    if spec.engine not in (None, "auto", "fsm"):
        raise ConstraintRefused(f'engine="{spec.engine}" reads no expressions; leave it out')
    limits = Limits()
    found = expression_grammar(read(spec.source), limits)
    return msgspec.structs.replace(_ours(spec, found.grammar, limits), narrowed=tuple(found.narrowed))


def _ours(spec: ConstraintSpec, grammar: Grammar, limits: Limits) -> Compiled:
    """Makes a constraint of a grammar. Raises ConstraintRefused: it is too large, or its shortest text is."""
    from ...fsm.automaton.automaton import Automaton

    automaton = Automaton(grammar, limits)
    least = automaton.close_length(automaton.start)
    if least > limits.shortest_bytes:
        raise LimitExceeded(
            f"the shortest text that satisfies it has {least} bytes, at most {limits.shortest_bytes} are allowed; "
            "write a smaller count"
        )
    close = automaton.close(automaton.start).decode()
    try:
        data = msgspec.msgpack.encode(grammar)
    except OverflowError:
        raise LimitExceeded("a count in it is larger than 2**63; write a smaller one, or leave it out") from None
    if len(data) > MAX_COMPILED:
        raise ConstraintRefused(f"it takes {len(data)} bytes compiled, more than {MAX_COMPILED}; write a smaller one")
    return Compiled(_engine_constraint(spec, "fsm", data), close)


def _rehearsed(spec: ConstraintSpec, source: Source, ours: ConstraintRefused | None) -> Compiled:
    """Compiles a constraint for llguidance, which reads it here first, within this process's limits.

    Args:
        ours: why our own automata do not support it; None when they were not tried.

    Raises:
        ConstraintRefused: llguidance does not support it, either.
    """
    from ...fsm.engines.llguidance_tokens import rehearse

    try:
        nbytes = rehearse(source)
    except ConstraintRefused as error:
        if ours is None:
            raise
        raise ours from error
    why = "" if ours is None else f"{_NAMES[source.kind]}: {ours}"
    constraint = _engine_constraint(spec, "llguidance", source.text.encode(), why)
    narrowed = (_LLGUIDANCE_NARROWS,) if spec.kind == "json_schema" else ()
    return Compiled(msgspec.structs.replace(constraint, nbytes=nbytes), None, narrowed=narrowed)


def _own_reading(spec: ConstraintSpec, engine: ConstraintEngine, limits: Limits) -> SchemaGrammar | None:
    """Reads a schema with our automata; None where they are not tried, or do not support it.

    Raises:
        ConstraintRefused: it is refused, and llguidance is not tried.
    """
    from ...fsm.errors import Unsupported
    from ...fsm.schema import SchemaOptions, resolved_schema

    if spec.kind != "json_schema" or engine not in ("auto", "fsm"):
        return None
    options = SchemaOptions(spec.whitespace, allow_unenforced=spec.allow_unenforced, key_order=spec.key_order)
    try:
        return resolved_schema(spec.source, options, limits)
    except Unsupported:
        if engine == "fsm" or spec.allow_unenforced or spec.key_order == "any":
            raise
        return None


def _our_refusal(source: Source, limits: Limits) -> ConstraintRefused | None:
    """Returns why our own automata do not support it; None where they do."""
    from ...fsm.engines.selection import own_grammar

    try:
        own_grammar(source, limits)
    except ConstraintRefused as error:
        return error
    return None


def _engine_constraint(spec: ConstraintSpec, engine: EnforcedBy, data: bytes, why: str = "") -> EngineConstraint:
    digest = sha256(b"\0".join((engine.encode(), spec.kind.encode(), spec.whitespace.encode(), data))).hexdigest()
    kind = spec.kind if spec.kind == "tools" or spec.kind == "expression" else _kind(spec)
    return EngineConstraint(digest, engine, kind, data, spec.whitespace, why)


def _kind(spec: ConstraintSpec) -> Literal["regex", "json_schema", "lark"]:
    assert spec.kind != "tools", "our own automata enforce them"
    assert spec.kind != "expression", "likewise"
    assert spec.kind != "choices", "they have become a regex"
    assert spec.kind != "gbnf", "it has become a Lark grammar"
    return spec.kind


_Key = tuple[ConstraintSpec, str]


@dataclass(slots=True, eq=False)
class CompileInquiry:
    """A wait for a constraint. `forget` ends it without an answer."""

    notify: Callable[[Answer], None]
    wanted: bool = True

    def forget(self) -> None:
        self.wanted = False


@dataclass(slots=True, eq=False)
class _CompileWork:
    inquiries: list[CompileInquiry] = field(default_factory=list)

    def wanted(self) -> bool:
        return any(inquiry.wanted for inquiry in self.inquiries)


class CompiledCache:
    """Keeps compiled constraints and refusals; evicts the least recently used. Used from one thread.

        find ──▶ kept            answered at once
             ──▶ being compiled  answered with the first request
             ──▶ new             handed to the compiler

    Args:
        compiler: compiles the missing ones.
        engine: used for requests that name none.
        entries: kept answers, refusals among them; 0 compiles for every request, even for concurrent equal ones.
        most_bytes: size of the kept answers.
    """

    def __init__(
        self, compiler: ConstraintCompiler, engine: ConstraintEngine, *, entries: int, most_bytes: int
    ) -> None:
        self._compiler = compiler
        self._engine = engine
        self._entries = entries
        self._most_bytes = most_bytes
        self._kept: OrderedDict[_Key, Compiled | Refused] = OrderedDict()
        self._bytes = 0
        self._works: dict[_Key, _CompileWork] = {}
        self._counters: Counter[str] = Counter(
            {"constraint_compiles": 0, "constraint_cache_hits": 0, "constraint_refusals": 0, "constraint_failures": 0}
        )

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, **self._compiler.counters}

    def find(self, spec: ConstraintSpec, salt: str, notify: Callable[[Answer], None]) -> CompileInquiry:
        """Finds or compiles a constraint; calls `notify` once, now or later, unless the inquiry is forgotten before.

        Raises:
            OverloadedError: too many constraints wait to be compiled.
        """
        inquiry = CompileInquiry(notify)
        key = (spec, salt)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._counters["constraint_cache_hits"] += 1
            notify(kept)
            return inquiry
        work = self._works.get(key) if self._entries else None
        if work is not None and work.wanted():
            self._counters["constraint_cache_hits"] += 1
            work.inquiries.append(inquiry)
            return inquiry
        work = _CompileWork([inquiry])
        if self._entries:
            self._works[key] = work
        self._counters["constraint_compiles"] += 1
        try:
            self._compiler.compile(spec, self._engine, lambda answer: self._learn(key, work, answer), work.wanted)
        except BaseException:
            self._forget(key, work)
            raise
        return inquiry

    def _learn(self, key: _Key, work: _CompileWork, answer: Answer | None) -> None:
        self._forget(key, work)
        match answer:
            case None:  # no request waited any more
                return
            case Compiled():
                self._keep(key, answer)
            case Refused():
                if answer.lasting:
                    self._keep(key, answer)
                self._counters["constraint_refusals"] += 1
            case _:
                self._counters["constraint_failures"] += 1
        for inquiry in work.inquiries:
            if inquiry.wanted:
                inquiry.notify(answer)

    def _forget(self, key: _Key, work: _CompileWork) -> None:
        if self._works.get(key) is work:
            del self._works[key]

    def _keep(self, key: _Key, answer: Compiled | Refused) -> None:
        size = _size(key, answer)
        if not self._entries or size > self._most_bytes:
            return
        old = self._kept.pop(key, None)
        self._bytes += size - (_size(key, old) if old is not None else 0)
        self._kept[key] = answer
        while len(self._kept) > self._entries or self._bytes > self._most_bytes:
            self._bytes -= _size(*self._kept.popitem(last=False))


def _size(key: _Key, answer: Compiled | Refused) -> int:
    return len(key[0].source) + (answer.nbytes if isinstance(answer, Compiled) else len(answer.message))
