"""Expressions: constraints that are built of parts, given to `gen(constraint=...)`, and matched offline.

    fruit = ul.regex(r"[0-9]+").capture("count") + " " + ul.choice(["apples", "pears"]).capture("kind")
    s += ul.gen("answer", constraint=fruit)          # s["answer"], s["count"], s["kind"]
    fruit.match("3 pears")["kind"]                   # "pears"

Texts stand for themselves, `+` puts one part after another, `|` admits either. An expression is never changed: every
method returns another one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from ...lang import checks
from ...lang.errors import ConstraintError, ParameterError, shown
from ...lang.generation import ConstraintExpression, Demand, demand_of, pattern_text
from ...lang.ops import MAX_CHOICES, Op, checked_name, refuse_operations
from ...lang.protocol import ConstraintSpec, JsonKeyOrder, JsonWhitespace
from ...lang.result import Captures, Result
from . import nodes
from .nodes import (
    Captured,
    Either,
    Excerpt,
    Node,
    Pattern,
    Reference,
    Repeated,
    Run,
    Tree,
    UpTo,
    Values,
    Without,
    Words,
)

MOST_TEXT = 1 << 16  # characters of a literal, and of a text that is quoted from
MOST_PIECES = 4_096  # of a text that is quoted from
MOST_MARKS = 16
LONGEST_MARK = 64  # characters

_TEXT = Result("text", str)
_PIECES = {"characters": re.compile(r"(?s:.)"), "words": re.compile(r"\s*\S+|\s+"), "lines": re.compile(r".*\n|.+")}
_RULES = itertools.count(1)  # names rules apart until `Expression.source` numbers them


class Expression(ConstraintExpression):
    """A constraint built of parts, for `gen(constraint=...)`, and to match texts without a backend.

    Made by `ul.regex`, `ul.json`, `ul.choice` and their like, not by its constructor. Texts stand for themselves, `+`
    puts one part after another, `|` admits either. An expression is never changed: methods return another one.

    Args:
        node: says which texts are admitted.
        rules: those that the nodes refer to, by name.
        results: name of each capture → how its text becomes an object.
        result: how the whole text becomes an object; None: it is the text.

    Examples:
        >>> count = ul.regex("[0-9]+").capture("count")
        >>> order = count + " " + ul.choice(["apples", "pears"]).capture("fruit")
        >>> @ul.function
        ... def take(s):
        ...     s += ul.user("What do you want?")
        ...     s += ul.assistant("I take " + ul.gen("order", constraint=order))
        >>> state = take.run(backend=ul.Echo(["3 pears"]))
        >>> state["order"], state["count"], state["fruit"]
        ('3 pears', '3', 'pears')
        >>> order.match("3 pears")["fruit"]
        'pears'
    """

    __slots__ = ("_node", "_result", "_results", "_rules")

    def __init__(
        self,
        node: Node,
        rules: Mapping[str, Node] | None = None,
        results: Mapping[str, Result] | None = None,
        result: Result | None = None,
    ) -> None:
        self._node = node
        self._rules = rules or {}
        self._results = results or {}
        self._result = result

    def __add__(self, other: Expression | str | re.Pattern[str]) -> Expression:
        """Puts another expression after this one; a text stands for itself."""
        return _joined(Run, (self, other))

    def __radd__(self, other: str | re.Pattern[str]) -> Expression:
        return _joined(Run, (other, self))

    def __or__(self, other: Expression | str | re.Pattern[str]) -> Expression:
        """Admits the texts of either; where both fit, this one is read."""
        return _joined(Either, (self, other))

    def __ror__(self, other: str | re.Pattern[str]) -> Expression:
        return _joined(Either, (other, self))

    def repeat(self, low: int = 0, high: int | None = None, *, separator: Expression | str = "") -> Expression:
        """Admits it several times, one after the other.

        Args:
            low: times at least, 0 to 1,048,576.
            high: times at most, as large as that; None: without end.
            separator: a text or expression between two of them.

        Raises:
            ParameterError: counts that are no ints, beyond 1,048,576, or `high` below `low`.

        Examples:
            >>> numbers = ul.regex("[0-9]+").capture("number").repeat(1, 3, separator=", ")
            >>> numbers.match("1, 2")["number"]
            ['1', '2']
        """
        wanted = f"a count up to {nodes.MOST_TURNS}"
        least = checks.integer("repeat(): low", low, 0, nodes.MOST_TURNS, wanted)
        most = None if high is None else checks.integer("repeat(): high", high, 0, nodes.MOST_TURNS, wanted)
        if most is not None and most < least:
            raise ParameterError(f"repeat({least}, {most}): high is below low; write repeat({most}, {least})")
        between = _expression(separator, "separator=")
        if between._node == Words("") or most == 0:
            return self._around(Repeated(self._node, least, most))
        following = between + self
        more = following._around(Repeated(following._node, max(least - 1, 0), None if most is None else most - 1))
        several = self + more
        return several if least else several.optional()

    def optional(self) -> Expression:
        """Admits it, or nothing."""
        return self._around(Repeated(self._node, 0, 1))

    def capture(self, name: str) -> Expression:
        """Gives the text of this part a name: `state[name]`, `match[name]`. Its object, where it is JSON of a type, is
        `value(name)`.

        Args:
            name: of the variable. It holds a list where the part may come several times, or several parts one after
                another have the name.

        Raises:
            ParameterError: no name, or a capture inside has it already.
        """
        known = checked_name(name)
        if known in self._results:
            raise ParameterError(f"capture({known!r}): a part of it has this name already; write another name")
        results = {known: self._result or _TEXT, **self._results}
        return Expression(Captured(known, self._node), self._rules, results, self._result)

    def match(self, text: str) -> ExpressionMatch | None:
        """Reads a whole text; None where the expression does not admit it, from its beginning to its end.

        A text that can be read in several ways is read as by `re`: from left to right, the first option that fits, as
        many turns of a repeat and as much of every other part as leave the rest of the text to the rest.

        Args:
            text: all of it has to fit.

        Returns:
            A match, or None: `match[name]` is what a capture holds, `match.value(name)` its object.

        Raises:
            ParameterError: `text` is no str.
            ConstraintError: the expression itself is wrong, or the text can be read in too many ways.
        """
        if not isinstance(text, str):
            raise ParameterError(f"match({shown(text)}) reads a text; write a str")
        text = checks.plain(text)
        read = self._reader(False)(text)
        return None if read is None else ExpressionMatch(text, read, self._typed())

    def demand(self) -> Demand:
        """Returns the constraint as `gen` sends it. One regular expression, schema or choice becomes what `gen` has for
        it."""
        inside, result = self._node, self._result or _TEXT
        while isinstance(inside, Captured):
            inside = inside.body
        spec = _plain_spec(inside) or ConstraintSpec("expression", self.source)
        captures = captures_of_constraint(spec, self._results)
        if not self._results:
            return Demand(spec, result)
        return Demand(spec, self._judging(captures) if self._result is None else result, captures=captures)

    @property
    def source(self) -> str:
        """The expression as JSON, which travels to a backend. Raises ConstraintError: it is too long or too deep."""
        return nodes.written(self._tree())

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of its captures, in the order in which they stand in it."""
        return tuple(self._results)

    def __repr__(self) -> str:
        return f"Expression({nodes.spelled(self._tree())})"

    def __bool__(self) -> bool:
        raise ParameterError("an expression is neither true nor false; write expr.match(text) is not None, or a | b")

    def _judging(self, captures: Captures) -> Result:
        """Returns the result of the whole text, which the types of parts may refuse by code of their own."""
        types = dict.fromkeys(found.wanted for found in self._results.values() if found.judges)
        if not types:
            return _TEXT

        def parse(text: str) -> str:
            for name, held in (captures.read(text) or {}).items():
                captures.results[name].parse(held)
            return text

        return Result(" and ".join(types), parse, judges=True)

    def _around(self, node: Node) -> Expression:
        """Returns an expression of another node, with the same rules and captures."""
        return Expression(node, self._rules, self._results)

    def _tree(self) -> Tree:
        """Returns the nodes, with rules numbered in the order in which they are first referred to."""
        names: dict[str, str] = {}
        nodes.check(self._node, self._rules)
        start = _renumbered(self._node, names)
        rules: dict[str, Node] = {}
        while len(rules) < len(names):
            old, new = list(names.items())[len(rules)]
            nodes.check(self._rules[old], self._rules)
            rules[new] = _renumbered(self._rules[old], names)
        return Tree(start, rules)

    def _typed(self) -> Mapping[str, Result]:
        """Returns how what `_reader` finds becomes objects: lists of names that may come several times."""
        return _typed(self._tree(), self._results)

    def _reader(self, lenient: bool) -> Callable[[str], Mapping[str, Any] | None]:
        """Returns what reads a text. lenient: JSON may have any blanks, and members in any order."""
        return _reader(self.source, lenient)


