"""Typed values while their text is still being written: an incremental reader of JSON, and the parts it gives."""
