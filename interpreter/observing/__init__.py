"""Spans of OpenTelemetry for runs, branches and calls, while `umbel.observe` says so."""
