"""Decides which waiting request comes first."""
