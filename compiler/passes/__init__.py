"""Rewrites graphs by passes, each with the law that it keeps."""

from .pipeline import PassReport, Report, Rewritten, rewrite

__all__ = ["PassReport", "Report", "Rewritten", "rewrite"]
