"""`sglang.lang.chat_template`: templates by the names of model families."""

from ....interpreter.backends.hosted import named_templates
from ....lang.chat_template import ChatTemplate

__all__ = ["ChatTemplate", "get_chat_template", "get_chat_template_by_model_path"]


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name.

    Raises:
        ParameterError: the name is no string.
        TemplateError: there is none.
    """
    return named_templates.named(name)


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template of a model's family; the "default" one, which warns when roles are written, for an unknown model.

    Raises:
        ParameterError: the path is no string.
    """
    return named_templates.named(named_templates.name_of_model(model_path) or "default")
