"""The curve of success against delay from records of `innerloop eval`, as a picture for the documents.

python -m recipes.demo_policy.curve docs/success.svg bench/records/success-*.json
"""

import argparse
from pathlib import Path

from innerloop.measure import page, plots, record
from innerloop.measure.record import SuccessRecord


def main() -> None:
    """Command line of the recipe. All records must be of the same episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    arguments = parser.parse_args()
    found = [one for one in map(record.load, arguments.records) if isinstance(one, SuccessRecord)]
    if len({one.inputs for one in found}) != 1:
        raise SystemExit("give records of innerloop eval over one set of tasks and seeds")
    arguments.picture.write_text(page.alone(plots.success(found)))
    print(f"{len(found)} records: {arguments.picture}")


if __name__ == "__main__":
    main()
