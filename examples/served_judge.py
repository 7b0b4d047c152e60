"""A judge as a file: three sides at once, a verdict, a grade. A server runs the file as an endpoint, and as a model.

    umbel compile examples/served_judge.py:judge -o judge.umbel.json
    umbel serve --program judge.umbel.json:essay

The program looks at no answer while it runs, so all of it is one graph, and one request. `examples/judge.py` returns
early for some essays, which Python decides; such a program runs where its Python is.
"""

import tempfile
from pathlib import Path

import umbel as ul

EXAMPLES = """\
Essay: Paris wakes slowly. Bakers light their ovens, and by eight the cafes along the river are full.
Facts: Cafes are full by eight.
Tone: Calm and dreamy.
Weakness: It tells nothing about the people of Paris.
Verdict: A calm picture of a morning in Paris with few facts.
Grade: B

Essay: Cats are better than dogs because they are better. Everyone knows this.
Facts: None.
Tone: Stubborn and loud.
Weakness: It gives no reason why cats are better.
Verdict: A loud opinion about cats and dogs without reasons.
Grade: C

"""
ESSAY = "Tokyo has fourteen million people. In 2017 a railway apologised because a train left twenty seconds early."
SIDES = ["Facts", "Tone", "Weakness"]


@ul.function(temperature=0)
def judge(s, essay):
    s += EXAMPLES + f"Essay: {essay}"
    forks = s.fork(len(SIDES))
    for side, branch in zip(SIDES, forks):
        branch += f"\n{side}:" + ul.gen("judgment", max_tokens=32, stop="\n")
    for side, branch in zip(SIDES, forks):
        s += f"\n{side}:{branch['judgment']}"
    s += "\nVerdict:" + ul.gen("verdict", max_tokens=40, stop="\n")
    s += "\nGrade:" + ul.select("grade", choices=[" A", " B", " C"])
    return f"{s['verdict'].strip()} Grade:{s['grade']}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "judge.umbel.json")
        judge.compile().save(file)
        state = ul.load(file).run(essay=ESSAY)
    print(state.ret_value)
    usage = state.usage
    print(f"{usage.calls} calls in one request, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")


if __name__ == "__main__":
    main()
