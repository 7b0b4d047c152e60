"""Decoders: our own for the common families, transformers' for the rest, one protocol for both."""
