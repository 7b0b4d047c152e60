"""A batch with a journal, in a process that a test kills: its own program, so that the parent resumes the same one."""

import sys

import umbel as ul

PROGRAMS = 500
AT_ONCE = 16


@ul.function
def ask(s, number):
    s += ul.user(f"Question {number}?") + ul.assistant(ul.gen("answer", max_tokens=16))
    return s["answer"]


def run(base_url: str, api_key: str, journal: str | None) -> list[ul.State]:
    backend = ul.OpenAI("gpt-4o", base_url=base_url, api_key=api_key)
    items = [{"number": number} for number in range(PROGRAMS)]
    return ask.run_batch(items, backend=backend, journal=journal, num_threads=AT_ONCE)


if __name__ == "__main__":
    run(*sys.argv[1:])
