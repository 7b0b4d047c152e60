"""Kernels for CUDA devices, written in Triton; each has a twin in plain torch, and runs in the interpreter."""
