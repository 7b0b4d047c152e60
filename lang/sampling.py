"""Sampling parameters: one validated, frozen description of how to choose tokens."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .errors import ParameterError, unknown_option

# Limits with the reason beside them; pinned by tests/lang/test_sampling.py.
MAX_N = 128  # one prompt, this many continuations
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters in one stop string
MAX_STOP_REGEX_LENGTH = 1024  # characters in one stop_regex
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300  # entries
MAX_TOKENS = 1 << 20  # larger values are a mistake, not a wish


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one `gen` chooses its tokens. Validated when it is made and when it is decoded from the wire.

    Attributes:
        max_tokens: most tokens to generate, at least 0; 0 computes the prompt and generates nothing.
        min_tokens: end-of-sequence and stops are ignored before this many tokens.
        n: number of continuations of the one prompt.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own end-of-sequence tokens.
        stop_regex: regular expressions whose first match ends the text before it, wherever it stands.
        temperature: 0 takes the most likely token.
        top_p: nucleus mass in (0, 1].
        top_k: number of most likely tokens kept; -1 keeps all.
        min_p: least probability relative to the most likely token, in [0, 1].
        frequency_penalty: subtracted once per earlier occurrence in the generated text, in [-2, 2].
        presence_penalty: subtracted once if the token occurred in the generated text, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or text, in (0, 2].
        logit_bias: token id to a number added to its logit, in [-100, 100].
        seed: same seed, same text, whatever else runs in the batch; None draws one.
        ignore_eos: generate past end-of-sequence.
        logprobs: return the log-probability of every generated token.
        top_logprobs: return this many most likely alternatives as well.
        prompt_logprobs_from: also return log-probabilities of the prompt from this token index on.

    Raises:
        ParameterError: a value outside its range; the message says what to write.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs_from: int | None = None
    stop_regex: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; raise max_tokens"
            )
        _integer("n", self.n, 1, MAX_N)
        if len(self.stop) > MAX_STOPS:
            raise ParameterError(f"{len(self.stop)} stop strings given; at most {MAX_STOPS} are allowed")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise ParameterError(f"stop must be strings, got {type(stop).__name__} {stop!r}")
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise ParameterError(f"stop string of {len(stop)} characters; write 1 to {MAX_STOP_LENGTH}")
        if len(self.stop_regex) > MAX_STOPS:
            raise ParameterError(f"{len(self.stop_regex)} stop_regex given; at most {MAX_STOPS} are allowed")
        for pattern in self.stop_regex:
            if not isinstance(pattern, str):
                raise ParameterError(f"stop_regex must be strings, got {type(pattern).__name__} {pattern!r}")
            if not 0 < len(pattern) <= MAX_STOP_REGEX_LENGTH:
                raise ParameterError(f"stop_regex of {len(pattern)} characters; write 1 to {MAX_STOP_REGEX_LENGTH}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p=0 keeps no token; write temperature=0 for the most likely token")
        _integer("top_k", self.top_k, -1, None)
        if self.top_k == 0:
            raise ParameterError("top_k=0 keeps no token; write top_k=-1 to keep all of them")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.repetition_penalty == 0.0:
            raise ParameterError("repetition_penalty=0 divides by zero; write 1.0 for none")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        for name, switch in (("ignore_eos", self.ignore_eos), ("logprobs", self.logprobs)):
            if not isinstance(switch, bool):
                raise ParameterError(f"{name} must be True or False, got {switch!r}")
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs_from is not None:
            _integer("prompt_logprobs_from", self.prompt_logprobs_from, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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
    if not isinstance(options, Mapping):
        raise ParameterError(f"sampling parameters must be a dict such as {{'temperature': 0}}, got {options!r}")
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise unknown_option("sampling", name, OPTIONS)
        if value is None:
            continue
        if name == "logprob_start_len" and value == -1:  # SGLang's spelling of "no prompt log-probabilities"
            continue
        field = ALIASES.get(name, name)
        if field in result:
            raise ParameterError(f"{name}={value!r} is a second value of {field}; give one of them")
        result[field] = _normalise(field, value)
    return result


def merge(*layers: Mapping[str, Any]) -> SamplingParams:
    """Layers of overrides, the later one winning → SamplingParams."""
    combined: dict[str, Any] = {}
    for layer in layers:
        combined.update(layer)
    return SamplingParams(**combined)


def _normalise(name: str, value: Any) -> Any:
    match name:
        case "stop" | "stop_regex":
            if isinstance(value, str):
                return (value,)
            return _tuple(name, value, "a string or a list of strings")
        case "stop_token_ids":
            return _tuple(name, value, "a list of token ids")
        case "logit_bias":
            if not isinstance(value, Mapping):
                raise ParameterError(f"logit_bias must map token ids to numbers, got {type(value).__name__}")
            return dict(value)
        case _:
            return value


def _tuple(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterError(f"{name} must be {wanted}, got {type(value).__name__} {value!r}")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is int and value >= low and (high is None or value <= high):  # nearly always, and five times a call
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise ParameterError(f"{name}={value} is out of range; write {bound}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if type(value) is float and low <= value <= high:  # nearly always; NaN is not
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value) or not low <= value <= high:
        raise ParameterError(f"{name}={value} is out of range; write {low} to {high}")
