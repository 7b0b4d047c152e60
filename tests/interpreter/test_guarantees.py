"""Constraints that a backend does not enforce: told, looked at, asked for again, kept, or refused."""

import dataclasses
import enum
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import pydantic
import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.interpreter.guarantees import reask_prompts
from umbel.interpreter.guarantees.guarantee import lower
from umbel.lang.prompt import Text
from umbel.lang.protocol import Capabilities, ConstraintSpec, GenRequest

from .conftest import PATIENCE

TRIES = st.integers(1, 4)


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Pair(TypedDict):
    a: int


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=2)


def hosted(script: Any, **offered: Any) -> Echo:
    """Enforces nothing, and can be asked again."""
    return Echo(script, capabilities=Capabilities("hosted gpt", asks_again=True, **offered))


def prompts(echo: Echo) -> list[str]:
    return [prompt_text(request.prompt) for request in echo.requests]


def requests(echo: Echo) -> list[GenRequest]:
    return [request for request in echo.requests if isinstance(request, GenRequest)]


@ul.function
def chat(s, **options):
    s += ul.system("Be brief.") + ul.user("Well?") + ul.assistant(ul.gen("x", **options))


@ul.function
def plain(s, **options):
    s += "Well? " + ul.gen("x", **options)


# --------------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("program", [chat, plain])
@pytest.mark.parametrize(
    ("options", "answer", "text", "value"),
    [
        ({"dtype": int}, "42", "42", 42),
        ({"dtype": int}, "42\n", "42", 42),
        ({"dtype": float}, "-1.5 or so", "-1.5", -1.5),
        ({"dtype": str}, '"a\\nb"', '"a\\nb"', "a\nb"),
        ({"dtype": bool}, " True", "True", True),
        ({"dtype": Literal["yes", "no"]}, "no\n", "no", "no"),
        ({"dtype": Colour}, "2", "2", Colour.BLUE),
        ({"dtype": Point}, '```json\n{"x": 1, "y": 2}\n```', '{"x": 1, "y": 2}', Point(1, 2)),
        ({"dtype": Pair}, '{"a":1}', '{"a":1}', {"a": 1}),
        ({"json_schema": Person}, '{"name": "Bo"}', '{"name": "Bo"}', Person(name="Bo")),
        ({"regex": "[ab]+"}, "abba", "abba", "abba"),
        ({"regex": "[ab]+", "stop": "!"}, "abba! Yes", "abba", "abba"),
        ({"ebnf": 'start: "x" | "y"'}, "y", "y", "y"),
    ],
)
def test_a_text_that_holds_is_taken_at_once(
    program: ul.Program, options: dict[str, Any], answer: str, text: str, value: object
) -> None:
    echo = hosted([answer])
    state = program.run(backend=echo, timeout=PATIENCE, **options)
    assert (state["x"], state.value("x")) == (text, value)
    assert (state.meta("x")["guarantee"], state.meta("x")["tries"]) == ("validated", 1)
    assert [request.constraint for request in requests(echo)] == [None]


def test_a_number_that_begins_with_a_blank_does_not_end_there() -> None:
    @ul.function
    def program(s):
        s += "The answer is" + ul.gen("x", dtype=int) + "."

    echo = hosted([" 42 or so\nand more"])
    state = program.run(backend=echo, timeout=PATIENCE)
    assert (state.value("x"), state.text()) == (42, "The answer is42.")
    assert requests(echo)[0].sampling.stop == ("\n",)


@pytest.mark.parametrize("text", ["hello the", "hello the."])
def test_a_stop_of_the_program_may_end_a_text_early(text: str) -> None:
    state = chat.run(backend=hosted([text + "!!"]), regex="[a-z ]+[.]", stop="!", timeout=PATIENCE)
    assert state["x"] == text
    assert state.meta("x")["guarantee"] == ("validated" if text.endswith(".") else "incomplete")


