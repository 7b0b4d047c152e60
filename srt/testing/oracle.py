"""The oracle model: a runner that verifies the content of its KV cache.

Its "keys" are the token ids themselves, their positions and a fingerprint of the whole history they were computed
from. Every step gathers the prefix of each sequence from its slots and fails loudly (`OracleError`, naming the
position) for a wrong token, a wrong position, a slot that was never written, or a key that was computed after
another prefix. Logits are a hash of the gathered history, so an undetected wrong reuse would still change the text,
and `reference_generate` computes the right text without any cache.

With a `window_pool` it has the same keys once more, in window slots, of which it reads those that a row sees.

With `num_states` it has a recurrent state as well: the sum of the tokens that were fed to it, and how many they are. It
is the fingerprint of the history only if every token was fed once and in order, and the logits are taken from it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import EngineError, RequestError
from ...lang.protocol import FinishReason
from ...lang.sampling import SamplingParams
from ..cache.pool_pages import CopiedPages
from ..cache.state_slots import NO_STATE
from ..core.batch import (
    DUMMY_SLOT,
    PICTURE_BASE,
    Batch,
    Logits,
    PagePart,
    PictureGrid,
    PictureRows,
    PictureSpan,
    RowNeed,
    RowRequests,
    SavedPages,
    WindowPool,
)
from ..core.messages import NO_ADAPTER, EnginePicture
from ..multimodal.sequence import HeldPictures
from ..sampling.sampler import Sampler, SampleRequest, choose_few, gumbel

_REMEMBERED = 1_024  # steps
HIDDEN = 8  # numbers of a hidden state
_LARGEST_VOCABULARY = 1 << 12  # 12 bits of id and 10 of hash: every logit is exact in float32 and unique in its row


class OracleError(EngineError):
    """Raised when the pool differs from what the scheduler says it holds."""


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Computes splitmix64's finalizer, element by element; wraps around as uint64 does."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def histories(token_ids: NDArray[np.integer], *, start: int = 0, adapter: int = NO_ADAPTER) -> NDArray[np.uint64]:
    """Computes fingerprints: entry i is that of tokens [0, i], a running sum of hashes of (token, position, adapter).

    start: the position of the first token.
    """
    ids = np.asarray(token_ids).astype(np.uint64) + np.uint64((adapter + 1) << 32)
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    with np.errstate(over="ignore"):
        return np.cumsum(_mix(ids * np.uint64(0x100000001B3) + _mix(positions)), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class OracleModel:
    """Computes logits of a history, the same on every machine. One token of a row stands out, two more are likely.

    `favourites`: the tokens among which the likely ones are chosen; None: the whole vocabulary. `adapter`: of the
    histories of `reference`.
    """

    vocab_size: int
    favourites: tuple[int, ...] | None = None
    adapter: int = NO_ADAPTER

    def __post_init__(self) -> None:
        assert 2 <= self.vocab_size <= _LARGEST_VOCABULARY, "larger vocabularies could tie"

    def logits(self, fingerprints: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Computes [n] fingerprints → [n, vocab] logits from 0 to 12; no two of a row are equal."""
        ids = np.arange(self.vocab_size, dtype=np.uint64)
        hashed = _mix(_mix(fingerprints)[:, None] ^ _mix(ids)[None, :])
        levels = (hashed >> np.uint64(54)).astype(np.int64)  # 10 bits
        base = levels * _LARGEST_VOCABULARY + ids.astype(np.int64)  # 22 bits: 0 … 4 after scaling
        values = base.copy()
        rows = np.arange(len(fingerprints))
        choices = np.arange(self.vocab_size) if self.favourites is None else np.array(self.favourites)
        for number, bonus in ((1, 8), (2, 6), (3, 5)):
            favoured = choices[(_mix(fingerprints + np.uint64(number)) % np.uint64(len(choices))).astype(np.int64)]
            values[rows, favoured] = np.maximum(values[rows, favoured], base[rows, favoured] + (bonus << 20))
        return (values.astype(np.float64) / (1 << 20)).astype(np.float32)

    def hidden(self, fingerprints: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Computes [n] fingerprints → [n, HIDDEN] hidden states, between -1 and 1."""
        hashed = _mix(_mix(fingerprints)[:, None] ^ _mix(np.arange(HIDDEN, dtype=np.uint64))[None, :])
        return ((hashed >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1.0).astype(np.float32)

    def reference(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Computes next-token logits of a whole sequence, without any cache."""
        row: NDArray[np.float32] = self.logits(histories(np.array(token_ids), adapter=self.adapter)[-1:])[0]
        return row


class OraclePages:
    """Implements `batch.PagePort` on an oracle's pool: a wrong page gives an OracleError, or a wrong text."""

    layout = "oracle"

    def __init__(self, oracle: "OracleRunner") -> None:
        self._oracle = oracle

    def bytes_per_token(self, part: PagePart) -> int:
        return sum(array.itemsize for array in self._oracle.pool(part))

    def save(self, slots: NDArray[np.int32], part: PagePart) -> SavedPages:
        arrays = self._oracle.pool(part)
        return CopiedPages([np.concatenate([array[page].view(np.uint8) for array in arrays]) for page in slots])

    def load(self, slots: NDArray[np.int32], payloads: Sequence[NDArray[np.uint8]], part: PagePart) -> None:
        arrays = self._oracle.pool(part)
        for number, array in enumerate(arrays):
            parts = [np.split(payload, len(arrays))[number].view(array.dtype) for payload in payloads]
            array[slots] = np.concatenate(parts)[-len(slots) :]


class OracleRunner:
    """Implements `batch.Runner` on an OracleModel.

    Args:
        expected: called at every step for the true tokens of each sequence of the batch, in order
            (`Scheduler.planned_tokens`); the slots must hold exactly these. None: no such check.
        picks_tokens: answers rows that need only a token with the token.
        both_ways: rows of a picture attend to all of it.
        num_states: slots of recurrent states, that of zeros included; 0: no such state. Pictures that are attended to
            both ways are no part of it.
        window_pool: the slots of window layers; None: they have none of their own.
    """

    chooser = None
    trie_walk = None

    def __init__(
        self,
        vocab_size: int = 272,
        context_length: int = 4096,
        num_slots: int = 4096,
        *,
        favourites: Iterable[int] | None = None,
        expected: Callable[[], Sequence[NDArray[np.int32]]] | None = None,
        picks_tokens: bool = False,
        both_ways: bool = False,
        num_states: int = 0,
        window_pool: WindowPool | None = None,
    ) -> None:
        assert not (both_ways and num_states), "a state takes one token after the other"
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_slots = num_slots
        self.num_states = num_states
        self.window_pool = window_pool
        self.model = OracleModel(vocab_size, None if favourites is None else tuple(favourites))
        self.expected = expected
        self.picks_tokens = picks_tokens
        self.pictures = OraclePictures(both_ways=both_ways)
        self.pages = None if num_states else OraclePages(self)
        self.batches: deque[int] = deque(maxlen=_REMEMBERED)  # rows of the last steps
        self.clear()

    def facts(self) -> dict[str, str | int]:
        return {"kernels": "oracle"}

    def pool(self, part: PagePart) -> tuple[NDArray[np.generic], ...]:
        """Returns what it keeps by slot, 8 bytes each: its "keys"."""
        if part is PagePart.WINDOWS:
            return (self._window_histories,)
        return (self._tokens, self._positions, self._histories)

    def clear(self) -> None:
        self._tokens = np.full(self.num_slots, -1, dtype=np.int64)
        self._positions = np.full(self.num_slots, -1, dtype=np.int64)
        self._histories = np.zeros(self.num_slots, dtype=np.uint64)
        self._window_histories = np.zeros(0 if self.window_pool is None else self.window_pool.num_slots, np.uint64)
        self._states: list[tuple[int, np.uint64] | None] = [(0, np.uint64(0)), *[None] * (self.num_states - 1)]

    def forward(self, batch: Batch) -> Logits:
        self._check_shape(batch)
        self.batches.append(batch.rows)
        writes = batch.write_slots != DUMMY_SLOT
        written = batch.write_slots[writes]
        if len(np.unique(written)) != len(written):
            raise OracleError("two rows of one step write to the same slot")
        self._tokens[written] = batch.token_ids[writes]
        self._positions[written] = batch.positions[writes]
        # All rows store before any row attends: first every fingerprint is stored, then every sequence is checked.
        fingerprints = []
        spans = []
        first = 0
        for index, count in enumerate(batch.query_lengths.tolist()):
            gathered = self._gather(batch, index)
            fingerprints.append(histories(gathered, adapter=_adapter(batch, slice(first, first + count))))
            spans.append(self.pictures.spans_of(gathered))
            self.pictures.widen(fingerprints[-1], spans[-1])
            rows = slice(first, first + count)
            keep = writes[rows]
            self._histories[batch.write_slots[rows][keep]] = fingerprints[-1][-count:][keep]
            first += count
        self.pictures.check(batch, spans)
        for index, own in enumerate(fingerprints):
            wrong = self._histories[batch.slots[index]] != own
            if wrong.any():
                raise OracleError(
                    f"sequence {index}, position {int(wrong.argmax())}: the key was computed after another prefix"
                )
        if self.window_pool is not None:
            self._check_windows(batch, self.window_pool.reach, fingerprints)
        of_rows = np.concatenate(
            [own[-count:] for own, count in zip(fingerprints, batch.query_lengths.tolist(), strict=True)]
        )
        if self.num_states:
            of_rows = self._feed(batch)
        logits = self.model.logits(of_rows[batch.logit_rows])
        hidden = None
        if batch.hidden_rows is not None:
            hidden = torch.from_numpy(self.model.hidden(of_rows[batch.hidden_rows]))
        if batch.row_requests is None or not self.picks_tokens:
            return Logits.complete(torch.from_numpy(logits), hidden)
        return replace(_answer_picks(logits, batch.row_requests), hidden=hidden)

    def _feed(self, batch: Batch) -> NDArray[np.uint64]:
        """Feeds the rows to the states, run by run, and returns the state after each row."""
        if sum(run.rows for run in batch.states) != batch.rows or any(run.rows < 1 for run in batch.states):
            raise OracleError("the runs of states are not those of the rows")
        states = np.zeros(batch.rows, dtype=np.uint64)
        first = 0
        for run in batch.states:
            rows = slice(first, first + run.rows)
            before = self._states[run.source]
            if before is None:
                raise OracleError(f"row {first} begins with state {run.source}, which was never written")
            if before[0] != batch.positions[first]:
                position = int(batch.positions[first])
                raise OracleError(f"row {first}, position {position}: state {run.source} is after {before[0]} tokens")
            if run.target == NO_STATE:
                raise OracleError(f"row {first} overwrites the state of zeros")
            own = histories(batch.token_ids[rows], start=before[0], adapter=_adapter(batch, rows))
            states[rows] = own + before[1]
            first += run.rows
            self._states[run.target] = (before[0] + run.rows, states[first - 1])
        return states

    def _check_windows(self, batch: Batch, reach: int, fingerprints: Sequence[NDArray[np.uint64]]) -> None:
        """Writes the rows to their window slots, and checks all that rows see there."""
        if batch.window_slots is None or batch.window_write_slots is None:
            raise OracleError("the batch has no slots of window layers")
        counts = batch.query_lengths.tolist()
        of_rows = np.concatenate([own[-count:] for own, count in zip(fingerprints, counts, strict=True)])
        writes = batch.window_write_slots != DUMMY_SLOT
        written = batch.window_write_slots[writes]
        if len(np.unique(written)) != len(written):
            raise OracleError("two rows of one step write to the same window slot")
        self._window_histories[written] = of_rows[writes]
        for index, (own, slots, count) in enumerate(zip(fingerprints, batch.window_slots, counts, strict=True)):
            whole = [start for start, _ in batch.spans[index]] if batch.spans else []
            first = max(0, min(len(own) - count - reach + 1, *whole, len(own)))
            seen = slots[first:]
            wrong = (self._window_histories[seen] != own[first:]) | (seen == DUMMY_SLOT)
            if len(slots) != len(own) or wrong.any():
                position = first + int(wrong.argmax())
                raise OracleError(f"sequence {index}, position {position}: window slot {int(slots[position])} is wrong")

    def _gather(self, batch: Batch, index: int) -> NDArray[np.int64]:
        """Gathers the tokens in the sequence's slots, checked against its own rows and its positions."""
        slots = batch.slots[index]
        tokens, positions = self._tokens[slots], self._positions[slots]
        wrong = positions != np.arange(len(slots))
        if wrong.any():
            position = int(wrong.argmax())
            held = int(positions[position])
            what = "nothing" if held < 0 else f"the key of position {held}"
            raise OracleError(f"sequence {index}, position {position}: slot {int(slots[position])} holds {what}")
        first = int(batch.query_lengths[:index].sum())
        truth = batch.token_ids[first : first + int(batch.query_lengths[index])]
        start = len(slots) - len(truth)
        if self.expected is not None:
            truth, start = self.expected()[index].astype(np.int64), 0
        wrong = tokens[start:] != truth
        if wrong.any():
            position = start + int(wrong.argmax())
            raise OracleError(
                f"sequence {index}, position {position}: the slot holds token {int(tokens[position])},"
                f" the sequence has {int(truth[position - start])}"
            )
        return tokens

    def _check_shape(self, batch: Batch) -> None:
        """Checks that the arrays of the batch agree."""
        if (
            not len(batch.query_lengths) == len(batch.prefix_lengths) == len(batch.slots)
            or (batch.query_lengths < 1).any()
        ):
            raise OracleError("a batch needs at least one row and one prefix length for each sequence")
        if not len(batch.token_ids) == len(batch.positions) == len(batch.write_slots) == int(batch.query_lengths.sum()):
            raise OracleError("the rows of the batch and its query lengths disagree")
        positions = [
            np.arange(prefix, prefix + count)
            for prefix, count in zip(batch.prefix_lengths.tolist(), batch.query_lengths.tolist(), strict=True)
        ]
        if (
            not np.array_equal(batch.positions, np.concatenate(positions))
            or int(batch.positions.max()) >= self.context_length
        ):
            raise OracleError("positions do not follow the prefix lengths, or pass the context")
        first = 0
        for index, (slots, own) in enumerate(zip(batch.slots, positions, strict=True)):
            if len(slots) != own[-1] + 1 or (slots == DUMMY_SLOT).any():
                raise OracleError(f"sequence {index} has {len(slots)} slots for {int(own[-1]) + 1} keys, or a dummy")
            written = batch.write_slots[first : first + len(own)]
            if ((written != DUMMY_SLOT) & (written != slots[own[0] :])).any():
                raise OracleError(f"sequence {index} writes where it does not read")
            first += len(own)
        if (np.diff(batch.logit_rows) <= 0).any() or (batch.logit_rows >= batch.rows).any():
            raise OracleError("logit rows are not ascending rows of the batch")


def _adapter(batch: Batch, rows: slice) -> int:
    """Returns the adapter of the rows of one sequence."""
    if batch.adapters is None:
        return NO_ADAPTER
    used = batch.adapters[rows]
    if (used != used[0]).any():
        raise OracleError(f"rows of one sequence use the adapters {sorted(set(used.tolist()))}")
    return int(used[0])


def _answer_picks(logits: NDArray[np.float32], row_requests: RowRequests) -> Logits:
    """Replaces the logits of rows that need only a token by the token, row by row, by the definitions.

    A row that may not choose among all tokens keeps its logits too, unless it chooses among a few."""
    whole = row_requests.kinds == RowNeed.LOGITS
    whole[[row for row, allowed in row_requests.allowed.items() if allowed.few is None]] = True
    places = np.where(whole, np.cumsum(whole) - 1, -1)
    tokens = np.full(len(logits), -1, dtype=np.int64)
    errors: dict[int, Exception] = {}
    for row in np.flatnonzero(~whole).tolist():
        try:
            tokens[row] = _answer_pick(logits[row], row_requests, row)
        except Exception as error:
            errors[row] = error
    return Logits(torch.from_numpy(logits[whole]), places, tokens, errors)


def _answer_pick(logits: NDArray[np.float32], row_requests: RowRequests, row: int) -> int:
    """Chooses the token of a row. logits: [vocab]"""
    if row in row_requests.allowed and (few := row_requests.allowed[row].few) is not None:
        return choose_few(logits[few], few, row_requests, row)
    scores = logits.astype(np.float64)
    if row_requests.kinds[row] == RowNeed.SAMPLE:
        ids = np.arange(len(scores))
        kept = np.ones(len(scores), dtype=np.bool_)
        if 0 < row_requests.top_k[row] < len(scores):
            kept &= scores >= np.sort(scores)[-int(row_requests.top_k[row])]
        if row_requests.min_p[row] > 0:
            kept &= (scores - scores.max()) * row_requests.inverse_temperatures[row] >= np.log(row_requests.min_p[row])
        drawn = scores * row_requests.inverse_temperatures[row] + gumbel(row_requests.keys[row], ids)
        scores = np.where(kept, drawn, -np.inf)
    return int(scores.argmax())


@dataclass(frozen=True, slots=True)
class Reference:
    """The right result of a generation."""

    token_ids: list[int]
    finish_reason: FinishReason
    text_bytes: int


def reference_generate(
    model: OracleModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    eos_ids: frozenset[int] = frozenset(),
    token_bytes: Callable[[int], bytes] = lambda token: b"",
    longest: int = 1 << 30,
) -> Reference:
    """Generates from one prompt alone, recomputing everything for every token: slow, and plainly right."""
    tokens = list(prompt)
    generated: list[int] = []
    sampler = Sampler(model.vocab_size)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    text = b""
    passed = 0  # stop strings that end before this place came before min_tokens
    while len(generated) < sampling.max_tokens and len(tokens) < longest:
        logits = torch.from_numpy(model.reference(tokens).copy())[None]
        counts = {token: generated.count(token) for token in generated}
        forbidden = frozenset(ends) if len(generated) < sampling.min_tokens else frozenset()
        draw = SampleRequest(
            0, sampling, sampling.seed or 0, len(tokens), counts, np.array(prompt, dtype=np.int32), forbidden
        )
        token = sampler.sample(logits, [draw])[0]
        tokens.append(token)
        generated.append(token)
        may_stop = len(generated) >= sampling.min_tokens
        if token in ends and may_stop:
            return Reference(generated, FinishReason.STOP, len(text))
        text += token_bytes(token)
        while (found := _first_stop(text, sampling.stop, passed)) is not None:
            if may_stop:
                return Reference(generated, FinishReason.STOP, found[0])
            passed = found[1]
    return Reference(generated, FinishReason.LENGTH, len(text))


def _first_stop(text: bytes, stops: Sequence[str], start: int) -> tuple[int, int] | None:
    """Returns (start, end) of the stop that ends first; of those that end together the longest."""
    found = []
    for stop in stops:
        data = stop.encode("utf-8")
        at = text.find(data, start)
        if at >= 0:
            found.append((at + len(data), at))
    if not found:
        return None
    end, at = min(found)
    return at, end


class PictureError(EngineError):
    """Raised when the pictures of a batch do not fit its token ids."""


class OraclePictures:
    """Implements `batch.PictureStore`: takes any picture, and checks the pictures of batches.

    With `on_axes` an even number of tokens is a grid of two rows, an odd one of one row.
    """

    def __init__(self, *, both_ways: bool) -> None:
        self.both_ways = both_ways
        self.on_axes = False
        self._held: HeldPictures[EnginePicture] = HeldPictures()

    def put(self, picture: EnginePicture) -> None:
        if picture.tokens < 1:
            raise RequestError(f"picture {picture.number} has tokens={picture.tokens}; write 1 or more")
        self._held.put(picture.number, picture)

    def forget(self, number: int) -> None:
        self._held.forget(number)

    def tokens(self, number: int) -> int | None:
        picture = self._held.known(number)
        return None if picture is None else picture.tokens

    def grid(self, number: int) -> PictureGrid | None:
        tokens = self.tokens(number)
        return _grid(tokens) if self.on_axes and tokens is not None else None

    def digest(self, number: int) -> bytes | None:
        picture = self._held.find(number)
        return picture.digest or None if picture is not None else None

    def hold(self, number: int) -> object:
        return self._held.hold(number)

    def spans_of(self, token_ids: NDArray[np.int64]) -> tuple[PictureSpan, ...]:
        """Finds the pictures of a sequence; the last one may go on after its end.

        Raises:
            PictureError: a picture that the store does not hold.
        """
        spans: list[PictureSpan] = []
        end = 0
        for start in np.flatnonzero(token_ids >= PICTURE_BASE).tolist():
            if start < end:
                continue
            number = int(token_ids[start]) - PICTURE_BASE
            picture = self._held.find(number)
            if picture is None:
                raise PictureError(f"position {start}: picture {number} is forgotten, and a row of it runs")
            end = start + picture.tokens
            if (token_ids[start:end] != token_ids[start]).any():
                raise PictureError(
                    f"position {start}: picture {number} has {picture.tokens} tokens, and not all are here"
                )
            spans.append(PictureSpan(start, end, number))
        return tuple(spans)

    def widen(self, fingerprints: NDArray[np.uint64], spans: tuple[PictureSpan, ...]) -> None:
        """Changes the fingerprints of a sequence to those of rows that attend to their whole picture."""
        if self.both_ways:
            for span in spans:
                fingerprints[span.start : span.end] = fingerprints[min(span.end, len(fingerprints)) - 1]

    def check(self, batch: Batch, sequences: list[tuple[PictureSpan, ...]]) -> None:
        """Checks which rows the batch marks as pictures, which attend to each other, and their rotary positions.

        Raises:
            PictureError: they do not fit the token ids.
        """
        parts: list[PictureRows] = []
        together: list[tuple[tuple[int, int], ...]] = []
        turned: list[tuple[int, int, int]] = []
        first = 0
        for count, start, spans in zip(
            batch.query_lengths.tolist(), batch.prefix_lengths.tolist(), sequences, strict=True
        ):
            inside = [span for span in spans if start < span.end and span.start < start + count]
            for span in inside:
                begin, end = max(start, span.start), min(start + count, span.end)
                parts.append(PictureRows(first + begin - start, end - begin, span.number, begin - span.start))
            together.append(tuple((span.start, span.end) for span in inside) if self.both_ways else ())
            if self.both_ways and inside and inside[-1].end > start + count:
                raise PictureError(f"picture {inside[-1].number} is cut, and its rows see each other")
            turned += _turned(spans if self.on_axes else (), start + count)[start : start + count]
            first += count
        if batch.pictures != tuple(parts):
            raise PictureError(f"the batch says that its pictures are {batch.pictures}, and they are {tuple(parts)}")
        if batch.spans != (tuple(together) if any(together) else ()):
            raise PictureError(f"the batch says that {batch.spans} see each other, and these do: {tuple(together)}")
        stated = np.tile(batch.positions, (3, 1)) if batch.rope_positions is None else batch.rope_positions
        if (np.array(turned) != stated.T).any():
            raise PictureError(f"the batch says that rows turn by {stated.T.tolist()}, and they turn by {turned}")


def _grid(tokens: int) -> PictureGrid:
    return PictureGrid(1, tokens) if tokens % 2 else PictureGrid(2, tokens // 2)


def _turned(spans: tuple[PictureSpan, ...], end: int) -> list[tuple[int, int, int]]:
    """Returns the positions on three axes of at least `end` tokens, counted from the first one."""
    pictures = {span.start: span for span in spans}
    found: list[tuple[int, int, int]] = []
    place = 0
    while len(found) < end:
        span = pictures.get(len(found))
        if span is None:
            found.append((place, place, place))
            place += 1
            continue
        rows, columns, _ = _grid(span.end - span.start)
        found += [(place, place + row, place + column) for row in range(rows) for column in range(columns)]
        place += max(rows, columns)
    return found
