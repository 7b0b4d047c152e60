"""Operations inside of f-strings: said as if they stood in a sequence, readable elsewhere, refused when cut."""

import asyncio
import functools
import itertools
import json
import os
import textwrap
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import umbel as ul
from hypothesis import given
from hypothesis import strategies as st
from umbel.interpreter.backends.echo import Echo
from umbel.lang import ops
from umbel.lang.errors import ParameterError, ProgramError, TraceError, UmbelError
from umbel.lang.ops import ConstantText, Op, Sequence, expression, label_of

PATIENCE = 20.0
PICTURE = ul.image(b"bytes")

# Every operation that a program writes, and how it reads in text.
OPERATIONS: list[tuple[Callable[[], Op], str]] = [
    (lambda: ul.gen("x"), "gen('x')"),
    (lambda: ul.gen(), "gen()"),
    (lambda: ul.gen_int("n"), "gen('n')"),
    (lambda: ul.gen_string("t", max_tokens=4), "gen('t')"),
    (lambda: ul.gen("c", choices=["a", "b"]), "select('c')"),
    (lambda: ul.gen("o", dtype=list[int]), "gen('o')"),
    (lambda: ul.select("y", choices=["a", "b"]), "select('y')"),
    (lambda: ul.separate_reasoning(ul.gen("z")), "separate_reasoning(gen('z'))"),
    (lambda: PICTURE, "image(...)"),
    (lambda: ul.video(b"bytes", 2), "video(...)"),
    (lambda: ul.user("hi"), "user(...)"),
    (lambda: ul.system("hi"), "system(...)"),
    (lambda: ul.assistant(ul.gen("x")), "assistant(...)"),
    (ul.user_begin, "user_begin()"),
    (ul.assistant_end, "assistant_end()"),
    (lambda: "a" + ul.gen("x"), "'a' + gen('x')"),
]


@pytest.mark.parametrize(("make", "label"), OPERATIONS, ids=[label for _, label in OPERATIONS])
def test_every_operation_can_stand_in_text(make: Callable[[], Op], label: str) -> None:
    op = make()
    assert label_of(op) == label
    expected = "Q: " + op + "!"
    ways: list[Callable[[], object]] = [
        lambda: f"Q: {op}!",
        lambda: f"Q: {op!s}!",
        lambda: "Q: {}!".format(op),  # noqa: UP032
        lambda: "Q: %s!" % op,  # noqa: UP031
        lambda: "Q: " + str(op) + "!",
        lambda: "".join(["Q: ", str(op), "!"]),
        lambda: "Q: " + f"{op}" + ConstantText("!"),
        lambda: [f"Q: {op}", "!"],
        lambda: f"{'Q: ' + op}!",
        lambda: f"{f'Q: {op}'}!",
    ]
    for way in ways:
        assert expression(way()) == expected
    assert label in f"{op}"


def test_a_program_of_f_strings_is_the_program_of_sums() -> None:
    @ul.function
    def sums(s: ul.State, question: str) -> None:
        s += ul.system("Be brief.") + ul.user("Q: " + question + "?")
        s += ul.assistant("A:" + ul.gen("a", max_tokens=3) + " sure: " + ul.select("sure", ["yes", "no"]))
        forks = s.fork(2)
        forks += "\nmore " + ul.gen("b", max_tokens=2)
        forks.join("concate_and_append")
        s += ["\n", s["a"], ul.gen("c", max_tokens=2)]

    @ul.function
    def texts(s: ul.State, question: str) -> None:
        s += f"{ul.system('Be brief.')}{ul.user(f'Q: {question}?')}"
        s += ul.assistant(f"A:{ul.gen('a', max_tokens=3)} sure: {ul.select('sure', ['yes', 'no'])}")
        forks = s.fork(2)
        forks += f"\nmore {ul.gen('b', max_tokens=2)}"
        forks.join("concate_and_append")
        s += f"\n{s['a']}{ul.gen('c', max_tokens=2)}"

    @ul.function
    async def waiting(s: ul.AsyncState, question: str) -> None:
        s += f"{ul.system('Be brief.')}{ul.user(f'Q: {question}?')}"
        s.assistant(f"A:{ul.gen('a', max_tokens=3)} sure: {ul.select('sure', ['yes', 'no'])}")
        forks = s.fork(2)
        forks += lambda i: f"\nmore {ul.gen('b', max_tokens=2)}"
        forks.join("concate_and_append")
        await asyncio.sleep(0)
        s += f"\n{await s['a']}{ul.gen('c', max_tokens=2)}"

    def shown(program: Any, **options: Any) -> Any:
        state = program.run(question="why {x}", backend=Echo(lambda prompt: "one two three four"), **options)
        return {name: state[name] for name in state.variables()}, state.text(), state.messages()

    expected = shown(sums)
    assert shown(texts) == shown(waiting) == shown(texts.compile()) == expected
    assert "".join(texts.run(question="why", backend=Echo(), stream=True).text_iter())
    assert len(texts.run_batch([{"question": str(i)} for i in range(9)], backend=Echo(), num_threads=3)) == 9
    assert texts.run(question="why", backend=Echo()).explain_cache().calls


