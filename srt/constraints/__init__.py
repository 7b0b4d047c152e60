"""Compiles regular expressions and schemas in a process of its own, and matches tokens against them."""
