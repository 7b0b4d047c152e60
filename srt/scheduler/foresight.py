"""How much more memory the running requests will need, at the worst moment that is still to come.

Every generation grows by a slot per step until it ends, at the latest with max_tokens, and then gives back what it
alone holds. So need rises until somebody ends, and is largest just before one of the ends:

    need     ╱│  ╱│        a request is admitted when the free slots last beyond all of these moments:
           ╱  │╱  │ ╱│     then nobody has to be sent back later, and more run at the same time than if each
         ╱        │╱ │     was given its longest from the beginning

The idea is that of the Past-Future scheduler (Gong et al., ASPLOS 2025), with max_tokens for the future. Prompts that
are still computed end later by the steps that this takes. A text that ends early only leaves more room.
"""

from collections.abc import Sequence

from ..cache.radix_node import ascend
from .kv_manager import KVSpace
from .request import Generation, Request


def peak_need(requests: Sequence[Request], space: KVSpace, step_tokens: int | None) -> int:
    """Slots beyond those that the requests have now, at the worst moment.

    Args:
        requests: all that run, and those that are about to.
        step_tokens: rows of a step; None: prompts are computed whole.
    """
    rows = sum(request.remaining_rows for request in requests if not request.decoding)
    delay = 1 if step_tokens is None else -(-rows // max(1, step_tokens - len(requests)))
    ends = sorted(
        (_growth(request) + (0 if request.decoding else delay), index) for index, request in enumerate(requests)
    )
    given_back = worst = 0
    for place, (end, index) in enumerate(ends):
        needs = [
            space.missing(requests[i], requests[i].length + min(_growth(requests[i]), end)) for _, i in ends[place:]
        ]
        worst = max(worst, sum(needs) - given_back)
        given_back += _own(requests[index])
    return worst


def _growth(request: Request) -> int:
    """Tokens that it may still generate."""
    if not isinstance(request.job, Generation) or request.job.stop is not None:
        return 0
    return max(0, min(request.job.length_limit - request.length, request.job.sampling.max_tokens - request.generated))


def _own(request: Request) -> int:
    """Slots that nobody else holds: they can be had when it has ended."""
    if request.match is None:
        return 0
    alone = sum(len(node.tokens) for node in ascend(request.match.node) if node.locks == 1 and not node.pins)
    return alone + request.slot_end - request.tree_length
