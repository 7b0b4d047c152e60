"""Guarantees of texts, on backends that enforce them and on those that do not."""
