"""Backends, which run requests: the local runtime, hosted APIs, and Echo, the scripted fake."""
