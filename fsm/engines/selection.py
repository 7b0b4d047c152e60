"""Chooses the engine that enforces a constraint.

    auto             ours; llguidance for Lark grammars, and for schemas without `FOREIGN` that ours does not honour
    fsm              ours: regular expressions and JSON schemas as one lazy automaton
    llguidance       its matcher over our table of the vocabulary; Lark grammars, schemas of any recursion
    outlines-core    what it makes of the source, run by our automaton: for comparison
    interegular      likewise

Regular expressions are read by our parser and by no other, whichever engine enforces them (`source.in_common_syntax`):
what it refuses is refused.

Compiling (`compile_source`) reads the source and may take long; it belongs where it can be killed. Opening
(`Engines`) happens where the masks are.
"""

from __future__ import annotations

from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from ..boolean.resolution import resolve
from ..errors import Limits, Unsupported
from ..language import Grammar
from ..regex.parser import parse_regex
from ..schema import SchemaOptions, resolved_schema
from ..tokens.constraint import Constraint, JumpCounters
from ..tokens.masks import Masks
from ..tokens.vocabulary import Encode, remembered
from .llguidance import LlguidanceConstraint
from .llguidance_tokens import LlguidanceTokens
from .source import Engine, Source, in_common_syntax

FOREIGN = ("pattern", "patternProperties", "format")  # llguidance has a dialect of its own, and wider formats


class TextState(Protocol):
    """The cursor of one text; `constraint.ConstraintState` documents each of these."""

    @property
    def mask(self) -> NDArray[np.uint32]: ...

    @property
    def few(self) -> NDArray[np.int32] | None: ...

    @property
    def accepting(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    @property
    def closing_bound(self) -> int: ...

    @property
    def endings(self) -> NDArray[np.uint32] | None: ...

    @property
    def begins_more(self) -> bool: ...

    @property
    def roomy(self) -> bool: ...

    def prepare(self, fuel: int) -> int | None: ...

    def forced_tokens(self) -> list[int]: ...

    def closing_tokens(self) -> list[int] | None: ...

    def advance(self, token: int) -> None: ...

    def rollback(self, tokens: int) -> None: ...

    def copy(self) -> TextState: ...


class TextConstraint(Protocol):
    """A constraint that all texts under it share; see `constraint.Constraint`."""

    @property
    def minimum_tokens(self) -> int: ...

    def begin(self, context: bytes = b"", said: bytes = b"") -> TextState: ...


def compile_source(source: Source, engine: Engine = "auto", limits: Limits | None = None) -> Grammar | Source:
    """Compiles a source to what enforces it: a grammar for our automaton, or the source for llguidance's matcher.

    Raises:
        ConstraintRefused: no engine that was asked honours it.
    """
    limits = limits or Limits()
    if source.key_order == "any":
        if engine not in ("auto", "fsm"):
            raise Unsupported(
                f"{engine} writes members in the order of the schema; leave json_key_order or constraint_engine out",
                keyword="json_key_order",
            )
        engine = "fsm"
    match engine:
        case "fsm":
            return own_grammar(source, limits)
        case "auto":
            if source.kind == "lark":
                return source
            try:
                return own_grammar(source, limits)
            except Unsupported:
                if not (_is_read_alike(source) and LlguidanceTokens.installed()):
                    raise
                return source
        case "llguidance":
            return in_common_syntax(source, limits)
        case "outlines-core":
            from .oracles import outlines_grammar

            return outlines_grammar(in_common_syntax(source, limits), limits)
        case "interegular":
            from .oracles import interegular_grammar

            return interegular_grammar(in_common_syntax(source, limits), limits)
        case _:
            assert_never(engine)


def _is_read_alike(source: Source) -> bool:
    """Tells whether llguidance means what we mean by the source: a schema without keywords that it reads otherwise.

    Keys are looked at wherever they stand: a property of such a name keeps a schema from llguidance, too.
    """
    return source.kind == "json_schema" and not any(f'"{keyword}"' in source.text for keyword in FOREIGN)


def own_grammar(source: Source, limits: Limits) -> Grammar:
    """Compiles by our own front ends, ready for an automaton.

    Raises:
        ConstraintRefused: it cannot be honoured, is no constraint, or admits nothing.
    """
    match source.kind:
        case "regex":
            grammar = Grammar(parse_regex(source.text, limits))
        case "json_schema":
            options = SchemaOptions(source.whitespace, key_order=source.key_order)
            return resolved_schema(source.text, options, limits).grammar
        case "lark":
            raise Unsupported(
                "umbel's automata read no Lark grammars; write constraint_engine='llguidance'", keyword="lark"
            )
        case _:
            assert_never(source.kind)
    return resolve(grammar, limits)


class Engines:
    """Opens constraints over one vocabulary, by any engine.

    Args:
        masks: of the vocabulary.
        encode: see constraint.Constraint.
    """

    def __init__(self, masks: Masks, *, encode: Encode | None = None) -> None:
        self.masks = masks
        self.counters = JumpCounters()
        self._encode = None if encode is None else remembered(encode)
        self._tokens: LlguidanceTokens | None = None

    def open(self, source: Source, engine: Engine = "auto") -> TextConstraint:
        """Compiles and opens. Raises ConstraintRefused; what neither ours nor llguidance honours, with our reason."""
        compiled = compile_source(source, engine)
        if isinstance(compiled, Grammar):
            return self.open_grammar(compiled)
        try:
            return self.open_llguidance(compiled)
        except Unsupported:
            if engine == "auto" and source.kind != "lark":
                compile_source(source, "fsm")
            raise

    def open_grammar(self, grammar: Grammar) -> Constraint:
        """Opens a compiled one. Raises ConstraintRefused."""
        return Constraint(grammar, self.masks, encode=self._encode, counters=self.counters)

    def open_llguidance(self, source: Source, nbytes: int = 0) -> LlguidanceConstraint:
        """Opens by llguidance, whose view of the vocabulary is made at the first of them.

        A source that has not been read where reading can be killed (`rehearse`) may take long.

        Args:
            nbytes: that `rehearse` has seen it take.

        Raises:
            ConstraintRefused: llguidance does not honour it, or is not installed.
        """
        tokens = self._llguidance_tokens()
        return LlguidanceConstraint(source, tokens, encode=self._encode, counters=self.counters, nbytes=nbytes)

    def prepare_llguidance(self) -> None:
        """Makes its view of the vocabulary before the first of its constraints comes, if it is installed."""
        if LlguidanceTokens.installed():
            self._llguidance_tokens()

    def _llguidance_tokens(self) -> LlguidanceTokens:
        if self._tokens is None:
            self._tokens = LlguidanceTokens(self.masks.vocabulary, self.masks.trie, self._encode)
        return self._tokens