def captures_of_constraint(constraint: ConstraintSpec, parts: Mapping[str, Result]) -> Captures:
    """Returns the captures of a constraint that `Expression.demand` has made.

    Args:
        constraint: an expression, or one regular expression, schema or choice, all of which its captures hold.
        parts: name of each capture → how its text becomes an object.

    Raises:
        ConstraintError: the source is no expression.
    """
    if constraint.kind == "expression":
        typed = _typed(nodes.read(constraint.source), parts)
        return Captures(typed, _reader(constraint.source, True), parts)
    names = tuple(parts)
    return Captures(
        {name: _perhaps(found) for name, found in parts.items()}, lambda text: dict.fromkeys(names, text), parts
    )


def _typed(tree: Tree, parts: Mapping[str, Result]) -> Mapping[str, Result]:
    many = nodes.repeating(tree)
    return {name: _several(found) if name in many else _perhaps(found) for name, found in parts.items()}


def _reader(source: str, lenient: bool) -> Callable[[str], Mapping[str, Any] | None]:
    def read(text: str) -> Mapping[str, Any] | None:
        from .reading import captures_of  # numpy and the automata, which building an expression does not need

        found = captures_of(source, text)
        return captures_of(source, text, lenient=True) if found is None and lenient else found

    return read


class ExpressionMatch:
    """A text that an expression admits, and what its captures hold.

    match[name] is a text, None where the text passes that part by, and a list of texts where it may come several times.
    `match.value(name)` has objects in the place of texts, where the part is JSON of a type.
    """

    __slots__ = ("_read", "_results", "text")

    def __init__(self, text: str, read: Mapping[str, Any], results: Mapping[str, Result]) -> None:
        self.text = text
        self._read = read
        self._results = results

    def __getitem__(self, name: str) -> Any:
        if name not in self._read:
            raise ParameterError(f"the expression captures no {shown(name)}; it captures {shown(list(self._read))}")
        return self._read[name]

    def value(self, name: str) -> Any:
        """Returns the object of a capture. Raises ResultError where its type refuses the text."""
        text = self[name]
        return self._results[name].read(name, text, {})

    @property
    def captures(self) -> dict[str, Any]:
        """All names and what they hold."""
        return dict(self._read)

    def __repr__(self) -> str:
        return f"<match of {shown(self.text)}: {shown(dict(self._read))}>"


