"""How many KV slots a run can hold at once, before it runs.

    own stream   ────────┬──────────────┬───► gen          prompts are prefixes of each other: a stream holds what its
    branch 0             ├── gen ───────┤                  longest call in flight has, once; a branch adds what it says
    branch 1             └── gen ── gen ┘                  itself; and what may run at the same time adds up

Which calls run at the same time is read off forks and joins. That one branch may have to wait for a variable of
another is not: a bound that counts them as running together is a bound all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...lang.protocol import Backend
from ..graph import Graph, Node
from ..operations import Begin, Fork, GetForkItem, Join, Options
from .lengths import Lengths


@dataclass(frozen=True, slots=True)
class _Held:
    """What a stream with all its branches holds, beside what it inherited.

    `peak`: at most. `rest`: at most when it has come to its end, by branches that nobody joined.
    """

    peak: int
    rest: int


def peak_tokens(graph: Graph, backend: Backend, arguments: Mapping[str, Any], options: Options | None = None) -> int:
    """A bound of the tokens whose keys one run holds at the same time: never less than they are.

    Args:
        backend: started; it measures text (`tokens_at_most`) and has the chat template.
        arguments: of the run.
        options: sampling fields of the run, such as `max_tokens`.

    Raises:
        ParameterError: an argument is missing, or sampling fields do not fit together.
        TemplateError: as the run would raise it.
    """
    lengths = Lengths(graph, backend, arguments, options)
    branches = _branches(graph)
    held: dict[int, _Held] = {}
    for number in reversed(range(len(graph.streams))):  # branches begin after the stream that they leave
        held[number] = _held(graph, number, lengths, branches, held)
    own = [number for number, stream in enumerate(graph.streams) if isinstance(stream[0].op, Begin)]
    return lengths.beginning + sum(held[number].peak for number in own)


def _held(
    graph: Graph, number: int, lengths: Lengths, branches: Mapping[Node, list[int]], held: Mapping[int, _Held]
) -> _Held:
    """Of one stream; `held` has its branches.

    [── anchor ──)          up to the last fork whose branches still hold something
    [──── tokens ────)      up to the call
    """
    running: dict[int, int] = {}  # branch → what it and its own branches may hold
    anchor = peak = 0
    for node in graph.streams[number]:
        if node in lengths.calls:
            before = node.inputs[0]
            peak = max(peak, lengths.places[before].tokens + lengths.calls[node].holds + sum(running.values()))
        elif isinstance(node.op, Fork):
            running |= {branch: held[branch].peak for branch in branches.get(node, ())}
            anchor = lengths.places[node].tokens
        elif isinstance(node.op, Join):
            for end in node.inputs[1:]:
                branch = graph.stream_of[end]
                if branch in running and graph.streams[branch][-1] is end:
                    running[branch] = held[branch].rest
        if any(running.values()):
            peak = max(peak, anchor + sum(running.values()))
    rest = sum(running.values())
    return _Held(peak, anchor + rest if rest else 0)


def _branches(graph: Graph) -> dict[Node, list[int]]:
    """Fork → the streams that begin there."""
    branches: dict[Node, list[int]] = {}
    for number, stream in enumerate(graph.streams):
        if isinstance(stream[0].op, GetForkItem):
            branches.setdefault(stream[0].inputs[0], []).append(number)
    return branches
