"""`@function`: a program of a function whose first parameter is the state."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, overload

from ..lang import checks
from ..lang.errors import ParameterError, shown
from ..lang.ops import MAX_NAME_LENGTH
from .arguments import sampling_defaults
from .body import Body
from .program import Function, Program
from .speculation.settings import setting_of


@overload
def function(body: Function, /) -> Program: ...


@overload
def function(
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    **options: Any,
) -> Callable[[Function], Program]: ...


def function(
    body: Function | None = None,
    /,
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    **options: Any,
) -> Program | Callable[[Function], Program]:
    """Make a program of a function whose first parameter is the state (after `self` for a method).

    Bare, or with sampling defaults: `@function(temperature=0, stop="\\n")`.

    Speculation saves calls to models that are paid for call by call: a `gen` that ends at a stop or a constraint is
    asked for more than it needs, and what stands behind its end answers the gens that follow, as long as it is what the
    program says. Variables are the same; `state.cost.speculation` tells what was saved and what was wasted, and
    `state.meta(name)["speculated"]` which variables took no call. It has no effect on backends whose calls are not paid
    one by one, such as a Runtime: their prefix cache has the prompt already.

    Args:
        num_api_spec_tokens: so many tokens more, wherever something may follow.
        speculate: "auto": as many as what follows needs, where that pays. What the program has queued behind a `gen`
            is looked at, and the chance that it fits is learned over all runs of the program.

    Raises:
        ParameterError: an unknown option, a function without a parameter, or a generator.
    """
    if name is not None:
        checks.text("name", name, MAX_NAME_LENGTH)
    defaults = sampling_defaults(options)
    speculation = setting_of(num_api_spec_tokens, speculate)

    def decorate(body: Function) -> Program:
        if not callable(body) or isinstance(body, type):
            raise ParameterError(f"@function needs a function, got {shown(body)}")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise ParameterError(
                f"@function: {shown(body)} is a generator, which calling does not run; return a list instead"
            )
        return Program(Body(name or str(getattr(body, "__name__", "program")), body, defaults, speculation=speculation))

    return decorate if body is None else decorate(body)
