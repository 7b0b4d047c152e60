"""`gen` and `select`: what users write to generate text, checked at the line that writes it.

A constraint among the arguments of a `gen` becomes the spec that travels to the backend, and the way from its text to
an object. Only what can be seen without a compiler is checked here; the backend refuses the rest before it generates.
"""

import enum
import inspect
import json
import re
import typing
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args, get_origin

from . import checks, ops, sampling
from .errors import ConstraintError, ParameterError, UmbelError, shown, unknown_option
from .ops import ChoicesMethod, Gen, Select, checked_name, unsayable
from .protocol import ConstraintEngine, ConstraintKind, ConstraintSpec, JsonKeyOrder, JsonWhitespace
from .result import Captures, Members, Result
from .typed import name_of, typed

# An open end: after a digit a model has to be able to say that the number is over, and few say so with end-of-sequence.
# The blank stops the text and is not part of it. At most 19 digits, so that no number goes on without end.
ENDINGS = (" ", "\n")
INTEGER = r"(0|-?[1-9][0-9]{0,18})[ \n]?"
NUMBER = r"-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?[ \n]?"
OPEN_ENDED = frozenset({INTEGER, NUMBER})

MAX_DEPTH = 128  # of a schema's nesting; our own automata take less
MAX_SOURCE = 1 << 20  # characters of a regex, schema or grammar; compilers and providers take less
# A rule of a GBNF grammar, at the beginning of a line: `root ::= ...`. Lark's rules have one colon.
_GBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)

KINDS = ("regex", "json_schema", "dtype", "ebnf", "grammar", "constraint", "choices")  # at most one of them in a gen


