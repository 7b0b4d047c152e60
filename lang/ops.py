"""Operations: what a program said, before anyone runs it. Frozen and whole when born.

`gen`, `select`, `image` and the roles return operations; `state += operation` hands them to
the interpreter or the tracer. Operations add up: `"Q: " + gen("a") + "\\n"` is a `Sequence`.
"""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from . import checks, inline
from .chat_template import ROLES
from .errors import ParameterError, shown
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

MAX_NAME_LENGTH = 1024  # characters of the name of a variable
MAX_CHOICES = 1024  # of one select
MAX_CHOICE_LENGTH = 16_384  # characters
MAX_FRAMES = 1024  # of one clip; backends take fewer
MAX_PIECES = 100_000  # of one list that is appended
MAX_NESTING = 64  # of lists in lists that are appended; a list that contains itself has no end
MAX_TRIES = 10  # calls for one constrained text; a model that has not understood by then will not
USUAL_TRIES = 3


class Op:
    """Base of all operations. `a + b` is a Sequence; strings join in as ConstantText. An f-string keeps an operation
    where it is written, as in `s += f"Hello {gen('x')}"` (see `inline`)."""

    __slots__ = ()

    def __format__(self, specification: str) -> str:
        if specification:
            raise ParameterError(
                f"{label_of(self)} has no format {specification!r}: its text is not known yet; write "
                f'f"{{{label_of(self)}}}", or format s[name] where it is known'
            )
        return str(self)

    def __str__(self) -> str:
        return inline.placeholder(self, label_of(self))

    def __add__(self, other: object) -> "Sequence":
        return Sequence((*_flatten(self), *_flatten(expression(other))))

    def __radd__(self, other: object) -> "Sequence":
        return Sequence((*_flatten(expression(other)), *_flatten(self)))


@dataclass(frozen=True, slots=True)
class ConstantText(Op):
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
        max_tries: most calls for a text that satisfies constraint and type, where the backend enforces neither.
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
    """Starts a scope: text appended from here on belongs to variable `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class VarScopeEnd(Op):
    name: str


@dataclass(frozen=True, slots=True)
class Image(Op):
    """An image, as a path, bytes, or a PIL image. URLs are refused: `fetch_image` gives the bytes of one."""

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


class RecordedText(str):
    """A text that stands for one that is known when a traced program runs: the recorder wants it as it is."""

    __slots__ = ()


def expression(value: object, depth: int = MAX_NESTING) -> Op:
    """Makes an operation of the right side of `+=`.

    Args:
        depth: of lists in lists that are taken.

    Raises:
        ParameterError: the value is None or of a type that cannot be appended; the message says what can.
        ProgramError: a text holds an operation that was cut or changed, or said before.
    """
    if isinstance(value, Op):
        return value
    if isinstance(value, str):
        text = value if isinstance(value, RecordedText) else checks.plain(value)
        return _inlined(text) if inline.touches(text) else ConstantText(text)
    if isinstance(value, list | tuple):
        if depth == 0:
            raise ParameterError(
                f"what is appended has lists in lists, more than {MAX_NESTING} deep, or one that contains itself; "
                "write one flat list"
            )
        items = checks.members("a list that is appended", value, MAX_PIECES, "a list of strings and operations")
        return Sequence(tuple(op for item in items for op in _flatten(expression(item, depth - 1))))
    refuse_awaitable(value, "cannot append {} to a prompt")
    if value is None:
        raise ParameterError("cannot append None to a prompt; did a helper forget to return its expression?")
    raise ParameterError(
        f"cannot append {type(value).__name__} to a prompt; write a string (str(value)), gen(...), select(...), "
        "image(...), a role such as user(...), or a list of these"
    )


def refuse_awaitable(value: object, what: str) -> None:
    """Raises ParameterError for a value that has to be waited for, and closes it, or Python would warn later.

    Args:
        what: a sentence with {} for the value.
    """
    if isinstance(value, Awaitable):
        told = what.format(shown(value))
        if isinstance(value, Coroutine):
            with contextlib.suppress(Exception):  # one that runs, or does not want to end
                value.close()
        raise ParameterError(f"{told}; write await in front of it")


def _inlined(text: str) -> Op:
    parts = [part if isinstance(part, Op) else ConstantText(part) for part in inline.split(text)]
    return parts[0] if len(parts) == 1 else Sequence(tuple(op for part in parts for op in _flatten(part)))


def label_of(op: Op) -> str:
    """An operation as the program wrote it, in short."""
    match op:
        case ConstantText(text):
            return repr(text)
        case Sequence((RoleBegin(role), *_)):
            return f"{role}(...)"
        case Sequence(members):
            return " + ".join(map(label_of, members))
        case Gen(name) | Select(name):
            return f"{type(op).__name__.lower()}({'' if name is None else repr(name)})"
        case SeparateReasoning(inner):
            return f"separate_reasoning({label_of(inner)})"
        case RoleBegin(role):
            return f"{role}_begin()"
        case RoleEnd(role):
            return f"{role}_end()"
        case _:
            return f"{type(op).__name__.lower()}(...)"


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
        ParameterError: no choices or more than 1,024, a choice that is not a string of 1 to 16,384 characters,
            duplicates, an unknown method, two methods, a temperature that is not 0 to 100, max_tries that are not 1 to
            10, or max_tries and allow_best_effort with another method than the default one.
    """
    if name is not None:
        name = checked_name(name)
    owner = f"select({shown(name)})"
    if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
        raise ParameterError(f"{owner} needs choices=[...], a list of strings; got {shown(choices)}")
    options = _checked_choices(owner, choices)
    chosen = _checked_method(owner, method, choices_method)
    warmth = checks.number(f"{owner}: temperature", temperature, 0, 100, "0 for the best choice, or a number up to 100")
    tries = checked_tries(max_tries, allow_best_effort)
    for option, given in (("max_tries", max_tries), ("allow_best_effort", allow_best_effort)):
        if given is not None and chosen != CHOICES_METHODS[0]:
            raise ParameterError(
                f"{owner}: {option}={given!r} is for models that generate the choice, which method={chosen!r} never "
                f"does; remove {option}"
            )
    return Select(name, options, chosen, float(warmth), *tries)


