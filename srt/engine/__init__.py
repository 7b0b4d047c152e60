"""The engine process: receives messages, steps the scheduler, sends results."""
