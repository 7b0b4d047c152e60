"""Constrained gens as a program sees them: text, object, facts, and what is refused before anything is asked."""

import asyncio
import dataclasses
import datetime
import importlib.util
import traceback
import typing
from typing import Any, Literal

import msgspec
import pydantic
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.interpreter.guarantees import schemas
from umbel.lang.protocol import Capabilities, Completion, ConstraintSpec, Final, FinishReason, GenRequest, Usage
from umbel.srt.in_process import LocalBackend

from .conftest import PATIENCE


@dataclasses.dataclass
class Person:
    name: str
    age: int


class Careless(Echo):
    """Gives completions that a test wrote."""

    def __init__(self, *completions: Completion) -> None:
        super().__init__()
        self._given = completions

    async def generate(self, request: GenRequest) -> Any:
        yield Final(request.id, self._given, Usage())


@ul.function
def typed(s):
    s += "Who? " + ul.gen("person", json_schema=Person)
    s += " " + ul.gen_int("count") + " " + ul.gen_string("word") + ul.gen("maybe", dtype=bool)
    s += ul.gen("letters", regex="[ab]+") + ul.select("choice", choices=["x", "y"])
    s["own"] = [1, 2]


ANSWERS = ['{"name": "Bo", "age": 3}', "42\nyears", '"a \\"b\\""', "True", "abba"]


def test_a_variable_is_text_and_its_value_the_object() -> None:
    state = typed.run(backend=Echo(ANSWERS, scores={"x": -0.1, "y": -1.0}), timeout=PATIENCE)
    assert state["person"] == ANSWERS[0]
    assert state.value("person") == Person("Bo", 3)
    assert state.value("person") is not state.value("person")
    assert (state["count"], state.value("count")) == ("42", 42)
    assert (state["word"], state.value("word")) == (ANSWERS[2], 'a "b"')
    assert (state["maybe"], state.value("maybe")) == ("True", True)
    assert state.value("letters") == state["letters"] == "abba"
    assert (state.value("choice"), state.value("own")) == ("x", [1, 2])
    assert state.text() == f"Who? {ANSWERS[0]} 42 {ANSWERS[2]}Trueabbax"


def test_an_async_program_awaits_values() -> None:
    @ul.function
    async def program(s):
        s += ul.gen("n", dtype=int)
        return await s.value("n") + 1

    async def main() -> None:
        state = await program.run_async(backend=Echo(["41"]), timeout=PATIENCE)
        assert (state.ret_value, await state.value("n", timeout=PATIENCE)) == (42, 41)

    asyncio.run(main())


def test_values_of_several_continuations_and_of_branches_are_lists() -> None:
    @ul.function
    def program(s):
        s += ul.gen("both", n=2, dtype=int)
        forks = s.fork(3)
        forks += [ul.gen("size", dtype=float), ul.gen("size", dtype=Literal["big"]), "nothing"]
        forks.join()

    state = program.run(backend=Echo(["1", "2", "0.5", "big"]), timeout=PATIENCE)
    assert state.value("both") == [1, 2]
    assert sorted(map(str, state.value("size"))) == ["0.5", "None", "big"]
    assert state.value("size")[2] is None
    assert state["size"][2] is None


def test_thinking_is_taken_off_before_a_value_is_read() -> None:
    @ul.function
    def program(s):
        s += ul.separate_reasoning(ul.gen("n", regex=r"<think>\w*</think>\d+"))

    state = program.run(backend=Echo(["<think>hm</think>7"]), timeout=PATIENCE)
    assert (state.value("n"), state["n_reasoning_content"]) == ("7", "hm")


def test_the_request_carries_what_the_gen_demands() -> None:
    echo = Echo(["{}", "a"])

    @ul.function
    def program(s):
        s += ul.gen("x", json_schema={"type": "object"}, json_whitespace="compact", token_healing=False) + ul.gen("y")

    program.run(backend=echo, timeout=PATIENCE).sync()
    first, second = echo.requests
    assert isinstance(first, GenRequest)
    assert isinstance(second, GenRequest)
    assert first.constraint == ConstraintSpec("json_schema", '{"type": "object"}', "compact")
    assert first.token_healing is False
    assert (second.constraint, second.token_healing) == (None, None)


