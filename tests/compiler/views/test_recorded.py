"""Pictures of recorded runs: what a program did, also where it looks at answers."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import umbel as ul
from umbel.compiler.command import main
from umbel.compiler.views import recorded
from umbel.interpreter.view.page import RunRecord
from umbel.lang.errors import GraphError

from ...test_examples import load

SVG = "{http://www.w3.org/2000/svg}"
JUDGED = {"Facts:": " Two facts.", "Tone:": " Dry.", "Weakness:": " Short.", "Verdict:": " Good."}


def judged() -> RunRecord:
    backend = ul.Echo(JUDGED, scores={" yes": -0.1, " no": -2, " A": -0.1, " B": -2, " C": -2})
    state = load("judge").judge.run(essay="Rome digs.", backend=backend)
    state.sync()
    return state.record()


def boxes(svg: str) -> dict[str, bool]:
    """Returns the labels of a picture's boxes in order, and whether each is dashed."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box, texts = group.find(f"{SVG}rect"), group.findall(f"{SVG}text/{SVG}tspan")
        if box is not None and texts:
            number = (texts[0].text or "").strip()
            label = "".join(text.text or "" for text in texts[1:])
            found[f"{number} {label}"] = "stroke-dasharray" in box.attrib
    return found


def test_the_demo_is_drawn_and_what_depends_on_its_answer_is_dashed() -> None:
    found = {label.split(" ", 1)[1]: dashed for label, dashed in boxes(recorded.svg(judged().lines)).items()}
    assert [label for label, dashed in found.items() if not dashed] == [
        "Begin judge",
        'Text "Essay: Paris wakes…\\nEssay: "',
        'Argument essay "Rome digs."',
        'Text "\\nIs the essay about a city?"',
        'Select related " yes"',
    ]
    assert found["Fork 3"]
    assert found['Gen judgment " Dry."']
    assert found['Variable judgment " Dry."']  # said by the program, generated in a branch
    assert found['Select grade " A"']


def test_answers_that_the_program_says_again_have_an_arrow_from_their_call() -> None:
    picture = recorded.svg(judged().lines)
    assert len(re.findall(r'class="umbel-between" stroke-dasharray', picture)) == 3
    assert "said after the program had read related" in picture


@pytest.mark.parametrize("index", [0, 1, 2])
def test_of_equal_answers_of_branches_the_arrow_comes_from_the_branch_that_is_named(index: int) -> None:
    @ul.function
    def equal(s: ul.State) -> None:
        forks = s.fork(3)
        forks += "Plan: " + ul.gen("plan", max_tokens=4)
        s += "Best: "
        if index == 0:
            s += forks[0]["plan"]
        elif index == 1:
            s += forks[1]["plan"]
        else:
            s += forks[2]["plan"]

    state = equal.run(backend=ul.Echo(lambda prompt: " a walk"))
    state.sync()
    picture = ElementTree.fromstring(recorded.svg(state.record().lines))
    (arrow,) = [path for path in picture.iter(f"{SVG}path") if "stroke-dasharray" in path.attrib]
    columns = sorted({float(box.attrib["x"]) for box in picture.iter(f"{SVG}rect") if box.get("height") == "26.0"})
    assert len(columns) == 4  # that of the program, and three of its branches
    assert arrow.attrib["d"].startswith(f"M {columns[index + 1]} ")


def test_a_picture_has_a_legend_of_its_own_kinds_and_says_what_dashes_mean() -> None:
    picture = recorded.svg(judged().lines)
    for word in ("text", "argument", "call of a model", "value", "structure"):
        assert f">{word}</text>" in picture
    assert "a dashed box: said after the program had read an answer" in picture
    assert "<title>judge(essay): a run on Echo " in picture


@ul.function
def straight(s: ul.State) -> None:
    forks = s.fork(2)
    forks += ul.gen("x", max_tokens=4)
    forks.join()
    s += "End" + ul.gen("y", max_tokens=4)


def test_a_run_that_reads_nothing_has_no_dashed_box() -> None:
    state = straight.run(backend=ul.Echo(["a", "b", "c"]))
    state.sync()
    picture = recorded.svg(state.record().lines)
    assert not any(boxes(picture).values())
    assert "dashed" not in picture
    assert ">argument<" not in picture  # no such kind, no such legend
    assert any(label.endswith("Join 2") for label in boxes(picture))


def test_texts_are_folded_and_whole_below_the_pointer() -> None:
    @ul.function
    def long(s: ul.State) -> None:
        s += "begins & " + "x" * 100 + " ends"

    state = long.run(backend=ul.Echo())
    state.sync()
    picture = recorded.svg(state.record().lines)
    assert any(re.fullmatch(r'1?\d Text "begins & x+…x+ ends"', label) for label in boxes(picture))
    assert f"begins &amp; {'x' * 100} ends" in picture


def test_of_a_long_run_the_first_boxes_are_drawn_and_the_rest_is_counted() -> None:
    @ul.function
    def long(s: ul.State) -> None:
        for number in range(500):
            s += f"{number}\n"

    state = long.run(backend=ul.Echo())
    state.sync()
    picture = recorded.svg(state.record().lines)
    assert len(boxes(picture)) == recorded.MOST_BOXES
    assert "the first 400 of 501 boxes" in picture


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(GraphError, match=r"state\.save\(path\)"):
        recorded.svg([{"umbel_batch": 1}])
    with pytest.raises(GraphError, match="said nothing"):
        recorded.svg([{"umbel_run": 1}])


def test_the_command_draws_a_saved_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, drawn = tmp_path / "run.jsonl", tmp_path / "run.svg"
    judged().save(saved)
    assert main(["--from", str(saved), "--svg", str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8") == recorded.svg(RunRecord.load(saved).lines)
    assert main(["--from", str(saved)]) == 1
    assert "write umbel compile --from" in capsys.readouterr().err
    assert main(["--from", str(saved), "--svg", str(drawn), "--json"]) == 1
    assert main(["--from", str(tmp_path / "none.jsonl"), "--svg", str(drawn)]) == 1
    assert main([]) == 1
    assert "a program is missing; write umbel compile FILE.py:PROGRAM" in capsys.readouterr().err
