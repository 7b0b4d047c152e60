"""The kernels as launches compile them, for `ptx.py`."""