# ------------------------------------------------------------------------------------------------ what users write

Given = Expression | str | re.Pattern[str]


def literal(text: str) -> Expression:
    """Admits exactly this text. It is needed only where neither side of `+` or `|` is an expression.

    Args:
        text: up to 65,536 characters.

    Examples:
        >>> answer = ul.literal("yes") | "no"
        >>> answer.match("no") is not None, answer.match("maybe") is not None
        (True, False)
    """
    return _expression(text, "literal()")


def regex(pattern: str | re.Pattern[str]) -> Expression:
    """Admits what a regular expression of Python's `re` matches from end to end, as docs/constraints.md says.

    Groups capture nothing here, and what stands around the part is not looked at.

    Args:
        pattern: a text, or a compiled pattern, whose flags count.

    Raises:
        ParameterError: an empty text, a pattern of bytes, or neither text nor pattern. What else is wrong with it
            `match` says, or reading the variable of the `gen`.

    Examples:
        >>> number = ul.regex("[0-9]+")
        >>> version = number.capture("major") + "." + number.capture("minor")
        >>> version.match("3.14")["minor"]
        '14'
        >>> version.match("3.x") is None
        True
    """
    return Expression(Pattern(pattern_text("regex", pattern)))


def json(schema: Any, *, whitespace: JsonWhitespace = "spaced", key_order: JsonKeyOrder = "declared") -> Expression:
    """Admits JSON of a type or schema, as `gen(json_schema=...)` takes it. Captured, it has an object of the type.

    Args:
        schema: a Python type, a schema as a dict, or its JSON text.
        whitespace: blanks: "spaced" writes `{"a": 1, "b": 2}`, "compact" `{"a":1,"b":2}`, "flexible" takes both and
            more.
        key_order: "declared" has the members of an object in the order of the schema, "any" in any order.

    Raises:
        ParameterError: None, a type without a JSON form, or another value of an option.
        ConstraintError: a schema that is no JSON.

    Examples:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Book:
        ...     title: str
        ...     year: int
        >>> cited = "[" + ul.json(Book).capture("book") + "]"
        >>> cited.match('[{"title": "Emma", "year": 1815}]').value("book")
        Book(title='Emma', year=1815)
    """
    if schema is None:
        raise ParameterError("json(None); write a schema, or a type such as list[int]")
    demand = demand_of({"json_schema": schema, "json_whitespace": whitespace, "json_key_order": key_order})
    assert demand is not None, "a schema is given"
    return Expression(Values(demand.spec.source, demand.spec.whitespace, demand.spec.key_order), result=demand.result)


