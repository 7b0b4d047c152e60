"""Which passes run, and what they are told."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...lang import checks
from ...lang.errors import ParameterError, remedy, shown

DEFAULT = ("fold", "merge_text")  # those that change neither prompts nor calls, nor when they are made
NAMES = ("fold", "drop_unused", "merge_equal", "merge_samples", "fork_independent", "merge_text")  # in their order


@dataclass(frozen=True, slots=True)
class Choice:
    """Checked.

    Attributes:
        names: of the passes, in the order in which they run.
        keep: variables that are asked for; None for all of them, and the text.
        independent: calls that need not see each other's text.
    """

    names: tuple[str, ...]
    keep: tuple[str, ...] | None = None
    independent: tuple[str, ...] = ()


def chosen(
    passes: str | Iterable[str], keep: Iterable[str] | None = None, independent: Iterable[str] | None = None
) -> Choice:
    """What users write → what runs.

    Args:
        passes: "default", "none", or names of passes, among which "default" stands for all of those.
        keep: names for drop_unused.
        independent: names for fork_independent.

    Raises:
        ParameterError: a pass that does not exist, or something for a pass that is not chosen.
    """
    wanted = _names("passes", passes) if not isinstance(passes, str) else (checks.plain(passes),)
    names: set[str] = set()
    for name in wanted:
        match name:
            case "default":
                names.update(DEFAULT)
            case "none" if len(wanted) == 1:
                pass
            case "none":
                raise ParameterError(f'passes={shown(list(wanted))}: "none" stands alone; leave it out, or the others')
            case _ if name in NAMES:
                names.add(name)
            case _:
                raise ParameterError(f"passes: there is no pass {name!r}; {remedy(name, (*NAMES, 'default', 'none'))}")
    told = {"keep": ("drop_unused", keep), "independent": ("fork_independent", independent)}
    for option, (name, given) in told.items():
        if given is not None and name not in names:
            raise ParameterError(
                f'{option}={shown(given)} is for the pass {name}; write passes=["default", "{name}"], or leave it out'
            )
    return Choice(
        tuple(name for name in NAMES if name in names),
        None if keep is None else _names("keep", keep),
        () if independent is None else _names("independent", independent),
    )


MAX_NAMES = 10_000  # of variables or calls


def _names(option: str, given: Iterable[str]) -> tuple[str, ...]:
    """Raises ParameterError for anything but names."""
    names = checks.members(option, given, MAX_NAMES, "a list of names")
    for name in names:
        if not isinstance(name, str):
            raise ParameterError(f"{option} has {shown(name)} in it; write names")
    return tuple(dict.fromkeys(map(checks.plain, names)))
