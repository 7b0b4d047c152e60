"""Tree of thought: propose several next steps, let the model score them, keep the best, go deeper."""

import umbel as ul

EXAMPLES = """\
Question: A box holds 4 red and 6 blue balls. Half of the blue balls are removed. How many balls are left?
Step: Half of 6 blue balls is 3.
Good step? yes
Step: 3 blue balls are removed, so 3 are left.
Good step? yes
Answer: 4 + 3 = 7

Question: Tom has 5 apples and buys 3 bags of 2 apples. How many apples has he?
Step: 3 bags of 2 apples are 6 apples.
Good step? yes
Step: Bags are made of paper.
Good step? no
Answer: 5 + 6 = 11

"""
QUESTION = "Anna has 3 boxes with 4 pens each and gives away 5 pens. How many pens are left?"


@ul.function
def think(s, question, depth=2, width=3):
    """Returns the chain of thought that scored best at every level."""
    s += EXAMPLES + f"Question: {question}"
    for level in range(depth):
        branches = s.fork(width)
        branches += lambda i: "\nStep:" + ul.gen("step", max_tokens=24, stop="\n", temperature=0.8, seed=10 * level + i)
        branches += "\nGood step?" + ul.select("good", choices=[" yes", " no"])
        scored = [(branch.meta("good")["choice_scores"][" yes"], branch["step"]) for branch in branches]
        for score, step in scored:
            print(f"  level {level + 1}  {score:7.3f} {step}")
        s += f"\nStep:{max(scored)[1]}\nGood step? yes"
    s += "\nAnswer:" + ul.gen("answer", max_tokens=16, stop="\n", temperature=0)
    return [line for line in s.text().splitlines() if line.startswith("Step:")][-depth:]


def main() -> None:
    state = think.run(question=QUESTION)
    print(QUESTION)
    print("\n".join(state.ret_value))
    print(
        f"Answer:{state['answer']}   ({state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens cached)"
    )


if __name__ == "__main__":
    main()
