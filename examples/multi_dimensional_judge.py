"""Figure 2 of the paper, as printed: an essay about an image is judged from three sides at once, then graded.

The picture's keys are computed once. The three branches, the summary and the report find them in the cache.
"""

from pathlib import Path

import umbel as ul
from umbel import assistant, function, gen, image, select, system, user

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests/models/shapes/model"  # python -m tests.models.shapes.train makes it
PICTURE = ROOT / "examples/shapes.png"
ESSAYS = [
    "The picture shows a red circle. The circle looks like a lantern in the fog. It also shows a blue square.",
    "I see a yellow star. Who can say why, and who would ask, and when. There is a red circle too.",
    "Dogs are loyal animals and sleep most of the day.",
]

dimensions = ["Clarity", "Originality", "Evidence"]


@function
def multi_dimensional_judge(s, path, essay):
    s += system("Evaluate an essay about an image.")
    s += user(image(path) + "Essay:" + essay)
    s += assistant("Sure!")

    # Return directly if it is not related
    s += user("Is the essay related to the image?")
    s += assistant(select("related", choices=["yes", "no"]))
    if s["related"] == "no":
        return

    # Judge multiple dimensions in parallel
    forks = s.fork(len(dimensions))
    for f, dim in zip(forks, dimensions):
        f += user("Evaluate based on the following dimension:" + dim + ". End your judgment with the word 'END'")
        f += assistant("Judgment:" + gen("judgment", stop="END"))

    # Merge the judgments
    judgment = "\n".join(f["judgment"] for f in forks)

    # Generate a summary and a grade. Return in the JSON format.
    s += user("Provide the judgment, summary, and a letter grade")
    s += assistant(judgment + "In summary," + gen("summary", stop=".") + "The grade of it is" + gen("grade"))
    schema = r'\{"summary": "[\w\d\s]+\.", "grade": "[ABCD][+-]?"\}'
    s += user("Return in the JSON format.")
    s += assistant(gen("output", regex=schema))


def main() -> None:
    for essay in ESSAYS:
        state = multi_dimensional_judge.run(path=PICTURE, essay=essay, temperature=0)
        print(essay)
        print(f"  Related: {state['related']}")
        if "output" in state:
            for line in state.messages()[-3]["content"].split("In summary,")[0].splitlines():
                print(f"  {line.strip()}")
            print(f"  {state['output']}")
        usage = state.usage
        calls = "1 call" if usage.calls == 1 else f"{usage.calls} calls"
        print(f"  {calls}, {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached\n")


if __name__ == "__main__":
    with ul.Runtime(str(MODEL)) as runtime, ul.default_backend(runtime):
        main()
