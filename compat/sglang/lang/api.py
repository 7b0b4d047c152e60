"""`sglang.lang.api`: what programs write, with SGLang's parameters."""

from collections.abc import Iterable
from typing import Any

from ....interpreter import run
from ....interpreter.run import set_default_backend as set_default_backend
from ....lang import generation, ops
from ....lang.errors import ParameterError
from ....lang.ops import (
    assistant_begin,
    assistant_end,
    image,
    system_begin,
    system_end,
    user_begin,
    user_end,
    video,
)
from ....lang.protocol import Backend
from .backend.runtime_endpoint import Engine, Runtime
from .choices import ChoicesSamplingMethod, method_of
from .ir import function

__all__ = [
    "Engine",
    "Runtime",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
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
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,  # Any: a type, or its name
    choices: Iterable[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,  # Any: as of umbel.gen
    **options: Any,
) -> ops.Gen | ops.Select:
    """Generates text, as `umbel.gen` does with its further options, with SGLang's order of parameters.

    With `choices`, `max_tokens` and `stop` change nothing, as in SGLang: the answer is one of the choices as a whole.
    Other parameters of `gen` are refused there.
    """
    given = dict(locals())  # the parameters by their names; no other name is bound yet
    given |= given.pop("options")
    given["choices_method"] = method_of(choices_method)
    if choices is not None:
        generation.gen(name, max_tokens, stop=stop)  # wrong values are refused all the same
        del given["max_tokens"], given["stop"]
    return generation.gen(**given)


def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> ops.Gen | ops.Select:
    """`gen(dtype=int)`."""
    return gen(name, max_tokens, dtype=int, **options)


def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> ops.Gen | ops.Select:
    """`gen(dtype=str)`."""
    return gen(name, max_tokens, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Iterable[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str | None = None,
) -> ops.Select:
    """Chooses among texts, as `umbel.select` does."""
    return generation.select(name, choices, temperature, method_of(choices_method))


def system(expr: object = None) -> ops.Op:
    """A system turn; without content an empty one."""
    return ops.system("" if expr is None else expr)


def user(expr: object = None) -> ops.Op:
    """A user turn; without content an empty one."""
    return ops.user("" if expr is None else expr)


def assistant(expr: object = None) -> ops.Op:
    """An assistant turn; without content an empty one."""
    return ops.assistant("" if expr is None else expr)


def separate_reasoning(expr: object = None, model_type: str | None = None) -> ops.Op:
    """Separates reasoning, as `umbel.separate_reasoning` does.

    Raises:
        ParameterError: nothing to separate.
    """
    if expr is None:
        raise ParameterError("separate_reasoning() needs what generates; write separate_reasoning(gen('answer'), ...)")
    return ops.separate_reasoning(expr) if model_type is None else ops.separate_reasoning(expr, model_type)


def flush_cache(backend: Backend | None = None, empty_cache: bool = True) -> None:
    """Forget every cached prefix of the backend, or of the default one.

    Raises:
        ParameterError: `empty_cache` False, which would keep the memory of what is forgotten.
    """
    if empty_cache is not True:
        raise ParameterError(f"flush_cache() takes no empty_cache={empty_cache!r}; leave it out")
    run.flush_cache(backend)


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Asks the backend, or the default one, for its description."""
    return run.get_server_info(backend)
