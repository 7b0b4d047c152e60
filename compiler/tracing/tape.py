"""The tape of one trace: nodes as they are said, symbols for them, and the way back from text to nodes.

Inside of text that a program builds, a value that is not known yet is a *placeholder*:

    f"Q: {question}"   →   "Q: " + placeholder 0   →   on arrival: the constant "Q: ", then number 0

A placeholder that has been cut, stripped, split, escaped or changed is no longer one, and what is left of it is
recognised, unless it is a character or two from its inside. It is made for that: it has white space at its ends and
inside, letters of both cases, digits, and the punctuation that programs look for; a character that no text has stands
between all of these; its ends are of a kind that no prompt has, either; and a word is repeated that survives where only
ASCII does.
"""

import json
import re
import secrets
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from ...lang import ops
from ...lang.errors import ParameterError, ProgramError, TraceError, UmbelError
from ...lang.state import BaseState, BaseStateGroup
from ..graph import Builder, Line, Node
from ..operations import Apply, Argument, Choose, Concat, Constant, Leaf, Object, Operation, Structure, Variable
from .lines import current_line
from .symbols import Opaque, Symbol, describe, is_lazy, is_of_object, members, node_of, sources, tape_of

_PRIVATE = (0xF0000, 0xFFFFD)  # a plane that no script uses
_WORD_LENGTH = 10
_ENDS = "\u1680"  # white space to Python, and of Ogham inscriptions alone
# What programs strip, split at, replace or escape. Blank lines are what textwrap and inspect rewrite.
_TEMPTATIONS = (
    "\n \t\n", "\r\n", "\n\n\n", "  ", "\t", ", ", ". ", ": ", "; ", "- ", "* ", "# ", '"', "'", "`", "\\n", "\\",
    "/", "|", "&", "<", ">", "=", "+", "~", "^", "@", "!", "?", "$", "%s", "%", "{}", "{", "}", "(", ")", "[", "]",
    "_", "ß", "É", "é", "0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)  # fmt: skip


class Mangled(UmbelError):
    """A text contains a damaged placeholder. Never leaves the compiler.

    `number`: of the placeholder, where that can be told.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__("a placeholder was cut or changed")
        self.number = number


class Placeholders:
    """The placeholders of one trace: numbers → text, and text → the numbers in it."""

    def __init__(self) -> None:
        low, high = _PRIVATE
        self._mark = chr(low + secrets.randbelow(high - low))
        alphabet = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
        self._word = "".join(secrets.choice(alphabet) for _ in range(_WORD_LENGTH))
        mark, word = self._mark, self._word
        self._tail = f"_{mark}{mark.join(_TEMPTATIONS)}{mark}{word}{mark}{_ENDS}"
        self._whole = re.compile(f"{_ENDS}{mark}([0-9]+){mark}{word}_\\1{re.escape(self._tail)}")
        self._numbered = re.compile(f"{mark}([0-9]+){mark}|{word}_([0-9]+)", re.IGNORECASE)
        self._lowered = word.lower()

    def make(self, number: int) -> str:
        return f"{_ENDS}{self._mark}{number}{self._mark}{self._word}_{number}{self._tail}"

    def touches(self, text: str) -> bool:
        """Returns whether a placeholder, or anything that is left of one, is in the text."""
        return self._mark in text or _ENDS in text or self._lowered in str.lower(text)

    def split(self, text: str) -> list[str | int]:
        """Returns the constant texts (none is empty) and the placeholders' numbers, in order.

        Raises:
            Mangled: what is no whole placeholder has a part of one.
        """
        if not self.touches(text):
            return [str.__str__(text)] if text else []  # the characters, also of an enumeration's member
        found: list[str | int] = []
        for index, part in enumerate(self._whole.split(text)):
            if index % 2:
                found.append(int(part))
            elif self.touches(part):
                raise Mangled(self.number(part))
            elif part:
                found.append(part)
        return found

    def parts(self, text: str) -> list[str | None]:
        """Returns the constant texts, and None for placeholders; the beginning and None where one is damaged."""
        try:
            return [part if isinstance(part, str) else None for part in self.split(text)]
        except Mangled:
            beginning = str.partition(text, _ENDS)[0]
            return [None] if self.touches(beginning) or not beginning else [beginning, None]

    def number(self, text: str) -> int | None:
        """Returns the number of the first placeholder in the text, whole or not; None where none can be read."""
        found = self._numbered.search(text)
        return int(found[1] or found[2]) if found is not None else None


_MAX_DEPTH = 64  # of a value that a program builds; deeper ones refer to themselves


class Tape:
    """Records what one trace has seen.

    Args:
        program: its name, for messages.
        defaults: of its parameters, for messages too.
        given: values of variables, which the program reads instead of symbols.
    """

    def __init__(self, program: str, defaults: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> None:
        self._program = program
        self._defaults = defaults
        self._given = given or {}
        self._read: set[str] = set()  # of those
        self.builder = Builder()
        self.closed = False
        self.fault: TraceError | None = None  # the first refusal, also when the program catches it
        self._thread = threading.get_ident()
        self._placeholders = Placeholders()
        self._symbols: dict[Node, Symbol | Opaque] = {}
        self._numbered: list[Node] = []  # placeholder → node

    # -------------------------------------------------------------------------------- nodes

    def node(self, op: Operation, inputs: Iterable[Node] = (), line: Line | None = None) -> Node:
        """Makes a node. Raises TraceError for an operation of the language inside a text that the program computes
        with."""
        if isinstance(op, Constant | Apply):
            try:
                ops.refuse_operations(op.value if isinstance(op, Constant) else op.arguments, "a text")
            except ProgramError as error:
                raise self.refuse(str(error), "operations where they are said: s += ...") from None
        return self.builder.node(op, inputs, current_line() if line is None else line)

    def symbol(self, node: Node) -> Symbol:
        """Returns the text that the node stands for: the same symbol every time."""
        found = self._symbols.get(node)
        if found is None:
            found = Symbol(self._placeholders.make(len(self._numbered)), self, node)
            self._numbered.append(node)
            self._symbols[node] = found
        assert isinstance(found, Symbol), "a node is a text or an object"
        return found

    def opaque(self, node: Node) -> Opaque:
        """Returns the object that the node stands for."""
        found = self._symbols.setdefault(node, Opaque(self, node))
        assert isinstance(found, Opaque), "a node is a text or an object"
        return found

    def is_given(self, name: str) -> bool:
        """Returns whether the program reads a value for the variable, which is the same every time."""
        if name in self._given:
            self._read.add(name)
        return name in self._given

    def given(self, name: str) -> Any:
        """Returns the given object of a variable."""
        return self._given[name]

    def given_text(self, name: str) -> Any:  # a text, or what a join made of texts
        value = self._given[name]
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        return value if isinstance(value, list | None) else str(value)

    def check_given(self) -> None:
        """Raises ParameterError for a value that the program has not read."""
        for name in self.unread():
            raise ParameterError(f"the program {self._program} reads no variable {name!r}; leave its value out")

    def unread(self) -> list[str]:
        """Returns given names that the program has not read so far."""
        return [name for name in self._given if name not in self._read]

    # -------------------------------------------------------------------------------- what symbols ask

    def apply(self, function: str, node: Node, arguments: tuple[Any, ...] = ()) -> Symbol:
        return self.symbol(self.node(Apply(function, arguments), (node,)))

    def item(self, node: Node, key: str | int) -> Symbol | Opaque:
        """Applies an index: a text for an argument, an object for an object."""
        applied = self.node(Apply("item", (key,)), (node,))
        return self.opaque(applied) if is_of_object(node) else self.symbol(applied)

    def concat(self, parts: Iterable[str]) -> Symbol:
        nodes = [piece for part in parts for piece in self.pieces(part)]
        return self.symbol(nodes[0] if len(nodes) == 1 else self.node(Concat(), nodes))

    def is_constant(self, value: object) -> bool:
        return self.inside(value) is None

    def looked_at(self, node: Node, how: str, line: Line | None = None) -> NoReturn:
        """Raises TraceError: the program looks at a value. `line`: where; None for the current one."""
        error = self.refuse_at(
            line or current_line(),
            f"{how} looks at {describe(node)}, which is known only when the program runs; "
            "a graph does the same for every value",
            self._remedy(node),
        )
        variable = next((source for source in sources(node) if isinstance(source.op, Variable | Object)), None)
        if variable is not None:
            error.add_note(
                f"to see the graph for one answer: umbel compile FILE.py:{self._program} --given {_example(variable)}"
            )
        raise error

    def stand_in(self, node: Node) -> str:
        """Returns a text that nothing is known of but what it is made of."""
        found = self._symbols.get(node)
        return found if isinstance(found, Symbol) else self.apply("str", node)

    def damages(self, separator: str) -> bool:
        """Returns whether splitting a text at the separator damages its placeholders, which is found out later."""
        return separator in self._placeholders.make(0)

    def parts(self, text: str) -> list[str | None]:
        """Returns the constants of a text, and None in place of what is known only when the program runs."""
        return self._placeholders.parts(text)

    # -------------------------------------------------------------------------------- from values to nodes

    def pieces(self, text: str) -> list[Node]:
        """Returns the operands of a text: constants and what placeholders stand for. None of an empty text.

        Raises:
            TraceError: a placeholder in it was cut or changed.
        """
        if isinstance(text, Symbol):
            node = self._own(text)
            return list(node.inputs) if isinstance(node.op, Concat) else [node]
        try:
            found = self._placeholders.split(text)
        except Mangled as mangled:
            raise self._mangled(mangled.number) from None
        pieces: list[Node] = []
        for part in found:
            if isinstance(part, str):
                pieces.append(self.node(Constant(part)))
            else:
                node = self._numbered[part]
                pieces += node.inputs if isinstance(node.op, Concat) else (node,)
        return pieces

    def text(self, text: str) -> Node:
        """Makes one node for all of a text."""
        if isinstance(text, Symbol):
            return self._own(text)
        pieces = self.pieces(text)
        match pieces:
            case []:
                return self.node(Constant(""))
            case [one]:
                return one
            case _:
                return self.node(Concat(), pieces)

    def value(self, value: object, what: str) -> Node:
        """Makes a node for anything a program assigns or returns. `what`: it is, for messages."""
        inputs: list[Node] = []
        template = self._template(value, inputs, what, 0)
        match template:
            case Leaf(_):
                return inputs[0]
            case _ if inputs:
                return self.node(Structure(template), inputs)
            case _:
                return self.node(Constant(template))

    def _template(self, value: object, inputs: list[Node], what: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self.refusal(f"{what} is nested more than {_MAX_DEPTH} deep", "keep it flat")
        match value:
            case Symbol() | Opaque():
                return self._leaf(self._own(value), inputs)
            case str():
                return self._leaf(self.text(value), inputs) if self._placeholders.touches(value) else value
            case list() if type(value) is list:
                return [self._template(member, inputs, what, depth + 1) for member in value]
            case tuple() if type(value) is tuple:
                return tuple(self._template(member, inputs, what, depth + 1) for member in value)
            case dict() if type(value) is dict:
                self.check_constant(list(value), f"a key of {what}")
                return {key: self._template(member, inputs, what, depth + 1) for key, member in value.items()}
            case BaseState() | BaseStateGroup():
                raise self.refuse(f"{what} has a state in it", "what it holds: s[name], or s.text()")
            case _ if is_lazy(value):
                raise self.refuse(
                    f"{what} has a {type(value).__name__} in it, which is read once", "list(...) around it"
                )
            case _:
                self.check_constant(value, what)
                return value

    def _leaf(self, node: Node, inputs: list[Node]) -> Leaf:
        inputs.append(node)
        return Leaf(len(inputs) - 1)

    def _own(self, value: Symbol | Opaque) -> Node:
        node = node_of(value)
        if tape_of(value) is not self:
            raise self.refusal(f"{describe(node)} is of another trace", "trace the program anew")
        return node

    # -------------------------------------------------------------------------------- what must not be in values

    def check_constant(self, value: object, what: str) -> None:
        """Raises TraceError for a symbol anywhere in what has to be known now."""
        found = self.inside(value)
        if found is not None:
            raise self.refusal(
                f"{what} has {describe(found)} inside, which is known only when the program runs", self._remedy(found)
            )

    def _inside(self, value: object) -> Iterator[Node]:
        """Yields what symbols in `value` stand for, wherever they are."""
        waiting, seen = [value], set[int]()
        while waiting:
            value = waiting.pop()
            match value:
                case Symbol() | Opaque():
                    yield node_of(value)
                case str():
                    if self._placeholders.touches(value):
                        yield self._numbered_node(self._placeholders.number(value)) or self.node(Constant(""))
                case None | bool() | int() | float() | bytes():
                    continue
                case _ if id(value) not in seen:
                    seen.add(id(value))
                    waiting.extend(members(value))

    def inside(self, value: object) -> Node | None:
        """Returns what a symbol in `value` stands for; None where there is none."""
        return next(self._inside(value), None)

    def shown(self, text: str) -> str:
        """Writes a message with placeholders said in words."""
        try:
            parts = self._placeholders.split(text)
        except Mangled:
            return "a text that was cut or changed"
        return "".join(part if isinstance(part, str) else f"<{describe(self._numbered[part])}>" for part in parts)

    def _numbered_node(self, number: int | None) -> Node | None:
        """Returns what a placeholder stands for; None for one whose number was changed."""
        return self._numbered[number] if number is not None and number < len(self._numbered) else None

    # -------------------------------------------------------------------------------- refusing

    def check_usable(self) -> None:
        """Raises TraceError in another thread, and when the trace is over."""
        if self.closed:
            raise self.refusal("this state was traced, and the trace is over", "run the program for a state to read")
        if threading.get_ident() != self._thread:
            raise self.refusal(
                "another thread uses the state of a program that is being traced",
                "fork() for what goes on in parallel",
            )

    def refuse(self, what: str, instead: str) -> TraceError:
        return self.refusal(what, f"{instead}; or {self._interpreter()}")

    def refusal(self, what: str, instead: str) -> TraceError:
        """Makes the error, with the user's line."""
        return self.refuse_at(current_line(), what, instead)

    def unknown(self, line: Line | None, node: Node | None, what: str) -> TraceError:
        """Makes the error for a value that has to be known while tracing."""
        return self.refuse_at(line, what, self._remedy(node))

    def refuse_at(self, line: Line | None, what: str, instead: str) -> TraceError:
        error = TraceError(f"{line}: {what}. Write {instead}" if line is not None else f"{what}. Write {instead}")
        if self.fault is None:
            self.fault = error
        return error

    def _mangled(self, number: int | None) -> TraceError:
        node = self._numbered_node(number)
        source = f" {describe(node)}" if node is not None else " an argument or a variable"
        return self.refusal(
            f"a text with{source} in it was cut, split, escaped or changed, which takes its characters",
            'the change before the text is put together (f"{q.strip()}" for f"{q} ".strip()); or ' + self._remedy(node),
        )

    def _remedy(self, node: Node | None) -> str:
        found = [] if node is None else [source.op for source in sources(node)]
        argument = next((op.name for op in found if isinstance(op, Argument)), None)
        if argument is None:
            return self._interpreter()
        value = repr(self._defaults[argument]) if argument in self._defaults else "..."
        return f'static_args={{"{argument}": {value}}} to trace for one value of it; or {self._interpreter()}'

    def _interpreter(self) -> str:
        return f"{self._program}.run(...) to run the program with the interpreter"


def _example(variable: Node) -> str:
    """Returns a value that the variable could have, as a shell takes it."""
    assert isinstance(variable.op, Variable | Object), "only variables are asked for"
    setter = variable.inputs[0]
    first = setter.inputs[1].op if isinstance(setter.op, Choose) else None
    value = first.value if isinstance(first, Constant) else "..."
    return shlex.quote(f"{variable.op.name}={json.dumps(value, ensure_ascii=False)}")
