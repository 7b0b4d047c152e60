"""Chooses tokens from logits: penalties, temperature, top-k, top-p, Gumbel noise, log-probabilities."""
