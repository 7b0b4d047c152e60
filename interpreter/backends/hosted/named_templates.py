"""Chat templates by model name, for servers that do not publish their own.

The templates are those of `lang/templates/formats.py`, so a name gives the same prompt wherever it is written.
"""

import re
from collections.abc import Mapping

from ....lang import checks
from ....lang.chat_template import ChatTemplate, chat_template_by_name

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


def named(name: str) -> ChatTemplate:
    """Returns the template of that name; "default" warns when roles are written: no model was trained on it.

    Raises:
        ParameterError: the name is no string.
        TemplateError: no template has it.
    """
    name = checks.text("the name of a chat template", name, _LONGEST_NAME, "a name such as 'chatml'")
    return ChatTemplate(None, name=name) if name == "default" else chat_template_by_name(name)


def name_of_model(model: str) -> str | None:
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
