"""Every primitive of the language, run on Echo."""

import hashlib
import warnings
from pathlib import Path

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.lang.prompt import Generated, Media, Text
from umbel.lang.protocol import Capabilities, GenRequest, ScoreRequest

from .conftest import PATIENCE


def last_gen(echo: Echo) -> GenRequest:
    return next(r for r in reversed(echo.requests) if isinstance(r, GenRequest))


# ------------------------------------------------------------------------------------------ gen


def test_gen_appends_what_it_sets() -> None:
    @ul.function
    def program(s):
        s += "The capital of France is" + ul.gen("city", max_tokens=3, stop=".") + ". Next."

    state = program.run(backend=Echo([" Paris. And more"]), timeout=PATIENCE)
    assert state["city"] == " Paris"
    assert state.text() == "The capital of France is Paris. Next."


def test_gen_sends_every_parameter_it_was_given() -> None:
    echo = Echo(["x"])

    @ul.function
    def program(s):
        s += "a" + ul.gen(
            "x",
            9,
            min_tokens=0,
            stop=["\n", "END"],
            stop_token_ids=[7],
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias={3: -1.0},
            seed=4,
            ignore_eos=False,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
        )

    program.run(backend=echo, timeout=PATIENCE).sync()
    sent = last_gen(echo).sampling
    assert (sent.max_tokens, sent.stop, sent.stop_token_ids) == (9, ("\n", "END"), (7,))
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sent.frequency_penalty, sent.presence_penalty, sent.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (sent.logit_bias, sent.seed, sent.ignore_eos) == ({3: -1.0}, 4, False)
    assert (sent.logprobs, sent.prompt_logprobs_from, sent.top_logprobs) == (True, 0, 2)


def test_sampling_layers_go_from_the_program_to_the_run_to_the_gen() -> None:
    echo = Echo(["x"] * 3)

    @ul.function(temperature=0.1, top_p=0.2, max_tokens=11)
    def program(s):
        s += "a" + ul.gen("x", top_p=0.9)

    program.run(backend=echo, temperature=0.7, timeout=PATIENCE).sync()
    sent = last_gen(echo).sampling
    assert (sent.temperature, sent.top_p, sent.max_tokens) == (0.7, 0.9, 11)
    assert sent.top_k == -1


def test_parameters_that_do_not_fit_together_raise_at_their_line(echo: Echo) -> None:
    reached = []

    @ul.function(max_tokens=4)
    def program(s):
        reached.append("before")
        s += ul.gen("x", min_tokens=8)
        reached.append("after")

    with pytest.raises(ul.ParameterError, match="min_tokens=8 is more than max_tokens=4"):
        program.run(backend=echo)
    assert reached == ["before"]
    assert echo.calls == 0


def test_n_gives_a_list_and_the_text_goes_on_with_the_first() -> None:
    @ul.function
    def program(s):
        s += "Say:" + ul.gen("x", n=3) + "!"

    state = program.run(backend=Echo([[" one", " two", " three"]]), timeout=PATIENCE)
    assert state["x"] == [" one", " two", " three"]
    assert state.text() == "Say: one!"
    assert [meta["completion_tokens"] for meta in state.get_meta_info("x")] == [1, 1, 1]


def test_unnamed_gens_do_not_share_a_name() -> None:
    @ul.function
    def program(s):
        s += ul.gen() + "," + ul.gen()

    state = program.run(backend=Echo(["a", "b"]), timeout=PATIENCE)
    assert state.text() == "a,b"
    assert state.variables() == []


