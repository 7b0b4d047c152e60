"""Text that was built with a symbol and then changed as a plain string: found out, and never silently wrong."""

import base64
import inspect
import json
import re
import shlex
import string
import textwrap
import urllib.parse
from collections.abc import Callable

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.compiler.tracing.tape import Mangled, Placeholders

from .traces import refused, said, traced

CHANGES: dict[str, Callable[[str], str]] = {
    "strip": lambda text: text.strip(),
    "lstrip": lambda text: text.lstrip(),
    "rstrip": lambda text: text.rstrip(),
    "upper": str.upper,
    "lower": str.lower,
    "title": str.title,
    "capitalize": str.capitalize,
    "swapcase": str.swapcase,
    "casefold": str.casefold,
    "expandtabs": str.expandtabs,
    "split": lambda text: text.split()[0],
    "split at a line": lambda text: text.split("\n")[0],
    "split at a comma": lambda text: text.split(",")[-1],
    "splitlines": lambda text: "\n".join(text.splitlines()),
    "partition": lambda text: text.partition(": ")[2],
    "rsplit": lambda text: text.rsplit(maxsplit=1)[1],
    "cut": lambda text: text[:30],
    "cut off": lambda text: text[3:],
    "every second": lambda text: text[::2],
    "reversed": lambda text: text[::-1],
    "first characters": lambda text: text[:4],
    "first character": lambda text: text[:1],
    "last character": lambda text: text[-1:],
    "as wide as two": lambda text: f"{'(' + text:.2}",
    "character by character": lambda text: "".join(character for character in text if character != "7"),
    "replace": lambda text: text.replace("e", "E"),
    "replace a digit": lambda text: text.replace("7", "seven"),
    "replace a quote": lambda text: text.replace('"', '\\"'),
    "replace lines": lambda text: text.replace("\n", " "),
    "replace blanks": lambda text: text.replace("  ", " "),
    "translate": lambda text: text.translate({ord(" "): "_"}),
    "without punctuation": lambda text: text.translate(str.maketrans("", "", string.punctuation)),
    "one line": lambda text: " ".join(text.split()),
    "stripped lines": lambda text: "\n".join(line.strip() for line in text.splitlines()),
    "json": json.dumps,
    "json without escapes": lambda text: json.dumps(text, ensure_ascii=False),
    "repr": repr,
    "ascii": ascii,
    "dedent": textwrap.dedent,
    "cleandoc": inspect.cleandoc,
    "fill": textwrap.fill,
    "shorten": lambda text: textwrap.shorten(text, 40),
    "indent": lambda text: textwrap.indent(text, "> "),
    "sub": lambda text: re.compile(r"\s+").sub(" ", text),
    "words": lambda text: " ".join(re.compile(r"\w+").findall(text)),
    "escape": re.escape,
    "shell": shlex.quote,
    "url": urllib.parse.quote,
    "ascii bytes": lambda text: text.encode("ascii", "ignore").decode(),
    "as a template": lambda text: text.format(),
    "as a % template": lambda text: text % (),
    "html": lambda text: text.replace("&", "&amp;").replace("<", "&lt;"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.sampled(5)
def test_a_changed_text_is_refused(change: Callable[[str], str]) -> None:
    def program(s, q):
        s += "x" + change("".join(["", q]))

    with pytest.raises((ul.TraceError, ValueError, TypeError, KeyError, IndexError)) as caught:
        ul.function(program).trace()
    assert __file__ in str(caught.value) + "".join(caught.value.__notes__ if hasattr(caught.value, "__notes__") else [])
    if isinstance(caught.value, ul.TraceError):
        assert "argument 'q'" in str(caught.value) or "an argument or a variable" in str(caught.value)


def test_the_message_says_what_to_change() -> None:
    def program(s, q):
        s += f" {q}, please ".upper()  # here

    assert refused(program) == (
        "a text with argument 'q' in it was cut, split, escaped or changed, which takes its characters. Write the "
        'change before the text is put together (f"{q.strip()}" for f"{q} ".strip()); or static_args={"q": ...} to '
        "trace for one value of it; or program.run(...) to run the program with the interpreter"
    )


def test_changed_texts_are_refused_wherever_they_arrive() -> None:
    def appended(s, q):
        s += [f"a{q}"[:9]]  # here

    def chosen(s, q):
        s += ul.select("x", ["a", f"a{q}"[:9]])  # here

    def returned(s, q):
        return {"x": [f"a{q}"[:9]]}

    def assigned(s, q):
        s["x"] = f"a{q}"[:9]

    def added(s, q):
        return q + f"a{q}"[:9]  # here

    for program in (appended, chosen, added):
        assert refused(program).startswith("a text with argument 'q' in it was cut")
    for program in (returned, assigned):
        with pytest.raises(ul.TraceError, match="a text with argument 'q' in it was cut"):
            ul.function(program).trace()


def test_constants_around_may_be_changed() -> None:
    def program(s, q):
        s += f"  dear {q}!".lstrip() + f"{q} \n"[:-1] + f"A\n{q}".split("\n")[0]

    assert said(traced(program), q="Q") == "dear Q!Q A"


def test_a_symbol_is_asked_before_it_is_changed() -> None:
    """`json.dumps(question)` is refused; text that a program quotes by hand is recorded."""

    def program(s, q):
        s += '"' + q.replace('"', '\\"') + '"'

    assert said(traced(program), q='a "b"') == '"a \\"b\\""'


@given(st.lists(st.text(max_size=5) | st.integers(0, 120), max_size=6))
@settings(max_examples=50, deadline=None)
def test_placeholders_are_found_again(parts: list[str | int]) -> None:
    placeholders = Placeholders()
    text = "".join(part if isinstance(part, str) else placeholders.make(part) for part in parts)
    found = placeholders.split(text)
    assert "".join(part if isinstance(part, str) else placeholders.make(part) for part in found) == text
    assert [part for part in found if isinstance(part, int)] == [part for part in parts if isinstance(part, int)]
    assert all(isinstance(part, int) or part for part in found)


def test_every_fragment_of_a_placeholder_is_one() -> None:
    """Of more than a character or two, whichever piece it is."""
    placeholders = Placeholders()
    whole = placeholders.make(12)
    for start in range(0, len(whole), 3):
        for stop in range(start + 30, len(whole), 7):
            if stop - start < len(whole):
                with pytest.raises(Mangled):
                    placeholders.split(whole[start:stop])


def test_a_placeholder_of_another_trace_is_refused() -> None:
    one, other = Placeholders(), Placeholders()
    with pytest.raises(Mangled):
        other.split(one.make(0))


def test_what_survives_of_bytes_is_not_found_out() -> None:
    """The limit: text in an encoding that hides it. Documented at `Symbol`."""

    def program(s, q):
        s += base64.b64encode(f"a{q}".encode()).decode()

    graph = traced(program)
    assert len(graph.streams[0]) == 2
