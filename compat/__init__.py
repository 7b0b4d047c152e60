"""Frames in which programs of other languages run: `umbel.compat.sglang`."""
