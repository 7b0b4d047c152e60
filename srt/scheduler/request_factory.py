"""Makes requests from messages. It finds every error in a message before a request holds slots."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...lang.errors import RequestError
from ..core.batch import PictureStore
from ..core.image_token_ids import PICTURE_BASE, PICTURE_END, picture_spans
from ..core.messages import EngineChoose, EngineGenerate, EnginePrefill, EngineScore, Schedule
from ..multimodal.sequence import NO_PICTURES, SequencePictures
from .request import Choosing, Generation, Job, Prefilling, Request, ScoreGroup, Scoring
from .stops import CompiledStops

MOST_SEARCHED = 16_384  # tokens of choices; a step makes a node for each


class RequestFactory:
    """Checks messages against the model's limits and makes requests from them.

    Args:
        vocab_size: token ids are below it.
        context_length, pool_size: a sequence may have as many tokens as the smaller of the two.
        eos_ids: tokens with which the model ends its text.
        pictures: the store of pictures that prompts may hold; None: the model reads text only.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        pool_size: int,
        eos_ids: frozenset[int],
        pictures: PictureStore | None = None,
    ) -> None:
        self.longest = min(context_length, pool_size)
        self._limit = (
            f"the context of {context_length} tokens"
            if context_length <= pool_size
            else f"the KV pool of {pool_size} tokens; start the runtime with a larger pool"
        )
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)  # a model may lack some
        self._pictures = pictures
        self._arrived = 0
        self._stops = CompiledStops()

    def generate(self, message: EngineGenerate, now: float) -> Request:
        sampling = msgspec.structs.replace(message.sampling)  # which checks every number again
        tokens, pictures = self._sequence(message.token_ids, "the prompt")
        _check_healing(message.heal, message.token_ids)
        room = 1 if sampling.max_tokens else 0
        if len(tokens) + room > self.longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and {room} must fit behind it, more than"
                f" {self._limit}; shorten it"
            )
        self._known("stop_token_ids", sampling.stop_token_ids)
        self._known("logit_bias", tuple(sampling.logit_bias))
        start = sampling.prompt_logprobs_from
        if start is not None and start > len(tokens):
            raise RequestError(
                f"logprob_start_len (prompt_logprobs_from={start}) is past the prompt of {len(tokens)} tokens; "
                f"write 0 to {len(tokens)}"
            )
        if start is not None and start < pictures.end:
            raise RequestError(
                f"logprob_start_len (prompt_logprobs_from={start}): the tokens of a picture have no log-probability, "
                f"and the prompt's last picture ends at {pictures.end}; write {pictures.end} to {len(tokens)}"
            )
        if sampling.seed is None and not sampling.greedy:
            raise RequestError("the request has no seed; the gateway sets one for every continuation")
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        job = Generation(
            sampling=sampling,
            seed=sampling.seed or 0,
            stream=message.stream,
            ends=ends,
            stops=self._stops.of(sampling),
            length_limit=min(len(tokens) + sampling.max_tokens, self.longest),
        )
        return self._request(message.id, tokens, pictures, job, message.schedule, now)

    def score(self, message: EngineScore, now: float) -> list[Request]:
        if not message.sequences:
            raise RequestError("a score request without sequences; give at least one choice")
        if message.start < 1:
            raise RequestError(f"start={message.start}: the first token has no log-probability; write 1 or more")
        group = ScoreGroup(message.start)
        sequences = [self._sequence(ids, f"sequence {i}") for i, ids in enumerate(message.sequences)]
        first = sequences[0][0]
        for i, (tokens, pictures) in enumerate(sequences):
            if len(tokens) > self.longest:
                raise RequestError(f"sequence {i} has {len(tokens)} tokens, more than {self._limit}; shorten it")
            _check_start(message.start, pictures, f"sequence {i}")
            if len(tokens) < message.start or not np.array_equal(tokens[: message.start], first[: message.start]):
                raise RequestError(f"sequence {i} does not share its first {message.start} tokens with sequence 0")
        group.members.extend(
            self._request(message.id, tokens, pictures, Scoring(group), message.schedule, now)
            for tokens, pictures in sequences
        )
        return group.members

    def choose(self, message: EngineChoose, now: float) -> Request:
        """Makes the request that waits for the search; it runs the first choice's tokens."""
        if not message.choices or not all(message.choices):
            raise RequestError("a search without choices, or with an empty one; give each at least one token")
        prompt, pictures = self._sequence(message.prompt, "the prompt")
        _check_healing(message.heal, message.prompt)
        if not 1 <= message.start <= len(prompt):
            raise RequestError(f"start={message.start} with a prompt of {len(prompt)} tokens; write 1 to {len(prompt)}")
        _check_start(message.start, pictures, "the prompt")
        for i, ids in enumerate(message.choices):
            self._known(f"choice {i}", ids)
            length = message.start + len(ids)
            if length > self.longest:
                raise RequestError(
                    f"the prompt with choice {i} has {length} tokens, more than {self._limit}; shorten it"
                )
        total = sum(map(len, message.choices))
        if total > MOST_SEARCHED:
            raise RequestError(
                f"the choices have {total} tokens, and a search takes at most {MOST_SEARCHED}; "
                'give fewer or shorter ones, or write method="token_length_normalized"'
            )
        shared = message.prompt[: message.start]
        tokens = np.array([*shared, *message.choices[0][:-1]], dtype=np.int32)
        return self._request(message.id, tokens, pictures, Choosing(None, []), message.schedule, now)

    def another(self, request: Request, token_ids: Sequence[int], job: Choosing) -> Request:
        """Makes one more request of the same message. All pictures lie in the prefix that its requests share."""
        tokens = np.array(token_ids, dtype=np.int32)
        return self._request(request.message_id, tokens, request.pictures, job, request.schedule, request.arrival)

    def prefill(self, message: EnginePrefill, now: float) -> Request:
        tokens, pictures = self._sequence(message.token_ids, "the hinted prefix")
        if len(tokens) > self.longest:
            raise RequestError(f"the hinted prefix has {len(tokens)} tokens, more than {self._limit}")
        if message.pin is not None and math.isnan(message.pin):
            raise RequestError("pin is not a number; write seconds or nothing")
        return self._request(message.id, tokens, pictures, Prefilling(message.pin), message.schedule, now)

    def _request(
        self,
        message_id: int,
        tokens: NDArray[np.int32],
        pictures: SequencePictures,
        job: Job,
        schedule: Schedule,
        now: float,
    ) -> Request:
        if schedule.timeout is not None and math.isnan(schedule.timeout):
            raise RequestError("timeout is not a number; write seconds or nothing")
        if not (isinstance(schedule.priority, int) and isinstance(schedule.ahead, int)):
            raise RequestError(f"priority={schedule.priority!r}, ahead={schedule.ahead!r}; write integers")
        self._arrived += 1
        return Request(self._arrived, message_id, tokens, job, schedule, now, pictures)

    def _sequence(self, ids: Sequence[int], what: str) -> tuple[NDArray[np.int32], SequencePictures]:
        """Checks that `ids` are tokens of the vocabulary and whole pictures, and returns both."""
        if not ids:
            raise RequestError(f"{what} is empty; give at least one token")
        lowest, highest = min(ids), max(ids)
        if highest < PICTURE_BASE:
            self._check_range(what, lowest, highest)
            return np.array(ids, dtype=np.int32), NO_PICTURES
        self._known(what, [token for token in ids if not PICTURE_BASE <= token < PICTURE_END])
        if self._pictures is None:
            raise RequestError(f"{what} holds a picture, and the model reads text only; load one that sees")
        try:
            spans = picture_spans(np.array(ids, dtype=np.int64), self._pictures.tokens)
        except ValueError as error:
            raise RequestError(f"{what}: {error}; send a picture before what holds it, and all of its tokens") from None
        holds = tuple(self._pictures.hold(number) for number in {span.number for span in spans})
        return np.array(ids, dtype=np.int32), SequencePictures(spans, self._pictures.both_ways, holds)

    def _known(self, what: str, ids: Sequence[int]) -> None:
        if ids:
            self._check_range(what, min(ids), max(ids))

    def _check_range(self, what: str, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(f"{what}: token id {wrong} is outside the vocabulary; write 0 to {self._vocab_size - 1}")


def _check_start(start: int, pictures: SequencePictures, what: str) -> None:
    if start < pictures.end:
        raise RequestError(
            f"start={start}: the tokens of a picture have no log-probability, and the last picture of {what} ends at "
            f"{pictures.end}; write {pictures.end} or more"
        )


def _check_healing(heal: bool, ids: Sequence[int]) -> None:
    if heal and ids[-1] >= PICTURE_BASE:
        raise RequestError("heal=True: the prompt ends in a picture, which no token can replace; write heal=False")
