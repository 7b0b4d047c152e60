"""Servers that are reached by their address: SGLang's own API, and any server of the OpenAI dialect."""
