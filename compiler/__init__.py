"""Programs as graphs: traced, looked at, rewritten, saved, and run without their Python."""
