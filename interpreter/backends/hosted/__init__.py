"""Hosted models as backends: OpenAI-compatible servers and Anthropic, through the providers' own clients."""