# --------------------------------------------------------------------------------- what users write


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Iterable[str] | None = None,
    stop_token_ids: Iterable[int] | None = None,
    stop_regex: str | Iterable[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    adapter: str | None = None,
    dtype: Any = None,  # Any: a type as it stands in an annotation, also list[int], Literal["a"], int | None
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | re.Pattern[str] | None = None,
    json_schema: Any = None,  # Any: a dict, its JSON text, a bool, or a type as above
    ebnf: str | None = None,
    grammar: str | None = None,
    constraint: "ConstraintExpression | None" = None,
    json_whitespace: JsonWhitespace | None = None,
    json_key_order: JsonKeyOrder | None = None,
    allow_unenforced: bool | None = None,
    constraint_engine: ConstraintEngine | None = None,
    token_healing: bool | None = None,
    max_tries: int | None = None,
    allow_best_effort: bool | None = None,
    validate: Callable[[Any], object] | None = None,
    **unknown: Any,
) -> Gen | Select:
    """Generates text with the model, appends it to the prompt and stores it under `name`.

    `s[name]` waits for the text, `s.value(name)` gives the object where a type is asked for, and
    `s.get_meta_info(name)` describes the call.

    None leaves an option out. The sampling options, max_tokens to top_logprobs_num and adapter, are then those of
    `run(...)`, or else of `@ul.function(...)`, or else what stands with each. A backend that does not have an option
    raises CapabilityError; none is dropped.

    At most one of `regex`, `json_schema`, `dtype`, `ebnf`, `grammar`, `constraint` and `choices` says what the text has
    to be (docs/constraints.md). Where the backend enforces it, as `Runtime` does, every token is chosen among those
    that keep to it. A hosted model that does not enforce it gets it in words, the text is validated, and the model is
    asked again, with what is wrong, until the text satisfies the constraint. White space around the text, and around
    JSON a code fence, are taken off when the rest satisfies it. `get_meta_info(name)["guarantee"]` says how it went:
    "enforced" or "validated", or of a kept text "incomplete", "violated" or "best_effort"; `["tries"]` how many calls
    it took; `["violations"]` what a kept text breaks.

    A type with code of its own (a validator of Pydantic, a dataclass whose `__post_init__` raises ValueError) judges
    every text that satisfies its schema, as `validate` does: on every backend, once for each try, in a thread. Pieces
    of the text are streamed when it is accepted.

    Args:
        name: of the variable; None appends the text and stores it nowhere.
        max_tokens: most tokens to generate, 0 to 1,048,576; 0 computes the prompt alone. None: 128.
        min_tokens: tokens before which neither end-of-sequence nor a stop ends the text; at most max_tokens.
            None: 0.
        n: continuations of the one prompt, 1 to 128. Above 1 the variable is a list, and the prompt goes on with the
            first. None: 1.
        stop: a string that ends the text, or a list of up to 16, of 1 to 256 characters each. It is no part of the
            text. None: no stop.
        stop_token_ids: tokens that end the text, in addition to the end-of-sequence tokens of the model; at most
            1,024. None: these alone.
        stop_regex: a regular expression whose first match ends the text before it, wherever that stands, or a list of
            up to 16, of 1 to 1,024 characters each. None: no stop.
        temperature: 0 to 100. 0 takes the most likely token; above 1 unlikely tokens come more often than the model
            says, below 1 less often. None: 1.
        top_p: draws among the most likely tokens that together have this probability, above 0 and up to 1.
            None: 1, all of them.
        top_k: draws among so many of the most likely tokens, 1 to 2,147,483,647. None: -1, all of them.
        min_p: leaves out tokens less probable than this share of the most likely one, 0 to 1. None: 0.
        frequency_penalty: subtracted from the logit of a token once for each time that the generated text has it, -2
            to 2. None: 0.
        presence_penalty: subtracted from the logit of a token that the generated text has, -2 to 2. None: 0.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or text have, 0.01 to
            100. None: 1, which changes nothing.
        logit_bias: dict of token ids to numbers, -100 to 100, that are added to their logits; at most 300 entries.
            None: nothing.
        seed: 0 to 2**63 - 1. On a `Runtime` the same seed gives the same text, whatever else runs at the time; a
            provider may promise less. None: drawn for each call.
        ignore_eos: True goes on after end-of-sequence, up to max_tokens or a stop. None: False.
        return_logprob: True puts the log-probability of each generated token into
            `get_meta_info(name)["output_token_logprobs"]`, as (log-probability, token id, text). None: False.
        logprob_start_len: puts the log-probabilities of the prompt's tokens into `["input_token_logprobs"]`, from the
            token of this index on, 0 or more; the first token of a prompt has none. None: -1, without the prompt.
        top_logprobs_num: puts so many of the most likely tokens at each place into `["output_top_logprobs"]`, and for
            a prompt into `["input_top_logprobs"]`, 0 to 20. Implies return_logprob. None: 0.
        return_text_in_logprobs: False leaves the texts of tokens out of these. None: True.
        adapter: one of `Runtime(adapters={...})`, which computes the prompt and the text; "" is the model as it is.
            None: "".
        dtype: the text is a value of this type, and `s.value(name)` the value. int, float, bool (`True`, `False`),
            Literal and Enum are written plainly; a number ends at a blank or newline, which is no part of it. A str is
            written in double quotes, every other type as JSON. The names "int", "float", "bool" and "str" work, too.
        choices: the text is one of these, chosen as by `select`. Of the options only name, temperature,
            choices_method, max_tries, allow_best_effort and adapter go with it.
        choices_method: how `choices` are compared, see `select`. None: "token_length_normalized".
        regex: the text matches this expression as a whole, as with `re.fullmatch`. A compiled pattern brings its flags
            along.
        json_schema: the text is JSON of this schema: a dict, its JSON text, or a Python type. `s.value(name)` is the
            parsed JSON, or an object of the type.
        ebnf: the text is in the language of a Lark grammar (`start: "yes" | "no"`), or of a GBNF grammar as llama.cpp
            and SGLang write it (`root ::= "yes" | "no"`).
        grammar: another name of ebnf.
        constraint: the text is one of an `Expression`, such as `ul.regex("[0-9]+") + " pears"`. What it captures become
            variables, too.
        json_whitespace: blanks of JSON: "spaced" writes `{"a": 1, "b": 2}`, "compact" `{"a":1,"b":2}`, "flexible" takes
            both and more. None: "spaced".
        json_key_order: "declared" has the members of an object in the order of the schema, "any" leaves it to the
            model, and fewer of its tokens are known ahead. None: "declared".
        allow_unenforced: True checks schema keywords that cannot be enforced in the finished text, and "guarantee" is
            "validated" or "violated" then; False refuses them. None: False.
        constraint_engine: enforces the constraint on a `Runtime`: "auto", "fsm", "llguidance", "outlines-core" or
            "interegular". None: that of the runtime.
        token_healing: False keeps the last token of the prompt as it is; True lets the first token of a constrained
            text begin inside of it, as the text would be tokenized as a whole. None: True.
        max_tries: calls for one text, 1 to 10, where it is validated or judged. None: 3.
        allow_best_effort: True keeps the last text when no try satisfied the constraint; with False reading the
            variable raises GuaranteeError. None: False.
        validate: a function that judges each text, called with the object, or the text where no type is asked for, in
            a thread. It refuses by returning False, or by raising ValueError or AssertionError, whose message the model
            is told when it is asked again. Any other error is a fault of the function, and so is a result that is
            neither a bool nor None: reading the variable raises it.

    Returns:
        An operation: `s += ...` appends it, and `+` joins it with texts and other operations.

    Raises:
        ParameterError: a wrong value, an unknown option or two constraints, at the line that writes them.
        ConstraintError: a schema that is no JSON. What else is wrong with a constraint the backend says, and reading
            the variable raises it.

    Examples:
        >>> @ul.function
        ... def ask(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("capital", max_tokens=16, stop="."))
        ...     s += ul.user("How many people live there?")
        ...     s += ul.assistant(ul.gen("people", dtype=int))
        >>> state = ask.run("France", backend=ul.Echo(["Paris. It lies", "2100000"]))
        >>> state["capital"], state.value("people")
        ('Paris', 2100000)
        >>> state.get_meta_info("capital")["matched_stop"]
        '.'

        A function of the program judges what is generated, and the model is asked again:

        >>> def at_most_100(percent):
        ...     if percent > 100:
        ...         raise ValueError("write at most 100")
        >>> @ul.function
        ... def rate(s, review):
        ...     s += ul.user(review + " How good is it, in percent?")
        ...     s += ul.assistant(ul.gen("percent", dtype=int, validate=at_most_100))
        >>> state = rate.run("I loved it.", backend=ul.Echo(["250", "90"]))
        >>> state.value("percent"), state.get_meta_info("percent")["tries"]
        (90, 2)
    """
    arguments = locals().copy()  # each option by its name
    if name is not None:
        name = checked_name(name)
    if unknown:
        raise unknown_option("gen()", next(iter(unknown)), {*(gen.__kwdefaults__ or {}), "name", "max_tokens"})
    given = sampling.overrides({option: value for option, value in arguments.items() if option in sampling.OPTIONS})
    ops.refuse_operations((given, regex, json_schema, ebnf, grammar, constraint), f"an option of gen({name!r})")
    demand = demand_of(arguments)
    if validate is not None:
        _check_validate(name, validate, choices)
    if choices is not None:
        _check_choices(given, token_healing, return_text_in_logprobs)
        heat = 0.0 if temperature is None else temperature
        return select(
            name,
            choices,
            heat,
            choices_method,
            max_tries=max_tries,
            allow_best_effort=allow_best_effort,
            adapter=adapter,
        )
    if choices_method is not None:
        raise ParameterError(f"choices_method={shown(choices_method)} needs choices=[...]")
    for switch, value in (("return_text_in_logprobs", return_text_in_logprobs), ("token_healing", token_healing)):
        if value is not None:
            checks.switch(switch, value)
    _check_alone(given)
    text_in_logprobs = return_text_in_logprobs is not False
    tries = checked_tries(max_tries, allow_best_effort)
    if demand is None:
        _check_unconstrained(max_tries, allow_best_effort, token_healing, judged=validate is not None)
        if validate is None:
            return Gen(name, given, text_in_logprobs)
        return Gen(name, given, text_in_logprobs, None, Result("text", str, True, validate), None, *tries)
    if demand.stops:
        given["stop"] = tuple(dict.fromkeys((*given.get("stop", ()), *demand.stops)))
    if demand.captures is not None and name in demand.captures.results:
        raise ParameterError(f"gen({name!r}): its constraint captures a part of this name, too; rename one of them")
    result = demand.result if validate is None else replace(demand.result, judges=True, check=validate)
    return Gen(name, given, text_in_logprobs, demand.spec, result, token_healing, *tries, demand.captures)


