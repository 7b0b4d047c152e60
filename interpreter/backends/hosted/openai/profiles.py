"""Says what servers of the OpenAI dialect can do, and writes constraints as the parameters that each takes.

One row for each kind of model and server, as their documentation says. A row that is too modest costs calls; one that
promises too much would lose constraints. So servers that are not known get the modest one, and users who know better
give `OpenAI(..., profile=Profile(...))`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from .....lang import checks
from .....lang.errors import CapabilityError, ParameterError, shown, unknown_option
from .....lang.protocol import Capabilities, ConstraintKind, ConstraintSpec
from ..constraint_params import (
    ANSWER,
    WRAPPING_TOKENS,
    ConstraintParams,
    Fields,
    NotStrict,
    for_google,
    of_members,
    strict,
)

BREAKPOINT_SECONDS = 1800.0

BASIC = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed"})
EXTENDED = BASIC | {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"}

SchemaWay = Literal[
    "", "strict", "response_format", "chat_response_format", "google", "json_object", "structured_outputs"
]
RegexWay = Literal["", "pattern", "regex", "structured_outputs"]
ChoicesWay = Literal["", "enum", "regex", "grammar", "structured_outputs"]
GrammarsWay = Literal["", "grammar", "ebnf", "structured_outputs"]
CallsWay = Literal["", "strict", "always"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Describes what a model on a server of OpenAI's dialect can do, where that cannot be found out.

    `ul.OpenAI(..., profile="vllm")` takes a known one by its name. `dataclasses.replace` changes single fields of one.

    Attributes:
        name: of the kind of server, for messages.
        chat: it has the API of chats.
        completion: it has the API of completions.
        max_tokens: how the limit of a chat request is called.
        schemas: how a JSON Schema is enforced: "strict" and "response_format" by `response_format`, in OpenAI's subset
            or any schema, "chat_response_format" in chats alone, "google" with the keywords that Google enforces;
            "json_object" with the schema next to it; "structured_outputs" as vLLM takes it; "" not.
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
        tools: its chat API takes `tools` and answers with `tool_calls`. vLLM and SGLang do where they were started with
            a parser of calls, which they do not tell, so the known profiles of both have it off.
        enforced_calls: calls of tools that are enforced: "strict", of one call at a time, of functions with `strict`,
            which take OpenAI's subset of schemas; "always", of all tools; "" none.
        breakpoints: its chat API takes `prompt_cache_breakpoint` on parts of messages, and keeps what stands before one
            for 1,800 s after its last use.

    Raises:
        ParameterError: a value of another type.

    Examples:
        >>> from umbel.testing import FakeOpenAI, OpenAIFeatures
        >>> mine = ul.Profile("my server", completion=False, regexes="regex")  # requests may have "regex"
        >>> played = OpenAIFeatures(extras=frozenset({"regex"}))
        >>> with FakeOpenAI(["B-07"], features=played) as server:
        ...     where = {"base_url": server.base_url, "api_key": server.api_key}
        ...     model = ul.OpenAI("gpt-4o", profile=mine, **where)
        ...     model("On which shelf is Walden?", regex="[A-F]-[0-9]{2}")
        ...     server.requests[0].body["regex"]
        'B-07'
        '[A-F]-[0-9]{2}'
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
    breakpoints: bool = False
    tools: bool = False
    enforced_calls: CallsWay = ""

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
_UMBEL = Profile(
    "umbel",
    schemas="chat_response_format",
    regexes="regex",
    choices="regex",
    sampling=EXTENDED | {"stop_regex"},
    n=16,
    stops=16,
    continues=True,
    images=True,
    scores=True,
    salts=True,
    breakpoints=True,
    tools=True,
    enforced_calls="always",
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
_CHAT = Profile("openai chat", completion=False, images=True, cache_minimum=1024, tools=True)
_STRUCTURED = replace(
    _CHAT,
    name="openai structured chat",
    max_tokens="max_completion_tokens",
    schemas="strict",
    regexes="pattern",
    choices="enum",
    max_context=128_000,
    enforced_calls="strict",
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
    "umbel": _UMBEL,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "llama.cpp": _LLAMA_CPP,
    "llama-cpp-python": replace(_LLAMA_CPP, name="llama-cpp-python", top_logprobs=-1),
}

# OpenAI's own models; the first that matches. A fine-tuned model ("ft:gpt-4o-mini:...") goes by what it was made from.
_MODELS: tuple[tuple[str, Profile], ...] = (
    (r"gpt-3\.5-turbo-instruct|davinci|babbage", _INSTRUCT),
    (r"gpt-5[\w.]*-chat|chatgpt-4o", replace(_STRUCTURED, name="openai chat", image_tokens=4096, tools=False)),
    (r"gpt-5|o\d", replace(_REASONING, image_tokens=50_000)),
    (r"gpt-4o-2024-05-13", replace(_CHAT, max_context=128_000)),
    (r"gpt-4o-mini", replace(_STRUCTURED, image_tokens=50_000)),
    (r"gpt-4\.1", replace(_STRUCTURED, max_context=1_000_000, image_tokens=4096)),
    (r"gpt-4o|gpt-4\.5", _STRUCTURED),
    (r"gpt-4-turbo", replace(_CHAT, max_context=128_000)),
    (r"gpt-4", replace(_CHAT, images=False, max_context=8192)),
    (r"gpt-3\.5", replace(_CHAT, images=False, max_context=16_385)),
)

_WITH_BREAKPOINTS = re.compile(r"gpt-(5\.([6-9]|\d\d)|[6-9]|1\d)(?!\d)")  # gpt-5.6 and later

# `owned_by` of a server's models → its kind.
_OWNERS: Mapping[str, str] = {
    "umbel": "umbel",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "me": "llama-cpp-python",
}
_OWNERS_OF_OPENAI = re.compile(r"openai|system")


def of_model(model: str) -> Profile:
    """Returns the profile of a model at OpenAI; a modest one for unknown names, such as Azure deployments'."""
    name = model.removeprefix("ft:")
    found = next((profile for pattern, profile in _MODELS if re.match(pattern, name)), _UNKNOWN)
    return replace(found, breakpoints=True) if _WITH_BREAKPOINTS.match(name) else found


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


