"""The rules of a grammar: which are reached, which admit a text, which begin with themselves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..algebra import nullable
from ..errors import ConstraintRefused, Unsupported
from ..folding import children, fold, rebuilt
from ..language import (
    EMPTY_TEXT,
    NOTHING,
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Grammar,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)


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
            settled = settled and (kind is Spelled or kind is AnyOrder)
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


def without_barren_rules(grammar: Grammar, surveys: Surveys) -> Grammar:
    """Without rules that admit nothing, what depends on them, and rules that the start does not reach.

    No node of the grammar shows by its form that it admits nothing, but for whole bodies. `surveys` are those of
    the rules that are reached.

    Raises:
        Unsupported: a rule calls itself before it has taken a byte.
    """
    barren = surveys.keys() - _fruitful(grammar, surveys)
    if barren:
        pruned = {name: _pruned(grammar.rules[name], barren) for name in surveys if name not in barren}
        grammar = Grammar(_pruned(grammar.start, barren), pruned)
        surveys = reached(grammar)
    if _has_cycle(surveys):
        _check_beginnings(grammar, surveys)
    return Grammar(grammar.start, {name: grammar.rules[name] for name in surveys})


def _check_beginnings(grammar: Grammar, surveys: Surveys) -> None:
    empty = _grown(surveys, lambda name, found: _is_empty(grammar.rules[name], found))
    beginnings = {name: _beginnings(grammar.rules[name], empty) for name in surveys}
    clear: set[str] = set()  # rules from which no way back was found
    for name in beginnings:
        seen: set[str] = set()
        pending = [*beginnings[name]]
        while pending:
            at = pending.pop()
            if at not in seen and at not in clear:
                seen.add(at)
                pending += beginnings[at]
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
    """The rules that admit a text. Only a body that calls a rule that is not known to is looked at."""

    def holds(name: str, found: set[str]) -> bool:
        body = grammar.rules[name]
        return body != NOTHING and (surveys[name].calls <= found or _admits(body, found))

    return _grown(surveys, holds)


def _admits(node: Language, fruitful: set[str]) -> bool:
    """Whether some text is admitted, when the rules of the set admit some."""
    if isinstance(node, Call):
        return node.rule in fruitful
    if isinstance(node, Union):
        return any(_admits(option, fruitful) for option in node.options)
    if isinstance(node, Repeat):
        return not node.least or _admits(node.body, fruitful)
    if isinstance(node, AnyOrder):
        inner = (EMPTY_TEXT if _admits(child, fruitful) else NOTHING for child in children(node))
        return rebuilt(node, tuple(inner)) != NOTHING
    return all(_admits(child, fruitful) for child in children(node))


def _is_empty(node: Language, empty: set[str]) -> bool:
    """Whether the empty text is admitted, when the rules of the set admit it."""
    if isinstance(node, Call):
        return node.rule in empty
    if isinstance(node, Concat):
        return all(_is_empty(part, empty) for part in node.parts)
    if isinstance(node, Union):
        return any(_is_empty(option, empty) for option in node.options)
    if isinstance(node, Repeat):
        return not node.least or _is_empty(node.body, empty)
    return nullable(node)


def _beginnings(node: Language, empty: set[str]) -> set[str]:
    """The rules that are called before a byte is taken."""
    found: set[str] = set()
    pending = [node]
    while pending:
        at = pending.pop()
        if isinstance(at, Call):
            found.add(at.rule)
        elif isinstance(at, Concat):
            for part in at.parts:
                pending.append(part)
                if not _is_empty(part, empty):
                    break
        else:
            pending += children(at)
    return found


def _pruned(node: Language, barren: set[str]) -> Language:
    def prune(each: Language, inner: tuple[Language, ...]) -> Language:
        return NOTHING if isinstance(each, Call) and each.rule in barren else rebuilt(each, inner)

    return fold(node, prune, {})
