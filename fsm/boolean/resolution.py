"""Intersections and differences taken out of a grammar, and everything that admits nothing."""

from __future__ import annotations

from ..algebra import both
from ..errors import ConstraintRefused, LimitExceeded
from ..folding import fold, rebuilt
from ..language import EMPTY_TEXT, NOTHING, Both, Dfa, Grammar, Language, Without
from ..limits import Limits
from .character_dfa import determinised
from .length_limits import as_length_limit, with_length
from .rules import reached, survey, without_barren_rules


def resolve(grammar: Grammar, limits: Limits) -> Grammar:
    """The same language without Both and Without, and without what admits nothing.

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
    resolved = without_barren_rules(grammar, surveys)
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
    """One expression without calls, without Both and Without; NOTHING where it admits nothing.

    Raises:
        LimitExceeded: an intersection or a difference is larger than the limits.
    """
    return _Resolver(limits).resolve(language)


class _Resolver:
    """From the leaves up; an operation that stands inside another is left to the outer one, which is one product."""

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
            case Both():
                return _limited(*inner)
            case Without():
                return rebuilt(node, inner)
            case _:
                return rebuilt(node, tuple(map(self._product, inner)))

    def _product(self, node: Language) -> Language:
        if not isinstance(node, Both | Without):
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
    """The intersection, without a product where one side asks for lengths only and counters can say it."""
    for one, other in ((left, right), (right, left)):
        bounds = as_length_limit(one)
        if bounds is not None and (cut := with_length(other, *bounds)) is not None:
            return cut
    return both(left, right)
