"""Every name that SGLang's programs use: it is there, or it is refused with the name to write."""

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import umbel as ul
import umbel.compat.sglang as sgl
from umbel.compat.sglang.lang.backend.runtime_endpoint import runtime_options
from umbel.compat.sglang.lang.chat_template import get_chat_template
from umbel.interpreter import loop
from umbel.lang.protocol import Backend
from umbel.testing import FakeOpenAI, FakeSGLang

ROOT = "umbel.compat.sglang"

# Module below SGLang's root → names that programs take from it.
MODULES = {
    "": "function gen gen_int gen_string select image video system user assistant system_begin system_end user_begin "
    "user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache get_server_info Runtime "
    "Engine RuntimeEndpoint OpenAI Anthropic VertexAI LiteLLM global_config token_length_normalized "
    "greedy_token_selection unconditional_likelihood_normalized",
    "lang.ir": "REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglGen SglSelect SglExpr SglExprList SglFunction SglImage "
    "SglVideo SglRoleBegin SglRoleEnd SglConstantText SglVarScopeBegin SglVarScopeEnd SglSeparateReasoning "
    "SglSamplingParams",
    "lang.api": "function gen gen_int gen_string select image video system user assistant system_begin system_end "
    "user_begin user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache "
    "get_server_info Runtime Engine",
    "lang.chat_template": "get_chat_template get_chat_template_by_model_path ChatTemplate",
    "lang.choices": "token_length_normalized greedy_token_selection unconditional_likelihood_normalized "
    "ChoicesSamplingMethod ChoicesDecision",
    "lang.interpreter": "ProgramState ProgramStateGroup StreamExecutor",
    "lang.backend.base_backend": "BaseBackend",
    "lang.backend.runtime_endpoint": "RuntimeEndpoint Runtime",
    "lang.backend.openai": "OpenAI",
    "lang.backend.anthropic": "Anthropic",
    "lang.backend.vertexai": "VertexAI",
    "lang.backend.litellm": "LiteLLM",
    "global_config": "global_config",
    "utils": "read_jsonl dump_state_text print_highlight encode_image_base64 encode_frame encode_video_base64 "
    "download_and_cache_file launch_server_cmd execute_shell_command wait_for_server terminate_process http_request",
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in MODULES.items() for name in names.split()])
def test_a_name_is_where_programs_import_it_from(module: str, name: str):
    assert getattr(importlib.import_module(f"{ROOT}.{module}".rstrip(".")), name) is not None