MANGLERS: list[Callable[[str], str]] = [
    lambda text: text.upper(),
    lambda text: text.title(),
    lambda text: text[:-3],
    lambda text: text[5:],
    lambda text: text[:12],
    lambda text: text.strip("! Qs:" + text[-2:]),
    lambda text: text.replace("x", "y"),
    lambda text: text.replace("_", "-"),
    lambda text: text.encode("ascii", "ignore").decode(),
    lambda text: json.dumps(text),
    lambda text: repr(text),
    lambda text: textwrap.fill(text.replace("(", "( "), 12),
    lambda text: text[::-1],
]


@pytest.mark.parametrize("mangle", MANGLERS)
def test_what_is_left_of_a_cut_operation_is_refused(mangle: Callable[[str], str]) -> None:
    with pytest.raises(ProgramError, match=r"s \+= "):
        expression(mangle(f"Q: {ul.gen('x')}!"))


def test_messages_stay_short_whatever_the_text_is() -> None:
    for text in (f"{ul.gen('x')}"[:4] + "y" * 100_000, "y" * 100_000 + f"{ul.gen('n' * 900)}"[9:]):
        with pytest.raises(ProgramError) as caught:
            expression(text)
        assert len(str(caught.value)) < 1000


def test_an_operation_is_said_once_and_in_its_thread() -> None:
    text = f"Q: {ul.gen('x')}"
    assert expression(text) == "Q: " + ul.gen("x")
    with pytest.raises(ProgramError, match=r"gen\('x'\), which was said before.*s \+= \.\.\.|said before"):
        expression(text)
    elsewhere: list[str] = []
    thread = threading.Thread(target=lambda: elsewhere.append(f"{ul.gen('x')}"))
    thread.start()
    thread.join()
    with pytest.raises(ProgramError, match="another thread"):
        expression(elsewhere[0])
    first = f"{ul.gen('first')}"
    for _ in range(ops.MOST_WAITING):
        str(ul.gen("more"))
    with pytest.raises(ProgramError, match="long ago"):
        expression(first)


def test_what_was_printed_and_comes_back_as_text_of_a_user_is_no_operation() -> None:
    shown = f"{ul.gen('x')}"
    assert expression(f"a{ul.gen('y')}") == "a" + ul.gen("y")
    expression(shown)
    for attack in (shown, f"hello {shown} there", shown.replace("'x'", "'y'"), shown.replace("_", "_1")):
        with pytest.raises(ProgramError):
            expression(attack)


@given(text=st.text())
def test_text_without_operations_stays_as_it_is(text: str) -> None:
    str(ul.gen("x"))  # from now on texts are searched
    assert expression(text) == ConstantText(text)


def test_characters_that_marks_are_made_of_are_no_operation() -> None:
    shown = f"{ul.gen('x')}"
    secret = {character for character in shown if ord(character) > 0xFFFF}
    assert secret
    for character in secret:
        assert expression(f"an icon {character} of a font") == ConstantText(f"an icon {character} of a font")
        assert ul.gen("y", stop=character).options["stop"]
    with pytest.raises(ProgramError):
        expression(shown.replace(secret.pop(), ""))


class Raising(Mapping[str, str]):
    """Every method of it raises."""

    def __getitem__(self, key: str) -> str:
        raise RuntimeError("code of the program")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("code of the program")

    def __len__(self) -> int:
        raise RuntimeError("code of the program")


class Endless(Raising):
    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())


class OwnList(list[str]):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("code of the program")


