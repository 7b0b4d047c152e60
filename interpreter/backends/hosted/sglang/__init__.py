"""Connects to a server by its address: SGLang's own API, or the OpenAI dialect."""