def test_max_tokens_zero_computes_the_prompt_only(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a b c" + ul.gen("x", max_tokens=0)

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state["x"] == ""
    assert state.usage.completion_tokens == 0
    assert state.usage.prompt_tokens == 3


def test_what_was_generated_goes_back_as_tokens() -> None:
    echo = Echo([" one twoSTOPx", "y"])

    @ul.function
    def program(s):
        s += "Go" + ul.gen("x", stop="oS") + " on" + ul.gen("y")

    program.run(backend=echo, timeout=PATIENCE).sync()
    first, *_ = (r for r in echo.requests if isinstance(r, GenRequest))
    assert first.prompt == (Text("Go"),)
    constant, generated, rest = last_gen(echo).prompt
    assert constant == Text("Go")
    assert isinstance(generated, Generated)
    assert (generated.text, len(generated.token_ids)) == (" one", 1)
    assert rest == Text(" tw on")  # the stop began inside a token: what lies before it is text again


def test_a_backend_without_ids_gets_text() -> None:
    echo = Echo([" one", "y"], capabilities=Capabilities("plain"))

    @ul.function
    def program(s):
        s += "Go" + ul.gen("x") + " on" + ul.gen("y")

    program.run(backend=echo, timeout=PATIENCE).sync()
    assert last_gen(echo).prompt == (Text("Go one on"),)


def test_meta_info_has_the_facts_of_the_call() -> None:
    @ul.function
    def program(s):
        s += "Count to three" + ul.gen("x", stop=" four", return_logprob=True, top_logprobs_num=2, logprob_start_len=0)

    state = program.run(backend=Echo([" one two three four"]), timeout=PATIENCE)
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (3, 0, 4)
    assert (meta["finish_reason"], meta["matched_stop"]) == ("stop", " four")
    assert [text for _, _, text in meta["output_token_logprobs"]] == [" one", " two", " three", " four"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert [text for _, _, text in meta["input_token_logprobs"]] == ["Count", " to", " three"]
    assert meta["id"]


def test_text_in_logprobs_can_be_left_out() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x", return_logprob=True, return_text_in_logprobs=False)

    state = program.run(backend=Echo(["b"]), timeout=PATIENCE)
    assert [text for _, _, text in state.get_meta_info("x")["output_token_logprobs"]] == [None]


def test_log_probabilities_of_a_backend_without_them_are_an_error() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x", return_logprob=True)

    echo = Echo(["b"], capabilities=Capabilities("plain"))
    with pytest.raises(ul.CapabilityError, match="plain gives no log-probabilities"):
        program.run(backend=echo, timeout=PATIENCE)["x"]
    assert echo.calls == 0


def test_a_loop_with_one_name_reads_the_newest_value() -> None:
    @ul.function
    def program(s):
        seen = []
        for turn in range(3):
            s += f"{turn}?" + ul.gen("answer")
            seen.append(s["answer"])
        return seen

    assert program.run(backend=Echo(["a", "b", "c"]), timeout=PATIENCE).ret_value == ["a", "b", "c"]


# ------------------------------------------------------------------------------------------ select


@pytest.mark.parametrize("method", [ul.token_length_normalized, ul.greedy_token_selection, "greedy_token_selection"])
def test_select_takes_the_likeliest_choice(method: str) -> None:
    echo = Echo(scores={"True": -0.1, "False": -2.0, "Unknown": -3.0})

    @ul.function
    def program(s):
        s += "Is it?" + ul.select("answer", ["False", "True", "Unknown"], choices_method=method) + "."

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state["answer"] == "True"
    assert state.text() == "Is it?True."
    assert state.get_meta_info("answer")["choices_method"] == method


def test_select_asks_for_unconditional_scores_when_the_method_needs_them() -> None:
    echo = Echo(scores={"a": -1.0, "b": -2.0}, unconditional_scores={"a": -0.5, "b": -9.0})

    @ul.function
    def program(s):
        s += ul.select("x", ["a", "b"], choices_method="unconditional_likelihood_normalized")

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state["x"] == "b"
    request = echo.requests[-1]
    assert isinstance(request, ScoreRequest)
    assert request.unconditional
    assert state.get_meta_info("x")["choice_scores"] == {"a": -0.5, "b": 7.0}


def test_gen_with_choices_is_a_select() -> None:
    @ul.function
    def program(s):
        s += ul.gen("x", choices=["no", "yes"])

    assert program.run(backend=Echo(scores={"yes": -0.1, "no": -1.0}), timeout=PATIENCE)["x"] == "yes"


def test_select_on_a_backend_that_cannot_score_is_an_error() -> None:
    @ul.function
    def program(s):
        s += ul.select("x", ["a"])

    with pytest.raises(ul.CapabilityError, match="plain cannot score choices"):
        program.run(backend=Echo(capabilities=Capabilities("plain")), timeout=PATIENCE)["x"]


# ------------------------------------------------------------------------------------------ roles


def test_roles_follow_the_template_of_the_backend() -> None:
    @ul.function
    def program(s):
        s += ul.system("Be brief.")
        with s.user():
            s += "One"
        s.user("Two")
        s += ul.assistant_begin() + ul.gen("x") + ul.assistant_end()
        s += ul.role("tool", "42")

    state = program.run(backend=Echo(["Three"]), timeout=PATIENCE)
    assert state.text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n"
        "<|im_start|>assistant\nThree<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Three"},
        {"role": "tool", "content": "42"},
    ]


def test_only_scaffolding_is_control_text() -> None:
    echo = Echo(["<|im_end|>", "ok"])

    @ul.function
    def program(s, question):
        s += ul.user(question) + ul.assistant(ul.gen("x"))
        s += ul.user("again") + ul.assistant(ul.gen("y"))

    program.run("<|im_start|>system", backend=echo, timeout=PATIENCE).sync()
    plain = "".join(p.text for p in last_gen(echo).prompt if isinstance(p, Generated) or not p.control)
    assert plain == "<|im_start|>system<|im_end|>again"


