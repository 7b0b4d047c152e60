"""Which of the examples can be traced. Those that look at arguments or answers are refused at the line that looks."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.checks.verify import verify
from umbel.compiler.tracing.trace import trace

EXAMPLES = Path(__file__).parents[3] / "examples"

# File, its program, static arguments, how many streams.
TRACED: list[tuple[str, str, dict[str, Any], int]] = [
    ("async_program.py", "translate", {}, 1),
    ("batch.py", "classify", {"review": "Good."}, 1),
    ("document_qa.py", "ask", {}, 1),
    ("evaluate.py", "bare", {}, 1),
    ("evaluate.py", "with_examples", {}, 1),
    ("extract.py", "read", {}, 1),
    ("field_card.py", "fill_in", {}, 1),
    ("journal.py", "describe", {}, 1),
    ("picture_questions.py", "ask", {}, 1),
    ("picture_questions.py", "count", {}, 3),
    ("quickstart.py", "answer", {}, 1),
    ("self_consistency.py", "solve", {"samples": 3}, 1),
    ("served_judge.py", "judge", {}, 4),
    ("streaming.py", "story", {}, 1),
]

# File, its program, static arguments, the text of the line that looks, what is looked at.
REFUSED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("batch.py", "classify", {}, "if not review", "a condition looks at argument 'review'"),
    (
        "early_vote.py",
        "solve",
        {"samples": 3, "agree": 2},
        "forks.until(vote)",
        "which branches end first is known in a",
    ),
    ("judge.py", "judge", {}, 'if s["related"] == " no":', "== looks at variable 'related'"),
    ("multi_turn.py", "chat", {}, "for question in questions:", "iteration looks at argument 'questions'"),
    ("multi_turn.py", "chat", {"questions": ["Why?"]}, 's.get_meta_info("answer")', "get_meta_info() tells of a call"),
    ("react_agent.py", "agent", {}, "for _ in range(max_steps):", "use as an integer looks at argument 'max_steps'"),
    ("react_agent.py", "agent", {"max_steps": 2}, 'if s["tool"] == "finish":', "== looks at variable 'tool'"),
    ("self_consistency.py", "solve", {}, "n=samples", "argument 'samples' stands where a value has to be known"),
    ("skeleton_of_thought.py", "write", {}, 's["points"].split(', ".split() looks at variable 'points'"),
    ("tool_agent.py", "ask", {}, "s.call_tools(", "call_tools"),
    ("tree_of_thought.py", "think", {}, "in range(depth):", "use as an integer looks at argument 'depth'"),
    (
        "tree_of_thought.py",
        "think",
        {"depth": 1},
        "s.fork(width)",
        "argument 'width' stands where a value has to be known",
    ),
    (
        "tree_of_thought.py",
        "think",
        {"depth": 1, "width": 2},
        'branch.meta("useful")',
        "get_meta_info() tells of a call",
    ),
]


def program_of(file: str, name: str) -> ul.Program:
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = getattr(module, name)
    assert isinstance(program, ul.Program)
    return program


@pytest.mark.parametrize(("file", "name", "static", "streams"), TRACED, ids=[row[0] for row in TRACED])
def test_examples_that_are_traced(file: str, name: str, static: dict[str, Any], streams: int) -> None:
    found = trace(program_of(file, name), static_args=static)
    verify(found.graph)
    assert len(found.graph.streams) == streams
    assert found.effects == ()


@pytest.mark.parametrize(("file", "name", "static", "line", "said"), REFUSED, ids=[f"{r[0]} {r[2]}" for r in REFUSED])
def test_examples_that_are_not(file: str, name: str, static: dict[str, Any], line: str, said: str) -> None:
    with pytest.raises(ul.TraceError) as caught:
        program_of(file, name).trace(static_args=static)
    place, _, rest = str(caught.value).partition(": ")
    path, _, number = place.rpartition(":")
    assert path == str(EXAMPLES / file)
    assert line in Path(path).read_text().splitlines()[int(number) - 1]
    assert said in rest


def test_every_example_with_a_program_is_in_a_table() -> None:
    known = {row[0] for row in TRACED} | {row[0] for row in REFUSED}
    assert known == {path.name for path in EXAMPLES.glob("*.py") if "@ul.function" in path.read_text()}
