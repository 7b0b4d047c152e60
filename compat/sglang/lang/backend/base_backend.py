"""`sglang.lang.backend.base_backend`: what a backend is."""

from .....lang.protocol import Backend as BaseBackend

__all__ = ["BaseBackend"]
