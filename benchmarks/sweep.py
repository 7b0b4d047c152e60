"""The paper's figure 8 a, b: the same programs at several cache hit rates, on one runtime.

The paper disables a part of the matched tokens at run time. Here a share of the calls gets a cache namespace of its
own, so that it finds nothing and leaves nothing behind: its keys also take room in the pool, as they would. Without
hints, since a prefix that is computed ahead of a fork would be found by none of the calls that are alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import umbel as ul
from umbel.srt.simulator.workload import Workload
from umbel.srt.tokenizer.prompt import PromptEncoder

from .configuration import FULL
from .measure import CONCURRENCY, measure
from .record.results import SweepPoint
from .replay.recorder import Call, Generated, Recorder
from .systems import Umbel

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
WORKLOAD = "tree_of_thought_gsm8k"  # as in the paper


def sweep(
    runtime: ul.Runtime,
    workload: Workload,
    encoder: PromptEncoder,
    *,
    shares: Sequence[float] = SHARES,
    concurrency: int = CONCURRENCY,
) -> list[SweepPoint]:
    return [_point(runtime, workload, encoder, share, concurrency) for share in shares]


def _point(
    runtime: ul.Runtime, workload: Workload, encoder: PromptEncoder, share: float, concurrency: int
) -> SweepPoint:
    recorder = _Keeping(runtime, hints=False, salted_share=share, first_tokens=True)
    configuration = replace(FULL, name=f"salted {share:g}")
    system = Umbel(configuration, runtime, recorder=recorder)
    run = measure(system, workload, concurrency=concurrency, warm=0, encoder=encoder)
    assert run.reuse is not None, "an encoder was given and calls were made"
    if run.failures:
        raise RuntimeError(f"{workload.name} failed at a salted share of {share:g}: {run.failures[0]}")
    calls = [call for call in recorder.kept if isinstance(call, Generated) and call.first_token is not None]
    first_tokens = [call.first_token for call in calls if call.first_token is not None]
    return SweepPoint(
        workload=workload.name,
        salted_share=share,
        hit_rate=run.reuse.achieved,
        batch_size=run.counters["completion_tokens"] / run.counters["steps"],
        rate=run.rate,
        first_token=sum(first_tokens) / len(first_tokens),
        call_seconds=sum(call.seconds for call in calls) / len(calls),
    )


class _Keeping(Recorder):
    """Also keeps what was taken."""

    kept: list[Call]

    def take(self) -> list[Call]:
        self.kept = super().take()
        return self.kept
