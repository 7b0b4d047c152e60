"""Compares prefix reuse of DSPy on `umbel.dspy.LM` with that of our own program on the same prompts.

    python -m benchmarks.dspy_reuse [--requests 16] [--fallback]

The questions are those of the workload `dspy_rag`, answered by a compiled retrieval program of DSPy. Our program says
the messages that DSPy sent, with the same schemas, in the same order: one question after the other, or all at once
(`dspy.Parallel` and `run_batch`). Each side gets the default model with an empty cache and temperature 0. The table has
the share of prompt tokens that were cached. The command fails where two sides are more than 2 points apart.
"""

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import dspy
import umbel as ul
from umbel.dspy import LM, JSONAdapter

WORKLOAD = Path(__file__).parent / "workloads" / "dspy_rag.jsonl"
MOST_APART = 0.02
MOST_TOKENS = 24
_QUESTION = re.compile(r"Context:\n(.*?)\n\nQuestion: (.*?)\n", re.DOTALL)

Call = tuple[list[dict[str, str]], dict[str, Any] | None]  # messages and JSON Schema
Usages = list[tuple[int, int]]  # cached tokens and prompt tokens
Question = dict[str, str]


@ul.function
def answered(s: ul.State, calls: list[Call]) -> None:
    """Answers what DSPy sent for one question, one call after the other."""
    for messages, schema in calls:
        (branch,) = s.fork(1)
        for message in messages:
            branch += ul.role(message["role"], message["content"])
        branch += ul.assistant(ul.gen("answer", max_tokens=MOST_TOKENS, temperature=0, json_schema=schema))
        branch["answer"]


def questions(most: int) -> list[Question]:
    """Returns context and question of the first requests of the workload."""
    with WORKLOAD.open(encoding="utf-8") as lines:
        bodies = [json.loads(line) for line in lines if '"ops"' in line][:most]
    found = [_QUESTION.findall("".join(op.get("text", "") for op in body["ops"]))[-1] for body in bodies]
    return [{"context": context, "question": question} for context, question in found]


def with_dspy(adapter: Any, asked: list[Question], at_once: bool) -> tuple[Usages, list[list[Call]]]:
    """Runs a compiled retrieval program. Returns usage of each call, and the calls of each question."""
    with ul.Runtime() as runtime:
        lm = LM(runtime, cache=False, temperature=0, max_tokens=MOST_TOKENS)
        program = dspy.ChainOfThought("context, question -> answer")
        program.predictors()[0].demos = [
            dspy.Example(**each, reasoning="The context says it.", answer="as in the context") for each in asked[:2]
        ]

        def ask(**question: str) -> None:
            with contextlib.suppress(dspy.utils.exceptions.AdapterParseError):  # the model is small: prompts count
                program(**question)

        with dspy.context(lm=lm, adapter=adapter):
            if at_once:
                pairs = [(ask, dspy.Example(**each).with_inputs(*each)) for each in asked[2:]]
                dspy.Parallel(num_threads=len(pairs), disable_progress_bar=True)(pairs)
            else:
                for each in asked[2:]:
                    ask(**each)
        history: list[Any] = lm.history
    usages = [call["usage"] for call in history]
    cached = [(each["prompt_tokens_details"]["cached_tokens"], each["prompt_tokens"]) for each in usages]
    by_question = [
        [_call_of(call) for call in history if each["question"] in call["messages"][-1]["content"]]
        for each in asked[2:]
    ]
    assert sum(len(calls) for calls in by_question) == len(history), "each call is of one question"
    return cached, by_question


def _call_of(call: dict[str, Any]) -> Call:
    match call["kwargs"].get("response_format"):
        case type() as kind:  # DSPy's own JSONAdapter gives a Pydantic class
            return call["messages"], kind.model_json_schema()
        case {"json_schema": {"schema": schema}}:
            return call["messages"], schema
        case {"type": "json_object"}:
            return call["messages"], {"type": "object"}
    return call["messages"], None


def with_program(calls: list[list[Call]], at_once: bool) -> Usages:
    """Runs our own program on the same messages. Returns usage of each question."""
    with ul.Runtime() as runtime:
        if at_once:
            states = answered.run_batch([{"calls": each} for each in calls], backend=runtime)
        else:
            states = [answered.run(each, backend=runtime) for each in calls]
        usages = [state.usage for state in states]
    return [(usage.cached_tokens, usage.prompt_tokens) for usage in usages]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--fallback", action="store_true", help="also ask again in JSON where an answer does not parse")
    given = parser.parse_args()
    asked = questions(given.requests + 2)
    adapters = {"ChatAdapter": dspy.ChatAdapter(use_json_adapter_fallback=False), "JSONAdapter": JSONAdapter()}
    if given.fallback:
        adapters |= {"ChatAdapter, then JSON": dspy.ChatAdapter(), "XMLAdapter, then JSON": dspy.XMLAdapter()}
    far = False
    print("| adapter | questions | calls | prompt tokens, DSPy | ours | cached, DSPy | ours | points apart |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, adapter in adapters.items():
        for at_once in (False, True):
            theirs, calls = with_dspy(adapter, asked, at_once)
            ours = with_program(calls, at_once)
            (cached, tokens), (our_cached, our_tokens) = (map(sum, zip(*side, strict=True)) for side in (theirs, ours))
            apart = cached / tokens - our_cached / our_tokens
            far = far or abs(apart) > MOST_APART
            order = "all at once" if at_once else "one by one"
            print(
                f"| {name} | {order} | {len(theirs)} | {tokens:,} | {our_tokens:,} | {cached / tokens:.2%} "
                f"| {our_cached / our_tokens:.2%} | {100 * apart:+.2f} |",
                flush=True,
            )
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
