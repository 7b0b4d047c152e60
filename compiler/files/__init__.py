"""Writes graphs to files and reads them: data only, read as strictly as a file from anywhere has to be."""
