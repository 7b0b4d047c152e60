"""Holds what the routes of the OpenAI dialect share: sampling fields, usage, log-probabilities."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ...lang.prompt import Generated, Part, Text
from ...lang.protocol import Completion, FinishReason, TokenLogprob, Usage
from ...lang.sampling import MAX_SEED, SamplingParams
from ..bodies import (
    Biases,
    Body,
    Count,
    Json,
    Label,
    MinP,
    Name,
    Penalty,
    Repetition,
    Salt,
    Stop,
    Stops,
    StopTokens,
    Temperature,
    TokenCount,
    TokenId,
    TopK,
    TopP,
    UmbelBody,
    wrong,
)
from ..limits import MAX_BATCH
from ..tokens import spelled

Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
TokenList = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=1 << 20)]
# A text, a list of texts, token ids, or a list of those.
TextsOrTokens = str | Annotated[tuple[str | TokenId | TokenList, ...], msgspec.Meta(max_length=1 << 20)]
SGLANG_NOT_OFFERED = {
    "no_stop_trim": "stop texts are never part of the answer; leave it out",
    "return_hidden_states": "hidden states are not given; leave it out",
    "skip_special_tokens": "special tokens have no text here; leave it out",
}
NOT_OFFERED = {"stream_options": "it is for streams; write stream: true, or leave it out", **SGLANG_NOT_OFFERED}


def parts_of(field: str, given: TextsOrTokens, *, control: bool) -> list[tuple[Part, ...]]:
    """Returns texts and token ids as parts of prompts.

    Args:
        field: that has them.
        control: names of control tokens in texts become these tokens.

    Raises:
        HttpError: a mixed list, or too many texts.
    """
    if isinstance(given, str):
        return [(Text(given, control=control),)]
    if not given:
        raise wrong(field, "the list is empty; write a text, or token ids")
    kinds = {type(each) for each in given}
    if len(kinds) != 1:
        raise wrong(field, "write texts, or token ids, or lists of token ids, not several of them")
    if isinstance(given[0], int):
        return [(Generated("", given),)]  # type: ignore[arg-type]
    if len(given) > MAX_BATCH:
        raise wrong(field, f"{len(given)} texts; at most {MAX_BATCH} are taken at once")
    return [(Text(each, control=control) if isinstance(each, str) else Generated("", each),) for each in given]  # type: ignore[arg-type]


class StreamOptions(Body, frozen=True):
    """Options of a stream. `include_obfuscation` has no effect: nothing is hidden from a listener on this machine."""

    include_usage: bool = False
    include_obfuscation: bool = True


class AskingFields(UmbelBody, frozen=True):
    """Fields that all bodies of the dialect have in common, with OpenAI's names and defaults.

    Next to OpenAI's own: top_k, min_p and repetition_penalty as of `gen()`, and `cache_salt`, a namespace of the prefix
    cache.
    """

    model: Name
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    # Ours.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    cache_salt: Salt | None = None

    # Any: fields of SamplingParams
    def sampling(self, max_tokens: int, **others: Any) -> SamplingParams:
        """Returns the sampling parameters. Raises ParameterError for values that do not go together."""
        others |= self._given("temperature", "top_p", "min_p", "repetition_penalty")
        if self.top_k is not None:
            others["top_k"] = self.top_k or -1  # 0 keeps all, as other servers read it
        return SamplingParams(max_tokens=max_tokens, **others)

    def _given(self, *names: str) -> Json:
        """Returns those of some fields that are given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class GenerationFields(AskingFields, frozen=True):
    """Fields that completions and chat completions have in common.

    Next to OpenAI's own: min_tokens, stop_token_ids, stop_regex and ignore_eos as of `gen()`. What gateways add at its
    default is taken at its default.
    """

    n: Count | None = None
    stop: Stop | Stops | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    # Ours.
    min_tokens: TokenCount | None = None
    stop_token_ids: StopTokens | None = None
    stop_regex: Stop | Stops | None = None
    ignore_eos: bool = False
    # At their defaults only: gateways add them.
    no_stop_trim: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None

    @property
    def count(self) -> int:
        """Continuations of each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    # Any: fields of SamplingParams
    def sampling(self, max_tokens: int, **others: Any) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            ParameterError: values that do not go together.
            HttpError: options of a stream where none is asked for.
        """
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "they are for streams; write stream: true, or leave them out")
        if self.seed is not None:
            others["seed"] = self.seed & MAX_SEED  # OpenAI's seeds have a sign
        if self.logit_bias:
            others["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return super().sampling(
            max_tokens,
            n=self.count,
            stop=texts_of(self.stop),
            stop_regex=texts_of(self.stop_regex),
            ignore_eos=self.ignore_eos,
            **self._given("frequency_penalty", "presence_penalty", "min_tokens", "stop_token_ids"),
            **others,
        )