def test_importing_the_frame_changes_no_other_module():
    """It is plain modules: no import hook, no entry of sys.modules that is not its own, and nothing heavy."""
    code = (
        "import sys; before = (list(sys.meta_path), list(sys.path_hooks))\n"
        "import umbel; assert 'umbel.compat' not in sys.modules\n"
        "import umbel.compat.sglang\n"
        "assert (sys.meta_path, sys.path_hooks) == before\n"
        "print([n for n in sys.modules if n == 'sglang' or n.startswith(('sglang.', 'torch', 'transformers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# ------------------------------------------------------------------------------------------- options of a server

MAPPED = [
    ({"model_path": "m", "tokenizer_path": "m"}, {"model_path": "m"}),
    ({"tp_size": 2}, {"tensor_parallel": 2}),
    ({"random_seed": 7}, {"seed": 7}),
    ({"context_length": 4096}, {"context_length": 4096}),
    ({"max_running_requests": 8}, {"max_running": 8}),
    ({"max_total_tokens": 5000}, {"pool_tokens": 5000}),
    ({"chunked_prefill_size": 256}, {"chunk_size": 256}),
    ({"disable_radix_cache": True}, {"radix_cache": False}),
    ({"disable_cuda_graph": True}, {"cuda_graphs": False}),
    ({"disable_overlap_schedule": True}, {"overlap": False}),
    ({"disable_overlap_schedule": False}, {"overlap": "auto"}),
    ({"disable_jump_forward": True}, {"jump_forward": False}),
    ({"schedule_policy": "fcfs"}, {"policy": "fcfs"}),
    ({"schedule_heuristic": "lpm"}, {"policy": "lpm"}),
    ({"grammar_backend": "outlines"}, {"constraint_engine": "outlines-core"}),
    ({"grammar_backend": "xgrammar"}, {"constraint_engine": "auto"}),
    ({"grammar_backend": "llguidance"}, {"constraint_engine": "llguidance"}),
    ({"dtype": "half"}, {"dtype": "float16"}),
    ({"kv_cache_dtype": "fp8_e5m2"}, {"kv_dtype": "fp8"}),
    ({"log_level": "fatal"}, {"log_level": "error"}),
    ({"launch_timeout": 60}, {"startup_timeout": 60}),
    ({"device": "cpu"}, {"device": "cpu"}),
    ({"port": None, "trust_remote_code": False, "quantization": None, "dp_size": 1}, {}),
    ({"threads": 2, "max_wait": 3.0}, {"threads": 2, "max_wait": 3.0}),
]
REFUSED = [
    ({"port": 30000}, "backend=runtime"),
    ({"host": "0.0.0.0"}, "backend=runtime"),
    ({"mem_fraction_static": 0.7}, "pool_memory="),
    ({"tokenizer_path": "other", "model_path": "m"}, "model_path"),
    ({"tokenizer_mode": "slow"}, "leave it out"),
    ({"trust_remote_code": True}, "never run"),
    ({"quantization": "awq"}, "weights='int8'"),
    ({"dp_size": 2}, "write replicas="),
    ({"attention_backend": "triton"}, "kernels="),
    ({"skip_tokenizer_init": True}, "leave it out"),
    ({"is_embedding": True}, "write umbel.embed"),
    ({"revision": "main"}, "org/repo@revision"),
    ({"lora_paths": ["x"]}, "write adapters="),
    ({"schedule_policy": "priority"}, "write one of 'lpm'"),
    ({"grammar_backend": "none"}, "write one of 'xgrammar'"),
    ({"disable_radix_cache": 1}, "True or False"),
    ({"tp_size": 2, "tensor_parallel": 2}, "second value"),
    ({"tp_sizes": 2}, "did you mean"),
    ({"tokenizer_path": 3, "model_path": "m"}, "write a path"),
]


@pytest.mark.parametrize(("given", "expected"), MAPPED)
def test_an_option_of_the_server_is_mapped_to_ours(given: dict[str, Any], expected: dict[str, Any]):
    assert runtime_options(given) == expected


@pytest.mark.parametrize(("given", "instead"), REFUSED)
def test_an_option_without_counterpart_is_refused_with_what_to_write(given: dict[str, Any], instead: str):
    with pytest.raises(ul.ParameterError, match=instead) as raised:
        runtime_options(given)
    assert len(str(raised.value)) < 2_000


def test_the_options_that_are_mapped_exist():
    runtime = sgl.Runtime(
        model_path="oracle",
        tokenizer_path="oracle",
        tp_size=1,
        disable_radix_cache=False,
        schedule_policy="lpm",
        random_seed=3,
        grammar_backend="llguidance",
        max_total_tokens=5000,
        dtype="float32",
        launch_timeout=60,
    )
    assert (runtime.options.seed, runtime.options.constraint_engine, runtime.options.pool_tokens) == (
        3,
        "llguidance",
        5000,
    )
    assert runtime.get_tokenizer().decode(runtime.get_tokenizer().encode("the thin é")) == "the thin é"
    assert runtime.endpoint is runtime
    template = sgl.Runtime(model_path="oracle", chat_template="llama-3-instruct").chat_template
    assert template.source == get_chat_template("llama-3-instruct").source


@pytest.mark.parametrize("level", [["a"], {}, object(), 3])
def test_a_level_that_is_no_text_is_refused(level: object):
    with pytest.raises(ul.ParameterError, match="log_level"):
        sgl.Runtime(model_path="oracle", log_level=level)


@pytest.mark.parametrize("name", [["a"], 3, object(), b"chatml"])
def test_a_name_of_a_template_that_is_no_text_is_refused(name: object):
    for call in (get_chat_template, lambda name: sgl.RuntimeEndpoint("http://x", chat_template_name=name)):
        with pytest.raises(ul.ParameterError, match="the name of a chat template"):
            call(name)


def test_what_is_no_batch_is_refused_and_an_endless_one_is_not_read_ahead():
    @sgl.function
    def program(s, x):
        s += str(x) + sgl.gen("y", max_tokens=1)

    backend = ul.Echo(lambda text: "a")
    for run in (program.run_batch, program.compile().run_batch):
        for wrong in (5, None, "ab", {"x": 1}, object()):
            with pytest.raises(ul.ParameterError):
                run(wrong, backend=backend)
        states = run(({"x": number} for number in range(3)), backend=backend)
        assert [state["y"] for state in states] == ["a"] * 3
        endless = itertools.chain([{"x": 1}], itertools.repeat({"z": 1}))
        with pytest.raises(ul.ParameterError):
            run(endless, backend=backend)


# ------------------------------------------------------------------------------------------- calls that are refused

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "Runtime.url": (lambda: sgl.Runtime("error", model_path="oracle").url, "backend=runtime"),
    "Runtime.generate_url": (lambda: sgl.Runtime(model_path="oracle").generate_url, "backend=runtime"),
    "Runtime.encode": (lambda: sgl.Runtime(model_path="oracle").encode("x"), r"get_tokenizer\(\)\.encode"),
    "Runtime.start_profile": (lambda: sgl.Runtime(model_path="oracle").start_profile(), "get_server_info"),
    "RuntimeEndpoint(verify=)": (lambda: sgl.RuntimeEndpoint("http://x", verify="ca.pem"), "SSL_CERT_FILE"),
    "RuntimeEndpoint(chat_template_name=)": (lambda: sgl.RuntimeEndpoint("http://x", None, None, "nobody"), "chatml"),
    "OpenAI(is_azure=)": (lambda: sgl.OpenAI("gpt-4", is_azure=True, api_key="k"), "azure_endpoint="),
    "OpenAI(is_chat_model=)": (lambda: sgl.OpenAI("gpt-4", is_chat_model="yes", api_key="k"), "True, False"),
    "fork(position_ids_offset=)": (lambda: forks([0, 1]), "leave it out"),
    "run(return_text_in_logprobs=)": (lambda: said(return_text_in_logprobs=False), "leave it out"),
    "run_batch(use_thread=)": (lambda: batch(use_thread=False), "leave use_thread= out"),
    "run(use_thread=)": (lambda: said(use_thread=3), "True or False"),
    "flush_cache(empty_cache=)": (lambda: sgl.flush_cache(ul.Echo(), empty_cache=False), "leave it out"),
    "separate_reasoning()": (lambda: sgl.separate_reasoning(), "separate_reasoning"),
    "gen(choices=, regex=)": (lambda: sgl.gen("x", choices=["a"], regex="a"), "one constraint"),
    "gen(choices=, n=)": (lambda: sgl.gen("x", choices=["a"], n=2), "as a whole"),
    "gen(choices=, max_tokens=)": (lambda: sgl.gen("x", choices=["a"], max_tokens=-1), "max_tokens"),
    "global_config.verbosity": (lambda: setattr(sgl.global_config, "verbosity", 2), "verbose=True"),
    "global_config.other": (lambda: setattr(sgl.global_config, "verbosities", 2), "did you mean 'verbosity'"),
    "lang.chat_template": (lambda: module("lang.chat_template").get_chat_template("lama"), "llama|gemma|known"),
    **{
        f"utils.{name}": (lambda name=name: getattr(module("utils"), name)(), "no counterpart here; ")
        for name in [
            "encode_image_base64",
            "encode_frame",
            "encode_video_base64",
            "download_and_cache_file",
            "launch_server_cmd",
            "execute_shell_command",
            "wait_for_server",
            "terminate_process",
            "http_request",
        ]
    },
}


