"""Caches prefixes: the radix tree, the allocator of its slots, and the tensors that hold keys and values."""
