"""Compute kernels, one folder per kind of device, each with a plain torch reference that tests compare it with."""
