"""Tiers of the cache: pages of keys and values in host memory, on disk and in a shared store, by name.

The radix tree holds what is on the device, exact to the token. Tiers hold whole pages of 64 tokens. A page's name says
everything its content depends on (names.py), so a tier is a map from names to bytes: it outlives the engine, and other
engines may share it. Pages may vanish, never lie: every fault of a tier is a miss.
"""