def _checked_choices(owner: str, choices: Iterable[str]) -> tuple[str, ...]:
    options = checks.members(f"{owner}: choices", choices, MAX_CHOICES, "a list of strings")
    if not options:
        raise ParameterError(f"{owner}: choices is empty; give at least one string")
    inline.refuse(options, f"{owner}: a choice")
    for option in options:
        if not isinstance(option, str) or not checks.plain(option):
            raise ParameterError(f"{owner}: choices: a choice must be a non-empty string, got {shown(option)}")
    texts = tuple(map(checks.plain, options))
    longest = max(map(len, texts))
    if longest > MAX_CHOICE_LENGTH:
        raise ParameterError(f"{owner}: one of the choices has {longest} characters; write at most {MAX_CHOICE_LENGTH}")
    repeated = sorted(text for text, times in Counter(texts).items() if times > 1)
    if repeated:
        raise ParameterError(f"{owner}: choices repeat: {shown(repeated)}")
    return texts


def _checked_method(owner: str, method: object, choices_method: object) -> ChoicesMethod:
    given = [
        checks.one_of(name, value, CHOICES_METHODS)
        for name, value in (("method", method), ("choices_method", choices_method))
        if value is not None
    ]
    if len(set(given)) > 1:
        raise ParameterError(
            f"{owner}: method={given[0]!r} and choices_method={given[1]!r} are two names of one parameter; give one of "
            "them"
        )
    return cast(ChoicesMethod, given[0]) if given else CHOICES_METHODS[0]


def checked_tries(max_tries: int | None, allow_best_effort: bool | None) -> tuple[int, bool]:
    """Both with their defaults.

    Raises:
        ParameterError: tries that are not 1 to 10, or no bool.
    """
    tries = USUAL_TRIES
    if max_tries is not None:
        tries = checks.integer("max_tries", max_tries, 1, MAX_TRIES, f"1 to {MAX_TRIES}, {USUAL_TRIES} being usual")
    if allow_best_effort is not None:
        checks.switch("allow_best_effort", allow_best_effort)
    return tries, bool(allow_best_effort)


def image(source: Any) -> Image:  # Any: see Image.source
    """An image at this place of the prompt: a path, the bytes of a file, or a PIL image.

    A URL is refused, because a program that fetches whatever it is handed lets strangers look around in its network.
    `image(fetch_image(url, hosts=[...]))` takes it from hosts that are trusted.
    """
    inline.refuse(source, "the path of an image")
    return Image(source)


def video(source: Any, num_frames: int) -> Video:
    """`num_frames` frames, 1 to 1,024, of a clip at this place of the prompt. Backends take fewer of them."""
    inline.refuse(source, "the path of a video")
    return Video(source, checks.integer("video num_frames", num_frames, 1, MAX_FRAMES))


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
    if not isinstance(name, str) or checks.plain(name) not in ROLES:
        raise ParameterError(f"unknown role {shown(name)}; write one of {', '.join(ROLES)}")
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
        ParameterError: an unknown model type, a content without a gen, or one whose reasoning is separated already.
    """
    tags = REASONING_TAGS[checks.one_of("model_type", model_type, REASONING_TAGS)]
    inner = expression(content)
    if any(isinstance(op, SeparateReasoning) for op in _flatten(inner)):
        raise ParameterError("separate_reasoning() inside separate_reasoning(): the outer one does nothing; remove it")
    if not any(isinstance(op, Gen) for op in _flatten(inner)):
        raise ParameterError("separate_reasoning() of a content that generates nothing; give it a gen(...)")
    return SeparateReasoning(inner, *tags)


def checked_name(name: object) -> str:
    """The name of a variable. Raises ParameterError for what cannot be one."""
    if not isinstance(name, str) or not checks.plain(name):
        raise ParameterError(f"a variable name must be a non-empty string, got name={shown(name)}")
    inline.refuse(name, "the name of a variable")
    return checks.text("the name of a variable", name, MAX_NAME_LENGTH)