def _check_validate(name: str | None, validate: object, choices: object) -> None:
    owner = f"gen({name!r})"
    if choices is not None:
        raise ParameterError(f"{owner}: validate= judges what is generated, and choices= are given; leave bad ones out")
    if not callable(validate) or validate is Any or get_origin(validate) is not None:
        raise ParameterError(f"{owner}: validate={shown(validate)}; write a function that raises ValueError to refuse")
    if inspect.iscoroutinefunction(validate):
        raise ParameterError(f"{owner}: validate= is an async function, and it runs in a thread; write a plain def")


def _check_choices(given: Mapping[str, Any], token_healing: bool | None, return_text_in_logprobs: bool | None) -> None:
    """Refuses options of text for one of the choices; `select` takes the temperature."""
    refused = given.keys() - {"temperature", "adapter"} | ({"token_healing"} if token_healing is not None else set())
    if refused:
        raise ParameterError(
            f"gen(choices=...) takes no {', '.join(sorted(refused))}: the answer is one of the choices as a whole"
        )
    if return_text_in_logprobs is not None:
        raise ParameterError("return_text_in_logprobs= is for gen() without choices; remove it")


def _check_unconstrained(
    max_tries: int | None, allow_best_effort: bool | None, token_healing: bool | None, *, judged: bool
) -> None:
    """Refuses options of constraints where none is given. `judged`: the text is validated all the same."""
    for option, value in (("max_tries", max_tries), ("allow_best_effort", allow_best_effort)):
        if value is not None and not judged:
            raise ParameterError(f"{option}={shown(value)} needs a constraint to apply to; remove it, or give one")
    if token_healing is not None:
        raise ParameterError(
            f"token_healing={token_healing} is for constrained text; leave it out"
            + (", or end the prompt without a blank" if token_healing else "")
        )


