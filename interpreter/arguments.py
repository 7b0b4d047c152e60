"""The arguments of a call of a program: its own parameters, options of the run, sampling defaults.

They share one list of keywords, and the program goes first: a parameter called `stop` or `timeout`
receives its own value. The option of that name can then be given in `sampling={...}`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..lang import checks, inline, sampling
from ..lang.errors import ParameterError, remedy, shown
from ..lang.protocol import MAX_PRIORITY, Backend
from .budgets.budget import Budget
from .default import chosen_backend
from .speculation.settings import Setting, setting_of

RUN_OPTIONS = (
    "backend",
    "budget",
    "num_api_spec_tokens",
    "priority",
    "salt",
    "speculate",
    "stream",
    "timeout",
    "verbose",
)

_SALT = re.compile(r"[A-Za-z0-9_-]{0,128}")
_USUAL_PRIORITY = f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, 0 being usual and more being earlier"
_TIMEOUT = f"seconds above 0 and up to {checks.LONGEST_SECONDS:g}, or None for no limit"
MOST_OPTIONS = 256


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run, checked.

    Attributes:
        backend: serves the run.
        budget: limit of the run's cost; for a batch, of all its runs together.
        priority: of its requests; higher runs earlier.
        salt: a namespace of the prefix cache, shared with no other.
        speculation: from num_api_spec_tokens or speculate, overrides the program's own; None: neither was given.
        stream: the body runs in the background, and requests ask for pieces.
        timeout: seconds for all of the run.
        verbose: print the text while it runs.
        sampling: defaults for every `gen`.
    """

    backend: Backend
    budget: Budget | None = None
    priority: int = 0
    salt: str = ""
    speculation: Setting | None = None
    stream: bool = False
    timeout: float | None = None
    verbose: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Arguments:
    """The parameters of a program after its state.

    Args:
        name: of the program, for messages.
        function: the user's function, or the signature of one.
        leading: how many parameters come before the program's own: the state, and `self` for a method.
        bound: values fixed by `bind`; a call may give others.

    Raises:
        ParameterError: the function has no parameter for the state, or `bound` names one that it does not have.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any] | inspect.Signature,
        leading: int = 0,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.bound = dict(bound or {})
        signature = function if isinstance(function, inspect.Signature) else _signature_of(name, function)
        parameters = list(signature.parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < leading:
            raise ParameterError(
                f"program {name}{_written(signature)} has no parameter for the state; write def {name}(s, ...)"
            )
        self._parameters = parameters[leading:]
        self._signature = inspect.Signature(self._parameters)
        self._named = {p.name for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        for given in self.bound:
            if given not in self._named and not self._takes_any:
                raise ParameterError(f"program {self} has no parameter {shown(given)} to bind")

    def __str__(self) -> str:
        return f"{self.name}{_written(self._signature)}"

    def split(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
        """Splits the keywords of `run` into the program's own and the run's options.

        Raises:
            ParameterError: a keyword that is neither, or an option with a wrong value.
        """
        own, options = self.divide(keywords)
        return own, run_options(options)

    def divide(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits keywords as `split` does, with the options unchecked."""
        own: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in keywords.items():
            if name in self._named:
                own[name] = value
            elif name in RUN_OPTIONS or name in sampling.OPTIONS or name == "sampling":
                options[name] = value
            elif self._takes_any:
                own[name] = value
            else:
                known = {*self._named, *RUN_OPTIONS, *sampling.OPTIONS, "sampling"}
                raise ParameterError(
                    f"{self} has no parameter {shown(name)}, and neither has run(); {remedy(name, known)}"
                )
        return own, options

    def unbound(self) -> list[inspect.Parameter]:
        """Returns the parameters a call may give by name: without bound ones, `*args` and `**kwargs`."""
        collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p for p in self._parameters if p.name not in self.bound and p.kind not in collecting]

    def bind(self, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> inspect.BoundArguments:
        """Binds a call's arguments to the function's parameters after its state. Positions skip bound parameters.

        Raises:
            ParameterError: a missing, unknown or repeated argument; the message shows the signature.
        """
        if not self.bound:
            try:
                return self._signature.bind(*positional, **keywords)
            except TypeError as error:
                raise ParameterError(f"{self}: {error}") from None
        given = {name: value for name, value in self.bound.items() if name not in keywords}
        visible = [p for p in self._parameters if p.name not in given]
        try:
            bound = inspect.Signature(visible).bind(*positional, **keywords)
        except TypeError as error:
            raise ParameterError(f"{self}: {error}") from None
        extra = {name: value for name, value in given.items() if name not in self._named}
        arguments = {**given, **bound.arguments}
        ordered = {p.name: arguments[p.name] for p in self._parameters if p.name in arguments}
        if extra:
            catch_all = next(p.name for p in self._parameters if p.kind is p.VAR_KEYWORD)
            ordered[catch_all] = {**extra, **ordered.get(catch_all, {})}
        return inspect.BoundArguments(self._signature, ordered)


def _signature_of(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # of a builtin, say
        raise ParameterError(f"program {name}: {error}; write def {name}(s, ...)") from None


def _written(signature: inspect.Signature) -> str:
    """Formats a signature; without defaults where one of them has no text."""
    try:
        return str(signature)
    except Exception:  # of a default's own code
        return f"({', '.join(signature.parameters)})"


def run_options(options: Mapping[str, Any]) -> RunOptions:
    """Checks options given by keyword and inside `sampling={...}`; the latter win.

    Raises:
        ParameterError: an unknown option or a wrong value.
        ProgramError: an option holds an operation, which can only be said.
    """
    inline.refuse(options, "an option of the run")
    inner = options.get("sampling")
    merged = {name: value for name, value in options.items() if name != "sampling"}
    if inner is not None:
        merged |= checks.entries("sampling", inner, MOST_OPTIONS, "a dict such as sampling={'temperature': 0}")
    timeout = merged.pop("timeout", None)
    return RunOptions(
        backend=chosen_backend(merged.pop("backend", None)),
        budget=_checked_budget(merged.pop("budget", None)),
        priority=checks.integer("priority", merged.pop("priority", 0), -MAX_PRIORITY, MAX_PRIORITY, _USUAL_PRIORITY),
        salt=_checked_salt(merged.pop("salt", "")),
        speculation=setting_of(merged.pop("num_api_spec_tokens", None), merged.pop("speculate", None)),
        stream=checks.switch("stream", merged.pop("stream", False)),
        timeout=None if timeout is None else checks.seconds("timeout", timeout, instead=_TIMEOUT),
        verbose=checks.switch("verbose", merged.pop("verbose", False)),
        sampling=sampling_defaults(merged),
    )


def _checked_budget(budget: object) -> Budget | None:
    if budget is not None and not isinstance(budget, Budget):
        raise ParameterError(
            f"budget={shown(budget)}; write umbel.Budget(tokens=10_000), or with calls, dollars or seconds"
        )
    return budget


def _checked_salt(salt: object) -> str:
    if not isinstance(salt, str) or not _SALT.fullmatch(checks.plain(salt)):
        raise ParameterError(f"salt={shown(salt)}; write at most 128 of the characters A-Z a-z 0-9 _ -")
    return checks.plain(salt)


def sampling_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validates the sampling fields of one layer. Rules across fields are checked once all layers are merged."""
    fields = sampling.overrides(options)
    for name, value in fields.items():
        alone = {name: value}
        if name == "min_tokens":
            alone["max_tokens"] = sampling.MAX_TOKENS
        sampling.merge(alone)
    return fields
