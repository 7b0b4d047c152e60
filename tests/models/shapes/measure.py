"""How many held-out questions the model answers, asked through transformers' own LLaVA class and processor."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from .scenes import QUESTIONS, Question, Scene, question, scenes

SEED = 7
BATCH = 50
LONGEST = 64  # tokens: the description of four figures


class Score(NamedTuple):
    right: int
    asked: int


def held_out_questions(count: int) -> Iterator[tuple[Scene, Question]]:
    """As many of each kind, about arrangements that no training picture shows."""
    random = Random(SEED)
    kinds = itertools.cycle(QUESTIONS)
    for scene, about in itertools.islice(zip(scenes(SEED, held_out=True), kinds, strict=False), count):
        yield scene, question(scene, random, about)


def measure(folder: Path, count: int) -> dict[str, Score]:
    """Per kind of question how many answers are right to the letter."""
    processor = AutoProcessor.from_pretrained(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for batch in _batches(held_out_questions(count)):
        prompts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": posed.text}]}],
                add_generation_prompt=True,
            )
            for _, posed in batch
        ]
        inputs = processor(
            images=[scene.draw() for scene, _ in batch],
            text=prompts,
            padding=True,
            return_tensors="pt",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            said = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
        texts = processor.batch_decode(said[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for (_, posed), text in zip(batch, texts, strict=True):
            asked[posed.about] += 1
            right[posed.about] += text == posed.answer
    return {about: Score(right[about], asked[about]) for about in QUESTIONS}


def report(scores: dict[str, Score]) -> str:
    """One line per kind, and one for all."""
    total = Score(sum(score.right for score in scores.values()), sum(score.asked for score in scores.values()))
    return "\n".join(
        f"{about:12} {score.right:4} of {score.asked:4}  {score.right / score.asked:7.1%}"
        for about, score in [*scores.items(), ("all", total)]
        if score.asked
    )


def _batches(
    questions: Iterator[tuple[Scene, Question]],
) -> Iterator[list[tuple[Scene, Question]]]:
    while batch := list(itertools.islice(questions, BATCH)):
        yield batch
