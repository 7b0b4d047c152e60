"""The operations of a graph's nodes. Frozen; the operations of the language itself stand here as they are in
`lang.ops`.

A *stream node* says something at a place of a stream; its first input is what the stream said before.

    Begin                         a stream of its own: the program's, or that of a run inside of it
    Append                        (before, text)                    text goes to the prompt
    Generate                      (before)                          `gen`
    Choose                        (before, choice, choice, ...)     `select`
    Look                          (before, source)                  `image`, `video`
    RoleBegin, RoleEnd            (before)                          as in `lang.ops`
    VarScopeBegin, VarScopeEnd    (before)                          as in `lang.ops`
    CachePoint                    (before)                          as in `lang.ops`
    Isolate                       (before, tenant)                  `private`
    Fork                          (before)                          here branches begin
    GetForkItem                   (fork)                            the beginning of one branch
    Join                          (before, end, end, ...)           branches come back

A *value node* is something that is known when its inputs are. It stands in no stream.

    Constant                      ()                                text of the program, or an object it assigned
    Argument                      ()                                what a run is given
    Variable                      (setter)                          what a stream node bound to a name
    Object                        (setter)                          `state.value(name)`
    StreamText                    (place)                           `state.text()` at a place of a stream
    Concat                        (text, text, ...)
    Apply                         (value)                           a pure function of `FUNCTIONS`
    Structure                     (value, ...)                      a list, tuple or dict with values inside
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fsm.composed import nodes
from ..lang import ops
from ..lang.ops import CachePoint, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ..lang.state import JoinMode

Options = Mapping[str, Any]  # sampling fields as `lang.sampling.overrides` gives them


@dataclass(frozen=True, slots=True)
class Begin:
    """Begins a stream of its own.

    Attributes:
        program: its name, for people.
        number: 0 for the program's own stream, then 1, 2, ... for runs inside of it, in the order in which they began.
    """

    program: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Append:
    pass


@dataclass(frozen=True, slots=True)
class Generate:
    """`gen`.

    Attributes:
        gen: as the program wrote it.
        defaults: sampling fields of the programs around it. Those of a run win over them, and `gen.options` over both.
        tags: open and close of the thinking, inside `separate_reasoning`; None elsewhere.
    """

    gen: ops.Gen
    defaults: Options = field(default_factory=dict)
    tags: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Choose:
    """`select`. The choices are the inputs; `select.choices` is empty.

    `defaults`: as of `Generate`; a draw takes its seed from them.
    """

    select: ops.Select
    defaults: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Look:
    """`image`, or with `num_frames` `video`."""

    num_frames: int | None = None


@dataclass(frozen=True, slots=True)
class Isolate:
    """`private`: what comes after it is cached for the tenant alone."""


@dataclass(frozen=True, slots=True)
class Fork:
    size: int


@dataclass(frozen=True, slots=True)
class GetForkItem:
    index: int


@dataclass(frozen=True, slots=True)
class Join:
    mode: JoinMode


@dataclass(frozen=True, slots=True)
class Constant:
    """`value` is a str in most places; bytes for a picture; else what a program assigned or returned."""

    value: Any  # what the user's program holds


@dataclass(frozen=True, slots=True)
class Argument:
    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """The value its input bound to `name`; with `index` one of several texts (n above 1)."""

    name: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Object:
    """The object that variable `name` stands for (`State.value`)."""

    name: str


@dataclass(frozen=True, slots=True)
class StreamText:
    pass


@dataclass(frozen=True, slots=True)
class Concat:
    pass


@dataclass(frozen=True, slots=True)
class Apply:
    """`function` of `FUNCTIONS` on its input, with constant arguments."""

    function: str
    arguments: tuple[Any, ...] = ()  # str, int, None, and tuples of them


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placeholder in the template of a `Structure`: the input with this number."""

    index: int


@dataclass(frozen=True, slots=True)
class Structure:
    """Lists, tuples and dicts with `Leaf`s in them. What a join gathers is a list with None where nothing was set."""

    template: Any  # nested list, tuple, dict of Leaf and constants


def captured_names(gen: ops.Gen) -> dict[str, bool]:
    """Returns the variables that the captures of a `gen` set → whether each is a text in every run."""
    if gen.captures is None:
        return {}
    constraint = gen.constraint
    assert constraint is not None, "captures are of a constraint"
    certain = set(gen.captures.results)
    if constraint.kind == "expression":
        certain &= nodes.certain(nodes.read(constraint.source))
    return {name: name in certain for name in gen.captures.results}


StreamOperation = (
    Begin
    | Append
    | Generate
    | Choose
    | Look
    | RoleBegin
    | RoleEnd
    | VarScopeBegin
    | VarScopeEnd
    | CachePoint
    | Isolate
    | Fork
    | GetForkItem
    | Join
)
ValueOperation = Constant | Argument | Variable | Object | StreamText | Concat | Apply | Structure
Operation = StreamOperation | ValueOperation

MAX_NESTING = 30  # of lists, tuples and dicts in one value; one that contains itself ends here, too

# Functions that `Apply` may name. Each takes the value and constants. They are those of `str` that look at nothing but
# their arguments, and the few that Python's syntax has: `text[a:b]`, `mapping[key]`, `f"{value:>8}"`, `text * 3`.

STR_METHODS = (
    "capitalize",
    "casefold",
    "center",
    "expandtabs",
    "ljust",
    "lower",
    "lstrip",
    "removeprefix",
    "removesuffix",
    "replace",
    "rjust",
    "rstrip",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
)


def _method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(value: Any, *arguments: Any) -> Any:
        return method(str(value), *arguments)

    return call


def _slice(value: Any, start: int | None, stop: int | None, step: int | None) -> Any:
    return value[start:stop:step]


def _item(value: Any, key: Any) -> Any:
    return value[key]


def _format(value: Any, specification: str) -> str:
    return format(value, specification)


def _multiply(value: Any, times: int) -> Any:
    return value * times


# Name → function of the value and the constants of `Apply.arguments`. The parameters are whatever the function takes.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: _method(name) for name in STR_METHODS},
    "ascii": ascii,
    "format": _format,
    "item": _item,
    "multiply": _multiply,
    "repr": repr,
    "slice": _slice,
    "str": str,
}
