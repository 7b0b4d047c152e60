"""What a step asks of its rows of logits: all of them, or only the token that they choose.

A token is enough when nothing looks at the other logits: no log-probabilities, no penalties, biases or forbidden
tokens, no nucleus (its mass is a sum over the whole vocabulary) and no top_k that keeps more than a head searches for.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..lang.sampling import SamplingParams
from .batch import Pick, Picks
from .draw import draw_keys, inverse_temperature
from .request import Generation, Request
from .step_plan import PlannedRows

MOST_PICKED = 256  # the largest top_k of a SAMPLE row


def picks_of(planned: Sequence[PlannedRows], logit_rows: int) -> Picks:
    """What each of the step's `logit_rows` rows of logits is needed for."""
    picks = Picks(
        kinds=np.full(logit_rows, Pick.ALL, dtype=np.uint8),
        inverse_temperatures=np.zeros(logit_rows),
        keys=np.zeros(logit_rows, dtype=np.uint64),
        top_k=np.zeros(logit_rows, dtype=np.int32),
        min_p=np.zeros(logit_rows),
    )
    best: list[int] = []
    sampled: list[int] = []
    drawn: list[tuple[float, int, int, int, float]] = []  # of each sampled row: the columns
    for rows in planned:
        request = rows.request
        if rows.end < request.length or not request.samples:
            continue
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        sampling = generation.sampling
        masked = mask_of(generation) is not None
        if masked or forbidden_ends(request, generation) or not only_token(sampling):
            continue
        if sampling.temperature == 0.0:
            best.append(rows.logits_of_last)
            continue
        sampled.append(rows.logits_of_last)
        columns = (generation.seed, request.length, max(sampling.top_k, 0), sampling.min_p)
        drawn.append((inverse_temperature(sampling.temperature), *columns))
    picks.kinds[best] = Pick.BEST
    if sampled:
        picks.kinds[sampled] = Pick.SAMPLE
        inverse_temperatures, seeds, positions, top_k, min_p = zip(*drawn, strict=True)
        picks.inverse_temperatures[sampled] = inverse_temperatures
        picks.keys[sampled] = draw_keys(seeds, positions)
        picks.top_k[sampled] = top_k
        picks.min_p[sampled] = min_p
    return picks


def mask_of(generation: Generation) -> NDArray[np.uint32] | None:
    """The tokens that may come next; None: all, or it is known already which one comes."""
    cursor = generation.cursor
    return cursor.mask if cursor is not None and not cursor.pending else None


def forbidden_ends(request: Request, generation: Generation) -> frozenset[int]:
    """The tokens that may not end the text now: before min_tokens none may.

    A constraint's ends are held back as well when end-of-sequence is ignored, but never when nothing else may come.
    """
    early = request.generated < generation.sampling.min_tokens
    if generation.cursor is None:
        return generation.ends if early else frozenset()
    ends = generation.ends if early else frozenset()
    if early or generation.sampling.ignore_eos:
        ends |= generation.cursor.eos_ids
    few = generation.cursor.few if ends and not generation.cursor.pending else None
    return frozenset() if few is not None and ends.issuperset(few.tolist()) else ends


def only_token(sampling: SamplingParams) -> bool:
    """The token is all that is needed of a row that is sampled with these parameters."""
    return (
        not sampling.logprobs
        and sampling.top_logprobs == 0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and sampling.repetition_penalty == 1.0
        and not sampling.logit_bias
        and (sampling.temperature == 0.0 or (sampling.top_p == 1.0 and sampling.top_k <= MOST_PICKED))
    )
