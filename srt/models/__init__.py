"""Decoders: umbel's own for the common families, transformers' for the rest, with one protocol for both."""
