"""Looks at symbols are refused, with the line and what to write instead."""

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.operations import STR_METHODS

from .traces import refused, said, traced

# ------------------------------------------------------------------------------------------ what is refused

LOOKS: dict[str, Callable[[Any], Any]] = {
    "==": lambda q: q == "a",
    "== from the left": lambda q: "a" == q,  # noqa: SIM300
    "!=": lambda q: q != "a",
    "<": lambda q: q < "a",
    ">=": lambda q: "a" >= q,  # noqa: SIM300
    "in": lambda q: "a" in q,
    "in a list": lambda q: q in ["a", "b"],
    "in a dict": lambda q: q in {"a": 1},
    "a key": lambda q: {"a": 1}.get(q),
    "a member": lambda q: {q},
    "hash": hash,
    "len": len,
    "bool": bool,
    "not": lambda q: not q,
    "and": lambda q: q and "x",
    "for": lambda q: [character for character in q],  # noqa: C416
    "list": list,
    "unpacking": lambda q: [*q],
    "two names": lambda q: (lambda a, b: a)(*q),
    "sorted": lambda q: sorted([q, "a"]),
    "max": lambda q: max("a", q),
    "reversed": lambda q: list(reversed(q)),
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "floor": math.floor,
    "range": range,
    "an index": lambda q: [1, 2][q],
    "a slice": lambda q: "abc"[:q],
    "a slice of it": lambda q: q[: len("abc") if True else 0][q:],
    "a computed key": lambda q: q[f"{q}"],
    "a float as key": lambda q: q[1.5],
    "+ 1": lambda q: q + 1,
    "1 +": lambda q: 1 + q,
    "-": lambda q: q - 1,
    "2 **": lambda q: 2**q,
    "/": lambda q: q / 2,
    "* itself": lambda q: q * q,
    "* 1.5": lambda q: q * 1.5,
    "-q": lambda q: -q,
    "template %": lambda q: q % 3,
    "% of two": lambda q: "%s %s" % q,  # noqa: UP031
    "%d": lambda q: "%d" % q,  # noqa: UP031
    "an attribute": lambda q: q.title_of_it,
    "a computed format": lambda q: f"{q:{q}}",
    "a method of two": lambda q: q.replace("a", q),
    "pickle": pickle.dumps,
    "re": lambda q: re.search("[0-9]+", q),
    "re.sub": lambda q: re.sub("[0-9]+", "", f"{q}!"),
    "json.loads": json.loads,
    "json.dumps": lambda q: json.dumps({"q": q}),
    "match on a value": lambda q: _matched(q),
}


def _matched(q: Any) -> int:
    match q:
        case "a":
            return 1
        case _:
            return 2


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_looks_are_refused(look: Callable[[Any], Any]) -> None:
    def program(s, q):
        look(q)

    with pytest.raises(ul.TraceError) as caught:
        ul.function(program).trace()
    message = str(caught.value)
    assert message.startswith(f"{__file__}:")
    assert "argument 'q'" in message
    assert 'static_args={"q": ...}' in message
    assert "program.run(...)" in message


KEPT = {
    *STR_METHODS, "join", "__add__", "__class__", "__delattr__", "__dir__", "__doc__", "__format__", "__getattribute__",
    "__getitem__", "__getnewargs__", "__getstate__", "__init__", "__init_subclass__", "__mul__", "__new__",
    "__reduce__", "__repr__", "__rmod__", "__rmul__", "__setattr__", "__sizeof__", "__str__", "__subclasshook__",
}  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "__contains__": ("a",), "__mod__": (1,), "__reduce_ex__": (2,), "count": ("a",), "endswith": ("a",), "find": ("a",),
    "format_map": ({},), "index": ("a",), "partition": ("a",), "rfind": ("a",), "rindex": ("a",), "rpartition": ("a",),
    "startswith": ("a",), "translate": ({},), "maketrans": ("a", "b"),
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), ("a",)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(dir(str)) - KEPT))
@pytest.mark.sampled(5)
def test_every_other_method_of_a_string_is_a_look(name: str) -> None:
    """So that a new one of a later Python is not forgotten."""

    def program(s, q):
        getattr(q, name)(*ARGUMENTS.get(name, ()))  # here

    assert "looks at argument 'q'" in refused(program)


