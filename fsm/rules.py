"""The rules of a grammar: which are reached, which admit a text, which begin with themselves."""

from collections.abc import Callable, Mapping

from .algebra import fold, nullable, rebuilt
from .errors import ConstraintRefused, Unsupported
from .language import NOTHING, Call, Concat, Grammar, Language, Repeat, Union

Calls = Mapping[str, frozenset[str]]  # rule → the rules that its body calls; called rules before their callers


def without_barren_rules(grammar: Grammar) -> Grammar:
    """Without rules that admit nothing, what depends on them, and rules that the start does not reach.

    Raises:
        ConstraintRefused: a rule is called that does not exist.
    """
    calls = _reached(grammar)
    barren = calls.keys() - _fruitful(grammar, calls)
    if not barren:
        return Grammar(grammar.start, {name: grammar.rules[name] for name in calls})
    pruned = {name: _pruned(grammar.rules[name], barren) for name in calls if name not in barren}
    smaller = Grammar(_pruned(grammar.start, barren), pruned)
    return Grammar(smaller.start, {name: pruned[name] for name in _reached(smaller)})


def check_beginnings(grammar: Grammar) -> None:
    """That no rule calls itself before it has taken a byte.

    Raises:
        Unsupported: one does.
    """
    calls = _reached(grammar)
    if not _has_cycle(calls):
        return
    empty = _grown(calls, lambda name, found: fold(grammar.rules[name], _is_empty_given(found), {}))
    beginnings = {name: fold(body, _beginnings_given(empty), {})[0] for name, body in grammar.rules.items()}
    for name in beginnings:
        seen, pending = set[str](), [*beginnings[name]]
        while pending:
            if (at := pending.pop()) not in seen:
                seen.add(at)
                pending += beginnings[at]
        if name in seen:
            why = f"the rule {name!r} begins with itself; write it so that something is taken before it is called again"
            raise Unsupported(why, keyword="left recursion")


def _called(node: Language) -> frozenset[str]:
    found: set[str] = set()

    def note(each: Language, inner: tuple[None, ...]) -> None:
        if isinstance(each, Call):
            found.add(each.rule)

    fold(node, note, {})
    return frozenset(found)


def _reached(grammar: Grammar) -> dict[str, frozenset[str]]:
    """Depth first, so that a rule comes after those that it calls where calls make no cycle."""
    calls: dict[str, frozenset[str]] = {}
    order: list[str] = []
    pending = [(name, False) for name in sorted(_called(grammar.start))]
    while pending:
        name, left = pending.pop()
        if left:
            order.append(name)
        elif name not in calls:
            if name not in grammar.rules:
                raise ConstraintRefused(f"a rule {name!r} is called, and the grammar has none of this name")
            calls[name] = _called(grammar.rules[name])
            pending.append((name, True))
            pending += [(each, False) for each in sorted(calls[name]) if each not in calls]
    return {name: calls[name] for name in order}


def _has_cycle(calls: Calls) -> bool:
    seen: set[str] = set()
    for name, inner in calls.items():
        if not inner <= seen:
            return True
        seen.add(name)
    return False


def _grown(calls: Calls, holds: Callable[[str, set[str]], bool]) -> set[str]:
    """The least set of rules of which `holds(rule, set)` is true."""
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for name in calls:
            if name not in found and holds(name, found):
                found.add(name)
    return found


def _fruitful(grammar: Grammar, calls: Calls) -> set[str]:
    """The rules that admit a text.

    The nodes of a body admit something but for calls (`algebra.rebuilt` saw to that), so a body is looked at only
    where it calls a rule that is not known to.
    """

    def holds(name: str, found: set[str]) -> bool:
        body = grammar.rules[name]
        return body != NOTHING and (calls[name] <= found or fold(body, _admits_given(found), {}))

    return _grown(calls, holds)


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
