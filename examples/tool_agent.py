"""An agent with two tools: the model calls Python functions, reads what they return, and answers.

Calls are enforced: names are those of the tools, arguments satisfy their types. The default model is a base model, so
the conversation begins with an answer that has a call, in the fence that models without a format of their own get.
"""

import umbel as ul

INHABITANTS = {"Iceland": 390_000, "Norway": 5_600_000, "Malta": 540_000}


@ul.tool
def population(country: str) -> int:
    """Returns how many people live in a country."""
    return INHABITANTS[country]


@ul.tool
def capital(country: str) -> str:
    """Returns the capital of a country."""
    return {"Iceland": "Reykjavik", "Norway": "Oslo", "Malta": "Valletta"}[country]


EXAMPLES = [
    (
        "How many people live in Malta?",
        population.spelled(country="Malta"),
        "```tool_result population\n540000\n```",
        "540,000 people live in Malta.",
    ),
    (
        "What is the capital of Norway?",
        capital.spelled(country="Norway"),
        "```tool_result capital\nOslo\n```",
        "The capital of Norway is Oslo.",
    ),
]


@ul.function(temperature=0)
def ask(s, question):
    s += ul.system("You look facts up with your tools, then answer in one line.")
    for example, call, result, answer in EXAMPLES:
        s += ul.user(example) + ul.assistant(call) + ul.user(result) + ul.assistant(answer)
    s += ul.user(question)
    result = s.call_tools([population, capital], "answer", parallel=False, max_steps=3, max_tokens=48, stop="\n\n")
    return [f"{call.name}({call.arguments['country']!r}) = {call.result!r}" for call in result.calls]


def main() -> None:
    state = ask.run(question="How many people live in Iceland?")
    print(*state.ret_value, state["answer"], sep="\n")
    print(
        f"{state.usage.calls} answers, {state.usage.cached_tokens} of {state.usage.prompt_tokens} prompt tokens cached"
    )


if __name__ == "__main__":
    main()
