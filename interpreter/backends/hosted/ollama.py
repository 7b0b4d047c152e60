"""Models of an Ollama server, by its own API: it takes a context size and how long a model stays loaded, which its
OpenAI-compatible one does not.

model = umbel.Ollama("llama3.2")                                # at OLLAMA_HOST, or 127.0.0.1:11434; no key
"""

import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Unpack
from urllib.parse import urlsplit

from ....lang import checks
from ....lang.errors import ConnectionLostError, RequestError
from ....lang.runtime_options import MAX_MODEL_LENGTH
from .backend import ConnectionOptions
from .constraint_params import Fields
from .errors import Provider
from .openai.dialect import TranslatedBackend, checked_chat_profile
from .openai.profiles import Profile
from .openai.tools import names_of_results
from .openai.wire import Object, ProviderError, Translator
from .transport import checked_address, checked_headers, open_client, secrets_of

ADDRESS = "http://127.0.0.1:11434"
_PORT = 11434

# SamplingParams → Ollama's options. The server's own defaults are other ones, so these are always sent.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "max_tokens": "num_predict",
    "stop": "stop",
}
OLLAMA = Profile(
    "ollama",
    completion=False,
    schemas="json_object",  # the grammar leaves keywords out that it does not know
    choices="enum",
    sampling=frozenset(_NAMES) - {"max_tokens", "stop"},
    always=frozenset(_NAMES) - {"max_tokens", "stop", "seed"},
    all_top_k=0,
    n=1,
    stops=64,
    top_logprobs=-1,
)
_THINKING_TOKENS = 4096
_MOST_SECONDS_TO_SHOW = 30.0
_MOST_CONTEXT = 1 << 24
_EFFORTS = ("low", "medium", "high")


class Ollama(TranslatedBackend):
    """Runs programs on one model of an Ollama server.

    Conversations, stops, budgets and retries are as of `OpenAI`. Choices, and JSON schemas of the keywords that
    Ollama's grammars honour, are enforced by the server; all else is validated here, and the model is asked again. A
    start asks the server about the model: whether it is there, takes images, thinks, and calls tools.

    Args:
        model: its name, such as "llama3.2" or "qwen3:8b".
        base_url: the server's address; None: the environment's OLLAMA_HOST, or 127.0.0.1:11434.
        num_ctx: tokens of the context. The server cuts a longer prompt in silence; None: its own default.
        keep_alive: how long the model stays loaded after a call: seconds, or a text such as "10m"; -1: for ever; 0: not
            at all; None: the server's own default.
        think: whether a model that can think does, or how much: "low", "medium", "high"; None: its own default.
        profile: what the model can do, as of `OpenAI`.
        options: timeouts, retries and further settings of calls, as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `openai` package is not installed, whose HTTP client is used.
        ParameterError: a wrong value or option.

    Examples:
        A fake plays the server here. For the one of this machine, leave `base_url` out.

        >>> from umbel.testing import FakeOllama
        >>> @ul.function
        ... def capital(s, country):
        ...     s += ul.user(f"What is the capital of {country}?")
        ...     s += ul.assistant(ul.gen("city", max_tokens=8))
        >>> with FakeOllama({"France": "Paris"}) as server:
        ...     capital.run("France", backend=ul.Ollama("llama3.2", base_url=server.base_url))["city"]
        'Paris'
    """

    KIND = "ollama"
    PACKAGE = EXTRA = "openai"
    OPTIONS = ConnectionOptions

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        num_ctx: int | None = None,
        keep_alive: str | float | None = None,
        think: bool | str | None = None,
        profile: Profile = OLLAMA,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        environment = self.check_options(options)
        self.require_package()
        model = checks.text("Ollama(): model", model, MAX_MODEL_LENGTH, "a name such as 'llama3.2'")
        given = _address_of(environment.variable("OLLAMA_HOST")) if base_url is None else base_url
        self._address, host = checked_address("OLLAMA_HOST" if base_url is None else "base_url", given, ADDRESS)
        self._headers = checked_headers(options.get("default_headers"))
        fields: Fields = {}
        if keep_alive is not None:
            fields["keep_alive"] = _checked_time(keep_alive)
        if think is not None:
            fields["think"] = think if isinstance(think, bool) else checks.one_of("think", think, _EFFORTS)
        if num_ctx is not None:
            num_ctx = checks.integer("num_ctx", num_ctx, 1, _MOST_CONTEXT, "a number of tokens")
            fields["options"] = {"num_ctx": num_ctx}
        self._fields, self._num_ctx = fields, num_ctx
        provider = Provider(f"ollama {model}", host, "default_headers=", secrets_of("", self._headers), self._address)
        super().__init__(model, provider, options, profile=checked_chat_profile("Ollama", profile))
        self.use_profile(self._planner.profile, num_ctx)

    async def prepare(self) -> None:
        """Asks the server about the model.

        Raises:
            ConnectionLostError: no server there.
            RequestError: the model is not there.
        """
        await super().prepare()
        deadline = self._session.deadline(_MOST_SECONDS_TO_SHOW)
        async with self._session.slot(deadline) as client:
            assert isinstance(client, _OllamaClient), "open_client makes these"
            abilities = await self._session.retried(client.abilities, deadline)
        profile = self._planner.profile
        thinks = "thinking" in abilities and self._fields.get("think") is not False
        profile = replace(
            profile,
            images=profile.images or "vision" in abilities,
            thinking_tokens=max(profile.thinking_tokens, _THINKING_TOKENS if thinks else 0),
            tools=profile.tools or "tools" in abilities,
        )
        self.use_profile(profile, self._num_ctx)

    def open_client(self) -> Translator:
        library = importlib.import_module("openai")
        http = open_client(library, self._timeouts, self._concurrency, self._environment.wire)
        return _OllamaClient(http, self._address, self.model, self._headers, self._fields)


