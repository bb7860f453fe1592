"""Teaches the vision tower where hand, object and goal are, before the policy is trained on top of it.

A small tower that starts from nothing does not find a ball of six pixels while it learns to act: the policy settles for
what state and instruction say. Two commands, from the repository's root:
python -m recipes.demo_policy.sight record --seconds 240      (innerloop[sim]; simulated frames with known positions)
python -m recipes.demo_policy.sight train --seconds 900       (LeRobot 0.6.1; 45 seconds on a GPU)
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from innerloop.simulation.world import CAMERAS, SIZE, TARGET, TASKS, World

FRAMES = Path(__file__).parent / "data/sight"
TOWER = "tower.safetensors"
FIRST_SEED = 1_000_000
PATCH = 14
SIDE = SIZE // PATCH
POINTS = 3  # hand, object, goal


def pixels(points: np.ndarray, camera: str, fovy: float) -> np.ndarray:
    """Where world points [..., 3] appear in a camera's picture: [..., 2], right and down, pixels."""
    azimuth, elevation, distance = CAMERAS[camera]
    a, e = np.deg2rad((azimuth, elevation))
    forward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
    right = np.array([np.sin(a), -np.cos(a), 0.0])
    seen = points - (np.array(TARGET) - distance * forward)
    scale = SIZE / 2 / np.tan(np.deg2rad(fovy) / 2) / (seen @ forward)
    return np.stack([seen @ right * scale, -(seen @ np.cross(right, forward)) * scale], axis=-1) + SIZE / 2


def record(task: str, seconds: float) -> None:
    """Frames along disturbed expert episodes until the time is over; one file a task."""
    from recipes.demo_policy.record import Disturbance, Expert, picture

    world, start, seed = World(task), time.monotonic(), FIRST_SEED
    pictures: list[bytes] = []
    points: list[np.ndarray] = []
    while time.monotonic() - start < seconds:
        generator = np.random.default_rng(seed)
        world.reset(seed)
        expert, disturb = Expert(world), Disturbance(generator, 1.0)
        for step in range(int(generator.integers(1, 70))):
            if step % 12 == 0:
                pictures.append(picture(world))
                points.append(positions(world))
            world.step(disturb(expert.act()))
        seed += 1
    FRAMES.mkdir(parents=True, exist_ok=True)
    np.savez(
        FRAMES / f"{task}.npz",
        pictures=np.frombuffer(b"".join(pictures), dtype=np.uint8),
        ends=np.cumsum([len(each) for each in pictures]),
        points=np.stack(points).astype(np.float32),
    )
    print(f"{task}: {len(points)} observations of {seed - FIRST_SEED} episodes", flush=True)
    world.close()


def positions(world: World) -> np.ndarray:
    """[cameras, POINTS, 2] pixels of hand, object and goal."""
    values, environment = world.values, world.environment
    real = np.stack([values[:3], values[4:7], environment._target_pos])
    return np.stack([pixels(real, name, environment.model.vis.global_.fovy) for name in CAMERAS])


class Reader(torch.nn.Module):
    """What is trained on the tower and thrown away: which patch a point is in, and where inside it."""

    def __init__(self, tower: Any, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.place = torch.nn.Linear(width, POINTS)
        self.inside = torch.nn.Linear(width, POINTS * 2)

    def loss(self, images: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, 3, SIZE, SIZE] in -1..1, points [B, POINTS, 2] -> loss, and share of points found in their patch."""
        features = self.tower(images).last_hidden_state
        logits = self.place(features).transpose(1, 2)
        cell = (points / PATCH).clamp(0, SIDE - 1e-3)
        column, row = cell.long().unbind(-1)
        there = row * SIDE + column
        offsets = self.inside(features).view(*features.shape[:2], POINTS, 2)
        chosen = offsets.gather(1, there[:, None, :, None].expand(-1, -1, -1, 2))[:, 0]
        loss = F.cross_entropy(logits.flatten(0, 1), there.flatten()) + F.smooth_l1_loss(chosen, cell - cell.long())
        return loss, (logits.argmax(-1) == there).float().mean(0)


def train(seconds: float, batch: int, rate: float, device: str) -> None:
    """Trains the tower and writes it beside its frames."""
    from safetensors.torch import save_file

    from recipes.demo_policy import data, model

    torch.manual_seed(0)
    frames, points = (each.to(device) for each in _load())
    policy = model.build(model.configuration())
    tower = model.tower(policy)
    reader = Reader(tower, model.ARCHITECTURE["vision"]["hidden_size"]).to(device).train()
    optimizer = torch.optim.AdamW(reader.parameters(), lr=rate, weight_decay=0.05, betas=(0.9, 0.95))
    held, start, step = len(frames) // 50, time.monotonic(), 0
    while (elapsed := time.monotonic() - start) < seconds:
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 100) * (1.01 - elapsed / seconds)
        rows = torch.randint(held, len(frames), (batch,), device=device)
        images = data.augmented(frames[rows, None])[:, 0] * 2 - 1
        loss, _ = reader.loss(images, points[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            with torch.no_grad():
                test, found = reader.loss(frames[:held].float() / 127.5 - 1, points[:held])
            shares = ", ".join(f"{share:.0%}" for share in found.tolist())
            print(
                f"{elapsed:.0f} s, step {step}, loss {loss.item():.3f}, held out {test:.3f}; found {shares}", flush=True
            )
    save_file({name: value.contiguous() for name, value in tower.state_dict().items()}, FRAMES / TOWER)


def _load() -> tuple[Tensor, Tensor]:
    """Every frame uint8 [N, 3, SIZE, SIZE] in random order, and its points [N, POINTS, 2]."""
    from recipes.demo_policy.data import unpacked

    frames, points = [], []
    for path in sorted(FRAMES.glob("*.npz")):
        with np.load(path) as file:
            frames += unpacked(file)
            points.append(file["points"].reshape(-1, POINTS, 2))
    together = torch.from_numpy(np.concatenate(frames)), torch.from_numpy(np.concatenate(points))
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(together[0])))
    return together[0][order], together[1][order]


def show(path: Path) -> None:
    """Marks the points of some frames, to look at."""
    frames, points = _load()
    rows = []
    for image, marks in zip(frames[:24].numpy().transpose(0, 2, 3, 1), points[:24].numpy(), strict=True):
        image = image.copy()
        for (x, y), colour in zip(marks.astype(int), ((255, 255, 0), (0, 0, 255), (0, 255, 0)), strict=True):
            image[max(y - 1, 0) : y + 1, max(x - 1, 0) : x + 1] = colour
        rows.append(image)
    grid = np.concatenate([np.concatenate(rows[start : start + 6], axis=1) for start in range(0, 24, 6)])
    Image.fromarray(grid).resize((grid.shape[1] * 2, grid.shape[0] * 2), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Command line: record, train or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "train", "show"))
    parser.add_argument("--seconds", type=float, default=240, help="for all tasks together, or of training")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path("sight.png"))
    options = parser.parse_args()
    if options.what == "train":
        train(options.seconds, options.batch, options.rate, options.device)
    elif options.what == "show":
        show(options.picture)
    else:
        record_all(options.tasks.split(","), options.seconds)


def record_all(tasks: Sequence[str], seconds: float) -> None:
    """Every task for as long."""
    from innerloop.simulation import display

    display.prepare()
    warnings.simplefilter("ignore")  # of Meta-World, about its own experts
    for task in tasks:
        record(task, seconds / len(tasks))


if __name__ == "__main__":
    main()