def test_looks_at_variables_have_no_static_argument() -> None:
    def program(s):
        s += ul.gen("x")
        if s["x"].strip() == "yes":  # here
            s += "!"

    assert refused(program) == (
        "== looks at variable 'x', which is known only when the program runs; a graph does the same for every value. "
        "Write program.run(...) to run the program with the interpreter"
    )


def test_a_look_at_a_text_of_two_names_both() -> None:
    def program(s, q):
        s += ul.gen("x")
        return len("a" + q + s["x"])  # here

    assert refused(program).startswith("len() looks at argument 'q' and variable 'x'")


def test_the_default_is_what_to_write() -> None:
    def program(s, n=3):
        for _ in range(n):  # here
            s += ul.gen("x")

    assert 'Write static_args={"n": 3} to trace' in refused(program)


@pytest.mark.parametrize(
    "look",
    [
        len, bool, int, str.upper, lambda o: o == 1, lambda o: o + 1, lambda o: 1 + o, lambda o: o.name,
        lambda o: o < 3, lambda o: [*o], lambda o: {o: 1}, lambda o: o * 2, range, lambda o: "a" + o, lambda o: o[o],
    ],
)  # fmt: skip
def test_looks_at_objects_are_refused(look: Callable[[Any], Any]) -> None:
    def program(s):
        s += ul.gen("n", dtype=int)
        look(s.value("n"))

    with pytest.raises((ul.TraceError, TypeError)) as caught:
        ul.function(program).trace()
    assert "variable 'n'" in str(caught.value) or look is str.upper


def test_an_object_has_to_be_made_text_first() -> None:
    """As in the interpreter, where it is a number."""

    def program(s):
        s += ul.gen("n", dtype=int)
        s += s.value("n")

    with pytest.raises(ul.ParameterError, match="write a string"):
        ul.function(program).trace()


# ------------------------------------------------------------------------------------------ texts with a symbol inside

PATTERN = re.compile("[0-9]")
INSIDE: dict[str, Callable[[Any], Any]] = {
    "len": lambda q: len(f"Q: {q}"),
    "max": lambda q: max(f"a{q}", "b"),
    "a key": lambda q: {"xa": "A"}.get(f"x{q}", "none"),
    "a place": lambda q: ["xa"].index(f"x{q}"),
    "==": lambda q: f"[{q}]" == "[a]",
    "!=": lambda q: f"[{q}]" != "[a]",
    "in": lambda q: "w" in f"[{q}]",
    "in a list": lambda q: f"x{q}" in ["xa", "b"],
    "part of a text": lambda q: f"x{q}" in "xa, xb",
    "format": lambda q: "a {}".format(q) == "a b",  # noqa: UP032
    "%": lambda q: "a %s %s" % (q, q) == "a b c",  # noqa: UP031
    "startswith": lambda q: " one".startswith(q),
    "startswith of several": lambda q: " one".startswith(("x", q)),
    "startswith of a method": lambda q: " one".startswith(q.strip()),
    "endswith": lambda q: " one".endswith(q),
    "count": lambda q: "abcb".count(q),
    "find": lambda q: "abcb".find(q),
    "replace": lambda q: "a,b".replace(q, "-"),
    "strip": lambda q: "abc".strip(q),
    "split": lambda q: "a,b,c".split(q),
    "a method of str": lambda q: str.find("abc", q),
    "str.startswith": lambda q: str.startswith(q, "a"),
    "the end": lambda q: f"abc{q}".endswith("z"),
    "a long beginning": lambda q: f"abc{q}".startswith("abcd"),
    "a place in it": lambda q: f"abc{q}".find("z"),
    "how often": lambda q: f"ab\n{q}".count("\n"),
    "a prefix": lambda q: f"A {q}".removeprefix("A zz"),
    "stripped of a dot": lambda q: f"{q}.".rstrip("."),
    "split at a word": lambda q: f"A {q}".split("END"),
    "a word replaced": lambda q: f"A {q}".replace("foo", "bar"),
    "padded": lambda q: f"{q}:".ljust(20),
    "digits": lambda q: f"1{q}".isdigit(),
    "a compiled expression": lambda q: PATTERN.search(f"a{q}"),
}