def _check_alone(given: Mapping[str, Any]) -> None:
    """Validate what was given, without the fields that other layers may supply."""
    fields = dict(given)
    if "min_tokens" in fields and "max_tokens" not in fields:
        fields["max_tokens"] = sampling.MAX_TOKENS
    sampling.merge(fields)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen | Select:
    """Generates an integer: `gen(dtype=int)`. `s.value(name)` is an int, `s[name]` its digits.

    The number has at most 19 digits and ends at a blank or newline, which is no part of it.

    Args:
        name: of the variable; None stores it nowhere.
        max_tokens: most tokens to generate, as of `gen`. None: 128.
        options: the others of `gen`, apart from those that say what the text has to be.

    Raises:
        ParameterError: as of `gen`.

    Examples:
        >>> @ul.function
        ... def count(s, sentence):
        ...     s += sentence + " The number of animals is " + ul.gen_int("animals") + "."
        >>> state = count.run("A cat and two dogs.", backend=ul.Echo(["3"]))
        >>> state.value("animals") + 1, state.text()
        (4, 'A cat and two dogs. The number of animals is 3.')
    """
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen | Select:
    """Generates a string in double quotes: `gen(dtype=str)`. `s.value(name)` is what the quotes hold.

    Quotes and newlines inside are escaped as in JSON, so the text ends where the string does, not at the first newline.

    Args:
        name: of the variable; None stores it nowhere.
        max_tokens: most tokens to generate, as of `gen`. None: 128.
        options: the others of `gen`, apart from those that say what the text has to be.

    Raises:
        ParameterError: as of `gen`.

    Examples:
        >>> @ul.function
        ... def name_it(s, plot):
        ...     s += plot + " The film is called " + ul.gen_string("title") + "."
        >>> state = name_it.run("A shark comes.", backend=ul.Echo(['"Jaws"']))
        >>> state["title"], state.value("title")
        ('"Jaws"', 'Jaws')
    """
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
    method: ChoicesMethod | None = None,
    max_tries: int | None = None,
    allow_best_effort: bool | None = None,
    adapter: str | None = None,
    **unknown: Any,
) -> Select:
    """Chooses one of `choices` as the continuation, appends it and stores it under `name`.

    The model scores the choices and generates nothing. `s.get_meta_info(name)` has the score of each in
    "choice_scores", and how probable each is among the choices in "probabilities". Methods, each also a public name
    that says more:

    - `token_length_normalized`, the default, compares the mean log-probability per token.
    - `greedy_token_selection` goes token by token.
    - `unconditional_likelihood_normalized` subtracts what each choice would score without the prompt.
    - `overshoot` compares how probable the text goes on with each choice, in its usual tokens. One forward pass.
    - `exact` compares that over all the tokens that spell a choice, with bounds. Some dozens of short forward passes.

    A hosted model that scores nothing generates one of the choices instead, where the method is the default one:
    `get_meta_info(name)["choices_method"]` is "generated" then, and reading a score raises CapabilityError.

    Args:
        name: of the variable; None appends the choice and stores it nowhere.
        choices: the texts to choose from, 1 to 1,024 different ones of 1 to 16,384 characters.
        temperature: 0 takes the best choice. Above 0, up to 100, one is drawn, with the run's seed if it has one, in
            proportion to probability ** (1 / temperature). A hosted model that generates the choice gets it as its
            temperature.
        choices_method: SGLang's name of method.
        method: how the choices are compared, one of those above. None: "token_length_normalized".
        max_tries: calls for one choice that a hosted model generates, 1 to 10. None: 3.
        allow_best_effort: True keeps what a hosted model has said last when no try was one of the choices; with False
            reading the variable raises GuaranteeError. None: False.
        adapter: one of `Runtime(adapters={...})`, which scores the choices; "" is the model as it is. None: that of
            the run.

    Returns:
        An operation: `s += ...` appends it, and `+` joins it with texts and other operations.

    Raises:
        ParameterError: an unknown option, no choices or more than 1,024, a choice that is not a string of 1 to 16,384
            characters, duplicates, an unknown method, two methods, a temperature that is not 0 to 100, max_tries that
            are not 1 to 10, or max_tries and allow_best_effort with another method than the default one.

    Examples:
        >>> @ul.function
        ... def judge(s, review):
        ...     s += "Review: " + review + " Is it good?"
        ...     s += ul.select("good", choices=[" yes", " no"])
        >>> state = judge.run("I loved it.", backend=ul.Echo(scores={" yes": -0.1, " no": -2.3}))
        >>> state["good"]
        ' yes'
        >>> state.get_meta_info("good")["choice_scores"]
        {' yes': -0.1, ' no': -2.3}
        >>> round(state.get_meta_info("good")["probabilities"][" yes"], 2)
        0.9
    """
    if name is not None:
        name = checked_name(name)
    owner = f"select({shown(name)})"
    if unknown:
        raise unknown_option(owner, next(iter(unknown)), set(inspect.signature(select).parameters) - {"unknown"})
    if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
        raise ParameterError(f"{owner} needs choices=[...], a list of strings; got {shown(choices)}")
    options = _checked_choices(owner, choices)
    chosen = _checked_method(owner, method, choices_method)
    warmth = checks.number(f"{owner}: temperature", temperature, 0, 100, "0 for the best choice, or a number up to 100")
    tries = checked_tries(max_tries, allow_best_effort)
    for option, given in (("max_tries", max_tries), ("allow_best_effort", allow_best_effort)):
        if given is not None and chosen != ops.CHOICES_METHODS[0]:
            raise ParameterError(
                f"{owner}: {option}={given!r} is for models that generate the choice, which method={chosen!r} never "
                f"does; remove {option}"
            )
    return Select(name, options, chosen, float(warmth), *tries, None if adapter is None else _checked_adapter(adapter))