def test_a_provider_that_does_not_name_its_stops_is_asked_whether_the_text_goes_on() -> None:
    options: dict[str, Any] = {"regex": "[a-z ]+[.]", "stop": "!", "timeout": PATIENCE}
    state = chat.run(backend=hosted(["hello the", "hello the end."]), **options)
    assert (state["x"], state.meta("x")["guarantee"]) == ("hello the end.", "validated")
    state = chat.run(backend=hosted(lambda prompt: "hello the"), **options)
    assert (state["x"], state.meta("x")["guarantee"], state.meta("x")["tries"]) == ("hello the", "incomplete", 3)


def test_what_no_stop_explains_is_not_a_beginning() -> None:
    echo = hosted(["hello the", "ok."])
    assert chat.run(backend=echo, regex="[a-z ]+[.]", timeout=PATIENCE)["x"] == "ok."


def test_continuations_are_looked_at_one_by_one() -> None:
    echo = hosted(["1", "two", "3", "2"])
    state = chat.run(backend=echo, dtype=int, n=3, timeout=PATIENCE)
    assert state.value("x") == [1, 2, 3]
    assert [facts["tries"] for facts in state.meta("x")] == [1, 2, 1]
    assert [request.sampling.n for request in requests(echo)] == [3, 1]


def test_pieces_come_when_the_text_is_accepted() -> None:
    state = chat.run(backend=hosted(["wrong", "a b c"]), regex="[abc ]+", stream=True, timeout=PATIENCE)
    assert list(state.text_iter("x")) == ["a b c"]


