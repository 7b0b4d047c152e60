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
    """Is the base of every error that umbel raises on purpose.

    A message names the value that was given and what to write instead. One beyond 1,900 characters loses its middle:
    its beginning names the parameter, its end says what to write.

    Args:
        arguments: the message; more of them are kept in `args`, as of every exception.

    Examples:
        >>> try:
        ...     ul.gen("answer", max_tokens=-1)
        ... except ul.UmbelError as error:
        ...     print(f"{type(error).__name__}: {error}")
        ParameterError: max_tokens=-1 is out of range; write from 0 to 1048576
    """

    __module__ = "umbel"  # a traceback names it as a program that catches it does

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.__module__ = UmbelError.__module__

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shortened(each, MAX_MESSAGE) if isinstance(each, str) else each for each in arguments))


class ProgramError(UmbelError):
    """Says that a program asks for what cannot be meant. Its subclasses say of what kind.

    Examples:
        >>> @ul.function
        ... def chat(s):
        ...     s += ul.user_begin() + "Why?" + ul.user_begin()
        >>> chat.run().text()
        Traceback (most recent call last):
        umbel.ProgramError: user cannot begin inside an open user turn; ...
    """


class ParameterError(ProgramError, ValueError):
    """Refuses a parameter: its name, type, range or combination with others. It is a ValueError, too.

    Examples:
        >>> ul.gen("answer", temp=0)
        Traceback (most recent call last):
        umbel.ParameterError: gen() has no option 'temp'; did you mean 'temperature'?
    """


class VariableError(ProgramError, LookupError):
    """Says that a variable was read which the program has not set. It is a LookupError, too.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=4)
        >>> ask.run("Why?")["anwser"]
        Traceback (most recent call last):
        umbel.VariableError: the program sets no variable 'anwser'; did you mean 'answer'?
    """


class TemplateError(ProgramError):
    """Refuses a chat template: it is missing, does not compile, or cannot write the turns of the program.

    Examples:
        >>> ul.Echo(chat_template="chatlm")
        Traceback (most recent call last):
        umbel.TemplateError: chat_template='chatlm' is no ... did you mean 'chatml' ...
    """


class ConstraintError(ProgramError):
    """Refuses a regular expression, a schema or a grammar that cannot be honoured, before anything is generated.

    Examples:
        >>> @ul.function
        ... def count(s):
        ...     s += "How many? " + ul.gen("number", regex="[0-9", max_tokens=4)
        >>> try:
        ...     count.run()["number"]
        ... except ul.ConstraintError as error:
        ...     print(error)
        regex '[0-9': unterminated character set at position 4
    """


class TraceError(ProgramError):
    """Says that no graph can express what a program does: it looks at a value that is known only when it runs, say.

    Examples:
        >>> @ul.function
        ... def judge(s):
        ...     s += "Is it true?" + ul.gen("verdict", max_tokens=2)
        ...     if s["verdict"] == "no":
        ...         s += ul.gen("reason")
        >>> try:
        ...     judge.trace()
        ... except ul.TraceError as error:
        ...     print("TraceError:", error)
        TraceError: ...: == looks at variable 'verdict', which is known only when the program runs; ...
    """


class GraphError(ProgramError):
    """Refuses a graph that is not whole, a file that holds none, or a node that no file can hold.

    Examples:
        >>> from pathlib import Path
        >>> notes = Path("notes.txt")
        >>> _ = notes.write_text("no graph")
        >>> ul.load(notes)
        Traceback (most recent call last):
        umbel.GraphError: notes.txt: it is no JSON: ...
        >>> notes.unlink()
    """


class ResultError(UmbelError, ValueError):
    """Says that a text is not the object that was asked for: it was cut off, or the class refuses the values.

    It is a ValueError, too. `state["name"]` is still the text.

    Examples:
        >>> @ul.function
        ... def count(s):
        ...     s += "Count to four: " + ul.gen("numbers", dtype=list[int], max_tokens=3)
        >>> state = count.run(backend=ul.Echo(["[1, 2, 3, 4]"]))
        >>> state.value("numbers")
        Traceback (most recent call last):
        umbel.ResultError: variable 'numbers' holds no list[int], for it was cut off ...
        >>> state["numbers"]
        '[1,'
    """


class BackendError(UmbelError):
    """Says that a backend could not do what was asked. Its subclasses say why.

    Examples:
        >>> ul.Runtime().chat_template
        Traceback (most recent call last):
        umbel.BackendError: the chat template is known once ... call wait_ready() first
    """


