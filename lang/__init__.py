"""What a program can say. No I/O, no torch: imports in a few milliseconds."""