def test_the_state_goes_on_as_if_the_text_had_been_said_at_once() -> None:
    @ul.function
    def program(s):
        s += ul.user("How old?") + ul.assistant("I am " + ul.gen("n", dtype=int) + ".")
        s += ul.user("Sure?") + ul.assistant(ul.gen("sure"))

    echo = hosted(["about", "42", "Yes."])
    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.messages() == [
        {"role": "user", "content": "How old?"},
        {"role": "assistant", "content": "I am 42."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert prompts(echo)[-1] == state.text().removesuffix("Yes.<|im_end|>\n")


def test_every_call_is_counted() -> None:
    state = chat.run(backend=hosted(["no", "no", "7"]), dtype=int, timeout=PATIENCE)
    facts = state.meta("x")
    assert facts["tries"] == state.usage.calls == 3
    assert facts["prompt_tokens"] == state.usage.prompt_tokens


@given(st.lists(st.sampled_from(["7", " 7\n", "seven", "", "7.5", "-", "12 or so"]), min_size=4, max_size=4), TRIES)
@settings(max_examples=40, deadline=None)
def test_the_first_answer_that_holds_is_the_value(answers: list[str], tries: int) -> None:
    right = [index for index, answer in enumerate(answers[:tries]) if answer not in ("seven", "", "7.5", "-")]
    echo = hosted(answers)
    state = chat.run(backend=echo, dtype=int, max_tries=tries, timeout=PATIENCE)
    if right:
        assert (state.value("x"), state.meta("x")["tries"]) == (int(answers[right[0]].split()[0]), right[0] + 1)
    else:
        assert isinstance(state.error(), ul.GuaranteeError)
    assert echo.calls == (right[0] + 1 if right else tries)


# --------------------------------------------------------------------------------- what the model is told

NOTE_INT = "Write your answer as an integer, in digits.\n" + reask_prompts.NOTE.partition("\n")[2]


def test_a_model_that_is_talked_to_is_told_what_is_wanted() -> None:
    echo = hosted(["7"])
    chat.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    assert prompts(echo) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nWell?\n\n{NOTE_INT}<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_model_that_was_wrong_is_shown_its_answer_and_what_is_wrong() -> None:
    echo = hosted(["seven", "7"])
    chat.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    first, second = prompts(echo)
    assert second == first + (
        "seven<|im_end|>\n<|im_start|>user\n"
        f"That cannot be used: no such text begins with 'seven'.\n\n{NOTE_INT}"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len({request.id for request in requests(echo)}) == 2


def test_only_scaffolding_is_control_text() -> None:
    echo = hosted(["<|im_end|>", "7"])
    chat.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    last = requests(echo)[-1].prompt
    assert [part.control for part in last if isinstance(part, Text)] == [True, False] * (len(last) // 2) + [True]
    assert Text("<|im_end|>") in last


def test_an_answer_that_has_begun_is_gone_on_with() -> None:
    @ul.function
    def program(s):
        s += ul.user("Who?")
        s += ul.assistant("Name: " + ul.gen("name", regex="[A-Z][a-z]+") + ", aged " + ul.gen("n", dtype=int))

    echo = hosted(["Bo", "old", "7"])
    assert program.run(backend=echo, timeout=PATIENCE).messages()[-1]["content"] == "Name: Bo, aged 7"
    first, second, third = prompts(echo)
    assert "The answer so far ends with 'Name: '<|im_end|>" in first
    assert first.endswith("<|im_start|>assistant\nName: ")
    assert second.endswith("<|im_start|>assistant\nName: Bo, aged ")
    assert "<|im_start|>assistant\nName: Bo, aged old<|im_end|>\n<|im_start|>user\nThat cannot be used:" in third
    assert third.endswith("<|im_start|>assistant\nName: Bo, aged ")


def test_an_empty_answer_is_complained_of_without_an_empty_turn() -> None:
    echo = hosted(["", "7"])
    chat.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    assert f"Well?\n\nThat cannot be used: the text is empty.\n\n{NOTE_INT}<|im_end|>" in prompts(echo)[1]


def test_a_note_is_a_turn_of_its_own_behind_an_answer() -> None:
    @ul.function
    def program(s):
        s += ul.assistant("Hello!") + ul.assistant(ul.gen("x", dtype=int))

    echo = hosted(["7"])
    program.run(backend=echo, timeout=PATIENCE).sync()
    assert f"Hello!<|im_end|>\n<|im_start|>user\n{NOTE_INT}<|im_end|>\n<|im_start|>assistant\n" in prompts(echo)[0]


def test_the_plain_fallback_is_a_conversation_too() -> None:
    template = ul.ChatTemplate(None, name="a completion model")
    capabilities = Capabilities("hosted", asks_again=True)
    echo = Echo(["x", "7"], chat_template=template, capabilities=capabilities)
    with pytest.warns(ul.TemplateWarning):
        assert chat.run(backend=echo, dtype=int, timeout=PATIENCE).value("x") == 7
    assert prompts(echo)[1].count("USER: ") == 2
    assert prompts(echo)[1].endswith("ASSISTANT:")


def test_a_template_that_moves_turns_is_told_in_a_turn_of_its_own() -> None:
    moves = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
    )
    template = ul.ChatTemplate(moves, name="instruct")
    echo = Echo(["x", "7"], chat_template=template, capabilities=Capabilities("hosted", asks_again=True))

    @ul.function
    def program(s):
        s += ul.user("Well?") + ul.assistant(ul.gen("x", dtype=int))

    assert program.run(backend=echo, timeout=PATIENCE).value("x") == 7
    assert prompts(echo)[0] == f"[INST] Well?\n\n{NOTE_INT} [/INST]"
    assert prompts(echo)[1].startswith(f"{prompts(echo)[0]}x</s>[INST] That cannot be used")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"regex": "a+"}, "this regular expression matches from its beginning to its end:\na+\n"),
        ({"dtype": float}, "a number, in digits."),
        ({"json_schema": {"type": "null"}}, 'JSON that satisfies this JSON Schema:\n{"type": "null"}\n'),
        ({"dtype": Literal["é", "b"]}, 'one of the texts of this JSON array, without the quotes:\n["é", "b"]\n'),
        ({"ebnf": 'start: "x"'}, 'a text in the language of this Lark grammar:\nstart: "x"\n'),
    ],
)
def test_every_kind_of_constraint_has_its_words(options: dict[str, Any], told: str) -> None:
    echo = hosted(["wrong"] * 3)
    with pytest.raises(ul.GuaranteeError):
        chat.run(backend=echo, timeout=PATIENCE, **options)["x"]
    assert told in prompts(echo)[0]


# --------------------------------------------------------------------------------- texts outside of roles


def test_a_text_is_drawn_again_with_another_seed() -> None:
    echo = hosted(["x", "y", "7"])
    plain.run(backend=echo, dtype=int, seed=5, timeout=PATIENCE).sync()
    assert prompts(echo) == ["Well? "] * 3
    assert [request.sampling.seed for request in requests(echo)] == [5, 6, 7]


