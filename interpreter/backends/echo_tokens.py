"""Echo's tokenizer, and a prefix cache that counts as a real one does.

A token is a word with the space before it, or one other character. Its id is a checksum of its text,
so that the same text has the same ids in every process.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from ...lang.prompt import Generated, Media, Part, openings, told_apart
from ...lang.protocol import Locate, Located

_TOKEN = re.compile(r" ?\w+|\n|.", re.DOTALL)
_MEDIA_TOKENS = 4


def pieces(text: str) -> list[str]:
    """Splits a text into the texts of its tokens; their concatenation is the text."""
    return _TOKEN.findall(text)


def token_id(piece: str) -> int:
    return zlib.crc32(piece.encode("utf-8", "surrogatepass"))


def token_ids(text: str) -> list[int]:
    return [token_id(piece) for piece in pieces(text)]


def prompt_text(parts: Iterable[Part]) -> str:
    """Returns the text of a prompt, with <image> or <video> for media."""
    return "".join(f"<{part.kind}>" if isinstance(part, Media) else part.text for part in parts)


def prompt_tokens(parts: Iterable[Part]) -> list[tuple[int, str]]:
    """Tokenizes a prompt: (id, text) per token. Generated parts keep their ids."""
    tokens: list[tuple[int, str]] = []
    for part in parts:
        match part:
            case Generated(text, ids):
                texts = pieces(text)
                tokens.extend(zip(ids, texts if len(texts) == len(ids) else [""] * len(ids), strict=True))
            case Media(digest=digest):
                name = told_apart(part)
                tokens.extend((token_id(f"{digest}{i}"), name if i == 0 else "") for i in range(_MEDIA_TOKENS))
            case _:
                tokens.extend((token_id(piece), piece) for piece in pieces(part.text))
    return tokens


Step = int | str  # a token's id, or the name of a private namespace that opens there and is no token


def prompt_path(parts: Sequence[Part], tokens: Iterable[tuple[int, str]]) -> list[Step]:
    """Returns the path of a prompt with these tokens in the cache."""
    path: list[Step] = [token for token, _ in tokens]
    for place, name in reversed(openings("", parts)):
        path.insert(len(prompt_tokens(parts[:place])), name)
    return path


def _tokens_in(path: Iterable[Step]) -> int:
    return sum(isinstance(step, int) for step in path)


def located(question: Locate) -> Located:
    """Returns the character offsets of tokens, and the lengths of common prefixes."""
    tokens = prompt_tokens(question.prompt)
    places = [0, *accumulate(len(text) for _, text in tokens)]
    path = prompt_path(question.prompt, tokens)
    others = [prompt_path(prompt, prompt_tokens(prompt)) for prompt in question.others]
    shared = tuple(
        _tokens_in(step for step, _ in takewhile(_is_same, zip(path, other, strict=False))) for other in others
    )
    return Located(
        question.id, tuple(places[min(token, len(tokens))] for token in question.tokens), len(tokens), shared
    )


def _is_same(steps: tuple[Step, Step]) -> bool:
    return steps[0] == steps[1]


class PrefixCache:
    """The cached prefixes: a tree of tokens as one dict. When it is full it is emptied, except for pinned prefixes.
    There is no clock here, so pins hold until they are released.

    (node, token or private namespace) → node; the root of a salt is a negative node of its own
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next: dict[tuple[int, Step], int] = {}
        self._roots: dict[str, int] = {}
        self._pins: dict[str, tuple[str, Sequence[Step]]] = {}  # name → salt and path
        self._hinted: set[int] = set()  # nodes that a hint put here and no prompt has found yet

    def __len__(self) -> int:
        return len(self._next)

    def match(self, salt: str, path: Sequence[Step]) -> int:
        """Returns the number of cached tokens of this prompt. At least one is always computed: its result is needed.

        What a hint put here counts as computed by the first prompt that finds it, as on a runtime.
        """
        node, matched, most = self._root(salt), 0, max(0, _tokens_in(path) - 1)
        for step in path:
            following = self._next.get((node, step))
            if following is None:
                break
            node = following
            if node in self._hinted:
                self._hinted.discard(node)
                most -= isinstance(step, int)
            else:
                matched += isinstance(step, int)
        return max(0, min(matched, most))

    def insert(self, salt: str, path: Sequence[Step], *, by_hint: bool = False) -> None:
        """Puts a prompt into the cache. `by_hint`: its tokens count as computed by the first prompt that finds them."""
        if len(self._next) + len(path) > self.capacity:
            self._empty()
            for pinned_salt, pinned in self._pins.values():
                self._add(pinned_salt, pinned)
        known = len(self._next)
        self._add(salt, path)
        if by_hint:
            self._hinted.update(range(known + 1, len(self._next) + 1))

    def pin(self, name: str, salt: str, path: Sequence[Step]) -> None:
        """Pins the tokens: they stay when the cache is emptied."""
        self._pins[name] = (salt, path)

    def unpin(self, name: str) -> None:
        self._pins.pop(name, None)

    def clear(self) -> None:
        self._pins.clear()
        self._empty()

    def _add(self, salt: str, path: Sequence[Step]) -> None:
        node = self._root(salt)
        for step in path[: self.capacity]:
            node = self._next.setdefault((node, step), len(self._next) + 1)

    def _empty(self) -> None:
        self._next.clear()
        self._roots.clear()
        self._hinted.clear()

    def _root(self, salt: str) -> int:
        return self._roots.setdefault(salt, -1 - len(self._roots))