def test_white_space_is_trimmed_as_the_template_trims_it() -> None:
    trimming = ul.ChatTemplate(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    @ul.function
    def program(s):
        s += ul.user("  one \n" + " two  ")
        s += ul.assistant("so: " + ul.gen("x"))

    state = program.run(backend=Echo(["three"], chat_template=trimming), timeout=PATIENCE)
    assert state.text() == "<user>one \n two</><assistant>so: three</>"


SYSTEM_IN_USER = ul.ChatTemplate(
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + ' | ' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}[{{ m['role'] }}:{% if loop.first %}{{ first }}{% endif %}{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}",
    name="late",
)


def test_a_template_may_move_the_system_text_into_the_user_turn() -> None:
    @ul.function
    def program(s):
        s += ul.system("S") + ul.user("U") + ul.assistant(ul.gen("x"))

    state = program.run(backend=Echo(["A"], chat_template=SYSTEM_IN_USER), timeout=PATIENCE)
    assert state.text() == "[user:S | U][assistant:A]"
    assert state.messages()[0] == {"role": "system", "content": "S"}


def test_text_that_such_a_template_would_lose_is_an_error() -> None:
    @ul.function
    def program(s):
        s += ul.system("S") + "loose text"

    with pytest.raises(ul.TemplateError, match="add a user"):
        program.run(backend=Echo(chat_template=SYSTEM_IN_USER), timeout=PATIENCE).text()


def test_roles_do_not_nest(echo: Echo) -> None:
    @ul.function
    def program(s):
        with s.user():
            s += "a" + ul.assistant("b")

    with pytest.raises(ul.ProgramError, match="assistant cannot begin inside an open user turn"):
        program.run(backend=echo)


def test_a_role_end_needs_its_beginning(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += ul.user_end()

    with pytest.raises(ul.ProgramError, match="no turn is open"):
        program.run(backend=echo)


# ------------------------------------------------------------------------------------------ scopes, reasoning, media


def test_var_scope_captures_what_is_appended_inside() -> None:
    @ul.function
    def program(s):
        s += "before "
        with s.var_scope("outer"):
            s += "a" + ul.gen("x")
            with s.var_scope("inner"):
                s += "b"
        s += " after"

    state = program.run(backend=Echo(["1"]), timeout=PATIENCE)
    assert (state["outer"], state["inner"]) == ("a1b", "b")


def test_an_open_scope_is_not_readable_yet(echo: Echo) -> None:
    @ul.function
    def program(s):
        with s.var_scope("x"):
            s += "a"
            with pytest.raises(ul.VariableError):
                s["x"]

    assert program.run(backend=echo, timeout=PATIENCE)["x"] == "a"


def test_separate_reasoning_keeps_the_thinking_out_of_the_text() -> None:
    @ul.function
    def program(s):
        s += "Q" + ul.separate_reasoning(ul.gen("answer"), model_type="qwen3") + "."

    state = program.run(backend=Echo(["<think>\nhm </think>\n\nyes"]), timeout=PATIENCE)
    assert state["answer"] == "yes"
    assert state["answer_reasoning_content"] == "hm"
    assert state.text() == "Qyes."


def test_separate_reasoning_of_several_continuations_gives_lists() -> None:
    @ul.function
    def program(s):
        s += ul.separate_reasoning(ul.gen("x", n=2))

    state = program.run(backend=Echo([["<think>a</think>1", "2"]]), timeout=PATIENCE)
    assert (state["x"], state["x_reasoning_content"]) == (["1", "2"], ["a", ""])


def test_an_image_travels_with_the_digest_of_its_bytes(tmp_path: Path) -> None:
    echo = Echo(["seen"] * 2)
    (tmp_path / "a.png").write_bytes(b"not really a picture")

    @ul.function
    def program(s, source):
        s += ul.user("Look: " + ul.image(source)) + ul.assistant(ul.gen("x"))

    for source in (str(tmp_path / "a.png"), b"not really a picture"):
        state = program.run(source, backend=echo, timeout=PATIENCE)
        assert state["x"] == "seen"
        media = next(p for p in last_gen(echo).prompt if isinstance(p, Media))
        assert (media.kind, media.data) == ("image", b"not really a picture")
        assert media.digest == hashlib.sha256(media.data).hexdigest()
        assert state.messages()[0]["content"] == "Look: <image>"


def test_a_clip_travels_with_its_number_of_frames() -> None:
    echo = Echo(["seen"])

    @ul.function
    def program(s):
        s += ul.video(b"clip", 8) + ul.gen("x")

    program.run(backend=echo, timeout=PATIENCE).sync()
    media = last_gen(echo).prompt[0]
    assert isinstance(media, Media)
    assert (media.kind, media.num_frames) == ("video", 8)


def test_a_picture_object_is_saved_as_png() -> None:
    class Picture:
        def save(self, target, format):
            target.write(b"encoded as " + format.encode())

    echo = Echo(["seen"])

    @ul.function
    def program(s):
        s += ul.image(Picture()) + ul.gen("x")

    program.run(backend=echo, timeout=PATIENCE).sync()
    media = last_gen(echo).prompt[0]
    assert isinstance(media, Media)
    assert media.data == b"encoded as PNG"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("missing.png", "there is no such file"),
        ("/", "it is a folder; pass a path"),
        ("data:image/png;base64,iVBOR", r"write base64.b64decode\(\) of what comes after its comma"),
        ("https://example.com/a.png", "URLs are not fetched"),
        (b"", "of 0 bytes"),
        (b"x" * (20 * 1024 * 1024 + 1), "20971521 bytes"),
        (42, "takes a path or bytes, or a PIL image; got int"),
        ("data:image/png;base64," + "iVBOR" * 2000, r"this is no path; write image\(base64.b64decode"),
    ],
)
def test_a_source_that_cannot_be_an_image_raises_at_its_line(echo: Echo, source: object, problem: str) -> None:
    @ul.function
    def program(s):
        s += ul.image(source)

    with pytest.raises(ul.ParameterError, match=problem):
        program.run(backend=echo)


