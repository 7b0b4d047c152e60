"""Turns text into tokens and tokens into text."""
