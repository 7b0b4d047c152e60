"""Compute kernels, one folder per kind of device; tests compare each with its reference in plain torch."""
