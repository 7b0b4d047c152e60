"""Kernels and engine on a GPU: whether they are right, and how near to the limits of the hardware.

`make gpu` measures; what the compiler makes of the kernels (`ptx.py`) and the dry run need no GPU.
"""
