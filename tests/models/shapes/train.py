"""Trains the shapes model from nothing, on pictures that are drawn as it learns: `python -m tests.models.shapes.train`.

In stages. The tower learns to name what each of its patches shows, which takes minutes and would take hours through
questions alone. Then the rest of the model learns dialogues about what the tower sees: first those with many questions
about a picture, which are cheap, at last those with one, in which a step sees many more pictures. Without the last,
places and numbers are not learnt. A run gives the same weights every time on one machine (seeded, two threads,
deterministic kernels); another processor rounds differently.

The weights that lie beside this file come from these stages, but not from one run of them: rates and the mixture of
questions were changed by hand on the way, and the last stage was computed in float32, its final 450 steps mostly on
essays. A run of all stages as they are written here takes about half an hour on two cores and has not been measured.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from .checkpoint import (
    DEVIATION,
    FOLDER,
    MEAN,
    PATCHES,
    SIDE,
    ShapesTokenizer,
    make_config,
    parameters,
    save,
)
from .dialogues import CONTROL, NOTHING, PAD, Dialogue, judged, questions_in_lines, questions_in_roles
from .measure import measure, report
from .scenes import COLOURS, QUESTIONS, SHAPES, Scene, scenes

SEED = 20_260_101
THREADS = 2  # another number rounds differently
TOWER_STEPS, TOWER_BATCH = 1500, 64
FEW = [kind for kind in QUESTIONS if kind != "description"]  # its answers are long
HARD = ("count", "position", "presence")  # what takes longest
HEADS = {"shape": len(SHAPES) + 1, "colour": len(COLOURS) + 1, "place": PATCHES}  # 0: nothing is there


class Learning(NamedTuple):
    """A peak rate, which is reached in `warm` steps and left in the last `cool`."""

    rate: float
    steps: int
    warm: int
    cool: int

    def at(self, step: int) -> float:
        return self.rate * min(1.0, (step + 1) / self.warm, (self.steps - step) / self.cool)


class Stage(NamedTuple):
    """Dialogues to learn. A batch is so many pictures; `asked` questions about each are of these kinds."""

    learning: Learning
    batch: int
    asked: int
    kinds: Sequence[str]


STAGES = (
    Stage(Learning(1e-3, 2500, 100, 1), 16, 12, (*FEW, *FEW, "description")),
    Stage(Learning(6e-4, 1600, 100, 2400), 16, 12, (*QUESTIONS, *3 * HARD, *2 * ("colour", "content"))),
    Stage(Learning(1.2e-3, 3000, 50, 1000), 96, 1, (*QUESTIONS, *2 * HARD, *2 * ("position", "content"))),
)


def train(folder: Path) -> None:
    """Train and write a checkpoint."""
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    tokenizer = ShapesTokenizer(corpus(Random(SEED)))
    model = LlavaForConditionalGeneration(make_config()).bfloat16()
    train_tower(model.model.vision_tower, TOWER_STEPS)
    model.model.vision_tower.requires_grad_(False)
    for number, stage in enumerate(STAGES):
        train_dialogues(model, tokenizer, stage, SEED + number)
    save(model, tokenizer, folder)


def corpus(random: Random) -> Iterator[str]:
    """The plain text of some thousand dialogues."""
    for scene in itertools.islice(scenes(SEED - 1, held_out=False), 4000):
        for dialogue in (
            questions_in_roles(scene, random, 2, STAGES[0].kinds),
            questions_in_lines(scene, random, 1, STAGES[0].kinds),
            judged(scene, random),
        ):
            yield from (segment.text for segment in dialogue.segments if not segment.control)


def train_tower(tower: nn.Module, steps: int) -> None:
    """Each patch says the shape and the colour that it shows, and which patch it is."""
    hidden = tower.config.hidden_size
    heads = nn.ModuleDict({name: nn.Linear(hidden, classes).bfloat16() for name, classes in HEADS.items()})
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


def train_dialogues(model: LlavaForConditionalGeneration, tokenizer: ShapesTokenizer, stage: Stage, seed: int) -> None:
    """The model learns to say what it is to say in dialogues. A batch is of one kind, so that lengths are alike."""
    random = Random(seed)
    drawn = scenes(seed + 1, held_out=False)

    def dialogue(step: int) -> Dialogue:
        scene = next(drawn)
        match step % 8:
            case 0 | 4:
                return judged(scene, random)
            case 1:
                return questions_in_lines(scene, random, stage.asked, stage.kinds)
            case _:
                return questions_in_roles(scene, random, stage.asked, stage.kinds)

    def loss(step: int) -> Tensor:
        batch = [dialogue(step) for _ in range(stage.batch)]
        ids, said = padded([one.encode(tokenizer, PATCHES) for one in batch])
        hidden = model.model(input_ids=ids, pixel_values=pixels([one.scene for one in batch])).last_hidden_state
        rows = said != NOTHING
        return cross_entropy(model.lm_head(hidden[rows]).float(), said[rows])

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    learn(weights, loss, stage.learning, "dialogues")


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
    """What each patch shows, in the numbers of HEADS. [PATCHES, heads]"""
    truth = np.zeros((PATCHES, len(HEADS)), dtype=np.int64)
    truth[:, 2] = range(PATCHES)
    shapes, colours = list(SHAPES), list(COLOURS)
    for figure in scene.figures:
        truth[figure.place, :2] = shapes.index(figure.kind.shape) + 1, colours.index(figure.kind.colour) + 1
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
    parser.add_argument("--questions", type=int, default=1000, help="held-out questions that are asked at the end")
    parser.add_argument("--measure-only", action="store_true", help="ask the checkpoint that is there")
    given = parser.parse_args()
    if not given.measure_only:
        train(given.folder)
    print(f"{parameters(given.folder):,} parameters")
    print(report(measure(given.folder, given.questions)))


if __name__ == "__main__":
    main()
