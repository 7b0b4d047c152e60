"""The configurations that meet: everything on, the ablations of the paper's figure 8 c, and ours.

A configuration is a set of runtime options and of frontend switches. Options that this version does not have, or does
not have yet, are named in the report; nothing is left out in silence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from umbel.lang.errors import ParameterError, UmbelError
from umbel.lang.runtime_options import RuntimeOptions

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Configuration:
    """How programs are run.

    Attributes:
        name: on the command line and in the table.
        about: what is switched off, as the report says it.
        options: of the runtime.
        parallel: branches run at once; False runs one after the other.
        hints: the interpreter sends the prefix of a fork ahead.
    """

    name: str
    about: str
    options: Mapping[str, Value] = field(default_factory=dict)
    parallel: bool = True
    hints: bool = True

    @property
    def frontend(self) -> bool:
        """It differs from the full configuration in the interpreter only."""
        return not self.options and not (self.parallel and self.hints)

    def runtime_options(self, common: Mapping[str, Value]) -> dict[str, Value]:
        """`common` with this configuration's own options.

        Raises:
            ParameterError: this version's runtime has no such option, or not with that value.
        """
        known = set(RuntimeOptions.__struct_fields__)
        options = {**common, **self.options}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ParameterError(f"this version's runtime has no option {', '.join(unknown)}")
        RuntimeOptions(**options)  # type: ignore[arg-type]  # checks the values
        return options


FULL = Configuration("full", "all optimisations")
PAPER = (
    Configuration("no-cache", "No cache, and so no hints", {"radix_cache": False}, hints=False),
    Configuration("fcfs", "First come, first served", {"policy": "fcfs"}),
    Configuration("no-parallelism", "No frontend parallelism", parallel=False),
    Configuration("no-hint", "No frontend hint", hints=False),
)
OURS = (
    Configuration("no-tree-attention", "No tree attention", {"tree_attention": False}),
    Configuration("no-screened-head", "No screened head", {"screened_head": False}),
    Configuration("no-in-batch-sharing", "No in-batch sharing", {"in_step_sharing": False}),
    Configuration("no-jump-forward", "No jump-forward", {"jump_forward": False}),
    Configuration("no-guesses", "No guesses of next tokens", {"token_guesses": False}),
    Configuration("no-constraint-cache", "No cache of compiled constraints", {"constraint_cache": 0}),
    Configuration("torch-kernels", "Kernels of torch", {"kernels": "torch"}),
)
FORMATS = (Configuration("int8", "All optimisations, INT8 weights", {"weights": "int8"}),)
# What a CPU does not do, or not well: there the first two are the full configuration, and torch computes the third.
ON_DEVICES = (
    Configuration("no-overlap", "No step planned while one runs", {"overlap": False}),
    Configuration("no-cuda-graphs", "No captured steps", {"cuda_graphs": False}),
    Configuration("fp8-keys", "All optimisations, keys and values in float8", {"kv_dtype": "fp8"}),
)
ON_CPU = (FULL, *PAPER, *OURS, *FORMATS)
ALL = {configuration.name: configuration for configuration in (*ON_CPU, *ON_DEVICES)}


def choose(names: Iterable[str]) -> list[Configuration]:
    """Configurations by name, the full one first and always among them.

    Raises:
        ParameterError: an unknown name.
    """
    chosen = [FULL]
    for name in names:
        if name not in ALL:
            raise ParameterError(f"no configuration {name!r}; there are {', '.join(ALL)}")
        if ALL[name] not in chosen:
            chosen.append(ALL[name])
    return chosen


def available(
    configurations: Iterable[Configuration], common: Mapping[str, Value]
) -> tuple[list[Configuration], dict[str, str]]:
    """Those that this version can run, and why it cannot run the others, by name."""
    usable, missing = [], {}
    for configuration in configurations:
        try:
            configuration.runtime_options(common)
        except UmbelError as error:
            missing[configuration.name] = str(error)
        else:
            usable.append(configuration)
    return usable, missing


def option(text: str) -> tuple[str, Value]:
    """`NAME=VALUE` of the command line → a runtime option.

    Raises:
        ParameterError: it is not of that form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ParameterError(f"--option {text!r}; write NAME=VALUE, such as pool_tokens=32768")
    return name, _value(value)


def _value(text: str) -> Value:
    words: dict[str, Value] = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
