"""The generic program against the evaluator: the language and plain strings say the same."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.echo import Echo, Gate
from umbel.lang.prompt import Text as TextPart
from umbel.lang.protocol import Chunk, Final, GenRequest
from umbel.srt.in_process import LocalBackend
from umbel.srt.simulator.workload import (
    Fork,
    Gen,
    Image,
    Op,
    Ops,
    Program,
    Select,
    Text,
    Values,
    Var,
    keys_of,
    without_constraints,
)
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from benchmarks.replay.evaluate import evaluate, evaluate_all
from benchmarks.replay.program import check, play
from benchmarks.workload import available, read

from .conftest import BackendAsPeer


def hashed(prompt: str) -> str:
    """An answer of one token that differs when the prompt does."""
    value, letters = hash_of(prompt), ""
    for _ in range(5):
        value, letter = divmod(value, 26)
        letters += chr(ord("a") + letter)
    return letters


def hash_of(text: str) -> int:
    value = 7
    for character in text:
        value = (value * 31 + ord(character)) % (1 << 24)
    return value


def by_language(ops: Ops, backend: object, **options: object) -> Values:
    return play.run(ops, backend=backend, **options).ret_value


def by_strings(ops: Ops, backend: ul.Echo | LocalBackend) -> Values:
    return asyncio.run(evaluate(Program("x", ops), BackendAsPeer(backend)))


# ------------------------------------------------------------------------------------- what is said


TREE: Ops = (
    Text("Question. "),
    Fork(
        (
            (Gen("plan", 1), Fork(((Text(" a"), Gen("final", 1)), (Text(" b"), Gen("final", 1))))),
            (Text("other "), Gen("plan", 2, stop=(">",)), Text(" again "), Var("plan"), Gen("more", 1)),
        )
    ),
    Text(" merged: "),
    Var("0.plan"),
    Text("; "),
    Var("0.1.final"),
    Text("; "),
    Var("1.more"),
    Gen("summary", 1),
    Select("verdict", ("good", "bad")),
)


@pytest.mark.parametrize("parallel", [True, False])
def test_forks_inside_forks_merge_by_their_paths(parallel: bool) -> None:
    scores = {"good": -0.2, "bad": -0.1}
    values = by_language(TREE, Echo(hashed, scores=scores), parallel=parallel)
    assert list(values) == ["0.plan", "0.0.final", "0.1.final", "1.plan", "1.more", "summary", "verdict"]
    assert values == by_strings(TREE, Echo(hashed, scores=scores))
    merged = f"Question.  merged: {values['0.plan']}; {values['0.1.final']}; {values['1.more']}"
    assert values["summary"] == hashed(merged)


def test_a_stop_string_is_no_part_of_the_value() -> None:
    echo = Echo(lambda prompt: "one END two")
    assert by_language((Text("x"), Gen("a", 16, stop=("END",))), echo) == {"a": "one "}


def test_a_gen_without_stop_has_its_exact_length() -> None:
    backend = Echo(hashed)
    by_language((Text("x"), Gen("free", 5), Gen("stopped", 5, stop=("!",)), Gen("warm", 5, temperature=0.5)), backend)
    sampling = [request.sampling for request in backend.requests]
    assert [s.ignore_eos for s in sampling] == [True, True, True]
    assert [s.temperature for s in sampling] == [0.0, 0.0, 0.5]


def test_a_branch_reads_the_variables_of_the_state_it_came_from() -> None:
    ops: Ops = (Text("x"), Gen("a", 1), Fork(((Text(" and "), Var("a"), Gen("b", 1)),)))
    values = by_language(ops, Echo(hashed))
    assert values == by_strings(ops, Echo(hashed))
    assert values["0.b"] == hashed("x" + values["a"] + " and " + values["a"])


# ---------------------------------------------------------------------------------- who waits for whom


class Watched(Echo):
    """Echo that notes, when a call arrives, which calls had been answered by then."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(hashed, gate=gate)
        self.answered: list[str] = []
        self.before: dict[str, list[str]] = {}

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        text = "".join(part.text for part in request.prompt)
        self.before[text] = sorted(self.answered)
        async for event in super().generate(request):
            if isinstance(event, Final):
                self.answered.append(text)
            yield event


