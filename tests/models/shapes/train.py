"""Trains the shapes model from nothing, on pictures that are drawn as it learns: `python -m tests.models.shapes.train`.

In two stages. The tower learns to name what each of its patches shows, which takes minutes and would take hours through
questions alone. Then the rest of the model learns dialogues about what the tower sees. A run gives the same weights
every time on one machine (seeded, one thread, deterministic kernels); another processor rounds differently.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from .checkpoint import DEVIATION, FOLDER, MEAN, PATCH, PATCHES, SIDE, ShapesTokenizer, make_config, parameters, save
from .dialogues import CONTROL, NOTHING, PAD, Dialogue, judged, questions_in_lines, questions_in_roles
from .measure import measure, report
from .scenes import COLOURS, SHAPES, Scene, scenes

SEED = 20_260_101
THREADS = 1  # another number rounds differently
TOWER_STEPS, TOWER_BATCH = 500, 32
STEPS, BATCH = 6000, 8
QUESTIONS = 6  # of a dialogue: a picture is worth that many
COVERED = 10  # pixels of a figure that make a patch show it
HEADS = {"shape": len(SHAPES) + 1, "colour": len(COLOURS) + 1, "middle": 2}  # 0: nothing


class Learning(NamedTuple):
    """A peak rate, which is reached in `warm` steps and left in the last `cool`."""

    rate: float
    steps: int
    warm: int
    cool: int

    def at(self, step: int) -> float:
        return self.rate * min(1.0, (step + 1) / self.warm, (self.steps - step) / self.cool)


def train(folder: Path, *, tower_steps: int = TOWER_STEPS, steps: int = STEPS) -> None:
    """Train and write a checkpoint."""
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = ShapesTokenizer(corpus(Random(SEED)))
    model = LlavaForConditionalGeneration(make_config()).bfloat16()
    train_tower(model.model.vision_tower, tower_steps)
    train_dialogues(model, tokenizer, steps)
    save(model, tokenizer, folder)


def corpus(random: Random) -> Iterator[str]:
    """The plain text of some thousand dialogues."""
    for scene in itertools.islice(scenes(SEED - 1, held_out=False), 4000):
        for dialogue in (
            questions_in_roles(scene, random, 2),
            questions_in_lines(scene, random, 1),
            judged(scene, random),
        ):
            yield from (segment.text for segment in dialogue.segments if not segment.control)


def train_tower(tower: nn.Module, steps: int) -> None:
    """Each patch says which shape and colour covers it, and whether a figure has its middle there."""
    heads = nn.ModuleDict(
        {name: nn.Linear(tower.config.hidden_size, classes).bfloat16() for name, classes in HEADS.items()}
    )
    drawn = scenes(SEED, held_out=False)

    def loss(step: int) -> Tensor:
        batch = list(itertools.islice(drawn, TOWER_BATCH))
        seen = tower(pixels(batch)).last_hidden_state[:, 1:]  # [pictures, patches, hidden], the class token left out
        truth = np.stack([patches(scene) for scene in batch])
        return sum(
            cross_entropy(head(seen).float().flatten(0, 1), torch.from_numpy(truth[..., place].reshape(-1)))
            for place, head in enumerate(heads.values())
        )

    learn([*tower.parameters(), *heads.parameters()], loss, Learning(1e-3, steps, 50, steps // 2), "tower")


def train_dialogues(model: LlavaForConditionalGeneration, tokenizer: ShapesTokenizer, steps: int) -> None:
    """The model learns to say what it is to say in dialogues. A batch is of one kind, so that lengths are alike."""
    random = Random(SEED)
    drawn = scenes(SEED + 1, held_out=False)

    def dialogue(step: int) -> Dialogue:
        scene = next(drawn)
        match step % 8:
            case 0 | 3 | 6:
                return judged(scene, random)
            case 1:
                return questions_in_lines(scene, random, QUESTIONS)
            case _:
                return questions_in_roles(scene, random, QUESTIONS)

    def loss(step: int) -> Tensor:
        batch = [dialogue(step) for _ in range(BATCH)]
        ids, said = padded([one.encode(tokenizer, PATCHES) for one in batch])
        hidden = model.model(input_ids=ids, pixel_values=pixels([one.scene for one in batch])).last_hidden_state
        rows = said != NOTHING
        return cross_entropy(model.lm_head(hidden[rows]).float(), said[rows])

    model.model.vision_tower.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    learn(weights, loss, Learning(1e-3, steps, 100, steps // 4), "dialogues")


def learn(weights: list[nn.Parameter], loss: Callable[[int], Tensor], learning: Learning, name: str) -> None:
    """AdamW on copies in float32 of weights in bfloat16. A line every hundred steps."""
    exact = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(exact, betas=(0.9, 0.98), weight_decay=0.01)
    recent: list[float] = []
    for step in range(learning.steps):
        optimizer.param_groups[0]["lr"] = learning.at(step)
        value = loss(step)
        value.backward()
        for copy, weight in zip(exact, weights, strict=True):
            copy.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
        with torch.no_grad():
            for copy, weight in zip(exact, weights, strict=True):
                weight.copy_(copy)
        recent.append(value.item())
        if (step + 1) % 100 == 0:
            print(f"{name} {step + 1}: loss {sum(recent) / len(recent):.4f}", flush=True)
            recent.clear()


def pixels(batch: list[Scene]) -> Tensor:
    """As the image processor makes them: [pictures, 3, SIDE, SIDE], bfloat16."""
    drawn = [np.asarray(scene.draw().resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for scene in batch]
    values = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).float() / 255
    return ((values - MEAN) / DEVIATION).bfloat16()


def patches(scene: Scene) -> np.ndarray:
    """What each patch shows: numbers of shape and colour from 1 on, and whether a figure has its middle there.
    [PATCHES, 3]"""
    row = SIDE // PATCH
    covers = np.asarray(scene.covers(SIDE)).reshape(row, PATCH, row, PATCH).swapaxes(1, 2).reshape(PATCHES, -1)
    truth = np.zeros((PATCHES, 3), dtype=np.int64)
    shapes, colours = list(SHAPES), list(COLOURS)
    for number, figure in enumerate(scene.figures, 1):
        covered = (covers == number).sum(axis=1) >= COVERED
        truth[covered, 0] = shapes.index(figure.kind.shape) + 1
        truth[covered, 1] = colours.index(figure.kind.colour) + 1
        x, y = figure.middle
        truth[int(y * row) * row + int(x * row), 2] = 1
    return truth


def padded(encoded: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Filled up behind their ends, where no row looks. Both [dialogues, tokens]."""
    longest = max(len(ids) for ids, _ in encoded)
    pad = CONTROL.index(PAD)
    ids = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids, _ in encoded])
    said = torch.tensor([[*said, *[NOTHING] * (longest - len(said))] for _, said in encoded])
    return ids, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the checkpoint goes")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--questions", type=int, default=1000, help="held-out questions that are asked at the end")
    parser.add_argument("--measure-only", action="store_true", help="ask the checkpoint that is there")
    given = parser.parse_args()
    if not given.measure_only:
        train(given.folder, tower_steps=given.tower_steps, steps=given.steps)
    print(f"{parameters(given.folder):,} parameters")
    print(report(measure(given.folder, given.questions)))


if __name__ == "__main__":
    main()
