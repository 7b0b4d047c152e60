"""From a graph to its variables: on the streams of the interpreter, or in a runtime."""
