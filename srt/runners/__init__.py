"""Run a model on a batch: torch, native CPU kernels, CUDA graphs."""
