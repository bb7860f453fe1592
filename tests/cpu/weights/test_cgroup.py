"""What a container's memory limit leaves, over made-up trees of /proc and /sys."""

from pathlib import Path

import pytest
import torch

from innerloop.weights import cgroup, memory

GB = 1 << 30


def _group(folder: Path, limit: str, used: int, reclaimable: int = 0, version: int = 2) -> None:
    names = cgroup.FILES[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {reclaimable}\n")


def _member(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{line}\n")


def test_a_containers_own_root(tmp_path: Path) -> None:
    _member(tmp_path, "0::/")
    _group(tmp_path / "sys/fs/cgroup", str(8 * GB), 5 * GB, reclaimable=2 * GB)
    assert cgroup.left(tmp_path) == 5 * GB


def test_the_least_of_all_groups_above(tmp_path: Path) -> None:
    _member(tmp_path, "0::/robots/arm")
    _group(tmp_path / "sys/fs/cgroup/robots/arm", "max", 3 * GB)
    _group(tmp_path / "sys/fs/cgroup/robots", str(6 * GB), 4 * GB)
    assert cgroup.left(tmp_path) == 2 * GB
    _group(tmp_path / "sys/fs/cgroup/robots/arm", str(4 * GB), 3 * GB)
    assert cgroup.left(tmp_path) == GB


def test_version_1(tmp_path: Path) -> None:
    _member(tmp_path, "12:cpu,cpuacct:/x\n4:memory:/docker/abc")
    _group(tmp_path / "sys/fs/cgroup/memory/docker/abc", str(2 * GB), GB, version=1)
    assert cgroup.left(tmp_path) == GB


@pytest.mark.parametrize("line", ["0::/", "4:memory:/", "3:cpu:/x"])
def test_no_limit(tmp_path: Path, line: str) -> None:
    _member(tmp_path, line)
    assert cgroup.left(tmp_path) is None
    _group(tmp_path / "sys/fs/cgroup", "max", 5 * GB)
    assert cgroup.left(tmp_path) is None
    assert cgroup.left(tmp_path / "no linux") is None


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    _member(tmp_path, "0::/")
    _group(tmp_path / "sys/fs/cgroup", str(GB), 2 * GB)
    assert cgroup.left(tmp_path) == 0


def test_free_memory_is_the_lesser_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, limit, free in ((3, 2, 2), (2, 3, 2), (None, 3, 3), (2, None, 2), (None, None, None)):
        monkeypatch.setattr(memory, "_available", lambda a=available: a)
        monkeypatch.setattr(cgroup, "left", lambda c=limit: c)
        assert memory.free_memory(torch.device("cpu")) == free