def choice(options: Iterable[Given]) -> Expression:
    """Admits one of the options. Where several fit, the first is read.

    Args:
        options: 1 to 1,024 texts or expressions.

    Raises:
        ParameterError: no list, an empty one, or what is neither text nor expression.

    Examples:
        >>> size = ul.choice(["small", "large", ul.regex("[0-9]+") + " cm"])
        >>> [text for text in ("small", "30 cm", "30") if size.match(text)]
        ['small', '30 cm']
    """
    if isinstance(options, str | Mapping) or not isinstance(options, Iterable):
        raise ParameterError(f"choice({shown(options)}) needs a list of texts or expressions")
    members = checks.members("choice()", options, MAX_CHOICES, "a list of texts or expressions")
    if not members:
        raise ParameterError("choice([]) admits nothing; give at least one option")
    return _joined(Either, [_expression(each, f"choice(options): option {at}") for at, each in enumerate(members)])


def capture(name: str, part: Given) -> Expression:
    """Gives the text of a part a name: `state[name]`, `match[name]`. `part.capture(name)` is the same.

    Args:
        name: of the variable.
        part: a text, a compiled pattern or an expression.

    Raises:
        ParameterError: no name, or a capture inside has it already.

    Examples:
        >>> answer = "Yes" + ul.capture("but", ul.regex(", but .*").optional())
        >>> answer.match("Yes, but later")["but"]
        ', but later'
    """
    return _expression(part, "capture()").capture(name)


def recursive(build: Callable[[Expression], Given]) -> Expression:
    """Admits an expression that contains itself.

    Something has to come before it comes again (it may not begin with itself), and texts nest 64 deep at most.

    Args:
        build: a function that gets the expression, and returns it.

    Raises:
        ParameterError: build is no function, or returns no part of an expression.

    Examples:
        >>> total = ul.recursive(lambda e: ul.regex("[0-9]+") | "(" + e + "+" + e + ")")
        >>> [text for text in ("7", "(1+(2+3))", "(1+2") if total.match(text)]
        ['7', '(1+(2+3))']
    """
    if not callable(build):
        raise ParameterError(f"recursive({shown(build)}) takes a function: ul.recursive(lambda e: 'x' | '(' + e + ')')")
    name = f"rule {next(_RULES)}"
    inside = _expression(build(Expression(Reference(name))), "what recursive()'s function returns")
    return Expression(Reference(name), {**inside._rules, name: inside._node}, inside._results)