Mode = Literal["chat", "completion"]


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: Profile, mode: Mode) -> ConstraintParams | None:
    """Writes a constraint's parameters; None for one that this server does not enforce."""
    if constraint.engine not in (None, "auto"):
        return None  # the user asks for an engine of the runtime
    match constraint.kind:
        case "json_schema":
            return _schema(constraint.source, profile, mode)
        case "regex":
            return _regex(constraint.source, profile, mode)
        case "choices":
            return _choices(json.loads(constraint.source), profile, mode)
        case "gbnf":
            return _grammar(constraint.source, profile)
        case "lark" | "tools" | "expression":
            return None


def kinds(profile: Profile, mode: Mode) -> tuple[ConstraintKind, ...]:
    """Returns the kinds of which the server enforces at least simple constraints."""
    simple = (
        ConstraintSpec("regex", "a"),
        ConstraintSpec("json_schema", '{"type":"boolean"}'),
        ConstraintSpec("choices", '["a","b"]'),
        ConstraintSpec("gbnf", 'root ::= "a"'),
    )
    return tuple(each.kind for each in simple if lower(each, profile, mode) is not None)


def _schema(source: str, profile: Profile, mode: Mode) -> ConstraintParams | None:
    try:
        match profile.schemas, mode:
            case "structured_outputs", _:
                return ConstraintParams({"structured_outputs": {"json": json.loads(source)}})
            case "strict", "chat":
                schema, wrapped = strict(source)
                return ConstraintParams(_response_format(schema), "json" if wrapped else "")
            case "response_format" | "chat_response_format", "chat":
                return ConstraintParams(_response_format(json.loads(source)))
            case "google", "chat":
                return ConstraintParams(_response_format(for_google(source)))
            case "response_format", "completion":
                return ConstraintParams({"json_schema": source})
            case "json_object", "chat":
                strict(source, exact=True)  # what it does not know it would leave out in silence
                return ConstraintParams({"response_format": {"type": "json_object", "schema": json.loads(source)}})
    except NotStrict:
        pass
    return None


