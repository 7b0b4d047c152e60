"""Data of batches: rows of files and frames in, results in files and frames out, and the numbers of a running batch."""
