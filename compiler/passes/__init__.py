"""Rewrites of graphs, each with the law that it keeps."""

from .pipeline import optimise, rewrite
from .report import PassReport, Report, Rewritten

__all__ = ["PassReport", "Report", "Rewritten", "optimise", "rewrite"]
