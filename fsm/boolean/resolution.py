"""Takes intersections and differences out of a grammar, and everything that admits nothing.

`resolve` makes a grammar ready for an automaton. What is left of it was surveyed: which rules are reached, which admit
a text, which begin with themselves.

A pattern together with minLength and maxLength is the most frequent intersection. A product would have a state for
every length; most patterns have one part whose length varies much, and its counter can take the bounds over. `lengths`
bounds the length of the texts of a language, in characters, and `with_length` cuts an expression to texts of certain
lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..algebra import ANY_CHARACTER, ANY_TEXT, children, concat, fold, intersection, nullable, rebuilt, repeat, union
from ..errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from ..language import (
    EMPTY_TEXT,
    NOTHING,
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Difference,
    Grammar,
    Intersection,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)
from .character_automata import determinised

Lengths = tuple[int, int | None]  # least and most; None: without end
_MOST_CHOICES = 16  # of lengths of the parts other than the one whose counter takes the bounds
_ENDLESS = math.inf


def resolve(grammar: Grammar, limits: Limits) -> Grammar:
    """Returns the same language without Intersection and Difference, and without what admits nothing.

    Every node that is left admits some text, every rule is reached from the start, and no rule calls itself before
    a byte is taken: an automaton may rely on it.

    Raises:
        ConstraintRefused: nothing is admitted, a rule is called that does not exist, or one begins with itself.
        LimitExceeded: an intersection or a difference is larger than the limits.
    """
    surveys = reached(grammar)
    if not (survey(grammar.start).settled and all(found.settled for found in surveys.values())):
        resolver = _Resolver(limits)
        rules = {
            name: grammar.rules[name] if found.settled else _resolved_rule(resolver, name, grammar.rules[name])
            for name, found in surveys.items()
        }
        grammar = Grammar(resolver.resolve(grammar.start), rules)
        surveys = reached(grammar)
    resolved = without_useless_rules(grammar, surveys)
    if resolved.start == NOTHING:
        raise NothingAdmitted()
    return resolved


class NothingAdmitted(ConstraintRefused):
    """No text satisfies all that a constraint asks for."""

    def __init__(self) -> None:
        super().__init__("this constraint admits nothing: no text satisfies all that it asks for")


def _resolved_rule(resolver: _Resolver, name: str, language: Language) -> Language:
    """Raises LimitExceeded, with the name of the rule as its place."""
    try:
        return resolver.resolve(language)
    except LimitExceeded as error:
        raise LimitExceeded(error.why, where=error.where or name, keyword=error.keyword) from None


def settled(language: Language, limits: Limits) -> Language:
    """Takes Intersection and Difference out of one expression without calls; NOTHING where it admits nothing.

    Raises:
        LimitExceeded: an intersection or a difference is larger than the limits.
    """
    return _Resolver(limits).resolve(language)


class _Resolver:
    """Resolves from the leaves up; an operation inside another is left to the outer one, which is one product."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[int, Language] = {}
        self._products: dict[int, Language] = {}
        self._alive: list[Language] = []  # ids are of nodes that are not freed

    def resolve(self, node: Language) -> Language:
        self._alive.append(node)
        return self._product(fold(node, self._rebuilt, self._known))

    def _rebuilt(self, node: Language, inner: tuple[Language, ...]) -> Language:
        match node:
            case Intersection():
                return _limited(*inner)
            case Difference():
                return rebuilt(node, inner)
            case _:
                return rebuilt(node, tuple(map(self._product, inner)))

    def _product(self, node: Language) -> Language:
        if not isinstance(node, Intersection | Difference):
            return node
        known = self._products.get(id(node))
        if known is None:
            known = determinised(node, self._limits)
            if isinstance(known, Dfa) and known == Dfa((True,), ((),)):
                known = EMPTY_TEXT
            self._products[id(node)] = known
            self._alive.append(node)
        return known