def module(name: str) -> Any:
    return importlib.import_module(f"{ROOT}.{name}")


def said(**options: Any) -> sgl.lang.interpreter.ProgramState:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("y", max_tokens=2)

    return program.run(backend=ul.Echo(lambda text: "one two three"), **options)


def batch(**options: Any) -> object:
    @sgl.function
    def program(s):
        s += "x"

    return program.run_batch([{}], backend=ul.Echo(), **options)


def forks(offsets: list[int]) -> object:
    return said().fork(2, position_ids_offset=offsets)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_counterpart_is_refused_with_what_to_write(name: str):
    call, instead = REFUSALS[name]
    with pytest.raises(ul.UmbelError, match=instead) as raised:
        call()
    assert len(str(raised.value)) < 2_000


# ------------------------------------------------------------------------------------------- states and programs


def test_a_state_has_what_programs_ask_of_it():
    state = said(use_thread=False, return_text_in_logprobs=True)
    assert str(state) == "ProgramState(xone two)"
    executor = state.stream_executor
    assert executor.text_ == executor.text() == "xone two"
    assert executor.variables == {"y": "one two"}
    assert executor.meta_info["y"] == executor.get_meta_info("y") == state.get_meta_info("y")
    assert executor.get_var("y") == "one two"
    assert executor.messages_ == executor.messages() == state.messages()
    assert (executor.error(), executor.backend.capabilities.name) == (None, "Echo")
    executor.set_var("z", "set")
    executor.sync()
    executor.end()
    assert state["z"] == "set"
    assert [str(branch) for branch in state.fork(2)] == ["ProgramState(xone two)"] * 2
    assert str(state.copy()) == "ProgramState(xone two)"