def _checked_adapter(adapter: object) -> str:
    if isinstance(adapter, str) and not checks.plain(adapter):
        return ""
    return sampling.checked_adapter("adapter", adapter)


def _checked_choices(owner: str, choices: Iterable[str]) -> tuple[str, ...]:
    options = checks.members(f"{owner}: choices", choices, ops.MAX_CHOICES, "a list of strings")
    if not options:
        raise ParameterError(f"{owner}: choices is empty; give at least one string")
    ops.refuse_operations(options, f"{owner}: a choice")
    for option in options:
        if not isinstance(option, str) or not checks.plain(option):
            raise ParameterError(f"{owner}: choices: a choice must be a non-empty string, got {shown(option)}")
    texts = tuple(map(checks.plain, options))
    longest = max(map(len, texts))
    if longest > ops.MAX_CHOICE_LENGTH:
        raise ParameterError(
            f"{owner}: one of the choices has {longest} characters; write at most {ops.MAX_CHOICE_LENGTH}"
        )
    repeated = sorted(text for text, times in Counter(texts).items() if times > 1)
    if repeated:
        raise ParameterError(f"{owner}: choices repeat: {shown(repeated)}")
    return texts


def _checked_method(owner: str, method: object, choices_method: object) -> ChoicesMethod:
    given = [
        checks.one_of(name, value, ops.CHOICES_METHODS)
        for name, value in (("method", method), ("choices_method", choices_method))
        if value is not None
    ]
    if len(set(given)) > 1:
        raise ParameterError(
            f"{owner}: method={given[0]!r} and choices_method={given[1]!r} are two names of one parameter; give one of "
            "them"
        )
    return cast(ChoicesMethod, given[0]) if given else ops.CHOICES_METHODS[0]


