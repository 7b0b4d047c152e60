"""Writes values as small pieces of HTML, which notebooks show at the end of a cell.

    ▸ state of judge: 5 calls, 812 prompt tokens (640 cached), 96 generated
      related   no

All text is escaped: it may come from models. Colours are transparent, so they fit light and dark notebooks.
"""

import html
from collections.abc import Iterable, Sequence

# Origin of a text → its background. `interpreter/view/page.html` has the same colours, opaque.
COLOURS = {
    "argument": "rgba(224,138,42,.25)",
    "value": "rgba(185,150,8,.25)",
    "template": "rgba(138,143,153,.25)",
    "generated": "rgba(47,102,208,.25)",
    "guessed": "rgba(111,83,198,.28)",
    "forced": "rgba(47,157,189,.28)",
    "chosen": "rgba(21,138,102,.28)",
    "shipped": "rgba(168,69,47,.22)",
}
_OF_MODELS = ("generated", "guessed", "forced", "chosen", "shipped")
_MOST_TEXT = 4000  # characters of one value
_MOST_PROGRAM_TEXT = 240  # characters of one text of the program between others
# NUL, and signs that turn the direction of a text; the page of a run has the latter.
_SIGNS = {
    code: f"\\u{code:04x}" for code in (0, 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def escaped(text: str) -> str:
    """Escapes text for HTML, also inside attributes. Halves of characters and signs that turn its direction are
    spelled out; a long text has its beginning and its end."""
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT * 2 // 3]} […] {text[-_MOST_TEXT // 3 :]}"
    return html.escape(text.encode("utf-8", "backslashreplace").decode().translate(_SIGNS))


def folded(title: str, body: str, *, is_open: bool = False) -> str:
    """Returns a block that opens and closes. `body` is HTML, `title` is text."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escaped(title)}</summary>{body}</details>"


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Returns a table of HTML cells, aligned to the left."""
    cell = "text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:break-word"
    top = "".join(f'<th style="{cell}">{escaped(name)}</th>' for name in head)
    lines = ("".join(f'<td style="{cell}">{text}</td>' for text in row) for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def coloured(texts: Iterable[tuple[str, str]]) -> str:
    """Returns texts with the colours of their origins, each given as (origin, text), and a legend of the colours.

    A long text of the program has its beginning and its end, so that what a model said can be seen without scrolling.
    """
    pieces, origins = [], dict[str, None]()
    for origin, text in texts:
        if origin not in _OF_MODELS and len(text) > _MOST_PROGRAM_TEXT:
            end = _MOST_PROGRAM_TEXT // 2
            text = f"{text[:end]} [… {len(text) - 2 * end:,} characters …] {text[-end:]}"
        if origin in COLOURS:
            origins[origin] = None
            pieces.append(_marked(origin, text))
        else:
            pieces.append(escaped(text))
    body = "".join(pieces)
    legend = " ".join(_marked(origin, origin) for origin in COLOURS if origin in origins)
    return (
        f'<pre style="white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;max-height:28em;overflow:auto">'
        f"{body}</pre>"
        f"{f'<small>{legend}</small>' if legend else ''}"
    )


def _marked(origin: str, text: str) -> str:
    return f'<span title="{escaped(origin)}" style="background:{COLOURS[origin]}">{escaped(text)}</span>'


def preformatted(text: str) -> str:
    """Returns text as it is laid out."""
    return f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{escaped(text)}</pre>'
