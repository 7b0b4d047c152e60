"""API speculative execution (section 5 of the SGLang paper) on a server that this project did not write."""
