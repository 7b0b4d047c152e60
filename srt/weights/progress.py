"""What a person sees while a model is converted: a bar on a terminal, one line elsewhere. Always on stderr."""

import contextlib
import sys
from collections.abc import Iterator

from .convert import Progress


@contextlib.contextmanager
def conversion_progress(name: str) -> Iterator[Progress]:
    """A progress callback that shows itself; the display ends with the block."""
    if not sys.stderr.isatty():
        print(f"umbel: converting {name} into the cache folder; this happens once", file=sys.stderr, flush=True)
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display

    columns = (TextColumn("converting {task.fields[model]}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Display(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as display:
        task = display.add_task("convert", total=1.0, model=name)
        yield lambda what, share: display.update(task, completed=share)