def test_continuations_are_drawn_again_with_seeds_of_their_own() -> None:
    echo = hosted(["x", "y", "x", "7", "y", "8"])
    plain.run(backend=echo, dtype=int, n=2, seed=2**63 - 1, timeout=PATIENCE).sync()
    assert [request.sampling.seed for request in requests(echo)] == [2**63 - 1, 1, 3, 2, 4][: echo.calls]


def test_a_text_without_a_seed_is_drawn_again_as_it_was() -> None:
    echo = hosted(["x", "7"])
    plain.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    first, second = requests(echo)
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling)


def test_a_model_that_does_not_draw_gets_the_demand_in_front_of_the_text() -> None:
    echo = hosted(["x", "7"])
    plain.run(backend=echo, dtype=int, temperature=0, timeout=PATIENCE).sync()
    first, second = prompts(echo)
    assert first == "Well? "
    assert second == (
        "(Below is the beginning of a text. It goes on with an integer, in digits.\n"
        "It does not go on with 'x': no such text begins with 'x'.)\n\nWell? "
    )


def test_a_chat_model_that_continues_a_text_is_told_at_once() -> None:
    echo = hosted(["x", "7"], converses=True)
    plain.run(backend=echo, dtype=int, timeout=PATIENCE).sync()
    first, second = prompts(echo)
    assert first == "(Below is the beginning of a text. It goes on with an integer, in digits.)\n\nWell? "
    assert second.endswith("in digits.\nIt does not go on with 'x': no such text begins with 'x'.)\n\nWell? ")


# --------------------------------------------------------------------------------- when it does not come


@pytest.mark.parametrize("program", [chat, plain])
def test_a_text_that_never_holds_is_an_error(program: ul.Program) -> None:
    echo = hosted(lambda prompt: "seven")
    state = program.run(backend=echo, dtype=int, timeout=PATIENCE)
    with pytest.raises(ul.GuaranteeError) as caught:
        state["x"]
    assert str(caught.value) == (
        "hosted gpt wrote no text for variable 'x' that satisfies its regex in 3 tries; the last was 'seven': no such "
        "text begins with 'seven'. Raise max_tries=3, write allow_best_effort=True to keep such a text, or run the "
        "program on a Runtime"
    )
    assert isinstance(caught.value, ul.BackendError)
    assert echo.calls == 3


def test_a_text_that_is_cut_off_says_so() -> None:
    echo = hosted(lambda prompt: "[1, 2, 3]")
    with pytest.raises(ul.GuaranteeError, match=r"cut off at max_tokens=3\. Raise max_tokens, write"):
        chat.run(backend=echo, dtype=list[int], max_tokens=3, timeout=PATIENCE)["x"]
    assert "it was cut off at max_tokens=3" in prompts(echo)[1]


@pytest.mark.parametrize("tries", [1, 5])
def test_the_program_says_how_often_to_try(tries: int) -> None:
    echo = hosted(lambda prompt: "seven")
    with pytest.raises(ul.GuaranteeError, match=f"in {tries} tr"):
        chat.run(backend=echo, dtype=int, max_tries=tries, timeout=PATIENCE)["x"]
    assert echo.calls == tries


def test_best_effort_keeps_the_last_text_and_tells() -> None:
    state = chat.run(backend=hosted(["a", "b", "c d"]), dtype=int, allow_best_effort=True, timeout=PATIENCE)
    facts = state.meta("x")
    assert (state["x"], facts["guarantee"], facts["tries"]) == ("c d", "best_effort", 3)
    assert facts["violations"] == ["no such text begins with 'c d'"]
    with pytest.raises(ul.ResultError, match="'x' holds no int"):
        state.value("x")


def test_best_effort_that_holds_is_validated() -> None:
    state = chat.run(backend=hosted(["7"]), dtype=int, allow_best_effort=True, timeout=PATIENCE)
    assert state.meta("x")["guarantee"] == "validated"
    assert "violations" not in state.meta("x")


