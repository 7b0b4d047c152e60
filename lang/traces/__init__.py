"""The calls of runs as plain data, which the interpreter reads from files and the simulator plays."""
