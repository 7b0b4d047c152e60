"""Tells why prompts are not found in the cache: lines that change with every request."""
