"""What a step asks of its rows of logits: all of them, or only the token that they choose.

A token is enough when nothing looks at the other logits: no log-probabilities, no penalties, biases or forbidden
tokens, no nucleus (its mass is a sum over the whole vocabulary) and no top_k that keeps more than a head searches for.
"""

from collections.abc import Sequence

import numpy as np

from ..lang.sampling import SamplingParams
from .batch import Pick, Picks
from .draw import draw_key, inverse_temperature
from .request import Generation
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
    best = []
    for rows in planned:
        request = rows.request
        if rows.end < request.length or not request.samples:
            continue
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        sampling = generation.sampling
        early = request.generated < sampling.min_tokens
        if (early and generation.ends) or not only_token(sampling):
            continue
        row = rows.logits_of_last
        if sampling.temperature == 0.0:
            best.append(row)
            continue
        picks.kinds[row] = Pick.SAMPLE
        picks.inverse_temperatures[row] = inverse_temperature(sampling.temperature)
        picks.keys[row] = draw_key(generation.seed, request.length)
        picks.top_k[row] = max(sampling.top_k, 0)
        picks.min_p[row] = sampling.min_p
    picks.kinds[best] = Pick.BEST
    return picks


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