def test_facts_say_that_the_text_was_enforced() -> None:
    facts = typed.run(backend=Echo(ANSWERS), timeout=PATIENCE).meta("count")
    assert (facts["guarantee"], facts["forced_tokens"], facts["finish_reason"]) == ("enforced", 0, "stop")


def test_an_unconstrained_gen_has_no_guarantee(echo: Echo) -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")

    assert "guarantee" not in program.run(backend=echo, timeout=PATIENCE).meta("x")


# --------------------------------------------------------------------------------- what goes wrong


@ul.function
def ask(s, **options):
    s += "before" + ul.gen("first", regex=".*") + ul.gen("x", **options)


@pytest.mark.parametrize(
    ("options", "answer", "problem"),
    [
        ({"regex": "[ab]+"}, "abc", r"answer 'abc' does not match regex '\[ab\]\+' as a whole"),
        ({"dtype": int}, "about 7", "does not match"),
        ({"json_schema": Person}, "hello", "is no JSON"),
        ({"json_schema": Person}, '{"name": "Bo", "age": "3"}', r'not of the schema: \$\.age: "3" is not of type'),
        ({"json_schema": {"enum": ["a"]}, "stop": ","}, '"a,', "is no JSON"),
    ],
)
def test_an_echo_that_breaks_the_constraint_is_reported(options: dict[str, Any], answer: str, problem: str) -> None:
    state = ask.run(backend=Echo(["ok", answer]), timeout=PATIENCE, **options)
    with pytest.raises(ul.RequestError, match=problem) as raised:
        state.value("x")
    assert "".join(traceback.format_exception(raised.value)).count(str(raised.value)) == 1
    assert state["first"] == "ok"  # what was known stays readable


def test_a_refused_constraint_leaves_other_variables_readable() -> None:
    state = ask.run(backend=Echo(["ok", "never"]), timeout=PATIENCE, regex="(a")
    with pytest.raises(ul.ConstraintError, match=r"\(a"):
        state["x"]
    assert state["first"] == "ok"


@pytest.mark.parametrize(
    ("options", "offered", "problem"),
    [
        ({"regex": "a"}, ("json_schema",), "a small model does not enforce regex= and dtype="),
        ({"json_schema": {}}, ("regex",), "does not enforce json_schema= and dtype="),
        ({"ebnf": "start: x"}, ("regex", "json_schema"), "does not enforce ebnf= and grammar="),
        ({"stop_regex": "a"}, ("regex",), "has no stop_regex; write stop="),
    ],
)
def test_what_a_backend_does_not_enforce_is_refused_before_any_call(
    options: dict[str, Any], offered: tuple[Any, ...], problem: str
) -> None:
    echo = Echo(capabilities=Capabilities("a small model", constraints=offered))

    @ul.function
    def program(s):
        s += ul.gen("x", **options)

    with pytest.raises(ul.CapabilityError, match=problem):
        program.run(backend=echo, timeout=PATIENCE)["x"]
    assert echo.calls == 0


def test_a_cut_text_has_no_value_and_says_why() -> None:
    @ul.function
    def program(s):
        s += ul.gen("x", json_schema=Person, max_tokens=3)

    state = program.run(backend=Echo(ANSWERS), timeout=PATIENCE)
    assert ANSWERS[0].startswith(state["x"])
    with pytest.raises(ul.ResultError, match="'x' holds no Person, for it was cut off after 3 tokens"):
        state.value("x")


class Even(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def check(cls, n: int) -> int:
        if n % 2:
            raise ValueError("an odd number")
        return n


@dataclasses.dataclass
class Half:
    n: int

    def __post_init__(self) -> None:
        assert self.n % 2 == 0, "an odd number"


class Row(typing.NamedTuple):
    x: int


class Plain(pydantic.BaseModel):
    """No code that refuses: limits, defaults, serializers and private attributes are none."""

    kind: Literal["a", "b"] = "a"
    type: typing.Annotated[int, pydantic.Field(ge=1)] = 1
    values: dict[str, list[float | None]] = {}
    rows: list[tuple[int, str]] = []
    inner: "Plain | None" = None
    _kept: int = 3

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        return 2 * self.type

    @pydantic.field_serializer("kind")
    def written(self, kind: str) -> str:
        return kind


class Holding(pydantic.BaseModel):
    inner: list[Even]


class Marked(pydantic.BaseModel):
    n: typing.Annotated[int, pydantic.AfterValidator(abs)]


class Ready(pydantic.BaseModel):
    n: int
    _kept: int = 3

    def model_post_init(self, context: Any) -> None:
        assert self.n % 2 == 0, "an odd number"


class Whole(pydantic.BaseModel):
    n: int

    @pydantic.model_validator(mode="after")
    def check(self) -> "Whole":
        return self


class Made(pydantic.BaseModel):
    n: int

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)


