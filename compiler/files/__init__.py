"""Graphs in files: data only, read as strictly as a file from anywhere has to be."""