class CapabilityError(BackendError):
    """Says that this backend or model does not offer a feature, and which one does.

    Examples:
        >>> ul.embed(["a text"], backend=ul.Echo())
        Traceback (most recent call last):
        umbel.CapabilityError: Echo makes no embeddings; give backend= a Runtime with ...
    """


class GuaranteeError(BackendError):
    """Says that no answer of a model satisfied the constraint, however often it was asked.

    It comes from hosted models that do not enforce the constraint. A `Runtime` enforces all of them.

    Examples:
        >>> from umbel.testing import FakeOllama
        >>> with FakeOllama(lambda prompt: "Excellent") as server:
        ...     model = ul.Ollama("llama3.2", base_url=server.base_url)
        ...     try:
        ...         model("Grade this essay.", regex="[A-F]", max_tokens=8)
        ...     except ul.GuaranteeError as error:
        ...         print(error)
        ollama llama3.2 wrote no text for variable 'text' that satisfies its regex in 3 tries; ...
    """


class RequestError(BackendError):
    """Says that a request was refused, and would be again.

    It is over a limit, names a model that the server does not have, or its key is refused.

    Examples:
        >>> from umbel.testing import FakeOpenAI
        >>> with FakeOpenAI() as server:
        ...     model = ul.OpenAI("gpt-4p", base_url=server.base_url, api_key=server.api_key)
        ...     model("Why?", max_tokens=8)
        Traceback (most recent call last):
        umbel.RequestError: openai gpt-4p: 127.0.0.1 has no model 'gpt-4p'; it has ...
    """


class ContextLengthError(RequestError):
    """Says that a prompt does not fit the context, or a smaller KV pool.

    One token of the answer has to fit, too, where one is asked for.

    Examples:
        >>> @ul.function
        ... def summarise(s, text):
        ...     s += text + "\\nSummary:" + ul.gen("summary", max_tokens=8)
        >>> too_long = ul.ContextLengthError("the prompt has 40000 tokens, the context 32768")
        >>> model = ul.Echo({"Summary:": " It sinks."}, faults=ul.FailCall(1, too_long))
        >>> text = "Venice sinks. " * 1000
        >>> try:
        ...     summary = summarise.run(text, backend=model)["summary"]
        ... except ul.ContextLengthError:
        ...     summary = summarise.run(text[: len(text) // 2], backend=model)["summary"]
        >>> summary
        ' It sinks.'
    """


class OverloadedError(BackendError):
    """Says that a queue is full or a rate is limited: the same call may succeed later.

    Hosted backends have tried again by then, `max_retries` times.

    Examples:
        >>> from umbel.testing import FakeOpenAI, Fault
        >>> with FakeOpenAI(["Because."], faults=[Fault.RATE_LIMIT]) as server:
        ...     where = {"base_url": server.base_url, "api_key": server.api_key}
        ...     try:
        ...         ul.OpenAI("gpt-4o", max_retries=0, **where)("Why?", max_tokens=8)
        ...     except ul.OverloadedError as error:
        ...         print(error)
        openai gpt-4o: 127.0.0.1 is overloaded or limits its rate (429: ...)
    """


class EngineError(BackendError):
    """Says that the engine, or the server of a provider, failed while a request was running.

    Examples:
        >>> from umbel.testing import FakeOpenAI, Fault
        >>> with FakeOpenAI(["Because."], faults=[Fault.SERVER_ERROR]) as server:
        ...     where = {"base_url": server.base_url, "api_key": server.api_key}
        ...     try:
        ...         ul.OpenAI("gpt-4o", max_retries=0, **where)("Why?", max_tokens=8)
        ...     except ul.EngineError as error:
        ...         print(error)
        openai gpt-4o: 127.0.0.1 failed (500: ...)
    """


class ConnectionLostError(BackendError, ConnectionError):
    """Says that the process or server at the other end is gone, silent or cannot be reached.

    It is a ConnectionError, too.

    Examples:
        >>> from umbel.testing import FakeOpenAI, Fault
        >>> with FakeOpenAI(["Because."], faults=[Fault.DISCONNECT]) as server:
        ...     where = {"base_url": server.base_url, "api_key": server.api_key}
        ...     try:
        ...         ul.OpenAI("gpt-4o", max_retries=0, **where)("Why?", max_tokens=8)
        ...     except ul.ConnectionLostError as error:
        ...         print(error)
        openai gpt-4o: no connection to http://127.0.0.1:..., or it was lost; check base_url, and that the server runs
    """


