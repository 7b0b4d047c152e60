"""What every other room of the runtime uses: messages, batches, the model protocol, configuration, counters, clocks."""
