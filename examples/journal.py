"""A batch with a journal: what was paid for once is read the next time, after a crash as well."""

import tempfile
from pathlib import Path

import umbel as ul

CITIES = ["Paris", "Rome", "Oslo", "Lima"]


@ul.function
def describe(s, city):
    s += f"The capital is {city}. It is known for"
    s += ul.gen("fame", max_tokens=12, stop="\n", temperature=0.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "run.jsonl"
        for cities in (CITIES[:2], CITIES):  # the first time, the batch did not get far
            states = describe.run_batch([{"city": city} for city in cities], journal=journal)
            cost = sum(state.cost for state in states)
            print(f"{cost.usage.calls} calls made, {cost.read.calls} read from {journal.name}")
        for city, state in zip(CITIES, states):
            print(f"{city}:{state['fame']}")


if __name__ == "__main__":
    main()
