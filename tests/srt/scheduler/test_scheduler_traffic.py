"""Hit rates under traffic like the paper's workloads, 32 programs in flight, against the optimum of the same run."""

import random
from collections.abc import Iterator

import pytest
from umbel.srt.scheduler.scheduler import PolicyName

from ..traffic import WORKLOADS, Program, Run, play

PROGRAMS = {"few_shot": 48, "exam": 64, "judge": 36, "thoughts": 40, "chat": 36, "agent": 36}
LIMITS = {"max_wait": 1e9, "max_step_tokens": 128}


def programs(workload: str) -> Iterator[Program]:
    return (WORKLOADS[workload](random.Random(number), number) for number in range(PROGRAMS[workload]))


def working_set(workload: str) -> int:
    """Tokens of the tree of the first 32 programs, everything kept."""
    first = (WORKLOADS[workload](random.Random(number), number) for number in range(32))
    return play(first, pool=100_000, **LIMITS).engine.scheduler.kv.cache.total_tokens


def run(workload: str, share: float, **settings: object) -> Run:
    return play(programs(workload), pool=round(share * working_set(workload)), **{**LIMITS, **settings})


@pytest.mark.parametrize(
    "workload", [pytest.param(name, marks=[pytest.mark.nightly] * (index % 2)) for index, name in enumerate(WORKLOADS)]
)
def test_a_pool_of_one_working_set_reaches_98_percent_of_the_optimum(workload: str) -> None:
    result = run(workload, 1.0)
    assert 0.98 * result.optimal <= result.achieved <= result.optimal
    assert result.engine.count("retractions") == 0


def test_in_a_small_pool_the_order_decides() -> None:
    """A third of the working set: longest prefix first loses little, arrival loses much."""
    achieved = {}
    for policy in PolicyName:
        result = run("exam", 0.3, policy=policy)
        achieved[policy] = result.achieved / result.optimal
    assert achieved[PolicyName.LPM] > 0.9
    assert achieved[PolicyName.FCFS] < 0.7


def test_switches_change_the_order_and_no_answer() -> None:
    """In a small pool, so that eviction and waiting happen."""
    switches = ("radix_cache", "in_step_sharing")
    settings = [
        {},
        {"overlap": True},
        *({switch: False} for switch in switches),
        *({"policy": policy} for policy in PolicyName),
    ]
    answers = []
    for setting in settings:
        result = play((WORKLOADS["thoughts"](random.Random(i), i) for i in range(4)), pool=180, **LIMITS, **setting)
        answers.append(sorted(zip(map(tuple, result.prompts), map(tuple, result.answers), strict=True)))
    assert all(answer == answers[0] for answer in answers)
