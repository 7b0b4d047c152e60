"""Tells why a prompt was not found in the cache: comparison with an earlier request, and lines that always change."""
