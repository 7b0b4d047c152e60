"""The record of a run, and the page that shows it."""
