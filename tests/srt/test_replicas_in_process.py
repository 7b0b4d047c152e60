"""The whole runtime with several engines: texts are those of one engine, and what calls share is computed once."""

import asyncio

import pytest
from umbel.lang.prompt import Text
from umbel.lang.protocol import Final, GenRequest, Origin
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

PREFIX_TOKENS = 2_000


async def final_of(backend: LocalBackend, label: str, text: str, origin: Origin = Origin()) -> Final:  # noqa: B008
    request = GenRequest(label, (Text(text),), SamplingParams(max_tokens=4, temperature=0.7, seed=3), False, origin)
    *_, last = [event async for event in backend.generate(request)]
    assert isinstance(last, Final)
    return last


def test_texts_do_not_depend_on_the_number_of_engines() -> None:
    async def texts(replicas: int) -> list[str]:
        backend = LocalBackend(replicas=replicas)
        prompts = [f"{index % 5} is how a text begins, {index}" for index in range(24)]
        finals = await asyncio.gather(*(final_of(backend, prompt, prompt) for prompt in prompts))
        used = {final.placed.replica for final in finals if final.placed is not None}
        assert len(used) == (replicas if replicas > 1 else 0)
        await backend.close()
        return [final.completions[0].text for final in finals]

    async def compare() -> None:
        assert await texts(1) == await texts(2) == await texts(3)

    asyncio.run(compare())


async def computed_by_forks(policy: str, branches: int, trials: int) -> list[int]:
    """Returns for each trial how many prompt tokens were computed for branches over a prefix that is new."""
    backend = LocalBackend(replicas=2, placement=policy, debug={"check_every_step": False})
    found = []
    for trial in range(trials):
        prefix = "".join(chr(ord("A") + (trial * 7 + place * (trial + 3)) % 26) for place in range(PREFIX_TOKENS))
        origin = Origin(fork_group=f"fork {trial}", salt=f"trial-{trial}")
        calls = (final_of(backend, f"{trial}.{branch}", f"{prefix}{branch}", origin) for branch in range(branches))
        finals = await asyncio.gather(*calls)
        found.append(sum(final.usage.prompt_tokens - final.usage.cached_tokens for final in finals))
    await backend.close()
    return found


@pytest.mark.parametrize("branches", [2, 4, 8])
def test_the_branches_of_a_cold_fork_compute_their_prefix_once(branches: int) -> None:
    computed = asyncio.run(computed_by_forks("added-delay", branches, 10))
    assert max(computed) <= PREFIX_TOKENS + 1 + branches, "each branch has one token of its own"
