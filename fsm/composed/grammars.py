"""Makes grammars of expressions: what our automata enforce and match.

    text, regex, json, substring, until, without     leaves: a language each, in automata that know nothing of captures
    sequence, either, repeat, rule                   concatenation, union, repetition, call
    capture                                          what is inside of it

A schema's rules get names of their own, so that two schemas do not meet. A word is read wherever it stands: pieces of
a substring are rules that call the piece after them, in last place, which takes no room of a stack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..algebra import concat, renamed, repeat, union
from ..boolean.resolution import resolve
from ..errors import ConstraintRefused, Limits
from ..language import EMPTY_TEXT, Call, Dfa, Grammar, Language, Literal
from ..marks import up_to, without
from ..regex.parser import parse_regex
from ..schema import SchemaOptions, resolved_schema
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

Leaf = Words | Pattern | Values | Excerpt | UpTo | Without


@dataclass(slots=True)
class ExpressionGrammar:
    """The grammar of an expression, while it is made and afterwards.

    Attributes:
        grammar: without what admits nothing.
        narrowed: (keyword, place, how) where fewer texts are admitted than a schema means; the place is "json" and a
            JSON pointer.
    """

    grammar: Grammar
    narrowed: list[tuple[str, str, str]] = field(default_factory=list)


def expression_grammar(tree: Tree, limits: Limits) -> ExpressionGrammar:
    """Returns the grammar of an expression.

    Raises:
        ConstraintRefused: a part is refused, nothing is admitted, or a rule begins with itself.
    """
    maker = _GrammarMaker(limits)
    start = maker.language(tree.start)
    for name, node in tree.rules.items():
        maker.rules[name] = maker.language(node)
    try:
        return ExpressionGrammar(resolve(Grammar(start, maker.rules), limits), maker.narrowed)
    except ConstraintRefused as error:
        if error.where in tree.rules or any(f"{name!r}" in error.why for name in tree.rules):
            raise ConstraintRefused(
                "a recursive expression begins with itself, and would never take a character; write what comes before "
                "it first, as in '(' + e + ')'"
            ) from None
        raise


def leaf_grammar(node: Leaf, limits: Limits) -> Grammar:
    """Returns the grammar of one leaf. Raises ConstraintRefused."""
    return expression_grammar(Tree(node), limits).grammar


class _GrammarMaker:
    """Makes languages of nodes, and collects their rules."""

    def __init__(self, limits: Limits) -> None:
        self.rules: dict[str, Language] = {}
        self.narrowed: list[tuple[str, str, str]] = []
        self._limits = limits
        self._leaves: dict[Leaf, Language] = {}

    def language(self, node: Node) -> Language:
        match node:
            case Run(parts):
                return concat(map(self.language, parts))
            case Either(options):
                return union(map(self.language, options))
            case Repeated(body, least, most):
                return repeat(self.language(body), least, most)
            case Captured(_, body):
                return self.language(body)
            case Reference(rule):
                return Call(rule)
            case _:
                if node not in self._leaves:
                    self._leaves[node] = self._leaf(node)
                return self._leaves[node]

    def _leaf(self, node: Leaf) -> Language:
        match node:
            case Words(text):
                return Literal(text.encode())
            case Pattern(pattern):
                try:
                    return parse_regex(pattern, self._limits)
                except ConstraintRefused as error:
                    raise type(error)(error.why, where=f"regex {pattern!r}, {error.where}") from None
            case Values():
                return self._values(node)
            case Excerpt(pieces):
                return self._excerpt(pieces)
            case UpTo(mark, among):
                return up_to(mark, self._limits, among)
            case Without(marks):
                return without(marks, self._limits)

    def _values(self, node: Values) -> Language:
        options = SchemaOptions(node.whitespace, key_order=node.key_order)
        try:
            compiled = resolved_schema(node.schema, options, self._limits)
        except ConstraintRefused as error:
            raise type(error)(error.why, where=f"json, {error.where}", keyword=error.keyword) from None
        self.narrowed += [(keyword, f"json {place}", how) for keyword, place, how in compiled.narrowed]
        names = {rule: f"json {len(self._leaves)} {rule}" for rule in compiled.grammar.rules}
        known: dict[int, Language] = {}
        for rule, body in compiled.grammar.rules.items():
            self.rules[names[rule]] = renamed(body, names, known)
        return renamed(compiled.grammar.start, names, known)

    def _excerpt(self, pieces: tuple[str, ...]) -> Language:
        """Returns the runs of pieces, by an automaton with at most two states for each of them."""
        edges = _factors(pieces)
        if all(len(piece) == 1 for piece in pieces):
            taken = tuple(
                tuple((((ord(piece), ord(piece)),), target) for piece, target in sorted(state.items()))
                for state in edges
            )
            some = Dfa((False, *(True for _ in edges)), (taken[0], *taken))
            return Dfa(some.accepting, tuple(_shifted(row) for row in some.edges))
        place = f"substring {len(self._leaves)} "
        for index, state in enumerate(edges):
            following = [concat((Literal(piece.encode()), Call(f"{place}{target}"))) for piece, target in state.items()]
            self.rules[f"{place}{index}"] = union((*following, *(() if index == 0 else (EMPTY_TEXT,))))
        return Call(f"{place}0")


_Row = tuple[tuple[tuple[tuple[int, int], ...], int], ...]


def _shifted(row: _Row) -> _Row:
    """Makes room for a start of its own before all other states: the empty text is no excerpt."""
    return tuple((ranges, target + 1) for ranges, target in row)


def _factors(pieces: tuple[str, ...]) -> list[dict[str, int]]:
    """Returns the edges of the factor automaton of a sequence (Blumer et al., 1985): state → piece → next state.

    State 0 is before anything; every state is an end.
    """
    edges: list[dict[str, int]] = [{}]
    links, lengths = [-1], [0]
    last = 0
    for piece in pieces:
        new = len(edges)
        edges.append({})
        lengths.append(lengths[last] + 1)
        links.append(0)
        at = last
        while at >= 0 and piece not in edges[at]:
            edges[at][piece] = new
            at = links[at]
        if at >= 0:
            target = edges[at][piece]
            if lengths[at] + 1 == lengths[target]:
                links[new] = target
            else:
                clone = len(edges)
                edges.append(dict(edges[target]))
                lengths.append(lengths[at] + 1)
                links.append(links[target])
                while at >= 0 and edges[at].get(piece) == target:
                    edges[at][piece] = clone
                    at = links[at]
                links[target] = links[new] = clone
        last = new
    return edges