class OwnTuple(tuple[str, ...]):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("code of the program")


class OwnDict(dict[str, str]):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("code of the program")

    def items(self) -> Any:
        raise RuntimeError("code of the program")

    values = items


def test_the_search_for_operations_runs_no_code_of_the_values() -> None:
    str(ul.gen("x"))  # from now on texts are searched
    for harmless in (Raising(), Endless(), OwnList("ab"), OwnTuple("ab"), OwnDict(a="b")):
        ops.refuse_operations(harmless, "a value")
    for members in (OwnList([f"{ul.gen('y')}"]), OwnTuple([f"{ul.gen('y')}"]), OwnDict(a=f"{ul.gen('y')}")):
        with pytest.raises(ProgramError, match=r"holds gen\('y'\)"):
            ops.refuse_operations([members], "a value")


@pytest.mark.parametrize("run", ["run", "run_batch", "compiled", "stream"])
def test_options_of_a_run_hold_no_operations(run: str) -> None:
    @ul.function
    def asking(s: ul.State, question: str) -> None:
        s += question + ul.gen("a", max_tokens=4)

    made: list[dict[str, Any]] = [
        {"stop": f"{ul.gen('y')}"},
        {"stop": ["a", f"{ul.gen('y')}"]},
        {"sampling": {"stop": (f"{ul.gen('y')}",)}},
        {"salt": f"{ul.gen('y')}"},
    ]
    ways: dict[str, Callable[..., object]] = {
        "run": asking.run,
        "stream": functools.partial(asking.run, stream=True),
        "compiled": asking.compile().run,
        "run_batch": lambda question, **options: asking.run_batch([{"question": question}], **options),
    }
    for options in made:
        with pytest.raises(ProgramError, match=r"an option of the run holds gen\('y'\)"):
            ways[run](question="q", backend=Echo(), **options)


@pytest.mark.parametrize("specification", [">10", "d", " "])
def test_a_text_that_is_not_known_has_no_format(specification: str) -> None:
    with pytest.raises(ParameterError, match=r"gen\('x'\) has no format"):
        format(ul.gen("x"), specification)


def test_a_state_and_its_branches_are_no_text() -> None:
    @ul.function
    def program(s: ul.State, what: str) -> None:
        s += "a"
        forks = s.fork(2)
        values = {"state": s, "branch": forks[0], "forks": forks}
        assert repr(values[what]) in f"{values[what]}"
        s += f"so far: {values[what]}"

    for what in ("state", "branch", "forks"):
        with pytest.raises(ProgramError, match=r"a text holds <State.*write its text\(\)"):
            program.run(what=what, backend=Echo())
        with pytest.raises(UmbelError):
            program.trace(static_args={"what": what})


@pytest.mark.parametrize("write", [str, "so far: {}".format, "so far: %s".__mod__, lambda s: ", ".join([str(s)])])
def test_however_a_state_is_written_it_is_no_text(write: Callable[[object], str]) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += write(s)

    with pytest.raises(ProgramError, match=r"a text holds <State .*>, which is no text"):
        program.run(backend=Echo())


@pytest.mark.parametrize("write", [str, "Pick {}".format, "Pick %s".__mod__])
def test_the_expression_of_a_constraint_is_no_text(write: Callable[[object], str]) -> None:
    letters = ul.choice(["a", "b"])

    @ul.function
    def program(s: ul.State) -> None:
        s += ul.user(write(letters))

    with pytest.raises(ProgramError, match=r'Expression\(.*, which is no text; .*gen\("name", constraint=\.\.\.\)'):
        program.run(backend=Echo())
    assert repr(letters) in str(letters)


def test_an_expression_cannot_be_appended() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "q" + ul.regex("a")

    with pytest.raises(ul.ParameterError, match=r'it is a constraint: write gen\("name", constraint=\.\.\.\)'):
        program.run(backend=Echo())


def test_a_state_prints_as_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "a" + ul.gen("answer")

    state = program.run(backend=Echo(lambda prompt: "one"))
    print(state)
    print(f"so far: {state}")
    seen = capsys.readouterr().out
    shown_characters = "".join(character for character in seen if unicodedata.category(character) != "Cf")
    assert shown_characters == f"{state!r}\nso far: {state!r}\n"


