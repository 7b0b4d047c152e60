"""Self-consistency: sample several chains of thought for one question and take the majority's answer."""

import re
from collections import Counter

import umbel as ul

EXAMPLES = """\
Q: There are 3 cars and 2 more arrive. How many cars are there?
A: There were 3 cars. 2 more arrive. 3 + 2 = 5. The answer is 5.

Q: Leah had 12 chocolates and ate 4. How many are left?
A: Leah had 12 chocolates. She ate 4. 12 - 4 = 8. The answer is 8.

Q: Tom has 2 boxes with 3 toys each. How many toys has he?
A: Tom has 2 boxes. Each has 3 toys. 2 * 3 = 6. The answer is 6.

"""


@ul.function
def solve(s, question, samples):
    s += EXAMPLES + f"Q: {question}\nA:"
    # One prompt, many continuations: its KV is computed once and shared by all of them.
    s += ul.gen("chain", n=samples, max_tokens=48, stop="\n", temperature=0.7, seed=1)


def main() -> None:
    question = "Mia had 7 pens and gave 2 to her brother. How many are left?"
    state = solve.run(question=question, samples=8)
    found = (re.findall(r"The answer is (\d+)", chain) for chain in state["chain"])
    answers = Counter(numbers[-1] for numbers in found if numbers)
    print(question)
    for chain in state["chain"]:
        print(" -", chain.strip())
    print(f"Votes: {dict(answers.most_common())}")
    for answer, votes in answers.most_common(1):
        print(f"The majority says {answer}, {votes} of {len(state['chain'])}.")


if __name__ == "__main__":
    main()
