"""Runs graphs: on the streams of the interpreter, or in a runtime."""
