"""Samples texts of a language, and texts that nearly are. Expressions hold no Call, Intersection or Difference."""

import random

from umbel.fsm.language import Chars, Concat, Dfa, Language, Literal, Repeat, Spelled, Union


def sampled(node: Language, dice: random.Random, longest: int) -> bytes:
    """A text of the language. Repeats go at most `longest` beyond their least count."""
    match node:
        case Literal(data):
            return data
        case Chars(ranges):
            first, last = dice.choice(ranges)
            return chr(dice.choice((first, last, dice.randint(first, last)))).encode()
        case Concat(parts):
            return b"".join(sampled(part, dice, longest) for part in parts)
        case Union(options):
            return sampled(dice.choice(options), dice, longest)
        case Repeat(body, least, most):
            count = least + dice.choice((0, 0, 1, 1, 2, 3, longest))
            count = count if most is None else min(count, most)
            return b"".join(sampled(body, dice, max(longest // 2, 2)) for _ in range(count))
        case Dfa():
            return walked(node, dice, longest)
        case Spelled():
            raise NotImplementedError("sample what is meant and spell it")
        case _:
            raise AssertionError(f"{type(node).__name__} has no texts of its own")


def walked(node: Dfa, dice: random.Random, longest: int) -> bytes:
    """Steps at random until an accepting state is met, after about `longest` of them by a shortest way."""
    away = distances(node)
    text, state = b"", 0
    while not (node.accepting[state] and (not node.edges[state] or dice.random() < 2 / (longest + 1))):
        edges = node.edges[state]
        if len(text) > longest:
            if node.accepting[state]:
                break
            edges = tuple(edge for edge in edges if away[edge[1]] < away[state])
        ranges, state = dice.choice(edges)
        text += sampled(Chars(ranges), dice, longest)
    return text


def distances(node: Dfa) -> list[int]:
    """[states]: characters to the next accepting state."""
    away = [0 if accepting else len(node.accepting) for accepting in node.accepting]
    for _ in away:
        away = [
            min([away[state], *(1 + away[target] for _, target in edges)]) for state, edges in enumerate(node.edges)
        ]
    return away


def changed(text: str, dice: random.Random) -> str:
    """A text that differs in a place or two."""
    at = dice.randint(0, len(text))
    other = dice.choice((*text, "a", "Z", "0", " ", "\n", "-", "é", "٣", "\U0001f44d", "\x00"))
    before, after = text[:at], text[at:]
    return dice.choice((before + after[1:], before + other + after, before + other + after[1:], text * 2))