def checked_tries(max_tries: int | None, allow_best_effort: bool | None) -> tuple[int, bool]:
    """Both with their defaults.

    Raises:
        ParameterError: tries that are not 1 to 10, or no bool.
    """
    tries = ops.USUAL_TRIES
    if max_tries is not None:
        tries = checks.integer(
            "max_tries", max_tries, 1, ops.MAX_TRIES, f"1 to {ops.MAX_TRIES}, {ops.USUAL_TRIES} being usual"
        )
    if allow_best_effort is not None:
        checks.switch("allow_best_effort", allow_best_effort)
    return tries, bool(allow_best_effort)


# --------------------------------------------------------------------------------- constraints


@dataclass(frozen=True, slots=True)
class Demand:
    """A constraint as a program gave it. `stops`: stop strings that belong to it. `captures`: parts that it names."""

    spec: ConstraintSpec
    result: Result
    stops: tuple[str, ...] = ()
    captures: Captures | None = None


class ConstraintExpression(ABC):
    """A constraint as an object: what `gen(constraint=...)` takes. `fsm.composed.expression.Expression` is the one."""

    @abstractmethod
    def demand(self) -> Demand:
        """Returns the constraint. Raises ConstraintError: it is too long, or not complete."""

    def __str__(self) -> str:
        """As of a state."""
        return unsayable(repr(self))

    def __format__(self, specification: str) -> str:
        return str(self)


def _check_one(given: Mapping[str, Any]) -> None:
    kinds = [name for name in KINDS if given.get(name) is not None]
    if len(kinds) > 1:
        raise ParameterError(f"gen() takes one constraint, got {kinds[0]}= and {kinds[1]}=; remove one of them")


