"""Tensor parallelism: one model on several ranks, a process and a device each."""
