"""Calls of everything that is public, with odd arguments. What comes out may be a result, an UmbelError, or the
TypeError of a call that does not fit its signature; anything else is a fault.

    python tests/stress/public_calls.py --calls 1000 --seed 0
    python tests/stress/public_calls.py --seed 0 --only 17        # one call, with its traceback

It runs in a process of its own (see test_public_callables.py), which says on standard output which calls were faults. A
call has `CPU_SECONDS` of CPU; where none ends for `STUCK_SECONDS`, the process writes its stacks and ends itself.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import inspect
import io
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import odd_values
import umbel as ul
import umbel.testing as fakes
from umbel.interpreter.cli import main
from umbel.interpreter.remote_images import Web

CPU_SECONDS = 20.0  # of one call; the slowest take a part of a second
STUCK_SECONDS = 300.0
LONGEST_MESSAGE = 2000
REPEATED = 300  # calls that are made again to see whether anything grows

# Values that fit parameters of these names: odd calls are near misses of good ones.
NEAR: Mapping[str, tuple[Any, ...]] = {
    "name": ("x", "answer"), "max_tokens": (0, 1, 7), "min_tokens": (0, 1), "n": (1, 2), "stop": ("\n", ["a", "b"]),
    "stop_token_ids": ([1, 2],), "stop_regex": ("[ab]+",), "temperature": (0, 0.5), "top_p": (0.9,), "top_k": (-1, 5),
    "min_p": (0.1,), "frequency_penalty": (0.5,), "presence_penalty": (-1,), "repetition_penalty": (1.1,),
    "logit_bias": ({5: 1.0},), "seed": (0, 3), "ignore_eos": (False,), "return_logprob": (True,),
    "logprob_start_len": (0, -1), "top_logprobs_num": (2,), "return_text_in_logprobs": (True,), "dtype": (int, bool),
    "choices": (["yes", "no"],), "choices_method": ("exact",), "method": ("overshoot",), "regex": ("[a-z]+",),
    "json_schema": ({"type": "object"}, "true"), "ebnf": ('start: "a"',), "json_whitespace": ("compact",),
    "json_key_order": ("any",), "allow_unenforced": (True,), "constraint_engine": ("auto",), "token_healing": (True,),
    "max_tries": (2,), "allow_best_effort": (True,), "timeout": (20.0,), "priority": (3,), "salt": ("communicator",),
    "stream": (False,), "verbose": (False,), "sampling": ({"temperature": 0},),
    "backend": (ul.Echo(lambda _: "hello"),),
    "tokens": (1000,), "calls": (3,), "dollars": (0.5,), "seconds": (5.0,), "num_threads": ("auto", 2),
    "on_error": ("return", "raise"), "size": (1, 3), "mode": ("gather_variable", "chat"), "var_name": ("x",),
    "generator_style": (False,), "content": ("hello",), "source": (b"x",), "num_frames": (2,), "model_type": ("qwen3",),
    "batch_arguments": ([{"q": "a"}, ("b",)],), "static_args": ({"q": "a"},), "passes": ("none", "default"),
    "hosts": (["a.example.org"],), "url": ("https://a.example.org/x.png",), "ttl": (5.0,), "speculate": ("auto",),
    "num_api_spec_tokens": (8,), "model": ("oracle", "gpt-4o"), "base_url": ("http://127.0.0.1:9/v1",),
    "api_key": ("k",),
    "max_retries": (0,), "max_concurrency": (4,), "profile": ("auto", "vllm"), "record": (10,), "delay": (0,),
    "cache_tokens": (100,), "scores": ({"yes": -0.1},), "script": (["a", "b"],), "k": (1,), "verbs": (["generate"],),
    "error": (ul.BackendError("x"),), "count": (1,), "input": (1.0,), "output": (1.0,),
}  # fmt: skip

# Parameters that go by another name in messages, which is the user's too.
ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    "var_name": ("variable",), "static_args": ("static_args", "argument", "parameter"), "size": ("fork",),
    "batch_arguments": ("append", "parameter", "argument"),
    "content": ("append", "content", "None", "URL", "image", "video"), "source": ("image", "video", "source"),
    "value": ("append", "variable"), "other": ("append", "forks", "None"), "body": ("function", "program"),
    "operation": ("append", "image", "video", "None"), "url": ("fetch_image",), "path": ("graph", "file"),
    "model": ("model", "prices"), "price": ("prices",), "mode": ("mode",), "name": ("name", "role", "prices"),
    "dtype": ("dtype", "Annotated", "JSON"), "json_schema": ("json_schema", "JSON"),
    "ebnf": ("ebnf", "grammar", "lark"),
    "grammar": ("grammar", "lark"), "regex": ("regex",), "items": ("append", "None"), "extra": ("parameter",),
    "arguments": ("graph", "file", "argument", "arguments"), "q": ("q", "append", "parameter", "content"),
    "tokens": ("tokens",), "options": ("options", "template", "choice"), "pattern": ("regex",),
    "schema": ("JSON", "json"), "part": ("capture",), "text": ("literal", "substring"), "source_": ("template",),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One public callable.

    Attributes:
        valid: arguments that a call needs.
        parameters: names that may be given; () takes those of the signature.
        positional: names of the first ones, which are given by place.
        finish: what is done with a result: most faults would wait until it is used.
    """

    name: str
    call: Callable[..., Any]
    valid: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    finish: Callable[[Any], object] = lambda result: None

    def names(self) -> tuple[str, ...]:
        if self.parameters:
            return self.parameters
        if hasattr(self.call, "option_names"):  # of a hosted backend, whose options are declared in its base
            return tuple(name for name in self.call.option_names() if name != "environment")
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = inspect.signature(self.call).parameters.values()
        return tuple(each.name for each in found if each.kind in kinds and each.name not in ("environment", "web"))


