"""What a call needs of its backend, checked before it is sent: nothing is dropped in silence."""

from ...lang.errors import CapabilityError
from ...lang.ops import Gen, Select
from ...lang.protocol import Capabilities
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
    """Raises CapabilityError when the backend cannot say what the method compares."""
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
