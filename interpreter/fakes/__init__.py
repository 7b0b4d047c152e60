"""Providers that run on loopback, for tests: real HTTP, scripted answers, counted calls, faults on demand."""
