"""Operations: what a program said, before anyone runs it. Frozen and whole when born.

`gen`, `select`, `image` and the roles return operations; `state += operation` hands them to
the interpreter or the tracer. Operations add up: `"Q: " + gen("a") + "\\n"` is a `Sequence`.

An operation may be formatted into a text: `f"Hello {gen('x')}"`. Python makes an ordinary string of it, so the
operation leaves a placeholder there, and `expression` takes it back out where the text becomes part of a prompt:

    f"Hello {gen('x')}!"   →   "Hello " + placeholder + "!"   →   "Hello " + gen("x") + "!"

    mark gen('x') mark word_number mark      printed, it reads: gen('x')

No text of a user can hold one: the word is a secret of the process, and a placeholder stands only for an operation of
its thread that has not been said yet. The remainder of one that was cut or changed is found by its marks and its word,
and refused.
"""

import contextlib
import itertools
import re
import secrets
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from . import checks
from .caching import CACHE_SECONDS
from .chat_template import ROLES
from .errors import ParameterError, ProgramError, shown
from .protocol import ConstraintSpec
from .result import Captures, Result

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
LONGEST_TTL = 86_400.0  # seconds


class Op:
    """Base of all operations. `a + b` is a Sequence; strings join in as ConstantText. An f-string keeps an operation
    where it is written, as in `s += f"Hello {gen('x')}"`."""

    __slots__ = ()

    def __format__(self, specification: str) -> str:
        if specification:
            raise ParameterError(
                f"{label_of(self)} has no format {specification!r}: its text is not known yet; write "
                f'f"{{{label_of(self)}}}", or format s[name] where it is known'
            )
        return str(self)

    def __str__(self) -> str:
        return placeholder(self, label_of(self))

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
        captures: the parts of the text that become variables, too.
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
    captures: Captures | None = None


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Choose one of `choices` into a variable: the best at temperature 0, else drawn.

    `max_tries`, `allow_best_effort`: as of `Gen`, on a backend that does not score choices. `adapter`: scores the
    choices; None: that of the sampling fields around it.
    """

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    temperature: float = 0.0
    max_tries: int = USUAL_TRIES
    allow_best_effort: bool = False
    adapter: str | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """Sampling fields that the program gave explicitly, as those of `Gen`."""
        return {} if self.adapter is None else {"adapter": self.adapter}


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
class CachePoint(Op):
    """Keeps what the prompt says up to here for `ttl` seconds. Appends nothing."""

    ttl: float


@dataclass(frozen=True, slots=True)
class PrivateBegin(Op):
    """Caches what the prompt says from here on for this tenant alone. Appends nothing."""

    tenant: Any  # checked when it is said: a text that a traced program does not know yet


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
        return _inlined(text) if holds_operation(text) else ConstantText(text)
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
        problem = what.format(shown(value))
        if isinstance(value, Coroutine):
            with contextlib.suppress(Exception):  # one that runs, or does not want to end
                value.close()
        raise ParameterError(f"{problem}; write await in front of it")


def _inlined(text: str) -> Op:
    parts = [ConstantText(part) if isinstance(part, str) else part for part in split_operations(text)]
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
        case CachePoint(ttl):
            return f"cache_point(ttl={ttl:g})"
        case PrivateBegin(tenant):
            return f"private({tenant!r})"
        case _:
            return f"{type(op).__name__.lower()}(...)"


def _flatten(op: Op) -> tuple[Op, ...]:
    return op.ops if isinstance(op, Sequence) else (op,)


def image(source: Any) -> Image:  # Any: see Image.source
    """An image at this place of the prompt: a path, the bytes of a file, or a PIL image.

    A URL is refused, because a program that fetches whatever it is handed lets strangers look around in its network.
    `image(fetch_image(url, hosts=[...]))` takes it from hosts that are trusted.
    """
    refuse_operations(source, "the path of an image")
    return Image(source)


def video(source: Any, num_frames: int) -> Video:
    """`num_frames` frames, 1 to 1,024, of a clip at this place of the prompt. Backends take fewer of them."""
    refuse_operations(source, "the path of a video")
    return Video(source, checks.integer("video num_frames", num_frames, 1, MAX_FRAMES))


def cache_point(ttl: float = CACHE_SECONDS) -> CachePoint:
    """Keeps what the prompt says up to here, for prompts that begin the same: explicit caching.

    `s += manual; s += cache_point(ttl=3600)` makes the `gen`s after it keep the tokens of the manual for an hour, also
    for other runs with the same salt. Each use starts the hour anew. It changes no text. The last four points of a
    prompt count, and at least 1,024 tokens have to lie before one. `state.cost.usage.cache_write_tokens` counts what
    was stored, `cache_read_tokens` what was found stored. `Anthropic` puts a breakpoint there, and its provider chooses
    the time. Backends that keep nothing on request ignore points, so programs run on all of them.

    Args:
        ttl: seconds, up to a day.
    """
    return CachePoint(checks.seconds("cache_point ttl", ttl, high=LONGEST_TTL))


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
    refuse_operations(name, "the name of a variable")
    return checks.text("the name of a variable", name, MAX_NAME_LENGTH)


# --------------------------------------------------------------------------------- operations inside of text

MOST_WAITING = 1000  # operations of a thread in texts that no program has said; the oldest are forgotten

# Three characters of a plane that no script uses: fonts have single ones, which any text may hold. They read the same
# from the end, as what is left of an operation in a reversed text does.
_OUTER, _INNER = (chr(0x100000 + number) for number in secrets.SystemRandom().sample(range(0xFFFD), 2))
_MARK = _OUTER + _INNER + _OUTER
_WORD = "".join(secrets.choice("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(10))
_LOWERED = _WORD.lower()
_WHOLE = re.compile(f"({_MARK}[^{_MARK}]*{_MARK}{_WORD}_[0-9]+{_MARK})")
_LABEL = re.compile(f"[{_MARK}]([^{_MARK}]+)")
_NO_MARKS = {ord(character): None for character in _MARK}
_SHOWN = 80  # characters of a label

# Around what may be printed and must not be said: characters without width, the same from the end.
_HALF = "".join(secrets.choice("\u200b\u200c\u200d\u2060") for _ in range(8))
_ASIDE = _HALF + _HALF[::-1]
_DESCRIPTION = re.compile(f"{_ASIDE}(.*?){_ASIDE}", re.DOTALL)

_numbers = itertools.count(1)  # of all threads together: a placeholder of one is none of another
_used = threading.Event()  # set when the first placeholder is made: until then no text has to be searched


class _Waiting(threading.local):
    """The placeholders of one thread with their operations, in the order in which they were made."""

    def __init__(self) -> None:
        self.operations: dict[str, Op] = {}


_waiting = _Waiting()


def placeholder(operation: Op, label: str) -> str:
    """Returns a text that stands for `operation` until it is said once. `label`: how a person reads it."""
    waiting = _waiting
    _used.set()
    text = f"{_MARK}{_short(label)}{_MARK}{_WORD}_{next(_numbers)}{_MARK}"
    waiting.operations[text] = operation
    if len(waiting.operations) > MOST_WAITING:
        del waiting.operations[next(iter(waiting.operations))]
    return text


def unsayable(description: str) -> str:
    """Returns `description` for print and messages. A prompt that it gets into is refused: a state is not its text."""
    _used.set()
    return f"{_ASIDE}{description}{_ASIDE}"


def holds_operation(text: str) -> bool:
    """Returns whether a placeholder, a remainder of one, or what must not be said is in the text."""
    if not _used.is_set():
        return False
    return str.__contains__(text, _MARK) or str.__contains__(text, _ASIDE) or _LOWERED in str.lower(text)


def split_operations(text: str) -> Iterator[str | Op]:
    """Yields texts and operations, in order; no text is empty. Each operation is given out once.

    Raises:
        ProgramError: what must not be said, what is left of a placeholder, or one whose operation is not there for
            the taking.
    """
    if _ASIDE in text:
        raise ProgramError(
            f"a text holds {_label_in(text)}, which is no text; write its text(), or one of its variables, s[name]"
        )
    for index, part in enumerate(_WHOLE.split(text)):
        if index % 2:
            yield _taken(part)
        elif holds_operation(part):
            raise _cut(part)
        elif part:
            yield part


def readable(text: str) -> str:
    """Returns a text for a message: with the labels of the operations in it."""
    if not holds_operation(text):
        return text
    return _WHOLE.sub(lambda found: _label_in(found[0]), _DESCRIPTION.sub(r"\1", text))


def refuse_operations(value: object, what: str) -> None:
    """Raises ProgramError when there is an operation in a text that is not said. `what`: the value is, for messages."""
    waiting, seen = [value] if _used.is_set() else [], set[int]()
    while waiting:
        match waiting.pop():
            case str(text):
                if holds_operation(text):
                    raise ProgramError(
                        f"{what} holds {_label_in(text)}, which can only be said: s += ... ; write a text there, such "
                        "as s[name]"
                    )
            case (list() | tuple() | dict()) as members if id(members) not in seen:
                seen.add(id(members))
                waiting += _members(members)


def _members(found: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[Any]:
    """Iterates by the methods of the base: a subclass's are user code, and may raise or never end."""
    if isinstance(found, dict):
        return itertools.chain.from_iterable(dict.items(found))
    return list.__iter__(found) if isinstance(found, list) else tuple.__iter__(found)


def _taken(part: str) -> Op:
    operation = _waiting.operations.pop(part, None)
    if operation is not None:
        return operation
    label = _label_in(part)
    raise ProgramError(
        f"a text holds {label}, which was said before, or was put into the text by another thread or long ago; put it "
        f'into a new text where it is said: s += f"... {{{label}}}", or s += "..." + {label}'
    )


def _cut(part: str) -> ProgramError:
    label = _label_in(part)
    return ProgramError(
        f"a text that holds {label} was cut, split, escaped or changed, and {label} is not whole any more; change the "
        f'text before it is put together: write s += "...".strip() + {label}'
    )


def _short(label: str) -> str:
    label = " ".join(label.translate(_NO_MARKS).split())
    return label if len(label) <= _SHOWN else f"{label[: _SHOWN - 3]}..."


def _label_in(text: str) -> str:
    """Names the first operation in the text as it was written; where it was cut, in general."""
    if _ASIDE in text:
        described = _DESCRIPTION.search(text)
        return _short(described[1]) if described else "a state"
    found = _LABEL.search(text)
    return found[1] if found is not None and len(found[1]) <= _SHOWN and _WORD not in found[1] else "gen(...)"