class Stripped(pydantic.BaseModel, str_strip_whitespace=True):
    name: typing.Annotated[str, pydantic.Field(min_length=1)]


class Dated(pydantic.BaseModel):
    day: datetime.date


class Keyed(pydantic.BaseModel):
    by_number: dict[int, str]


class Struct(msgspec.Struct):
    kind: Literal["a"]
    rows: list[tuple[int, str]]
    values: dict[str, typing.Annotated[int, msgspec.Meta(ge=1)] | None]
    inner: "Struct | None" = None


class HalfStruct(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError("an odd number")


class HoldingStruct(msgspec.Struct):
    inner: list[HalfStruct]


class DatedStruct(msgspec.Struct):
    day: datetime.date | None


@ul.function
def even(s: ul.State, kind: type, **options: Any) -> None:
    s += ul.user("Well?") + ul.assistant("It is " + ul.gen("x", json_schema=kind, **options))


@ul.function
def even_text(s: ul.State, kind: type, **options: Any) -> None:
    s += "Well? " + ul.gen("x", dtype=kind, **options)


@pytest.mark.parametrize("program", [even, even_text])
@pytest.mark.parametrize("kind", [Even, Half, list[Even], Even | None])
@pytest.mark.parametrize("enforced", [True, False])
def test_a_text_that_its_class_refuses_is_asked_for_again(program: ul.Program, kind: Any, enforced: bool) -> None:
    texts = ['{"n": 3}', '{"n": 5}', '{"n": 4}']
    texts = [f"[{text}]" for text in texts] if kind == list[Even] else texts
    hosted = Capabilities("hosted", asks_again=True)
    echo = Echo(texts, capabilities=None if enforced else hosted)
    state = program.run(kind=kind, backend=echo, temperature=0, timeout=PATIENCE)
    assert state["x"] == texts[-1]
    assert (state.value("x")[0] if kind == list[Even] else state.value("x")).n == 4
    facts = state.meta("x")
    assert (facts["guarantee"], facts["tries"]) == ("enforced" if enforced else "validated", 3)
    assert facts["prompt_tokens"] == state.usage.prompt_tokens
    assert state.usage.calls == echo.calls == 3
    first, second, third = (request for request in echo.requests if isinstance(request, GenRequest))
    assert [request.constraint is not None for request in (first, second, third)] == [enforced] * 3
    assert "an odd number" not in prompt_text(first.prompt)
    assert "an odd number" in prompt_text(second.prompt)
    assert "pydantic.dev" not in prompt_text(second.prompt)
    assert texts[1] in prompt_text(third.prompt)
    assert "odd" not in state.text()  # the state is as if the last text had been said at once


@pytest.mark.parametrize("capabilities", [None, Capabilities("hosted", asks_again=True)])
def test_a_class_that_accepts_nothing_is_an_error_or_kept(capabilities: Capabilities | None) -> None:
    def refusing() -> Echo:
        return Echo(lambda prompt: '{"n": 3}', capabilities=capabilities)

    echo = refusing()
    state = even.run(kind=Even, max_tries=2, backend=echo, timeout=PATIENCE)
    with pytest.raises(ul.GuaranteeError, match=r"'x' that satisfies its type Even in 2 tries.*an odd number"):
        state["x"]
    assert echo.calls == state.usage.calls == 2
    state = even.run(kind=Even, max_tries=1, allow_best_effort=True, backend=refusing(), timeout=PATIENCE)
    assert state["x"] == '{"n": 3}'
    facts = state.meta("x")
    assert (facts["guarantee"], facts["tries"]) == ("best_effort", 1)
    assert facts["violations"] == ["Even refuses it: n: Value error, an odd number"]
    with pytest.raises(ul.ResultError, match="an odd number"):
        state.value("x")


def test_continuations_are_asked_for_again_one_by_one() -> None:
    echo = Echo([['{"n": 2}', '{"n": 3}', '{"n": 4}'], '{"n": 6}'])
    state = even.run(kind=Even, n=3, backend=echo, timeout=PATIENCE)
    assert [value.n for value in state.value("x")] == [2, 6, 4]
    assert [facts["tries"] for facts in state.meta("x")] == [1, 2, 1]


def test_a_text_that_was_cut_is_not_put_to_its_class() -> None:
    echo = Echo(['{"n": 3}'])
    state = even.run(kind=Even, max_tokens=2, backend=echo, timeout=PATIENCE)
    assert state.meta("x")["guarantee"] == "incomplete"
    assert echo.calls == 1


def test_a_fault_of_the_class_is_raised_where_the_value_is_read() -> None:
    @dataclasses.dataclass
    class Broken:
        n: int

        def __post_init__(self) -> None:
            raise KeyError("missing")

    state = even.run(kind=Broken, backend=Echo(['{"n": 3}']), timeout=PATIENCE)
    assert state["x"] == '{"n": 3}'
    with pytest.raises(KeyError, match="missing"):
        state.value("x")


@pytest.mark.parametrize(
    ("kind", "judges"),
    [
        (Even, True), (Half, True), (dict[str, Even], True), (tuple[int, Half], True), (datetime.date, True),
        (Person, False), (list[int], False), (int, False), (Literal["a"], False), (Row, False),
        (Plain, False), (Struct, False), (list[Plain], False),
        (Holding, True), (Marked, True), (Ready, True), (Whole, True), (Made, True), (Stripped, True), (Dated, True),
        (Keyed, True), (HalfStruct, True), (HoldingStruct, True), (DatedStruct, True),
    ],
)  # fmt: skip
def test_only_types_with_code_of_their_own_judge_what_satisfies_their_schema(kind: Any, judges: bool) -> None:
    result = ul.gen("x", dtype=kind).result
    assert result is not None
    assert result.judges is judges


@pytest.mark.parametrize("kind", [Plain, Struct])
def test_a_class_without_code_streams_piece_by_piece(kind: type) -> None:
    text = '{"kind": "a", "rows": [], "values": {}}'
    state = even.run(kind=kind, backend=Echo([text]), stream=True, timeout=PATIENCE)
    assert len(list(state.text_iter("x"))) > 1
    assert isinstance(state.value("x"), kind)


def test_an_estimate_puts_made_up_answers_to_no_class() -> None:
    assert even.estimate(kind=Even, backend=Echo()).calls == 1


def test_a_graph_asks_again_and_is_not_shipped() -> None:
    echo = Echo(['{"n": 3}', '{"n": 4}'])
    compiled = even.compile(static_args={"kind": Even})
    state = compiled.run(backend=echo, timeout=PATIENCE)
    assert (state.value("x").n, state.meta("x")["tries"]) == (4, 2)
    local = LocalBackend()
    with pytest.raises(ul.GraphError, match=r"may refuse what was generated.*server=False"):
        even.compile(static_args={"kind": Even}, server=True).run(backend=local, timeout=PATIENCE)


def test_on_a_runtime_a_refused_text_is_asked_for_again() -> None:
    """The oracle's text depends on all of its prompt: told that it is wrong, or drawn anew, it says something else."""
    seen: list[str] = []

    class Unlike(pydantic.BaseModel):
        n: int

        @pydantic.model_validator(mode="after")
        def check(self) -> "Unlike":
            seen.append(str(self.n))
            if self.n == int(seen[0]):
                raise ValueError("that was said before")
            return self

    state = even.run(kind=Unlike, max_tries=10, temperature=0, backend=LocalBackend(), timeout=PATIENCE)
    assert state.meta("x")["guarantee"] == "enforced"
    assert state.meta("x")["tries"] == state.usage.calls > 1
    assert str(state.value("x").n) != seen[0]


def test_speculation_gives_no_text_that_its_class_refuses() -> None:
    @ul.function(num_api_spec_tokens=64)
    def card(s: ul.State) -> None:
        s += "A: " + ul.gen("a", stop="\n") + "\nB: " + ul.gen("b", dtype=Even) + "\nC: " + ul.gen("c", stop="\n")

    script = {"A: ": 'one\nB: {"n": 3}\nC: two\n', "B: ": '{"n": 4}', "C: ": "three\n"}
    echo = Echo(script, capabilities=Capabilities("hosted", asks_again=True, speculation=True))
    state = card.run(backend=echo, timeout=PATIENCE)
    assert (state["a"], state.value("b").n) == ("one", 4)


def test_a_backend_that_does_not_say_it_enforced_is_not_believed() -> None:
    completion = Completion("a", (1,), 1, "", FinishReason.STOP)
    with pytest.raises(ul.BackendError, match="did not enforce the json_schema"):
        unenforced.run(backend=Careless(completion), timeout=PATIENCE)["x"]


@pytest.mark.parametrize(
    ("options", "completion", "guarantee"),
    [
        ({"regex": "a+b"}, Completion("aa", (1,), 1, "", FinishReason.STOP, ","), "incomplete"),
        ({"regex": "a+b"}, Completion("aa", (1,), 1, "", FinishReason.LENGTH), "incomplete"),
        ({"dtype": int}, Completion("7", (1,), 1, "", FinishReason.STOP, "\n"), "enforced"),
        ({"dtype": int}, Completion("7", (1,), 1, "", FinishReason.STOP, "7"), "incomplete"),
        ({"regex": "7"}, Completion("7", (1,), 1, "", FinishReason.STOP, 2, guarantee="enforced"), "enforced"),
    ],
)
def test_a_text_that_ended_early_is_incomplete(options: dict[str, Any], completion: Completion, guarantee: str) -> None:
    @ul.function
    def program(s):
        s += ul.gen("x", **options)

    assert program.run(backend=Careless(completion), timeout=PATIENCE).meta("x")["guarantee"] == guarantee


# ------------------------------------------------------------------------------------ what was left over

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@ul.function
def unenforced(s):
    s += ul.gen("x", json_schema=UNIQUE, allow_unenforced=True)


def answer(text: str) -> Careless:
    left_over = (("uniqueItems", "#/uniqueItems"),)
    return Careless(
        Completion(text, (1,), 1, "", FinishReason.STOP, guarantee="enforced", unenforced=left_over, forced_tokens=2)
    )


def test_what_was_not_enforced_is_validated_and_reported() -> None:
    state = unenforced.run(backend=answer("[1, 2]"), timeout=PATIENCE)
    facts = state.meta("x")
    assert facts["guarantee"] == "validated"
    assert facts["unenforced"] == [("uniqueItems", "#/uniqueItems")]
    assert facts["violations"] == []
    assert facts["forced_tokens"] == 2
    assert state.value("x") == [1, 2]


def test_a_violation_is_told_and_has_no_value() -> None:
    state = unenforced.run(backend=answer("[1, 1]"), timeout=PATIENCE)
    assert state["x"] == "[1, 1]"
    assert state.meta("x")["guarantee"] == "violated"
    with pytest.raises(ul.ResultError, match=r"\$: \[1,1\] has non-unique elements"):
        state.value("x")


def test_without_the_validator_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jsonschema_rs" else found(name)
    )
    echo = Echo(["[1]"])
    with pytest.raises(ul.MissingExtraError, match="jsonschema-rs"):
        unenforced.run(backend=echo, timeout=PATIENCE)["x"]
    assert echo.calls == 0


def test_references_to_elsewhere_are_never_fetched() -> None:
    found = schemas.violations('{"$ref": "http://127.0.0.1:9/schema.json"}', "1")
    assert len(found) == 1
    assert "cannot be applied" in found[0]
    assert schemas.violations("{}", "{") == [
        "the text is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    ]


def test_only_the_first_violations_are_told() -> None:
    schema = '{"items": {"type": "string"}}'
    assert len(schemas.violations(schema, str(list(range(50))))) == schemas.MOST
