"""Branch-solve-merge: judge an essay from three sides at once, then merge the judgments.

The branches share the essay and the examples before it, so their prefix is computed once.
"""

import umbel as ul

EXAMPLES = """\
Essay: Paris wakes slowly. Bakers light their ovens, the bridges shine after the rain, and by eight \
the cafes along the river are full.
Is the essay about a city? yes
Facts: Cafes are full by eight.
Tone: Calm and dreamy.
Weakness: It tells nothing about the people of Paris.
Verdict: A calm picture of a morning in Paris with few facts.
Grade: B

Essay: Cats are better than dogs because they are better. Everyone knows this. Dogs are bad and cats \
are good.
Is the essay about a city? no
Facts: None.
Tone: Stubborn and loud.
Weakness: It gives no reason why cats are better.
Verdict: A loud opinion about cats and dogs without reasons.
Grade: C

Essay: Tokyo has fourteen million people and very punctual trains. In 2017 a railway company \
apologised because a train left twenty seconds early.
Is the essay about a city? yes
Facts: Fourteen million people; an apology in 2017 for twenty seconds.
Tone: Dry and amused.
Weakness: It does not say why the trains are so punctual.
Verdict: A short and amusing note on the trains of Tokyo with good facts.
Grade: A

"""
ESSAY = """\
The third metro line of Rome was begun in 2007 and is still being dug. Every few metres the workers find \
another ancient wall, and then the archaeologists come and the work has to wait."""
SIDES = ["Facts", "Tone", "Weakness"]


@ul.function
def judge(s, essay):
    s += EXAMPLES + f"Essay: {essay}\nIs the essay about a city?"
    s += ul.select("related", choices=[" yes", " no"])
    if s["related"] == " no":
        return
    forks = s.fork(len(SIDES))
    forks += lambda i: f"\n{SIDES[i]}:" + ul.gen("judgment", max_tokens=32, stop="\n", temperature=0)
    for side, branch in zip(SIDES, forks):
        s += f"\n{side}:{branch['judgment']}"
    s += "\nVerdict:" + ul.gen("verdict", max_tokens=40, stop="\n", temperature=0)
    s += "\nGrade:" + ul.select("grade", choices=[" A", " B", " C"])


def main() -> None:
    state = judge.run(essay=ESSAY)
    print(f"About a city:{state['related']}")
    if "verdict" in state:
        print(state.text().split("Is the essay about a city?")[-1].split("\n", 1)[1])
    usage = state.usage
    print(
        f"\n{usage.calls} calls, {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them from the cache "
        f"({usage.cached_tokens / usage.prompt_tokens:.0%}), {usage.completion_tokens} generated"
    )


if __name__ == "__main__":
    main()
