"""The pictures, questions and essays that the shapes model is trained on and asked about: what they say is true."""

import itertools
import json
import re
from random import Random

import pytest

from .shapes.essays import DIMENSIONS, LIKENESSES, Essay, random_essay
from .shapes.measure import held_out_questions
from .shapes.scenes import COLOURS, PLACES, QUESTIONS, SHAPES, Kind, Scene, listed, question, scenes

REPORT = r'\{"summary": "[\w\d\s]+\.", "grade": "[ABCD][+-]?"\}'  # of the paper


def some(count: int, *, held_out: bool = False) -> list[Scene]:
    return list(itertools.islice(scenes(1, held_out=held_out), count))


def arrangement(scene: Scene) -> list[tuple[int, Kind]]:
    return [(figure.place, figure.kind) for figure in scene.figures]


def test_a_seed_gives_the_same_scenes() -> None:
    assert some(20) == some(20)
    assert some(20) != list(itertools.islice(scenes(2, held_out=False), 20))


def test_no_arrangement_is_both_trained_and_asked() -> None:
    trained = {str(arrangement(scene)) for scene in some(2000)}
    asked = {str(arrangement(scene)) for scene in some(500, held_out=True)}
    assert trained
    assert asked
    assert not trained & asked


def test_a_figure_is_drawn_in_its_cell_alone() -> None:
    for scene in some(100):
        covers = scene.covers(96)
        for number, figure in enumerate(scene.figures, 1):
            row, column = divmod(figure.place, 3)
            cell = covers.crop((32 * column, 32 * row, 32 * column + 32, 32 * row + 32))
            assert {value for _, value in cell.getcolors()} == {0, number}, figure


def test_the_middle_of_a_figure_has_its_colour() -> None:
    for scene in some(100):
        picture = scene.draw(96)
        for figure in scene.figures:
            x, y = figure.middle
            assert picture.getpixel((round(96 * x), round(96 * y))) == figure.shade


def seen(scene: Scene, text: str) -> str | None:
    """An answer that is found in another way than the questions find theirs: in the list of what is where."""
    figures = [(figure.kind.colour, figure.kind.shape, PLACES[figure.place]) for figure in scene.figures]

    def having(*words: str) -> list[tuple[str, str, str]]:
        return [figure for figure in figures if all(word in figure for word in words)]

    words = re.findall(r"\w+", text.replace("crosses", "cross"))
    named = [word.removesuffix("s") if word.removesuffix("s") in SHAPES else word for word in words]
    known = [word for word in named if word in SHAPES or word in COLOURS]
    match words:
        case ["What" | "Which", "colour", *_]:
            return having(*known)[0][0]
        case ["Which", "shape", *_] | ["What", "is", "the", "shape", *_]:
            return having(*known)[0][1]
        case ["How", "many", *_]:
            return str(len(having(*known)))
        case ["Where", *_]:
            return having(*known)[0][2]
        case ["Is", "there", *_]:
            return "yes" if having(*known) else "no"
        case ["What", "is", "at", "the", *place]:
            there = having(" ".join(place))
            return Kind(*there[0][:2]).phrase if there else "nothing"
        case _:
            return listed([f"{Kind(colour, shape).phrase} at the {place}" for colour, shape, place in figures])


@pytest.mark.parametrize("about", QUESTIONS)
def test_answers_are_true(about: str) -> None:
    random = Random(3)
    for scene in some(300):
        asked = question(scene, random, about)
        assert asked.answer == seen(scene, asked.text), asked


def test_held_out_questions_are_of_every_kind_and_always_the_same() -> None:
    asked = [posed for _, posed in held_out_questions(70)]
    assert {posed.about for posed in asked} == set(QUESTIONS)
    assert asked == [posed for _, posed in held_out_questions(70)]


def test_half_of_the_answers_about_presence_are_yes() -> None:
    random = Random(5)
    answers = [question(scene, random, "presence").answer for scene in some(1000)]
    assert 0.4 < answers.count("yes") / len(answers) < 0.7


# ------------------------------------------------------------------------------------------ essays


def essays(count: int) -> list[Essay]:
    random = Random(7)
    return [random_essay(scene, random) for scene in some(count)]


def test_an_essay_is_related_when_one_of_its_claims_is_true() -> None:
    written = essays(600)
    assert 0.35 < sum(essay.related for essay in written) / len(written) < 0.65
    for essay in written:
        assert essay.related == bool(essay.shown & set(essay.claims))
        assert all(f"{claim.colour} {claim.shape}" in essay.text for claim in essay.claims)


def test_evidence_names_what_is_there_and_what_is_not() -> None:
    for essay in essays(600):
        if essay.related:
            told = essay.judgment("Evidence")
            shown, _, denied = told.partition(" but not ")
            for claim in essay.claims:
                assert (claim.phrase in shown) == (claim in essay.shown)
                assert (claim.phrase in denied) == (claim not in essay.shown)


def test_a_grade_is_one_letter_lower_for_each_dimension_that_is_not_good() -> None:
    for essay in essays(600):
        bad = essay.summary.count("not ")
        assert essay.grade == "ABCD"[bad]
        assert re.fullmatch(REPORT, essay.report)
        assert json.loads(essay.report)["grade"] == essay.grade


def test_every_dimension_has_its_sentences() -> None:
    told = {dimension: set() for dimension in DIMENSIONS}
    for essay in (essay for essay in essays(600) if essay.related):
        for dimension in DIMENSIONS:
            told[dimension].add(essay.judgment(dimension))
    assert len(told["Clarity"]) == 2
    assert 1 < len(told["Originality"]) <= 1 + len(SHAPES) * len(LIKENESSES)
    assert len(told["Evidence"]) > 100
