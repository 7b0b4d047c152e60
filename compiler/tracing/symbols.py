"""Symbols: they stand for arguments and variables while a program is traced.

    question + "?"          Concat(Argument question, "?")
    question[:80].strip()   Apply strip(Apply slice(Argument question))
    f"Q: {question}"        a str with a placeholder in it, which the tape finds again
    question == "why"       TraceError: a graph cannot know

A `Symbol` is a str, because programs ask whether values are, and because `"".join` and f-strings take nothing else.
What Python does to its characters without asking it is the tape's to find out. An `Opaque` stands for an object.
"""

import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, Protocol

import msgspec

from ...lang.ops import RecordedText
from ..graph import Node
from ..operations import STR_METHODS, Apply, Argument, Concat, Constant, Object, StreamText, Structure, Variable
from .lines import is_ours


def sources(node: Node) -> list[Node]:
    """Returns the arguments and variables that a value is made of, each once."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node.op, Apply | Concat | Structure):
            waiting.extend(reversed(node.inputs))
        elif not isinstance(node.op, Constant):
            found[node] = None
    return list(found)


def describe(node: Node) -> str:
    """Names the arguments and variables a value comes from, for messages."""
    found = [_called(source) for source in sources(node)]
    return " and ".join(dict.fromkeys(found)) or "a value that was changed"


def _called(node: Node) -> str:
    match node.op:
        case Argument(name):
            return f"argument {name!r}"
        case Variable(name) | Object(name):
            return f"variable {name!r}"
        case StreamText():
            return "the text of the state"
        case _:
            return type(node.op).__name__


def is_text(node: Node) -> bool:
    """Returns whether the value is a text whatever the arguments are: an argument may be of any type, and so may its
    parts."""
    while isinstance(node.op, Apply) and node.op.function in ("item", "multiply", "slice"):
        node = node.inputs[0]
    return not isinstance(node.op, Argument | Object)


def is_of_object(node: Node) -> bool:
    while isinstance(node.op, Apply) and node.op.function == "item":
        node = node.inputs[0]
    return isinstance(node.op, Object)


def members(value: object) -> Iterable[object]:
    """Returns what a value holds, as far as it can be looked into."""
    match value:
        case Mapping():
            return [member for pair in value.items() for member in pair]
        case list() | tuple() | set() | frozenset():
            return value
        case msgspec.Struct():
            return [getattr(value, name) for name in value.__struct_fields__]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, member.name) for member in fields(value)]
        case _ if isinstance(value, type):
            return ()
        case _:
            return list(getattr(value, "__dict__", {}).values())


def is_lazy(value: object) -> bool:
    """Returns whether a value has to be run to be read, and can be once only: a generator, a map, a coroutine."""
    return isinstance(value, Iterator | AsyncIterator) or inspect.isawaitable(value)


class SymbolTape(Protocol):
    """The interface of a trace for its symbols."""

    def apply(self, function: str, node: Node, arguments: tuple[Any, ...] = ()) -> "Symbol": ...

    def item(self, node: Node, key: str | int) -> "Symbol | Opaque": ...

    def concat(self, parts: Iterable[str]) -> "Symbol": ...

    def is_constant(self, value: object) -> bool:
        """Returns whether no symbol is in the value, and no part of one."""

    def looked_at(self, node: Node, how: str) -> NoReturn:
        """Raises TraceError: the program looked at the value with `how`."""


class Symbol(RecordedText):
    """A text that is known when the program runs. Its characters are a placeholder.

    Looking at it raises TraceError: comparing, measuring, searching, splitting, iterating, counting with it, using it
    as a key, a condition or a number. What Python does to text that was built with it is found out if it has changed
    the placeholder. It cannot be found out that a program

    - compares such a text far from where it was put together: `text == x` in another function, or where `text` is set
      in several places; `texts.py` finds the others,
    - uses such a text as a condition or a key of its own dict, puts it into a format (`f"{text:<20}"`), or measures it
      by a function that C code calls (`map(len, texts)`),
    - looks for a symbol in a text that it has computed (`question in text`), or gives one to a method of a text by an
      expression that cannot be looked up (`"yes".find(answer_of(s))`), or in a function without source,
    - asks a symbol whether it `is None` or which type it is, in a function that is no program,
    - pads it by a template that is no literal, next to a tuple (`template % (question,)` with "%10s"),
    - hides the characters, by base64 or a digest, or takes one or two of them out of such a text.
    """

    __slots__ = ("_node", "_tape")
    _node: Node
    _tape: SymbolTape

    def __new__(cls, placeholder: str, tape: SymbolTape, node: Node) -> "Symbol":
        symbol = super().__new__(cls, placeholder)
        symbol._tape = tape
        symbol._node = node
        return symbol

    # -------------------------------------------------------------------------------- text of text

    def __add__(self, other: object) -> Any:  # a Symbol, or what `other` makes of it
        if isinstance(other, str):
            return self._tape.concat((self, other))
        if _is_operand(other):
            return NotImplemented
        self._tape.looked_at(self._node, f"+ of {type(other).__name__}")

    def __radd__(self, other: object) -> Any:
        if isinstance(other, str):
            return self._tape.concat((other, self))
        self._tape.looked_at(self._node, f"{type(other).__name__} +")

    def __mul__(self, times: object) -> Any:
        if type(times) is int:
            return self._tape.apply("multiply", self._node, (times,))
        self._tape.looked_at(self._node, "*")

    __rmul__ = __mul__

    def __getitem__(self, key: object) -> Any:  # a Symbol: what a string, list or dict has there is text
        if is_ours(sys._getframe(1)):
            return str.__getitem__(self, key)  # type: ignore[index]  # our own code slices text to show it
        return _part(self._tape, self._node, key)

    def __format__(self, specification: str) -> str:
        if not specification:
            return self
        if not self._tape.is_constant(specification):
            self._tape.looked_at(self._node, "a format that is made of a symbol")
        return self._tape.apply("format", self._node, (str(specification),))

    def __str__(self) -> str:
        return self if is_text(self._node) else self._tape.apply("str", self._node)

    def __repr__(self) -> str:
        return self._tape.apply("repr", self._node)

    def __rmod__(self, template: str) -> str:
        return _filled(self, template)

    def join(self, texts: Iterable[str], /) -> str:
        joined = list(texts)
        "".join(joined)  # raises what Python says of what is no text
        if len(joined) < 2:
            return joined[0] if joined else ""
        return self._tape.concat([joined[0], *(part for text in joined[1:] for part in (self, text))])

    # -------------------------------------------------------------------------------- itself

    def __copy__(self) -> "Symbol":
        return self

    def __deepcopy__(self, memo: object) -> "Symbol":
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols that a str has none of
            raise AttributeError(name)
        self._tape.looked_at(self._node, f".{name}")


class Opaque:
    """An object that is known when the program runs, of `state.value(name)`. It can be put into text."""

    __slots__ = ("_node", "_tape")

    def __init__(self, tape: SymbolTape, node: Node) -> None:
        self._tape = tape
        self._node = node

    def __getitem__(self, key: object) -> Any:
        return _part(self._tape, self._node, key)

    def __format__(self, specification: str) -> str:
        if not self._tape.is_constant(specification):
            self._tape.looked_at(self._node, "a format that is made of a symbol")
        return self._tape.apply("format", self._node, (str(specification),))

    def __str__(self) -> str:
        return self._tape.apply("str", self._node)

    def __repr__(self) -> str:
        return self._tape.apply("repr", self._node)

    def __copy__(self) -> "Opaque":
        return self

    def __deepcopy__(self, memo: object) -> "Opaque":
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._tape.looked_at(self._node, f".{name}")


def node_of(value: "Symbol | Opaque") -> Node:
    return value._node


def tape_of(value: "Symbol | Opaque") -> SymbolTape:
    return value._tape


# ------------------------------------------------------------------------------------------ what keeps provenance


def _is_operand(other: object) -> bool:
    """Returns whether `symbol + other` is for the other to say: operations of the language add up from the right."""
    return hasattr(type(other), "__radd__") and not isinstance(other, int | float | complex)


def _part(tape: SymbolTape, node: Node, key: object) -> Any:
    if isinstance(key, slice):
        bounds = (key.start, key.stop, key.step)
        if all(bound is None or type(bound) is int for bound in bounds):
            return tape.apply("slice", node, bounds)
        tape.looked_at(node, "a slice whose bounds are no constants")
    if isinstance(key, str | int) and not isinstance(key, bool) and tape.is_constant(key):
        return tape.item(node, key)
    tape.looked_at(node, "an item whose place is no constant")


_DIRECTIVE = re.compile(r"%(?P<flags>[-#0 +]*)(?P<width>[0-9]*)(?:\.(?P<precision>[0-9]+))?(?P<kind>[sra%])")

_CONVERSIONS = {"s": "str", "r": "repr", "a": "ascii"}


def _filled(symbol: Symbol, template: str) -> str:
    """Computes `template % symbol`: at most one directive takes it."""
    tape, node = symbol._tape, symbol._node
    texts: list[str] = []
    end = 0
    for found in _DIRECTIVE.finditer(template):
        texts.append(template[end : found.start()])
        end = found.end()
        texts.append("%" if found["kind"] == "%" else _directed(symbol, found))
    texts.append(template[end:])
    taken = sum(found["kind"] != "%" for found in _DIRECTIVE.finditer(template))
    if taken != 1 or any("%" in text for text in texts[::2]):
        tape.looked_at(node, f"{template!r} %")
    return tape.concat(texts)


def _directed(symbol: Symbol, found: "re.Match[str]") -> str:
    plain = not found["width"] and not found["precision"]
    if plain and found["kind"] == "s":
        return symbol
    shown = symbol._tape.apply(_CONVERSIONS[found["kind"]], symbol._node)
    if plain:
        return shown
    side = "<" if "-" in found["flags"] else ">"
    precision = f".{found['precision']}" if found["precision"] else ""
    return shown._tape.apply("format", shown._node, (f"{side}{found['width']}{precision}",))


def _keeping(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def keep(self: Symbol, /, *arguments: Any, **keywords: Any) -> Any:
        if is_ours(sys._getframe(1)):
            return method(self, *arguments, **keywords)
        method("", *arguments, **keywords)  # raises what Python says of arguments that do not fit
        given = (*arguments, *keywords.values())  # of these methods one takes one keyword
        if not self._tape.is_constant(given):
            self._tape.looked_at(self._node, f".{name}() with a symbol")
        return self._tape.apply(name, self._node, given)

    keep.__name__ = name
    return keep


# ------------------------------------------------------------------------------------------ what is refused

# How messages call an operator.
_OPERATORS = {
    "__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
    "__contains__": "in", "__len__": "len()", "__bool__": "a condition", "__iter__": "iteration",
    "__hash__": "use as a key", "__mod__": "%", "__int__": "int()", "__float__": "float()",
    "__index__": "use as an integer", "__complex__": "complex()", "__round__": "round()", "__trunc__": "int()",
    "__floor__": "floor()", "__ceil__": "ceil()", "__neg__": "-", "__pos__": "+", "__abs__": "abs()",
    "__invert__": "~", "__reversed__": "reversed()", "__sub__": "-", "__truediv__": "/", "__floordiv__": "//",
    "__pow__": "**", "__divmod__": "divmod()", "__matmul__": "@", "__and__": "&", "__or__": "|", "__xor__": "^",
    "__lshift__": "<<", "__rshift__": ">>", "__rsub__": "-", "__rtruediv__": "/", "__rfloordiv__": "//",
    "__rpow__": "**", "__rdivmod__": "divmod()", "__rmatmul__": "@", "__rand__": "&", "__ror__": "|", "__rxor__": "^",
    "__rlshift__": "<<", "__rrshift__": ">>", "__reduce_ex__": "copying", "__setitem__": "setting an item",
    "__delitem__": "del", "__bytes__": "bytes()",
}  # fmt: skip

# What every object has and nothing of it depends on the characters.
_OF_OBJECTS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
_ADDITIONS = {"__add__", "__radd__"}  # of Opaque: its own text has to be asked for


def _refusing(name: str, shown: str) -> Callable[..., Any]:
    plain = getattr(str, name, None)

    def refuse(self: Symbol | Opaque, /, *arguments: Any, **keywords: Any) -> Any:
        if plain is not None and isinstance(self, str) and is_ours(sys._getframe(1)):
            return plain(self, *arguments, **keywords)
        if name == "__bool__" and is_ours(sys._getframe(1)):
            return True
        self._tape.looked_at(self._node, shown)

    refuse.__name__ = name
    return refuse


def _complete() -> None:
    """Returns every method of str, and every operator that Python has: those above, those of `STR_METHODS`, or a
    refusal."""
    for name in STR_METHODS:
        setattr(Symbol, name, _keeping(name))
    methods = {name for name in dir(str) if name not in _OF_OBJECTS and name != "__getnewargs__"}
    for name in {*methods, *_OPERATORS} - set(vars(Symbol)) - {"__reduce__"} | {"__eq__", "__hash__"}:
        setattr(Symbol, name, _refusing(name, _OPERATORS.get(name, f".{name}()")))
    for name in _OPERATORS.keys() | _ADDITIONS | {"__mul__", "__rmul__", "__rmod__"}:
        setattr(Opaque, name, _refusing(name, _OPERATORS.get(name, name.strip("_"))))


_complete()
