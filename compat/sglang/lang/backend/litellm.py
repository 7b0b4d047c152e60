"""`sglang.lang.backend.litellm`: models of LiteLLM, under SGLang's parameters."""

from typing import Any

from .....interpreter.backends.hosted import litellm as core
from .....interpreter.backends.hosted.transport import checked_key
from .....lang import checks
from .....lang.chat_template import ChatTemplate
from .....lang.errors import ParameterError


class LiteLLM(core.LiteLLM):
    """`umbel.LiteLLM`, whose options it takes.

    Args:
        model_name: LiteLLM's name of the model.
        chat_template: None: providers have templates of their own.
        organization: at the provider, for accounting.
    """

    def __init__(
        self, model_name: str, chat_template: object = None, organization: str | None = None, **options: Any
    ) -> None:
        if chat_template is not None:
            raise ParameterError("LiteLLM() takes no chat_template: providers have the model's own; leave it out")
        if checked_key("organization", organization):
            given = options.get("extra_body")
            extra = {} if given is None else checks.entries("extra_body", given, 256, "a dict of JSON values")
            options["extra_body"] = {**extra, "organization": organization}
        super().__init__(model_name, **options)

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template


__all__ = ["LiteLLM"]
