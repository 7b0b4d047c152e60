"""Plans a step, reads its results, and commits them: requests, the KV manager, constrained rows, choices."""
