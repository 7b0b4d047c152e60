"""Where weights come from: safetensors folders, GGUF files and the default model, all as one `ModelSource`."""

from .source import CachedModel, ModelSource, list_models, open_model

__all__ = ["CachedModel", "ModelSource", "list_models", "open_model"]
