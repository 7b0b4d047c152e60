"""`sglang.lang.chat_template`: templates by the names of model families."""

from ....interpreter.backends.hosted.sglang import endpoint
from ....lang.chat_template import ChatTemplate

__all__ = ["ChatTemplate", "get_chat_template", "get_chat_template_by_model_path"]


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name.

    Raises:
        ParameterError: the name is no string.
        TemplateError: there is none.
    """
    return endpoint.named_template(name)


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of a model's family; the "default" one, which warns when roles are written, for an unknown model.

    Raises:
        ParameterError: the path is no string.
    """
    return endpoint.named_template(endpoint.template_name_of(model_path) or "default")
