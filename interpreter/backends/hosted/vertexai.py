"""Gemini models at Vertex AI, by Google's own client; `gemini.py` has them at the Gemini API.

model = umbel.VertexAI("gemini-2.5-flash", project="my-project", location="europe-west1")
"""

import base64
import importlib
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from ....lang import checks
from ....lang.errors import CapabilityError, ParameterError, RequestError, shown
from ....lang.runtime_options import MAX_MODEL_LENGTH
from .backend import CallOptions
from .constraint_params import Fields
from .errors import Provider
from .openai.dialect import TranslatedBackend, checked_chat_profile
from .openai.profiles import Profile
from .openai.tools import names_of_results
from .openai.wire import Object, ProviderError, Translator
from .transport import checked_key, secrets_of

# Of the Gemini models: which parameters they take, and that they enforce JSON schemas of `for_google`.
GEMINI = Profile(
    "gemini",
    completion=False,
    schemas="google",
    choices="enum",
    sampling=frozenset({"temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"}),
    n=8,
    stops=5,
    top_logprobs=-1,
    images=True,
    thinking_tokens=4096,
    max_context=1_048_576,
    tools=True,
)
_MOST_THINKING = 1 << 17  # tokens; models take less
_DATA_URL = re.compile(r"data:(image/\w+);base64,(.*)", re.DOTALL)
_LOST = ("TransportError", "TimeoutError", "ResponseError")  # of Google's library of credentials: tried again
_SAME = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_REASONS = {"STOP": "stop", "MAX_TOKENS": "length"}  # all others are the provider's filters, but for these:
_NO_CALLS = ("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MISSING_THOUGHT_SIGNATURE")

# Gemini 3 and later refuse a turn whose first call has no signature. A conversation that another model began has none,
# and Google names this text for it.
_SIGNED = re.compile(r"gemini-(?:[3-9]|\d\d)")
_NO_SIGNATURE = b"skip_thought_signature_validator"
_MODES = {"auto": "AUTO", "required": "ANY", "none": "NONE"}


class GoogleModel(TranslatedBackend):
    """A Gemini model that is asked by Google's client, at either of its two services.

    Args:
        model: as of `TranslatedBackend`.
        provider: as of `TranslatedBackend`.
        options: as of `TranslatedBackend`.
        profile: as of `TranslatedBackend`.
        where: arguments of `google.genai.Client`.
        safety_settings: as of `VertexAI`.
        thinking_budget: as of `VertexAI`.
        include_thoughts: as of `VertexAI`.
        client: as of `VertexAI`.
    """

    PACKAGE = "google.genai"

    def __init__(
        self,
        model: str,
        provider: Provider,
        options: CallOptions,
        *,
        where: Fields,
        profile: Profile,
        safety_settings: Mapping[str, str] | None,
        thinking_budget: int | None,
        include_thoughts: bool,
        client: Any,  # Any: google.genai.Client, an optional package's
    ) -> None:
        safety = _checked_safety(safety_settings)
        if thinking_budget is not None:
            wanted = "-1 for the model's own choice, 0 for none, or a number of tokens"
            thinking_budget = checks.integer("thinking_budget", thinking_budget, -1, _MOST_THINKING, wanted)
            if thinking_budget >= 0:
                profile = replace(profile, thinking_tokens=thinking_budget)
        super().__init__(model, provider, options, profile=profile)
        self._given_client = client
        self._where = where
        self._config: Fields = {"safety_settings": safety} if safety else {}
        thinking: Fields = {} if thinking_budget is None else {"thinking_budget": thinking_budget}
        if checks.switch("include_thoughts", include_thoughts):
            thinking["include_thoughts"] = True
        if thinking:
            self._config["thinking_config"] = thinking

    async def prepare(self) -> None:
        """Imports Google's client, unless one is given."""
        if self._given_client is None:  # nothing of the package is needed otherwise
            await super().prepare()

    def open_client(self) -> Translator:
        given = self._given_client
        client = self._opened() if given is None else given
        return _Gemini(client, self._config, self._provider, owned=given is None)

    def _opened(self) -> Any:  # Any: google.genai.Client
        """Makes Google's client, which looks for credentials. Raises RequestError where it fails."""
        library = importlib.import_module("google.genai")
        try:
            return library.Client(**self._where)
        except Exception as error:
            problem = _of_credentials(error, self._provider) or RequestError(
                f"{self._provider.name}: Google's client cannot be made ({self._provider.scrub(str(error))}); check "
                "project=, location= and api_key="
            )
        raise problem


