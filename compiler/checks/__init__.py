"""Whether a graph is whole."""