def by_program(ops: Ops, backend: Echo) -> object:
    return play.run(ops, backend=backend, timeout=30)


@pytest.mark.parametrize("run", [by_program, by_strings])
def test_without_join_the_parent_goes_on_and_with_join_it_waits(run: Callable[[Ops, Echo], object]) -> None:
    def forked(*, join: bool) -> Ops:
        branches = ((Text("one"), Gen("a", 1)), (Text("two"), Gen("a", 1)))
        return (Text("x "), Fork(branches, join), Text("on"), Gen("b", 1))

    def running(ops: Ops, gate: Gate, expected: int) -> Watched:
        backend = Watched(gate)
        thread = threading.Thread(target=run, args=(ops, backend))
        thread.start()
        gate.wait_for(expected)  # so many calls are on their way and none has been answered
        gate.open()
        thread.join(30)
        assert sorted(backend.answered) == ["x on", "x one", "x two"]
        return backend

    running(forked(join=False), Gate(), 3)
    assert running(forked(join=True), Gate(), 2).before["x on"] == ["x one", "x two"]


def test_no_frontend_parallelism_runs_a_branch_after_the_other() -> None:
    gate = Gate()
    gate.open()
    backend = Watched(gate)
    branch = (Text("one"), Gen("a", 1), Gen("b", 1))
    play.run((Text("x "), Fork((branch, (Text("two"), Gen("a", 1))))), parallel=False, backend=backend)
    assert len(backend.before["x two"]) == 2


def test_the_evaluator_keeps_its_concurrency() -> None:
    programs = [Program(str(number), (Text(f"{number}"), Gen("a", 1))) for number in range(5)]

    class Counting(BackendAsPeer):
        now = most = 0

        async def generate(self, prompt: str, **options: Any) -> str:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)  # the others get their turn
            answer = await super().generate(prompt, **options)
            self.now -= 1
            return answer

    peer = Counting(Echo(hashed))
    answers = asyncio.run(evaluate_all(programs, peer, 2))
    assert answers == [{"a": hashed(f"{number}")} for number in range(5)]
    assert peer.most == 2


def test_a_failed_program_is_an_error_in_its_place() -> None:
    programs = [Program("good", (Text("x"), Gen("a", 1))), Program("bad", (Image(Path("cat.png")),))]
    good, bad = asyncio.run(evaluate_all(programs, BackendAsPeer(Echo(hashed)), 2))
    assert good == {"a": hashed("x")}
    assert isinstance(bad, ValueError)


# --------------------------------------------------------------------------------------- random programs


@st.composite
def programs(draw: st.DrawFn, depth: int = 0) -> Ops:
    ops: list[Op] = [Text(draw(st.sampled_from(["Begin. ", "A long beginning of it. "])))]
    known: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        name = f"v{depth}{number}"
        match draw(st.sampled_from(["text", "gen", "stop", "select", "var", "fork"])):
            case "text":
                ops.append(Text(draw(st.sampled_from(["and ", "so\n", " é "]))))
            case "gen":
                ops.append(Gen(name, draw(st.integers(1, 6))))
                known.append(name)
            case "stop":
                ops.append(Gen(name, 6, stop=("a", "e"), ignore_eos=False))
                known.append(name)
            case "select":
                ops.append(Select(name, ("yes", "no", "perhaps")))
                known.append(name)
            case "var" if known:
                ops += [Var(draw(st.sampled_from(known))), Text(" ")]
            case "fork" if depth < 2 and not any(isinstance(op, Fork) for op in ops):
                branches = tuple(draw(programs(depth + 1)) for _ in range(draw(st.integers(1, 3))))
                fork = Fork(branches, draw(st.booleans()))
                ops.append(fork)
                known += keys_of((fork,))
    return tuple(ops)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops=programs(), parallel=st.booleans())
