"""Multi-turn chat: every turn reuses the KV of the whole conversation before it."""

import umbel as ul

OPENING = """\
A friendly assistant answers in one short sentence.

User: Hello!
Assistant: Hello! How can I help you today?
User: What is the largest planet?
Assistant: The largest planet in the solar system is Jupiter.
"""


@ul.function
def chat(s, questions):
    s += OPENING
    answers = []
    for question in questions:
        s += f"User: {question}\nAssistant:"
        s += ul.gen("answer", max_tokens=32, stop="\n", temperature=0)
        meta = s.get_meta_info("answer")
        answers.append((question, s["answer"], meta["cached_tokens"], meta["prompt_tokens"]))
        s += "\n"
    return answers


def main() -> None:
    state = chat.run(
        questions=["What is the capital of Japan?", "Which ocean is the biggest?", "Who was Isaac Newton?"]
    )
    for question, answer, cached, prompt in state.ret_value:
        print(f"User: {question}\nAssistant:{answer}\n  [{cached} of {prompt} prompt tokens cached]")


if __name__ == "__main__":
    main()
