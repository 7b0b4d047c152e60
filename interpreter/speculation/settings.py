"""What a program asks of speculation: a number of tokens, "auto", or nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ...lang.sampling import MAX_TOKENS

if TYPE_CHECKING:
    from .idle import Rest
    from .planner import Planner


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
            f"num_api_spec_tokens={shown(num_api_spec_tokens)} and speculate={shown(speculate)} are two answers to one "
            'question; give the number of tokens, or speculate="auto"'
        )
    if num_api_spec_tokens is None:
        if not isinstance(speculate, str) or checks.plain(speculate) != "auto":
            raise ParameterError(
                f'speculate={shown(speculate)}; write speculate="auto", or num_api_spec_tokens=64 for a fixed number'
            )
        return Setting(None)
    remedy = f"a number of tokens from 0 to {MAX_TOKENS}, such as 64"
    return Setting(checks.integer("num_api_spec_tokens", num_api_spec_tokens, 0, MAX_TOKENS, remedy))
