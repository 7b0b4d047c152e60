"""Shared by all folders of the runtime: messages, batches, the model protocol, configuration, counters, clocks."""
