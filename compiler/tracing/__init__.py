"""From a function to its graph: it runs once, with symbols for what is not known."""
