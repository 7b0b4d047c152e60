"""Lints prompts: finds text that prevents prefix sharing, and suggests what to write instead."""
