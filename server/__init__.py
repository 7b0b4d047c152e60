"""Serves models and programs over HTTP: `umbel serve`.

The server is a user's process like any other: an ASGI application on uvicorn, and one `umbel.Runtime` under it.
"""
