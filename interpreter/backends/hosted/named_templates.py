"""Chat templates of well-known model families, for servers that do not tell their own.

A name is that of a family, as SGLang's programs give it. A template here writes turns as the family's own does, without
the beginning of the text, which servers add, and without tool calls. Where a family puts a system prompt of its own in
front of conversations that have none, it is not put there: a program says what it says.
"""

import re

from ....lang.chat_template import CHATML, ChatTemplate
from ....lang.errors import TemplateError, remedy

_LLAMA_3 = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_LLAMA_2 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}[INST] <<SYS>>\n{{ message['content'] }}\n<</SYS>>\n\n"
    "{% elif message['role'] == 'user' %}"
    "{% if not (loop.index0 == 1 and messages[0]['role'] == 'system') %}[INST] {% endif %}"
    "{{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }} </s><s>{% endif %}{% endfor %}"
)
_VICUNA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }} "
    "{% elif message['role'] == 'user' %}USER:{{ message['content'] }} "
    "{% else %}ASSISTANT:{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_GEMMA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n{% else %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_DEEPSEEK = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% else %}<｜Assistant｜>{{ message['content'] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_CLAUDE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}\n\nHuman: {{ message['content'] }}"
    "{% else %}\n\nAssistant:{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)

# Name → its Jinja source, and what stands for a picture in it. None: plain lines `SYSTEM:`, `USER:`, `ASSISTANT:`.
_FAMILIES: dict[str, tuple[str | None, str]] = {
    "default": (None, "<image>"),
    "chatml": (CHATML, "<image>"),
    "chatml-llava": (CHATML, "<image>\n"),
    "qwen": (CHATML, "<image>"),
    "qwen2-vl": (CHATML, "<|vision_start|><|image_pad|><|vision_end|>"),
    "claude": (_CLAUDE, "<image>"),
    "deepseek-v3": (_DEEPSEEK, "<image>"),
    "gemma-it": (_GEMMA, "<image>"),
    "llama-2-chat": (_LLAMA_2, "<image>"),
    "llama-3-instruct": (_LLAMA_3, "<|image|>"),
    "llama-3-instruct-llava": (_LLAMA_3, "<image>\n"),
    "vicuna_v1.1": (_VICUNA, " <image>\n"),
}
NAMES = tuple(_FAMILIES)

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
    """The template of that name.

    Raises:
        TemplateError: there is none.
    """
    if name not in _FAMILIES:
        raise TemplateError(f"no chat template has the name {str(name)[:80]!r}; {remedy(str(name), _FAMILIES)}")
    return ChatTemplate(_FAMILIES[name][0], name=name)


def given(template: str | ChatTemplate | None, backend: str) -> ChatTemplate | None:
    """What a user gives as a template: one, the name of a family, or Jinja source.

    Args:
        backend: for messages.

    Raises:
        TemplateError: none of these, or source that does not compile.
    """
    if template is not None and not isinstance(template, str | ChatTemplate):
        raise TemplateError(
            f"chat_template={str(template)[:80]!r} is none; write the name of a family, such as 'chatml'"
        )
    if not isinstance(template, str):
        return template
    return named(template) if template in _FAMILIES else ChatTemplate(template, name=backend)


def name_of_model(model: str) -> str | None:
    """The name of the template of a model, by its path; None for a model that is not known."""
    path = model.lower()
    return next((name for pattern, name in _MODELS if re.search(pattern, path)), None)


def image_token_of(name: str) -> str:
    """What stands for a picture in the prompts of a family."""
    return _FAMILIES[name][1]
