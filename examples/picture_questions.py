"""Several questions about one picture: what the model saw is computed for the first one, and cached for the others."""

from pathlib import Path
from typing import Literal

import umbel as ul

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests/models/shapes/model"  # python -m tests.models.shapes.train makes it
PICTURE = ROOT / "examples/shapes.png"
QUESTIONS = [
    "What colour is the circle?",
    "Which shape is blue?",
    "Where is the star?",
    "Is there a green cross?",
    "Describe the picture.",
]


@ul.function
def ask(s, path, question):
    s += ul.user(ul.image(path) + question)
    s += ul.assistant(ul.gen("answer", max_tokens=48, temperature=0))


@ul.function
def count(s, path):
    """The picture stands before the fork: each branch asks about it, and what they say has a type."""
    s += ul.image(path)
    branches = s.fork(2)
    branches[0] += "Question: How many shapes are there?\nAnswer: " + ul.gen("shapes", dtype=int, temperature=0)
    branches[1] += "Question: Is there a red circle?\nAnswer: " + ul.gen("circle", dtype=Literal["yes", "no"])
    return branches[0].value("shapes"), branches[1].value("circle")


def main() -> None:
    for question in QUESTIONS:
        state = ask.run(path=PICTURE, question=question)
        print(f"{question:27} {state['answer']}")
        print(f"{'':27} {state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens cached")
    shapes, circle = count.run(path=PICTURE).ret_value
    print(f"There are {shapes} shapes. A red circle among them: {circle}.")


if __name__ == "__main__":
    with ul.Runtime(str(MODEL)) as runtime, ul.default_backend(runtime):
        main()