@pytest.mark.parametrize("look", INSIDE.values(), ids=INSIDE)
@pytest.mark.sampled(4)
def test_looks_at_texts_that_hold_a_symbol_are_refused(look: Callable[[Any], Any]) -> None:
    def program(s, q):
        look(q)

    with pytest.raises(ul.TraceError, match="looks at argument 'q', which is known only when") as caught:
        ul.function(program).trace()
    assert str(caught.value).startswith(f"{__file__}:")


def test_looks_at_texts_that_a_name_stands_for_are_refused() -> None:
    def measured(s, q):
        text = f"Q: {q}"
        if len(text) > 50:  # here
            text = "LONG"
        s += text

    def compared(s, q):
        text = f"a{q}"
        s += text
        if text == "ab":  # here
            s += "!"

    def answer(s):
        s += ul.gen("x")
        given = s["x"]
        if " one".startswith(given):  # here
            s += "!"

    def branch(s):
        forks = s.fork(2)
        forks += ul.gen("x")
        if "one".endswith(forks[0]["x"]):  # here
            s += "!"

    async def awaited(s):
        s += ul.gen("x")
        if "one".startswith(await s["x"]):  # here
            s += "!"

    def number(s):
        s += ul.gen("n", dtype=int)
        if f"n{s.value('n')}" == "n3":  # here
            s += "!"

    for program, named in (
        (measured, "len() looks at argument 'q'"),
        (compared, "== looks at argument 'q'"),
        (answer, ".startswith() looks at variable 'x'"),
        (branch, ".endswith() looks at variable 'x'"),
        (awaited, ".startswith() looks at variable 'x'"),
        (number, "== looks at variable 'n'"),
    ):
        assert refused(program).startswith(named)


def test_looks_of_functions_that_are_called_are_refused() -> None:
    def longer(text: str) -> bool:
        return len(text) > 3

    def program(s, q):
        s += str(longer(f"a{q}"))

    with pytest.raises(ul.TraceError, match=r"len\(\) looks at argument 'q'"):
        ul.function(program).trace()


def test_what_is_the_same_for_every_value_goes_on() -> None:
    def program(s, q):
        assert f"Question: {q}".startswith("Question")
        assert not f"Question: {q}".startswith("Answer")
        assert f"{q}?".endswith(("!", "?")) or True
        assert f"{q}?".endswith("?")
        assert f"Q{q}".find("Q") == 0
        assert f"Q{q}" != ""
        assert f"Q{q}" not in ("", "R")
        assert "Q" in f"Q{q}"
        assert "x".find(f"Q{q}") == -1
        assert {"a": 1}.get(f"x{q}", 2) == 2
        assert len([f"a{q}", q]) == len((q, q)) == 2
        text = f"Q: {q}"
        assert text != "A"
        s += "NAME!".replace("NAME", q) + f"A: {q}".partition(": ")[0] + f"a {q}:".rstrip(" ")
        s += sorted([f"b{q}", f"a{q}"], key=lambda each: each[0])[0]

    assert said(traced(program), q="x") == "x!Aa x:ax"


def test_a_guarded_look_is_no_look() -> None:
    """A comparison that does not happen is not refused."""

    def program(s, q, mode):
        if mode == "short" and f"a{q}" == "ab":
            s += "!"
        s += q

    assert said(traced(program, mode="long"), q="Q") == "Q"


# ------------------------------------------------------------------------------------------ what no symbol sees


