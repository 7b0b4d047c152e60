"""Operations: what a program said, before anyone runs it. Frozen and whole when born.

`gen`, `select`, `image` and the roles return operations; `state += operation` hands them to
whoever runs or records the program. Operations add up: `"Q: " + gen("a") + "\\n"` is a `Sequence`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .chat_template import ROLES
from .errors import ParameterError
from .protocol import ConstraintSpec
from .result import Result

ChoicesMethod = Literal[
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
    "overshoot",
    "exact",
]
token_length_normalized: ChoicesMethod = "token_length_normalized"
greedy_token_selection: ChoicesMethod = "greedy_token_selection"
unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"
overshoot: ChoicesMethod = "overshoot"
exact: ChoicesMethod = "exact"
CHOICES_METHODS: tuple[ChoicesMethod, ...] = get_args(ChoicesMethod)

MAX_TRIES = 10  # calls for one constrained text; a model that has not understood by then will not
USUAL_TRIES = 3


class Op:
    """Base of all operations. `a + b` is a Sequence; strings join in as Text."""

    __slots__ = ()

    def __add__(self, other: object) -> "Sequence":
        return Sequence((*_flatten(self), *_flatten(expression(other))))

    def __radd__(self, other: object) -> "Sequence":
        return Sequence((*_flatten(expression(other)), *_flatten(self)))


@dataclass(frozen=True, slots=True)
class Text(Op):
    """A constant string, tokenized as plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence(Op):
    """Operations one after the other."""

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Gen(Op):
    """Generate text into a variable.

    Attributes:
        options: validated sampling fields the program gave explicitly.
        constraint: what the text has to be; None: anything.
        result: how the text becomes the object that `State.value` gives; None: it is the text.
        token_healing: see `protocol.GenRequest`.
        max_tries: most calls for a text that satisfies the constraint, where nobody enforces it.
        allow_best_effort: the last text is kept when none does.
    """

    name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    text_in_logprobs: bool = True
    constraint: ConstraintSpec | None = None
    result: Result | None = None
    token_healing: bool | None = None
    max_tries: int = USUAL_TRIES
    allow_best_effort: bool = False


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Choose one of `choices` into a variable: the best at temperature 0, else drawn.

    `max_tries`, `allow_best_effort`: as of `Gen`, on a backend that does not score choices.
    """

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    max_tries: int = USUAL_TRIES
    allow_best_effort: bool = False


@dataclass(frozen=True, slots=True)
class RoleBegin(Op):
    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Op):
    role: str


@dataclass(frozen=True, slots=True)
class VarScopeBegin(Op):
    """From here on, the text that is appended belongs to variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class VarScopeEnd(Op):
    name: str


@dataclass(frozen=True, slots=True)
class Image(Op):
    """An image, as a path, bytes, or a PIL image. URLs are refused: `fetch_image` gives the bytes behind one."""

    source: Any  # str | Path | bytes | PIL.Image.Image: PIL is not imported to name it


@dataclass(frozen=True, slots=True)
class Video(Op):
    source: Any  # str | Path | bytes
    num_frames: int


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Op):
    """Split the thinking part off what `op` generates, into `<name>_reasoning_content`."""

    op: Op
    open_tag: str
    close_tag: str


def expression(value: object) -> Op:
    """What stands right of `+=` → an operation.

    Raises:
        ParameterError: the value is None or of a type that cannot be appended; the message says what can.
    """
    if isinstance(value, Op):
        return value
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, list | tuple):
        return Sequence(tuple(op for item in value for op in _flatten(expression(item))))
    if value is None:
        raise ParameterError("cannot append None to a prompt; did a helper forget to return its expression?")
    raise ParameterError(
        f"cannot append {type(value).__name__} to a prompt; write a string (str(value)), gen(...), select(...), "
        "image(...), a role such as user(...), or a list of these"
    )


def _flatten(op: Op) -> tuple[Op, ...]:
    return op.ops if isinstance(op, Sequence) else (op,)


