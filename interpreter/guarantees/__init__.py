"""Enforces and validates constraints of texts, also on backends that enforce none."""
