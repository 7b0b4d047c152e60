"""What a program asks of speculation: a number of tokens, "auto", or nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lang.errors import ParameterError
from ...lang.sampling import MAX_TOKENS

if TYPE_CHECKING:
    from .planner import Planner
    from .rest import Rest


@dataclass(frozen=True, slots=True)
class Setting:
    """How far calls go beyond what their `gen` needs.

    Attributes:
        tokens: at most so many; 0 for not at all, None for what the planner finds worth its price.
    """

    tokens: int | None


@dataclass(frozen=True, slots=True)
class Speculating:
    """What the streams of one run share.

    Attributes:
        setting: what was asked for.
        planner: of the program, shared by all of its runs.
        rest: of the body of this run.
    """

    setting: Setting
    planner: "Planner"
    rest: "Rest"


def setting_of(num_api_spec_tokens: object, speculate: object) -> Setting | None:
    """Options of a program or a run → what they ask for; None when neither is given.

    Raises:
        ParameterError: both, or a value that is none of theirs.
    """
    if num_api_spec_tokens is None and speculate is None:
        return None
    if num_api_spec_tokens is not None and speculate is not None:
        raise ParameterError(
            f"num_api_spec_tokens={num_api_spec_tokens!r} and speculate={speculate!r} are two answers to one question; "
            'give the number of tokens, or speculate="auto"'
        )
    if num_api_spec_tokens is None:
        if speculate != "auto":
            raise ParameterError(
                f'speculate={speculate!r}; write speculate="auto", or num_api_spec_tokens=64 for a fixed number'
            )
        return Setting(None)
    if isinstance(num_api_spec_tokens, bool) or not isinstance(num_api_spec_tokens, int):
        raise ParameterError(f"num_api_spec_tokens={num_api_spec_tokens!r}; write a number of tokens such as 64")
    if not 0 <= num_api_spec_tokens <= MAX_TOKENS:
        raise ParameterError(f"num_api_spec_tokens={num_api_spec_tokens} is out of range; write 0 to {MAX_TOKENS}")
    return Setting(num_api_spec_tokens)
