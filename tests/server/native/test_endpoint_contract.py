"""`RuntimeEndpoint` works with this server: by SGLang's API, as with others, and by the messages of the runtime."""

import asyncio
from typing import Any

import httpx2
import pytest
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.sglang.endpoint import RuntimeEndpoint
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.prompt import Text
from umbel.lang.protocol import Backend, Final, GenRequest, Scored, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.server.app import application
from umbel.server.front import Front
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend

from ... import conformance


class Served(RuntimeEndpoint):
    """An endpoint whose server is in the same process."""

    def __init__(self, local: LocalBackend | None = None, **options: Any) -> None:
        self.local = local or LocalBackend()
        self.front = Front(self.local, limits=HttpLimits(cache_minimum=1))  # the marks of the suite are short
        wire = httpx2.ASGITransport(application(self.front))
        super().__init__("http://localhost", environment=Environment(wire=wire, variables={}), **options)

    async def prepare(self) -> None:
        await self.front.start()
        await super().prepare()

    async def close(self) -> None:
        await super().close()
        await self.local.close()


@pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
@pytest.mark.parametrize("dialect", ["auto", pytest.param("sglang", marks=pytest.mark.nightly)])
@pytest.mark.sampled(4)
def test_an_endpoint_conforms_on_this_server(case: conformance.Case, dialect: str) -> None:
    conformance.check(case, lambda: Served(server=dialect))


PROMPT = (Text("is it the "),)
ASKED = GenRequest(
    "a",
    PROMPT,
    SamplingParams(max_tokens=9, temperature=0.0, stop=("q",), logprobs=True, top_logprobs=2, prompt_logprobs_from=1),
)
CHOICES = ScoreRequest("s", PROMPT, ("yes", "no", "end"), unconditional=True)


async def told(backend: Backend) -> tuple[Final, Scored]:
    try:
        await backend.start()
        (final,) = [event async for event in backend.generate(ASKED) if isinstance(event, Final)]
        return final, await backend.score(CHOICES)
    finally:
        await backend.close()


def test_an_endpoint_tells_what_the_runtime_tells() -> None:
    """Text, end, log-probabilities of prompt and text, and scores, which the client takes from those of prompts."""
    over_http, scores = asyncio.run(told(Served(server="sglang")))
    directly, expected = asyncio.run(told(LocalBackend()))
    (mine,), (other,) = over_http.completions, directly.completions
    assert (mine.text, mine.finish_reason, mine.matched_stop) == (other.text, other.finish_reason, other.matched_stop)
    assert [token.logprob for token in mine.logprobs] == pytest.approx([token.logprob for token in other.logprobs])
    assert [token.text for token in mine.logprobs] == [token.text for token in other.logprobs]
    known = {token.token_id: token.logprob for token in directly.prompt_logprobs}
    assert {token.token_id: token.logprob for token in over_http.prompt_logprobs} == pytest.approx(known)
    for one, its in zip(scores.choices, expected.choices, strict=True):
        assert one.token_ids == its.token_ids
        assert one.logprobs == pytest.approx(its.logprobs, abs=1e-5)
        assert one.unconditional == pytest.approx(its.unconditional, abs=1e-5)


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("dialect", ["sglang", "auto"])
def test_an_endpoint_takes_the_template_of_the_server(dialect: str) -> None:
    async def templates() -> tuple[ChatTemplate, ChatTemplate]:
        endpoint = Served(LocalBackend(chat_template=TEMPLATE), server=dialect)
        await endpoint.start()
        try:
            return endpoint.chat_template, endpoint.local.chat_template
        finally:
            await endpoint.close()

    told, its = asyncio.run(templates())
    assert (
        (told.source, told.tokens) == (its.source, its.tokens) == (TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    )
