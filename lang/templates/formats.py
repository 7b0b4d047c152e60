"""Chat formats by name: what `chat_template="llama-3-instruct"` stands for.

The names are those that SGLang's programs use, and a few short ones. Each format is kept as what stands around the
content of a turn; its Jinja source is made from that. Beginning-of-sequence tokens are not in it: the tokenizer adds
them. Formats whose makers publish a long default system prompt are kept without it: write your own system turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

# ChatML, which is prefix-stable: role blocks with control tokens around them. What backends without a template of their
# own write, and what hosted ones read conversations back from.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A format whose turns stand one after the other.

    Attributes:
        system, user, assistant: the text before and after a turn's content.
        default_system: content of the system turn of a conversation that begins without one.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    default_system: str = ""

    def source(self, name: str) -> str:
        before, after = self.system
        default = f"{before}{self.default_system}{after}"
        begins = (
            f"{{% if loop.first and role != 'system' %}}{{{{ {default!r} }}}}{{% endif %}}"
            if self.default_system
            else ""
        )
        return (
            f"{{% for message in messages %}}{{% set role = message['role'] %}}{begins}"
            f"{{% if role == 'user' %}}{_around(self.user)}"
            f"{{% elif role == 'assistant' %}}{_around(self.assistant)}"
            f"{{% elif role == 'system' %}}{_around(self.system)}"
            f"{{% else %}}{_refuse_role(name)}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {self.assistant[0].rstrip(' ')!r} }}}}{{% endif %}}"
        )


@dataclass(frozen=True, slots=True)
class _Merged:
    """A format without system turns: theirs is written at the beginning of the first user turn.

    Attributes:
        user, assistant: the text before and after a turn's content.
        system: the text before and after the system turn's content, inside the user turn.
        again: is written before every user turn but the first.
        generation: begins an assistant turn.
        trims: white space around content is left out.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    system: tuple[str, str]
    again: str = ""
    generation: str = ""
    trims: bool = False

    def source(self, name: str) -> str:
        content = "message['content'] | trim" if self.trims else "message['content']"
        (before, after), (begin, end) = self.user, self.system
        first = f"{begin!r} + messages[0]['content'] + {end!r}"
        return (
            "{% set system = messages[0]['role'] == 'system' %}"
            "{% for message in (messages[1:] if system else messages) %}"
            "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            f"{{{{ raise_exception({f'the format {name} wants user and assistant turns to alternate'!r}) }}}}"
            "{% endif %}"
            "{% if message['role'] == 'user' %}"
            f"{{{{ (('' if loop.first else {self.again!r}) ~ {before!r})"
            f" ~ ({first} if loop.first and system else '') ~ ({content}) ~ {after!r} }}}}"
            f"{{% elif message['role'] == 'assistant' %}}"
            f"{{{{ {self.assistant[0]!r} ~ ({content}) ~ {self.assistant[1]!r} }}}}"
            f"{{% else %}}{_refuse_role(name)}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {self.generation!r} }}}}{{% endif %}}"
        )


def _around(texts: tuple[str, str]) -> str:
    return f"{{{{ {texts[0]!r} ~ message['content'] ~ {texts[1]!r} }}}}"


def _refuse_role(name: str) -> str:
    return f"{{{{ raise_exception({f'the format {name} has no turns of the role '!r} ~ message['role']) }}}}"


_IM = {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")}
_QWEN = _Blocks(_IM["system"], _IM["user"], _IM["assistant"], "You are a helpful assistant.")
_LLAMA_3 = _Blocks(
    ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
)
_LLAMA_2 = _Merged(("[INST] ", " [/INST]"), (" ", " </s>"), ("<<SYS>>\n", "\n<</SYS>>\n\n"), again="<s>")
_MISTRAL = _Merged(("[INST] ", " [/INST]"), (" ", "</s>"), ("", "\n\n"))
_GEMMA = _Merged(
    ("<start_of_turn>user\n", "<end_of_turn>\n"),
    ("<start_of_turn>model\n", "<end_of_turn>\n"),
    ("", "\n\n"),
    generation="<start_of_turn>model\n",
    trims=True,
)
_VICUNA = _Blocks(("", " "), ("USER: ", " "), ("ASSISTANT: ", "</s>"))
_DEEPSEEK = _Blocks(("", ""), ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"))
_MINICPM = _Blocks(("", " "), ("user:", " "), ("assistant:", "</s>"))

_FORMATS: Mapping[str, _Blocks | _Merged] = {
    "default": _Blocks(("SYSTEM: ", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "\n")),
    "c4ai-command-r": _Blocks(
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    "chatml-llava": _QWEN,
    "claude": _Blocks(("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant: ", "")),
    "dbrx-instruct": _Blocks(
        ("<|im_start|>system\n", "<|im_end|>"),
        ("\n<|im_start|>user\n", "<|im_end|>"),
        ("\n<|im_start|>assistant\n", "<|im_end|>"),
    ),
    "deepseek-v3": _DEEPSEEK,
    "gemma": _GEMMA,
    "gemma-3": _GEMMA,
    "gemma-it": _GEMMA,
    "granite-3-instruct": _Blocks(
        ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    "janus-pro": _DEEPSEEK,
    "llama-2-chat": _LLAMA_2,
    "llama-3-instruct": _LLAMA_3,
    "llama-3-instruct-llava": _LLAMA_3,
    "llama-4": _Blocks(
        ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    ),
    "minicpmo": _MINICPM,
    "minicpmv": _MINICPM,
    "mistral": _MISTRAL,
    "phi-3": _Blocks(("<|system|>\n", "<|end|>\n"), ("<|user|>\n", "<|end|>\n"), ("<|assistant|>\n", "<|end|>\n")),
    "qwen": _QWEN,
    "qwen2-vl": _QWEN,
    "vicuna": _VICUNA,
    "vicuna_v1.1": _VICUNA,
    "yi-1.5": _Blocks(("", ""), _IM["user"], _IM["assistant"]),
    "yi-vl": _Blocks(("", "\n\n"), ("### Human: ", "\n"), ("### Assistant: ", "\n")),
    "zephyr": _Blocks(("<|system|>\n", "</s>\n"), ("<|user|>\n", "</s>\n"), ("<|assistant|>\n", "</s>\n")),
}

NAMES = tuple(sorted((*_FORMATS, "chatml")))


@cache
def source_of(name: str) -> str | None:
    """The Jinja source of a named format; None where no format has the name."""
    if name == "chatml":
        return CHATML
    known = _FORMATS.get(name)
    return None if known is None else known.source(name)
