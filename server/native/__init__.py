"""Serves umbel's own routes, which are SGLang's too."""
