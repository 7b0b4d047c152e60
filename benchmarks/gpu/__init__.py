"""Kernels for GPUs: what the compiler makes of them, which needs no GPU to be looked at."""
