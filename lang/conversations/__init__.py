"""Whole conversations as prompts: what a chat API is given, written by the model's chat template."""
