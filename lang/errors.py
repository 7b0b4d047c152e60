"""Every error a user of umbel can see.

    UmbelError
    ├── ProgramError              the program says something that cannot be meant
    │   ├── ParameterError        a parameter has a wrong type, range or combination        (ValueError)
    │   ├── VariableError         a variable was read that the program never sets           (LookupError)
    │   ├── TemplateError         a chat template is missing, broken or not prefix-stable
    │   ├── ConstraintError       a regex, schema or choice list that cannot be honoured
    │   ├── TraceError            the program does what no graph can say
    │   └── GraphError            a graph, or the file of one, that is not whole
    ├── ResultError               a text is not the object that was asked for               (ValueError)
    ├── BackendError              the backend could not do what was asked
    │   ├── CapabilityError       this backend or model does not offer the feature
    │   ├── GuaranteeError        no answer of the model satisfied the constraint, however often it was asked
    │   ├── RequestError          this request was refused (over a limit)
    │   │   └── ContextLengthError    the prompt does not fit the context
    │   ├── OverloadedError       the queue is full; try again later
    │   ├── EngineError           the engine failed or died while the request was running
    │   └── ConnectionLostError   the process at the other end is gone or silent            (ConnectionError)
    ├── BudgetError               the run's budget has no room for what comes next
    ├── DeadlineError             a deadline passed                                          (TimeoutError)
    ├── CancelledError            the run was cancelled
    ├── JournalError              a journal that is damaged, in use, or of another run
    ├── ModelError                weights, tokenizer or configuration that cannot be used
    └── MissingExtraError         an optional dependency is not installed                    (ImportError)

Messages name the value that was given and what to write instead. No message is longer than `MAX_MESSAGE`, and values
are quoted by `shown`.
"""

import difflib
import reprlib
from collections.abc import Iterable, Sequence

MAX_MESSAGE = 1900  # characters; terminals, logs and issue trackers take that, and a person reads no more
MAX_SHOWN = 160  # characters of a quoted text
MAX_SHOWN_OBJECT = 400  # of a quoted object: what it says of itself


class UmbelError(Exception):
    """Base of every error raised by umbel on purpose.

    A message beyond `MAX_MESSAGE` loses its middle: its beginning names the parameter, its end says what to write.
    """

    __module__ = "umbel"  # a traceback names it as a program that catches it does

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.__module__ = UmbelError.__module__

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shortened(each, MAX_MESSAGE) if isinstance(each, str) else each for each in arguments))


class ProgramError(UmbelError):
    """The program says something that cannot be meant."""


class ParameterError(ProgramError, ValueError):
    """A parameter has a wrong type, range or combination."""


class VariableError(ProgramError, LookupError):
    """A variable was read that the program never sets."""


class TemplateError(ProgramError):
    """A chat template is missing, broken or not prefix-stable."""


class ConstraintError(ProgramError):
    """A regex, schema or choice list that cannot be honoured."""


class TraceError(ProgramError):
    """The program does what no graph can say: it looks at a value that is known only when it runs, say."""


class GraphError(ProgramError):
    """A graph that is not whole, a file that is none, or a node that no file can hold."""


class ResultError(UmbelError, ValueError):
    """The text of a variable is not the object that was asked for: it was cut off, or the class refuses the values."""


class BackendError(UmbelError):
    """The backend could not do what was asked."""


class CapabilityError(BackendError):
    """This backend or model does not offer the feature."""


class GuaranteeError(BackendError):
    """No answer of the model satisfied the constraint, however often it was asked."""


class RequestError(BackendError):
    """This request was refused: it is over a limit, say."""


class ContextLengthError(RequestError):
    """The prompt, and one token where one is asked for, does not fit the context, or a smaller KV pool."""


class OverloadedError(BackendError):
    """The queue is full; try again later."""


class EngineError(BackendError):
    """The engine failed or died while the request was running."""


class ConnectionLostError(BackendError, ConnectionError):
    """The process at the other end is gone or silent."""


class BudgetError(UmbelError):
    """The run's budget has no room for what comes next, or its seconds are over.

    Attributes:
        state: of the program whose body raised it: what was generated before can be read there. None for an error
            that a read of a state raised.
    """

    state: object = None