def test_use_thread_false_raises_the_error_at_once():
    @sgl.function
    def program(s):
        s += sgl.gen("x", max_tokens=2)

    def failing() -> ul.Echo:
        return ul.Echo(lambda text: "one", faults=ul.FailCall(1, ul.EngineError("broken")))

    assert isinstance(program.run(backend=failing()), sgl.lang.interpreter.ProgramState)
    with pytest.raises(ul.EngineError, match="broken"):
        program.run(backend=failing(), use_thread=False)


def test_a_program_keeps_parameters_of_its_own():
    @sgl.function
    def program(s, use_thread, return_text_in_logprobs):
        s += f"{use_thread} {return_text_in_logprobs}"

    assert program.run(use_thread="a", return_text_in_logprobs="b", backend=ul.Echo()).text() == "a b"
    assert program.run_batch([("a", "b")], backend=ul.Echo())[0].text() == "a b"


def test_a_program_is_its_function_bound_as_method_and_nested():
    def answer(s, question="why"):
        """Answers."""
        s += question + sgl.gen("x", max_tokens=1)
        return str(s)

    program = sgl.function(answer)
    assert (program.func, program.__doc__, program.name) == (answer, "Answers.", "answer")
    backend = ul.Echo(lambda text: "one two")
    bound = program.bind(question="how")
    assert isinstance(bound, type(program))
    assert bound.bind_arguments == {"question": "how"}
    assert bound.run(backend=backend).ret_value == "ProgramState(howone)"

    class Asker:
        @sgl.function
        def ask(self, s):
            program(s, "nested ")

    assert str(Asker().ask.run(backend=backend)) == "ProgramState(nested one)"

    @sgl.function(num_api_spec_tokens=16)
    def speculating(s):
        s += "x" + sgl.gen("a", stop=".")

    assert speculating.run(backend=backend)["a"] == "one two"


def test_a_batch_takes_sglangs_name_of_its_arguments():
    @sgl.function
    def program(s, a, b="c"):
        s += a + b

    backend = ul.Echo()
    states = program.run_batch(
        batch_kwargs=[{"a": "1"}, ("2", "d")], backend=backend, num_threads=2, progress_bar=False
    )
    assert [str(state) for state in states] == ["ProgramState(1c)", "ProgramState(2d)"]
    lazily = program.run_batch([{"a": "1"}], backend=backend, generator_style=True)
    assert [state.text() for state in lazily] == ["1c"]