def substring(text: str, by: Literal["characters", "words", "lines"] = "characters") -> Expression:
    """Admits what stands somewhere in a text, at least one piece of it: a quotation that cannot be made up.

    A word brings the blanks before it along, a line its end. Write `.optional()` to admit nothing as well.

    Args:
        text: to quote from, up to 65,536 characters and 4,096 pieces.
        by: the pieces that it is cut between: "characters", "words" or "lines".

    Raises:
        ParameterError: another value of `by`, no text, or one that is too long.

    Examples:
        >>> essay = "Venice is sinking by two millimetres a year."
        >>> quote = "It says:" + ul.substring(essay, by="words").capture("quote")
        >>> quote.match("It says: sinking by two")["quote"]
        ' sinking by two'
        >>> quote.match("It says: sinking by three") is None
        True
    """
    checks.one_of("by", by, tuple(_PIECES))
    given = checks.text("substring()", text, MOST_TEXT, "a text to quote from")
    pieces = tuple(_PIECES[by].findall(given))
    if len(pieces) > MOST_PIECES:
        wider = "lines" if by == "words" else "words"
        instead = "quote from a shorter text" if by == "lines" else f'write by="{wider}", or quote from a shorter text'
        raise ParameterError(
            f"substring(): the text has {len(pieces)} {by}, at most {MOST_PIECES} are taken; {instead}"
        )
    _checked_text(given, "substring()")
    return Expression(Excerpt(pieces))


def until(mark: str) -> Expression:
    """Admits any text up to the first mark, and the mark.

    Args:
        mark: 1 to 64 characters.

    Raises:
        ParameterError: no text, or one of another length.

    Examples:
        >>> answer = ul.until("</think>") + ul.choice(["yes", "no"]).capture("answer")
        >>> answer.match("Is it? It is.</think>yes")["answer"]
        'yes'
    """
    known = _checked_mark(mark, "until()")
    return Expression(UpTo(known, (known,)))


def triggered(
    trigger: str | Mapping[str, Given],
    body: Given | None = None,
    end: str = "",
    *,
    required: bool = False,
    once: bool = False,
) -> Expression:
    """Admits free text in which every trigger is followed by a text of `body` and by `end`.

    After the end the text is free again, up to the next trigger.

    Args:
        trigger: a text of 1 to 64 characters, or a dict of up to 16 to what follows each. Free text does not hold it.
        body: a text or expression that follows the trigger; None where `trigger` is a dict.
        end: what follows the body; "" for nothing.
        required: at least one trigger comes.
        once: the text ends after the first body.

    Raises:
        ParameterError: a trigger that another one contains, or no body.

    Examples:
        >>> call = ul.triggered("<tool>", ul.json({"type": "object"}).capture("call"), "</tool>")
        >>> call.match('Let me see. <tool>{"q": "rain"}</tool> It rains.')["call"]
        ['{"q": "rain"}']
        >>> call.match("It rains.")["call"]
        []
    """
    bodies = trigger if isinstance(trigger, Mapping) else {trigger: body}
    if isinstance(trigger, Mapping) and body is not None:
        raise ParameterError("triggered(): with a dict of triggers each has its own body; leave the second one out")
    if not 0 < len(bodies) <= MOST_MARKS:
        raise ParameterError(f"triggered(): {len(bodies)} triggers; write 1 to {MOST_MARKS}")
    marks = tuple(_checked_mark(mark, "triggered()") for mark in bodies)
    for one, other in itertools.permutations(marks, 2):
        if one in other:
            raise ParameterError(f"triggered(): {other!r} contains {one!r}; write triggers that begin differently")
    if any(each is None for each in bodies.values()):
        raise ParameterError('triggered(): nothing is said about what follows; write triggered("<b>", body, "</b>")')
    segment = choice(
        [Expression(UpTo(mark, marks)) + _expression(each, "triggered()") + end for mark, each in bodies.items()]
    )
    for name, switch in (("required", required), ("once", once)):
        checks.switch(name, switch)
    if once:
        return segment if required else segment | Expression(Without(marks))
    return segment.repeat(1 if required else 0) + Expression(Without(marks))


