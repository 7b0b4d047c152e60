"""`gen`: what users write to generate text, checked at the line that writes it."""

from collections.abc import Iterable, Mapping
from typing import Any

from . import checks, inline, sampling
from .constraint import demand_of
from .errors import ParameterError, shown, unknown_option
from .ops import ChoicesMethod, Gen, Select, checked_name, checked_tries, select
from .protocol import ConstraintEngine, JsonKeyOrder, JsonWhitespace


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
    dtype: Any = None,  # Any: a type as it stands in an annotation, also list[int], Literal["a"], int | None
    choices: Iterable[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,  # Any: a dict, its JSON text, a bool, or a type as above
    ebnf: str | None = None,
    grammar: str | None = None,
    json_whitespace: JsonWhitespace | None = None,
    json_key_order: JsonKeyOrder | None = None,
    allow_unenforced: bool | None = None,
    constraint_engine: ConstraintEngine | None = None,
    token_healing: bool | None = None,
    max_tries: int | None = None,
    allow_best_effort: bool | None = None,
    **unknown: Any,
) -> Gen | Select:
    """Generate text with the model and store it under `name`.

    Parameters left out come from the run, then from the program, then from `SamplingParams`.
    With `n` above 1 the variable is a list and the prompt goes on with the first of it.

    At most one of these says what the text has to be; `s[name]` is the text, `s.value(name)` the object:

    - `regex`: it matches as a whole, as with `re.fullmatch`.
    - `json_schema`: it is JSON of this schema, given as a dict, as JSON text or as a Python type (see `lang.typed`).
    - `dtype`: it is a value of this type. int, float, bool (`True`, `False`), Literal and Enum are written plainly; a
      number ends at a blank or newline, which is not part of it. A str is written in double quotes, every other type
      as JSON.
    - `ebnf` or `grammar`: it is in the language of a Lark grammar (`start: "yes" | "no"`), or of a GBNF grammar as
      llama.cpp and SGLang write it (`root ::= "yes" | "no"`).
    - `choices`: it is one of these, chosen as `select` does.

    Further: `json_whitespace` is "spaced" (the default), "compact" or "flexible"; `json_key_order="any"` leaves the
    order of an object's members to the model (fewer of its tokens are known ahead); with `allow_unenforced` schema
    keywords that cannot be enforced are looked at when the text is there; `constraint_engine` says who enforces (see
    `RuntimeOptions`); `token_healing=False` keeps the first token from beginning inside the prompt's last one.

    A hosted model that enforces no such constraint is told what is wanted, the text is looked at, and the model is
    asked again, with what is wrong, until the text satisfies the constraint: at most `max_tries` calls, 3 if it is left
    out. Then reading the variable raises GuaranteeError, or, with `allow_best_effort=True`, the last text is kept.
    `get_meta_info(name)["guarantee"]` says how it went: "enforced", "validated" or "best_effort", `["tries"]` how many
    calls it took, `["violations"]` what a kept text breaks. White space around the text, and around JSON a code fence,
    are taken off when the rest satisfies the constraint.

    A type with code of its own (a validator of Pydantic, a dataclass whose `__post_init__` raises ValueError) judges
    every text that satisfies its schema, on every backend; the model is asked again with the words of what it raises.
    So that code runs once for each try, in a thread, and pieces of the text come when it is accepted. Elsewhere, where
    the constraint is enforced, `max_tries` and `allow_best_effort` have nothing to do.

    Raises:
        ParameterError: a wrong value, at once and not when the program has run half-way.
        ConstraintError: a schema that is no JSON. What else is wrong with a constraint the backend says, and reading
            the variable raises it.
    """
    if name is not None:
        name = checked_name(name)
    if unknown:
        raise unknown_option("gen()", next(iter(unknown)), {*(gen.__kwdefaults__ or {}), "name", "max_tokens"})
    given = sampling.overrides(
        {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "n": n,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "stop_regex": stop_regex,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "repetition_penalty": repetition_penalty,
            "logit_bias": logit_bias,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
        }
    )
    inline.refuse((given, regex, json_schema, ebnf, grammar), f"an option of gen({name!r})")
    demand = demand_of(
        {
            "regex": regex,
            "json_schema": json_schema,
            "dtype": dtype,
            "ebnf": ebnf,
            "grammar": grammar,
            "choices": choices,
            "json_whitespace": json_whitespace,
            "json_key_order": json_key_order,
            "allow_unenforced": allow_unenforced,
            "constraint_engine": constraint_engine,
        }
    )
    if choices is not None:
        _check_choices(given, token_healing, return_text_in_logprobs)
        heat = 0.0 if temperature is None else temperature
        return select(name, choices, heat, choices_method, max_tries=max_tries, allow_best_effort=allow_best_effort)
    if choices_method is not None:
        raise ParameterError(f"choices_method={shown(choices_method)} needs choices=[...]")
    for switch, value in (("return_text_in_logprobs", return_text_in_logprobs), ("token_healing", token_healing)):
        if value is not None:
            checks.switch(switch, value)
    _check_alone(given)
    text_in_logprobs = return_text_in_logprobs is not False
    tries = checked_tries(max_tries, allow_best_effort)
    if demand is None:
        _check_unconstrained(max_tries, allow_best_effort, token_healing)
        return Gen(name, given, text_in_logprobs)
    if demand.stops:
        given["stop"] = tuple(dict.fromkeys((*given.get("stop", ()), *demand.stops)))
    return Gen(name, given, text_in_logprobs, demand.spec, demand.result, token_healing, *tries)


def _check_choices(given: Mapping[str, Any], token_healing: bool | None, return_text_in_logprobs: bool | None) -> None:
    """Refuses options of text for one of the choices; `select` takes the temperature."""
    refused = given.keys() - {"temperature"} | ({"token_healing"} if token_healing is not None else set())
    if refused:
        raise ParameterError(
            f"gen(choices=...) takes no {', '.join(sorted(refused))}: the answer is one of the choices as a whole"
        )
    if return_text_in_logprobs is not None:
        raise ParameterError("return_text_in_logprobs= is for gen() without choices; remove it")


def _check_unconstrained(max_tries: int | None, allow_best_effort: bool | None, token_healing: bool | None) -> None:
    """Refuses options of constraints where none is given."""
    for option, value in (("max_tries", max_tries), ("allow_best_effort", allow_best_effort)):
        if value is not None:
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
    """An integer; `gen(dtype=int)`, which checks the options. `s.value(name)` is an int."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen | Select:
    """A double-quoted string; `gen(dtype=str)`, which checks the options. `s.value(name)` is what the quotes hold."""
    return gen(name, max_tokens, dtype=str, **options)
