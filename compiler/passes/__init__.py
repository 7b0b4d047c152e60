"""Rewrites of graphs, each with the law that it keeps."""
