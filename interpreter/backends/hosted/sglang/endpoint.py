"""`RuntimeEndpoint`: a model at the address of a server.

model = umbel.RuntimeEndpoint("http://127.0.0.1:30000")          # umbel, by the messages of its runtime
model = umbel.RuntimeEndpoint("http://127.0.0.1:30000")          # SGLang, by its own API
model = umbel.RuntimeEndpoint("http://127.0.0.1:8000")           # vLLM, llama.cpp and others, by /v1/completions

Only umbel's server publishes the model's chat template. With others it is taken by the model's name. The templates are
those of `lang/templates/formats.py`, so a name gives the same prompt wherever it is written.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Container, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, get_args

import msgspec

from .....lang import __version__, checks
from .....lang.chat_template import ChatTemplate, chat_template_by_name, read_chat_template
from .....lang.errors import CapabilityError, EngineError, OverloadedError, ParameterError, RequestError
from .....lang.programs import ProgramEvent, RunProgram
from .....lang.prompt import Part
from .....lang.protocol import (
    CacheRequest,
    Caches,
    Capabilities,
    Chunk,
    ConstraintSpec,
    Detokenize,
    Detokenized,
    Done,
    Embedded,
    EmbedRequest,
    Final,
    GenRequest,
    Hint,
    Locate,
    Located,
    Ranked,
    RankRequest,
    Scored,
    ScoreRequest,
    Tokenize,
    Tokenized,
    VocabularyInfo,
)
from .....lang.runtime_options import MAX_MODEL_LENGTH
from .....lang.status import RuntimeStatus, TreeSurvey
from .. import conversation
from ..backend import ConnectionOptions, HostedBackend
from ..errors import Provider
from ..openai import profiles
from ..openai.backend import OpenAI, listed, plain_endpoint
from ..openai.profiles import Profile
from ..transport import checked_header_name
from ..umbel import PATH, UmbelFacts, UmbelServer, expected_capabilities
from .server import SGLangServer
from .wire import SGLangPlanner, checked_extra

if TYPE_CHECKING:
    from openai import AsyncOpenAI


Dialect = Literal["auto", "umbel", "sglang", "openai"]

_MOST_SECONDS_TO_ASK = 30.0  # who the server is
_NOT_THERE = (404, 405, 501)
_BUSY = (408, 429, 503, 529)  # tried again
_REFUSALS = frozenset(range(400, 600)).difference(_BUSY)
_MOST_IMAGE_TOKEN = 1024  # characters
_NAMES = {"umbel": "umbel", "sglang": "SGLang"}
_MOST_NAMED = 100  # characters of a model's path in messages


class RuntimeEndpoint(HostedBackend["AsyncOpenAI"]):
    """Runs programs on the model of a running server: of umbel, of SGLang, or of one that speaks OpenAI's dialect.

    **A server of umbel**, of the same version, does what a `Runtime` does: its template, its constraints, scores at
    once, pins, embeddings, rankings, and whole programs in one request. What follows is about the others.

    **Text** goes to the server as it is: by `/generate`, or by `/v1/completions`. Roles are written by a chat template,
    which servers do not tell: the given one, or that of the model's family by its name. Where neither is known, roles
    are plain lines, with a warning. What a server takes for control tokens it takes from any text, also from an
    argument that spells them.

    **Choices** are scored by the log-probabilities of the prompt: `select` takes two calls at SGLang, and one for each
    choice (`echo`) at servers of the OpenAI dialect that tell them. Where a server tells none, one of the choices is
    generated.

    **Constraints** are enforced by the server: regular expressions, JSON schemas and GBNF at SGLang; the `Profile` of
    others says what they enforce. All else is looked at here, and the model is asked again.

    Args:
        base_url: the server's address, with or without /v1.
        server: "umbel", "sglang" or "openai"; "auto" asks the server at its first use, and ships no program before.
        model: the name of one of the server's models; None: the first one (an SGLang server has one).
        api_key: sent as a bearer token; None sends none.
        chat_template: Jinja source, the name of a format ("chatml", "llama-3-instruct", ...), the path of a file with
            Jinja source, or a ChatTemplate; None: by the model's name.
        profile: what a server of the OpenAI dialect can do, as of `OpenAI`.
        image_token: what stands for a picture in the model's prompts; None: by the model's name.
        routing_key_header: the name of a header, such as "X-SMG-Routing-Key", that carries a key which the calls of one
            fork have in common, so that a gateway between sends them to one server; None sends none.
        extra_body: fields added to every request; at SGLang its "sampling_params" are added to those of the request.
        options: timeouts, retries and further settings of calls, as of `ConnectionOptions`.

    Raises:
        MissingExtraError: the `openai` package, which makes the requests, is not installed.
        ParameterError: a wrong value or option.
        TemplateError: the chat template is none, or does not compile.

    Examples:
        A fake plays a server of SGLang here. `umbel serve` starts one of umbel.

        >>> from umbel.testing import FakeSGLang
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> with FakeSGLang({"France is": " Paris"}) as server:
        ...     model = ul.RuntimeEndpoint(server.address, api_key=server.api_key)
        ...     capital.run("France", backend=model)["city"]
        ...     model.model
        ' Paris'
        'Qwen/Qwen2.5-7B-Instruct'
    """

    KIND = "endpoint"
    PACKAGE = EXTRA = "openai"

    def __init__(
        self,
        base_url: str,
        *,
        server: Dialect = "auto",
        model: str | None = None,
        api_key: str | None = None,
        chat_template: str | PathLike[str] | ChatTemplate | None = None,
        profile: str | Profile = "auto",
        image_token: str | None = None,
        extra_body: Mapping[str, Any] | None = None,  # Any: JSON
        routing_key_header: str | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        self.check_options(options)
        self.require_package()
        server = cast(Dialect, checks.one_of("server", server, get_args(Dialect)))
        if not isinstance(base_url, str):
            given = type(base_url).__name__
            raise ParameterError(f"RuntimeEndpoint() takes an address such as 'http://127.0.0.1:30000', got {given}")
        if model is not None:
            wanted = "the name of one of the server's models, or leave it out for the first one"
            model = checks.text("model", model, MAX_MODEL_LENGTH, wanted)
        if not isinstance(profile, Profile) and not (isinstance(profile, str) and checks.plain(profile) == "auto"):
            profiles.named(profile, model or "")  # raises for a name that there is not
        if image_token is not None:
            image_token = checks.text("image_token", image_token, _MOST_IMAGE_TOKEN, "a text such as '<image>'")
        self._endpoint = plain_endpoint(
            checks.plain(base_url).rstrip("/").removesuffix("/v1"), api_key, options.get("default_headers")
        )
        name = f"endpoint {self._endpoint.host}"
        provider = Provider(name, self._endpoint.host, "api_key=", self._endpoint.secrets, self._endpoint.address)
        super().__init__(provider, options)
        self._session.routing_key_header = checked_header_name("routing_key_header", routing_key_header)
        self._name = name
        self._options = options
        self._asked, self._model, self._profile = server, model, profile
        self._given_template = None if chat_template is None else read_chat_template(chat_template, name=name)
        self._image_token = image_token
        self._extra = checked_extra(extra_body)
        self._served: UmbelServer | SGLangServer | OpenAI | None = None
        self._template = self._given_template or ChatTemplate(None, name=name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint.address!r}, model={self._model!r})"

    @property
    def model(self) -> str | None:
        """The server's name of its model; None before the first use if none was given."""
        return self._model

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._endpoint.address

    # -------------------------------------------------------------------------------- the Backend protocol

    @property
    def capabilities(self) -> Capabilities:
        if self._served is not None:
            return self._served.capabilities
        if self._asked == "umbel":
            return expected_capabilities(self._name, programs=self._given_template is None)
        return Capabilities(self._name)

    async def prepare(self) -> None:
        """Identifies the server and its model, once.

        Raises:
            RequestError: the address, the key or the model is wrong.
            ConnectionLostError: no server there.
        """
        await super().prepare()
        served = await self._native() if self._asked != "openai" else None
        self._served = served or await self._openai()

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        async with contextlib.aclosing((await self._ready()).generate(request)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        return await (await self._ready()).score(request)

    async def embed(self, request: EmbedRequest) -> Embedded:
        """Computes the embeddings of a request, at a server of umbel or OpenAI's dialect; programs call `umbel.embed`.

        Raises:
            CapabilityError: the server has another API; or as `protocol.Embedding`.
        """
        served = await self._ready()
        if isinstance(served, SGLangServer):
            raise CapabilityError(f"{served.capabilities.name} makes no embeddings by its API; write server='openai'")
        return await served.embed(request)

    async def rank(self, request: RankRequest) -> Ranked:
        """Computes the relevances of a request, at a server of umbel; programs call `umbel.rerank`."""
        await self._ready()
        return await self._umbel("is no reranker").rank(request)

    def hint(self, hint: Hint) -> None:
        """Sends a hint of a prefix to a server that is in use; it starts no connection."""
        if isinstance(self._served, UmbelServer | SGLangServer):
            self._served.hint(hint)

    def release(self, pinned: str) -> None:
        """Lets a server of umbel drop what the hint with the id `pinned` holds."""
        if isinstance(self._served, UmbelServer):
            self._served.release(pinned)

    def run_program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        """Runs the program of a request as a whole, at a server of umbel. Closing the generator early aborts it."""
        return self._umbel("runs no whole programs").run_program(request)

    async def locate(self, question: Locate) -> Located:
        """Finds where tokens of the prompt of a question stand in its text, at a server of umbel.

        Raises:
            CapabilityError: it is another server, or not yet in use.
        """
        return await self._umbel("does not tell where tokens are").locate(question)

    @property
    def vocabulary(self) -> VocabularyInfo:
        """The vocabulary of the model of a server of umbel.

        Raises:
            CapabilityError: it is another server, or not yet in use.
        """
        return self._umbel("does not describe its tokens").vocabulary

    async def tokenize(self, question: Tokenize) -> Tokenized:
        """Encodes the prompt of a question → its token ids, at a server of umbel, as `Runtime.tokenize`.

        Raises:
            CapabilityError: it is another server, or not yet in use.
            RequestError: the prompt holds media.
        """
        return await self._umbel("gives no token ids").tokenize(question)

    async def detokenize(self, question: Detokenize) -> Detokenized:
        """Decodes the token ids of a question → their text, at a server of umbel, as `Runtime.detokenize`.

        Raises:
            CapabilityError: it is another server, or not yet in use.
            ParameterError: ids outside of the vocabulary.
        """
        return await self._umbel("reads no token ids").detokenize(question)

    async def caches(self, request: CacheRequest) -> Caches:
        """Creates, reads, extends or deletes prefixes that a server of umbel keeps under names, as `Runtime.caches`.

        They belong to the API key and the request's salt.

        Args:
            request: what is asked for, as of `Runtime.caches`.

        Raises:
            CapabilityError: it is another server.
        """
        await self._ready()
        return await self._umbel("keeps nothing under names").caches(request)

    async def status(self) -> RuntimeStatus:
        """Reads gauges and counters of the server's runtime, as `Runtime.status`.

        Raises:
            CapabilityError: it is no server of umbel, or has keys, and this one is not its admin key.
        """
        await self._ready()
        return await self._umbel("does not tell its state").status()

    async def survey(self, most: int = 1_000, text: int = 0) -> TreeSurvey:
        """Reads the radix tree of the server's runtime, which all callers share, as `Runtime.survey`.

        Args:
            most: nodes, 1 to 5,000, of the branches that were used last.
            text: characters of the text of each node, 0 to 200; 0 shows none.

        Raises:
            CapabilityError: as `status`.
            ParameterError: a number out of its range.
        """
        await self._ready()
        return await self._umbel("does not show its cache").survey(most, text)

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether the server enforces exactly this constraint, and not only simpler ones of its kind."""
        if isinstance(self._served, UmbelServer):
            return True
        return self._served is not None and self._served.enforces(constraint)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        if self._served is None:
            return conversation.text_tokens_at_most(prompt, conversation.count_bytes)
        return self._served.tokens_at_most(prompt)

    async def control(self, verb: str) -> Done:
        """Does what `flush_cache` and `get_server_info` ask for.

        Args:
            verb: "flush_cache" or "info".

        Raises:
            CapabilityError: a verb that the server does not know.
        """
        return await (await self._ready()).control(verb)

    async def close(self) -> None:
        if self._served is not None:
            await self._served.close()
        await super().close()

    # -------------------------------------------------------------------------------- how

    async def _ready(self) -> UmbelServer | SGLangServer | OpenAI:
        if self._served is None:
            await self.start()
        assert self._served is not None, "a start that does not raise has found the server"
        return self._served

    def _umbel(self, otherwise: str) -> UmbelServer:
        """Returns the server of umbel. Raises CapabilityError for another one, or before the start."""
        if not isinstance(self._served, UmbelServer):
            name = self.capabilities.name
            raise CapabilityError(f"{name} {otherwise}; a Runtime does, and a server of umbel {__version__}")
        return self._served

    async def _native(self) -> UmbelServer | SGLangServer | None:
        """Connects to umbel's messages or to SGLang's API; None: the server has neither.

        Raises:
            RequestError: the user named the one that it does not have.
        """
        said = await self._told_of_model("/get_model_info") or await self._told_of_model("/model_info")
        path = said.get("model_path")
        if not isinstance(path, str):
            if self._asked == "auto":
                return None
            raise RequestError(
                f"{self._name} has no /get_model_info and is no {_NAMES[self._asked]} server; write server='openai', "
                "or leave it out"
            )
        self._take_model(path)
        self._take_template(said)
        info = await self._facts("/get_server_info") or await self._facts("/server_info")
        if self._asked == "umbel" or (self._asked == "auto" and self._speaks_umbel(info)):
            return await self._of_umbel(info)
        seeds = info.get("enable_deterministic_inference") is True
        planner = SGLangPlanner(f"sglang {path[:_MOST_NAMED]}", self._picture_token(), seeds, self._extra)
        return SGLangServer(self._session, planner, path, info)

    def _speaks_umbel(self, info: Mapping[str, Any]) -> bool:  # Any: JSON
        """Returns whether the server takes our messages, and every option that was given. One of another version is
        asked by SGLang's API, which both have."""
        ours = info.get("server") == "umbel" and info.get("version") == __version__
        return ours and not self._extra and self._image_token is None

    async def _of_umbel(self, info: Mapping[str, Any]) -> UmbelServer:  # Any: JSON
        """Connects to the messages of a runtime, and takes its template unless one was given.

        Raises:
            RequestError: it is no server of umbel, it has another version, or options were given that it does not take.
        """
        if not self._speaks_umbel(info):
            raise RequestError(
                f"{self._name} does not take the messages of umbel {__version__} (it is {str(info.get('server'))[:40]} "
                f"{str(info.get('version'))[:40]}), or extra_body= or image_token= is given; write server='sglang'"
            )
        facts = msgspec.convert(await self._facts(PATH), UmbelFacts)
        own = self._given_template is None
        if own:
            self._template = ChatTemplate(
                facts.chat_template,
                tokens=facts.template_tokens,
                options=facts.template_options,
                name=facts.model,
                checked=False,
            )
        return UmbelServer(self._session, facts, programs=own)

    async def _openai(self) -> OpenAI:
        deadline = self._session.deadline(_MOST_SECONDS_TO_ASK)
        if self._model is None:
            async with self._session.slot(deadline) as client:
                served = client.with_options(base_url=f"{self._endpoint.address}/v1")
                models = await self._session.retried(lambda: listed(served, self._provider), deadline)
            if models is None or not models.models:
                raise RequestError(f"{self._name} tells of no models; write model= with the name of the one you mean")
            self._take_model(models.models[0].id)
        else:
            self._take_model(self._model)
        assert self._model is not None, "it was given, or taken from the list"
        backend = OpenAI(
            self._model,
            base_url=f"{self._endpoint.address}/v1",
            api_key=self._endpoint.key or None,
            mode="completion",
            chat_template=self._template,
            profile=self._profile,
            extra_body=self._extra,
            routing_key_header=self._session.routing_key_header,
            **self._inner_options(),
        )
        await backend.start()
        return backend

    def _take_model(self, model: str) -> None:
        """Sets the model.

        Raises:
            RequestError: the server has another model.
        """
        if self._model is not None and model != self._model:
            served, asked = model[:_MOST_NAMED], self._model[:_MOST_NAMED]
            raise RequestError(f"{self._name} serves {served!r}, not {asked!r}; leave model= out, or write its own")
        self._model = model
        family = template_name_of(model)
        if self._given_template is None and family is not None:
            self._template = named_template(family)

    def _take_template(self, said: Mapping[str, Any]) -> None:  # Any: JSON
        """Sets the chat template that the server tells, as umbel's does, unless the user gave one."""
        source, tokens = said.get("chat_template"), said.get("template_tokens")
        if self._given_template is None and isinstance(source, str):
            named = tokens if isinstance(tokens, Mapping) else {}
            self._template = ChatTemplate(source, tokens=named, name=self._name, checked=False)

    def _picture_token(self) -> str:
        family = template_name_of(self._model or "")
        return self._image_token or image_token_of(family or "default")

    async def _told_of_model(self, path: str) -> Mapping[str, Any]:  # Any: JSON
        """Requests facts as `_facts` does. For an unidentified server, any refusal means that it lacks the address:
        gateways answer unknown addresses with 401, 403, 400 or 500. The OpenAI dialect then checks the key."""
        if self._asked != "auto":
            return await self._facts(path)
        with contextlib.suppress(OverloadedError, EngineError):  # also after its tries
            return await self._facts(path, _REFUSALS)
        return {}

    async def _facts(self, path: str, absent: Container[int] = _NOT_THERE) -> Mapping[str, Any]:  # Any: JSON
        """Requests JSON from an address; {} where the server has no such address, or no JSON there.

        Args:
            absent: statuses that say so.
        """
        deadline = self._session.deadline(_MOST_SECONDS_TO_ASK)

        async def ask() -> object:
            try:
                return await client.get(path, cast_to=object)
            except Exception as error:
                if getattr(error, "status_code", None) not in absent:
                    raise
                return {}

        async with self._session.slot(deadline) as client:
            said = await self._session.retried(ask, deadline)
        return said if isinstance(said, Mapping) else {}

    def _inner_options(self) -> ConnectionOptions:
        """Returns the options of the OpenAI backend inside: no environment variable redirects it."""
        return {**self._options, "environment": replace(self._environment, variables={})}

    def open_client(self) -> "AsyncOpenAI":
        return self._endpoint.open(self._timeouts, self._concurrency, self._environment)


_LONGEST_NAME = 4096  # of a template, or of a model, which may be a path

# Name of a template → placeholder of a picture in its prompts.
_IMAGE_TOKENS: Mapping[str, str] = {
    "chatml-llava": "<image>\n",
    "qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "llama-3-instruct": "<|image|>",
    "llama-3-instruct-llava": "<image>\n",
    "vicuna_v1.1": " <image>\n",
}

# The path or name of a model, in lower case → the name of its template; the first that is found.
_MODELS: tuple[tuple[str, str], ...] = (
    (r"deepseek-(v3|r1)(?!.*(base|distill))", "deepseek-v3"),
    (r"vicuna|llava-v1\.5|llava-next-video-7b", "vicuna_v1.1"),
    (r"llama-?2.*chat|codellama.*instruct|(mistral|mixtral).*instruct", "llama-2-chat"),
    (r"llama-?3.*llava|llava.*llama-?3", "llama-3-instruct-llava"),
    (r"llama-?3.*instruct", "llama-3-instruct"),
    (r"qwen.*vl", "qwen2-vl"),
    (r"qwen(?!.*base)", "qwen"),
    (r"llava-v1\.6-34b|llava.*qwen|tinyllama.*chat|hermes", "chatml"),
    (r"gemma.*(it|instruct)\b", "gemma-it"),
)


def named_template(name: str) -> ChatTemplate:
    """Returns the template of that name; "default" warns when roles are written: no model was trained on it.

    Raises:
        ParameterError: the name is no string.
        TemplateError: no template has it.
    """
    name = checks.text("the name of a chat template", name, _LONGEST_NAME, "a name such as 'chatml'")
    return ChatTemplate(None, name=name) if name == "default" else chat_template_by_name(name)


def template_name_of(model: str) -> str | None:
    """Returns the name of a model's template, by its path; None for an unknown model.

    Raises:
        ParameterError: the path is no string.
    """
    path = checks.text(
        "the path of a model", model, _LONGEST_NAME, "a path such as 'Qwen/Qwen3-8B'", empty=True
    ).lower()
    return next((name for pattern, name in _MODELS if re.search(pattern, path)), None)


def image_token_of(name: str) -> str:
    """Returns the placeholder of a picture in the prompts of a template."""
    return _IMAGE_TOKENS.get(name, "<image>")
