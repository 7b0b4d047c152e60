"""Opens models from safetensors folders, GGUF files and the default model's package, each as a `ModelSource`."""

from .source import CachedModel, ModelSource, list_models, open_model

__all__ = ["CachedModel", "ModelSource", "list_models", "open_model"]
