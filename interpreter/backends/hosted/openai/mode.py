"""Which of the two APIs a backend uses, and what it can do there."""

from typing import Literal

from .....lang.errors import CapabilityError
from .....lang.protocol import Capabilities
from ..strict_schema import WRAPPING_TOKENS
from .constraints import Mode, kinds
from .profiles import Profile

AskedMode = Literal["auto", "chat", "completion"]


def mode_of(asked: AskedMode, profile: Profile, backend: str) -> Mode:
    """Raises CapabilityError when the model does not have the mode that was asked for. `backend`: its name."""
    mode: Mode = "completion" if asked == "completion" or (asked == "auto" and not profile.chat) else "chat"
    if not (profile.chat if mode == "chat" else profile.completion):
        other = "completion" if mode == "chat" else "chat"
        raise CapabilityError(f"{backend} ({profile.name}) has no {mode} API; write mode={other!r}")
    return mode


def capabilities_of(backend: str, model: str, profile: Profile, mode: Mode, max_context: int | None) -> Capabilities:
    """`max_context`: as the server says; None: as the profile does."""
    return Capabilities(
        backend,
        score=profile.scores and mode == "completion",
        images=profile.images and mode == "chat",
        logprobs=profile.top_logprobs >= 0,
        max_context=max_context or profile.max_context,
        cache_minimum=profile.cache_minimum,
        constraints=kinds(profile, mode),
        asks_again=True,
        speculation=True,
        converses=mode == "chat",
        temperature="temperature" in profile.sampling,
        thinking_tokens=profile.thinking_tokens,
        continues=profile.continues or mode == "completion",
        model=model,
        wrapping_tokens=WRAPPING_TOKENS if mode == "chat" else 0,
        most_n=profile.n,
    )
