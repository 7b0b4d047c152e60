"""Native CPU kernels: C++ with a plain C ABI, compiled once with the system's compiler and called through ctypes."""