def _address_of(given: str) -> str:
    """Returns the address that OLLAMA_HOST means, as Ollama's own client reads it: each part may be left out."""
    text = given.strip().strip("\"'")
    if not text:
        return ADDRESS
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "http", text
    parts = urlsplit(f"//{rest.rstrip('/')}")
    try:
        port = parts.port or {"https": 443, "http": 80 if found else _PORT}.get(scheme, _PORT)
    except ValueError:
        port = _PORT
    host = parts.hostname or "127.0.0.1"
    if host in ("0.0.0.0", "::"):  # a server listens there; clients call this machine
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _checked_time(keep_alive: object) -> str | float:
    wanted = "seconds, or a text such as '10m'; -1 for ever"
    if isinstance(keep_alive, str):
        return checks.text("keep_alive", keep_alive, 32, wanted)
    return checks.number("keep_alive", keep_alive, -1, 1e9, wanted)


class _OllamaClient(Translator):
    """Calls of `/api/chat`, in the OpenAI dialect. `fields`: of every request."""

    def __init__(self, http: Any, address: str, model: str, headers: Mapping[str, str], fields: Fields) -> None:
        self._http = http  # Any: of the library under OpenAI's SDK
        self._address, self._model, self._headers, self._fields = address, model, dict(headers), fields

    async def abilities(self) -> list[str]:
        """Returns what the model can do, such as "vision", "thinking" and "tools"."""
        try:
            told = await self._asked("/api/show", {"model": self._model})
        except Exception as error:
            if type(error).__name__ not in ("ConnectError", "ConnectTimeout"):
                raise
            problem = ConnectionLostError(
                f"no Ollama answers at {self._address}; start it with `ollama serve`, or write base_url= or OLLAMA_HOST"
            )
        else:
            return [each for each in told.get("capabilities") or () if isinstance(each, str)]
        raise problem

    async def whole(self, body: Fields) -> Object:
        return _answer(await self._asked("/api/chat", {**self._request(body), "stream": False}))

    async def stream(self, body: Fields) -> AsyncIterator[Object]:
        request = self._http.build_request(
            "POST", f"{self._address}/api/chat", json={**self._request(body), "stream": True}, headers=self._headers
        )
        response = await self._http.send(request, stream=True)
        if response.status_code >= 300:
            try:
                await response.aread()
            finally:
                await response.aclose()
            self._refuse(response)
        return _objects(response)

    async def close(self) -> None:
        await self._http.aclose()

    async def _asked(self, path: str, body: Fields) -> Object:
        response = await self._http.post(f"{self._address}{path}", json=body, headers=self._headers)
        if response.status_code >= 300:
            self._refuse(response)
        told: Object = response.json()
        return told

    def _refuse(self, response: Any) -> None:
        """Raises the error of an answer."""
        try:
            said = str(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            said = response.text[:400] or "no reason given"
        if response.status_code == 404 and "not found" in said:
            raise RequestError(
                f"ollama {self._model}: the server at {self._address} has no such model ({said}); run "
                f"`ollama pull {self._model}`"
            )
        raise ProviderError(response.status_code, said, dict(response.headers))

    def _request(self, body: Fields) -> Fields:
        options = {name: body[field] for field, name in _NAMES.items() if field in body}
        names = names_of_results(body["messages"])
        request: Fields = {"model": body["model"], "messages": [_message(each, names) for each in body["messages"]]}
        if tools := _offered(body):
            request["tools"] = tools
        if (asked := body.get("response_format")) is not None:
            request["format"] = asked["schema"] if "schema" in asked else asked["json_schema"]["schema"]
        return {**request, **self._fields, "options": {**options, **self._fields.get("options", {})}}


def _offered(body: Fields) -> list[Fields]:
    """Returns the tools that the model may call: the API has no field for a choice among them."""
    match body.get("tool_choice"):
        case "none":
            return []
        case {"function": {"name": name}}:
            return [each for each in body["tools"] if each["function"]["name"] == name]
    return list(body.get("tools", ()))


def _message(message: Fields, names: Mapping[str, str]) -> Fields:
    """Returns a message in Ollama's words. `names`: ids of calls → names of their tools."""
    content = message["content"]
    if message["role"] == "tool":
        number = message["tool_call_id"]
        return {"role": "tool", "tool_name": names[number], "tool_call_id": number, "content": content}
    if "tool_calls" in message:
        calls = [_written_call(number, call) for number, call in enumerate(message["tool_calls"])]
        return {"role": message["role"], "content": content or "", "tool_calls": calls}
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    texts = [part["text"] for part in content if part["type"] == "text"]
    images = [part["image_url"]["url"].partition(",")[2] for part in content if part["type"] == "image_url"]
    return {"role": message["role"], "content": "".join(texts), **({"images": images} if images else {})}


def _written_call(index: int, call: Fields) -> Fields:
    function = call["function"]
    arguments = json.loads(function["arguments"] or "{}")
    return {"id": call["id"], "function": {"index": index, "name": function["name"], "arguments": arguments}}


async def _objects(response: Any) -> AsyncGenerator[Object, None]:
    calls = 0
    try:
        async for line in response.aiter_lines():
            if line.strip():
                told = json.loads(line)
                yield _answer(told, calls)
                calls += len(_calls_of(told))
    finally:
        await response.aclose()


def _calls_of(told: Object) -> list[Any]:
    message = told.get("message")
    return (message.get("tool_calls") or []) if isinstance(message, dict) else []


def _as_json(function: Object) -> str:
    return json.dumps(function.get("arguments") or {}, ensure_ascii=False)


def _answer(told: Object, calls: int = 0) -> Object:
    """Converts an object of `/api/chat`, whole or a piece, to OpenAI's.

    Args:
        told: by the server.
        calls: of tools, in the pieces before this one.
    """
    if "error" in told:
        return {"error": {"message": str(told["error"])}}
    said = told.get("message") or {}
    message: Object = {"content": said.get("content") or "", "reasoning": said.get("thinking")}
    if called := _calls_of(told):
        functions = [each.get("function") or {} for each in called]
        message["tool_calls"] = [
            {"index": calls + number, "function": {"name": each.get("name"), "arguments": _as_json(each)}}
            for number, each in enumerate(functions)
        ]
    choice: Object = {"index": 0, "message": message}
    if not told.get("done"):
        return {"choices": [choice]}
    choice["finish_reason"] = "length" if told.get("done_reason") == "length" else "stop"
    usage = {"prompt_tokens": told.get("prompt_eval_count") or 0, "completion_tokens": told.get("eval_count") or 0}
    return {"choices": [choice], "usage": usage}
