"""Scores given choices at SGLang's own API.

One request computes the prompt, so that the server has it in its cache, and says how many tokens it has. A second one
sends the prompt, and the prompt with each choice, and asks for the log-probabilities of their last tokens. The tokens
of a choice are those from the first one that differs from the prompt's own:

    prompt            [Ans][wer][:][ ]
    prompt + choice   [Ans][wer][:][ yes][.]
                                   ^ a token that begins before the border, and holds some of the choice: counted
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .....lang.errors import BackendError, CapabilityError
from .....lang.protocol import Scored, ScoredChoice, ScoreRequest, Usage
from ..constraint_params import Fields
from ..session import Session
from .requests import PATH, SGLangPlanner
from .wire import Meta, Token, told

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_BORDER = 4  # tokens of the prompt's end that are compared, at first; all of them where these differ

_NOTHING: Fields = {"max_new_tokens": 0, "temperature": 0.0}


async def score(
    session: "Session[AsyncOpenAI]", planner: SGLangPlanner, request: ScoreRequest, deadline: float
) -> Scored:
    """Scores all choices of a request, by two or three calls.

    Raises:
        CapabilityError: there is nothing before the choices, or no beginning of texts to compare them after.
        BackendError: log-probabilities are missing, or a call failed.
    """
    scoring = _Scoring(session, planner, deadline)
    prompt = planner.prompt(request.prompt)
    if not prompt["text"]:
        raise CapabilityError(f"{planner.backend} scores choices behind a prompt only; write some text before them")
    head = await scoring.one(prompt)
    texts = [prompt["text"], *(prompt["text"] + choice for choice in request.choices)]
    found = await scoring.choices(prompt, texts, max(0, head.prompt_tokens - _BORDER))
    if found is None:
        found = await scoring.choices(prompt, texts, 0)
    if found is None:
        raise BackendError(f"{planner.backend}: the server told no log-probabilities of the choices")
    unconditional: Sequence[tuple[float, ...]] = [()] * len(found)
    if request.unconditional:
        unconditional = await scoring.unconditional([[token for _, token, _ in tokens] for tokens in found])
    choices = tuple(
        ScoredChoice(tuple(token for _, token, _ in tokens), tuple(value or 0.0 for value, _, _ in tokens), alone)
        for tokens, alone in zip(found, unconditional, strict=True)
    )
    return Scored(request.id, choices, scoring.usage)


class _Scoring:
    """Makes the calls for one request. `usage`: their sum."""

    def __init__(self, session: "Session[AsyncOpenAI]", planner: SGLangPlanner, deadline: float) -> None:
        self._session, self._planner, self._deadline = session, planner, deadline
        self.usage = Usage()

    async def asked(self, prompt: Fields, **more: object) -> list[Meta]:
        """Requests facts about texts without generating. Returns one entry per text."""
        body = {**self._planner.body(prompt, _NOTHING), **more}
        async with self._session.slot(self._deadline) as client:
            data = await self._session.retried(lambda: client.post(PATH, cast_to=object, body=body), self._deadline)
        facts = [each.meta_info for each in told(data, self._session.provider)]
        self.usage += Usage(
            sum(meta.prompt_tokens for meta in facts),
            sum(min(meta.cached_tokens, meta.prompt_tokens) for meta in facts),
            0,
            1,
        )
        return facts

    async def one(self, prompt: Fields, **more: object) -> Meta:
        """Requests facts about one text."""
        facts = await self.asked(prompt, **more)
        if len(facts) != 1:
            raise BackendError(
                f"{self._planner.backend}: the server answered {len(facts)} times where one was asked for"
            )
        return facts[0]

    async def choices(self, prompt: Fields, texts: list[str], start: int) -> list[list[Token]] | None:
        """Returns the tokens of each choice; None: they may begin before `start`."""
        asked = {**prompt, "text": texts}
        if "image_data" in prompt:
            asked["image_data"] = [prompt["image_data"]] * len(texts)
        facts = await self.asked(asked, **_told_from(start))
        if len(facts) != len(texts):
            raise BackendError(f"{self._planner.backend}: the server scored {len(facts)} of {len(texts)} texts")
        head, *tails = [_placed(meta) for meta in facts]
        found = [_tokens_after(head, tail, facts[0].prompt_tokens) for tail in tails]
        known = [tokens for tokens in found if tokens and all(value is not None for value, _, _ in tokens)]
        return known if len(known) == len(found) else None

    async def unconditional(self, choices: list[list[int]]) -> list[tuple[float, ...]]:
        """Scores each choice's tokens after the beginning-of-text token alone.

        Raises:
            CapabilityError: the model's texts have no token that they begin with.
        """
        probe = await self.one({"text": "a"}, **_told_from(0))
        begun = probe.input_token_logprobs or []
        if len(begun) != 2:
            raise CapabilityError(
                f"{self._planner.backend} begins texts with no token of its own, so a choice cannot be scored without "
                'the prompt; write method="token_length_normalized"'
            )
        first = begun[0][1]
        facts = await self.asked({"input_ids": [[first, *ids] for ids in choices]}, **_told_from(0))
        alone = [tuple(value for value, _, _ in (meta.input_token_logprobs or [])[1:]) for meta in facts]
        known = [tuple(value for value in values if value is not None) for values in alone]
        if [len(values) for values in known] != [len(ids) for ids in choices]:
            raise BackendError(f"{self._planner.backend}: the server told no log-probabilities of the choices alone")
        return known


def _told_from(start: int) -> Fields:
    return {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": start}


def _placed(meta: Meta) -> dict[int, Token]:
    """Returns the tokens with log-probabilities, the last ones, by position."""
    tokens = meta.input_token_logprobs or []
    return dict(enumerate(tokens, meta.prompt_tokens - len(tokens)))


def _tokens_after(head: dict[int, Token], tail: dict[int, Token], prompt_tokens: int) -> list[Token] | None:
    """Returns the tokens of a text from the first that differs from the prompt's. None: they may differ before the
    first returned token."""
    differing = (
        place for place in tail if place >= prompt_tokens or tail[place][1] != head.get(place, (0.0, -1, ""))[1]
    )
    first = next(differing, None)
    if first is None or (first == min(tail) and 0 < first < prompt_tokens):
        return None
    return [token for place, token in tail.items() if place >= first]
