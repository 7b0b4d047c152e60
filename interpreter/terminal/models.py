"""The model of a command line: by name on this machine, by a provider's prefix, or at the address of a server."""

import argparse
from collections.abc import Callable

from ...lang.errors import ParameterError, shown
from ...lang.protocol import Backend

NAMED = "a name (org/repo, ollama:NAME), a folder or a GGUF file; default: Gemma 3 270M"


def _openai(model: str) -> Backend:
    from ..backends.hosted.openai.backend import OpenAI

    return OpenAI(model)


def _anthropic(model: str) -> Backend:
    from ..backends.hosted.anthropic.backend import Anthropic

    return Anthropic(model)


def _gemini(model: str) -> Backend:
    from ..backends.hosted.gemini import Gemini

    return Gemini(model)


def _openrouter(model: str) -> Backend:
    from ..backends.hosted.openrouter import OpenRouter

    return OpenRouter(model)


def _litellm(model: str) -> Backend:
    from ..backends.hosted.litellm import LiteLLM

    return LiteLLM(model)


# Prefix of a name → the backend, with its key from the environment. ollama: is a name of a file on this machine.
PROVIDERS: dict[str, Callable[[str], Backend]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "gemini": _gemini,
    "openrouter": _openrouter,
    "litellm": _litellm,
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --url and --api-key."""
    providers = ", ".join(f"{name}:NAME" for name in PROVIDERS)
    parser.add_argument("--model", metavar="NAME", help=f"{NAMED}. Or a hosted one: {providers}")
    parser.add_argument(
        "--url", metavar="ADDRESS", help="the model of a running server: umbel's, SGLang's, or one of OpenAI's dialect"
    )
    parser.add_argument("--api-key", metavar="KEY", help="with --url: the key that the server asks for")


async def conversing(backend: Backend, options: argparse.Namespace) -> Backend:
    """Returns a started backend for turns: a server of another program, the template of whose model is not known here,
    is asked by its own chat messages, and no longer for text that goes on.

    Args:
        backend: the model of `options`, started.
    """
    known = backend.capabilities
    if options.url is None or known.hint or known.converses or backend.chat_template.source is not None:
        return backend
    from ..backends.hosted.openai.backend import OpenAI
    from ..backends.hosted.sglang.endpoint import RuntimeEndpoint

    assert isinstance(backend, RuntimeEndpoint), "--url was given"
    address, key = f"{backend.base_url}/v1", options.api_key or ""  # not that of the environment, which is OpenAI's
    model = OpenAI(backend.model or "default", base_url=address, api_key=key, mode="chat")
    await backend.close()
    await model.start()
    return model


def chosen_model(options: argparse.Namespace) -> Backend | None:
    """Makes the backend of a command line; None where no model is named.

    Raises:
        ParameterError: a name or an address that is none.
        MissingExtraError: the provider's package is not installed.
    """
    if options.url is not None:
        from ..backends.hosted.sglang.endpoint import RuntimeEndpoint

        return RuntimeEndpoint(options.url, model=options.model, api_key=options.api_key)
    if options.api_key is not None:
        raise ParameterError("--api-key is for --url; keys of providers come from the environment: OPENAI_API_KEY, ...")
    if options.model is None:
        return None
    prefix, colon, name = options.model.partition(":")
    if colon and prefix in PROVIDERS:
        if not name:
            raise ParameterError(f"--model {shown(options.model)} names no model; write --model {prefix}:NAME")
        return PROVIDERS[prefix](name)
    from ..backends.runtime import Runtime

    return Runtime(options.model)