# ------------------------------------------------------------------------------------------------ parts


def _expression(part: object, place: str) -> Expression:
    """Returns a part as an expression. Raises ParameterError; place: names it there."""
    match part:
        case Expression():
            return part
        case str():
            refuse_operations(part, place)
            checks.text(place, part, MOST_TEXT, "a text", empty=True)
            return Expression(Words(_checked_text(checks.plain(part), place)))
        case re.Pattern():
            return regex(part)
        case Op():
            raise ParameterError(
                f"{place}: an expression has no {type(part).__name__.lower()}() inside; give the expression to "
                'gen("name", constraint=...), and name its parts with .capture("name")'
            )
        case type():
            raise ParameterError(f"{place}: {shown(part)} is a type; write ul.json({part.__name__})")
    raise ParameterError(f"{place}: {shown(part)} is no part of an expression; write a text, or an expression")


def _plain_spec(node: Node) -> ConstraintSpec | None:
    """Returns the constraint of a node that `gen` has a kind for; None for any other."""
    match node:
        case Pattern(pattern):
            return ConstraintSpec("regex", pattern)
        case Values(schema, whitespace, key_order):
            return ConstraintSpec("json_schema", schema, whitespace, key_order=key_order)
        case Either(options):
            texts = [each.text for each in options if isinstance(each, Words) and each.text]
            if len(texts) == len(options) == len(set(texts)):
                return ConstraintSpec("choices", msgspec.json.encode(texts).decode())
    return None


def _checked_text(text: str, place: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConstraintError(f"{place}: {shown(text)} has half of a surrogate pair, which no text holds")
    return text


def _checked_mark(mark: object, place: str) -> str:
    return _checked_text(checks.text(place, mark, LONGEST_MARK, 'a mark such as "</think>"'), place)


def _joined(kind: type[Run] | type[Either], parts: Iterable[object]) -> Expression:
    """Puts parts into one node; those that are of its kind themselves are taken apart."""
    name = "+" if kind is Run else "|"
    known = [_expression(part, name) for part in parts]
    members: list[Node] = []
    for each in known:
        inner = nodes.children(each._node) if isinstance(each._node, kind) else (each._node,)
        for node in inner:
            if kind is Run and isinstance(node, Words) and members and isinstance(members[-1], Words):
                members[-1] = Words(members[-1].text + node.text)
            elif not (kind is Run and node == Words("")):
                members.append(node)
    rules: dict[str, Node] = {}
    results: dict[str, Result] = {}
    for each in known:
        rules |= each._rules
        for capture_name, result in each._results.items():
            if results.setdefault(capture_name, result) != result:
                raise ParameterError(
                    f"capture({capture_name!r}): two parts of this name have different types, {result.wanted} and "
                    f"{results[capture_name].wanted}; give each its own name"
                )
    node = members[0] if len(members) == 1 else kind(tuple(members)) if members else Words("")
    return Expression(node, rules, results)


def _renumbered(node: Node, names: dict[str, str]) -> Node:
    """Returns the node with its references renamed; names: old → new, grown by those that are met."""

    def renumber(leaf: Node) -> Node:
        if isinstance(leaf, Reference):
            return Reference(names.setdefault(leaf.rule, f"r{len(names) + 1}"))
        return leaf

    return nodes.rebuilt(node, renumber)


def _perhaps(result: Result) -> Result:
    return Result(result.wanted, lambda text: None if text is None else result.parse(text))


def _several(result: Result) -> Result:
    return Result(f"list of {result.wanted}", lambda texts: [result.parse(text) for text in texts])
