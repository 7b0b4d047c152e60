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
"""Compares choices of a `select` by the mean log-probability of their tokens. The default method.

A choice of many tokens is not worse for it; one whose later tokens follow from its first ones is better.

Examples:
    >>> @ul.function
    ... def capital(s, method):
    ...     cities = [" Mumbai", " New Delhi"]
    ...     s += "India is ruled from" + ul.select("city", cities, method=method)
    >>> india = ul.Echo(scores={" Mumbai": -1.0, " New Delhi": [-1.5, -0.1]})  # of each token
    >>> state = capital.run(ul.token_length_normalized, backend=india)
    >>> state["city"], state.get_meta_info("city")["choice_scores"]
    (' New Delhi', {' Mumbai': -1.0, ' New Delhi': -0.8})
"""
greedy_token_selection: ChoicesMethod = "greedy_token_selection"
"""Decides a `select` token by token: at each place the choices with the most probable token are kept.

A choice that has ended goes on with the mean of its tokens. Of those kept to the end the first is taken. A score is the
number of places at which the choice was kept.

Examples:
    >>> @ul.function
    ... def capital(s, method):
    ...     cities = [" Mumbai", " New Delhi"]
    ...     s += "India is ruled from" + ul.select("city", cities, method=method)
    >>> india = ul.Echo(scores={" Mumbai": -1.0, " New Delhi": [-1.5, -0.1]})  # of each token
    >>> state = capital.run(ul.greedy_token_selection, backend=india)
    >>> state["city"], state.get_meta_info("city")["choice_scores"]
    (' Mumbai', {' Mumbai': 1.0, ' New Delhi': 0.0})
"""
unconditional_likelihood_normalized: ChoicesMethod = "unconditional_likelihood_normalized"
"""Compares choices of a `select` by how much the prompt makes them more probable, as a mean over their tokens.

From the log-probability of each token is subtracted what it is without the prompt. So a choice that is rare everywhere,
and a little less rare here, beats one that is common everywhere. It computes the choices twice.

Examples:
    >>> @ul.function
    ... def roman_name(s, method):
    ...     names = [" Paris", " Lutetia"]
    ...     s += "The Romans called it" + ul.select("name", names, method=method)
    >>> echo = ul.Echo(
    ...     scores={" Paris": -1.0, " Lutetia": -2.0},
    ...     unconditional_scores={" Paris": -1.5, " Lutetia": -9.0},
    ... )
    >>> state = roman_name.run(ul.unconditional_likelihood_normalized, backend=echo)
    >>> state["name"], state.get_meta_info("name")["choice_scores"]
    (' Lutetia', {' Paris': 0.5, ' Lutetia': 7.0})
"""
overshoot: ChoicesMethod = "overshoot"
"""Compares choices of a `select` by the probability that the text goes on with them, in their usual tokens.

The last token may go past the end of the choice: "A" stands inside " An". A choice that another one begins with ("A",
"A+") is chosen when the text goes on with it and not with the longer one. A score is the logarithm of the probability,
of all of the choice, so that longer ones score less. It takes one forward pass. A `Runtime`, a server of umbel and an
`Echo` with probabilities have it.

Examples:
    >>> @ul.function
    ... def grade(s, essay, method):
    ...     s += essay + " Grade: " + ul.select("grade", choices=["A", "B"], method=method)
    >>> echo = ul.Echo(probabilities={"A": 0.3, "B": 0.1})
    >>> state = grade.run("Venice sinks.", ul.overshoot, backend=echo)
    >>> state["grade"]
    'A'
    >>> round(state.get_meta_info("grade")["probabilities"]["A"], 2)  # among the choices
    0.75
"""
exact: ChoicesMethod = "exact"
"""Compares choices of a `select` by the probability that the text goes on with them, in whatever tokens spell them.

As `overshoot`, with all the ways to spell a choice summed, within bounds: `get_meta_info(name)["mass"]` has those of
the probability among all texts, `["bounds"]` those of the probability among the choices. It takes some dozens of short
forward passes. A `Runtime`, a server of umbel and an `Echo` with probabilities have it.

Examples:
    >>> @ul.function
    ... def grade(s, essay, method):
    ...     s += essay + " Grade: " + ul.select("grade", choices=["A", "B"], method=method)
    >>> echo = ul.Echo(probabilities={"A": (0.3, 0.31), "B": 0.1})
    >>> state = grade.run("Venice sinks.", ul.exact, backend=echo)
    >>> state["grade"], state.get_meta_info("grade")["mass"]["A"]
    ('A', (0.3, 0.31))
"""
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
    from .generation import ConstraintExpression  # which imports this module

    if isinstance(value, ConstraintExpression):
        raise ParameterError(
            f'cannot append {shown(value)} to a prompt; it is a constraint: write gen("name", constraint=...)'
        )
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
    """Puts an image into the prompt, at this place.

    A URL is refused, because a program that fetches whatever it is handed lets strangers look around in its network.
    `image(fetch_image(url, hosts=[...]))` takes it from hosts that are trusted.

    Args:
        source: the path of a file, its bytes, or a PIL image. Which formats are read depends on the backend:
            docs/pictures.md lists them.

    Raises:
        ParameterError: a URL, a path that is no file, more than 20 MiB, or another type; at the `s += ...`.

    Examples:
        >>> @ul.function
        ... def look(s, picture):
        ...     s += ul.user(ul.image(picture) + "What colour is this?")
        ...     s += ul.assistant(ul.select("colour", choices=["red", "blue"]))
        >>> red = b"the bytes of a picture"  # or "red.png"
        >>> look.run(red, backend=ul.Echo(scores={"red": -0.1, "blue": -3.0}))["colour"]
        'red'
    """
    refuse_operations(source, "the path of an image")
    return Image(source)


