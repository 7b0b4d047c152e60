"""The Runtime backend: what it refuses before any process starts, and programs that run through processes."""

import asyncio
import importlib.util
import inspect
import os
import socket
from collections.abc import AsyncGenerator, Iterator

import pytest
import umbel as ul
from umbel.interpreter.backends.runtime import Runtime
from umbel.interpreter.backends.runtime_link import _start_error
from umbel.lang import errors
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.errors import (
    BackendError,
    DeadlineError,
    MissingExtraError,
    ParameterError,
    RequestError,
    TemplateError,
)
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import Capabilities, Chunk, Done, Final, GenRequest, Hint, Scored, ScoreRequest
from umbel.lang.runtime_options import RuntimeOptions

from .. import conformance

# ------------------------------------------------------------------------------------ without processes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_runing": 3}, "did you mean 'max_running'"),
        ({"quantization": "fp8"}, "has no option 'quantization'; did you mean 'weights'?"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 is out of range; write 1 to 64"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"device": "metal"}, "write one of 'auto', 'cpu', 'cuda'"),
        ({"policy": "dfs"}, "policy='dfs'"),
        ({"policy": "dfs-weight"}, "write one of 'lpm', 'fcfs'"),
        ({"foresight": True}, "no option 'foresight' any more"),
        ({"fork_hints": False}, "it is part of policy='lpm'; leave it out"),
        ({"max_running": 0}, "max_running=0 is out of range; write 1"),
        ({"max_running": True}, "max_running=True is not an integer; write 1"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"pool_tokens": 1}, "pool_tokens=1"),
        ({"pool_tokens": 100, "pool_memory": 100}, "give one of them"),
        ({"seed": -1}, "seed=-1"),
        ({"max_wait": float("nan")}, "max_wait"),
        ({"radix_cache": 1}, "radix_cache must be True or False"),
        ({"model": ""}, "model=''"),
        ({"model": "a", "model_path": "b"}, "name two models"),
        ({"startup_timeout": 0}, "startup_timeout=0"),
        ({"startup_timeout": True}, "startup_timeout=True"),
        ({"startup_timeout": float("inf")}, "startup_timeout=inf is out of range; write a number of seconds"),
        ({"model": "default", "debug": {"step_delay": 1.0}}, "step_delay slows the oracle model only"),
        ({"chat_template": 3}, "chat_template must be Jinja source"),
    ],
)
def test_a_wrong_option_is_refused_at_once_with_what_to_write(options: dict[str, object], says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Runtime(**options)  # type: ignore[arg-type]  # wrong on purpose
    assert says in str(caught.value)


def test_a_runtime_shows_its_model_or_its_address() -> None:
    assert repr(Runtime("org/repo")) == "Runtime('org/repo')"
    assert repr(Runtime(address="ipc:///run/umbel")) == "Runtime(address='ipc:///run/umbel')"


def test_a_runtime_shows_every_option_there_is() -> None:
    described = {*RuntimeOptions.__struct_fields__} - {"model"}
    shown = inspect.signature(Runtime).parameters
    assert described | {"cache", "scheduling"} <= {*shown}
    assert {name: shown[name].default for name in described} == {
        name: getattr(RuntimeOptions(), name) for name in described
    }
    assert all(f"\n        {name}: " in (Runtime.__doc__ or "") for name in described)


def test_a_broken_chat_template_is_refused_at_once() -> None:
    with pytest.raises(TemplateError, match="line 1"):
        Runtime("oracle", chat_template="{% if %}")


def test_a_missing_package_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(MissingExtraError, match=r"'torch' is not installed; run: pip install 'umbel\[runtime\]'"):
        Runtime("oracle")


def test_making_a_runtime_starts_nothing() -> None:
    runtime = Runtime("oracle", model_path="oracle")
    assert runtime._process is None
    assert runtime.capabilities.name == "runtime oracle"
    with pytest.raises(BackendError, match="call wait_ready"):
        _ = runtime.chat_template
    assert Runtime("oracle", chat_template="{{ messages }}").chat_template.source == "{{ messages }}"


@pytest.mark.parametrize("kind", ["ModelError", "MissingExtraError", "ParameterError", "SomethingNew"])
def test_why_a_start_failed_comes_back_as_its_class_with_its_words(kind: str) -> None:
    error = _start_error(kind, "the words")
    assert str(error) == "the words"
    assert type(error) is getattr(errors, kind, BackendError)


# --------------------------------------------------------------------------------------- with processes


class Shared:
    """A runtime that the conformance suite may close as often as it likes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def capabilities(self) -> Capabilities:
        return self._runtime.capabilities

    @property
    def chat_template(self) -> ChatTemplate:
        return self._runtime.chat_template

    async def start(self) -> None:
        await self._runtime.start()

    def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        return self._runtime.generate(request)

    async def score(self, request: ScoreRequest) -> Scored:
        return await self._runtime.score(request)

    def hint(self, hint: Hint) -> None:
        self._runtime.hint(hint)

    def release(self, pinned: str) -> None:
        self._runtime.release(pinned)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return self._runtime.tokens_at_most(prompt)

    async def control(self, verb: str) -> Done:
        return await self._runtime.control(verb)

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    try:
        with Runtime("oracle", seed=1, max_queue=64) as runtime:
            yield runtime
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
def test_it_conforms_as_a_backend(case: conformance.Case, runtime: Runtime) -> None:
    conformance.check(case, lambda: Shared(runtime))


@pytest.mark.processes
def test_a_program_forks_and_its_prefix_is_computed_once(runtime: Runtime) -> None:
    @ul.function
    def branches(s: ul.State, topic: str) -> None:
        s += "A rather long beginning about " + topic + ". "
        forks = s.fork(4)
        forks += lambda i: f"{i}: " + ul.gen("part", max_tokens=6, temperature=0)
        forks.join()
        s += ul.select("verdict", choices=["good", "bad"])

    runtime.flush_cache()
    before = runtime.get_server_info()
    state = branches.run(topic="umbels", backend=runtime)
    assert len(state["part"]) == 4
    assert state["verdict"] in ("good", "bad")
    after = runtime.get_server_info()
    # Four branches of 3 tokens of their own behind one prefix of 41; select computes its choices besides.
    prefix = len("<" + "A rather long beginning about umbels. ")
    computed = float(str(after["computed_prompt_tokens"])) - float(str(before["computed_prompt_tokens"]))
    assert computed < 2 * prefix


@pytest.mark.processes
def test_helpers_answer_without_a_program(runtime: Runtime) -> None:
    first = runtime.final_of("hello", {"max_tokens": 4, "temperature": 0})
    assert len(first.completions[0].token_ids) == 4
    runtime.flush_cache()
    assert runtime.final_of("hello", {"max_tokens": 1}).usage.cached_tokens == 0
    info = runtime.get_server_info()
    assert (info["model"], info["engine"], info["option_seed"]) == ("oracle", "ready", 1)
    with pytest.raises(ParameterError, match=r"gen\(\) has no option"):
        runtime.complete("x", {"max_token": 3})
    with pytest.raises(ParameterError, match="takes one prompt, a string; got list"):
        runtime.complete(["a", "b"])
    with pytest.raises(ParameterError, match="takes a dict of parameters"):
        runtime.complete("x", "greedy")


@pytest.mark.processes
def test_a_prompt_is_completed_to_a_text(runtime: Runtime) -> None:
    text = runtime.complete("hello", max_tokens=4, temperature=0)
    final = runtime.final_of("hello", max_tokens=4, temperature=0)
    assert isinstance(text, str)
    assert text == final.completions[0].text == runtime.complete("hello", {"max_tokens": 4, "temperature": 0})
    assert text == runtime("hello", 4, temperature=0)
    assert text == asyncio.run(runtime.complete_async("hello", max_tokens=4, temperature=0))
    assert final.usage.calls == 1
    assert len(runtime.final_of("hello", {"n": 3}, max_tokens=1).completions) == 3
    with pytest.raises(ParameterError, match=r"not n=2; write gen\("):
        runtime.complete("hello", n=2)
    with pytest.raises(ParameterError, match="given seed twice"):
        runtime.complete("hello", {"seed": 1}, seed=2)
    with pytest.raises(ParameterError, match=r"gen\(\) has no option 'max_token'"):
        runtime.complete("hello", max_token=8)
    with pytest.raises(ul.ProgramError, match=r"a prompt holds gen\('x'\)"):
        runtime.complete(f"hello {ul.gen('x')}")


@pytest.mark.processes
def test_more_requests_than_the_queue_holds_wait_instead_of_being_refused(runtime: Runtime) -> None:
    async def scenario() -> list[Final]:
        async def one(index: int) -> Final:
            asked = GenRequest(f"q{index}", (Text("hi"),), ul.SamplingParams(max_tokens=1))
            async for event in runtime.generate(asked):
                if isinstance(event, Final):
                    return event
            raise AssertionError("no ending")

        return await asyncio.gather(*(one(index) for index in range(200)))

    assert len(asyncio.run(scenario())) == 200


@pytest.mark.processes
def test_errors_of_the_gateway_come_back_as_their_class(runtime: Runtime) -> None:
    with pytest.raises(RequestError, match="context of oracle holds 4096"):
        runtime.complete("x" * 5000)
    with pytest.raises(RequestError, match="bytes and 33554432 are accepted"):
        runtime.complete("x" * (33 * 2**20))
    with pytest.raises(ParameterError, match="no character"):
        runtime.complete("x\ud800")
    assert runtime.final_of("x", {"max_tokens": 1}).usage.completion_tokens == 1


@pytest.mark.processes
def test_frames_of_noise_harm_neither_the_gateway_nor_its_clients(runtime: Runtime) -> None:
    import zmq

    runtime.wait_ready()
    assert runtime._process is not None
    noise = zmq.Context().socket(zmq.DEALER)
    noise.connect(runtime._process.address)
    for index in range(2000):
        noise.send_multipart([os.urandom(8), os.urandom(index % 50)])
        if index % 500 == 0:
            assert runtime.final_of("hello", {"max_tokens": 1}).usage.completion_tokens == 1
    assert runtime.final_of("hello", {"max_tokens": 1}).usage.completion_tokens == 1
    context = noise.context
    noise.close(linger=0)
    context.term()


@pytest.mark.processes
def test_a_start_that_takes_too_long_is_ended() -> None:
    runtime = Runtime("oracle", startup_timeout=0.01)
    with pytest.raises(DeadlineError, match="raise startup_timeout"):
        runtime.wait_ready()
    assert runtime._process is None
    runtime.shutdown()


@pytest.mark.processes
def test_the_socket_is_a_file_in_a_private_folder(runtime: Runtime) -> None:
    runtime.wait_ready()
    assert runtime._process is not None
    path = runtime._process.address.removeprefix("ipc://")
    assert os.stat(path).st_uid == os.getuid()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