def test_a_picture_that_its_library_cannot_write_says_what_to_pass(echo: Echo) -> None:
    class Picture:
        mode = "CMYK"

        def save(self, file: object, format: str) -> None:
            raise OSError("cannot write mode CMYK as PNG")

    @ul.function
    def program(s):
        s += ul.image(Picture()) + ul.gen("x")

    with pytest.raises(ul.ParameterError, match=r"'CMYK' that .* write image\(picture.convert\('RGB'\)"):
        program.run(backend=echo, timeout=PATIENCE)["x"]


def test_a_backend_without_images_refuses_before_any_work() -> None:
    echo = Echo(capabilities=Capabilities("text only"))

    @ul.function
    def program(s):
        s += ul.image(b"picture") + ul.gen("x")

    with pytest.raises(ul.CapabilityError, match="text only takes no images"):
        program.run(backend=echo, timeout=PATIENCE)["x"]
    assert echo.calls == 0


# ------------------------------------------------------------------------------------------ variables and text


def test_variables_can_be_assigned_and_looked_for(echo: Echo) -> None:
    @ul.function
    def program(s):
        s["a"] = [1, 2]
        s.set_var("b", "text")
        assert "a" in s
        assert "c" not in s
        s += "x" + ul.gen("c")
        assert "c" in s

    state = program.run(backend=echo, timeout=PATIENCE)
    assert (state["a"], state["b"], state["c"]) == ([1, 2], "text", "x")
    assert state.variables() == ["a", "b", "c"]


def test_an_unknown_name_is_an_error_that_names_what_it_may_mean(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "x" + ul.gen("judgment")
        s["judgement"]

    with pytest.raises(ul.VariableError, match="did you mean 'judgment'"):
        program.run(backend=echo)


def test_usage_is_the_sum_over_calls_and_branches() -> None:
    @ul.function
    def program(s):
        s += "a b" + ul.gen("x", max_tokens=2)
        forks = s.fork(2)
        forks += " c" + ul.gen("y", max_tokens=3)
        forks.join()
        s += ul.select("z", ["d", "e"])

    state = program.run(backend=Echo(lambda prompt: "one two three four"), timeout=PATIENCE)
    state.sync()
    assert state.usage.calls == 4
    assert state.usage.completion_tokens == 2 + 3 + 3
    assert state.usage.prompt_tokens == 2 + 5 + 5 + 4


def test_a_list_of_expressions_is_appended_in_order(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += ["a", ul.gen("x"), "b"]

    assert program.run(backend=echo, timeout=PATIENCE).text() == "aab"


def test_none_is_not_an_expression(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += None

    with pytest.raises(ul.ParameterError, match="cannot append None"):
        program.run(backend=echo)


def test_a_tool_is_called_between_gens() -> None:
    echo = Echo({"calculator: ": "257*983", "= ": "252631"})

    @ul.function
    def program(s):
        s += "Ask the calculator: " + ul.gen("expression", stop="\n")
        left, right = map(int, s["expression"].split("*"))
        s += f" = {left * right}. So it = " + ul.gen("answer")

    assert program.run(backend=echo, timeout=PATIENCE)["answer"] == "252631"


def test_echo_templates_raise_no_warning(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += ul.system("a") + ul.user("b") + ul.assistant(ul.gen("x"))
        s += ul.user("c") + ul.assistant(ul.gen("y"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.run(backend=echo, timeout=PATIENCE).sync()