class DeadlineError(UmbelError, TimeoutError):
    """A deadline passed."""


class CancelledError(UmbelError):
    """The run was cancelled."""


class BranchCancelledError(CancelledError):
    """The branch was cancelled; its run goes on without it."""


class JournalError(UmbelError):
    """A journal that is damaged, in use, or of another run; or a replay that asks what is not in it."""


class ModelError(UmbelError):
    """Weights, tokenizer or configuration that cannot be used."""


class MissingExtraError(UmbelError, ImportError):
    """An optional dependency is not installed.

    Args:
        package: the import name that was not found.
        extra: the extra of umbel that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed; run: pip install 'umbel[{extra}]'")
        self._given = (package, extra)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Copied as its two words: a pool of processes sends errors back that way."""
        return type(self), self._given


class _Short(reprlib.Repr):
    """Values as Python writes them, a few members and levels deep. It never computes the text of a whole container."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, MAX_SHOWN, MAX_SHOWN_OBJECT
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = 8

    def repr_str(self, x: str, level: int) -> str:
        """An operation in it as the program wrote it, without the secret of the process that stands for it."""
        from .ops import readable  # which raises our errors

        return super().repr_str(readable(x), level)

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write integers of more than 4,300 digits."""
        return repr(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"

    def repr_instance(self, value: object, level: int) -> str:
        return shortened(str.__str__(repr(value)), MAX_SHOWN_OBJECT)


_short = _Short()


def shown(value: object) -> str:
    """A value in a message: as Python writes it, in at most some hundred characters. It never raises.

    Of an object whose own `__repr__` fails, the type is said.
    """
    try:
        return shortened(_short.repr(value), MAX_SHOWN_OBJECT)
    except Exception:  # of the object's own code
        return f"<{type.__getattribute__(type(value), '__name__')} that cannot be shown>"


def shortened(text: str, most: int) -> str:
    """Shortens a text to at most so many characters: its beginning and, if something is left out, its end."""
    if len(text) <= most:
        return text
    ending = most // 3
    return f"{text[: most - ending - 5]} ... {text[len(text) - ending :]}"


# Names that other libraries use → ours, nearest meaning first. Only those that a call really takes are offered.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "response_model": ("dtype", "json_schema"),
    "response_schema": ("json_schema", "dtype"),
    "response_format": ("json_schema", "dtype", "regex"),
    "output_type": ("dtype",),
    "return_type": ("dtype",),
    "type": ("dtype",),
    "schema": ("json_schema", "dtype"),
    "guided_json": ("json_schema",),
    "guided_regex": ("regex",),
    "guided_choice": ("choices",),
    "guided_grammar": ("ebnf",),
    "pattern": ("regex",),
    "options": ("choices",),
    "candidates": ("choices",),
    "max_new_tokens": ("max_tokens",),
    "max_output_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_tokens",),
    "max_length": ("max_tokens", "context_length"),
    "min_new_tokens": ("min_tokens",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "stop_words": ("stop",),
    "eos_token_id": ("stop_token_ids",),
    "num_return_sequences": ("n",),
    "num_generations": ("n",),
    "candidate_count": ("n",),
    "temp": ("temperature",),
    "random_seed": ("seed",),
    "logprobs": ("return_logprob",),
    "top_logprobs": ("top_logprobs_num",),
    "lora": ("adapter", "adapters"),
    "lora_path": ("adapters", "adapter"),
    "retries": ("max_retries", "max_tries"),
    "num_retries": ("max_retries", "max_tries"),
    "validator": ("validate",),
    "deadline": ("timeout",),
    "request_timeout": ("timeout",),
    "max_workers": ("num_threads", "max_concurrency"),
    "concurrency": ("num_threads", "max_concurrency"),
    "n_jobs": ("num_threads",),
    "tqdm": ("progress",),
    "show_progress": ("progress",),
    "client": ("backend",),
    "model_name": ("model",),
    "model_id": ("model",),
    "base_url": ("address",),
    "url": ("base_url", "address"),
    "endpoint": ("base_url", "azure_endpoint", "address"),
    "api_base": ("base_url",),
    "token": ("api_key",),
    "headers": ("default_headers",),
    "extra_headers": ("default_headers",),
    "tp_size": ("tensor_parallel",),
    "tensor_parallel_size": ("tensor_parallel",),
    "dp_size": ("replicas",),
    "max_model_len": ("context_length",),
    "max_seq_len": ("context_length",),
    "n_ctx": ("context_length",),
    "quantization": ("weights",),
    "load_in_8bit": ("weights",),
    "load_in_4bit": ("weights",),
    "torch_dtype": ("dtype",),
    "gpu_memory_utilization": ("memory_share",),
    "mem_fraction_static": ("memory_share",),
    "max_num_seqs": ("max_running",),
    "device_map": ("device",),
    "n_threads": ("threads",),
}
_TOOLS = "in a program, write s.call_tools([function], max_tokens=256)"
_CONSTRAINT = 'write gen("name", dtype=MyClass), or json_schema=, regex= or choices='
_SAMPLING = 'it belongs to gen("name", ...), or to program.run(...) for every gen'
_TURNS = 'write the turns in the program: s += ul.system("...") + ul.user("...")'
# Names of what is no parameter here → what to write; said where the call takes none of the synonyms.
ELSEWHERE: dict[str, str] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "messages": _TURNS,
    "system_prompt": _TURNS,
    "n": "for several texts write gen(n=3), for branches s.fork(3)",
    "progress": "write program.run_batch(..., progress=True) for a bar, program.run(..., verbose=True) for the text",
    "stream": "write program.run(..., stream=True) and read state.text_iter()",
    "num_threads": "it is a parameter of program.run_batch(...)",
    "max_workers": "write program.run_batch(..., num_threads=8)",
    **dict.fromkeys(("dtype", "json_schema", "regex", "schema", "response_model", "response_format"), _CONSTRAINT),
    **dict.fromkeys(("temperature", "max_tokens", "max_new_tokens", "stop", "top_p", "top_k"), _SAMPLING),
    "backend": "write program.run(..., backend=...), or ul.set_default_backend(...)",
    "model": "the backend has the model: write program.run(..., backend=ul.Runtime(model))",
    "logprobs": "select() has them without being asked: s.get_meta_info(name)",
    "port": "a Runtime has no port: write umbel serve --port 30000, or share() for other processes",
}
MOST_OFFERED = 3  # names in one message
MOST_LISTED = 12  # names of all that is known, where none is near; more of them are not read


