"""How a message is answered for the last time: built here, sent by the table, once."""

from ...lang.errors import WIRE_ERRORS, EngineError, UmbelError
from ...lang.protocol import FinishReason
from ..core.messages import Ended, EngineFailed, FromEngine, ScoreEnded
from .request import Generation, Request, ScoreGroup, Scoring
from .stopping import Stop


def ended(request: Request, stop: Stop) -> Ended:
    """The end of a generation, with whatever was not streamed."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations end with Ended"
    cursor = generation.cursor
    healed = cursor.healed if cursor is not None else 0
    return Ended(
        id=request.message_id,
        token_ids=request.generated_ids[generation.sent :],
        finish_reason=stop.reason,
        matched_stop=stop.matched,
        text_bytes=stop.text_bytes,
        prompt_tokens=request.prompt_length + (healed > 0),  # the last one was replaced
        cached_tokens=request.cached_tokens,
        completion_tokens=request.generated,
        logprobs=generation.logprobs[generation.sent :],
        prompt_logprobs=generation.prompt_logprobs,
        forced_tokens=cursor.forced if cursor is not None else 0,
        enforced=cursor is not None and cursor.accepting and (stop.matched is None or stop.matched in cursor.eos_ids),
        healed=healed,
    )


def score_ended(message_id: int, group: ScoreGroup) -> ScoreEnded:
    return ScoreEnded(
        message_id,
        [member.job.logprobs for member in group.members if isinstance(member.job, Scoring)],
        sum(member.prompt_length for member in group.members),
        sum(member.cached_tokens for member in group.members),
    )


def aborted(request: Request) -> FromEngine:
    if isinstance(request.job, Generation):
        return ended(request, Stop(FinishReason.ABORT, None, request.job.text_bytes))
    return EngineFailed(request.message_id, "CancelledError", "the request was aborted by its sender")


def failure(message_id: int, error: Exception) -> EngineFailed:
    """Our own errors say what they say, under the nearest name that may travel; of others only the kind leaves the
    engine, because their text may hold anything."""
    if isinstance(error, UmbelError):
        kind = next(
            (base.__name__ for base in type(error).__mro__ if base.__name__ in WIRE_ERRORS), EngineError.__name__
        )
        return EngineFailed(message_id, kind, str(error))
    return EngineFailed(message_id, EngineError.__name__, f"the engine's step failed with {type(error).__name__}")
