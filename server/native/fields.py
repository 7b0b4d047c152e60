"""Holds what the native routes share: prompts in three forms, and SGLang's sampling parameters.

"text": "The capital of"                 control tokens in it are read, and BOS comes once
"input_ids": [2, 818, 5279]              token ids; BOS comes before them unless they begin with it
"parts": [["t", "<s>", true], ["t", "hi"], ["g", "", [818]], ["m", "image", DIGEST, BASE64]]
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...lang.prompt import Generated, Part, Parts, Text
from ...lang.protocol import ConstraintSpec
from ...lang.sampling import SamplingParams
from ..bodies import (
    Biases,
    Body,
    Count,
    MinP,
    Name,
    Penalty,
    Regex,
    Repetition,
    Salt,
    Seed,
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
from ..front import NO_FIELDS, Front
from ..http import Asked
from ..limits import MAX_SCHEMA, check_schema
from ..openai.fields import SGLANG_NOT_OFFERED, texts_of
from ..tokens import check_ids

ANY_MODEL = "unknown"  # a gateway that knows no model sends this
TokenList = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=1 << 20)]
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
_FORMS = ("text", "input_ids", "parts", "prompt")  # of a prompt


class NativeFields(UmbelBody, frozen=True):
    """Fields of every native body that runs something.

    Attributes:
        model: a name of the model; "unknown" is any.
        cache_salt: a namespace of the prefix cache.
    """

    model: Name | None = None
    cache_salt: Salt | None = None

    def field_of(self, parameter: str) -> str | None:
        if parameter == "prompt":
            return next((name for name in _FORMS if getattr(self, name, None) is not None), None)
        return super().field_of(parameter)


class PromptFields(NativeFields, frozen=True):
    """One prompt in one of three forms.

    Attributes:
        text: names of control tokens in it become these tokens.
        input_ids: token ids.
        parts: constant text, generated ids and pictures, as the runtime takes them.
    """

    text: str | None = None
    input_ids: TokenList | None = None
    parts: Parts | None = None

    def prompt(self, front: Front) -> tuple[Part, ...]:
        """Returns the prompt as parts. Raises HttpError unless exactly one form is given, with ids of the model."""
        one_of(text=self.text, input_ids=self.input_ids, parts=self.parts)
        if self.text is not None:
            return text_prompt(self.text)
        if self.input_ids is not None:
            return ids_prompt(front, "input_ids", self.input_ids)
        assert self.parts is not None, "one of them is given"
        return self.parts


def check_model(front: Front, name: str | None) -> None:
    """Raises HttpError for a model that is not served, or that is a program."""
    if name is not None and name != ANY_MODEL and front.model(name).program:
        raise wrong("model", f"{name!r} is a program; run it by /v1/programs")


def warn_of_umbel(asked: Asked[Any]) -> None:
    """Warns of fields of umbel on a route that asks nothing of the engine."""
    if asked.body.umbel not in (None, NO_FIELDS):
        asked.warnings.append("umbel: this route has nothing to schedule; it changes nothing")


def one_of(**forms: object) -> None:
    """Raises HttpError unless exactly one of these fields is given."""
    given = [name for name, value in forms.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(forms)
        found = " and ".join(given) if given else "none of them"
        raise wrong(given[-1] if given else next(iter(forms)), f"give one of {names}; here is {found}")


def text_prompt(text: str) -> tuple[Part, ...]:
    return (Text(text, control=True),)


def ids_prompt(front: Front, name: str, token_ids: Sequence[int]) -> tuple[Part, ...]:
    """Returns token ids as a prompt. Raises HttpError, for the field `name`, when the model has no such token."""
    check_ids(front, name, token_ids)
    return (Generated("", tuple(token_ids)),)


class SamplingFields(Body, frozen=True):
    """SGLang's sampling parameters.

    Attributes:
        max_new_tokens: 0 computes the prompt and generates nothing.
        stop: texts that end the text, and are no part of it.
        sampling_seed: the same seed gives the same text, whatever else runs.
        regex, json_schema, ebnf: a constraint that the text satisfies; one of them. A schema is JSON, or text of it.
    """

    max_new_tokens: TokenCount | None = None
    min_new_tokens: TokenCount = 0
    n: Count = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0
    stop: Stop | Stops | None = None
    stop_token_ids: StopTokens | None = None
    stop_regex: Stop | Stops | None = None
    logit_bias: Biases | None = None
    sampling_seed: Seed | None = None
    ignore_eos: bool = False
    regex: Regex | None = None
    json_schema: Annotated[str, msgspec.Meta(max_length=MAX_SCHEMA)] | dict[str, Any] | None = None
    ebnf: Annotated[str, msgspec.Meta(max_length=MAX_SCHEMA)] | None = None
    # At their defaults only: gateways and SGLang's clients add them.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: Literal[False] | None = None
    structural_tag: None = None
    custom_params: None = None
    stream_interval: Literal[1] | None = None

    # Any: fields of SamplingParams
    def params(self, **others: Any) -> SamplingParams:
        """Returns the sampling parameters. Raises ParameterError for values that do not go together."""
        return SamplingParams(
            max_tokens=DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,  # 0 keeps all, as other servers read it
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=texts_of(self.stop),
            stop_token_ids=self.stop_token_ids or (),
            stop_regex=texts_of(self.stop_regex),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            seed=self.sampling_seed,
            ignore_eos=self.ignore_eos,
            **others,
        )

    def constraint(self) -> ConstraintSpec | None:
        """Returns the constraint. Raises HttpError for two of them, and for a schema that is too large."""
        given = [name for name in ("regex", "json_schema", "ebnf") if getattr(self, name) is not None]
        if len(given) > 1:
            raise wrong(f"sampling_params.{given[1]}", f"{given[0]} is given, too; a text has one constraint")
        if self.regex is not None:
            return ConstraintSpec("regex", self.regex)
        if self.ebnf is not None:
            return ConstraintSpec("gbnf", self.ebnf)
        if isinstance(self.json_schema, dict):
            check_schema("json_schema", self.json_schema)
            return ConstraintSpec("json_schema", msgspec.json.encode(self.json_schema).decode())
        return None if self.json_schema is None else ConstraintSpec("json_schema", self.json_schema)


NOT_OFFERED = {
    **SGLANG_NOT_OFFERED,
    "spaces_between_special_tokens": SGLANG_NOT_OFFERED["skip_special_tokens"],
    "structural_tag": "structural tags are not read; write a regex, a json_schema or an ebnf",
    "custom_params": "no logits processors are loaded; leave it out",
    "stream_interval": "every step that has text makes an event; leave it out",
}
