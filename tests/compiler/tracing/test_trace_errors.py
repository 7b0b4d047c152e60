"""What tracing refuses, each with the user's line and before anything runs."""

import os
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import umbel as ul

from .traces import refused, traced

# ------------------------------------------------------------------------------------------ what has to be known


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("regex", "gen() has argument 'q' inside"),
        ("stop", "gen() has argument 'q' inside"),
        ("name", "gen() has argument 'q' inside"),
        ("ebnf", "gen() has argument 'q' inside"),
        ("max_tokens", "argument 'q' stands where a value has to be known now: max_tokens must be an integer"),
        ("temperature", "argument 'q' stands where a value has to be known now: temperature must be a number"),
        ("n", "argument 'q' stands where a value has to be known now: n must be an integer"),
    ],
)
def test_options_of_gen_are_known(option: str, said: str) -> None:
    def program(s, q):
        s += ul.gen(**{option: q})  # here

    assert refused(program).startswith(said)


def test_a_schema_is_known() -> None:
    def program(s, q):
        s += ul.gen("x", json_schema={"type": "string", "const": q})  # here

    assert refused(program).startswith("gen() has argument 'q' inside")


def test_stops_are_known() -> None:
    def program(s, q):
        s += ul.gen("x", stop=["\n", f"{q}:"])  # here

    assert refused(program).startswith("gen() has argument 'q' inside")


def test_names_are_known() -> None:
    def read(s, q):
        s += ul.gen("x")
        s += s[q]  # here

    def assigned(s, q):
        s[f"{q}_x"] = 1  # here

    def asked(s, q):
        if q in s:  # here
            s += "!"

    def scoped(s, q):
        with s.var_scope(q):  # here
            s += "!"

    def selected(s, q):
        s += ul.select(q, ["a", "b"])  # here

    for program in (read, assigned, asked):
        assert refused(program).startswith("the name of a variable has argument 'q' inside")
    assert "argument 'q'" in refused(scoped)
    assert "argument 'q'" in refused(selected)


def test_how_many_branches_is_known() -> None:
    def program(s, n):
        s.fork(n)  # here

    assert refused(program) == (
        "argument 'n' stands where a value has to be known now: fork: size=<argument 'n'> is not an integer; write a "
        'number of branches from 1 to 16384. Write static_args={"n": ...} to trace for one value of it; or '
        "program.run(...) to run the program with the interpreter"
    )
    assert len(traced(program, n=3).streams) == 1 + 3


def test_roles_are_known() -> None:
    def program(s, q):
        s += ul.role(q, "hi")  # here

    assert "argument 'q'" in refused(program)


# ------------------------------------------------------------------------------------------ what a graph is not


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda s: s.get_meta_info("x"), "get_meta_info() tells of a call"),
        (lambda s: s.meta("x"), "get_meta_info() tells of a call"),
        (lambda s: s.messages(), "messages() has the text of a run"),
        (lambda s: s.usage, "the cost of a run"),
        (lambda s: s.cost, "the cost of a run"),
        (lambda s: s.error(), "the error of a state"),
        (lambda s: s.cancel(), "cancel() stops a run"),
        (lambda s: list(s.text_iter("x")), "the pieces of a text come while it runs"),
        (lambda s: s.text_async_iter("x").__anext__(), "the pieces of a text come while it runs"),
    ],
)
def test_what_only_a_run_has(ask: Any, said: str) -> None:
    def program(s):
        s += ul.gen("x")
        ask(s)

    with pytest.raises(ul.TraceError) as caught:
        ul.function(program).trace()
    message = str(caught.value)
    assert message.startswith(f"{__file__}:")
    assert f": {said}, and a graph is none. Write " in message
    assert "program.run(...)" in message


async def _awaited(s: Any, what: str) -> Any:
    return await getattr(s, what)(*(["x"] if what == "meta" else []))


@pytest.mark.parametrize("what", ["meta", "messages", "error"])
def test_what_only_a_run_has_in_async_programs(what: str) -> None:
    async def program(s):
        s += ul.gen("x")
        await _awaited(s, what)

    with pytest.raises(ul.TraceError, match="and a graph is none"):
        ul.function(program).trace()


# ------------------------------------------------------------------------------------------ generators and results


def test_generators() -> None:
    def appended(s):
        s += (str(n) for n in range(3))

    def returned(s):
        return (str(n) for n in range(3))

    with pytest.raises(ul.ParameterError, match="cannot append generator") as caught:
        ul.function(appended).trace()
    assert any(f"{__file__}:{appended.__code__.co_firstlineno + 1}" in note for note in caught.value.__notes__)
    with pytest.raises(ul.TraceError, match=r"what the program returns has a generator in it, which is read once"):
        ul.function(returned).trace()
    with pytest.raises(ul.TraceError, match=r"static_args\['n'\] is a map, which is read once"):
        ul.function(lambda s, n: None).trace(static_args={"n": map(str, [1])})


def test_a_state_is_no_result() -> None:
    for result in (lambda s: s, lambda s: s.fork(2), lambda s: {"s": s}):
        with pytest.raises(ul.TraceError, match="state"):
            ul.function(result).trace()


@dataclass
class Answer:
    text: str


class Record(msgspec.Struct):
    text: str


class Plain:
    def __init__(self, text: str) -> None:
        self.text = text


@pytest.mark.parametrize("wrap", [Answer, Record, Plain, lambda q: UserDict(a=[q]), lambda q: {f"a{q}": 1}])
def test_symbols_hidden_in_objects(wrap: Any) -> None:
    def returned(s, q):
        return [wrap(q)]

    def assigned(s, q):
        s["x"] = wrap(q)

    for program in (returned, assigned):
        with pytest.raises(ul.TraceError, match="has argument 'q' inside"):
            ul.function(program).trace()


def test_a_value_that_refers_to_itself() -> None:
    def program(s, q):
        value: list[Any] = [q]
        value.append(value)
        s["x"] = value

    with pytest.raises(ul.TraceError, match="nested more than 64 deep"):
        ul.function(program).trace()


# ------------------------------------------------------------------------------------------ errors of the program


def test_a_refusal_that_is_caught_is_raised_all_the_same() -> None:
    """Else a program that guards its reads would be traced without what it does there."""

    def program(s):
        s += ul.gen("n")
        try:
            number = int(s["n"])  # here
        except Exception:
            number = 0
        s += f"{number}"

    assert refused(program).startswith("int() looks at variable 'n'")


def test_errors_of_the_program_stay_what_they_are() -> None:
    class OwnError(Exception):
        pass

    def program(s, q):
        raise OwnError("of the program")

    with pytest.raises(OwnError, match="of the program") as caught:
        ul.function(program).trace()
    line = f"{__file__}:{program.__code__.co_firstlineno + 1}"
    assert caught.value.__notes__ == [f"{line}, while program was traced: arguments and variables are symbols then"]


def test_nothing_is_recorded_of_a_sequence_that_is_wrong() -> None:
    def program(s):
        try:
            s += "a" + ul.gen("x") + ul.user_end()
        except ul.ProgramError:
            s += "b"

    assert len(traced(program).streams[0]) == 2


def test_an_error_that_has_a_placeholder_in_it_names_the_argument() -> None:
    def program(s, path):
        s += os.listdir(path)  # here

    assert refused(program).startswith(
        "argument 'path' stands where a value has to be known now: [Errno 2] No such file"
    )
