"""DSPy on umbel: `from umbel.dspy import LM, JSONAdapter`."""

from umbel.compat.dspy import LM as LM
from umbel.compat.dspy import JSONAdapter as JSONAdapter

__all__ = ["LM", "JSONAdapter"]
