"""The shapes model on the runtime: what it answers, that transformers makes the same of its files, what is shared."""

import json
from pathlib import Path

import pytest
import torch
import umbel as ul
from umbel.srt.in_process import LocalBackend

from ..test_examples import load
from .shapes.checkpoint import CONTEXT, FOLDER, PATCHES, parameters
from .shapes.measure import held_out_questions, measure
from .shapes.scenes import Question, Scene

TURN = 2  # control tokens before a picture: BOS and the opening of the turn
EXACT = {"kernels": "torch", "dtype": "float32", "weights": "float32"}


@ul.function
def ask(s: ul.State, scene: Scene, asked: str, logprobs: bool = False) -> None:
    s += ul.user(ul.image(scene.draw()) + asked)
    s += ul.assistant(ul.gen("answer", max_tokens=64, temperature=0, return_logprob=logprobs))


@pytest.fixture(scope="module")
def shapes() -> LocalBackend:
    return LocalBackend(str(FOLDER))


def cached(state: ul.State) -> int:
    """Prompt tokens that were, once the program has ended."""
    state.sync()
    return state.usage.cached_tokens


def answers(backend: LocalBackend, questions: list[tuple[Scene, Question]]) -> list[str]:
    states = ask.run_batch([{"scene": scene, "asked": posed.text} for scene, posed in questions], backend=backend)
    return [state["answer"] for state in states]


def test_it_is_small() -> None:
    assert 2_000_000 <= parameters() <= 5_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert config["text_config"]["max_position_embeddings"] == CONTEXT


@pytest.mark.nightly
def test_it_answers_95_of_100_held_out_questions(shapes: LocalBackend) -> None:
    questions = list(held_out_questions(1000))
    right = [said == posed.answer for (_, posed), said in zip(questions, answers(shapes, questions), strict=True)]
    assert sum(right) >= 950


@pytest.mark.nightly
def test_transformers_says_the_same(shapes: LocalBackend) -> None:
    """Of the same checkpoint, asked through its own LLaVA class and processor."""
    scores = measure(FOLDER, 70)
    questions = list(held_out_questions(70))
    right = sum(said == posed.answer for (_, posed), said in zip(questions, answers(shapes, questions), strict=True))
    assert abs(sum(score.right for score in scores.values()) - right) <= 1  # weights are equal, products are rounded


def test_log_probabilities_are_those_of_transformers() -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    processor = AutoProcessor.from_pretrained(FOLDER)
    model = LlavaForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    backend = LocalBackend(str(FOLDER), **EXACT)
    for scene, posed in held_out_questions(7):
        state = ask.run(scene, posed.text, True, backend=backend)
        told = state.get_meta_info("answer")["output_token_logprobs"]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": posed.text}]}],
            add_generation_prompt=True,
        )
        inputs = processor(images=scene.draw(), text=prompt, return_tensors="pt", add_special_tokens=False)
        ids = torch.tensor([[token for _, token, _ in told]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], dim=1)
        with torch.inference_mode():
            logits = model(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits[0]
        expected = logits[-ids.shape[1] - 1 : -1].log_softmax(-1).gather(1, ids.T)[:, 0]
        assert torch.allclose(torch.tensor([logprob for logprob, _, _ in told]), expected, atol=1e-4)


# ------------------------------------------------------------------------------------------ sharing


def test_a_second_question_finds_the_picture_cached(shapes: LocalBackend) -> None:
    (scene, first), (_, second) = list(held_out_questions(1002))[-2:]  # nobody else's
    assert cached(ask.run(scene, first.text, backend=shapes)) <= TURN
    assert cached(ask.run(scene, second.text, backend=shapes)) >= TURN + PATCHES


def test_pictures_that_differ_in_one_pixel_share_nothing(shapes: LocalBackend) -> None:
    scene, posed = list(held_out_questions(1003))[-1]

    @ul.function
    def look(s: ul.State, dotted: bool) -> None:
        picture = scene.draw()
        if dotted:
            picture.putpixel((0, 0), (1, 2, 3))
        s += ul.user(ul.image(picture) + posed.text) + ul.assistant(ul.gen("answer", max_tokens=4))

    assert cached(look.run(False, backend=shapes)) <= TURN
    assert cached(look.run(True, backend=shapes)) <= TURN
    assert cached(look.run(False, backend=shapes)) >= TURN + PATCHES


# ------------------------------------------------------------------------------------------ examples


def test_figure_2_makes_sense(shapes: LocalBackend) -> None:
    module = load("multi_dimensional_judge")
    states = [
        module.multi_dimensional_judge.run(path=module.PICTURE, essay=essay, temperature=0, backend=shapes)
        for essay in module.ESSAYS
    ]
    assert [state["related"] for state in states] == ["yes", "yes", "no"]
    good, weak, other = states
    assert json.loads(good["output"]) == {
        "summary": "The essay is clear and original and true to the picture.",
        "grade": "A",
    }
    assert json.loads(weak["output"]) == {
        "summary": "The essay is true to the picture but not clear and not original.",
        "grade": "C",
    }
    assert "output" not in other
    judgments = good.messages()[-3]["content"]
    assert "The sentences are short and easy to follow." in judgments
    assert "Comparing the circle with a lantern in the fog is a fresh idea." in judgments
    assert "The picture shows a red circle and a blue square." in judgments
    assert "The picture shows a yellow star and a red circle." in weak.messages()[-3]["content"]
    assert good.usage.cached_tokens > 5 * PATCHES


def test_questions_about_the_picture_of_the_examples(shapes: LocalBackend, capsys: pytest.CaptureFixture[str]) -> None:
    with ul.default_backend(shapes):
        load("picture_questions").main()
    *lines, last = capsys.readouterr().out.splitlines()
    printed = [line[28:] for line in lines]
    assert printed[:8:2] == ["red", "square", "bottom right", "no"]
    others = "a blue square at the centre and a yellow star at the bottom right"
    assert printed[8] == f"a red circle at the top left, {others}"
    assert last == "There are 3 shapes. A red circle among them: yes."
    assert min(int(line.split()[0]) for line in printed[3::2]) >= TURN + PATCHES


def test_a_choice_is_scored_and_a_number_is_a_number(shapes: LocalBackend) -> None:
    @ul.function
    def look(s: ul.State, path: Path) -> None:
        s += ul.user(ul.image(path) + "What colour is the star?")
        s += ul.assistant(ul.select("colour", choices=["red", "green", "blue", "yellow"]))
        s += ul.user("How many shapes are there?") + ul.assistant(ul.gen("count", dtype=int, temperature=0))

    state = look.run(load("picture_questions").PICTURE, backend=shapes)
    assert (state["colour"], state.value("count")) == ("yellow", 3)
