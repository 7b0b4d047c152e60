"""Sampling parameters: one validated, frozen description of how to choose tokens."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from . import checks
from .errors import ParameterError, shown, unknown_option

# Limits, each with its reason; pinned by tests/lang/test_sampling.py.
MAX_N = 128  # one prompt, this many continuations
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters in one stop string
MAX_STOP_REGEX_LENGTH = 1024  # characters in one stop_regex
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300  # entries
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS = 1 << 20  # larger values are a mistake, not a wish
MAX_TOKEN_ID = checks.LARGEST_ID  # also of top_k: no vocabulary is larger, and the engine keeps both in 32 bits
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # either side of 0; what OpenAI and SGLang take
# Of logits in float32: outside of these bounds some become infinite. SGLang takes up to 2, vLLM and transformers more.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BIAS = 100.0  # either side of 0; what OpenAI takes
MAX_SEED = 2**63 - 1
MAX_ADAPTER_NAME = 64  # characters
_ADAPTER = re.compile(f"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_ADAPTER_NAME - 1}}}")


_SENT = msgspec.Meta(max_length=1 << 16)  # entries that are read of a message at all; then the limits above are checked


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Holds the parameters by which one `gen` chooses its tokens, validated: what a backend gets.

    Programs write them as options of `gen`, which says what each does, its limits and its default. Token ids are 0 to
    2,147,483,647; what the vocabulary of a model does not have, its backend refuses. Numbers are ints and floats here;
    `gen` and the other functions of the language take those of numpy as well.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: tokens before which nothing ends the text; at most max_tokens.
        n: continuations of the one prompt.
        stop: strings that end the text.
        stop_token_ids: tokens that end the text.
        temperature: 0 takes the most likely token.
        top_p: probability of the tokens that are kept.
        top_k: number of tokens that are kept; -1 keeps all.
        min_p: least probability relative to the most likely token.
        frequency_penalty: for each earlier occurrence in the generated text.
        presence_penalty: for tokens that occurred in it.
        repetition_penalty: for tokens of prompt and text.
        logit_bias: token id to a number that is added to its logit.
        seed: None draws one.
        ignore_eos: goes on after end-of-sequence.
        logprobs: `return_logprob` of `gen`: log-probabilities of generated tokens.
        top_logprobs: `top_logprobs_num` of `gen`: so many most likely tokens at each place.
        prompt_logprobs_from: `logprob_start_len` of `gen`: log-probabilities of the prompt from this token on; None:
            none.
        stop_regex: regular expressions that end the text.
        adapter: of the runtime; "" is the model as it is.

    Raises:
        ParameterError: a value outside its range; the message says what to write.

    Examples:
        >>> @ul.function(temperature=0)
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=8, stop=".")
        >>> echo = ul.Echo(["Paris."])
        >>> ask.run("Capital of France? ", backend=echo)["answer"]
        'Paris'
        >>> sampling = echo.requests[0].sampling  # a SamplingParams
        >>> sampling.temperature, sampling.max_tokens, sampling.stop, sampling.greedy
        (0, 8, ('.',), True)
        >>> ul.SamplingParams(temperature=-1)
        Traceback (most recent call last):
            ...
        umbel.ParameterError: temperature=-1 ...
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: Annotated[tuple[str, ...], _SENT] = ()
    stop_token_ids: Annotated[tuple[int, ...], _SENT] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], _SENT] = {}
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    stop_regex: Annotated[tuple[str, ...], _SENT] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens"
            )
        _integer("n", self.n, 1, MAX_N)
        if type(self.adapter) is not str or self.adapter:
            checked_adapter("adapter", self.adapter)
        if type(self.stop) is not tuple or self.stop:
            _texts("stop", "stop string", self.stop, MAX_STOP_LENGTH)
        if type(self.stop_regex) is not tuple or self.stop_regex:
            _texts("stop_regex", "stop_regex", self.stop_regex, MAX_STOP_REGEX_LENGTH)
        if type(self.stop_token_ids) is not tuple or self.stop_token_ids:
            _check_ids(self.stop_token_ids)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p=0 keeps no token; write temperature=0 for the most likely token")
        _integer("top_k", self.top_k, -1, MAX_TOKEN_ID, f"at least -1, up to {MAX_TOKEN_ID}")
        if self.top_k == 0:
            raise ParameterError("top_k=0 keeps no token; write top_k=-1 to keep all of them")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
            f"{MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}, or write 1.0 for none",
        )
        if type(self.logit_bias) is not dict or self.logit_bias:
            _check_biases(self.logit_bias)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        checks.switch("ignore_eos", self.ignore_eos)
        checks.switch("return_logprob (logprobs)", self.logprobs)
        _integer("top_logprobs_num (top_logprobs)", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs_from is not None:
            _integer("logprob_start_len (prompt_logprobs_from)", self.prompt_logprobs_from, 0, MAX_TOKEN_ID, _FROM_ZERO)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken: temperature 0."""
        return self.temperature == 0.0


