"""`innerloop parity`: both sides on one made-up observation, stage by stage."""

from pathlib import Path

from innerloop.contract import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.measure.observations import Scene, make_observations
from innerloop.measure.parity import ParityReport, compare

FRAME = (480, 640)  # height and width of the made-up camera frames
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def check(name: str) -> None:
    """Raises InnerloopError unless the official implementation of this name is there to be compared with."""
    if name != "lerobot":
        raise InnerloopError(f"no official implementation '{name}' to compare with; there is lerobot")
    from innerloop.measure.against.lerobot import require

    require("lerobot")


def against_lerobot(
    checkpoint: Path, policy: LoadedPolicy, prompt: str, seed: int, tokenizer: Path | None = None
) -> ParityReport:
    """Compare a loaded policy with LeRobot's of the same directory; tokenizer: where the directory has none."""
    from innerloop.measure.against.opening import open_official

    placement = policy.placement
    device, dtype = str(placement.device), DTYPES[placement.precision]
    official = open_official(checkpoint, device, dtype, policy.statistics or None, tokenizer)
    scene = Scene(policy.cameras, FRAME, policy.processor.widths.state)
    observation = make_observations(scene, prompt, 1, seed)[0]
    return compare(policy, official, observation, policy.processor.noise(seed=seed))
