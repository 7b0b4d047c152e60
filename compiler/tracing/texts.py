"""Finds looks of code in C at a text that holds a symbol: `f"Q: {question}".endswith("?")`, `"a, b".find(answer)`.

The profile hook sees the function that is called, and the object that it is a method of, and not its arguments. They
are looked up where the call stands in the source: names in the frame's variables, and texts put together from them. A
call that does the same for every value goes on: `f"Q: {question}".startswith("Q:")`. So does one that damages the
placeholder, which the tape finds.

A comparison is no call. It is found when the symbol in front of it is put into text:

if f"[{answer}]" == "[yes]"           Symbol.__format__ is called here: by the f-string, an operand of ==
tag = f"[{answer}]" ... if tag == x   by one that a name stands for, which the function sets nowhere else

It is not found in other functions, nor for names that are set in several places.
"""

import ast
import builtins
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from types import FrameType, ModuleType
from typing import Any

from ...lang.state import BaseState, BaseStateGroup
from ..graph import Line
from ..operations import STR_METHODS, Constant
from .lines import is_ours, is_users
from .symbols import Opaque, Symbol, node_of
from .tape import Tape

_EDGES = frozenset({"startswith", "endswith", "removeprefix", "removesuffix"})
_STRIPS = frozenset({"strip", "lstrip", "rstrip"})
_SPLITS = frozenset({"split", "rsplit", "partition", "rpartition"})
_PADS = frozenset({"center", "ljust", "rjust", "zfill"})
_SEARCHES = frozenset({"count", "find", "index", "replace", "rfind", "rindex"})
_KINDS = frozenset(name for name in dir(str) if name.startswith("is"))
_OF_TEXTS = _EDGES | _STRIPS | _SPLITS | _PADS | _SEARCHES | _KINDS
_OF_PATTERNS = frozenset({"findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn"})
_OF_DICTS = frozenset({"get", "pop", "setdefault"})
_OF_LISTS = frozenset({"count", "index", "remove"})
_BUILTINS = frozenset({"len", "max", "min", "ord", "sorted"})
_NAMES = _OF_TEXTS | _OF_PATTERNS | _OF_DICTS | _OF_LISTS | _BUILTINS
_UNKNOWN = object()  # an expression that is not looked up