def _limited(left: Language, right: Language) -> Language:
    """Returns the intersection, without a product where one side asks for lengths only and counters can say it."""
    for one, other in ((left, right), (right, left)):
        bounds = as_length_limit(one)
        if bounds is not None and (cut := with_length(other, *bounds)) is not None:
            return cut
    return intersection(left, right)


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts that one walk over an expression finds."""

    calls: frozenset[str]
    settled: bool  # no intersections and differences, and nothing that shows by its form that it admits nothing


Surveys = Mapping[str, Survey]  # of the rules that are reached; called rules before their callers


def survey(node: Language) -> Survey:
    """Surveys an expression: half a microsecond a node, shared ones once."""
    calls: set[str] = set()
    seen: set[int] = set()
    settled = True
    pending = [node]
    while pending:
        at = pending.pop()
        kind = type(at)
        if kind is Literal or kind is Chars or kind is Dfa or id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, Concat):
            pending += at.parts
        elif isinstance(at, Union):
            pending += at.options
            settled = settled and bool(at.options)
        elif isinstance(at, Repeat):
            pending.append(at.body)
            settled = settled and (at.most is None or at.least <= at.most)
        elif isinstance(at, Call):
            calls.add(at.rule)
        else:
            pending += children(at)
            settled = settled and (kind is Spelled or kind is AnyOrder)
    return Survey(frozenset(calls), settled)


def reached(grammar: Grammar) -> dict[str, Survey]:
    """Finds the rules that the start reaches, depth first: called rules before their callers where there is no cycle.

    Raises:
        ConstraintRefused: a rule is called that does not exist.
    """
    found: dict[str, Survey] = {}
    order: list[str] = []
    pending = [(name, False) for name in sorted(survey(grammar.start).calls)]
    while pending:
        name, left = pending.pop()
        if left:
            order.append(name)
        elif name not in found:
            if name not in grammar.rules:
                raise ConstraintRefused(f"a rule {name!r} is called, and the grammar has none of this name")
            found[name] = survey(grammar.rules[name])
            pending.append((name, True))
            pending += [(each, False) for each in sorted(found[name].calls) if each not in found]
    return {name: found[name] for name in order}


def without_useless_rules(grammar: Grammar, surveys: Surveys) -> Grammar:
    """Removes rules that admit nothing, what depends on them, and rules that the start does not reach.

    No node of the grammar shows by its form that it admits nothing, but for whole bodies. `surveys` are those of
    the rules that are reached.

    Raises:
        Unsupported: a rule calls itself before it has taken a byte.
    """
    nonproductive = surveys.keys() - _productive(grammar, surveys)
    if nonproductive:
        pruned = {name: _pruned(grammar.rules[name], nonproductive) for name in surveys if name not in nonproductive}
        grammar = Grammar(_pruned(grammar.start, nonproductive), pruned)
        surveys = reached(grammar)
    if _has_cycle(surveys):
        _check_left_recursion(grammar, surveys)
    return Grammar(grammar.start, {name: grammar.rules[name] for name in surveys})


def _check_left_recursion(grammar: Grammar, surveys: Surveys) -> None:
    nullable_rules = _grown(surveys, lambda name, found: _is_nullable(grammar.rules[name], found))
    left_corners = {name: _left_corners(grammar.rules[name], nullable_rules) for name in surveys}
    clear: set[str] = set()  # rules from which no way back was found
    for name in left_corners:
        seen: set[str] = set()
        pending = [*left_corners[name]]
        while pending:
            at = pending.pop()
            if at not in seen and at not in clear:
                seen.add(at)
                pending += left_corners[at]
        if name in seen:
            why = f"the rule {name!r} begins with itself; write it so that something is taken before it is called again"
            raise Unsupported(why, keyword="left recursion")
        clear.add(name)


def _has_cycle(surveys: Surveys) -> bool:
    seen: set[str] = set()
    for name, found in surveys.items():
        if not found.calls <= seen:
            return True
        seen.add(name)
    return False


def _grown(rules: Iterable[str], holds: Callable[[str, set[str]], bool]) -> set[str]:
    """Returns the least set of rules of which `holds(rule, set)` is true."""
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for name in rules:
            if name not in found and holds(name, found):
                found.add(name)
    return found


def _productive(grammar: Grammar, surveys: Surveys) -> set[str]:
    """Returns the rules that admit a text. Only a body that calls a rule that is not known to is looked at."""

    def holds(name: str, found: set[str]) -> bool:
        body = grammar.rules[name]
        return body != NOTHING and (surveys[name].calls <= found or _admits(body, found))

    return _grown(surveys, holds)


def _admits(node: Language, productive: set[str]) -> bool:
    """Tells whether some text is admitted, when the rules of the set admit some."""
    if isinstance(node, Call):
        return node.rule in productive
    if isinstance(node, Union):
        return any(_admits(option, productive) for option in node.options)
    if isinstance(node, Repeat):
        return not node.least or _admits(node.body, productive)
    if isinstance(node, AnyOrder):
        inner = (EMPTY_TEXT if _admits(child, productive) else NOTHING for child in children(node))
        return rebuilt(node, tuple(inner)) != NOTHING
    return all(_admits(child, productive) for child in children(node))


def _is_nullable(node: Language, nullable_rules: set[str]) -> bool:
    """Tells whether the empty text is admitted, when the rules of the set admit it."""
    if isinstance(node, Call):
        return node.rule in nullable_rules
    if isinstance(node, Concat):
        return all(_is_nullable(part, nullable_rules) for part in node.parts)
    if isinstance(node, Union):
        return any(_is_nullable(option, nullable_rules) for option in node.options)
    if isinstance(node, Repeat):
        return not node.least or _is_nullable(node.body, nullable_rules)
    return nullable(node)


def _left_corners(node: Language, nullable_rules: set[str]) -> set[str]:
    """Returns the rules that are called before a byte is taken."""
    found: set[str] = set()
    pending = [node]
    while pending:
        at = pending.pop()
        if isinstance(at, Call):
            found.add(at.rule)
        elif isinstance(at, Concat):
            for part in at.parts:
                pending.append(part)
                if not _is_nullable(part, nullable_rules):
                    break
        else:
            pending += children(at)
    return found


def _pruned(node: Language, nonproductive: set[str]) -> Language:
    def prune(each: Language, inner: tuple[Language, ...]) -> Language:
        return NOTHING if isinstance(each, Call) and each.rule in nonproductive else rebuilt(each, inner)

    return fold(node, prune, {})


def lengths(node: Language) -> Lengths | None:
    """Bounds that no text leaves; None where no text exists. Tight but for intersections and differences.

    Of a language without calls.
    """
    match node:
        case Literal(data):
            count = len(data.decode("utf-8", "replace"))
            return count, count
        case Chars():
            return 1, 1
        case Concat(parts):
            return _added([lengths(part) for part in parts])
        case Union(options):
            return _spanned([lengths(option) for option in options])
        case Repeat(body, least, most):
            return _multiplied(lengths(body), least, most)
        case Dfa():
            return _of_automaton(node)
        case Spelled(body):
            inner = lengths(body)
            return inner and (inner[0], None if inner[1] is None else 6 * inner[1])
        case Intersection(left, right):
            return _shared(lengths(left), lengths(right))
        case Difference(left):
            return lengths(left)
        case Call() | AnyOrder():
            raise AssertionError("the texts of a call have a length in their grammar only")


def _added(parts: list[Lengths | None]) -> Lengths | None:
    least, most = 0, 0
    endless = False
    for part in parts:
        if part is None:
            return None
        least += part[0]
        endless |= part[1] is None
        most += part[1] or 0
    return least, None if endless else most


def _spanned(options: list[Lengths | None]) -> Lengths | None:
    some = [option for option in options if option is not None]
    if not some:
        return None
    mosts = [most for _, most in some]
    return min(least for least, _ in some), None if None in mosts else max(most for most in mosts if most is not None)


def _multiplied(body: Lengths | None, least: int, most: int | None) -> Lengths | None:
    if most is not None and most < least:
        return None
    if body is None:
        return None if least else (0, 0)
    if body[1] == 0:
        return 0, 0
    return least * body[0], None if most is None or body[1] is None else most * body[1]


def _shared(left: Lengths | None, right: Lengths | None) -> Lengths | None:
    if left is None or right is None:
        return None
    mosts = [most for most in (left[1], right[1]) if most is not None]
    least, most = max(left[0], right[0]), min(mosts, default=None)
    return None if most is not None and most < least else (least, most)


def _of_automaton(node: Dfa) -> Lengths:
    """Searches breadth first for the least; the longest path where no cycle is, and every state reaches the end."""
    level, seen, least, depth = [0], {0}, None, 0
    while level and least is None:
        if any(node.accepting[state] for state in level):
            least = depth
        level = [target for state in level for _, target in node.edges[state] if target not in seen]
        level = list(dict.fromkeys(level))
        seen.update(level)
        depth += 1
    assert least is not None, "every state of a Dfa reaches an accepting one"
    return least, _longest(node)


def _longest(node: Dfa) -> int | None:
    """Finds the longest path in Kahn's order of the states; None where a cycle is left over."""
    incoming = [0] * len(node.accepting)
    for edges in node.edges:
        for _, target in edges:
            incoming[target] += 1
    longest = [0] * len(incoming)
    ready = [state for state, count in enumerate(incoming) if not count]
    passed = 0
    while ready:
        state = ready.pop()
        passed += 1
        for _, target in node.edges[state]:
            longest[target] = max(longest[target], longest[state] + 1)
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if passed < len(longest):
        return None
    return max(length for length, accepting in zip(longest, node.accepting, strict=True) if accepting)


