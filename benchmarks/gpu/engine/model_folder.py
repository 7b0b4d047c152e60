"""Writes a shape of model as a folder that a runtime opens: configuration, tokenizer, and weights without numbers.

The file of weights has a header and zeros that take no room on the disk. `debug={"random_weights": True}` makes the
numbers from the header.
"""

import json
import math
from pathlib import Path

from umbel.srt.tokenizer.file import byte_alphabet

from .shapes import Shape
from .words import PIECE, WordTokenizer

_ITEM = 2  # bytes of a number in bfloat16


def write_model(shape: Shape, tokenizer: WordTokenizer, folder: Path) -> Path:
    """Writes the model to the folder, and returns the folder. Its tokenizer cuts texts as the given one."""
    config = {**shape.config, "bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", _tokenizer(tokenizer)),
        ("tokenizer_config.json", tokenizer.template_tokens),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    _write_weights(shape, folder / "model.safetensors")
    return folder


def _tokenizer(tokenizer: WordTokenizer) -> dict[str, object]:
    """As the library writes it: words that are looked up whole, and bytes for all others."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    vocabulary = {"".join(letters[byte] for byte in one): token for token, one in enumerate(spelled) if one}
    added = [
        {
            "id": token,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for text, token in tokenizer.special_ids.items()
    ]
    whole = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": PIECE}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, {"type": "ByteLevel", **whole}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **whole},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "ignore_merges": True},
    }


def _write_weights(shape: Shape, path: Path) -> None:
    header: dict[str, object] = {}
    at = 0
    for name, sizes in shape.tensor_shapes.items():
        end = at + _ITEM * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