PLACES: list[Callable[[str], object]] = [
    lambda text: ul.select("c", choices=["a", text]),
    lambda text: ul.gen("c", choices=["a", text]),
    lambda text: ul.gen(text),
    lambda text: ul.gen("x", stop=text),
    lambda text: ul.gen("x", stop=["a", text]),
    lambda text: ul.gen("x", regex=text),
    lambda text: ul.gen("x", json_schema={"enum": [text]}),
    lambda text: ul.gen("x", json_schema={"properties": {text: {}}}),
    lambda text: ul.gen("x", ebnf=text),
    lambda text: ul.image(text),
    lambda text: ul.video(text, 2),
]


@pytest.mark.parametrize("place", PLACES)
def test_an_operation_in_a_text_that_is_not_said_is_refused(place: Callable[[str], object]) -> None:
    with pytest.raises(ProgramError, match=r"holds gen\('y'\), which can only be said"):
        place(f"a{ul.gen('y')}")


def test_a_variable_is_no_operation() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s["x"] = ul.gen("y")  # type: ignore[assignment]  # wrong on purpose

    with pytest.raises(ProgramError, match=r"variable 'x' is an operation, which can only be said: s \+= \.\.\."):
        program.run(backend=ul.Echo())["x"]


def test_variables_and_arguments_of_graphs_hold_no_operations() -> None:
    @ul.function
    def assigning(s: ul.State) -> None:
        s["x"] = f"a{ul.gen('y')}"

    @ul.function
    def asking(s: ul.State, question: str) -> None:
        s += question + ul.gen("a")

    @ul.function
    def adding(s: ul.State, question: str) -> None:
        s += question + f" {ul.gen('y')}"

    with pytest.raises(ProgramError, match="variable 'x' holds"):
        assigning.run(backend=Echo())
    with pytest.raises(ProgramError, match="argument of a compiled program"):
        asking.compile().run(question=f"a{ul.gen('y')}", backend=Echo())
    with pytest.raises(TraceError, match=r"holds gen\('y'\)"):
        adding.trace()
    assert asking.run(question=f"a{ul.gen('y')}", backend=Echo())["y"] == "a"


def test_messages_show_operations_as_they_were_written() -> None:
    @ul.function
    def asking(s: ul.State) -> None:
        s += ul.gen("a")

    faults: list[Callable[[str], object]] = [
        lambda text: ul.gen("x", dtype=text),
        lambda text: asking.run(backend=Echo(), **{text: 1}),
        lambda text: asking.bind(**{text: 1}),
        lambda text: ul.gen("x", **{text: 1}),
    ]
    for fault in faults:
        with pytest.raises(ProgramError, match=r"a gen\('y'\)") as caught:
            fault(f"a {ul.gen('y')}")
        assert not ops.holds_operation(str(caught.value))
        assert "\\U0010" not in str(caught.value)


@pytest.mark.parametrize("healing", [True, False])
def test_advice_on_token_healing_fits_what_was_given(healing: bool) -> None:
    with pytest.raises(
        ParameterError, match=f"token_healing={healing} is for constrained text; leave it out"
    ) as caught:
        ul.gen("x", token_healing=healing)
    assert ("without a blank" in str(caught.value)) is healing


def test_a_wrong_score_names_its_choice() -> None:
    for wrong in (float("nan"), [float("nan")], ["x"], "x"):
        with pytest.raises(ParameterError, match=r"scores\['yes'\]"):
            Echo(scores={"no": -1.0, "yes": wrong})  # type: ignore[dict-item]


def test_a_printed_operation_reads_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    print(ul.gen("answer"), {str(ul.gen("key")): 1})
    shown = capsys.readouterr().out
    assert "gen('answer')" in shown
    assert "gen('key')" in shown
    assert "\n" not in f"{ul.gen(chr(10) * 3)}"
    assert len(f"{ul.user('x' * 10_000)}{ul.gen('n' * 1000)}") < 400


def test_a_forked_child_says_its_own_operations() -> None:
    text = f"{ul.gen('x')}"
    child = os.fork()
    if child == 0:
        os._exit(0 if isinstance(expression(text), Op) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(expression(text), Op)


def test_sequences_in_text_are_flat() -> None:
    op = expression(f"{ul.user(f'a{ul.gen()}')}b")
    assert isinstance(op, Sequence)
    assert not any(isinstance(member, Sequence) for member in op.ops)
