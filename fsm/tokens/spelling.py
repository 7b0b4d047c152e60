"""Spelling a text in tokens without a tokenizer: as few tokens as the vocabulary allows."""

from __future__ import annotations

from ..automaton.automaton import Automaton
from .trie import END, NO_TOKEN, STEP, TOKEN, Trie


def fewest_tokens(trie: Trie, text: bytes) -> list[int] | None:
    """Tokens that spell the text, as few as possible, of equally few the longest first; None when there are none.

    Works backwards: best[i] = the number of tokens for text[i:].
    """
    best: list[int | None] = [None] * len(text) + [0]
    chosen: list[tuple[int, int]] = [(0, 0)] * len(text)  # the token that begins there, and its length
    for begin in range(len(text) - 1, -1, -1):
        for length, token in tokens_of_prefixes(trie, text, begin):
            rest = best[begin + length]
            so_far = best[begin]
            if rest is not None and (so_far is None or rest + 1 <= so_far):
                best[begin] = rest + 1
                chosen[begin] = (token, length)
    if best[0] is None:
        return None
    tokens, place = [], 0
    while place < len(text):
        token, length = chosen[place]
        tokens.append(token)
        place += length
    return tokens


def fewest_of_any_text(automaton: Automaton, trie: Trie, most_visited: int) -> int:
    """No text of the automaton is spelled in fewer tokens; the fewest of any text where `most_visited` nodes of the
    trie are enough to find it.

    Breadth first: after n rounds all states are known that n tokens lead to.
    """
    columns = trie.columns
    seen = {automaton.start}
    reached = [automaton.start]
    tokens = visited = 0
    while reached and not any(map(automaton.accepting, reached)):
        tokens += 1
        following: dict[int, None] = {}
        for begun in reached:
            states = [begun]  # by depth
            node, end = trie.everything.begin, trie.everything.end
            while node < end:
                visited += 1
                if visited > most_visited:
                    return tokens
                step = columns[3 * node + STEP]
                del states[step >> 8 :]
                state = automaton.step(states[-1], step & 0xFF)
                if state < 0:
                    node = columns[3 * node + END]
                    continue
                if columns[3 * node + TOKEN] != NO_TOKEN and state not in seen:
                    seen.add(state)
                    following[state] = None
                states.append(state)
                node += 1
        reached = list(following)
    return tokens


def tokens_of_prefixes(trie: Trie, text: bytes, begin: int) -> list[tuple[int, int]]:
    """(length, token) of the tokens that text[begin:] begins with, the shortest first; one of each spelling."""
    return [(length, trie.tokens_at(node)[0]) for length, node in nodes_of_prefixes(trie, text, begin, len(text))]


def nodes_of_prefixes(trie: Trie, text: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """(length, node) of what text[begin:end] begins with and tokens spell, the shortest first."""
    found = []
    columns = trie.columns
    node, last = trie.everything.begin, trie.everything.end
    for place in range(begin, end):
        while node < last and columns[3 * node + STEP] & 0xFF != text[place]:
            node = columns[3 * node + END]
        if node >= last:
            break
        if columns[3 * node + TOKEN] != NO_TOKEN:
            found.append((place - begin + 1, node))
        last = columns[3 * node + END]
        node += 1
    return found
