"""What a container's memory limit leaves, where Linux has set one (control groups, versions 1 and 2)."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
# Version: limit, usage, and the file pages in the usage that are given back when memory is asked for
# (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def left(root: Path = ROOT) -> int | None:
    """Bytes that this process may still take: the least of its group and all groups above; None without a limit."""
    found = [bytes_ for version, folder in _groups(root) if (bytes_ := _left_in(folder, version)) is not None]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's group and of those above it; in a container, its own root among them."""
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version, base = (2, root / "sys/fs/cgroup") if number == "0" else (1, root / "sys/fs/cgroup/memory")
        inside = PurePosixPath(path.lstrip("/"))
        yield from ((version, base / above) for above in (inside, *inside.parents))


def _left_in(folder: Path, version: int) -> int | None:
    limit, usage, reclaimable = FILES[version]
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such group here, or none that counts memory
    if not most.isdecimal():
        return None  # "max"
    return max(int(most) - used + int(pages.get(reclaimable, 0)), 0)
