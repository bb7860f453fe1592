"""`python -m bench.policies FAMILY [--out FOLDER] [--only TEXT] [--against lerobot]`: the records of docs/performance.md.

Random weights at the published size; every camera count, prompt length and chunk that users run, and for the usual one
(2 cameras, 48 tokens, chunk of 10) also the ladder, the batch curve and the control-time roofline. A record that is
already there is not measured again, unless `--against` names what is not beside it; of a case that lacks a curve that
curve alone is kept. A case that fails is printed, the next ones go on, and the exit status is 1.
"""

import argparse
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from innerloop.contract import InnerloopError
from innerloop.measure.command import bench_command
from innerloop.measure.options import BenchOptions
from innerloop.policies import FAMILIES

PROMPTS = (48, 200)
BATCHES = (1, 2, 4, 8, 16, 32)


# What the families without a free choice of chunk and prompt are measured with: as published. CAMERAS:
# how many else there may be, and the tokens of a prompt that holds their pictures.
STARVLA = {"views": 1, "chunk": 16, "steps": 4, "prompt_tokens": 182}
OTHERS: dict[str, dict[str, Any]] = {
    "groot": {"views": 2, "chunk": 40, "steps": 4, "prompt_tokens": 160},
    **{name: STARVLA for name in FAMILIES if name.startswith("starvla-")},
}
CAMERAS = {"groot": {1: 160, 3: 202}, "starvla": {2: 233, 3: 284}}
TOKEN_BY_TOKEN = "starvla-fast"  # its answer: a rung without graphs takes minutes


def cases(family: str, against: tuple[str, ...], ticks: int) -> Iterator[tuple[str, BenchOptions]]:
    """File name and options of every record, the usual case first."""
    usual = BenchOptions(family, random_weights=True, chunk=10, ticks=ticks, against=against)
    if family in OTHERS:
        usual = replace(usual, **OTHERS[family])
        curves = {} if family == TOKEN_BY_TOKEN else {"ladder": True, "batch": BATCHES}
        yield f"{family}.json", replace(usual, **curves, control=True, profile=True)
        for views, tokens in CAMERAS[family.partition("-")[0]].items():
            yield f"{family}-{views}cam.json", replace(usual, views=views, prompt_tokens=tokens)
        return
    longest = FAMILIES[family].default(2, 10, 10).prompt_capacity
    yield f"{family}.json", replace(usual, ladder=True, batch=BATCHES, control=True, profile=True)
    for tokens in (tokens for tokens in PROMPTS if tokens <= longest):
        for views in (1, 2, 3):
            for chunk in (10, 50):
                case = replace(usual, views=views, prompt_tokens=tokens, chunk=chunk)
                if case != usual:
                    yield f"{family}-{views}cam-{tokens}tok-chunk{chunk}.json", case
    yield f"{family}-640x480.json", replace(usual, frames="640x480", against=())
    yield f"{family}-640x480-jpeg.json", replace(usual, frames="640x480", encoding="jpeg", against=())


def written(place: Path, case: BenchOptions) -> list[Path]:
    """The records of a case: the whole call's, and those named after their kind."""
    asked = {"ladder": case.ladder, "batch": case.batch, "control": case.control, "kernels": case.profile}
    return [place, *(place.with_name(f"{place.stem}-{kind}.json") for kind, wanted in asked.items() if wanted)]


def lacking(place: Path, case: BenchOptions) -> list[Path]:
    """The records of a case that are not there, and the whole call's where another implementation is not beside it."""
    missing = [path for path in written(place, case) if not path.exists()]
    if place.exists() and not set(case.against) <= set(json.loads(place.read_text()).get("against", ())):
        missing.insert(0, place)
    return missing


def least(place: Path, case: BenchOptions, missing: list[Path]) -> BenchOptions:
    """As much of a case as gives the missing records; what is made of the whole call's figures comes with it."""

    def wanted(kind: str) -> bool:
        return place.with_name(f"{place.stem}-{kind}.json") in missing

    whole, ladder = place in missing, case.ladder and wanted("ladder")
    return replace(
        case,
        ladder=ladder,
        batch=case.batch if wanted("batch") else (),
        control=case.control and (whole or wanted("control")),
        profile=case.profile and (whole or wanted("kernels")),
        against=case.against if whole or ladder else (),
    )


def measure(
    family: str, folder: Path, out: Console, only: str = "", against: tuple[str, ...] = (), ticks: int = 1000
) -> list[str]:
    """Measure what is missing in `folder` and return the names of the cases that failed."""
    failed = []
    for name, case in cases(family, against, ticks):
        place = folder / name
        missing = lacking(place, case) if only in name else []
        if not missing:
            continue
        try:
            _fill(place, least(place, case, missing), missing, out)
        except InnerloopError as error:
            out.print(f"{name} failed: {error}", style="red", highlight=False, markup=False)
            failed.append(name)
    return failed


def _fill(place: Path, case: BenchOptions, missing: list[Path], out: Console) -> None:
    """A whole call that is there already is measured again, as the curves need it, and not kept."""
    if place in missing:
        bench_command(case, out, place)
        return
    with TemporaryDirectory() as folder:
        bench_command(case, out, Path(folder) / place.name)
        for path in missing:
            shutil.move(Path(folder) / path.name, path)


def main() -> None:
    """Measure what is missing; exit status 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path("bench/records"))
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--against", nargs="*", default=[], help="other implementations")
    parser.add_argument("--ticks", type=int, default=1000)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("innerloop.measure").setLevel(logging.INFO)
    out = Console()
    failed = measure(options.family, options.out, out, options.only, tuple(options.against), options.ticks)
    if failed:
        out.print(f"failed: {', '.join(failed)}", style="red", highlight=False)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