@pytest.mark.parametrize("form", ["trace", "bound", "compiled"])
def test_tracing_and_compiling_have_sglangs_parameters(form: str, capsys: pytest.CaptureFixture[str]):
    @sgl.function
    def program(s, prompt, question):
        s += prompt + "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n")

    backend = ul.Echo(lambda text: " yes\n")
    match form:
        case "trace":
            listed = program.trace(backend=backend, prompt="Short. ").last_node.print_graph_dfs()
            assert "Gen answer" in listed
            assert "Short. " in listed
        case "bound":
            assert "Short. " in program.bind(prompt="Short. ").trace().print_graph_dfs()
        case _:
            compiled = program.compile(backend=backend)
            compiled.print_graph()
            assert "Gen answer" in capsys.readouterr().out
            state = compiled.run(prompt="", question="Why?")
            assert str(state) == "ProgramState(Q: Why?\nA: yes)"
            states = compiled.run_batch([{"prompt": "", "question": "a"}, {"prompt": "", "question": "b"}])
            assert [each["answer"] for each in states] == [" yes", " yes"]
            assert "Gen answer" in compiled.graph.text()


def test_a_wrong_backend_is_refused_where_it_is_given():
    @sgl.function
    def program(s):
        s += "x"

    for call in (program.trace, program.compile):
        with pytest.raises(ul.ParameterError, match="not a backend"):
            call(backend="localhost")


def test_pin_and_cache_compute_what_all_runs_begin_with():
    @sgl.function
    def program(s, question):
        s += "A beginning that all runs have, long enough to be worth it, in words that are many and that stay. " * 2
        s += question + sgl.gen("x", max_tokens=1)

    pinning = ul.Echo(lambda text: "a")
    program.pin(pinning)
    assert program.cache(pinning).tokens > 16
    first = program.run("Why?", backend=pinning)
    first.sync()
    assert first.usage.cached_tokens > 16
    program.unpin(pinning)
    with FakeSGLang(lambda text: "a") as server:
        endpoint = sgl.RuntimeEndpoint(server.address, server.api_key)
        assert program.cache(endpoint) is None
        program.run("Why?", backend=endpoint).sync()
        assert server.requests[0].body["sampling_params"]["max_new_tokens"] == 0


BEGINNING = "A beginning that all runs have, long enough to be worth it, in words that are many and that stay. " * 2


class Desk:
    """Whose method is a program."""

    def __init__(self, rules: str) -> None:
        self.rules = rules

    @sgl.function
    def ask(self, s, style, question):
        s += BEGINNING + self.rules + style + question + sgl.gen("x", max_tokens=1)


def pinned(backend: ul.Echo) -> int:
    """How many heads are kept, once what was sent before has come."""

    async def count() -> int:
        return len(backend._cache._pins)

    return loop.streams.run(count())


def test_what_is_pinned_of_a_method_is_kept_once_and_unpinned():
    backend, other = ul.Echo(lambda text: "a"), ul.Echo(lambda text: "a")
    desk, second = Desk("Be brief."), Desk("Be kind.")
    for _ in range(2):
        desk.ask.pin(backend)
    assert pinned(backend) == 1
    second.ask.pin(backend)
    desk.ask.pin(other)
    second.ask.unpin(other)
    assert (pinned(backend), pinned(other)) == (2, 1)
    Desk.ask.unpin(backend)
    assert pinned(backend) == 2
    desk.ask.unpin(backend)
    assert pinned(backend) == 1
    desk.ask.unpin(backend)
    second.ask.unpin(backend)
    desk.ask.unpin(other)
    assert not pinned(backend)
    assert not pinned(other)
    assert not Desk.ask._kept


def test_what_is_pinned_of_a_bound_program_is_unpinned_by_the_same_one():
    @sgl.function
    def program(s, style, question):
        s += BEGINNING + str(style) + question + sgl.gen("x", max_tokens=1)

    backend = ul.Echo(lambda text: "a")
    held = ["a", "list"]
    styles = ["brief ", held]
    for style in styles:
        for _ in range(2):
            program.bind(style=style).pin(backend)
    program.pin(backend)
    assert pinned(backend) == 3
    program.unpin(backend)
    program.bind(style="kind ").unpin(backend)
    program.bind(style=list(held)).unpin(backend)
    assert pinned(backend) == 2
    program.bind(style="bri" + "ef ").unpin(backend)
    program.bind(style=held).unpin(backend)
    assert not pinned(backend)


