"""Checks that graphs are valid: operations, inputs, streams, names."""