def remedy(name: str, known: Iterable[str]) -> str:
    """Suggests a replacement for an unknown name: at most three known ones that mean the same or are spelled nearly the
    same, or the list of them."""
    names = sorted(known)
    if same := [each for each in SYNONYMS.get(name, ()) if each in names][:MOST_OFFERED]:
        return f"did you mean {_either(same)}?"
    if close := difflib.get_close_matches(name[:MAX_SHOWN], names, n=MOST_OFFERED, cutoff=0.7):
        return f"did you mean {_either(close)}?"
    if close := difflib.get_close_matches(name[:MAX_SHOWN], names, n=1):
        return f"did you mean {close[0]!r}?"
    if len(names) > MOST_LISTED:
        return f"none of the {len(names)} known ones has a name like it; help() of the call lists them"
    return f"known are {', '.join(names)}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def option_remedy(name: str, known: Iterable[str]) -> str:
    """Suggests what to write in place of an unknown option: as `remedy`, or where else in a program it is said."""
    names = set(known)
    if name in ELSEWHERE and not names.intersection(SYNONYMS.get(name, ())):
        return ELSEWHERE[name]
    return remedy(name, names)


def unknown_option(owner: str, name: str, known: Iterable[str]) -> ParameterError:
    """The error for an option that does not exist."""
    return ParameterError(f"{owner} has no option {shown(name)}; {option_remedy(str(name), known)}")


# The names that may travel over the wire, in `protocol.Failure.kind`.
WIRE_ERRORS: dict[str, type[UmbelError]] = {
    error.__name__: error
    for error in (
        ProgramError,
        ParameterError,
        VariableError,
        TemplateError,
        ConstraintError,
        GraphError,
        ResultError,
        BackendError,
        CapabilityError,
        GuaranteeError,
        RequestError,
        ContextLengthError,
        OverloadedError,
        EngineError,
        ConnectionLostError,
        BudgetError,
        DeadlineError,
        CancelledError,
        ModelError,
    )
}
