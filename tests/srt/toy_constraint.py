"""A constraint that is a list of texts, for tests of the runtime around constraints: brute force, and plainly right."""

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray
from umbel.fsm.errors import ConstraintRefused, LimitExceeded
from umbel.fsm.tokens.masks import Mask
from umbel.fsm.tokens.vocabulary import pack
from umbel.srt.constraints.matcher import ImmediateExecutor, MatcherCache
from umbel.srt.core.messages import EngineConstraint
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
Encode = Callable[[str], list[int]]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, first=False)


def _encode(data: bytes) -> list[int]:
    """As `encode`, for bytes that may begin inside a character."""
    return [TOKENIZER._ids[piece] for piece in TOKENIZER._split.findall(data)]


def texts(*allowed: str, cost: int = 0) -> EngineConstraint:
    """`cost`: fuel that each new mask takes."""
    data = msgspec.msgpack.encode([cost, *allowed])
    return EngineConstraint(data.hex(), "fsm", "regex", data)


class ToyState:
    def __init__(self, toy: "ToyConstraint", said: bytes) -> None:
        self._toy = toy
        self._tokens: list[int] = []
        self._said = said
        self._paid = 0

    @property
    def _text(self) -> bytes:
        return self._said + b"".join(map(TOKENIZER.token_bytes, self._tokens))

    @property
    def _open(self) -> list[bytes]:
        """What may follow, each whole."""
        text = self._text
        return [full[len(text) :] for full in self._toy.allowed if full.startswith(text)]

    @property
    def accepting(self) -> bool:
        return b"" in self._open

    @property
    def finished(self) -> bool:
        return self._ended or self._open == [b""]

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in TOKENIZER.eos_ids

    @property
    def _allowed(self) -> list[int]:
        rest = self._open
        some = [
            t
            for t in range(TOKENIZER.vocab_size)
            if (b := TOKENIZER.token_bytes(t)) and any(r.startswith(b) for r in rest)
        ]
        return some + (sorted(TOKENIZER.eos_ids) if self.accepting else [])

    @property
    def mask(self) -> NDArray[np.uint32]:
        assert self._paid >= self._toy.cost, "the mask was not prepared"
        bits = np.zeros((TOKENIZER.vocab_size + 31) // 32 * 32, dtype=np.uint8)
        bits[self._allowed] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @property
    def few(self) -> NDArray[np.int32] | None:
        assert self._paid >= self._toy.cost, "the mask was not prepared"
        return np.array(self._allowed, dtype=np.int32)

    def prepare(self, fuel: int) -> int | None:
        if self._toy.cost < 0:
            raise LimitExceeded("too many states")
        needed = self._toy.cost - self._paid
        self._paid += min(needed, fuel)
        return fuel - needed if needed <= fuel else None

    def advance(self, token: int) -> None:
        if token not in self._allowed:
            raise ConstraintRefused(f"token {token} is not allowed behind {self._text!r}")
        self._tokens.append(token)
        self._paid = 0

    def rollback(self, tokens: int) -> None:
        del self._tokens[len(self._tokens) - tokens :]

    roomy = True

    def copy(self) -> "ToyState":
        copied = ToyState(self._toy, self._said)
        copied._tokens, copied._paid = self._tokens.copy(), self._paid
        return copied

    def forced_tokens(self) -> list[int]:
        """The common beginning of all that may follow, but for the last token, which might grow."""
        rest = self._open
        common = next((i for i, c in enumerate(zip(*rest)) if len(set(c)) > 1), min(map(len, rest)))  # noqa: B905
        return _encode(rest[0][:common])[: None if len(rest) == 1 else -1]

    def closing_tokens(self) -> list[int]:
        return [] if self._ended else _encode(min(self._open, key=lambda rest: (len(rest), rest)))

    @property
    def closing_bound(self) -> int:
        return 0 if self._ended else min(map(len, self._open))

    @property
    def endings(self) -> NDArray[np.uint32] | None:
        return self._toy.endings if self._tokens and self.accepting and not self._ended else None

    @property
    def begins_more(self) -> bool:
        """The shortest end before the last token is the end of the shortest one behind it."""
        before = ToyState(self._toy, self._said)
        before._tokens = self._tokens[:-1]
        if not self._tokens or self._ended:
            return False
        end, now = (_spelled(state.closing_tokens()) for state in (before, self))
        return len(now) > len(end) and now.endswith(end) and len(self._open) > 1


def _spelled(tokens: list[int]) -> bytes:
    return b"".join(map(TOKENIZER.token_bytes, tokens))


class ToyConstraint:
    """`endings`: tokens that end a complete text without being a part of it."""

    endings: NDArray[np.uint32] | None = None

    def __init__(self, cost: int, allowed: list[str]) -> None:
        if not allowed:
            raise ConstraintRefused("it admits nothing")
        self.cost = cost
        self.allowed = [text.encode() for text in allowed]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.allowed))

    @property
    def minimum_tokens(self) -> int:
        return len(self.begin().closing_tokens())

    def begin(self, context: bytes = b"", said: bytes = b"") -> ToyState:
        return ToyState(self, said)

    def healing(self, said: bytes) -> "ToyHealing":
        return ToyHealing(self, said)


class ToyHealing:
    def __init__(self, toy: ToyConstraint, said: bytes) -> None:
        spelt = [(token, TOKENIZER.token_bytes(token)) for token in range(TOKENIZER.vocab_size)]
        longer = [(token, data[len(said) :]) for token, data in spelt if data.startswith(said) and data != said]
        self._tokens = [token for token, rest in longer if any(text.startswith(rest) for text in toy.allowed)]

    def prepare(self, fuel: int) -> int:
        return fuel

    @property
    def possible(self) -> bool:
        return bool(self._tokens)

    def mask(self, token: int) -> Mask:
        return Mask.of(pack(np.array([*self._tokens, token], dtype=np.int32), (TOKENIZER.vocab_size + 31) // 32))


class ToyOpener:
    eos_ids = TOKENIZER.eos_ids
    jumps_cut = 0

    def prepare(self) -> None:
        pass

    def prepare_llguidance(self) -> None:
        pass

    def open(self, compiled: EngineConstraint) -> ToyConstraint:
        cost, *allowed = msgspec.msgpack.decode(compiled.data)
        return ToyConstraint(cost, allowed)


def toy_shelf(entries: int = 8) -> MatcherCache:
    return MatcherCache(ToyOpener, ImmediateExecutor(), ImmediateExecutor(), entries=entries)
