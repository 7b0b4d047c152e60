"""Compute kernels, one folder per kind of device, each kernel beside a plain torch twin that tests compare it with."""
