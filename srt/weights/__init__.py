"""Opens models from safetensors folders, GGUF files and the default model's package, each as a `ModelSource`."""

from .source import ModelSource, open_model

__all__ = ["ModelSource", "open_model"]