def test_log_probabilities_are_triples():
    @sgl.function
    def program(s):
        s += "One two"
        s += sgl.gen("zero", max_tokens=0, return_logprob=True, logprob_start_len=0)
        s += sgl.gen("some", max_tokens=2, return_logprob=True, top_logprobs_num=2)
        s += sgl.select("pick", ["a", "b"], choices_method=sgl.token_length_normalized)

    state = program.run(backend=ul.Echo(lambda text: " three four five"))
    for name, key in (("zero", "input_token_logprobs"), ("some", "output_token_logprobs")):
        tokens = state.get_meta_info(name)[key]
        assert all(len(token) == 3 and isinstance(token[0], float) for token in tokens)
        assert tokens
    assert [[len(token) for token in choice] for choice in state.get_meta_info("pick")["input_token_logprobs"]] == [
        [3],
        [3],
    ]


# ------------------------------------------------------------------------------------------- choices and settings


def test_methods_of_choices_are_functions_of_log_probabilities():
    """Tokens of three choices that share beginnings, and what they would have without the prompt."""
    from umbel.compat.sglang.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )

    choices = ["river", "riverbank", "rive"]
    tokens = [
        [(-1.0, 1, "riv"), (-2.0, 2, "er")],
        [(-1.0, 1, "riv"), (-2.0, 2, "er"), (-0.1, 3, "bank")],
        [(-1.0, 1, "riv"), (-1.9, 4, "e"), (-9.0, 5, ".")],
    ]
    alone = [
        [(-1.0, 1, None), (-9.0, 2, None)],
        [(-1.0, 1, None), (-2.0, 2, None), (-1.0, 3, None)],
        [(-1.0, 1, None)] * 3,
    ]
    given = {"choices": choices, "input_token_logprobs": tokens}
    assert token_length_normalized(**given).decision == "riverbank"
    assert token_length_normalized(**given, normalized_prompt_logprobs=[-1, -2, -3]).decision == "river"
    assert greedy_token_selection(**given).decision == "rive"
    assert unconditional_likelihood_normalized(**given, unconditional_token_logprobs=alone).decision == "river"
    assert unconditional_likelihood_normalized.requires_unconditional_logprobs
    assert not greedy_token_selection.requires_unconditional_logprobs
    for wrong in ({"choices": [], "input_token_logprobs": []}, {**given, "choices": ["a"]}):
        with pytest.raises(ul.ParameterError):
            token_length_normalized(**wrong)
    with pytest.raises(ul.ParameterError, match="unconditional_token_logprobs="):
        unconditional_likelihood_normalized(**given)


@pytest.mark.parametrize(
    "method", ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
)
def test_a_method_is_an_object_or_a_name(method: str):
    assert sgl.select("x", ["a"], choices_method=getattr(sgl, method)).method == method
    assert sgl.gen("x", choices=["a"], choices_method=method, max_tokens=5, stop="\n").method == method
    assert type(sgl.select("x", ["a"], 0.0, getattr(sgl, method)).method) is str


def test_settings_read_as_they_hold():
    config = sgl.global_config
    assert (config.verbosity, config.skip_special_tokens_in_output) == (0, True)
    config.verbosity = 0
    echo = ul.Echo()
    try:
        config.default_backend = echo
        assert config.default_backend is echo
        sgl.set_default_backend(None)
    finally:
        ul.set_default_backend(None)
    with pytest.raises(AttributeError, match="default_backend"):
        config.nothing  # noqa: B018


def test_helpers_read_and_write_files(tmp_path, capsys: pytest.CaptureFixture[str]):
    utils = module("utils")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('# comment\n{"a": 1}\n\n[2]\n')
    assert list(utils.read_jsonl(str(lines))) == [{"a": 1}, [2]]
    utils.dump_state_text(str(tmp_path / "out.txt"), [said(), "text"])
    assert "xone two" in (tmp_path / "out.txt").read_text()
    utils.print_highlight("seen")
    assert capsys.readouterr().out == "seen\n"


