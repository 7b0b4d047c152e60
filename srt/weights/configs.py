"""The small JSON and Jinja files of a model folder."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...lang.errors import ModelError

_TOKEN_SECTIONS = ("extra_special_tokens", "model_specific_special_tokens")  # of tokenizer_config.json, by version


def chat_template_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """The template in chat_template.jinja, else in tokenizer_config.json, else in chat_template.json; of several the
    one named "default".

    Raises:
        ModelError: there are several and none is the default.
    """
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    stated = config.get("chat_template") or read_config(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
        if not isinstance(stated, str):
            raise ModelError(f"{folder} has chat templates named {sorted(map(str, named))}, but none named 'default'")
    return stated if isinstance(stated, str) else None


def read_preprocessor(folder: Path) -> dict[str, Any]:  # Any: JSON
    """How pictures are prepared: a part of processor_config.json (transformers 5), or preprocessor_config.json; {} when
    neither says it.

    Raises:
        ModelError: a file that is no JSON object, or holds something else where the settings belong.
    """
    nested = read_config(folder / "processor_config.json").get("image_processor")
    if nested is None:
        return read_config(folder / "preprocessor_config.json")
    if not isinstance(nested, dict):
        raise ModelError(f"{folder / 'processor_config.json'}: image_processor is no object; download it again")
    return nested


def picture_surroundings(family: str, tokenizer_config: Mapping[str, Any], template: str | None) -> tuple[str, str]:
    """The text before and after a picture's tokens, as the model was trained with.

    Gemma 3 has tokens for a picture's begin and end, between empty lines. A LLaVA's chat template writes white space
    behind each picture, or does not; without a template none.
    """
    if family == "gemma3":
        begin = _token(tokenizer_config, "boi_token", "<start_of_image>")
        end = _token(tokenizer_config, "eoi_token", "<end_of_image>")
        return f"\n\n{begin}", f"{end}\n\n"
    token = re.escape(_token(tokenizer_config, "image_token", "<image>"))
    written = re.search(token + r"((?:\\n|\s)*)['\"]", template or "")  # a string of Jinja, where \n is two characters
    return "", written.group(1).replace("\\n", "\n") if written else ""


def _token(tokenizer_config: Mapping[str, Any], key: str, default: str) -> str:
    for place in (tokenizer_config, *(tokenizer_config.get(name) for name in _TOKEN_SECTIONS)):
        stated = place.get(key) if isinstance(place, Mapping) else None
        text = stated.get("content") if isinstance(stated, Mapping) else stated
        if isinstance(text, str) and text:
            return text
    return default


def read_config(path: Path) -> dict[str, Any]:  # Any: JSON
    """A JSON object of a model folder; {} when the file does not exist. Raises ModelError when it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content