# --------------------------------------------------------------------------------- what users write


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
    method: ChoicesMethod | None = None,
    max_tries: int | None = None,
    allow_best_effort: bool | None = None,
) -> Select:
    """Choose one of `choices` as the continuation, store it under `name` and append it.

    Methods (also public names; `choices_method` is SGLang's name for `method`):

    - `token_length_normalized`, the default, compares the mean log-probability per token.
    - `greedy_token_selection` goes token by token.
    - `unconditional_likelihood_normalized` subtracts what each choice would score without the prompt.
    - `overshoot` is the probability that the text goes on with the choice, written in its usual tokens, the last of
      which may go past its end ("A" inside " An"). It takes one forward pass.
    - `exact` is that probability over all the tokens that spell the choice, within bounds that
      `get_meta_info(name)["bounds"]` gives. It takes some dozens of short forward passes.

    For the last two, a choice that another one begins with ("A", "A+") is chosen when the text goes on with it and not
    with the longer one.

    `temperature` 0 takes the best choice. Above 0 one is drawn, with the run's seed if it has one, in proportion to
    probability ** (1 / temperature); `get_meta_info(name)["probabilities"]` has the probabilities.

    A hosted model that scores nothing generates one of the choices instead, with this temperature, where the method is
    the default one: `get_meta_info(name)["choices_method"]` is then "generated", and there are no probabilities.
    `max_tries` and `allow_best_effort` are for such models, and mean what they do in `gen`.

    Raises:
        ParameterError: no choices, a choice that is not a non-empty string, duplicates, an unknown method, two
            methods, a temperature below 0, or max_tries that are not 1 to 10.
    """
    if name is not None:
        check_name(name)
    if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
        raise ParameterError(f"select({name!r}) needs choices=[...], a list of strings; got {choices!r}")
    options = tuple(choices)
    if not options:
        raise ParameterError(f"select({name!r}): choices is empty; give at least one string")
    for option in options:
        if not isinstance(option, str) or not option:
            raise ParameterError(f"select({name!r}): a choice must be a non-empty string, got {option!r}")
    if len(set(options)) != len(options):
        raise ParameterError(
            f"select({name!r}): choices repeat: {sorted({o for o in options if options.count(o) > 1})}"
        )
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
        raise ParameterError(
            f"select({name!r}): temperature={temperature!r}; write 0 for the best choice, or a number up to 100"
        )
    if method is not None and choices_method is not None and method != choices_method:
        raise ParameterError(
            f"select({name!r}): method={method!r} and choices_method={choices_method!r} are two names of one "
            "parameter; give one of them"
        )
    chosen = method or choices_method or "token_length_normalized"
    if chosen not in CHOICES_METHODS:
        given = "method" if method else "choices_method"
        raise ParameterError(f"unknown {given} {chosen!r}; write one of {', '.join(CHOICES_METHODS)}")
    return Select(name, options, chosen, float(temperature), *checked_tries(max_tries, allow_best_effort))


def checked_tries(max_tries: int | None, allow_best_effort: bool | None) -> tuple[int, bool]:
    """Both with their defaults.

    Raises:
        ParameterError: tries that are not 1 to 10, or no bool.
    """
    if max_tries is not None and (type(max_tries) is not int or not 1 <= max_tries <= MAX_TRIES):
        raise ParameterError(f"max_tries={max_tries!r}; write 1 to {MAX_TRIES}, {USUAL_TRIES} being usual")
    if not isinstance(allow_best_effort, bool | None):
        raise ParameterError(f"allow_best_effort must be True or False, got {allow_best_effort!r}")
    return USUAL_TRIES if max_tries is None else max_tries, bool(allow_best_effort)


def image(source: Any) -> Image:  # Any: see Image.source
    """An image at this place of the prompt: a path, the bytes of a file, or a PIL image.

    A URL is refused, because a program that fetches whatever it is handed lets strangers look around in its network.
    `image(fetch_image(url, hosts=[...]))` takes it from hosts that are trusted.
    """
    return Image(source)


def video(source: Any, num_frames: int) -> Video:
    """`num_frames` frames of a clip at this place of the prompt."""
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise ParameterError(f"video num_frames={num_frames!r}; write an integer of at least 1")
    return Video(source, num_frames)


def system(content: object = None) -> Op:
    """A system turn with this content."""
    return _role("system", content)


def user(content: object = None) -> Op:
    """A user turn with this content."""
    return _role("user", content)


def assistant(content: object = None) -> Op:
    """An assistant turn with this content, usually `gen(...)`."""
    return _role("assistant", content)


def role(name: str, content: object) -> Op:
    """A turn of any role the model's chat template knows, such as "tool" or "developer"."""
    return _role(name, content)


def _role(name: str, content: object) -> Op:
    if name not in ROLES:
        raise ParameterError(f"unknown role {name!r}; write one of {', '.join(ROLES)}")
    if content is None:
        raise ParameterError(f"{name}() needs its content; to open a turn without closing it write {name}_begin()")
    return Sequence((RoleBegin(name), *_flatten(expression(content)), RoleEnd(name)))


def system_begin() -> Op:
    return RoleBegin("system")


def system_end() -> Op:
    return RoleEnd("system")


def user_begin() -> Op:
    return RoleBegin("user")


def user_end() -> Op:
    return RoleEnd("user")


def assistant_begin() -> Op:
    return RoleBegin("assistant")


def assistant_end() -> Op:
    return RoleEnd("assistant")


# How models mark their thinking; the opening tag may be missing because the template wrote it.
REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
}


def separate_reasoning(content: object, model_type: str = "qwen3") -> Op:
    """Split thinking off what `content` generates.

    `s += separate_reasoning(gen("answer"), model_type="qwen3")` sets `s["answer"]` to the answer alone
    and `s["answer_reasoning_content"]` to the thinking; the running text keeps the answer only.

    Raises:
        ParameterError: an unknown model type.
    """
    if model_type not in REASONING_TAGS:
        raise ParameterError(f"unknown model_type {model_type!r}; write one of {', '.join(REASONING_TAGS)}")
    return SeparateReasoning(expression(content), *REASONING_TAGS[model_type])


def check_name(name: object) -> None:
    """Raises ParameterError for what cannot be the name of a variable."""
    if not isinstance(name, str) or not name:
        raise ParameterError(f"a variable name must be a non-empty string, got {name!r}")
