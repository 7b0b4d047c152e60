"""What is timed on a GPU, kernel by kernel, at which sizes; and the comparisons with references."""
