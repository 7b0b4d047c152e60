"""Worker processes that can be killed: parent side, child side, and the pipe that ends them with the parent."""
