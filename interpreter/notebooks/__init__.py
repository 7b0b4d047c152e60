"""Programs in the cells of a notebook: interrupts of async cells, and the bar of a batch."""