FAKE_OPTIONS = ("faults", "gate", "retry_after", "record")  # declared in the base of the fakes


def echo() -> ul.Echo:
    return ul.Echo(lambda prompt: "hello", scores={"yes": -0.1})


@ul.function
def ask(s: ul.State, q: str = "why") -> str:
    s += ul.user(q) + ul.assistant(ul.gen("x", max_tokens=4))
    return "said"


@ul.function
def say(s: ul.State, act: Callable[[ul.State], object]) -> object:
    s += "Q: " + ul.gen("x", max_tokens=4)
    return act(s)


def saying(op: object) -> None:
    """Appends what was made, and waits for what it says."""

    def append(s: ul.State) -> None:
        s += op
        s.sync()

    say.run(append, backend=echo())


def on_state(act: Callable[..., object]) -> Callable[..., object]:
    return lambda **given: say.run(lambda s: act(s, **given), backend=echo()).ret_value


def method(name: str, *, result: Callable[[Any], object] = lambda result: result) -> Target:
    """A method of the state of a program that runs."""
    return Target(
        f"State.{name}",
        on_state(lambda s, **given: result(getattr(s, name)(**given))),
        parameters=tuple(inspect.signature(getattr(ul.State, name)).parameters)[1:],
    )


def appended(s: ul.State, other: object) -> None:
    s += other
    s.sync()


def forked(s: ul.State, other: object) -> None:
    forks = s.fork(2)
    forks += other
    forks.join()
    s.sync()


def scoped(s: ul.State, name: object) -> None:
    with s.var_scope(name):  # type: ignore[arg-type]  # the mistake that is made
        s += "inside"
    s.sync()


def constraining(expression: object) -> None:
    say.run(lambda s: appended(s, ul.gen("y", constraint=expression)), backend=echo())


OF_TOOLS = ("max_steps", "tool_choice", "parallel", "timeout", "max_result_bytes", "on_error", "max_tokens", "stop")


@ul.function
def picked(s: ul.State, q: str) -> None:
    s += q + ul.select("x", choices=["yes", "no"])


