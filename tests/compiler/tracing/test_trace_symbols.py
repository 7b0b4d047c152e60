"""Symbols: what is done to them is recorded, and done to the value when the graph runs."""

import copy
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.compiler.operations import FUNCTIONS, STR_METHODS

from .traces import said, traced, value_of

# ------------------------------------------------------------------------------------------ what is recorded

TEXTS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda q: q,
    "f-string": lambda q: f"a {q} b",
    "f-string alone": lambda q: f"{q}",
    "format": lambda q: "{} {x}".format(q, x=q),  # noqa: UP032
    "padded": lambda q: f"<{q:>10}|{q:_^9}|{q:.3}>",
    "repr": lambda q: f"{q!r} {q!s} {q}",
    "str": lambda q: str(q) + repr(q),
    "plus": lambda q: "a" + q + "b" + q,
    "plus of formatted": lambda q: f"a{q}" + q,
    "percent": lambda q: "a %s b" % q,  # noqa: UP031
    "percent, padded": lambda q: "100%% %-8s|" % q,  # noqa: UP031
    "percent, cut": lambda q: "%.2s %%" % q,  # noqa: UP031
    "percent, repr": lambda q: "%r" % q,  # noqa: UP031
    "percent, padded in a literal": lambda q: "%10s %s" % (q, q),  # noqa: UP031
    "join": lambda q: ", ".join([q, "x", q]),
    "join of one": lambda q: "".join([q]),
    "join with it": lambda q: q.join(["a", "b", f"<{q}>"]),
    "slices": lambda q: q[2:] + q[:-1] + q[::2] + q[0],
    "times": lambda q: q * 2 + 2 * q,
    "replaced in a constant": lambda q: "Dear NAME,".replace("NAME", q),
    "methods": lambda q: q.strip().lower().title().replace("a", "b").removeprefix("x").zfill(9),
    "tabs": lambda q: q.expandtabs(tabsize=4) + q.expandtabs(2),
    "a method of a sum": lambda q: ("  " + q).strip() + "!",
    "a slice of a method": lambda q: f"{q.upper()[:3]}",
    "constants beside it": lambda q: f"a {q} b"[:1] + f" {q}. "[-2:],
    "strip of constants around it": lambda q: f"a {q} b".strip(),
    "indented": lambda q: textwrap.indent("x", "  ") + q,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("given", ["  Why? äß\t ", "", "x", "a\nb\n", "%s {} \\"])
@pytest.mark.sampled(5)
def test_text_of_a_symbol_is_text_of_its_value(text: Callable[[Any], str], given: str) -> None:
    if text is TEXTS["slices"] and not given:
        given = "z"  # the first character of nothing is an error in both

    def program(s, q):
        s += text(q)

    assert said(traced(program), q=given) == text(given)


@given(
    st.lists(
        st.sampled_from(["lower", "upper", "strip", "title", "[1:]", "[:-1]", "* 2", "f", "+", "repr", ">9"]),
        max_size=6,
    ),
    st.text(max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_done_to_a_symbol_is_done_to_its_value(steps: list[str], given: str) -> None:
    def text(q: Any) -> Any:
        for step in steps:
            match step:
                case "[1:]":
                    q = q[1:]
                case "[:-1]":
                    q = q[:-1]
                case "* 2":
                    q = q * 2
                case "f":
                    q = f"{q}"
                case "+":
                    q = "a" + q + "b"
                case "repr":
                    q = repr(q)
                case ">9":
                    q = f"{q:>9}"
                case _:
                    q = getattr(q, step)()
        return q

    def program(s, q):
        return text(q)

    assert value_of(traced(program).result, {"q": given}) == text(given)


@pytest.mark.parametrize("name", STR_METHODS)
def test_methods_that_a_graph_has(name: str) -> None:
    arguments = {
        "center": (9, "*"), "ljust": (9,), "rjust": (9,), "zfill": (9,), "replace": ("a", "b", 1),
        "removeprefix": ("x",), "removesuffix": ("x",),
    }.get(name, ())  # fmt: skip

    def program(s, q):
        return getattr(q, name)(*arguments)

    assert value_of(traced(program).result, {"q": " xax "}) == getattr(" xax ", name)(*arguments)


def test_items_of_an_argument() -> None:
    def program(s, document, names):
        s += document["title"] + f"{names[0]} {names[-1]}" + document["parts"][1]["text"]

    given = {"document": {"title": "T", "parts": [None, {"text": "x"}]}, "names": ["a", "b"]}
    assert said(traced(program), **given) == "Ta bx"


def test_functions_of_a_graph_are_all_reachable() -> None:
    def program(s, q):
        return [f"{q:>3}", q["x"], q * 2, repr(q), q[1:], str(s.value("n")), "%a" % q]  # noqa: UP031

    def whole(s, q):
        s += ul.gen("n", dtype=int)
        return [program(s, q), *(getattr(q, name)(*([9] if name.endswith("just") else [])) for name in ("ljust",))]

    used = {node.op.function for node in traced(whole).nodes if hasattr(node.op, "function")}
    assert used | set(STR_METHODS) == set(FUNCTIONS)


def test_copies_are_the_symbol() -> None:
    def program(s, q):
        assert copy.copy(q) is q
        assert copy.deepcopy([q])[0] is q
        s += ul.gen("n", dtype=int)
        assert copy.deepcopy(s.value("n")) is copy.copy(s.value("n"))
        assert isinstance(q, str)
        assert s["n"] is s["n"]

    with pytest.raises(ul.TraceError, match="isinstance"):
        ul.function(program).trace()

    def looking_elsewhere(s, q):
        program(s, q)

    traced(looking_elsewhere)
