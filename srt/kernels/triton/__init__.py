"""Kernels for CUDA devices, written in Triton; each has a reference in plain torch, and runs in the interpreter."""
