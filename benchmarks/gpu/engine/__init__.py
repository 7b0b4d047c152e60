"""Whole steps and the engine on a GPU, with random weights in the shapes of real models."""
