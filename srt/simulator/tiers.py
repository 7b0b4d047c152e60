"""Slower tiers of the cache in a coarse simulation: what they hold, and how long it takes to load it.

A tier holds whole pages of what its replica has computed, the least recently used out first; the store is one for all
replicas. What it has of a prompt beyond the device's prefix is loaded where that takes less time than to compute it.
"""

from dataclasses import dataclass

from ...lang.errors import ParameterError
from ..placement.meta_tree import MetaTree

PAGE = 64  # tokens


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier. `tokens`: that it holds; `rate`: tokens a second; `latency`: seconds before the first page is there."""

    name: str
    tokens: int
    rate: float
    latency: float
    shared: bool = False


# Of a 270M model's keys (18 kB a token) on a 2-core machine.
_USUAL = {
    "host": TierModel("host", 0, 500_000.0, 0.0001),
    "disk": TierModel("disk", 0, 100_000.0, 0.001),
    "store": TierModel("store", 0, 50_000.0, 0.002, shared=True),
}


def parse_tiers(text: str) -> tuple[TierModel, ...]:
    """Reads "host=400000,disk=4000000@100000". Raises ParameterError."""
    tiers = []
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        tokens, _, rate = value.partition("@")
        try:
            usual = _USUAL[name]
            tier = TierModel(name, int(tokens), float(rate) if rate else usual.rate, usual.latency, usual.shared)
        except (KeyError, ValueError):
            tier = None
        if tier is None or tier.tokens < PAGE or tier.rate <= 0:
            known = ", ".join(f"{name}=TOKENS" for name in _USUAL)
            raise ParameterError(f"tier {entry!r}; write some of {known}, at least {PAGE} tokens; @RATE is optional")
        tiers.append(tier)
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ParameterError(f"tiers {text!r} name one twice; write each once")
    return tuple(tiers)


class TierContents:
    """Knows the contents of one tier, for all replicas."""

    def __init__(self, model: TierModel) -> None:
        self.model = model
        self._tree = MetaTree()

    def store(self, replica: int, tokens: bytes, salt: str) -> None:
        owner = 0 if self.model.shared else replica
        self._tree.insert(owner, tokens, salt)
        self._tree.evict(owner, self.model.tokens)

    def longest(self, replica: int, tokens: bytes, salt: str) -> int:
        """Returns how many tokens of whole pages it has."""
        owner = 0 if self.model.shared else replica
        held = self._tree.lengths(tokens, salt, replicas=owner + 1).held[owner]
        return int(held) // PAGE * PAGE

    def seconds(self, tokens: int) -> float:
        """Returns how long it takes to load so many tokens."""
        return self.model.latency + tokens / self.model.rate