class VertexAI(GoogleModel):
    """Runs programs on one Gemini model at Vertex AI, or, with a key, at the Gemini API, for which `Gemini` is shorter.

    Conversations, stops, budgets and retries are as of `OpenAI`. Choices and JSON schemas are the model's to enforce,
    as far as Google's keywords go: types, members, items, enums of strings and numbers, bounds, `anyOf`. All else
    (patterns, lengths, formats, schemas that contain themselves, expressions) is validated here, and the model is asked
    again. System turns stand in front of a conversation, as text.

    Args:
        model: its name, such as "gemini-2.5-flash".
        project: id of the project at Google Cloud; None: the environment's GOOGLE_CLOUD_PROJECT.
        location: region at Google Cloud, such as "europe-west1"; None: the environment's GOOGLE_CLOUD_LOCATION.
        api_key: the key of the Gemini API, instead of a project.
        safety_settings: category → threshold, such as {"HARM_CATEGORY_HARASSMENT": "BLOCK_NONE"}.
        thinking_budget: tokens that the model may think, out of max_tokens: 0 for none, -1 for its own choice; None
            says nothing, which is its own choice as well.
        include_thoughts: asks for summaries of what the model thinks, which `separate_reasoning` gives to programs.
        profile: what the model can do, as of `OpenAI`.
        client: a `google.genai.Client` that is used as it is, and left open; None: one is made.
        options: timeouts, retries and further settings of calls, as of `CallOptions`.

    Raises:
        MissingExtraError: the `google-genai` package is not installed, and no client is given.
        ParameterError: neither a project nor a key, or a wrong value or option.

    Examples:
        A fake plays the provider here. With a project at Google Cloud, write `project` in place of `client`.

        >>> from google import genai
        >>> from umbel.testing import FakeGemini
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeGemini({"France": "Paris"}) as server:
        ...     client = genai.Client(api_key=server.api_key, http_options={"base_url": server.base_url})
        ...     capital.run("France", backend=ul.VertexAI("gemini-2.5-flash", client=client))["city"]
        'Paris'
    """

    KIND = EXTRA = "vertexai"

    def __init__(
        self,
        model: str,
        *,
        project: str | None = None,
        location: str | None = None,
        api_key: str | None = None,
        safety_settings: Mapping[str, str] | None = None,
        thinking_budget: int | None = None,
        include_thoughts: bool = False,
        profile: Profile = GEMINI,
        client: Any = None,  # Any: google.genai.Client, an optional package's
        **options: Unpack[CallOptions],
    ) -> None:
        environment = self.check_options(options)
        check_client("VertexAI", client)
        project, location = checked_key("project", project), checked_key("location", location)
        api_key = checked_key("api_key", api_key)
        project = project or environment.variable("GOOGLE_CLOUD_PROJECT")
        if client is None and not project and not api_key:
            raise ParameterError(
                "VertexAI() has no project; write project='my-project', set GOOGLE_CLOUD_PROJECT, or give api_key= of "
                "the Gemini API"
            )
        if client is None:
            self.require_package()
        profile = checked_chat_profile("VertexAI", profile)
        model = checks.text("VertexAI(): model", model, MAX_MODEL_LENGTH, "a name such as 'gemini-2.5-flash'")
        key_from = "api_key=, or the credentials of Google Cloud"
        provider = Provider(f"vertexai {model}", "aiplatform.googleapis.com", key_from, secrets_of(api_key or "", {}))
        where: Fields = {"api_key": api_key} if api_key else {"vertexai": True, "project": project}
        if location and not api_key:
            where["location"] = location
        super().__init__(
            model,
            provider,
            options,
            where=where,
            profile=profile,
            safety_settings=safety_settings,
            thinking_budget=thinking_budget,
            include_thoughts=include_thoughts,
            client=client,
        )


def check_client(owner: str, client: object) -> None:
    """Raises ParameterError if a client that was given lacks a required method."""
    if client is None:
        return
    models = getattr(getattr(client, "aio", None), "models", None)
    if not all(callable(getattr(models, name, None)) for name in ("generate_content", "generate_content_stream")):
        raise ParameterError(f"{owner}(client={shown(client)}); write a google.genai.Client, or leave it out")


def _checked_safety(given: Mapping[str, str] | None) -> list[Fields]:
    """Checks safety settings. Raises ParameterError for anything but a dict of texts."""
    wanted = "a dict such as {'HARM_CATEGORY_HARASSMENT': 'BLOCK_NONE'}"
    settings = {} if given is None else checks.entries("safety_settings", given, 64, wanted)
    return [
        {
            "category": checks.text("a category of safety_settings", category, 256),
            "threshold": checks.text(f"safety_settings[{shown(category)}]", threshold, 256),
        }
        for category, threshold in settings.items()
    ]