def checked_adapter(name: str, value: object) -> str:
    """Returns the name of an adapter. Raises ParameterError for what is none."""
    if not isinstance(value, str) or not _ADAPTER.fullmatch(checks.plain(value)):
        raise ParameterError(
            f"{name}={shown(value)}; write the name of an adapter, 1 to {MAX_ADAPTER_NAME} of the characters A-Z a-z "
            "0-9 _ . -, of which the first is a letter or digit"
        )
    return checks.plain(value)


# What users write (names of SGLang's gen, run and sampling_params) → the field above.
ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "logprob_start_len": "prompt_logprobs_from",
}
FIELDS = frozenset(SamplingParams.__struct_fields__)
OPTIONS = FIELDS | frozenset(ALIASES)


def overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as users write them → fields of SamplingParams. None means "not given".

    Raises:
        ParameterError: an option that does not exist, has a wrong type or is given twice, under two names.
    """
    given = checks.entries("sampling", options, len(OPTIONS), "a dict such as {'temperature': 0}")
    result: dict[str, Any] = {}
    for name, value in given.items():
        if name not in OPTIONS:
            raise unknown_option("sampling", name, OPTIONS)
        if value is None:
            continue
        if (
            name == "logprob_start_len" and checks.as_integer(value) == -1
        ):  # SGLang's spelling of "no prompt log-probabilities"
            continue
        field = ALIASES.get(name, name)
        if field in result:
            raise ParameterError(f"{name}={shown(value)} is a second value of {field}; give one of them")
        result[field] = _normalise(field, value)
    return result


def merge(*layers: Mapping[str, Any]) -> SamplingParams:
    """Layers of overrides, the later one winning → SamplingParams."""
    combined: dict[str, Any] = {}
    for layer in layers:
        combined.update(layer)
    return SamplingParams(**combined)


_TOKEN_IDS = "a list of token ids"
_BIASES = "a dict of token ids to numbers"
_FROM_ZERO = f"at least 0, up to {MAX_TOKEN_ID}"


def _normalise(name: str, value: Any) -> Any:
    """Plain values of what counts as such: numbers of numpy, subclasses, any iterable for a tuple."""
    match name:
        case "stop" | "stop_regex":
            if isinstance(value, str):
                return (checks.plain(value),)
            stops = checks.members(name, value, MAX_STOPS, "a string or a list of strings")
            return tuple(checks.plain(stop) if isinstance(stop, str) else stop for stop in stops)
        case "adapter":
            return checks.plain(value) if isinstance(value, str) else value
        case "stop_token_ids":
            return tuple(map(checks.plain_number, checks.members(name, value, MAX_STOP_TOKEN_IDS, _TOKEN_IDS)))
        case "logit_bias":
            biases = checks.entries(name, value, MAX_LOGIT_BIAS, _BIASES)
            return {checks.plain_number(token): checks.plain_number(bias) for token, bias in biases.items()}
        case _:
            return checks.plain_number(value)


def _texts(name: str, one: str, values: Any, longest: int) -> None:
    if type(values) not in (tuple, list):
        raise ParameterError(f"{name} must be a tuple of strings, got {type(values).__name__} {shown(values)}")
    if len(values) > MAX_STOPS:
        raise ParameterError(f"{len(values)} {one}s given; at most {MAX_STOPS} are allowed")
    for text in values:
        if type(text) is not str:
            raise ParameterError(f"{name} must be strings, got {type(text).__name__} {shown(text)}")
        if not 0 < len(text) <= longest:
            raise ParameterError(f"{one} of {len(text)} characters; write 1 to {longest}")


def _check_ids(values: Any) -> None:
    if type(values) not in (tuple, list):
        raise ParameterError(f"stop_token_ids must be {_TOKEN_IDS}, got {type(values).__name__} {shown(values)}")
    if len(values) > MAX_STOP_TOKEN_IDS:
        raise ParameterError(f"stop_token_ids has {len(values)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed")
    for token in values:
        _integer("stop_token_ids", token, 0, MAX_TOKEN_ID, _FROM_ZERO)


def _check_biases(values: Any) -> None:
    if type(values) is not dict:
        raise ParameterError(f"logit_bias must be {_BIASES}, got {type(values).__name__} {shown(values)}")
    if len(values) > MAX_LOGIT_BIAS:
        raise ParameterError(f"logit_bias has {len(values)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    for token, bias in values.items():
        _integer("logit_bias token id", token, 0, MAX_TOKEN_ID, _FROM_ZERO)
        _number(f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS)


def _integer(name: str, value: object, low: int, high: int, instead: str = "") -> None:
    if type(value) is int and low <= value <= high:  # nearly always, and five times a call
        return
    checks.integer(name, value, low, high, instead)
    _require_plain(name, value, int)


def _number(name: str, value: object, low: float, high: float, instead: str = "") -> None:
    if type(value) is float and low <= value <= high:  # nearly always; NaN is not
        return
    checks.number(name, value, low, high, instead)
    _require_plain(name, value, int, float)


def _require_plain(name: str, value: object, *kinds: type) -> None:
    """Only these travel over the wire."""
    if type(value) not in kinds:
        written = kinds[-1].__name__
        raise ParameterError(f"{name} is of type {type(value).__name__}; write {name}={written}(...)")
