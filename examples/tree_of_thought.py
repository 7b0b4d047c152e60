"""Tree of thought: propose several next steps, let the model score them, keep the best, go deeper."""

import umbel as ul

EXAMPLES = """\
Question: There were 3 cars and 2 more came. How many cars are there?
Step: There were 3 cars. Useful? yes
Step: 2 more cars came. Useful? yes
Step: 3 + 2 = 5. Useful? yes
Answer: 5

Question: Leah had 12 chocolates and ate 4. How many are left?
Step: Leah had 12 chocolates. Useful? yes
Step: She likes chocolate. Useful? no
Step: She ate 4 of them. Useful? yes
Step: 12 - 4 = 8. Useful? yes
Answer: 8

Question: Tom had 9 toys and lost 3. How many are left?
Step: Tom had 9 toys. Useful? yes
Step: He lost 3 of them. Useful? yes
Step: Toys are small. Useful? no
Step: 9 - 3 = 6. Useful? yes
Answer: 6

"""
QUESTION = "Mia had 7 pens and gave away 2. How many are left?"


def worth(branch):
    """How probable " yes" is; on a model that does not say, whether it is the answer."""
    return branch.meta("useful").get("probabilities", {branch["useful"]: 1.0}).get(" yes", 0.0)


@ul.function
def think(s, question, depth=2, width=3):
    """Returns the chain of thought that scored best at every level."""
    s += EXAMPLES + f"Question: {question}"
    for level in range(depth):
        branches = s.fork(width)
        branches += lambda i: (
            "\nStep:" + ul.gen("step", max_tokens=16, stop=["Useful?", "\n"], temperature=0.6, seed=10 * level + i)
        )
        branches += "Useful?" + ul.select("useful", choices=[" yes", " no"])
        scored = [(worth(branch), branch["step"]) for branch in branches]
        for score, step in scored:
            print(f"  level {level + 1}  {score:7.3f} {step.rstrip()}")
        s += f"\nStep:{max(scored)[1]}Useful? yes"
    s += "\nAnswer:" + ul.gen("answer", max_tokens=16, stop="\n", temperature=0)
    return [line.removesuffix("Useful? yes").rstrip() for line in s.text().splitlines()[-depth - 1 : -1]]


def main() -> None:
    state = think.run(question=QUESTION)
    print(QUESTION)
    print("\n".join(state.ret_value))
    print(
        f"Answer:{state['answer']}   ({state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens cached)"
    )


if __name__ == "__main__":
    main()