def test_is_none_is_found_in_the_source() -> None:
    def program(s, q, hint=None):
        s += q
        if hint is not None:  # here
            s += hint

    assert refused(program) == (
        "is not asks what argument 'hint' is, and a symbol is a str. Write static_args={\"hint\": None} to trace for "
        "one value of it; or program.run(...) to run the program with the interpreter"
    )
    assert said(traced(program, hint=None), q="Q") == "Q"
    assert said(traced(program, hint="!"), q="Q") == "Q!"


def test_isinstance_and_match_are_found_in_the_source() -> None:
    def asks(s, documents):
        if isinstance(documents, str):  # here
            documents = [documents]

    def matches(s, documents):
        match documents:  # here
            case [first, *_]:
                s += first

    assert refused(asks).startswith("isinstance() asks what argument 'documents' is")
    assert refused(matches).startswith("match asks what argument 'documents' is")


def test_a_name_that_was_set_is_no_argument_any_more() -> None:
    def program(s, q):
        q = q.strip()
        if q is not None:
            s += q

    traced(program)


KNOWN = "yes, no"


def test_being_part_of_a_text_is_found_in_the_source() -> None:
    def argument(s, q):
        if q in "yes, no":  # here
            s += q

    def formatted(s, q):
        s += "!" if q not in f"{KNOWN}, maybe" else ""  # here

    def variable(s, q):
        s += ul.gen("x")
        if s["x"] in KNOWN:  # here
            s += q

    async def awaited(s):
        s += ul.gen("x")
        return await s["x"] in KNOWN  # here

    assert refused(argument).startswith(
        "in asks whether q is part of a text, and no symbol sees that. Write static_args="
    )
    assert refused(formatted).startswith("in asks whether q is part of a text")
    assert refused(variable).startswith(
        "in asks whether s['x'] is part of a text, and no symbol sees that. Write variable.run(...)"
    )
    assert refused(awaited).startswith("in asks whether await s['x'] is part of a text")

    def static(s, q):
        assert "x" not in s
        s += "!" if q in KNOWN else "?"

    assert said(traced(static, q="no")) == "!"


def test_names_of_functions_inside_are_their_own() -> None:
    def program(s, q):
        def shown(q):
            return "" if q is None else q

        s += shown("a") + (lambda q: "b" if q is not None else "")(1) + q

    assert said(traced(program), q="c") == "abc"


def test_a_text_is_a_text() -> None:
    """What was made of an argument by a method of strings may be asked what it is."""

    @ul.function
    def inner(s, q):
        assert isinstance(q, str)
        s += q

    def program(s, q):
        inner(s, q.strip())
        inner(s, str(q))

    assert said(traced(program), q=" 5") == "5 5"


@pytest.mark.parametrize("given", [5, 2.5, None, ["a"]], ids=str)
def test_arguments_may_be_no_texts(given: Any) -> None:
    def text(q: Any) -> str:
        return f"{q} {q!s:.3} {q!r:>9} {str(q)[:2]}" + "%s %7s|" % (q, q) + str(q).strip() + "%4s" % str(q)  # noqa: UP031

    def program(s, q):
        s += text(q)

    assert said(traced(program), q=given) == text(given)


def test_joins_of_what_is_known() -> None:
    def program(s, q):
        assert q.join([]) == ""
        assert q.join(["a"]) == "a"
        q.join([1])

    with pytest.raises(TypeError, match="expected str instance, int found"):
        ul.function(program).trace()


def test_programs_inside_are_read_too() -> None:
    @ul.function
    def inner(s, hint):
        if hint is None:
            s += "no"

    def program(s, hint):
        inner(s, hint)

    with pytest.raises(ul.TraceError, match="is asks what argument 'hint' is"):
        ul.function(program).trace()


def test_a_function_whose_file_holds_something_else_is_traced_without_its_source(tmp_path: Path) -> None:
    """As in a notebook or a page of docs: what stands at its line is no Python, and ends in the middle of a text."""
    file = tmp_path / "page.md"
    file.write_text("def it doesn't (\n    end '\n")
    names: dict[str, object] = {"ul": ul}
    exec(compile("def program(s):\n    s += 'a' + ul.gen('x')\n", str(file), "exec"), names)
    assert "Gen x" in ul.function(names["program"]).trace().text()
