"""`python -m bench.every [--out FOLDER] [--against lerobot] [--seconds N]`: every missing record, on all GPUs at once.

A process a GPU, each with its share of the processor's cores, takes the next job of a list, the most wanted first.
A job whose records exist is over at once. Its output goes to FOLDER/logs. After N seconds no job starts, and those that
still run are stopped; what they had written stays.
"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

LAST = ("starvla-gr00t", "starvla-oft", "starvla-pi", "starvla-gr00t-large", "starvla-fast")
LEAST = 20.0  # seconds that a job needs to come to anything


@dataclass(frozen=True)
class Job:
    """A command and what its log is called."""

    name: str
    command: list[str]


def jobs(out: Path, against: Sequence[str]) -> list[Job]:
    """The most wanted first; the many sizes of one family last."""
    official = ["--against", *against] if against else []

    def sweep(family: str, only: str) -> Job:
        beside = official if family in ("pi05", "pi0", "groot") and "x480" not in only else []
        words = ["-m", "bench.policies", family, "--out", str(out), *(["--only", only] if only else []), *beside]
        return Job(f"{family} {only}".strip(), [sys.executable, *words])

    def runtime(family: str) -> Job:
        words = ["-m", "bench.runtime", family, "--json", str(out)]
        return Job(f"runtime {family}", [sys.executable, *words])

    listed = [sweep("pi05", "pi05.json"), runtime("pi05"), sweep("groot", ""), sweep("starvla-pi3", "")]
    listed += [Job("operators", [sys.executable, "-m", "bench.operators", "--json", str(out / "operators.json")])]
    listed += [sweep("pi0", "pi0.json"), runtime("pi0"), sweep("pi05", "640x480")]
    listed += [sweep("pi05", f"{views}cam-{tokens}tok") for tokens in (48, 200) for views in (3, 1, 2)]
    listed += [sweep("pi0", f"{views}cam") for views in (3, 1, 2)]
    return [*listed, *(sweep(family, "") for family in LAST)]


def work(gpu: int, gpus: int, waiting: SimpleQueue[Job], logs: Path, until: float, failed: list[str]) -> None:
    """Jobs one after another on one GPU, until there are none or the time is over."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[gpu * len(cores) // gpus : (gpu + 1) * len(cores) // gpus] or cores
    os.sched_setaffinity(0, mine)  # of this thread, and so of the processes it starts
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = visible.split(",")[gpu] if visible else str(gpu)
    while until - time.monotonic() > LEAST:
        try:
            job = waiting.get_nowait()
        except Empty:
            return
        print(f"GPU {gpu}: {job.name}: {shlex.join(job.command[1:])}", flush=True)
        begun = time.monotonic()
        with (logs / f"{job.name.replace(' ', '-')}.log").open("w") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": name, "PYTHONUNBUFFERED": "1"}
            with subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
                ended = _wait(process, until)
        print(f"GPU {gpu}: {job.name} {ended} after {time.monotonic() - begun:.0f} s", flush=True)
        if ended != "done":
            failed.append(job.name)


def _wait(process: subprocess.Popen[bytes], until: float) -> str:
    try:
        return "failed" if process.wait(timeout=max(until - time.monotonic(), 1.0)) else "done"
    except subprocess.TimeoutExpired:
        process.kill()
        return "stopped"


def main() -> None:
    """Every job; exit status 1 where one failed or was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/records"))
    parser.add_argument("--against", nargs="*", default=[], help="other implementations")
    parser.add_argument("--seconds", type=float, default=24 * 3600.0)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        raise SystemExit("torch sees no GPU: run innerloop doctor")
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs(options.out, options.against):
        waiting.put(job)
    failed: list[str] = []
    arguments = (gpus, waiting, logs, time.monotonic() + options.seconds, failed)
    workers = [threading.Thread(target=work, args=(gpu, *arguments)) for gpu in range(gpus)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise SystemExit(f"not finished: {', '.join(failed)}; their output is in {logs}")


if __name__ == "__main__":
    main()