def video(source: Any, num_frames: int) -> Video:
    """Puts frames of a clip into the prompt, at this place: the first, the last, and others evenly between them.

    Args:
        source: the path of a file, or its bytes.
        num_frames: how many frames, 1 to 1,024. Backends take fewer (docs/pictures.md), and refuse a clip that is
            shorter.

    Raises:
        ParameterError: num_frames that is no int from 1 to 1,024; at the `s += ...` a source as of `image`.

    Examples:
        >>> @ul.function
        ... def watch(s, clip):
        ...     s += ul.user(ul.video(clip, num_frames=8) + "What happens?")
        ...     s += ul.assistant(ul.gen("story", max_tokens=48))
        >>> clip = b"the bytes of a clip"  # or "door.mp4"
        >>> watch.run(clip, backend=ul.Echo(["A door opens."]))["story"]
        'A door opens.'
    """
    refuse_operations(source, "the path of a video")
    return Video(source, checks.integer("video num_frames", num_frames, 1, MAX_FRAMES))


def cache_point(ttl: float = CACHE_SECONDS) -> CachePoint:
    """Keeps what the prompt says up to here, for prompts that begin the same: explicit caching. It changes no text.

    What lies before a point is kept after the first `gen` that follows it, and other runs with the same salt find it.
    Each use starts the time anew. The last four points of a prompt count, and at least 1,024 tokens have to lie before
    one. On a `Runtime`, `state.cost.usage.cache_write_tokens` counts what was stored, and `cache_read_tokens` what was
    found stored. Anthropic and OpenAI keep it for the provider's own time (docs/hosted.md). Backends that keep nothing
    on request ignore points, so programs run on all of them.

    Args:
        ttl: seconds after the last use for which it is kept, up to 86,400, a day; default: 300.

    Raises:
        ParameterError: a ttl of 0 or less, or of more than a day.

    Examples:
        >>> @ul.function
        ... def ask(s, manual, question):
        ...     s += ul.system(manual) + ul.cache_point(ttl=3600)  # for an hour
        ...     s += ul.user(question)
        ...     s += ul.assistant(ul.gen("answer"))
        >>> manual = "All about umbels. " * 500
        >>> echo = ul.Echo(["It is a flower.", "In summer."])
        >>> ask.run(manual, "What is an umbel?", backend=echo)["answer"]
        'It is a flower.'
        >>> state = ask.run(manual, "When does it bloom?", backend=echo)
        >>> state["answer"]
        'In summer.'
        >>> state.usage.prompt_tokens, state.usage.cached_tokens
        (2039, 2021)
    """
    return CachePoint(checks.seconds("cache_point ttl", ttl, high=LONGEST_TTL))


def system(content: object = None) -> Op:
    """Appends a turn of the system: instructions for the whole conversation.

    The chat template of the model decides how it is written.

    Args:
        content: a text, an operation such as `gen(...)`, or a list of these. It has to be given: `system_begin()`
            opens a turn without it.

    Raises:
        ParameterError: no content, or one that cannot be appended.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += ul.system("Answer in one word.")
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer"))
        >>> state = ask.run("Capital of France?", backend=ul.Echo(["Paris"]))
        >>> state.messages()[0]
        {'role': 'system', 'content': 'Answer in one word.'}
    """
    return _role("system", content)


