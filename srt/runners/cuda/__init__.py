"""Runs steps on a CUDA device: the decoder on Triton kernels, captured graphs, memory and transfers."""
