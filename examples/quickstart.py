"""The smallest program: constant text, one generation, one choice."""

import umbel as ul

EXAMPLES = """\
Q: What is the capital of Italy?
A: Rome
Topic: geography

Q: Who wrote Hamlet?
A: William Shakespeare
Topic: literature

Q: What is the chemical symbol of gold?
A: Au
Topic: science

"""


@ul.function
def answer(s, question):
    s += EXAMPLES + f"Q: {question}\nA:"
    s += ul.gen("answer", max_tokens=16, stop="\n", temperature=0)
    s += "\nTopic:" + ul.select("topic", choices=[" geography", " literature", " science"])


def main() -> None:
    for question in ("What is the capital of France?", "Who wrote Don Quixote?"):
        state = answer.run(question=question)  # returns when the body has run; reading a variable waits
        print(f"{question}{state['answer']}  ({state['topic'].strip()})")
        print(f"  {state.usage.prompt_tokens} prompt tokens, {state.usage.cached_tokens} of them cached")


if __name__ == "__main__":
    main()
