"""Which gens may be answered from one reply: those whose tokens one call would choose in the same way."""

import msgspec

from ...lang.sampling import SamplingParams


def manner_of(sampling: SamplingParams) -> SamplingParams:
    """The parameters without those that only say where a text ends, or that the best token does not depend on."""
    manner = msgspec.structs.replace(sampling, max_tokens=1, stop=(), stop_regex=())
    if not sampling.greedy:
        return manner
    return msgspec.structs.replace(manner, top_p=1.0, top_k=-1, min_p=0.0, seed=None)


def speaks_plainly(sampling: SamplingParams) -> bool:
    """Whether a gen is one text whose tokens do not depend on where its call began.

    Not so with several continuations, least lengths and stop tokens, of which a text shows nothing; log-probabilities,
    which belong to a call; penalties, which count what the call has generated; and draws from a seed, which every call
    begins anew.
    """
    return (
        sampling.n == 1
        and sampling.max_tokens > 0
        and sampling.min_tokens == 0
        and not sampling.ignore_eos
        and not sampling.stop_token_ids
        and not sampling.logprobs
        and not sampling.top_logprobs
        and sampling.prompt_logprobs_from is None
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
        and (sampling.greedy or sampling.seed is None)
    )