class BudgetError(UmbelError):
    """Says that a run's budget has no room for what comes next, or that its seconds are over.

    Attributes:
        state: of the program whose body raised it: what was generated before can be read there. None for an error
            that a read of a state raised.

    Examples:
        >>> @ul.function
        ... def talk(s):
        ...     s += "One:" + ul.gen("one", max_tokens=4)
        ...     s += "Two:" + ul.gen("two", max_tokens=4)
        >>> state = talk.run(backend=ul.Echo([" a", " b"]), budget=ul.Budget(calls=1))
        >>> state["one"]
        ' a'
        >>> try:
        ...     state["two"]
        ... except ul.BudgetError as error:
        ...     print(error)
        1 call has been made, and one more does not fit Budget(calls=1); raise calls to 2
    """

    state: object = None


class DeadlineError(UmbelError, TimeoutError):
    """Says that a deadline passed: the `timeout` of a run, of a call or of a start. It is a TimeoutError, too.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=4)
        >>> silent = ul.Echo(gate=ul.Gate())  # a model that never answers
        >>> state = ask.run("Why?", backend=silent, stream=True)
        >>> try:
        ...     state.get_var("answer", timeout=0.01)
        ... except ul.DeadlineError as error:
        ...     print(error)
        variable 'answer' was not known in time; give more with timeout=
        >>> state.cancel()
    """


class CancelledError(UmbelError):
    """Says that a run was cancelled, by `state.cancel()` or by an interrupt.

    Examples:
        >>> @ul.function
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=4)
        >>> silent = ul.Echo(gate=ul.Gate())  # a model that never answers
        >>> state = ask.run("Why?", backend=silent, stream=True)
        >>> state.cancel()
        >>> state["answer"]
        Traceback (most recent call last):
        umbel.CancelledError: the run was cancelled
    """


class BranchCancelledError(CancelledError):
    """Says that a branch was cancelled. Its run goes on without it.

    Examples:
        >>> @ul.function
        ... def compare(s):
        ...     s += "Why?"
        ...     forks = s.fork(2)
        ...     forks += ul.gen("answer", max_tokens=4)
        ...     forks[1].cancel()
        ...     try:
        ...         s += forks[1]["answer"]
        ...     except ul.BranchCancelledError:
        ...         s += forks[0]["answer"]
        >>> compare.run(backend=ul.Echo({"Why?": " So."})).text()
        'Why? So.'
    """


class JournalError(UmbelError):
    """Refuses a journal that is damaged, in use, or of another run; or a replay that asks for what is not in it.

    Examples:
        >>> from pathlib import Path
        >>> @ul.function
        ... def ask(s, question):
        ...     s += question + ul.gen("answer", max_tokens=4)
        >>> ask.run("Why?", journal="run.jsonl").sync()
        >>> ask.run("How?", journal="run.jsonl").sync()
        Traceback (most recent call last):
        umbel.JournalError: run.jsonl has item 0 with other arguments: 'question'; ...
        >>> Path("run.jsonl").unlink()
    """


class ModelError(UmbelError):
    """Says that weights, a tokenizer or a configuration cannot be used.

    Examples:
        >>> ul.Runtime("./no_such_model").wait_ready()
        Traceback (most recent call last):
        umbel.ModelError: there is no model, folder or file './no_such_model'; ...
    """


class MissingExtraError(UmbelError, ImportError):
    """Says that an optional dependency is not installed. It is an ImportError, too.

    Args:
        package: the import name that was not found.
        extra: the extra of umbel that brings it.

    Examples:
        >>> try:
        ...     raise ul.MissingExtraError("litellm", extra="litellm")  # as ul.LiteLLM(...) does
        ... except ImportError as error:
        ...     print(error)
        'litellm' is not installed; run: pip install 'umbel[litellm]'
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


def remedy(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggests a replacement for an unknown name: at most three known ones that mean the same or are spelled nearly the
    same, or the list of them.

    Args:
        otherwise: what to say where no known one is near.
    """
    names = sorted(known)
    if same := [each for each in SYNONYMS.get(name, ()) if each in names][:MOST_OFFERED]:
        return f"did you mean {_either(same)}?"
    if close := difflib.get_close_matches(name[:MAX_SHOWN], names, n=MOST_OFFERED, cutoff=0.7):
        return f"did you mean {_either(close)}?"
    if close := difflib.get_close_matches(name[:MAX_SHOWN], names, n=1):
        return f"did you mean {close[0]!r}?"
    if otherwise:
        return otherwise
    if len(names) > MOST_LISTED:
        return f"none of the {len(names)} known ones has a name like it; help() of the call lists them"
    return f"known are {', '.join(names)}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def option_remedy(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggests what to write in place of an unknown option: as `remedy`, or where else in a program it is said."""
    names = set(known)
    if name in ELSEWHERE and not names.intersection(SYNONYMS.get(name, ())):
        return ELSEWHERE[name]
    return remedy(name, names, otherwise)


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
