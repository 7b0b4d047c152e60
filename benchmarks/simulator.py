"""The simulator against the runtime: `python -m benchmarks.simulator`.

Each workload runs on a runtime that records it, with guesses of next tokens on, and the recording is simulated: with a
fit of its own steps, and with one of the steps of all other workloads. The table has what the runtime counted next to
what the simulation did, and how far the simulated throughput is off.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import umbel as ul
from umbel.srt.simulator.command import Check, check
from umbel.srt.simulator.step_model import RecordedStep, fit, read_steps, this_machine
from umbel.srt.simulator.workload import Program, read_workload

from .replay.program import play

FOLDER = Path(__file__).parent / "workloads"
WORKLOADS = {  # name → programs
    "few_shot_batch": 6,
    "tree_of_thought_gsm8k": 2,
    "llm_judge_bsm": 3,
    "multi_turn_chat_short": 6,
    "self_consistency": 4,
    "json_schema_extract": 6,
}
THREADS = 32


def record(programs: Sequence[Program], path: Path, model: str) -> None:
    """Runs programs at once on a runtime that records them."""
    with ul.Runtime(model, debug={"recording": str(path)}) as runtime:
        states = play.run_batch([(program.ops, True) for program in programs], backend=runtime, num_threads=THREADS)
        for state in states:
            state.sync()


def row(name: str, own: Check, others: Check) -> str:
    """Returns the line of a workload."""
    counters = own.counters
    texts = [
        f"{counters[counter][0]:,} and {counters[counter][1]:,}"
        for counter in ("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "forward_rows")
    ]
    rate = own.calls / own.seconds[0]
    error = own.steps.held_out
    median = "" if error is None else f"{error.median:.0%}"
    return (
        f"| {name}, {WORKLOADS[name]} programs | {' | '.join(texts)} | {rate:.2f} | {own.throughput_error:+.1%} | "
        f"{others.throughput_error:+.1%} | {median} |"
    )


def main() -> None:
    """Records, simulates and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--workload", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbel-simulator-") as folder:
        paths: dict[str, Path] = {}
        steps: dict[str, list[RecordedStep]] = {}
        for name in options.workload:
            paths[name] = Path(folder) / f"{name}.jsonl"
            record(read_workload(FOLDER / f"{name}.jsonl").first(WORKLOADS[name]).programs, paths[name], options.model)
            steps[name] = read_steps(paths[name])[0]
        print(
            "| workload | prompt tokens | cached | made | steps | rows | calls a second | off | fit of others | step |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for name, path in paths.items():
            others = [step for other, some in steps.items() if other != name or len(steps) == 1 for step in some]
            of_others = fit(others, machine=this_machine(), model=options.model)
            print(row(name, check(path), check(path, of_others)))


if __name__ == "__main__":
    main()