def test_a_backend_that_is_not_asked_again_is_asked_once() -> None:
    echo = Echo(["seven"], capabilities=Capabilities("small"))
    state = chat.run(backend=echo, dtype=int, allow_best_effort=True, timeout=PATIENCE)
    assert (state["x"], state.meta("x")["tries"], echo.calls) == ("seven", 1, 1)


def test_what_cannot_be_looked_at_is_best_effort_without_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "llguidance")
    state = chat.run(backend=hosted(["x"]), ebnf="start: /a/", allow_best_effort=True, timeout=PATIENCE)
    facts = state.meta("x")
    assert (state.value("x"), facts["guarantee"], facts["violations"]) == ("x", "best_effort", [])
    assert "llguidance, which is not installed" in facts["unvalidated"]


def missing(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name))


# --------------------------------------------------------------------------------- before any call


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"regex": "(a"}, ul.ConstraintError, "regex: position"),
        ({"json_schema": {"minimum": "x"}}, ul.ConstraintError, "json_schema: "),
        ({"ebnf": "start: nobody"}, ul.ConstraintError, "grammar: "),
        (
            {"regex": "a", "constraint_engine": "fsm"},
            ul.CapabilityError,
            "hosted gpt has no constraint engines to choose from; remove constraint_engine='fsm'",
        ),
    ],
)
def test_a_wrong_constraint_costs_nothing(options: dict[str, Any], error: type[Exception], problem: str) -> None:
    echo = hosted(["a"])
    with pytest.raises(error, match=problem):
        chat.run(backend=echo, timeout=PATIENCE, **options)["x"]
    assert echo.calls == 0


@pytest.mark.parametrize(
    ("package", "options", "error"),
    [
        ("numpy", {"regex": "a"}, ul.MissingExtraError),
        ("jsonschema_rs", {"dtype": list[int]}, ul.MissingExtraError),
        ("llguidance", {"ebnf": "start: /b/"}, ul.CapabilityError),
    ],
)
def test_a_missing_package_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, package: str, options: dict[str, Any], error: type[Exception]
) -> None:
    missing(monkeypatch, package)
    echo = hosted(["a"])
    with pytest.raises(error, match=package.replace("_", "-")):
        chat.run(backend=echo, timeout=PATIENCE, **options)["x"]
    assert echo.calls == 0


def test_a_refusal_names_backend_what_is_missing_and_what_to_write() -> None:
    echo = Echo(capabilities=Capabilities("small 7b", constraints=("json_schema",)))
    with pytest.raises(ul.CapabilityError) as caught:
        chat.run(backend=echo, regex="a", timeout=PATIENCE)["x"]
    assert str(caught.value) == (
        "small 7b does not enforce regex= and dtype= as they are written here (it enforces json_schema= and dtype=), "
        "and is not asked again when an answer breaks them; write allow_best_effort=True to take what comes, stop= and "
        "parse the text, or run the program on a Runtime"
    )
    assert echo.calls == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_tries": 2}, "max_tries=2 needs a constraint to apply to"),
        ({"allow_best_effort": False}, "allow_best_effort=False needs a constraint"),
        ({"regex": "a", "max_tries": 0}, "max_tries=0 is out of range; write 1 to 10, 3 being usual"),
        ({"regex": "a", "max_tries": 11}, "max_tries=11"),
        ({"regex": "a", "max_tries": True}, "max_tries=True"),
        ({"choices": ["a"], "max_tries": "3"}, "max_tries='3'"),
        ({"regex": "a", "allow_best_effort": 1}, "allow_best_effort must be True or False, got 1"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ul.ParameterError, match=problem):
        ul.gen("x", **options)


# --------------------------------------------------------------------------------- what is enforced


class Particular(Echo):
    """Enforces expressions, those of letters only."""

    def __init__(self, script: Sequence[str], *, asks_again: bool) -> None:
        capabilities = Capabilities("particular", constraints=("regex",), asks_again=asks_again)
        super().__init__(script, capabilities=capabilities)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        return constraint.source.isalpha()


