"""Runs one model on several ranks (tensor parallelism), each with a process and a device."""
