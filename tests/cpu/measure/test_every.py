"""python -m bench.every: jobs over GPUs, one that fails, one that takes too long."""

import os
import sys
from pathlib import Path

import pytest
import torch

from bench import every
from bench.every import Job


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    says = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], len(os.sched_getaffinity(0)))"
    listed = [
        Job("fine", [sys.executable, "-c", says]),
        Job("bad", [sys.executable, "-c", "raise SystemExit(3)"]),
        Job("long", [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]),
        Job("never", [sys.executable, "-c", "print('too late')"]),
    ]
    monkeypatch.setattr(every, "jobs", lambda out, against: listed)
    monkeypatch.setattr(every, "LEAST", 1.0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(sys, "argv", ["every", "--out", str(tmp_path), "--seconds", "4"])
    return tmp_path


def test_a_failed_job_and_one_that_is_stopped_are_named(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="not finished: bad, long; their output is in"):
        every.main()
    said = capsys.readouterr().out
    assert [word in said for word in ("fine done", "bad failed", "long stopped", "never")] == [True, True, True, False]
    assert (asked / "logs/fine.log").read_text().split() == ["3", str(len(os.sched_getaffinity(0)))]
    assert (asked / "logs/long.log").read_text() == "begun\n"


def test_the_list_names_real_families_and_puts_what_is_most_wanted_first(tmp_path: Path) -> None:
    listed = every.jobs(tmp_path, ["lerobot"])
    assert [job.name for job in listed[:2]] == ["pi05 pi05.json", "runtime pi05"]
    assert len({job.name for job in listed}) == len(listed)
    beside = {job.name for job in listed if "lerobot" in job.command}
    assert {"pi05 pi05.json", "groot", "pi0 pi0.json"} <= beside
    assert not any("starvla" in name or "x480" in name for name in beside)
