"""The radix tree of cached prefixes, the allocator of its slots, and the tensors that hold keys and values."""
