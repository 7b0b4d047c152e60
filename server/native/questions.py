"""`/score`, `/tokenize` and `/detokenize`: answers without a generated token."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ...lang.ops import MAX_CHOICES
from ...lang.prompt import Generated, Part, Parts, Text
from ...lang.protocol import MAX_DETOKENIZED, Detokenize, ScoredChoice, ScoreRequest, Tokenize
from ..bodies import Name, TokenId, UmbelBody, wrong
from ..front import Front
from ..http import Asked, Endpoint, Reply
from ..limits import MAX_BATCH
from ..openai.fields import TokenUsage, token_usage
from ..tokens import check_ids, tokenizing
from .fields import NativeFields, PromptFields, check_model, one_of, text_prompt, warn_of_umbel

Choice = Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)]
Batch = msgspec.Meta(min_length=1, max_length=MAX_BATCH)


class ScoreBody(PromptFields, frozen=True, kw_only=True):
    """Asks for the log-probabilities of texts as continuations of a prompt.

    Attributes:
        unconditional: those of each choice without the prompt, too.
        probability: how probable each choice is, over all tokens that spell it ("exact"), or by its usual tokens and
            those that go past its end ("overshoot").
    """

    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)]
    unconditional: bool = False
    probability: Literal["", "overshoot", "exact"] = ""


class ScoreAnswer(msgspec.Struct, frozen=True):
    """An entry for each choice, in order. null in place of a log-probability: the choice cannot come.

    Attributes:
        evaluations: token sequences that the model was asked about for `probability`.
    """

    id: str
    choices: tuple[ScoredChoice, ...]
    usage: TokenUsage
    evaluations: int


class TokenizeBody(NativeFields, frozen=True):
    """Asks for the token ids of prompts.

    Attributes:
        prompt: one text or several; names of control tokens in it become these tokens.
        parts: one prompt as the runtime takes it, without pictures.
        add_special_tokens: begins with BOS, where the model has one.
    """

    prompt: str | Annotated[tuple[str, ...], Batch] | None = None
    parts: Parts | None = None
    add_special_tokens: bool = True
    return_token_strs: Literal[False] | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Token ids, and how many there are: lists of both for a list of prompts."""

    tokens: Sequence[int | tuple[int, ...]]
    count: int | list[int]
    max_model_len: int | None


TokenRow = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_DETOKENIZED)]


class DetokenizeBody(UmbelBody, frozen=True):
    """Asks for the text of token ids, or of several lists of them.

    Attributes:
        skip_special_tokens: control tokens have no text; false writes their names.
    """

    told_as = {"prompt": "tokens", "token_ids": "tokens"}

    tokens: Annotated[tuple[TokenId | TokenRow, ...], msgspec.Meta(max_length=MAX_DETOKENIZED)]
    model: Name | None = None
    skip_special_tokens: bool = True


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text, or a list of them, under the names that SGLang's and vLLM's clients read."""

    text: str | list[str]
    prompt: str | list[str]


async def score(asked: Asked[ScoreBody]) -> Reply:
    """Scores choices."""
    body, front = asked.body, asked.front
    check_model(front, body.model)
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    prompt = body.prompt(front)
    request = ScoreRequest(asked.id, prompt, body.choices, body.unconditional, origin, body.probability)
    with front.open(len(body.choices)):
        scored = await front.backend.score(request)
    front.note(scored.usage)
    return Reply(ScoreAnswer(asked.id, scored.choices, token_usage(scored.usage), scored.evaluations))


async def tokenize(asked: Asked[TokenizeBody]) -> Reply:
    """Returns token ids."""
    body, front = asked.body, asked.front
    check_model(front, body.model)
    one_of(prompt=body.prompt, parts=body.parts)
    backend = tokenizing(front)
    origin = front.origin(asked.caller, body.umbel, body.cache_salt, body.model)
    texts = (body.prompt,) if isinstance(body.prompt, str) else body.prompt or ()
    prompts = [text_prompt(text) for text in texts] if body.parts is None else [body.parts]
    rows = []
    with front.open():
        for number, prompt in enumerate(prompts):
            ids = (await backend.tokenize(Tokenize(f"{asked.id}-{number}", prompt, origin))).token_ids
            rows.append(ids if body.add_special_tokens else _without_bos(front, prompt, ids))
    longest = front.backend.capabilities.max_context
    if isinstance(body.prompt, tuple):
        return Reply(TokenizeAnswer(rows, [len(ids) for ids in rows], longest))
    return Reply(TokenizeAnswer(rows[0], len(rows[0]), longest))


def _without_bos(front: Front, prompt: tuple[Part, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Takes BOS off the ids of a prompt, unless the prompt itself begins with it."""
    bos = tokenizing(front).vocabulary.bos_id
    if bos is None or ids[:1] != (bos,):
        return ids
    match prompt:
        case (Text(text, True), *_) if text.startswith(front.token_names.get(bos) or "\0"):
            return ids
        case (Generated(_, given), *_) if given[:1] == (bos,):
            return ids
    return ids[1:]


async def detokenize(asked: Asked[DetokenizeBody]) -> Reply:
    """Returns the text of token ids."""
    body, front = asked.body, asked.front
    check_model(front, body.model)
    warn_of_umbel(asked)
    backend = tokenizing(front)
    single = tuple(each for each in body.tokens if isinstance(each, int))
    lists = [each for each in body.tokens if not isinstance(each, int)]
    if lists and (single or len(lists) > MAX_BATCH):
        raise wrong("tokens", f"write a list of token ids, or a list of up to {MAX_BATCH} of such lists")
    texts = []
    with front.open():
        for number, ids in enumerate(lists or [single]):
            check_ids(front, f"tokens[{number}]" if lists else "tokens", ids)
            question = Detokenize(f"{asked.id}-{number}", ids, control=not body.skip_special_tokens)
            texts.append((await backend.detokenize(question)).text)
    found = texts if lists else texts[0]
    return Reply(DetokenizeAnswer(found, found))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/score",
        score,
        "Score choices after a prompt",
        body=ScoreBody,
        answer=ScoreAnswer,
        errors=(404, 504),
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        "Text to token ids",
        body=TokenizeBody,
        answer=TokenizeAnswer,
        errors=(404,),
        not_offered={"return_token_strs": "texts of single tokens are not given; send them to /detokenize"},
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids to text",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
        errors=(404,),
    ),
)
