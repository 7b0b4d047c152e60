"""Checks what a backend enforces of a constraint, before any call.

enforced    its kind is in the backend's capabilities, and its method `enforces`, if it has one, says yes to it;
            otherwise the request goes out without it, and the text is validated here:
validated   the backend `asks_again`, so the model is told what is wrong until the text satisfies the constraint
best effort the program allows it; it gets the text that comes
refused     a CapabilityError
"""

import json

import msgspec

from ...lang.constraint import alternatives
from ...lang.errors import CapabilityError
from ...lang.ops import Gen, Select
from ...lang.protocol import Backend, Capabilities, ConstraintSpec
from ...lang.sampling import SamplingParams
from . import schemas


def check(capabilities: Capabilities, op: Gen, sampling: SamplingParams) -> None:
    """Raises CapabilityError for what the backend does not offer, MissingExtraError for what this machine lacks."""
    name = capabilities.name
    asks_logprobs = sampling.logprobs or sampling.top_logprobs or sampling.prompt_logprobs_from is not None
    if asks_logprobs and not capabilities.logprobs:
        raise CapabilityError(
            f"{name} gives no log-probabilities; remove return_logprob, top_logprobs_num and logprob_start_len"
        )
    if sampling.stop_regex and not capabilities.stop_regex:
        raise CapabilityError(f"{name} has no stop_regex; write stop= with the strings that may end the text")
    if op.constraint is not None and op.constraint.allow_unenforced:
        schemas.check_installed()


def check_choices(capabilities: Capabilities, op: Select) -> None:
    """Raises CapabilityError when the backend does not return the scores that the method compares."""
    name = capabilities.name
    if not capabilities.score and op.method != "token_length_normalized":
        raise CapabilityError(
            f"{name} cannot score choices, which method={op.method!r} compares; leave the method out, and one of the "
            "choices is generated, or run the program on a Runtime"
        )
    if op.method in ("overshoot", "exact") and not capabilities.probability:
        raise CapabilityError(
            f"{name} cannot say how probable a choice is over all its tokens, which method={op.method!r} needs; "
            'write method="token_length_normalized", or run the program on a Runtime'
        )


# Kind of constraint → how users write it.
WRITTEN = {
    "regex": "regex= and dtype=",
    "json_schema": "json_schema= and dtype=",
    "lark": "ebnf= and grammar= in Lark",
    "gbnf": "ebnf= and grammar= in GBNF",
    "choices": "choices=, select(), and dtype= of a Literal or Enum",
}


def lower(backend: Backend, constraint: ConstraintSpec, *, allow_best_effort: bool) -> ConstraintSpec | None:
    """Returns the constraint to send to the backend; None: the finished text is validated here.

    Raises:
        CapabilityError: neither is possible here.
    """
    capabilities = backend.capabilities
    name = capabilities.name
    if capabilities.asks_again and constraint.engine not in (None, "auto"):
        raise CapabilityError(
            f"{name} has no constraint engines to choose from; remove constraint_engine={constraint.engine!r}, or run "
            "the program on a Runtime"
        )
    for candidate in _readings(constraint):
        if _is_enforced(backend, candidate):
            return candidate
    if capabilities.asks_again or allow_best_effort:
        return None
    others = [WRITTEN[kind] for kind in capabilities.constraints if kind != constraint.kind]
    scores = "" if constraint.kind != "choices" or capabilities.score else " cannot score choices,"
    raise CapabilityError(
        f"{name}{scores} does not enforce {WRITTEN[constraint.kind]}"
        + (f" as they are written here (it enforces {'; '.join(others)})" if others else "")
        + ", and is not asked again when an answer breaks them; write allow_best_effort=True to take what comes, "
        "stop= and parse the text, or run the program on a Runtime"
    )


def _readings(constraint: ConstraintSpec) -> list[ConstraintSpec]:
    """Returns the constraint and its equivalent forms."""
    if constraint.kind != "choices":
        return [constraint]
    expression = alternatives(json.loads(constraint.source))
    return [constraint, msgspec.structs.replace(constraint, kind="regex", source=expression)]


def _is_enforced(backend: Backend, constraint: ConstraintSpec) -> bool:
    """Returns whether the backend enforces a constraint. `enforces` decides for kinds it enforces only in part."""
    if constraint.kind not in backend.capabilities.constraints:
        return False
    enforces = getattr(backend, "enforces", None)  # most backends that enforce a kind enforce all of it
    return enforces is None or bool(enforces(constraint))