# ------------------------------------------------------------------------------------------- hosted models


def test_openai_counts_the_tokens_of_all_calls():
    with FakeOpenAI(lambda text: " yes") as server:
        model = sgl.OpenAI(
            "gpt-3.5-turbo-instruct", is_chat_model=False, base_url=server.base_url, api_key=server.api_key
        )
        for _ in range(2):
            said_by(model)
        assert (model.token_usage.prompt_tokens, model.token_usage.completion_tokens) == (
            server.usage.prompt_tokens,
            server.usage.completion_tokens,
        )
        model.token_usage.reset()
        assert model.token_usage.prompt_tokens == 0
        chat = sgl.OpenAI(model_name="gpt-4o", is_chat_model=True, base_url=server.base_url, api_key=server.api_key)
        assert chat.get_chat_template() is chat.chat_template


def said_by(backend: Backend) -> str:
    @sgl.function
    def program(s):
        s += "Q: Well?\nA:" + sgl.gen("answer", max_tokens=4)

    return str(program.run(backend=backend)["answer"])


def test_azure_is_named_by_its_resource(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://name.openai.azure.com")
    model = sgl.OpenAI("gpt-4", is_azure=True, api_key="k" * 12, api_version="2024-10-21")
    assert "name.openai.azure.com" in repr(model)


def test_an_endpoint_answers_what_programs_ask_of_it():
    with FakeSGLang(lambda text: " yes", model="meta-llama/Llama-3.1-8B-Instruct") as server:
        endpoint = sgl.RuntimeEndpoint(server.address, api_key=server.api_key)
        assert endpoint.get_model_name() == "meta-llama/Llama-3.1-8B-Instruct"
        assert endpoint.get_chat_template().name == "llama-3-instruct"
        assert endpoint.get_server_info()["model_path"] == endpoint.get_model_name()
        endpoint.cache_prefix("A beginning.")
        assert server.requests[-1].text == "A beginning."
        endpoint.flush_cache()
        sgl.flush_cache(endpoint)
        assert server.flushes == 2
        assert sgl.get_server_info(endpoint)["model"] == endpoint.get_model_name()
        assert said_by(endpoint) == " yes"
        named = sgl.RuntimeEndpoint(server.address, server.api_key, None, "chatml")
        assert named.get_chat_template().name == "chatml"


def test_litellm_and_vertexai_have_sglangs_parameters(monkeypatch: pytest.MonkeyPatch):
    library = ModuleType("litellm")
    library.__spec__ = ModuleSpec("litellm", None)
    monkeypatch.setitem(sys.modules, "litellm", library)
    model = sgl.LiteLLM(model_name="mistral/large", organization="me", api_key="k", max_retries=1)
    assert model.capabilities.name == "litellm mistral/large"
    assert model.get_chat_template() is model.chat_template
    with pytest.raises(ul.ParameterError, match="leave it out"):
        sgl.LiteLLM("a/b", chat_template="chatml")
    models = SimpleNamespace(generate_content=print, generate_content_stream=print)
    client = SimpleNamespace(aio=SimpleNamespace(models=models))
    gemini = sgl.VertexAI("gemini-2.5-flash", {"HARM_CATEGORY_HARASSMENT": "BLOCK_NONE"}, client=client)
    assert gemini.get_chat_template() is gemini.chat_template
    assert gemini.capabilities.name == "vertexai gemini-2.5-flash"
    claude = sgl.Anthropic("claude-haiku-4-5", api_key="k" * 12)
    assert claude.get_chat_template() is claude.chat_template


def test_a_framework_is_imported_under_its_name_and_missing_ones_name_their_extra() -> None:
    """In a process of its own: importing umbel imports no framework, and finds no module of ours as the framework."""
    program = (
        "import sys, umbel; assert 'umbel.dspy' not in sys.modules and 'dspy' not in sys.modules\n"
        "sys.modules['dspy'] = None\n"  # as if it were not installed
        "try: from umbel.dspy import LM\n"
        "except umbel.MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "umbel[dspy]" in done.stdout
