"""Profiles of servers of the OpenAI dialect: one row for each kind of model and server, as their documentation says.

A row that is too modest costs calls; one that promises too much would lose constraints. So servers that are not known
get the modest one, and users who know better give `OpenAI(..., profile=Profile(...))`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from .....lang import checks
from .....lang.errors import ParameterError, shown, unknown_option

BASIC = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"})
EXTENDED = BASIC | {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"}

SchemaWay = Literal["", "strict", "response_format", "json_object", "structured_outputs"]
RegexWay = Literal["", "pattern", "regex", "structured_outputs"]
ChoicesWay = Literal["", "enum", "regex", "grammar", "structured_outputs"]
GrammarsWay = Literal["", "grammar", "ebnf", "structured_outputs"]


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of model on one kind of server.

    Attributes:
        name: for messages.
        chat, completion: which of the two APIs it has.
        max_tokens: how the limit of a chat request is called.
        schemas: how a JSON Schema is enforced: "strict" and "response_format" by `response_format`, in OpenAI's subset
            or any schema; "json_object" with the schema next to it; "structured_outputs" as vLLM takes it; "" not.
        regexes: "pattern" inside a strict schema; "regex" as SGLang, "structured_outputs" as vLLM takes it; "" not.
        choices: "enum" inside a strict schema; "grammar" as llama.cpp takes it; "regex", "structured_outputs"; "" not.
        grammars: of GBNF: "grammar" as llama.cpp, "ebnf" as SGLang, "structured_outputs" as vLLM takes it; "" not.
        sampling: fields of SamplingParams that it takes, apart from max_tokens, n, stop and log-probabilities.
        always: those of them that are sent also when they have our default, as the server's own may be another.
        all_top_k: the value of top_k that keeps all tokens.
        n: most continuations of one request.
        stops: most stop strings of one request; more, or with 0 all of them, are looked for here.
        names_stop: it says which stop ended a text.
        top_logprobs: most alternatives for each token; -1: no log-probabilities.
        continues: it goes on with an assistant turn that has begun (`continue_final_message`).
        images: it takes images.
        image_tokens: tokens of one image at most.
        scores: its completion API gives log-probabilities of the prompt (`echo`).
        salts: it keeps its prefix cache apart by `cache_salt`.
        thinking_tokens: tokens that it may need to think before a short answer, out of max_tokens.
        max_context: tokens, where it is known.
        cache_minimum: tokens of the shortest prompt of which its prefix cache keeps something.

    Raises:
        ParameterError: a value of another type.
    """

    name: str
    chat: bool = True
    completion: bool = True
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    schemas: SchemaWay = ""
    regexes: RegexWay = ""
    choices: ChoicesWay = ""
    grammars: GrammarsWay = ""
    sampling: frozenset[str] = BASIC
    always: frozenset[str] = frozenset()
    all_top_k: int = -1
    n: int = 128
    stops: int = 4
    names_stop: bool = False
    top_logprobs: int = 20
    continues: bool = False
    images: bool = False
    image_tokens: int = 2048
    scores: bool = False
    salts: bool = False
    thinking_tokens: int = 0
    max_context: int | None = None
    cache_minimum: int = 0

    def __post_init__(self) -> None:
        checks.record(self)


COMPATIBLE = Profile("compatible", always=frozenset({"temperature", "top_p"}), images=True)

