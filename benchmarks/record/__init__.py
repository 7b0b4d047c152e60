"""The record of a run: the machine, every figure, the tables and plots that are made of them."""
