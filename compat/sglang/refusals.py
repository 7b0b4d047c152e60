"""Features of SGLang that umbel does not have, refused with what to write instead."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...lang.errors import CapabilityError, ParameterError, shown


def check_refused(owner: str, given: Mapping[str, Any], refusals: Mapping[str, tuple[object, str]]) -> None:
    """Looks for parameters that are not mapped to anything.

    Args:
        given: what the program passes; None stands for "not given".
        refusals: parameter → the value that asks for nothing, and what to write instead of any other.

    Raises:
        ParameterError: the first one that is given.
    """
    for name, value in given.items():
        if name in refusals and value is not None and value != refusals[name][0]:
            raise ParameterError(f"{owner} takes no {name}={shown(value)}; {refusals[name][1]}")


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function of SGLang's that only says what to write instead."""

    def refuse(*arguments: object, **keywords: object) -> NoReturn:
        raise CapabilityError(f"{name}() has no counterpart here; {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises CapabilityError: {instead}."
    return refuse
