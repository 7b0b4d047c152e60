"""Runs a model on a batch: in torch, on native CPU kernels, or with CUDA graphs."""
