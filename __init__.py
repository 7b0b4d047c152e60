"""umbel: programs that call language models many times."""

__version__ = "0.1.0"
