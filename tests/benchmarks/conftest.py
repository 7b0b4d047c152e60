"""What the benchmark's own tests share: a backend asked as a peer is asked, and programs to run."""

from collections.abc import Sequence
from itertools import count

from umbel.interpreter import selecting as deciding
from umbel.lang.prompt import Text
from umbel.lang.protocol import Backend, Final, GenRequest, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.simulator.workload import Schema


class BackendAsPeer:
    """A backend that is given every prompt as one text, as a server over HTTP would be."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.numbers = count()
        self.prompts: list[str] = []

    async def generate(
        self,
        prompt: str,
        *,
        max_tokens: int,
        stop: Sequence[str],
        temperature: float,
        ignore_eos: bool,
        regex: str | None = None,
        json_schema: Schema | None = None,
    ) -> str:
        assert regex is None
        assert json_schema is None
        self.prompts.append(prompt)
        sampling = SamplingParams(
            max_tokens=max_tokens, stop=tuple(stop), temperature=temperature, ignore_eos=ignore_eos
        )
        async for event in self.backend.generate(GenRequest(f"peer-{next(self.numbers)}", (Text(prompt),), sampling)):
            if isinstance(event, Final):
                return event.completions[0].text
        raise AssertionError("a request without an end")

    async def score(self, prompt: str, choices: Sequence[str]) -> int:
        self.prompts.append(prompt)
        scored = await self.backend.score(ScoreRequest(f"peer-{next(self.numbers)}", (Text(prompt),), tuple(choices)))
        return deciding.decide("token_length_normalized", scored.choices).index