_VLLM = Profile(
    "vllm",
    schemas="structured_outputs",
    regexes="structured_outputs",
    choices="structured_outputs",
    grammars="structured_outputs",
    sampling=EXTENDED,
    always=frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}),
    stops=16,
    names_stop=True,
    continues=True,
    images=True,
    image_tokens=16384,
    scores=True,
    salts=True,
)
_SGLANG = replace(
    _VLLM,
    name="sglang",
    schemas="response_format",
    regexes="regex",
    choices="regex",
    grammars="ebnf",
    names_stop=False,
    scores=False,
    salts=False,
)
_LLAMA_CPP = Profile(
    "llama.cpp",
    schemas="json_object",
    choices="grammar",
    grammars="grammar",
    sampling=BASIC | {"top_k", "min_p"},
    always=frozenset({"temperature", "top_p", "top_k", "min_p"}),
    all_top_k=0,
    n=1,
    stops=16,
)
_CHAT = Profile("openai chat", completion=False, images=True, cache_minimum=1024)
_STRUCTURED = replace(
    _CHAT,
    name="openai structured chat",
    max_tokens="max_completion_tokens",
    schemas="strict",
    regexes="pattern",
    choices="enum",
    max_context=128_000,
)
_REASONING = replace(
    _STRUCTURED,
    name="openai reasoning",
    sampling=frozenset(),
    stops=0,
    n=1,
    top_logprobs=-1,
    max_context=200_000,
    thinking_tokens=4096,
)
_UNKNOWN = replace(_CHAT, name="openai chat of unknown kind", max_tokens="max_completion_tokens")
_INSTRUCT = Profile("openai completion", chat=False, top_logprobs=5, max_context=4096)

SERVERS: Mapping[str, Profile] = {
    "compatible": COMPATIBLE,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "llama.cpp": _LLAMA_CPP,
    "llama-cpp-python": replace(_LLAMA_CPP, name="llama-cpp-python", top_logprobs=-1),
}

# OpenAI's own models; the first that matches. A fine-tuned model ("ft:gpt-4o-mini:...") goes by what it was made from.
_MODELS: tuple[tuple[str, Profile], ...] = (
    (r"gpt-3\.5-turbo-instruct|davinci|babbage", _INSTRUCT),
    (r"gpt-5[\w.]*-chat|chatgpt-4o", replace(_STRUCTURED, name="openai chat", image_tokens=4096)),
    (r"gpt-5|o\d", replace(_REASONING, image_tokens=50_000)),
    (r"gpt-4o-2024-05-13", replace(_CHAT, max_context=128_000)),
    (r"gpt-4o-mini", replace(_STRUCTURED, image_tokens=50_000)),
    (r"gpt-4\.1", replace(_STRUCTURED, max_context=1_000_000, image_tokens=4096)),
    (r"gpt-4o|gpt-4\.5", _STRUCTURED),
    (r"gpt-4-turbo", replace(_CHAT, max_context=128_000)),
    (r"gpt-4", replace(_CHAT, images=False, max_context=8192)),
    (r"gpt-3\.5", replace(_CHAT, images=False, max_context=16_385)),
)

# `owned_by` of a server's models → its kind.
_OWNERS: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "me": "llama-cpp-python",
}
_OWNERS_OF_OPENAI = re.compile(r"openai|system")


def of_model(model: str) -> Profile:
    """Returns the profile of a model at OpenAI; a modest one for unknown names, such as Azure deployments'."""
    name = model.removeprefix("ft:")
    return next((profile for pattern, profile in _MODELS if re.match(pattern, name)), _UNKNOWN)


def of_owner(owner: str, model: str, server: str = "") -> Profile:
    """Returns the profile of a server by its own description.

    Args:
        owner: `owned_by` of the model.
        server: the header of that name.
    """
    if server.lower().startswith("llama.cpp"):
        return SERVERS["llama.cpp"]
    if _OWNERS_OF_OPENAI.match(owner):
        return of_model(model)
    return SERVERS[_OWNERS.get(owner, "compatible")]


def named(name: str, model: str) -> Profile:
    """Returns the profile that a user names.

    Raises:
        ParameterError: there is none of that name.
    """
    if not isinstance(name, str):
        raise ParameterError(f"profile={shown(name)}; write a Profile(...), or the name of one: {', '.join(SERVERS)}")
    if name == "openai":
        return of_model(model)
    if name not in SERVERS:
        raise unknown_option("profile=", name, ("auto", "openai", *SERVERS))
    return SERVERS[name]
