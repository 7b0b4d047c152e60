"""Branch-solve-merge: judge an essay from three sides at once, then merge the judgments.

The branches share the essay and the examples before it, so their prefix is computed once.
"""

import umbel as ul

EXAMPLES = """\
Essay: Paris wakes slowly. Bakers light their ovens, the bridges shine after the rain, and by eight the
cafes along the river are full. Nobody hurries; the city has seen hurry before.
Is the essay about a city? yes
Clarity: Good. The sentences are short and each adds one picture.
Originality: Fair. Bakers and bridges are what every reader expects.
Evidence: Poor. It gives no facts or numbers.
Summary: A clear but familiar picture of the city without facts.

Essay: Trains are better than cars because they are better. Everyone knows this. Cars are bad and trains
are good, and good things are better than bad things.
Is the essay about a city? no
Clarity: Fair. The claim is plain but it only repeats itself.
Originality: Poor. There is no new thought in it.
Evidence: Poor. It gives no reason at all.
Summary: A plain claim that repeats itself without reasons.

"""
ESSAY = """\
Venice is sinking by two millimetres a year, and its visitors outnumber its fifty thousand residents on
most days of summer. The city now charges day visitors five euros. The fee will not hold back the sea,
but it pays for the people who do."""
SIDES = ["Clarity", "Originality", "Evidence"]


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
    s += "\nSummary:" + ul.gen("summary", max_tokens=40, stop="\n", temperature=0)


def main() -> None:
    state = judge.run(essay=ESSAY)
    print(f"About a city:{state['related']}")
    if "summary" in state:
        print(state.text().split("Is the essay about a city?")[-1].split("\n", 1)[1])
    usage = state.usage
    print(
        f"\n{usage.calls} calls, {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them from the cache "
        f"({usage.cached_tokens / usage.prompt_tokens:.0%}), {usage.completion_tokens} generated"
    )


if __name__ == "__main__":
    main()
