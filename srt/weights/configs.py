"""The small JSON and Jinja files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...lang.errors import ModelError


def chat_template_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """The template in chat_template.jinja, else in tokenizer_config.json; of several the one named "default".

    Raises:
        ModelError: there are several and none is the default.
    """
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    stated = config.get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("default")
        if not isinstance(stated, str):
            raise ModelError(f"{folder} has chat templates named {sorted(map(str, named))}, but none named 'default'")
    return stated if isinstance(stated, str) else None


def read_config(path: Path) -> dict[str, Any]:  # Any: JSON
    """A JSON object of a model folder; {} when the file does not exist. Raises ModelError when it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; download it again")
    return content
