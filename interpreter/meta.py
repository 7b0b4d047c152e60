"""Answers of `get_meta_info`: facts of a call under SGLang's names."""

from typing import Any

from ..lang.ops import Select
from ..lang.protocol import Chunk, Completion, Final, Scored, TokenLogprob
from .choices import Decision
from .variables import Meta

# (log-probability, token id, text or None), as SGLang writes a token.
LogprobEntry = tuple[float, int, str | None]


def of_completion(final: Final, completion: Completion, *, with_text: bool) -> Meta:
    """Describes one continuation. The prompt's numbers are those of the whole call, also when n is above 1."""
    meta: Meta = {
        "id": final.id,
        "prompt_tokens": final.usage.prompt_tokens,
        "cached_tokens": final.usage.cached_tokens,
        "completion_tokens": len(completion.token_ids) or final.usage.completion_tokens,
        "finish_reason": str(completion.finish_reason),
        "matched_stop": completion.matched_stop,
    }
    if completion.logprobs:
        meta |= _logprobs("output", completion.logprobs, with_text)
    if final.prompt_logprobs:
        meta |= _logprobs("input", final.prompt_logprobs, with_text)
    return meta


def of_chunk(chunk: Chunk) -> Meta:
    """Describes one piece of a stream."""
    meta: Meta = {"id": chunk.id, "index": chunk.index, "completion_tokens": len(chunk.token_ids)}
    if chunk.logprobs:
        meta |= _logprobs("output", chunk.logprobs, with_text=True)
    return meta


def of_select(scored: Scored, op: Select, decision: Decision) -> Meta:
    """Describes a scored `select`: the score and the probability of each choice, and those of its tokens."""
    facts: Meta = {
        "id": scored.id,
        "prompt_tokens": scored.usage.prompt_tokens,
        "cached_tokens": scored.usage.cached_tokens,
        "completion_tokens": scored.usage.completion_tokens,
        "choices_method": op.method,
        "choice_scores": dict(zip(op.choices, decision.scores, strict=True)),
        "probabilities": dict(zip(op.choices, decision.probabilities, strict=True)),
        "normalized_prompt_logprobs": [sum(c.logprobs) / len(c.logprobs) for c in scored.choices],
        "input_token_logprobs": [
            [(logprob, token, None) for logprob, token in zip(choice.logprobs, choice.token_ids, strict=True)]
            for choice in scored.choices
        ],
        "unconditional_token_logprobs": [list(choice.unconditional) for choice in scored.choices],
    }
    if decision.bounds:
        facts["bounds"] = dict(zip(op.choices, decision.bounds, strict=True))
        facts["mass"] = dict(zip(op.choices, decision.mass, strict=True))
        facts["evaluations"] = scored.evaluations
    return facts


def _logprobs(side: str, tokens: tuple[TokenLogprob, ...], with_text: bool) -> dict[str, Any]:
    def entry(logprob: float, token_id: int, text: str) -> LogprobEntry:
        return (logprob, token_id, text if with_text else None)

    result: dict[str, Any] = {
        f"{side}_token_logprobs": [entry(token.logprob, token.token_id, token.text) for token in tokens]
    }
    if any(token.top for token in tokens):
        result[f"{side}_top_logprobs"] = [
            [entry(logprob, token_id, text) for token_id, text, logprob in token.top] for token in tokens
        ]
    return result