def test_a_backend_may_enforce_a_part_of_a_kind() -> None:
    @ul.function
    def program(s):
        s += ul.user("Well?")
        s += ul.assistant(ul.gen("x", regex="abc", max_tries=2) + ul.gen("y", regex="[0-9]+", allow_best_effort=True))

    echo = Particular(["abc", "7"], asks_again=True)
    state = program.run(backend=echo, timeout=PATIENCE)
    assert [state.meta(name)["guarantee"] for name in ("x", "y")] == ["enforced", "validated"]
    assert [state.meta(name)["tries"] for name in ("x", "y")] == [1, 1]
    assert [request.constraint is None for request in requests(echo)] == [False, True]
    with pytest.raises(ul.CapabilityError, match="particular does not enforce regex="):
        chat.run(backend=Particular([], asks_again=False), regex="[0-9]", timeout=PATIENCE)["x"]


@pytest.mark.parametrize("kinds", [("choices",), ("regex",)])
def test_values_are_enforced_as_choices_or_as_an_expression(kinds: tuple[Any, ...]) -> None:
    echo = hosted(["a.b"], constraints=kinds)
    state = chat.run(backend=echo, dtype=Literal["a.b", "c"], timeout=PATIENCE)
    assert (state.value("x"), state.meta("x")["guarantee"]) == ("a.b", "enforced")
    constraint = requests(echo)[0].constraint
    assert constraint is not None
    assert (constraint.kind, constraint.source) == (kinds[0], '["a.b", "c"]' if kinds == ("choices",) else r"a\.b|c")


# --------------------------------------------------------------------------------- choices


@ul.function
def choose(s, **options):
    s += ul.user("Colour?") + ul.assistant(ul.select("x", ["red", "dark red"], **options))


@pytest.mark.parametrize(
    ("offered", "answers", "guarantee", "tries"),
    [
        ({}, ["dark red\n"], "validated", 1),
        ({}, ["green", "Red", "dark red"], "validated", 3),
        ({"constraints": ("choices",)}, ["dark red"], "enforced", 1),
        ({"constraints": ("regex",)}, ["dark red"], "enforced", 1),
    ],
)
def test_a_model_that_scores_nothing_generates_a_choice(
    offered: dict[str, Any], answers: list[str], guarantee: str, tries: int
) -> None:
    echo = hosted(answers, **offered)
    state = choose.run(backend=echo, timeout=PATIENCE)
    facts = state.meta("x")
    assert state["x"] == state.value("x") == "dark red"
    assert (facts["choices_method"], facts["guarantee"], facts["tries"]) == ("generated", guarantee, tries)
    assert facts.get("probabilities") is None
    for number in ("probabilities", "choice_scores", "normalized_prompt_logprobs"):
        with pytest.raises(ul.CapabilityError, match=f"hosted gpt generated this choice .* no '{number}'"):
            facts[number]
    with pytest.raises(KeyError, match="nonsense"):
        facts["nonsense"]


def test_a_choice_is_generated_with_its_temperature_and_room() -> None:
    echo = hosted(["red", "red"])

    @ul.function
    def program(s):
        for temperature in (0.0, 0.7):
            s += ul.user("Colour?") + ul.assistant(ul.select("x", ["red", "dark red"], temperature=temperature))

    program.run(backend=echo, seed=3, max_tokens=1, stop="r", timeout=PATIENCE).sync()
    best, drawn = (request.sampling for request in requests(echo))
    assert (best.temperature, drawn.temperature, drawn.seed) == (0.0, 0.7, 3)
    assert best.max_tokens == len("dark red") + 16
    assert best.stop == ()


def test_a_model_without_temperatures_generates_a_choice_in_its_own_way() -> None:
    echo = hosted(["red"], temperature=False, thinking_tokens=1000)
    choose.run(backend=echo, timeout=PATIENCE).sync()
    (request,) = requests(echo)
    assert request.sampling.temperature == 1.0
    assert request.sampling.max_tokens == len("dark red") + 16 + 1000


def test_a_choice_that_never_comes() -> None:
    with pytest.raises(ul.GuaranteeError, match=r"no text for variable 'x' that satisfies its choices in 2 tries"):
        choose.run(backend=hosted(["green"] * 2), max_tries=2, timeout=PATIENCE)["x"]
    state = choose.run(backend=hosted(["green"]), max_tries=1, allow_best_effort=True, timeout=PATIENCE)
    assert (state["x"], state.meta("x")["guarantee"]) == ("green", "best_effort")
    assert state.meta("x")["violations"] == ["the text is none of the choices"]