def test_language_and_strings_agree_on_random_programs(ops: Ops, parallel: bool) -> None:
    scores = {"yes": -0.3, "no": -0.1, "perhaps": -0.2}
    assert by_language(ops, Echo(hashed, scores=scores), parallel=parallel) == by_strings(
        ops, Echo(hashed, scores=scores)
    )


@pytest.fixture
def without_merges() -> Iterator[None]:
    """The byte tokenizer gives a character the same token whatever stands next to it.

    The language sends generated text as the tokens that were generated, strings are encoded anew. Where a merge spans
    the border between both ("a" was generated, "no" follows), the two prompts differ, and so may the answers.
    """
    with pytest.MonkeyPatch.context() as patch:
        merges = ByteTokenizer._MERGES
        patch.setattr(ByteTokenizer, "_MERGES", tuple(b"\xff" + bytes([number]) for number in range(len(merges))))
        yield


@pytest.mark.usefixtures("without_merges")
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(ops=programs())
@example(ops=(Text("Begin. "), Gen("a", 6), Select("b", ("yes", "no", "perhaps"))))
def test_they_agree_on_the_runtime_too(ops: Ops) -> None:
    assert by_language(ops, LocalBackend(seed=1)) == by_strings(ops, LocalBackend(seed=1))


# ----------------------------------------------------------------------------------------------- files


def test_every_workload_file_is_read_and_its_variables_are_unique() -> None:
    names = available()
    assert len(names) == 16
    for name in names:
        workload = read(name)
        assert workload.licence
        for program in workload.programs:
            assert len(set(program.keys)) == len(program.keys) > 0


def test_constraints_are_taken_or_left_out() -> None:
    check(Program("x", (Fork(((Gen("a", 8, regex="[0-9]+"), Gen("b", 8, json_schema={"type": "null"})),)),)))
    relaxed = without_constraints((Fork(((Gen("a", 8, regex="[0-9]+", ignore_eos=False),),)),))
    check(Program("x", relaxed))
    assert relaxed == (Fork(((Gen("a", 8),),)),)


def test_an_image_is_refused_by_its_name() -> None:
    with pytest.raises(ul.CapabilityError, match=r"cat\.png"):
        check(Program("x", (Image(Path("cat.png")),)))


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ul.ParameterError, match="there are none"):
        read("nothing", tmp_path)
    (tmp_path / "bad.jsonl").write_text(
        '{"about": "", "licence": "", "n_programs": 1}\n{"id": "1", "ops": [{"op": "sing"}]}\n'
    )
    with pytest.raises(ul.ParameterError, match=r"line 2.*sing"):
        read("bad", tmp_path)
    (tmp_path / "bad.jsonl").write_text(
        '{"about": "", "licence": "", "n_programs": 1}\n{"id": "1", "ops": [{"op": "gen", "name": "a"}]}\n'
    )
    with pytest.raises(ul.ParameterError, match="max_tokens"):
        read("bad", tmp_path)


def test_separators_of_lines_and_paragraphs_are_text(tmp_path: Path) -> None:
    head = '{"about": "", "licence": "", "n_programs": 1}'
    line = '{"id": "1", "ops": [{"op": "text", "text": "a\u2028b\u0085c"}]}'
    (tmp_path / "some.jsonl").write_text(f"{head}\n{line}\n", encoding="utf-8")
    assert read("some", tmp_path).programs[0].ops == (Text("a\u2028b\u0085c"),)


def test_text_parts_of_the_language_are_constant(tmp_path: Path) -> None:
    backend = Echo(hashed)
    by_language((Text("one "), Text("two"), Gen("a", 8)), backend)
    assert backend.requests[0].prompt == (TextPart("one two"),)
