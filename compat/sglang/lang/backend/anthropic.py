"""`sglang.lang.backend.anthropic`: Claude models, under SGLang's parameters."""

from typing import Any

from .....interpreter.backends.hosted.anthropic import backend as core
from .....lang.chat_template import ChatTemplate


class Anthropic(core.Anthropic):
    """`umbel.Anthropic`, whose options it takes. `model_name`: of the model."""

    def __init__(self, model_name: str, **options: Any) -> None:
        super().__init__(model_name, **options)

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template


__all__ = ["Anthropic"]