def demand_of(given: Mapping[str, Any]) -> Demand | None:
    """Arguments of `gen` → its demand, or None when there is none.

    Args:
        given: `KINDS` (choices are no demand of their own), json_whitespace, json_key_order, allow_unenforced and
            constraint_engine; None means "not given", and other names are ignored.

    Raises:
        ParameterError: two constraints, an argument of a wrong type, or an option without the constraint it belongs to.
        ConstraintError: a schema that is no JSON.
    """
    _check_one(given)
    demand = _demand(given)
    options: dict[str, Any] = {}
    for name, field, belongs_to, known in (
        ("json_whitespace", "whitespace", "json_schema", get_args(JsonWhitespace)),
        ("json_key_order", "key_order", "json_schema", get_args(JsonKeyOrder)),
        ("allow_unenforced", "allow_unenforced", "json_schema", None),
        ("constraint_engine", "engine", "a constraint", get_args(ConstraintEngine)),
    ):
        value = given.get(name)
        if value is None:
            continue
        if demand is None or (belongs_to == "json_schema" and demand.spec.kind != "json_schema"):
            raise ParameterError(f"{name}={shown(value)} needs {belongs_to}= to apply to; remove it, or give one")
        options[field] = checks.switch(name, value) if known is None else checks.one_of(name, value, known)
    if demand is None or not options:
        return demand
    spec = ConstraintSpec(demand.spec.kind, demand.spec.source, **options)
    return Demand(spec, demand.result, demand.stops, demand.captures)


def _demand(given: Mapping[str, Any]) -> Demand | None:
    if (regex := given.get("regex")) is not None:
        return Demand(_spec("regex", pattern_text("regex", regex)), Result("text", str))
    if (schema := given.get("json_schema")) is not None:
        return _of_schema(schema)
    if (dtype := given.get("dtype")) is not None:
        return _read_type("dtype", dtype, _of_type)
    if (expression := given.get("constraint")) is not None:
        if not isinstance(expression, ConstraintExpression):
            raise ParameterError(
                f'constraint={shown(expression)}; write an expression such as ul.regex("[0-9]+") + " pears", or '
                "ul.literal(...) around a text"
            )
        return expression.demand()
    for name in ("ebnf", "grammar"):
        if (grammar := given.get(name)) is not None:
            source = _source(name, grammar, '\'start: "yes" | "no"\'')
            return Demand(_spec("gbnf" if _GBNF.search(source) else "lark", source), Result("text", str))
    return None


def _spec(kind: ConstraintKind, source: str) -> ConstraintSpec:
    if len(source) > MAX_SOURCE:
        raise ConstraintError(f"{kind}: {len(source)} characters; write at most {MAX_SOURCE}")
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConstraintError(
            f"{kind}: the character at {error.start} is half of a surrogate pair, which no text holds; write the "
            "whole character"
        ) from None
    return ConstraintSpec(kind, source)


# Flags of `re.compile`, as letters at the beginning of an expression.
_FLAGS = ((re.ASCII, "a"), (re.IGNORECASE, "i"), (re.MULTILINE, "m"), (re.DOTALL, "s"), (re.VERBOSE, "x"))


def pattern_text(name: str, value: object) -> str:
    """Returns a regular expression as text; the flags of a compiled one are written at its beginning.

    Args:
        name: of the argument, for messages.

    Raises:
        ParameterError: an empty text, a pattern of bytes, or neither text nor pattern.
    """
    if isinstance(value, re.Pattern):
        if not isinstance(value.pattern, str):
            raise ParameterError(f"{name}={shown(value)} matches bytes; compile a pattern of text")
        letters = "".join(letter for flag, letter in _FLAGS if value.flags & flag)
        value = f"(?{letters}){value.pattern}" if letters and value.pattern else value.pattern
    return _source(name, value, r'r"[a-z]+"')


def _source(name: str, value: object, example: str) -> str:
    if isinstance(value, str) and checks.plain(value):
        return checks.plain(value)
    raise ParameterError(f"{name}={shown(value)}; write a non-empty string such as {name}={example}")


# --------------------------------------------------------------------------------- JSON Schemas


def _of_schema(schema: object) -> Demand:
    match schema:
        case str():
            return Demand(_spec("json_schema", _checked_json(checks.plain(schema))), Result("JSON", json.loads))
        case bool() | Mapping():
            return Demand(_spec("json_schema", _written(schema)), Result("JSON", json.loads))
        case int() | float() | bytes() | list() | tuple():
            raise ParameterError(
                f"json_schema={shown(schema)}; write a schema as a dict, its JSON text, or a type such as list[int]"
            )
        case _:
            return _read_type("json_schema", schema, _of_json_type)


