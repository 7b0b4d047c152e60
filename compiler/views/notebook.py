"""A graph as a notebook shows it: the picture, scrolled where it is large, and the listing to unfold."""

from xml.sax.saxutils import escape

from ..graph import Graph
from .drawing import svg
from .listing import text


def html(graph: Graph) -> str:
    return (
        f'<div style="max-height:80vh;overflow:auto">{svg(graph)}</div>'
        f"<details><summary>listing</summary><pre>{escape(text(graph))}</pre></details>"
    )
