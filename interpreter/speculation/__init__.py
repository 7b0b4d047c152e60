"""Speculative execution against hosted models (section 5 of the SGLang paper)."""
