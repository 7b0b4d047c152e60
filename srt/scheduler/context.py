"""Defines the context that all parts of one scheduler share.

The scheduler is one object in several files: planner, commit, constrained texts and choice searches work on the same
requests, pool and counters. Each part gets this context instead of callbacks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..constraints.matcher_cache import MatcherCache
from ..core.clock import Clock
from ..core.counters import Counters
from ..core.faults import FaultHook
from .config import SchedulerConfig
from .kv_manager import KVManager
from .request import Request
from .request_factory import RequestFactory
from .request_table import RequestTable
from .stopping import Stop, accept


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """Shared state of one scheduler. The Scheduler makes it once and owns all of it.

    Attributes:
        token_bytes: the bytes of a token, b"" for control tokens.
        constraints: opens constraints and has the vocabulary's trie; None: requests that need either are refused.
    """

    config: SchedulerConfig
    kv: KVManager
    table: RequestTable
    factory: RequestFactory
    counters: Counters
    clock: Clock
    faults: FaultHook
    token_bytes: Callable[[int], bytes]
    constraints: MatcherCache | None

    def append_token(self, request: Request, token: int) -> Stop | None:
        """Appends a sampled or forced token to a text; returns a Stop if the text ends with it."""
        self.counters.completion_tokens += 1
        return accept(request, token, self.token_bytes, self.factory.longest)
