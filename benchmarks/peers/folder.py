"""Writes a model as a safetensors folder in bfloat16, for peers that read no GGUF file.

python -m benchmarks.peers.folder FOLDER                      the default model
python -m benchmarks.peers.folder FOLDER --model FILE.gguf
"""

import argparse
import json
from pathlib import Path

from umbel.srt.weights import ModelSource, open_model


def write_folder(source: ModelSource, folder: Path) -> None:
    """Writes weights, configuration and tokenizer into a new folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {name: source.tensors[name].to(torch.bfloat16).contiguous() for name in source.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(source.config), indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(source.documents.tokenizer())
    ends = {"eos_token_id": sorted(source.eos_ids)}
    for name in ("tokenizer_config.json", "generation_config.json"):
        content = source.documents.read(name) or (ends if name == "generation_config.json" else {})
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="default")
    options = parser.parse_args()
    write_folder(open_model(options.model), options.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