def _of_credentials(error: Exception, provider: Provider) -> RequestError | None:
    """Converts an error of Google's credentials library, unless it lost its connection."""
    if not type(error).__module__.startswith("google.auth.") or type(error).__name__ in _LOST:
        return None
    return RequestError(
        f"{provider.name}: there are no credentials of Google Cloud that can be used ({provider.scrub(str(error))}); "
        "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or write api_key= of the "
        "Gemini API"
    )


class _Gemini(Translator):
    """Calls of Google's client, in the OpenAI dialect.

    Args:
        config: what each of them has.
        owned: whether `close` ends the client. One that was given may have other users.
    """

    def __init__(self, client: Any, config: Fields, provider: Provider, *, owned: bool) -> None:
        self._client, self._config, self._provider, self._owned = client.aio, config, provider, owned

    async def whole(self, body: Fields) -> Object:
        return _answer(await self._tried(self._client.models.generate_content(**self._asked(body))))

    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        chunks = aiter(await self._tried(self._client.models.generate_content_stream(**self._asked(body))))
        first = await self._tried(anext(chunks, None))  # the client sends the request when it is asked for this one
        return self._objects(first, chunks)

    async def _objects(self, first: Any, chunks: AsyncIterator[Any]) -> AsyncGenerator[Object, None]:
        calls: Counter[int] = Counter()
        try:
            while first is not None:
                yield _answer(first, calls)
                first = await self._tried(anext(chunks, None))
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    async def close(self) -> None:
        close = getattr(self._client, "aclose", None) if self._owned else None  # newer versions have it
        if close is not None:
            await close()

    async def _tried(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:
            problem: Exception | None = _of_credentials(error, self._provider)
            if problem is None and isinstance(status := getattr(error, "code", None), int):
                problem = ProviderError(status, str(getattr(error, "message", None) or error))
            if problem is None:
                raise
        raise problem

    def _asked(self, body: Fields) -> Fields:
        config: Fields = {name: body[name] for name in _SAME if name in body}
        config["max_output_tokens"] = body["max_tokens"]
        if "stop" in body:
            config["stop_sequences"] = body["stop"]
        if "n" in body:
            config["candidate_count"] = body["n"]
        if "response_format" in body:
            config["response_mime_type"] = "application/json"
            config["response_json_schema"] = body["response_format"]["json_schema"]["schema"]
        if "tools" in body:
            config |= _tools(body)
        config |= self._config
        rules, said = _divided(body["messages"], self._provider.name)
        if rules:
            config["system_instruction"] = "\n\n".join(rules)
        return {"model": body["model"], "contents": _contents(said, body["model"]), "config": config}


def _divided(messages: list[Fields], name: str) -> tuple[list[str], list[Fields]]:
    """Splits messages into the texts of the system turns, which this API sends first, and the other turns.

    Raises:
        CapabilityError: a system turn after another one, or with an image.
    """
    is_rule = [message["role"] in ("system", "developer") for message in messages]
    first = is_rule.index(False) if False in is_rule else len(messages)
    if any(is_rule[first:]):
        raise CapabilityError(
            f"{name} takes system turns only in front of a conversation, and one stands behind other turns; "
            "write it first, or as user(...)"
        )
    rules = [message["content"] for message in messages[:first]]
    if not all(isinstance(rule, str) for rule in rules):
        raise CapabilityError(f"{name} takes no images in system turns; write them in user(...)")
    return rules, messages[first:]


def _tools(body: Fields) -> Fields:
    """Returns tools and the choice among them in Google's words. There is none for one call at a time."""
    functions = [each["function"] for each in body["tools"]]
    declared = [
        {
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters_json_schema": function["parameters"],
        }
        for function in functions
    ]
    choice = body["tool_choice"]
    if isinstance(choice, str):
        calling: Fields = {"mode": _MODES[choice]}
    else:
        calling = {"mode": "ANY", "allowed_function_names": [choice["function"]["name"]]}
    return {
        "tools": [{"function_declarations": declared}],
        "tool_config": {"function_calling_config": calling},
        "automatic_function_calling": {"disable": True},  # the client's own loop
    }


def _contents(messages: Sequence[Fields], model: str) -> list[Fields]:
    """Returns turns in Google's words. Results of tools that follow one another are one turn."""
    names = names_of_results(messages)
    contents: list[Fields] = []
    before = ""
    for each in messages:
        role = each["role"]
        if role == "tool":
            answered = {
                "id": each["tool_call_id"],
                "name": names[each["tool_call_id"]],
                "response": {"output": each["content"]},
            }
            if before != "tool":
                contents.append({"role": "user", "parts": []})
            contents[-1]["parts"].append({"function_response": answered})
        elif "tool_calls" in each:
            said = _parts(each["content"]) if each["content"] else []
            contents.append({"role": "model", "parts": said + _calls(each["tool_calls"], model)})
        else:
            contents.append({"role": "model" if role == "assistant" else role, "parts": _parts(each["content"])})
        before = role
    return contents


def _calls(calls: Sequence[Fields], model: str) -> list[Fields]:
    parts: list[Fields] = []
    for call in calls:
        function = call["function"]
        part: Fields = {
            "function_call": {
                "id": call["id"],
                "name": function["name"],
                "args": json.loads(function["arguments"] or "{}"),
            }
        }
        if "extra_content" in call:
            part["thought_signature"] = base64.b64decode(call["extra_content"]["google"]["thought_signature"])
        elif not parts and _SIGNED.match(model):
            part["thought_signature"] = _NO_SIGNATURE
        parts.append(part)
    return parts


def _parts(content: str | list[Fields]) -> list[Fields]:
    if isinstance(content, str):
        return [{"text": content}]
    return [_part(each) for each in content]


def _part(part: Fields) -> Fields:
    if part["type"] == "text":
        return {"text": part["text"]}
    found = _DATA_URL.fullmatch(part["image_url"]["url"])
    assert found is not None, "pictures are sent as data"
    return {"inline_data": {"mime_type": found[1], "data": base64.b64decode(found[2])}}


def _answer(answer: Any, calls: Counter[int] | None = None) -> Object:
    """Converts Google's object, whole or a piece, to OpenAI's.

    Args:
        answer: of Google's client.
        calls: of each candidate, in the pieces before this one; these are added.
    """
    counted = getattr(answer, "usage_metadata", None)
    known: Counter[int] = Counter() if calls is None else calls
    broken = [reason for each in answer.candidates or () if (reason := _reason(each)) in _NO_CALLS]
    if broken:
        return {"error": {"message": f"the model's call of a tool cannot be read ({broken[0]}); ask again"}}
    choices = [_choice(index, each, known) for index, each in enumerate(answer.candidates or ())]
    feedback = getattr(answer, "prompt_feedback", None)
    if not choices and getattr(feedback, "block_reason", None):
        choices = [{"index": 0, "message": {"content": ""}, "finish_reason": "content_filter"}]
    return {"choices": choices, **({"usage": _usage(counted)} if counted is not None else {})}


def _choice(index: int, candidate: Any, calls: Counter[int]) -> Object:
    parts = (candidate.content.parts if candidate.content is not None else None) or ()
    said = [(getattr(part, "thought", False) or False, part.text or "") for part in parts]
    text = "".join(text for thought, text in said if not thought)
    thoughts = "".join(text for thought, text in said if thought)
    index = candidate.index if candidate.index is not None else index
    message: Object = {"content": text, "reasoning": thoughts or None}
    called = [part for part in parts if getattr(part, "function_call", None) is not None]
    if called:
        message["tool_calls"] = [_call(part, calls[index] + number) for number, part in enumerate(called)]
        calls[index] += len(called)
    told: Object = {"index": index, "message": message}
    if reason := _reason(candidate):
        told["finish_reason"] = _REASONS.get(reason, "content_filter")
    return told


def _reason(candidate: Any) -> str:
    """Returns why a candidate ended; "" where it goes on."""
    reason = getattr(candidate.finish_reason, "value", candidate.finish_reason)
    return "" if reason in (None, "FINISH_REASON_UNSPECIFIED") else str(reason)


def _call(part: Any, index: int) -> Object:
    call, signature = part.function_call, getattr(part, "thought_signature", None)
    arguments = json.dumps(call.args or {}, ensure_ascii=False)
    told: Object = {"index": index, "function": {"name": call.name or "", "arguments": arguments}}
    if signature:
        told["extra_content"] = {"google": {"thought_signature": base64.b64encode(signature).decode("ascii")}}
    return told


def _usage(counted: Any) -> Object:
    prompt = counted.prompt_token_count or 0
    said = (counted.candidates_token_count or 0) + (getattr(counted, "thoughts_token_count", None) or 0)
    cached = getattr(counted, "cached_content_token_count", None) or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }
