"""Evaluates programs over data: metrics, reports with intervals, paired comparisons, calibration, `umbel eval`."""