Parts = Sequence[str | None]  # of a text; None for what is known only when the program runs
_Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(slots=True)
class _Source:
    """The syntax of a file.

    Attributes:
        lines: it was read from, as linecache keeps them.
        calls: where they end → calls.
        expressions: their first and last line and column → what puts texts together.
        parents: node → the one around it.
    """

    lines: list[str]
    calls: dict[tuple[int | None, int | None], ast.Call] = field(default_factory=dict)
    expressions: dict[_Position, ast.expr] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            tree = ast.parse("".join(self.lines))
        except (SyntaxError, ValueError, RecursionError):  # no Python: the function was made of something else
            return
        for node in ast.walk(tree):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.Call):
                self.calls[node.end_lineno, node.end_col_offset] = node
            if isinstance(node, ast.JoinedStr | ast.Call | ast.BinOp):
                self.expressions[_place(node)] = node
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.right, ast.Tuple):
                for element in node.right.elts:  # Python makes an f-string of it
                    self.expressions.setdefault(_place(element), node)
            if isinstance(node, ast.FormattedValue) and isinstance(self.parents[node], ast.JoinedStr):
                self.expressions.setdefault(_place(node), self.parents[node])  # type: ignore[arg-type]

    def around(self, node: ast.AST, kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> ast.AST | None:
        """Returns the innermost node of a kind around a node."""
        found = self.parents.get(node)
        while found is not None and not isinstance(found, kinds):
            found = self.parents.get(found)
        return found


def _place(node: ast.expr) -> _Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


class TextLooks:
    """Raises TraceError for looks at the texts of one trace."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._sources: dict[str, _Source] = {}

    # -------------------------------------------------------------------------------- calls

    def check_builtin(self, frame: FrameType, function: Any) -> None:
        """Raises TraceError when a function in C, which `frame` calls, looks at a symbol."""
        name = getattr(function, "__name__", "")
        if name not in _NAMES or is_ours(frame):
            return
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            if name in _OF_TEXTS and (is_users(frame) or self._is_whole(owner)):
                self._check_method(frame, function, owner, name)
        elif is_users(frame):
            self._check_other(frame, function, owner, name)

    def _check_method(self, frame: FrameType, function: Any, owner: str, name: str) -> None:
        given = self._arguments(frame, function)
        looking = given[:1] if name not in _PADS else ()  # replace() puts its second argument into text
        looked = next((value for value in (owner, *looking) if self._touches(value)), None)
        if looked is not None and not self._is_decided(name, owner, given):
            self._refuse(looked, f".{name}()")

    def _check_other(self, frame: FrameType, function: Any, owner: object, name: str) -> None:
        """Checks functions that are no methods of texts."""
        if isinstance(owner, re.Pattern) and name in _OF_PATTERNS:
            place = 1 if name in ("sub", "subn") else 0
            for value in self._arguments(frame, function)[place : place + 1]:
                if isinstance(value, str) and self._touches(value):
                    self._refuse(value, f".{name}()")
        elif (isinstance(owner, dict) and name in _OF_DICTS) or (isinstance(owner, list) and name in _OF_LISTS):
            for value in self._arguments(frame, function)[:1]:
                if self._touches(value) and not self._is_member_decided(value, owner):
                    self._refuse(value, f".{name}()")
        elif owner is builtins and name in _BUILTINS:
            given = self._arguments(frame, function)
            if name in ("max", "min", "sorted") and len(given) == 1 and isinstance(given[0], list | tuple):
                given = given[0] if len(given[0]) > 1 else []
            for value in given:
                if isinstance(value, str) and not isinstance(value, Symbol) and self._touches(value):
                    self._refuse(value, f"{name}()")

    def _arguments(self, frame: FrameType, function: Any) -> Sequence[Any]:
        """Returns the arguments of the call at which a frame is, as far as they can be looked up."""
        source, (_, last, _, column) = self._source(frame), _position(frame)
        call = source.calls.get((last, column))
        match call:
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name == function.__name__:
                first = int(self._value(owner, frame) in (str, dict, list))  # str.find(text, what)
            case ast.Call(func=ast.Name(id=name)) if name == function.__name__:
                first = 0
            case _:
                return (_UNKNOWN,)
        if any(keyword.arg == "key" for keyword in call.keywords):
            return (_UNKNOWN,)  # sorted(texts, key=...): the key looks, not it
        named = [keyword.value for keyword in call.keywords if keyword.arg in ("sep", "maxsplit", "string")]
        return [self._value(value, frame) for value in (*call.args[first:], *named)]

    # -------------------------------------------------------------------------------- comparisons

    def check_formatted(self, frame: FrameType, symbol: Symbol | Opaque) -> None:
        """Raises TraceError when a symbol is put into text by `frame`, now, and that text is compared."""
        if not is_users(frame):
            return
        source = self._source(frame)
        node: ast.AST | None = source.expressions.get(_position(frame))
        if node is None:
            return
        around = source.parents.get(node)
        while isinstance(around, ast.FormattedValue | ast.JoinedStr | ast.BinOp):
            node, around = around, source.parents.get(around)
        text = self._value(node, frame)
        if not isinstance(text, str) or not self._touches(text):
            text = self._tape.stand_in(node_of(symbol))
        match around:
            case ast.Compare():
                self._check_comparison(around, node, frame, text)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.NamedExpr(target=ast.Name(id=name)):
                function = source.around(around, (ast.FunctionDef, ast.AsyncFunctionDef))
                if function is not None:
                    self._check_name(name, function, frame, text)

    def _check_name(self, name: str, function: ast.AST, frame: FrameType, text: str) -> None:
        """Checks the comparisons of a name that the function sets once."""
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
        if sum(not isinstance(node.ctx, ast.Load) for node in names) != 1:
            return
        if any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(function)):
            return
        for node in ast.walk(function):
            if isinstance(node, ast.Compare):
                for operand in (node.left, *node.comparators):
                    if operand in names:
                        self._check_comparison(node, operand, frame, text)

    def _check_comparison(self, comparison: ast.Compare, node: ast.AST, frame: FrameType, text: str) -> None:
        operands = [comparison.left, *comparison.comparators]
        for (left, right), way in zip(pairwise(operands), comparison.ops, strict=True):
            if node in (left, right):
                values = [text if each is node else self._value(each, frame) for each in (left, right)]
                if not self._is_comparison_decided(way, *values):
                    how = {ast.In: "in", ast.NotIn: "not in", ast.Eq: "==", ast.NotEq: "!="}.get(type(way), "<")
                    line = Line(frame.f_code.co_filename, comparison.lineno, frame.f_code.co_name)
                    self._refuse(text, how, line)

    def _is_comparison_decided(self, way: ast.cmpop, left: Any, right: Any) -> bool:
        if isinstance(way, ast.Is | ast.IsNot):
            return True
        if isinstance(way, ast.Eq | ast.NotEq):
            return self._is_member_decided(left, [right])
        if not isinstance(way, ast.In | ast.NotIn) or left is _UNKNOWN or right is _UNKNOWN:
            return False
        if not isinstance(right, str):
            return self._is_member_decided(left, right)
        return isinstance(left, str) and self._is_search_decided(right, left, absence_only=False)

    # -------------------------------------------------------------------------------- what is the same for every value

    def _is_decided(self, name: str, text: str, given: Sequence[Any]) -> bool:
        """Returns whether a method of a text does the same whatever the symbols in it and in its arguments are."""
        first = given[0] if given else None
        if first is _UNKNOWN or (name in _PADS and any(each is _UNKNOWN for each in given)):
            return name in _STRIPS | _SPLITS | _PADS
        if name in _EDGES:
            edges = first if isinstance(first, tuple) else (first,)
            reverse = name in ("endswith", "removesuffix")
            return len(given) == 1 and all(
                isinstance(edge, str) and _is_edge_decided(self._parts(text), self._parts(edge), reverse=reverse)
                for edge in edges
            )
        if name in _STRIPS:
            return self._is_strip_decided(name, self._parts(text), first)
        if name in _SPLITS:
            return first is None or self._is_split_decided(name, text, given)
        if name in _PADS:
            return isinstance(first, int) and sum(len(part or "") for part in self._parts(text)) >= first
        if name == "replace" and self._touches(text) and isinstance(first, str) and self._tape.damages(first):
            return True
        if name in _SEARCHES and isinstance(first, str):
            known = name in ("find", "index") and len(given) == 1
            return self._is_search_decided(text, first, absence_only=not known)
        return False

    def _is_strip_decided(self, name: str, text: Parts, characters: object) -> bool:
        if characters is None or not isinstance(characters, str) or None not in text:
            return characters is None  # white space at the ends of placeholders is found
        if None in self._parts(characters):
            return False
        ends = {"lstrip": [_head(text)], "rstrip": [_tail(text)]}.get(name, [_head(text), _tail(text)])
        return all(end.strip(characters) for end in ends)

    def _is_split_decided(self, name: str, text: str, given: Sequence[Any]) -> bool:
        separator, parts = given[0], self._parts(text)
        if not isinstance(separator, str) or None in self._parts(separator) or None not in parts:
            return isinstance(separator, str) and self._is_search_decided(text, separator, absence_only=True)
        if self._tape.damages(separator):
            return True
        end = _tail(parts) if name.startswith("r") else _head(parts)
        most = 1 if "partition" in name else given[1] if len(given) > 1 else -1
        return isinstance(most, int) and 0 <= most <= end.count(separator)

    def _is_search_decided(self, text: str, what: str, *, absence_only: bool) -> bool:
        """Returns whether it is known where a text is in another; with `absence_only`, whether it is in none."""
        parts, wanted = self._parts(text), self._parts(what)
        if None not in parts:
            return None not in wanted or any(part is not None and part not in text for part in wanted)
        return not absence_only and None not in wanted and (what in _head(parts) or what in _tail(parts))

    def _is_member_decided(self, value: Any, members: Any) -> bool:
        """Returns whether it is known if a value is equal to one of several."""
        if not isinstance(members, dict | list | tuple | set | frozenset):
            return False
        texts = [member for member in members if isinstance(member, str)]
        if value is _UNKNOWN or any(member is _UNKNOWN for member in members):
            return False
        if not isinstance(value, str) or any(str.__eq__(value, text) for text in texts):
            return True
        return not any(_could_equal(self._parts(value), self._parts(text)) for text in texts)

    # -------------------------------------------------------------------------------- looking up

    def _value(self, expression: ast.AST | None, frame: FrameType) -> Any:
        """Returns the value of an expression, without running code of the user's; for one that changes a symbol, a
        symbol that stands for it; `_UNKNOWN` where neither is known."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                for names in (frame.f_locals, frame.f_globals, vars(builtins)):
                    if name in names:
                        return names[name]
            case ast.JoinedStr(values=values):
                return self._joined([self._formatted(value, frame) for value in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._added(self._value(left, frame), self._value(right, frame))
            case ast.BinOp(op=ast.Mod(), right=right):
                return self._changed(right, frame)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return tuple(self._value(element, frame) for element in elements)
            case ast.Await(value=value) | ast.NamedExpr(target=value):
                return self._value(value, frame)
            case ast.Attribute(value=owner, attr=name):
                found = self._value(owner, frame)
                held = {} if isinstance(found, Symbol | Opaque) else getattr(found, "__dict__", {})
                return held.get(name, _UNKNOWN) if isinstance(found, ModuleType) or name in held else _UNKNOWN
            case ast.Subscript(value=owner, slice=key):
                return self._item(self._value(owner, frame), self._value(key, frame))
            case ast.Call(func=ast.Attribute(value=owner, attr="format"), args=[*given]):
                return next(
                    (value for each in (owner, *given) if self._touches(value := self._value(each, frame))), _UNKNOWN
                )
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in STR_METHODS:
                return self._changed(owner, frame)
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                return self._changed(value, frame)
        return _UNKNOWN

    def _changed(self, expression: ast.expr, frame: FrameType) -> Any:
        """Returns a symbol that stands for a changed text: the first one in it."""
        value = self._value(expression, frame)
        node = self._tape.inside(value) if isinstance(value, str | tuple | Opaque) else None
        return _UNKNOWN if node is None else self._tape.stand_in(node)

    def _formatted(self, value: ast.expr, frame: FrameType) -> Any:
        match value:
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                found = self._value(inner, frame)
                return format(found) if type(found) in (int, float, bool) else self._shown(found)
            case ast.FormattedValue(value=inner):
                return self._changed(inner, frame)
            case _:
                return self._value(value, frame)

    def _shown(self, value: object) -> object:
        return self._tape.stand_in(node_of(value)) if isinstance(value, Opaque) else value

    def _added(self, left: Any, right: Any) -> Any:
        if isinstance(left, str) and isinstance(right, str) and (isinstance(left, Symbol) or isinstance(right, Symbol)):
            return self._tape.concat((left, right))
        return self._joined([left, right])

    def _joined(self, values: Sequence[Any]) -> Any:
        """Puts texts together. What is not looked up, next to a symbol, is as little known as the symbol."""
        if len(values) == 1:
            return values[0]
        if all(isinstance(value, str) for value in values):
            return "".join(values)
        found = next((value for value in values if self._touches(value)), None)
        if found is None:
            return _UNKNOWN
        return "".join(value if isinstance(value, str) else found for value in values)

    def _item(self, owner: Any, key: Any) -> Any:
        if isinstance(owner, BaseState) and type(key) is str:
            return owner._sink.read(key, None)  # again: the program has read it just now
        if isinstance(owner, BaseStateGroup) and type(key) is int and key < len(owner):
            return owner[key]
        if isinstance(owner, Symbol | Opaque):
            return owner
        if type(owner) in (list, tuple, dict) and type(key) in (int, str):
            try:
                return owner[key]
            except (LookupError, TypeError):
                return _UNKNOWN
        return _UNKNOWN

    def _source(self, frame: FrameType) -> _Source:
        file = frame.f_code.co_filename
        lines = linecache.getlines(file, frame.f_globals)
        found = self._sources.get(file)
        if found is None or found.lines is not lines:
            found = self._sources[file] = _Source(lines)
        return found

    # -------------------------------------------------------------------------------- texts

    def _touches(self, value: object) -> bool:
        members = value if type(value) is tuple else (value,)
        return any(isinstance(each, str) and not self._tape.is_constant(each) for each in members)

    def _is_whole(self, text: str) -> bool:
        """Returns whether a text holds a symbol that is not damaged, which is found out later."""
        node = self._tape.inside(text)
        return node is not None and not isinstance(node.op, Constant)

    def _parts(self, text: str) -> Parts:
        return self._tape.parts(text)

    def _refuse(self, value: object, how: str, line: Line | None = None) -> None:
        node = self._tape.inside(value)
        assert node is not None, "only texts that hold a symbol are refused"
        self._tape.looked_at(node, how, line)


def _position(frame: FrameType) -> _Position:
    first, last, column, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return first, last, column, end


def _head(parts: Parts) -> str:
    return (parts[0] or "") if parts else ""


def _tail(parts: Parts) -> str:
    return (parts[-1] or "") if parts else ""


def _reversed(parts: Parts) -> Parts:
    return [part if part is None else part[::-1] for part in reversed(parts)]


def _is_edge_decided(text: Parts, edge: Parts, *, reverse: bool) -> bool:
    """Returns whether it is known if a text begins, or ends, with another."""
    if reverse:
        text, edge = _reversed(text), _reversed(edge)
    head, wanted = _head(text), _head(edge)
    common = min(len(head), len(wanted))
    if head[:common] != wanted[:common]:
        return True
    if None in edge:
        return None not in text and len(wanted) > len(head)
    return len(wanted) <= len(head)


def _could_equal(one: Parts, other: Parts) -> bool:
    """Returns whether two texts could be equal for some values."""
    if None not in one and None not in other:
        return list(one) == list(other)
    if None in one and None in other:
        return all(
            not _is_edge_decided(text, [edge, None], reverse=False)
            for text, edge in ((_reversed(one), _tail(other)[::-1]), (one, _head(other)))
        )
    pattern, text = (one, other) if None in one else (other, one)
    written = "".join(".*" if part is None else re.escape(part) for part in pattern)
    return re.fullmatch(written, _head(text), re.DOTALL) is not None
