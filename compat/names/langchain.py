"""LangChain on umbel: `from umbel.langchain import ChatUmbel`."""

from umbel.compat.langchain import ChatUmbel as ChatUmbel

__all__ = ["ChatUmbel"]
