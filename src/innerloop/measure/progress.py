"""How far a load has come, on a terminal; nothing where there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(title: str, out: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar of bytes; yields the function (what, done, total) that `engine.load` reports to."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda _what, done, total: bar.update(task, completed=done, total=total)