@ul.tool
def lookup(word: str) -> str:
    """Looks a word up."""
    return word


def called_tools(s: ul.State, tools: object = (lookup,), **given: Any) -> None:
    other = s.fork(1)[0]  # a conversation of turns, with no text outside of them
    other += ul.user("hi")
    other.call_tools(list(tools) if isinstance(tools, tuple) else tools, **given)


def tooled(**given: Any) -> None:
    ul.tool(**given)(lookup.__wrapped__)


def within(backend: object) -> None:
    with ul.default_backend(backend):  # type: ignore[arg-type]  # the mistake that is made
        pass


def priced(model: object, price: object) -> None:
    try:
        ul.prices[model] = price  # type: ignore[index,assignment]  # the mistake that is made
    finally:
        for name in [name for name in ul.prices if isinstance(name, str) and len(name) < 3]:
            del ul.prices[name]


def decorated(**given: Any) -> None:
    ul.function(**given)(lambda s: None).run(backend=echo())


def commanded(**given: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        main(given["arguments"])
    if len(said.getvalue()) > LONGEST_MESSAGE + 200:
        raise AssertionError(f"the command says {len(said.getvalue())} characters")


def nowhere(host: str, port: int) -> list[str]:
    raise OSError("no network in this test")


def fetched(url: object, hosts: object) -> bytes:
    return ul.fetch_image(url, hosts=hosts, web=Web(resolve=nowhere))  # type: ignore[arg-type]


def rendered(source: Any, **given: Any) -> None:
    template = ul.ChatTemplate(source, **given)
    template.open((), "user")


COMMANDS = ("run", "models", "compile", "lint", "fsm", "nothing", "--version", "chat")
OF_RUNS = ("backend", "budget", "priority", "salt", "stream", "timeout", "verbose", "sampling", "temperature", "stop",
           "max_tokens", "num_api_spec_tokens", "speculate", "q")  # fmt: skip


def targets() -> list[Target]:
    graph, compiled = ask.trace(), ask.compile()
    state = ask.run(backend=echo())
    run = {"backend": NEAR["backend"][0]}
    report_metric = ul.exact_match("x", "q")
    report = ul.evaluate(picked, [{"q": "yes"}], report_metric, backend=echo())
    key = {"model": "gpt-4o", "api_key": "k"}
    return [
        *[
            Target(made.__name__, made, finish=saying)
            for made in (ul.gen, ul.gen, ul.gen, ul.gen_int, ul.gen_string, ul.image, ul.system, ul.user, ul.assistant)
        ],
        Target("gen_int", ul.gen_int, parameters=("name", "max_tokens", "stop", "regex", "choices"), finish=saying),
        Target("select", ul.select, {"name": "x", "choices": ["yes", "no"]}, finish=saying),
        *(
            Target(made.__name__, made, given, finish=constraining)
            for made, given in (
                (ul.regex, {"pattern": "[0-9]+"}),
                (ul.choice, {"options": ["yes", "no"]}),
                (ul.literal, {"text": "a"}),
                (ul.capture, {"name": "part", "part": "a"}),
                (ul.substring, {"text": "a quiet sea"}),
            )
        ),
        Target("json", ul.json, {"schema": {"type": "boolean"}}, finish=constraining),
        Target("Expression.repeat", lambda **given: (ul.literal("a") | "b").repeat(**given), {"low": 1},
               ("low", "high", "separator"), finish=constraining),
        Target("Expression.match", (ul.regex("[0-9]+") + " pears").match, {"text": "3 pears"}, ("text",)),
        Target("tool", tooled, {}, ("name", "description")),
        Target("call_tools", on_state(called_tools), {}, ("tools", "name", *OF_TOOLS)),
        Target("stream_value", on_state(lambda s, name: list(s.stream_value(name))), {"name": "x"}, ("name",)),
        Target("video", ul.video, {"source": b"x", "num_frames": 2}),
        Target("cache_point", ul.cache_point, finish=saying),
        Target("role", ul.role, {"name": "user", "content": "hi"}),
        Target("separate_reasoning", ul.separate_reasoning, {"content": ul.gen("x")}, finish=saying),
        Target("SamplingParams", ul.SamplingParams, parameters=tuple(ul.SamplingParams.__struct_fields__)),
        Target("Budget", ul.Budget, {"tokens": 5}),
        Target("Price", ul.Price, {"input": 1, "output": 2}),
        Target("prices", priced, {"model": "m", "price": ul.Price(1, 2)}),
        Target("prices.find", ul.prices.find, {"model": "m"}),
        Target("Echo", ul.Echo, finish=lambda backend: ask.run(backend=backend).sync()),
        Target("FailCall", ul.FailCall, {"k": 1, "error": ul.BackendError("x")}),
        Target("Gate.step", lambda count: ul.Gate().step(count), {"count": 1}),
        Target("Runtime", ul.Runtime, {"model": "oracle", "progress": False}),
        Target("OpenAI", ul.OpenAI, key),
        Target("Anthropic", ul.Anthropic, {"model": "claude-haiku-4-5", "api_key": "k"}),
        Target("Profile", ul.Profile, {"name": "mine"}),
        Target("ChatTemplate", rendered, {"source": "{% for m in messages %}{{ m.content }}{% endfor %}"},
               parameters=("source", "tokens", "options", "name")),
        Target("fetch_image", fetched, {"url": "https://a.example.org/x", "hosts": ["a.example.org"]}),
        Target("set_default_backend", ul.set_default_backend, {"backend": None}),
        Target("default_backend", within, {"backend": echo()}),
        Target("flush_cache", ul.flush_cache, run),
        Target("get_server_info", ul.get_server_info, run),
        Target("load", ul.load, {"path": "nowhere.umbel.json"}),
        Target("function", decorated, {}, ("name", "temperature", "stop", "num_api_spec_tokens", "speculate", "n")),
        Target("function()", ul.function, {"body": lambda s: None}, ("body",), ("body",)),
        Target("run", ask.run, run, OF_RUNS, finish=lambda state: state.sync()),
        Target("run_async", lambda **given: asyncio.run(ask.run_async(**given)), run, OF_RUNS),
        Target("run_batch", lambda **given: list(ask.run_batch(**given)), {**run, "batch_arguments": [{"q": "a"}]},
               ("batch_arguments", "num_threads", "progress", "progress_bar", "generator_style", "on_error",
                "if_exists", *OF_RUNS[:-1])),
        Target("evaluate", ul.evaluate, {**run, "program": ask, "data": [{"q": "a"}], "metric": report_metric},
               ("program", "data", "metric", "seed", "error_score", "max_errors", "if_exists", "num_threads")),
        Target("exact_match", ul.exact_match, {"variable": "x", "label": "q"}),
        Target("contains_match", ul.contains_match, {"variable": "x", "label": "q"}),
        Target("compare", ul.compare, {"first": report, "second": report}),
        Target("calibration", report.calibration, {"variable": "x", "label": "q"}),
        Target("EvaluationReport.worst", report.worst, {"count": 3}),
        Target("EvaluationReport.values", report.values, {"name": "exact_match"}),
        Target("EvaluationReport.load", ul.EvaluationReport.load, {"path": "nowhere.json"}),
        Target("estimate", ask.estimate, run, OF_RUNS),
        Target("bind", ask.bind, {"q": "a"}, ("q", "extra")),
        Target("trace", ask.trace, {}, ("static_args",)),
        Target("compile", ask.compile),
        Target("cache", lambda **given: ask.cache(**given).release(), run),
        Target("CompiledProgram.run", compiled.run, run, OF_RUNS, finish=lambda state: state.sync()),
        Target("CompiledProgram.run_batch", lambda **given: list(compiled.run_batch(**given)),
               {**run, "batch_arguments": [{"q": "a"}]}, ("batch_arguments", "num_threads", "on_error", *OF_RUNS[:-1])),
        *[
            Target(f"Graph.{name}", getattr(graph, name))
            for name in dir(graph)
            if not name.startswith("_") and callable(getattr(graph, name)) and name != "save"
        ],
        *[
            method(name)
            for name in ("get_var", "value", "get_meta_info", "text", "messages", "sync", "error", "set_var",
                         "explain_cache", "system", "user", "assistant", "fork")
        ],
        method("text_iter", result=list),
        Target("State[]", on_state(lambda s, name: s[name]), {"name": "x"}, ("name",)),
        Target("State[]=", on_state(lambda s, name, value: s.__setitem__(name, value)), {"name": "y", "value": 1},
               ("name", "value")),
        Target("State in", on_state(lambda s, name: name in s), {"name": "x"}, ("name",)),
        Target("State +=", on_state(appended), {"other": "x"}, ("other",)),
        Target("var_scope", on_state(scoped), {"name": "z"}, ("name",)),
        Target("StateGroup +=", on_state(forked), {"other": "x"}, ("other",)),
        Target("StateGroup.join", on_state(lambda s, mode: s.fork(2).join(mode)), {"mode": "gather_variable"},
        ("mode",)),
        Target("a finished state", lambda name, timeout: state.get_var(name, timeout), {"name": "x", "timeout": 1}),
        Target("FakeOpenAI", fakes.FakeOpenAI,
               parameters=("script", "models", "features", "scores", "cache_tokens", *FAKE_OPTIONS)),
        Target("FakeAnthropic", fakes.FakeAnthropic, parameters=("script", "models", "features", *FAKE_OPTIONS)),
        Target("OpenAIFeatures", fakes.OpenAIFeatures),
        Target("AnthropicFeatures", fakes.AnthropicFeatures),
        Target("main", commanded, {"arguments": ["lint", "nowhere.py"]}, ("arguments",)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call, which its seed and number make again.

    `odd`: parameters that were given an odd value, with its number.
    """

    target: Target
    given: dict[str, Any]
    odd: dict[str, int]

    def make(self) -> None:
        arguments = [self.given[name] for name in self.target.positional if name in self.given]
        keywords = {name: value for name, value in self.given.items() if name not in self.target.positional}
        self.target.finish(self.target.call(*arguments, **keywords))

    @property
    def is_one_step_off(self) -> bool:
        """Whether all but one argument are good ones."""
        others = [name for name in self.given if name not in self.odd]
        return len(self.odd) == 1 and all(self.target.valid.get(name, self) is self.given[name] for name in others)

    def __str__(self) -> str:
        values = {name: f"odd value {number}" for name, number in self.odd.items()}
        near = {name: repr(value)[:80] for name, value in self.given.items() if name not in values}
        return f"{self.target.name}({', '.join(f'{name}={value}' for name, value in {**near, **values}.items())})"


def chosen(seed: int, number: int, known: list[Target]) -> Call:
    chance = random.Random(f"{seed}:{number}")
    target = known[chance.randrange(len(known))]
    names = target.names()
    given = dict(target.valid)
    odd: dict[str, int] = {}
    for name in chance.sample(names, min(len(names), chance.choice((1, 1, 1, 2, 3)))):
        if name in NEAR and chance.random() < 0.25:
            given[name] = chance.choice(NEAR[name])
        elif target.name == "main":
            given[name] = command(chance)
            odd[name] = -1
        else:
            odd[name], given[name] = odd_values.draw(chance)
    if chance.random() < 0.02:
        given["no_such_parameter"] = 1
    return Call(target, given, odd)


def command(chance: random.Random) -> list[Any]:
    """Words of a command line; never one that would load a model."""
    words = [chance.choice(COMMANDS)]
    for _ in range(chance.randrange(4)):
        value = odd_values.draw(chance)[1]
        plain = type(value) is str and not os.path.exists(value[:1000])  # nothing that is there is run
        words.append(value if plain else chance.choice(("--model", "--json", "x.py:ask", "-", "--")))
    return [*words, "--no-such-option"] if words[0] in ("chat", "run", "models") else words


class Slow(BaseException):
    """A call has taken its CPU time."""


def problem(call: Call) -> str | None:
    """What is wrong with how the call ends; None where nothing is."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        call.make()
    except ul.UmbelError as error:
        return wrong_message(call, error)
    except TypeError as error:
        return None if of_signature(error) else described(error)
    except odd_values.OddCall:
        return None
    except OSError as error:
        return None if call.target.name == "load" else described(error)  # no such file: as `open` says it
    except SystemExit:
        return None if call.target.name == "main" else "SystemExit"
    except Slow as error:
        return f"took more than {CPU_SECONDS} s of CPU: {described(error)}"
    except BaseException as error:
        return described(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def wrong_message(call: Call, error: ul.UmbelError) -> str | None:
    try:
        said = str(error)
    except Exception as raised:
        return f"its message cannot be read: {raised!r}"
    if len(said) >= LONGEST_MESSAGE:
        return f"{type(error).__name__} says {len(said)} characters: {said[:200]}"
    if isinstance(error, ul.ParameterError) and call.is_one_step_off:
        (name,) = call.odd
        if not any(word in said for word in (name, *ALSO_CALLED.get(name, ()))):
            return f"{type(error).__name__} does not name {name}: {said[:300]}"
    return None


def of_signature(error: TypeError) -> bool:
    """Whether a call did not fit its signature: it was raised here, before a line of umbel ran."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_globals is globals()


def described(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines)[-2500:]


# ------------------------------------------------------------------------------------------- what grows


@dataclass(frozen=True)
class Held:
    """What this process holds when nothing runs."""

    threads: int
    files: int
    objects: int


def held() -> Held:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(5)
    for _ in range(3):
        gc.collect()
    return Held(threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects()))


def grown(before: Held, after: Held, calls: int) -> Iterator[str]:
    """A call that leaks leaves an object each time; caches fill up once."""
    if after.threads > before.threads + 2:
        yield f"threads: {before.threads} → {after.threads}"
    if after.files > before.files + 2:
        yield f"open files: {before.files} → {after.files}"
    if after.objects > before.objects + calls:
        yield f"objects: {before.objects} → {after.objects}"


def run(seed: int, numbers: range) -> int:
    known, faults = targets(), 0
    here = Path(os.environ["UMBEL_CALL"]) if "UMBEL_CALL" in os.environ else None
    for number in numbers:
        if number % 200 == 0:
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        if here is not None:
            here.write_text(str(number))
        call = chosen(seed, number, known)
        wrong = problem(call)
        ul.set_default_backend(NEAR["backend"][0])
        if wrong is not None:
            faults += 1
            print(f"--seed {seed} --only {number}: {call}\n    {wrong}\n", flush=True)
    return faults


def repeated(seed: int, calls: int) -> int:
    """Faults of growth: the same calls twice, when the caches have been filled once."""
    numbers = range(min(REPEATED, calls))
    run(seed, numbers)
    before = held()
    run(seed, numbers)
    leaks = list(grown(before, held(), len(numbers)))
    for leak in leaks:
        print(f"--seed {seed}: {len(numbers)} calls that are made again leave more behind: {leak}", flush=True)
    return len(leaks)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Call everything that is public with odd arguments.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--only", type=int, help="the number of one call")
    return parser.parse_args()


def stop(*_: object) -> None:
    raise Slow


if __name__ == "__main__":
    options = parsed()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, stop)
    ul.set_default_backend(NEAR["backend"][0])
    if options.only is not None:
        sys.exit(run(options.seed, range(options.only, options.only + 1)) > 0)
    found = run(options.seed, range(options.calls))
    found += repeated(options.seed, options.calls) if not found else 0
    print(f"{options.calls} calls, {found} faults")
    sys.exit(found > 0)
