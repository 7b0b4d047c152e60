"""The best cache hit rate that any cache and any order could reach on the tokens of a run (Theorem 3.1).

Every edge of the radix tree of the prompts has to be computed once. Three things are counted as they are:

* keys that decoding left behind are there for nothing: an edge on the path of a continuation costs no prompt token,
  except the last sampled token, which was never fed to the model;
* a prompt that equals an earlier one still runs its last token, whose logits are needed;
* what ran before the measured phase (`before`) is in the cache already, as it was in the run.

`srt` has the theorem's bare sum; this is what a run with several phases is compared with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from umbel.lang.prompt import Text
from umbel.srt.prompt_encoder import PromptEncoder

from .recorder import Call, Chosen, Generated

_NEVER_SHARED = -1


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens of one call: what is prompt, and how far behind it keys exist when the call has ended."""

    prompts: tuple[tuple[int, ...], ...]  # one for each continuation, or for each choice
    continuations: tuple[tuple[int, ...], ...] = ()  # prompt and those tokens of the continuation that were fed


@dataclass(slots=True)
class Trie:
    """A tree of tokens with one entry for each token of an edge."""

    nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) → node; the root is 0

    def insert(self, tokens: Iterable[int]) -> list[int]:
        """The nodes on the path of `tokens`, made where they are missing."""
        nodes = self.nodes
        path = []
        node = 0
        for token in tokens:
            node = nodes.setdefault((node, token), len(nodes) + 1)
            path.append(node)
        return path


def sequences_of(calls: Sequence[Call], encoder: PromptEncoder) -> list[Sequences]:
    """The token ids of each call, as the gateway made them: the same encoder on the same parts."""
    result = []
    for call in calls:
        match call:
            case Generated(prompt=prompt, continuations=continuations):
                ids = tuple(encoder.encode(prompt))
                fed = tuple((*ids, *tokens[:-1]) for tokens in continuations)
                result.append(Sequences((ids,) * max(1, len(continuations)), fed))
            case Chosen(prompt=prompt, choices=choices):
                result.append(Sequences(tuple(tuple(encoder.encode((*prompt, Text(c)))) for c in choices)))
    return result


def prompt_tokens(calls: Iterable[Sequences]) -> int:
    return sum(len(prompt) for call in calls for prompt in call.prompts)


def least_computed(calls: Sequence[Sequences], before: Sequence[Sequences] = ()) -> int:
    """The fewest prompt tokens that must be computed for `calls` when `before` is in the cache."""
    trie = Trie()
    free: set[int] = set()  # nodes whose keys cost no prompt token of `calls`
    for call in before:
        for tokens in (*call.prompts, *call.continuations):
            free.update(trie.insert(tokens))
    for call in calls:
        for prompt, fed in zip(call.prompts, call.continuations, strict=False):
            free.update(trie.insert(fed)[len(prompt) :])
    paid: set[int] = set()
    ends: set[int] = set()
    repeats = 0  # prompts whose every key is there, and whose last token runs nevertheless
    for call in calls:
        for prompt in call.prompts:
            path = trie.insert(prompt)
            repeats += path[-1] in free or path[-1] in ends
            paid.update(node for node in path if node not in free)
            ends.add(path[-1])
    return len(paid) + repeats
