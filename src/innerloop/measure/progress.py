"""How far a load has come: a bar on a terminal, elsewhere a line at every report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from innerloop.engine import LoadedPolicy

Report = Callable[[str, int, int], None]


@contextmanager
def progress(title: str, out: Console) -> Iterator[Report]:
    """Yields the function (what, done, total bytes) that `engine.load` reports to, every two seconds."""
    if not out.is_terminal:
        yield lambda what, done, total: out.print(
            f"{title}: {what} {done / 1e9:.1f} of {total / 1e9:.1f} GB", highlight=False, markup=False, soft_wrap=True
        )
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda _what, done, total: bar.update(task, completed=done, total=total)


def loading(name: str, out: Console, load: Callable[[Report], LoadedPolicy]) -> LoadedPolicy:
    """What `load` returns, with its progress, and then what there is to say of the policy, on `out`."""
    with progress(f"loading {name}", out) as report:
        policy = load(report)
    for note in (*policy.notes, *policy.processor.describe().get("notes", ())):
        out.print(note, highlight=False, markup=False, soft_wrap=True)
    return policy