def as_length_limit(node: Language) -> Lengths | None:
    """Reads least and most off an expression that admits every text of certain lengths and says so by its form."""
    match node:
        case Repeat(body, least, most) if body == ANY_CHARACTER:
            return least, most
        case _:
            return (1, 1) if node == ANY_CHARACTER else None


def with_length(node: Language, least: int, most: int | None) -> Language | None:
    """Returns the texts with at least `least` and at most `most` characters; None where counters cannot say it."""
    if most is not None and most < least:
        return NOTHING
    bounds = lengths(node)
    if bounds is None or (most is not None and bounds[0] > most) or (bounds[1] is not None and bounds[1] < least):
        return NOTHING
    if bounds[0] >= least and (most is None or (bounds[1] is not None and bounds[1] <= most)):
        return node
    match node:
        case Union(options):
            cut = [with_length(option, least, most) for option in options]
            return None if None in cut else union(option for option in cut if option is not None)
        case Concat(parts):
            return _concat_with_length(parts, least, most)
        case Repeat():
            return _repeat_with_length(node, least, most)
        case _:
            return None


def _concat_with_length(parts: tuple[Language, ...], least: int, most: int | None) -> Language | None:
    """Bounds for the part that varies most, for every length that the others together can have.

    https?://.+ of at most 20 characters is http://.{1,13} or https://.{1,12}.
    """
    spans: list[Lengths] = []
    for part in parts:
        bounds = lengths(part)
        assert bounds is not None, "a part without texts leaves the whole without, which was asked before"
        spans.append(bounds)
    main = max(range(len(parts)), key=lambda at: _ENDLESS if (end := spans[at][1]) is None else end - spans[at][0])
    others = [(at, span) for at, span in enumerate(spans) if at != main]
    if any(end is None for _, (_, end) in others):
        return None
    choices = [range(begin, (end or 0) + 1) for _, (begin, end) in others]
    if math.prod(map(len, choices)) > _MOST_CHOICES:
        return None
    options: list[Language] = []
    for lengths_of_others in itertools.product(*choices):
        rest = sum(lengths_of_others)
        exact = [with_length(parts[at], each, each) for (at, _), each in zip(others, lengths_of_others, strict=True)]
        if most is not None and most < rest:
            continue
        cut = with_length(parts[main], max(least - rest, 0), None if most is None else most - rest)
        chosen = [each for each in (*exact[:main], cut, *exact[main:]) if each is not None]
        if len(chosen) < len(parts):
            return None
        options.append(concat(chosen))
    return union(options)


def _repeat_with_length(node: Repeat, least: int, most: int | None) -> Language | None:
    bounds = lengths(node.body)
    if node == ANY_TEXT:
        return repeat(ANY_CHARACTER, least, most)
    if bounds is None:
        return None
    if bounds[0] == bounds[1] and bounds[0] > 0:
        each = bounds[0]
        fewest = max(node.least, -(-least // each))
        allowed = [count for count in (node.most, None if most is None else most // each) if count is not None]
        return NOTHING if allowed and min(allowed) < fewest else repeat(node.body, fewest, min(allowed, default=None))
    if (node.least, node.most) == (0, 1):
        body = with_length(node.body, least, most)
        return None if body is None else union((EMPTY_TEXT, body)) if not least else body
    return None
