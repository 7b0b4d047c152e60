"""OpenAI, Azure, and servers of the OpenAI dialect."""
