"""Serves the live page: a picture of the runtime, and forms for prompts and programs."""