@pytest.mark.parametrize(
    "method", ["greedy_token_selection", "unconditional_likelihood_normalized", "overshoot", "exact"]
)
def test_methods_that_compare_numbers_need_them(method: Any) -> None:
    echo = hosted(["red"])
    with pytest.raises(ul.CapabilityError, match=f"cannot score choices, which method='{method}' compares; leave the"):
        choose.run(backend=echo, method=method, timeout=PATIENCE)["x"]
    assert echo.calls == 0


def test_gen_with_choices_passes_its_tries_on() -> None:
    op = ul.gen("x", choices=["a"], max_tries=7, allow_best_effort=True)
    assert op == ul.select("x", ["a"], max_tries=7, allow_best_effort=True)


# --------------------------------------------------------------------------------- with the rest of the language


def test_branches_may_begin_inside_an_answer() -> None:
    @ul.function
    def program(s):
        s += ul.user("Well?")
        with s.assistant():
            s += "Counts: "
            forks = s.fork(2)
            for branch in forks:
                branch += ul.gen("n", dtype=int) + "; "
            forks.join("concate_and_append")
            s += ul.gen("last", dtype=int)

    echo = hosted(lambda prompt: "7" if "cannot be used" in prompt else "seven")
    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.messages()[-1]["content"] == "Counts: 7; 7; 7"
    assert prompts(echo)[-1].endswith("<|im_start|>assistant\nCounts: 7; 7; ")


def test_a_note_stands_behind_an_image() -> None:
    @ul.function
    def program(s):
        s += ul.user(ul.image(b"\x89PNG\r\n\x1a\n" + b"a picture")) + ul.assistant(ul.gen("n", dtype=int))

    echo = hosted(["7"], images=True)
    program.run(backend=echo, timeout=PATIENCE).sync()
    assert f"<image>\n\n{NOTE_INT}<|im_end|>" in prompts(echo)[0]


def test_thinking_is_a_part_of_what_is_looked_at() -> None:
    @ul.function
    def program(s):
        s += ul.user("Well?") + ul.assistant(ul.separate_reasoning(ul.gen("n", regex=r"<think>\w*</think>\d+")))

    state = program.run(backend=hosted(["7", "<think>hm</think>7"]), timeout=PATIENCE)
    assert (state["n"], state["n_reasoning_content"]) == ("7", "hm")


def test_branches_are_asked_again_each_for_itself() -> None:
    @ul.function
    def program(s):
        s += ul.user("Well?")
        forks = s.fork(4)
        for index, branch in enumerate(forks):
            branch += ul.assistant(f"{index}: " + ul.gen("n", dtype=int))
        forks.join()

    def script(prompt: str) -> str:
        return "7" if "cannot be used" in prompt or prompt.endswith("2: ") else "seven"

    state = program.run(backend=hosted(script), timeout=PATIENCE)
    assert state.value("n") == [7] * 4
    assert [facts["tries"] for facts in state.meta("n")] == [2, 2, 1, 2]


def test_a_budget_ends_the_asking() -> None:
    echo = hosted(lambda prompt: "seven")
    with pytest.raises(ul.BudgetError):
        chat.run(backend=echo, dtype=int, budget=ul.Budget(calls=2), timeout=PATIENCE)["x"]
    assert echo.calls == 2


@pytest.mark.parametrize("best_effort", [False, True])
def test_calls_of_tools_are_refused_where_they_are_not_enforced(best_effort: bool) -> None:
    """No text is looked at for them afterwards, so best effort changes nothing."""
    spec = ConstraintSpec("tools", '{"format": "hermes", "tools": [{"name": "f", "schema": {"type": "object"}}]}')
    hosted = Echo(["x"], capabilities=Capabilities("hosted", asks_again=True))
    with pytest.raises(ul.CapabilityError, match="calls of tools; run them on a Runtime"):
        lower(hosted, spec, allow_best_effort=best_effort)
