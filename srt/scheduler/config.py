"""Settings of the scheduler, each with its reason; validated when made."""

import math
from dataclasses import dataclass
from enum import StrEnum

from ...lang.errors import ParameterError


class PolicyName(StrEnum):
    LPM = "lpm"  # longest prefix match first
    FCFS = "fcfs"  # first come, first served


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings by which requests share the engine's steps and its KV pool.

    Attributes:
        max_running: sequences that hold slots at the same time.
        max_step_tokens: rows of one step; decode rows come first, prompts are cut into chunks that fit
            in the rest (at least one row, so that prompts advance under any load). None: no chunks.
        max_step_logits: rows of one step whose logits are computed; log-probabilities of long prompts would
            otherwise take gigabytes at a vocabulary of 262,144. At least max_running.
        policy: order of waiting requests; policy.py has the definitions.
        policy_window: waiting requests that are ordered by their cached prefix; the others keep their order of arrival.
        radix_cache: keep and reuse keys and values of finished and running requests.
        in_step_sharing: a request may use keys that another request computes in the same step.
        least_ahead: a hint that misses fewer tokens than this is dropped, unless it pins.
        pin_share: the part of the pool that all pins together may hold.
        max_wait: seconds after which a waiting request precedes every cache-aware order; policy.Ageing bounds its
            whole wait.
        headroom: slots left for every running sequence when another one is admitted, against early retraction.
        partial_logits: the runner may answer a row that only chooses a token with the token, without its logits.
        jump_forward: tokens that a constraint forces are appended without a decode step of their own.
        constraint_fuel: automaton transitions that one step may compute, some 6 ms of Python; masks that need more
            are finished in later steps.
        overlap: a step is planned while the previous one runs (step.py); the runner is a batch.AsyncRunner.
        check_every_step: verify pool and tree after every step (tests; costs time in the size of the pool).
    """

    max_running: int = 64
    max_step_tokens: int | None = 512
    max_step_logits: int = 256
    policy: PolicyName = PolicyName.LPM
    policy_window: int = 256
    radix_cache: bool = True
    in_step_sharing: bool = True
    least_ahead: int = 0
    pin_share: float = 0.5
    max_wait: float = 10.0
    headroom: int = 8
    partial_logits: bool = True
    jump_forward: bool = True
    constraint_fuel: int = 250
    overlap: bool = False
    check_every_step: bool = False

    def __post_init__(self) -> None:
        least = {
            "max_running": 1,
            "max_step_logits": self.max_running,
            "policy_window": 1,
            "headroom": 0,
            "constraint_fuel": 1,
        }
        if self.max_step_tokens is not None:
            least["max_step_tokens"] = 1
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ParameterError(f"{name}={value!r}; write an integer of at least {low}")
        for name, kind in self.__annotations__.items():
            if kind is bool and not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.policy, PolicyName):
            known = ", ".join(f"PolicyName.{name.name}" for name in PolicyName)
            raise ParameterError(f"policy={self.policy!r}; write one of {known}")
        if not 0 <= self.pin_share <= 1:
            raise ParameterError(f"pin_share={self.pin_share!r}; write a part of the pool, 0 to 1")
        if not math.isfinite(self.max_wait) or self.max_wait < 0:
            raise ParameterError(f"max_wait={self.max_wait!r}; write seconds, 0 or more")
