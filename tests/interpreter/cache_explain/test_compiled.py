"""Compiled programs know their lines as well: from the nodes of their graph."""

import pytest
import umbel as ul
from umbel.lang.cache_report import CacheCause, CallReport
from umbel.lang.errors import CapabilityError
from umbel.lang.protocol import Backend
from umbel.srt.in_process import LocalBackend

from ..conftest import PATIENCE

CONTEXT = "A long context of a good many words, and some more of them. " * 4


@ul.function
def ask(s, question):
    s += CONTEXT
    s += f"Question: {question}\nAnswer:" + ul.gen("answer", max_tokens=4, temperature=0)
    s += "\nTwice: " + s["answer"] + ul.gen("again", max_tokens=2, temperature=0)


def explained(program: object, backend: Backend) -> CallReport:
    program.run("What is it?", backend=backend, timeout=PATIENCE).sync()  # type: ignore[attr-defined]
    return program.run("Where is it?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("make", [ul.Echo, LocalBackend])
def test_a_compiled_run_is_explained_as_an_interpreted_one_is(make: type[Backend]) -> None:
    interpreted, compiled = explained(ask, make()), explained(ask.compile(server=False), make())
    assert compiled.cause is CacheCause.ARGUMENT
    assert compiled.miss is not None
    assert compiled.miss.argument == "question"
    assert compiled == interpreted


def test_a_compiled_and_an_interpreted_run_are_compared_with_each_other() -> None:
    backend = ul.Echo()
    ask.run("What is it?", backend=backend, timeout=PATIENCE).sync()
    call = ask.compile().run("Where is it?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert (call.cause, call.miss is not None and call.miss.argument) == (CacheCause.ARGUMENT, "question")


def test_a_shipped_program_says_where_it_can_be_explained() -> None:
    state = ask.compile(server=True).run("What is it?", backend=LocalBackend(), timeout=PATIENCE)
    with pytest.raises(CapabilityError, match=r"compile\(server=False\)"):
        state.explain_cache()
