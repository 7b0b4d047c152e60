"""A vote that ends early: chains of thought for one question, until enough of them give the same answer."""

import umbel as ul

EXAMPLES = """\
Q: There are 3 cars and 2 more arrive. How many cars are there?
A: There were 3 cars. 2 more arrive. 3 + 2 = 5. The answer is 5.

Q: Leah had 12 chocolates and ate 4. How many are left?
A: Leah had 12 chocolates. She ate 4. 12 - 4 = 8. The answer is 8.

Q: Tom has 2 boxes with 3 toys each. How many toys has he?
A: Tom has 2 boxes. Each has 3 toys. 2 * 3 = 6. The answer is 6.

"""


def think(branch, number):
    """Says one chain of thought, and the answer at its end."""
    branch += ul.gen("chain", max_tokens=48, stop=["The answer is", "\n"], temperature=0.7, seed=number)
    branch += "The answer is " + ul.gen("answer", max_tokens=4, regex=r"[0-9]{1,3}\.", stop=".")


@ul.function
def solve(s, question, samples, agree):
    s += EXAMPLES + f"Q: {question}\nA:"
    # One prompt, many branches: its KV is computed once and shared by all of them.
    forks = s.fork(samples)
    for number, branch in enumerate(forks):
        think(branch, number)
    # As soon as so many agree the other branches stop, and what they had not generated is saved.
    vote = ul.vote("answer", agree)
    ended = forks.until(vote)
    s["answer"] = vote.winner(ended)
    return ended, vote.counts(ended)


def main() -> None:
    question = "Mia had 7 pens and gave 2 to her brother. How many are left?"
    state = solve.run(question=question, samples=8, agree=3)
    ended, votes = state.ret_value
    print(question)
    for branch in ended:
        print(f" - {branch['chain'].strip()} The answer is {branch['answer']}")
    print(f"Votes: {dict(votes.most_common())}, so the answer is {state['answer']}")
    cost = state.cost
    print(f"{8 - len(ended)} branches were cancelled: {cost.cancelled_calls} calls, at most {cost.tokens_saved} tokens")


if __name__ == "__main__":
    main()
