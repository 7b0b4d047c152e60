"""`python -m benchmarks.hosted`: programs on a server, as they are written and with speculative execution.

Without `--base-url` the script serves the default model with a peer of the benchmark (vLLM's CPU build; see
`benchmarks/peers/vllm_cpu.py` for what it needs). Every program runs one at a time in each form, greedily, so that the
variables can be compared one by one.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import umbel as ul

from ..peers.locate import add_arguments, create, find
from ..peers.peer import PeerError
from ..peers.served import ServedPeer
from .programs import CASES, Case

Entry = tuple[float, int, str]  # log-probability, token, text

DIALECT = ("vllm_cpu", "llama_cpp")  # peers whose own server speaks OpenAI's dialect

FORMS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("plain", {}),
    ("64 tokens", {"num_api_spec_tokens": 64}),
    ("auto", {"speculate": "auto"}),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that is not what the plain form gave.

    `margin`: log-probability of the plain form's token less that of the next likely one, where the two texts part. A
    server computes the same position once in a long reply and once in a prompt, with other roundings.
    """

    name: str
    field: str
    plain: str
    other: str
    margin: float


@dataclass(frozen=True, slots=True)
class Row:
    """One program in one form: what all its runs cost."""

    program: str
    form: str
    runs: int
    equal: int  # variables that are what the plain form gave
    variables: int
    differences: tuple["Difference", ...]
    usage: ul.Usage
    wasted: int  # tokens generated and not used
    seconds: float  # median of a run


def measure(case: Case, backend: ul.OpenAI) -> Iterator[Row]:
    """The plain form first: the others are compared with it."""
    plain: list[list[str]] = []
    for form, options in FORMS:
        found, states, seconds = [], [], []
        for arguments in case.arguments:
            started = time.perf_counter()
            state = case.program.run(**arguments, **options, backend=backend)
            found.append([state[field] for field in case.fields])
            seconds.append(time.perf_counter() - started)
            states.append(state)
        plain = plain or found
        costs = [state.cost for state in states]
        yield Row(
            program=case.program.name,
            form=form,
            runs=len(found),
            equal=sum(a == b for one, other in zip(plain, found, strict=True) for a, b in zip(one, other, strict=True)),
            variables=len(found) * len(case.fields),
            differences=tuple(differences(case, backend, plain, found)),
            usage=sum((cost.usage for cost in costs), ul.Usage()),
            wasted=sum(cost.speculation.output_tokens_wasted for cost in costs),
            seconds=statistics.median(seconds),
        )


def differences(
    case: Case, backend: ul.OpenAI, plain: Sequence[Sequence[str]], found: Sequence[Sequence[str]]
) -> Iterator[Difference]:
    """The first of each run: what follows it stands behind another text."""
    for arguments, ours, theirs in zip(case.arguments, plain, found, strict=True):
        for field, one, other in zip(case.fields, ours, theirs, strict=True):
            if one != other:
                yield Difference(arguments["name"], field, one, other, margin(case, backend, arguments, field, other))
                break


def margin(case: Case, backend: ul.OpenAI, arguments: Mapping[str, str], field: str, other: str) -> float:
    """How near `other` is to what the plain form says; see `parting`."""
    state = case.program.run(**arguments, backend=backend, return_logprob=True, top_logprobs_num=2)
    facts = state.get_meta_info(field)
    return parting(facts["output_token_logprobs"], facts["output_top_logprobs"], other)


def parting(tokens: Sequence[Entry], tops: Sequence[Sequence[Entry]], other: str) -> float:
    """How much more likely the tokens of one text were than those that lead to `other`, at the place nearest to where
    they part; not a number where no likely token leads there.

    A token of the one text may end inside a token of the other: a blank before digits, and a word with its blank.
    """
    read, margin = "", math.nan
    for (taken, _, text), top in zip(tokens, tops, strict=True):
        if not other.startswith(read):
            break
        rest = other[len(read) :]
        others = [chance for chance, _, begun in top if begun and begun != text and rest.startswith(begun)]
        margin = taken - max(others) if others else margin
        read += text
    return margin


def table(rows: Sequence[Row]) -> str:
    """Markdown; tokens and calls per run."""
    lines = [
        "| program | form | calls | input tokens | output tokens | wasted | equal variables | s, median |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        usage = row.usage
        figures = (usage.calls, usage.prompt_tokens, usage.completion_tokens, row.wasted)
        cells = " | ".join(f"{figure / row.runs:.1f}" for figure in figures)
        lines.append(f"| {row.program} | {row.form} | {cells} | {row.equal} of {row.variables} | {row.seconds:.2f} |")
    for row in rows:
        for each in row.differences:
            lines.append(
                f"\n{row.program}({each.name!r}), {row.form}: {each.field} is {each.other!r}, not {each.plain!r}; "
                f"{each.margin:.3f} nats between the two tokens"
            )
    return "\n".join(lines)


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """The base URL of a server that runs for the length of the block."""
    if options.base_url is not None:
        yield options.base_url
        return
    found = find(options.peer_python, options.peer_model, os.environ)
    if options.peer not in found:
        raise PeerError(
            f"{options.peer} has no interpreter; write --peer-python {options.peer}=PATH, or --base-url URL"
        )
    peer = create(options.peer, found[options.peer])
    assert isinstance(peer, ServedPeer), "those of DIALECT are servers"
    peer.start()
    try:
        yield peer.base_url
    finally:
        peer.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosted", description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-url", help="of a server that runs already, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="m", help="its name on that server")
    parser.add_argument("--peer", default="vllm_cpu", choices=DIALECT)
    add_arguments(parser)
    options = parser.parse_args()
    with served(options) as base_url:
        backend = ul.OpenAI(options.model, base_url=base_url, api_key="none", mode="completion")
        print(table([row for case in CASES for row in measure(case, backend)]))


if __name__ == "__main__":
    main()
