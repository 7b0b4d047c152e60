"""The rules of a grammar: which are reached, which admit a text, which begin with themselves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .algebra import children, fold, nullable, rebuilt
from .errors import ConstraintRefused, Unsupported
from .language import NOTHING, Call, Chars, Concat, Dfa, Grammar, Language, Literal, Repeat, Spelled, Union


@dataclass(frozen=True, slots=True)
class Survey:
    """What one walk over an expression finds."""

    calls: frozenset[str]
    settled: bool  # no intersections and differences, and nothing that shows by its form that it admits nothing


Surveys = Mapping[str, Survey]  # of the rules that are reached; called rules before their callers


def survey(node: Language) -> Survey:
    """Half a microsecond a node, shared ones once."""
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
            settled = settled and kind is Spelled
    return Survey(frozenset(calls), settled)


def reached(grammar: Grammar) -> dict[str, Survey]:
    """The rules that the start reaches, depth first: one comes after those that it calls where calls make no cycle.

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


def without_barren_rules(grammar: Grammar) -> Grammar:
    """Without rules that admit nothing, what depends on them, and rules that the start does not reach.

    No node of the grammar shows by its form that it admits nothing, but for whole bodies.

    Raises:
        ConstraintRefused: a rule is called that does not exist.
        Unsupported: a rule calls itself before it has taken a byte.
    """
    surveys = reached(grammar)
    barren = surveys.keys() - _fruitful(grammar, surveys)
    if barren:
        pruned = {name: _pruned(grammar.rules[name], barren) for name in surveys if name not in barren}
        grammar = Grammar(_pruned(grammar.start, barren), pruned)
        surveys = reached(grammar)
    if _has_cycle(surveys):
        _check_beginnings(grammar, surveys)
    return Grammar(grammar.start, {name: grammar.rules[name] for name in surveys})


def _check_beginnings(grammar: Grammar, surveys: Surveys) -> None:
    empty = _grown(surveys, lambda name, found: fold(grammar.rules[name], _is_empty_given(found), {}))
    beginnings = {name: fold(grammar.rules[name], _beginnings_given(empty), {})[0] for name in surveys}
    for name in beginnings:
        seen, pending = set[str](), [*beginnings[name]]
        while pending:
            if (at := pending.pop()) not in seen:
                seen.add(at)
                pending += beginnings[at]
        if name in seen:
            why = f"the rule {name!r} begins with itself; write it so that something is taken before it is called again"
            raise Unsupported(why, keyword="left recursion")


def _has_cycle(surveys: Surveys) -> bool:
    seen: set[str] = set()
    for name, found in surveys.items():
        if not found.calls <= seen:
            return True
        seen.add(name)
    return False


def _grown(rules: Iterable[str], holds: Callable[[str, set[str]], bool]) -> set[str]:
    """The least set of rules of which `holds(rule, set)` is true."""
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for name in rules:
            if name not in found and holds(name, found):
                found.add(name)
    return found


def _fruitful(grammar: Grammar, surveys: Surveys) -> set[str]:
    """The rules that admit a text.

    A body is looked at only where it calls a rule that is not known to: its other nodes admit something.
    """

    def holds(name: str, found: set[str]) -> bool:
        body = grammar.rules[name]
        return body != NOTHING and (surveys[name].calls <= found or fold(body, _admits_given(found), {}))

    return _grown(surveys, holds)


def _admits_given(fruitful: set[str]) -> Callable[[Language, tuple[bool, ...]], bool]:
    def admits(node: Language, inner: tuple[bool, ...]) -> bool:
        match node:
            case Call(rule):
                return rule in fruitful
            case Union():
                return any(inner)
            case Repeat(_, least):
                return not least or inner[0]
            case _:
                return all(inner)

    return admits


def _is_empty_given(empty: set[str]) -> Callable[[Language, tuple[bool, ...]], bool]:
    """Whether the empty text is admitted, when the rules of the set admit it."""

    def is_empty(node: Language, inner: tuple[bool, ...]) -> bool:
        match node:
            case Call(rule):
                return rule in empty
            case Concat():
                return all(inner)
            case Union():
                return any(inner)
            case Repeat(_, least):
                return not least or inner[0]
            case _:
                return nullable(node)

    return is_empty


Beginning = tuple[frozenset[str], bool]  # the rules that are called before a byte is taken; may it be empty?


def _beginnings_given(empty: set[str]) -> Callable[[Language, tuple[Beginning, ...]], Beginning]:
    is_empty = _is_empty_given(empty)

    def beginnings(node: Language, inner: tuple[Beginning, ...]) -> Beginning:
        found = frozenset({node.rule} if isinstance(node, Call) else ())
        for names, may_be_empty in inner:
            found |= names
            if isinstance(node, Concat) and not may_be_empty:
                break
        return found, is_empty(node, tuple(may_be_empty for _, may_be_empty in inner))

    return beginnings


def _pruned(node: Language, barren: set[str]) -> Language:
    def prune(each: Language, inner: tuple[Language, ...]) -> Language:
        return NOTHING if isinstance(each, Call) and each.rule in barren else rebuilt(each, inner)

    return fold(node, prune, {})
