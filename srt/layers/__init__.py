"""Building blocks of models: linear layers, norms, rotary positions, and the tensors of a checkpoint."""