def user(content: object = None) -> Op:
    """Appends a turn of the user: what the model is to answer.

    The chat template of the model decides how it is written.

    Args:
        content: a text, an operation such as `gen(...)`, or a list of these. It has to be given: `user_begin()`
            opens a turn without it.

    Raises:
        ParameterError: no content, or one that cannot be appended.

    Examples:
        >>> @ul.function
        ... def ask(s, country):
        ...     s += ul.user(f"Capital of {country}?") + ul.assistant(ul.gen("capital"))
        ...     s += ul.user("And its river?") + ul.assistant(ul.gen("river"))
        >>> state = ask.run("France", backend=ul.Echo(["Paris", "The Seine"]))
        >>> [turn["content"] for turn in state.messages() if turn["role"] == "user"]
        ['Capital of France?', 'And its river?']
    """
    return _role("user", content)


def assistant(content: object = None) -> Op:
    """Appends a turn of the assistant, usually `gen(...)`.

    The chat template of the model decides how it is written. Text before the `gen` is the beginning of the answer,
    which the model continues. A turn without a `gen` is an answer that the program gives, for instance as an example.

    Args:
        content: a text, an operation such as `gen(...)`, or a list of these. It has to be given: `assistant_begin()`
            opens a turn without it.

    Raises:
        ParameterError: no content, or one that cannot be appended.

    Examples:
        >>> @ul.function
        ... def ask(s, country):
        ...     s += ul.user("Capital of Italy?") + ul.assistant("It is Rome.")
        ...     s += ul.user(f"Capital of {country}?")
        ...     s += ul.assistant("It is " + ul.gen("capital", stop="."))
        >>> state = ask.run("France", backend=ul.Echo(["Paris."]))
        >>> state["capital"], state.messages()[-1]
        ('Paris', {'role': 'assistant', 'content': 'It is Paris'})
    """
    return _role("assistant", content)


def role(name: str, content: object) -> Op:
    """Appends a turn of a role by its name: the roles without a function of their own are "developer" and "tool".

    Args:
        name: "system", "user", "assistant", "tool" or "developer". The chat template of the model decides how the turn
            is written.
        content: a text, an operation such as `gen(...)`, or a list of these.

    Raises:
        ParameterError: an unknown role, no content, or one that cannot be appended.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += ul.role("developer", "Answer in one word.")
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer"))
        >>> state = ask.run("Capital of France?", backend=ul.Echo(["Paris"]))
        >>> [turn["role"] for turn in state.messages()]
        ['developer', 'user', 'assistant']
    """
    return _role(name, content)


def _role(name: str, content: object) -> Op:
    if not isinstance(name, str) or checks.plain(name) not in ROLES:
        raise ParameterError(f"unknown role {shown(name)}; write one of {', '.join(ROLES)}")
    if content is None:
        raise ParameterError(f"{name}() needs its content; to open a turn without closing it write {name}_begin()")
    return Sequence((RoleBegin(name), *_flatten(expression(content)), RoleEnd(name)))


def system_begin() -> Op:
    """Opens a turn of the system, which the program fills with several `s += ...`; `system_end()` closes it.

    `with s.system():` does both. No other turn can begin inside of it.

    Examples:
        >>> @ul.function
        ... def ask(s, rules, question):
        ...     s += ul.system_begin() + "Rules:"
        ...     for rule in rules:
        ...         s += " " + rule
        ...     s += ul.system_end()
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer"))
        >>> state = ask.run(["Be short.", "Be kind."], "How am I?", backend=ul.Echo(["Well."]))
        >>> state.messages()[0]
        {'role': 'system', 'content': 'Rules: Be short. Be kind.'}
    """
    return RoleBegin("system")


def system_end() -> Op:
    """Closes the turn that `system_begin()` has opened.

    Where no turn of this role is open `s += ...` raises ProgramError.

    Examples:
        >>> @ul.function
        ... def ask(s, question, polite):
        ...     s += ul.system_begin() + "Answer in one word"
        ...     if polite:
        ...         s += ", and be polite"
        ...     s += "." + ul.system_end()
        ...     s += ul.user(question) + ul.assistant(ul.gen("answer"))
        >>> ask.run("How am I?", polite=True, backend=ul.Echo(["Well."])).messages()[0]["content"]
        'Answer in one word, and be polite.'
    """
    return RoleEnd("system")


