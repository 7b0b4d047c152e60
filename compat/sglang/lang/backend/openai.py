"""`sglang.lang.backend.openai`: models of the OpenAI dialect, under SGLang's parameters."""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from os import PathLike
from typing import Any

from .....interpreter.backends.hosted.openai import backend as core
from .....lang import checks
from .....lang.chat_template import ChatTemplate
from .....lang.errors import ParameterError
from .....lang.protocol import Chunk, Final, GenRequest, Scored, ScoreRequest, Usage


@dataclass
class TokenUsage:
    """Tokens of all calls of a backend since it was made, or since `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens


class OpenAI(core.OpenAI):
    """`umbel.OpenAI` with SGLang's parameters.

    Args:
        model_name: of the model.
        is_chat_model: True for the chat API, False for the completion API; None: chat where the model has it.
        chat_template: how roles are written for a completion model, as of `umbel.OpenAI`.
        is_azure: an Azure resource: `azure_endpoint` and `api_version` say which, or AZURE_OPENAI_ENDPOINT and
            OPENAI_API_VERSION.
        options: of `umbel.OpenAI`.

    Attributes:
        token_usage: tokens of all its calls.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | str | PathLike[str] | None = None,
        is_azure: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(is_chat_model, bool | None):
            raise ParameterError(f"is_chat_model={is_chat_model!r}; write True, False, or leave it out")
        if checks.switch("is_azure", is_azure) and "azure_endpoint" not in options:
            options["azure_endpoint"] = options.pop("base_url", None) or os.environ.get("AZURE_OPENAI_ENDPOINT")
            if options["azure_endpoint"] is None:
                raise ParameterError(
                    "OpenAI(is_azure=True) needs azure_endpoint='https://NAME.openai.azure.com', or the same in "
                    "AZURE_OPENAI_ENDPOINT"
                )
        if is_chat_model is not None:
            options["mode"] = "chat" if is_chat_model else "completion"
        super().__init__(model_name, chat_template=chat_template, **options)
        self.token_usage = TokenUsage()

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Final):
                    self.token_usage.add(event.usage)
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        scored = await super().score(request)
        self.token_usage.add(scored.usage)
        return scored


__all__ = ["OpenAI", "TokenUsage"]