def _read_type(name: str, annotation: object, read: Callable[[Any], Demand]) -> Demand:
    """Reads a type from any object; looking at it may run code of the object."""
    try:
        return read(annotation)
    except UmbelError:
        raise
    except Exception as error:  # of the object's own code, or it contains itself
        raise ParameterError(
            f"{name}={shown(annotation)} cannot be read as a type ({type(error).__name__}: {error}); write int, float, "
            "bool, str, or a type such as list[int]"
        ) from error


def _of_json_type(annotation: object) -> Demand:
    known = typed(annotation)
    return Demand(_spec("json_schema", known.schema), Result(known.name, known.parse, known.judges))


def _checked_json(text: str) -> str:
    if len(text) > MAX_SOURCE:
        raise ConstraintError(f"json_schema has {len(text)} characters; write at most {MAX_SOURCE}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"json_schema is no JSON text: {error or 'nested too deep'}") from None
    if isinstance(schema, dict):
        _check_keys(schema, "#")
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"json_schema={shown(text)}; a JSON Schema is an object, true or false")
    return text


def _written(schema: bool | Mapping[Any, Any]) -> str:
    try:
        _check_keys(schema, "#")
        return json.dumps(dict(schema) if isinstance(schema, Mapping) else schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"json_schema cannot be written as JSON: {error}") from None
    except RecursionError:
        raise ConstraintError("json_schema is nested too deep, or contains itself") from None
    except UmbelError:
        raise
    except Exception as error:  # of the mapping's own code
        raise ConstraintError(f"json_schema cannot be read: {type(error).__name__}: {error}") from error


def _check_keys(value: object, path: str, depth: int = MAX_DEPTH) -> None:
    """json.dumps would turn other keys into strings and say nothing. Compilers walk a schema level by level."""
    if depth == 0:
        raise ConstraintError(f"json_schema is nested more than {MAX_DEPTH} deep, or contains itself; flatten it")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {shown(key)} at {path} is no string")
            _check_keys(inner, f"{path}/{key}", depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner, path, depth - 1)


# --------------------------------------------------------------------------------- types


_NAMED_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def _of_type(dtype: Any) -> Demand:  # Any: whatever stands in an annotation
    if isinstance(dtype, str):
        named = _NAMED_TYPES.get(checks.plain(dtype))
        if named is None:
            raise ParameterError(f"dtype={shown(dtype)}; write int, float, bool, str, or a type such as list[int]")
        return _of_type(named)
    if dtype is int:
        return Demand(_spec("regex", INTEGER), Result("int", int), ENDINGS)
    if dtype is float:
        return Demand(_spec("regex", NUMBER), Result("float", float), ENDINGS)
    if dtype is bool:  # as Python writes it, and as SGLang does
        return _of_members(dtype, [(True, True), (False, False)])
    if typing.get_origin(dtype) is typing.Literal:
        return _of_members(dtype, [(value, value) for value in typing.get_args(dtype)])
    if isinstance(dtype, type) and issubclass(dtype, enum.Enum):
        return _of_members(dtype, [(member.value, member) for member in dtype])
    return _of_json_type(dtype)


def _of_members(dtype: Any, members: list[tuple[Any, Any]]) -> Demand:
    """One of some values, written without quotes: the text of (value, object) is str(value)."""
    named: dict[str, Any] = {}
    for value, member in members:
        text = str(value)
        if not isinstance(value, str | int | float | None):
            raise ParameterError(
                f"dtype={name_of(dtype)}: {shown(value)} is neither text nor a number; give each member one of these"
            )
        if not text or text in named:
            why = "written like another one" if text in named else "an empty text"
            raise ParameterError(
                f"dtype={name_of(dtype)}: {shown(value)} is {why}; write json_schema={name_of(dtype)}, which has quotes"
            )
        named[text] = member
    if not named:
        raise ParameterError(f"dtype={name_of(dtype)} has no members; give it at least one")
    choices = json.dumps(list(named), ensure_ascii=False)
    return Demand(_spec("choices", choices), Result(name_of(dtype), Members(named).parse))


def alternatives(texts: Iterable[str]) -> str:
    """The regular expression of exactly these texts."""
    return "|".join(re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text) for text in texts)
