"""Makes programs from functions whose first parameter is the state: `@function` for any class of programs."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from ..lang import checks
from ..lang.errors import ParameterError, shown
from ..lang.ops import MAX_NAME_LENGTH
from .arguments import sampling_defaults
from .body import Body
from .program import Function, Program
from .speculation.settings import setting_of

P = TypeVar("P", bound=Program)


def maker(
    kind: type[P],
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Function], P]:
    """Checks the options of `@function` and returns the decorator, which makes programs of class `kind`.

    `compiler.program.function`, the public decorator, documents the options.

    Raises:
        ParameterError: an unknown option; the returned callable: a function without a parameter, or a generator.
    """
    if name is not None:
        checks.text("name", name, MAX_NAME_LENGTH)
    defaults = sampling_defaults(options or {})
    speculation = setting_of(num_api_spec_tokens, speculate)

    def make(body: Function) -> P:
        if not callable(body) or isinstance(body, type):
            raise ParameterError(f"@function needs a function, got {shown(body)}")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise ParameterError(
                f"@function: {shown(body)} is a generator, which calling does not run; return a list instead"
            )
        return kind(Body(name or str(getattr(body, "__name__", "program")), body, defaults, speculation=speculation))

    return make