def texts_of(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns one text or several as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else given


def finish_reason(completion: Completion) -> Literal["stop", "length"]:
    """Returns OpenAI's word for the end of a text. A text that was led to its end by max_tokens was cut."""
    return "stop" if completion.finish_reason is FinishReason.STOP else "length"


# ------------------------------------------------------------------------------------------------ answers


class PromptDetails(msgspec.Struct, frozen=True):
    """Parts of the prompt's tokens. Numbers always: 0 is none, never unknown.

    Attributes:
        cached_tokens: reused from the cache, by whatever right.
        cache_write_tokens: that marks of the request have made the cache keep.
        cache_creation_input_tokens: the same, under the name of other providers.
        cache_read_input_tokens: reused under marks that were made before.
    """

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Parts of the generated tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    audio_tokens: int = 0


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of one request, over all its prompts and continuations; each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def token_usage(usage: Usage, reasoning_tokens: int = 0) -> TokenUsage:
    """Writes usage in OpenAI's shape."""
    written = usage.cache_write_tokens
    return TokenUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptDetails(usage.cached_tokens, written, written, usage.cache_read_tokens),
        CompletionDetails(reasoning_tokens=reasoning_tokens),
    )


class TokenEntry(msgspec.Struct, frozen=True):
    """A token and its log-probability. `bytes` are its own: a token may end inside a character."""

    token: str
    logprob: float
    bytes: list[int]


class TopTokenEntry(msgspec.Struct, frozen=True):
    """A token, its log-probability, and the most likely tokens at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenEntry]


def token_entries(logprobs: Iterable[TokenLogprob]) -> list[TopTokenEntry]:
    """Writes log-probabilities as answers to conversations have them."""
    return [
        TopTokenEntry(
            entry.text,
            entry.logprob,
            list(entry.data),
            [
                TokenEntry(text, value, list(data))
                for (_, text, value), data in zip(entry.top, entry.top_data, strict=True)
            ],
        )
        for entry in logprobs
    ]


class TokenLists(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion: four lists with an entry for each token.

    Attributes:
        tokens: their texts; a part of a character as "bytes:\\xc3".
        token_logprobs: natural logarithms; null for the first token of a prompt.
        top_logprobs: text of a token → its log-probability; the token itself is among them.
        text_offset: characters from the beginning of the prompt to the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenWriter:
    """Writes the log-probabilities of one text as completions have them, in as many pieces as it comes.

    Args:
        names: of control tokens, by id.
        offset: characters before the first token.
        written: names of control tokens stand in the text, as in a prompt; in a generated text they do not.
    """

    def __init__(self, names: Mapping[int, str], offset: int = 0, *, written: bool = False) -> None:
        self._names = names
        self._offset = offset
        self._written = written
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # tokens may hold parts of characters
        self.written_tokens = 0

    def lists(self, entries: Iterable[TokenLogprob]) -> TokenLists:
        """Returns the lists of further tokens. The parts of a character begin where it does."""
        found = TokenLists([], [], [], [])
        for entry in entries:
            self.written_tokens += 1
            token = spelled(entry.token_id, entry.text, entry.data, self._names)
            top = {
                spelled(token_id, text, data, self._names): logprob
                for (token_id, text, logprob), data in zip(entry.top, entry.top_data, strict=True)
            }
            found.tokens.append(token)
            found.token_logprobs.append(entry.logprob)
            found.top_logprobs.append({token: entry.logprob} | top)
            found.text_offset.append(self._offset)
            if entry.data:
                self._offset += len(self._decoder.decode(entry.data))
            elif self._written:
                self._offset += len(token)
        return found


def characters(entries: Iterable[TokenLogprob], names: Mapping[int, str]) -> int:
    """Counts the characters of a prompt that these tokens stand for."""
    data = (entry.data or names.get(entry.token_id, "").encode() for entry in entries)
    return len(b"".join(data).decode("utf-8", "replace"))
