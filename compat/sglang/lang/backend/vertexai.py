"""`sglang.lang.backend.vertexai`: Gemini models, under SGLang's parameters."""

from collections.abc import Mapping
from typing import Any

from .....interpreter.backends.hosted import vertexai as core
from .....lang.chat_template import ChatTemplate


class VertexAI(core.VertexAI):
    """`umbel.VertexAI`, whose options it takes. `model_name`: of the model; `safety_settings`: category → threshold."""

    def __init__(self, model_name: str, safety_settings: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(model_name, safety_settings=safety_settings, **options)

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template


__all__ = ["VertexAI"]
