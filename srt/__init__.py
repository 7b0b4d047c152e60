"""The runtime: a gateway process (sockets, tokenizer, admission) and an engine process (scheduler, model, kernels)."""
