"""`sglang.lang.backend`: backends, under SGLang's names and parameters."""
