"""Options of SGLang's server → those of `umbel.Runtime`."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from .....lang import checks
from .....lang.errors import ParameterError, unknown_option
from .....lang.runtime_options import GONE, OPTION_NAMES, LogLevel, Policy
from ...refusals import check_refused

Options = dict[str, Any]  # Any: options are of all types

# SGLang's name → ours, where the value is the same.
_SAME = {
    "model_path": "model_path",
    "tp_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "random_seed": "seed",
    "context_length": "context_length",
    "max_running_requests": "max_running",
    "max_total_tokens": "pool_tokens",
    "launch_timeout": "startup_timeout",
    "device": "device",
}
_DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_KV_DTYPES = {"auto": "auto", "fp8_e5m2": "fp8", "fp8_e4m3": "fp8"}
_ENGINES = {"xgrammar": "auto", "outlines": "outlines-core", "llguidance": "llguidance"}
_LEVELS = {"critical": "error", "fatal": "error", **{level: level for level in get_args(LogLevel)}}

# SGLang's name → the value that asks for nothing, and what to write instead of any other.
_REFUSED: dict[str, tuple[object, str]] = {
    "port": (None, "nothing listens: programs reach the runtime as backend=runtime; leave it out"),
    "host": (None, "nothing listens: programs reach the runtime as backend=runtime; leave it out"),
    "additional_ports": (None, "nothing listens; leave it out"),
    "nccl_port": (None, "ranks find each other without one; leave it out"),
    "api_key": (None, "nothing listens, so no client has to be kept out; leave it out"),
    "mem_fraction_static": (
        None,
        "the cache takes the memory that is left; leave it out, or write pool_memory= in bytes",
    ),
    "tokenizer_mode": ("auto", "the model's own tokenizer is read; leave it out"),
    "skip_tokenizer_init": (False, "prompts are texts; leave it out"),
    "load_format": ("auto", "safetensors folders and GGUF files are told apart; leave it out"),
    "trust_remote_code": (False, "code of models is never run; leave it out"),
    "quantization": (None, "write weights='int8', or give a GGUF file"),
    "revision": (None, "give the folder of the revision as model_path"),
    "served_model_name": (None, "leave it out: a runtime has one model"),
    "is_embedding": (False, "there are no embeddings here"),
    "dp_size": (1, "make several Runtimes, and give each run one of them"),
    "pp_size": (1, "write tp_size=, or leave it out"),
    "ep_size": (1, "write tp_size=, or leave it out"),
    "attention_backend": (None, "write kernels= ('auto', 'native', 'torch', ...)"),
    "sampling_backend": (None, "leave it out"),
    "schedule_conservativeness": (1.0, "leave it out: requests that do not fit wait"),
    "enable_torch_compile": (False, "leave it out"),
    "enable_mixed_chunk": (False, "prompts and single tokens always share steps; leave it out"),
    "enable_metrics": (False, "runtime.get_server_info() has the counters"),
    "log_requests": (False, "program.run(..., verbose=True) prints the text of a run"),
    "lora_paths": (None, "adapters are not served; merge them into the model"),
    "speculative_algorithm": (None, "leave it out"),
    "json_model_override_args": (None, "change the model's config.json"),
    "file_storage_path": (None, "leave it out"),
}
_OWN = OPTION_NAMES | {
    "model",
    "template_options",
    "startup_timeout",
    "progress",
    "chat_template",
}


def runtime_options(given: Mapping[str, Any]) -> Options:
    """
    Args:
        given: SGLang's options, or ours.

    Raises:
        ParameterError: an option without counterpart, with what to write; a wrong value; one option under two names.
    """
    check_refused("Runtime()", given, _REFUSED)
    options: Options = {}
    for name, value in given.items():
        if name in _REFUSED or value is None:
            continue
        ours, mapped = _mapped(name, value, given)
        if ours in options:
            raise ParameterError(f"Runtime({name}=...) is a second value of {ours}; give one of them")
        if ours:
            options[ours] = mapped
    return options


def _mapped(name: str, value: Any, given: Mapping[str, Any]) -> tuple[str, Any]:
    """Our name and value; "" for what says the same as another option."""
    if name in _SAME:
        return _SAME[name], value
    if name in _SWITCHES:
        ours, turned = _SWITCHES[name]
        return ours, turned(name, value)
    match name:
        case "log_level":
            return "log_level", _LEVELS.get(value, value) if isinstance(value, str) else value
        case "chunked_prefill_size":
            return "chunk_size", None if checks.as_integer(value) == -1 else value
        case "tokenizer_path":
            if checks.path("tokenizer_path", value) != checks.path("model_path", given.get("model_path")):
                raise ParameterError(
                    "Runtime() takes no tokenizer_path: the tokenizer is that of model_path; leave it out"
                )
            return "", None
    if name not in _OWN and name not in GONE:  # those are refused with what to write
        raise unknown_option("Runtime()", name, {*_OWN, *_SAME, *_SWITCHES, "tokenizer_path", "chunked_prefill_size"})
    return name, value


def _one_of(known: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    def mapped(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise ParameterError(f"Runtime({name}={value!r}): write one of {', '.join(map(repr, known))}")
        return known[value]

    return mapped


def _turned_off(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"Runtime({name}={value!r}): write True or False")
    return not value


def _overlap(name: str, value: Any) -> Any:
    """SGLang's default lets steps overlap where the device can."""
    return "auto" if _turned_off(name, value) else False


_POLICIES = {policy: policy for policy in get_args(Policy)}
_SWITCHES: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "dtype": ("dtype", _one_of(_DTYPES)),
    "kv_cache_dtype": ("kv_dtype", _one_of(_KV_DTYPES)),
    "grammar_backend": ("constraint_engine", _one_of(_ENGINES)),
    "schedule_policy": ("policy", _one_of(_POLICIES)),
    "schedule_heuristic": ("policy", _one_of(_POLICIES)),
    "disable_radix_cache": ("radix_cache", _turned_off),
    "disable_cuda_graph": ("cuda_graphs", _turned_off),
    "disable_overlap_schedule": ("overlap", _overlap),
    "disable_jump_forward": ("jump_forward", _turned_off),
}
