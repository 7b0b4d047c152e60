"""An evaluation with a journal, in a process that a test kills; the parent goes on with the same program."""

import sys
from typing import Any

import umbel as ul

ROWS = 24
AT_ONCE = 4


@ul.function
def ask(s, number):
    s += ul.user(f"Question {number}?") + ul.assistant(ul.gen("answer", max_tokens=16))


@ul.function
def judge(s, answer):
    s += ul.user(f"Is this an answer: {answer}") + ul.assistant(ul.gen("verdict", max_tokens=4))


def run(base_url: str, api_key: str, journal: str, **options: Any) -> ul.EvaluationReport:
    backend = ul.OpenAI("gpt-4o", base_url=base_url, api_key=api_key)

    def judged(state: ul.State, row: dict[str, Any]) -> bool:
        return judge.run(answer=state["answer"], backend=backend)["verdict"] == "yes"

    rows = [{"number": number, "label": number % 2} for number in range(ROWS)]
    return ul.evaluate(ask, rows, judged, backend=backend, journal=journal, num_threads=AT_ONCE, **options)


if __name__ == "__main__":
    run(*sys.argv[1:])