def _regex(pattern: str, profile: Profile, mode: Mode) -> ConstraintParams | None:
    match profile.regexes, mode:
        case "structured_outputs", _:
            return ConstraintParams({"structured_outputs": {"regex": pattern}})
        case "regex", _:
            return ConstraintParams({"regex": pattern})
        case "pattern", "chat":
            return _wrapped({"type": "string", "pattern": f"^(?:{pattern})$"})
    return None


def _choices(choices: list[str], profile: Profile, mode: Mode) -> ConstraintParams | None:
    match profile.choices, mode:
        case "structured_outputs", _:
            return ConstraintParams({"structured_outputs": {"choice": choices}})
        case "regex", _:
            return ConstraintParams({"regex": "|".join(f"({_escaped(choice)})" for choice in choices)})
        case "grammar", _:
            return ConstraintParams({"grammar": "root ::= " + " | ".join(map(_quoted, choices))})
        case "enum", "chat" if len(choices) <= 500:  # longer enums have bounds on their characters
            return _wrapped({"type": "string", "enum": choices})
    return None


def _grammar(source: str, profile: Profile) -> ConstraintParams | None:
    match profile.grammars:
        case "structured_outputs":
            return ConstraintParams({"structured_outputs": {"grammar": source}})
        case "grammar" | "ebnf" as field:
            return ConstraintParams({field: source})
        case "":
            return None


def _wrapped(member: Fields) -> ConstraintParams:
    return ConstraintParams(_response_format(of_members({ANSWER: member})), "text")


def _response_format(schema: Fields) -> Fields:
    """Writes a response format. Its name derives from the schema, so that caches hit on every request with it."""
    digest = hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"answer_{digest}", "strict": True, "schema": schema},
        }
    }


def _escaped(text: str) -> str:
    """Escapes a literal of a regular expression, with escapes that every engine knows."""
    return re.sub(r"([\\\\.^$*+?()\[\]{}|/-])", r"\\\1", text).replace("\n", "\\n").replace("\t", "\\t")


def _quoted(text: str) -> str:
    """Quotes a literal of llama.cpp's grammars."""
    written = "".join(
        {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, character)
        for character in text
    )
    return f'"{written}"'


AskedMode = Literal["auto", "chat", "completion"]


def mode_of(asked: AskedMode, profile: Profile, backend: str) -> Mode:
    """Chooses the mode. Raises CapabilityError when the model does not have the requested one. `backend`: its name."""
    mode: Mode = "completion" if asked == "completion" or (asked == "auto" and not profile.chat) else "chat"
    if not (profile.chat if mode == "chat" else profile.completion):
        other = "completion" if mode == "chat" else "chat"
        raise CapabilityError(f"{backend} ({profile.name}) has no {mode} API; write mode={other!r}")
    return mode


def capabilities_of(backend: str, model: str, profile: Profile, mode: Mode, max_context: int | None) -> Capabilities:
    """Derives the capabilities. `max_context`: reported by the server; None: the profile's."""
    return Capabilities(
        backend,
        score=profile.scores and mode == "completion",
        hint=profile.breakpoints and mode == "chat",
        images=profile.images and mode == "chat",
        logprobs=profile.top_logprobs >= 0,
        max_context=max_context or profile.max_context,
        cache_minimum=profile.cache_minimum,
        constraints=kinds(profile, mode),
        asks_again=True,
        speculation=True,
        stop_regex="stop_regex" in profile.sampling,
        converses=mode == "chat",
        temperature="temperature" in profile.sampling,
        thinking_tokens=profile.thinking_tokens,
        continues=profile.continues or mode == "completion",
        model=model,
        wrapping_tokens=WRAPPING_TOKENS if mode == "chat" else 0,
        most_n=profile.n,
        tools=profile.tools and mode == "chat",
    )