def user_begin() -> Op:
    """Opens a turn of the user, which the program fills with several `s += ...`; `user_end()` closes it.

    `with s.user():` does both. No other turn can begin inside of it.

    Examples:
        >>> @ul.function
        ... def total(s, prices):
        ...     s += ul.user_begin() + "Add these prices:"
        ...     for price in prices:
        ...         s += f" {price}"
        ...     s += ul.user_end()
        ...     s += ul.assistant(ul.gen("sum", dtype=int))
        >>> state = total.run([3, 4], backend=ul.Echo(["7"]))
        >>> state.messages()[0]["content"], state.value("sum")
        ('Add these prices: 3 4', 7)
    """
    return RoleBegin("user")


def user_end() -> Op:
    """Closes the turn that `user_begin()` has opened.

    Where no turn of this role is open `s += ...` raises ProgramError.

    Examples:
        >>> @ul.function
        ... def shorten(s, text):
        ...     s += ul.user_begin() + "Say it in one word: " + text
        ...     s += ul.user_end() + ul.assistant(ul.gen("word"))
        >>> state = shorten.run("It rains, and it is cold.", backend=ul.Echo(["Autumn."]))
        >>> state["word"], state.messages()[0]["content"]
        ('Autumn.', 'Say it in one word: It rains, and it is cold.')
    """
    return RoleEnd("user")


def assistant_begin() -> Op:
    """Opens a turn of the assistant, which the program fills with several `s += ...`; `assistant_end()` closes it.

    `with s.assistant():` does both. No other turn can begin inside of it.

    Examples:
        >>> @ul.function
        ... def plan(s, trip):
        ...     s += ul.user("Plan a trip to " + trip)
        ...     s += ul.assistant_begin()
        ...     for day in (1, 2):
        ...         s += f"Day {day}: " + ul.gen(f"day_{day}", stop=".") + ". "
        ...     s += ul.assistant_end()
        >>> state = plan.run("Venice", backend=ul.Echo(["We sail.", "We rest."]))
        >>> state["day_1"], state["day_2"]
        ('We sail', 'We rest')
    """
    return RoleBegin("assistant")


def assistant_end() -> Op:
    """Closes the turn that `assistant_begin()` has opened.

    Where no turn of this role is open `s += ...` raises ProgramError.

    Examples:
        >>> @ul.function
        ... def check(s, equation):
        ...     s += ul.user(equation + " Is it right?")
        ...     s += ul.assistant_begin() + ul.select("right", choices=["Yes", "No"])
        ...     if s["right"] == "No":  # the turn goes on
        ...         s += ", it is " + ul.gen("result", dtype=int)
        ...     s += ul.assistant_end()
        >>> echo = ul.Echo(["4"], scores={"Yes": -2.0, "No": -0.1})
        >>> check.run("2 + 2 = 5", backend=echo).messages()[-1]["content"]
        'No, it is 4'
    """
    return RoleEnd("assistant")


# How models mark their thinking; the opening tag may be missing because the template wrote it.
REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
}


def separate_reasoning(content: object, model_type: str = "qwen3") -> Op:
    """Keeps the reasoning of a model apart from its answer.

    Each `gen` in `content` sets two variables: its own name has the answer alone, and the name with
    "_reasoning_content" has the reasoning. The prompt goes on with the answer. A model of a provider that gives
    reasoning in a field of its own needs no tags; there it is that field.

    Args:
        content: a `gen(...)`, or what holds one.
        model_type: how the model marks its reasoning: "qwen3" or "deepseek-r1" (`<think>`), "kimi", or "gpt-oss".

    Raises:
        ParameterError: an unknown model type, a content without a gen, or one whose reasoning is separated already.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += ul.user(question)
        ...     s += ul.assistant(ul.separate_reasoning(ul.gen("answer"), model_type="qwen3"))
        >>> state = ask.run("7 * 6?", backend=ul.Echo(["<think>7 * 6 is 42.</think>42"]))
        >>> state["answer"], state["answer_reasoning_content"]
        ('42', '7 * 6 is 42.')
        >>> state.messages()[-1]["content"]
        '42'
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
    known = checks.text("the name of a variable", name, MAX_NAME_LENGTH)
    if not known.isascii() and any("\ud800" <= character <= "\udfff" for character in known):
        raise ParameterError(f"a variable name has whole characters, and name={shown(known)} half of a surrogate pair")
    return known


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
    """Returns `description` for print and messages. A prompt that it gets into is refused: neither a state nor the
    expression of a constraint is its text."""
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
            f"a text holds {_label_in(text)}, which is no text; write its text(), one of its variables, s[name], or, "
            'of an expression, gen("name", constraint=...)'
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
