"""A backend that notes what it is asked, and what can be seen of a run."""

from collections.abc import AsyncIterator
from typing import Any

import umbel as ul
from umbel.lang.prompt import Part
from umbel.lang.protocol import Backend, Capabilities, Chunk, Done, Final, GenRequest, Hint, Scored, ScoreRequest


class Watched:
    """Another backend, whose requests are kept without what differs between two runs of one program."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.asked: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def chat_template(self) -> ul.ChatTemplate:
        return self._backend.chat_template

    async def start(self) -> None:
        await self._backend.start()

    def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        self.asked.append(repr((request.prompt, request.sampling, request.constraint, request.token_healing)))
        return self._backend.generate(request)

    async def score(self, request: ScoreRequest) -> Scored:
        self.asked.append(repr((request.prompt, request.choices, request.unconditional, request.probability)))
        return await self._backend.score(request)

    def hint(self, hint: Hint) -> None:
        self._backend.hint(hint)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return self._backend.tokens_at_most(prompt)

    async def control(self, verb: str) -> Done:
        return await self._backend.control(verb)

    async def close(self) -> None:
        await self._backend.close()

    def forget(self) -> list[str]:
        """What was asked since the last time, in an order of its own: branches come in any."""
        asked, self.asked = sorted(self.asked), []
        return asked


def seen(state: ul.State) -> dict[str, Any]:
    """All that a run shows and that two runs have in common."""
    return {
        "variables": {name: state[name] for name in state.variables()},
        "facts": {name: facts(state.get_meta_info(name)) for name in state.variables()},
        "text": state.text(),
        "pieces": "".join(state.text_iter()),
        "messages": state.messages(),
        "result": state.ret_value,
        "error": state.error(),
    }


def facts(meta: Any) -> Any:
    """Without what depends on the cache and on the number of the request."""
    if isinstance(meta, list):
        return [facts(entry) for entry in meta]
    return {name: value for name, value in meta.items() if name not in ("id", "cached_tokens")}


def known_facts(expected: Any, found: Any) -> Any:
    """`found` where `expected` has facts. A graph does not tell what a program assigned from what was generated, so
    `s["x"] = s["x"]` keeps the facts of the call, and a list that a join gathers of branches that all read one call, or
    assign what it gave, has none."""
    if not _has_facts(expected):
        return expected
    if isinstance(expected, list):
        of_calls = [each for each in expected if _has_facts(each)]
        if found == {} and all(each == of_calls[0] for each in of_calls):
            return expected
        return [known_facts(*pair) for pair in zip(expected, found, strict=True)]
    return found


def _has_facts(meta: Any) -> bool:
    return any(map(_has_facts, meta)) if isinstance(meta, list) else bool(meta)
