"""Engines that enforce constraints, with one face: compile a source, then mask and advance along a text."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.engines.selection import Engines, TextState
from umbel.fsm.engines.source import Source
from umbel.fsm.errors import ConstraintRefused, Limits
from umbel.fsm.schema import SchemaOptions, compile_schema
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary

from .data import Item

SPACED, COMPACT = (", ", ": "), (",", ":")
FUEL = 1 << 40


class Refused(Exception):
    """The engine does not honour this constraint; the message says why."""


class Cursor(Protocol):
    """Along one text."""

    def look_ahead(self) -> bool:
        """Whether the next token is known without the model; engines without jumps never know."""

    def make_mask(self) -> None:
        """The work that comes before a token can be sampled."""

    def advance(self, token: int) -> bool:
        """Whether the token was taken."""

    @property
    def accepting(self) -> bool: ...


class Subject(Protocol):
    """One engine over one vocabulary, ready to compile."""

    name: str
    separators: tuple[str, str]

    def compile(self, item: Item) -> Callable[[], Cursor]:
        """Begins texts under a constraint. Raises Refused."""


class OurCursor:
    def __init__(self, state: TextState) -> None:
        self._state = state

    def look_ahead(self) -> bool:
        return bool(self._state.forced_tokens())

    def make_mask(self) -> None:
        self._state.prepare(FUEL)

    def advance(self, token: int) -> bool:
        try:
            self._state.advance(token)
        except ConstraintRefused:
            return False
        return True

    @property
    def accepting(self) -> bool:
        return self._state.accepting


class Umbel:
    """Ours, and llguidance through our own adapter."""

    separators = SPACED

    def __init__(self, name: str, engine: str, masks: Masks, encode: Callable[[str], list[int]]) -> None:
        self.name = name
        self._engine = engine
        self._engines = Engines(masks, encode=encode)

    def compile(self, item: Item) -> Callable[[], Cursor]:
        try:
            constraint = self._engines.open(Source(item.kind, item.source), self._engine)  # type: ignore[arg-type]
        except ConstraintRefused as error:
            raise Refused(str(error)) from error
        return lambda: OurCursor(constraint.begin())


class UmbelAnyOrder(Umbel):
    """Ours, with the keys of objects as they come: for schemas alone."""

    def compile(self, item: Item) -> Callable[[], Cursor]:
        if item.kind != "json_schema":
            raise Refused("keys are of schemas")
        try:
            schema = compile_schema(item.source, SchemaOptions(key_order="any"))
            constraint = self._engines.open_grammar(resolve(schema.grammar, Limits()))
        except ConstraintRefused as error:
            raise Refused(str(error)) from error
        return lambda: OurCursor(constraint.begin())


class Llguidance:
    """The library itself: a matcher a text, over our table of the vocabulary."""

    name = "llguidance"
    separators = SPACED

    def __init__(self, masks: Masks, encode: Callable[[str], list[int]]) -> None:
        from umbel.fsm.engines.llguidance_tokens import LlguidanceTokens

        self._tokens = LlguidanceTokens(masks.vocabulary, masks.trie, encode, slices=None)
        self._words = masks.vocabulary.words

    def compile(self, item: Item) -> Callable[[], Cursor]:
        try:
            matcher = self._tokens.matcher(Source(item.kind, item.source))
        except ConstraintRefused as error:
            raise Refused(str(error)) from error
        return lambda: _LlguidanceCursor(matcher.deep_copy(), self._words)


class _LlguidanceCursor:
    def __init__(self, matcher: Any, words: int) -> None:  # Any: a compiled class
        self._matcher = matcher
        self._bits = np.zeros(words, np.uint32)

    def look_ahead(self) -> bool:
        return False

    def make_mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def advance(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1 and bool(self._matcher.consume_token(token))

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())


class OutlinesCore:
    """Its index over the whole vocabulary, with a byte behind the text that says where it may end."""

    name = "outlines-core"
    separators = COMPACT

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("outlines_core")
        self._schemas = importlib.import_module("outlines_core.json_schema")
        table: dict[bytes, list[int]] = {}
        for token in vocabulary.texts.tolist():
            table.setdefault(vocabulary.token_bytes(token), []).append(token)
        self._end = table.setdefault(b"\0", [len(vocabulary)])[0]
        self._vocabulary = self._library.Vocabulary(vocabulary.eos_ids[0], table)
        self._words = vocabulary.words + 1

    def compile(self, item: Item) -> Callable[[], Cursor]:
        try:
            regex = item.source if item.kind == "regex" else self._schemas.build_regex_from_schema(item.source, "")
            index = self._library.Index(f"(?:{regex})\\x00", self._vocabulary)
        except Exception as error:  # the library raises what its Rust code panics with
            raise Refused(str(error)) from error
        return lambda: _OutlinesCursor(self._library.Guide(index), index, self._end, self._words)


class _OutlinesCursor:
    def __init__(self, guide: Any, index: Any, end: int, words: int) -> None:  # Any: compiled classes
        self._guide = guide
        self._index = index
        self._end = end
        self._bits = np.zeros(words, np.int32)

    def look_ahead(self) -> bool:
        return False

    def make_mask(self) -> None:
        self._guide.write_mask_into(self._bits.ctypes.data, self._bits.size, self._bits.itemsize)

    def advance(self, token: int) -> bool:
        if self._index.get_next_state(self._guide.get_state(), token) is None:
            return False
        self._guide.advance(token, False)
        return True

    @property
    def accepting(self) -> bool:
        return self._index.get_next_state(self._guide.get_state(), self._end) is not None


class Xgrammar:
    """Its matcher; the vocabulary's control tokens are blank, as in ours."""

    name = "xgrammar"
    separators = SPACED

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = importlib.import_module("xgrammar")
        tokens = [vocabulary.token_bytes(token) for token in range(len(vocabulary))]
        info = self._library.TokenizerInfo(
            tokens, self._library.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(vocabulary.eos_ids)
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._size = len(tokens)

    def compile(self, item: Item) -> Callable[[], Cursor]:
        try:
            if item.kind == "regex":
                compiled = self._compiler.compile_regex(item.source)
            else:
                compiled = self._compiler.compile_json_schema(
                    item.source, any_whitespace=False, separators=SPACED, strict_mode=False
                )
        except Exception as error:  # of its C++ code
            raise Refused(str(error)) from error
        return lambda: _XgrammarCursor(self._library, compiled, self._size)


class _XgrammarCursor:
    def __init__(self, library: Any, compiled: Any, size: int) -> None:
        self._matcher = library.GrammarMatcher(compiled, terminate_without_stop_token=False)
        self._bits = library.allocate_token_bitmask(1, size)

    def look_ahead(self) -> bool:
        return False

    def make_mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)

    def advance(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_completed())


def subjects(names: list[str], masks: Masks, encode: Callable[[str], list[int]]) -> tuple[list[Subject], list[str]]:
    """The engines that are installed, and a line about each that is not."""
    makers: dict[str, tuple[str, Callable[[], Subject]]] = {
        "umbel": ("numpy", lambda: Umbel("umbel", "fsm", masks, encode)),
        "umbel-any-order": ("numpy", lambda: UmbelAnyOrder("umbel, any key order", "fsm", masks, encode)),
        "llguidance": ("llguidance", lambda: Llguidance(masks, encode)),
        "outlines-core": ("outlines_core", lambda: OutlinesCore(masks.vocabulary)),
        "xgrammar": ("xgrammar", lambda: Xgrammar(masks.vocabulary)),
    }
    found: list[Subject] = []
    missing = []
    for name in names:
        if name not in makers:
            raise ValueError(f"engine {name!r} is not known; write some of {', '.join(makers)}")
        package, make = makers[name]
        if importlib.util.find_spec(package) is None:
            missing.append(f"{name} is not installed here")
        else:
            found.append(make())
    return found, missing
