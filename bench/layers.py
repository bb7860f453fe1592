"""`python -m bench.layers [TOWER ...] [--launches] [--only TEXT]`: microseconds a layer of every tower, in one graph.

Layers of published sizes with random weights, more of them than the L2 holds, as the plans run them. --launches: also
with every other launch of one op at a time, and with all that won together: tables of launches are ordered by this, since
products that are level alone are not in a layer. The graphs of all variants are replayed in turn and have their median.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from bench import harness
from bench.operators import short
from innerloop.blocks import qwen3, qwen3_published
from innerloop.blocks.dit import DiT, DiTSizes
from innerloop.blocks.qwen3 import Qwen3Sizes, Reading
from innerloop.blocks.qwen3_vision import Qwen3VisionLayer
from innerloop.blocks.siglip import EPS, Shares, SiglipLayer, encoded
from innerloop.blocks.sizes import SO400M, VisionSizes
from innerloop.blocks.stack import Stack
from innerloop.kernels import launch, norm, skinny
from innerloop.kernels.launch import Key, Launch

LAYERS = 12  # of towers that are deeper: 300 MB of weights at the least
TURNS = 30
GAIN = 0.003  # less is noise


@dataclass(frozen=True)
class Tower:
    """What is timed: `layers` layers, run once by `run`."""

    layers: int
    run: Callable[[], torch.Tensor]


Builder = Callable[[torch.device], Tower]
Module = TypeVar("Module", bound=nn.Module)


def head(sizes: DiTSizes, tokens: int, keys: int, packed: bool, device: torch.device) -> Tower:
    """A diffusion transformer's blocks over `tokens` rows and `keys` keys of memory, the last tenth of them padding."""
    made = _filled(DiT(sizes, tokens), device)
    if packed:
        made.pack()
    memory, valid = _random(device, *sizes.memory_shape(1, keys)), _valid(keys, device)
    x, table = _random(device, 1, tokens, sizes.width), made.tables(torch.zeros(1, device=device))[0]

    def run() -> torch.Tensor:
        with skinny.chain():
            return made.forward(x, table, memory, valid)

    return Tower(sizes.depth, run)


def decoder(sizes: Qwen3Sizes, rows: int, device: torch.device) -> Tower:
    """Qwen3's layers over a prompt of `rows` tokens."""
    made = _filled(qwen3.Qwen3(replace(sizes, vocab_size=8)), device)
    positions = torch.arange(rows, dtype=torch.int32, device=device).expand(1, 3, rows)
    reading = Reading(*qwen3.rotary(positions, sizes), _valid(rows, device))
    return Tower(sizes.depth, partial(made, _random(device, 1, rows, sizes.width), reading))


def encoder(sizes: VisionSizes, images: int, patches: int, kind: str, device: torch.device) -> Tower:
    """A vision tower's layers; kind: siglip, qwen3 (rotary positions, padding) or refiner (padding)."""
    layer = Qwen3VisionLayer if kind == "qwen3" else SiglipLayer
    made = _filled(Stack([layer(sizes) for _ in range(sizes.layers)]), device)
    x, first = _random(device, images, patches, sizes.hidden_size), made[0]
    valid = _valid(patches, device).expand(images, -1).contiguous()
    angles = torch.rand(images, patches, sizes.hidden_size // sizes.heads // 2, device=device)
    cos, sin = angles.cos(), angles.sin()

    def attend(layer: SiglipLayer, y: torch.Tensor) -> Shares:
        if isinstance(layer, Qwen3VisionLayer):
            return layer.attend_rotated(y, cos, sin, valid)
        return layer.attend(y, valid if kind == "refiner" else None)

    def run() -> torch.Tensor:
        normed = norm.layer_norm(x, first.norm1_weight, first.norm1_bias, EPS)
        return encoded(made, x, normed, EPS, attend)[0]

    return Tower(sizes.layers, run)


def towers() -> dict[str, Builder]:
    """Every tower at the sizes that the published policies have, by name: policy, part, rows."""
    small, large = (qwen3_published.published(f"Qwen3-VL-{n}B") for n in (2, 4))
    vit: VisionSizes = replace(large.vision, layers=LAYERS)
    so400m = VisionSizes(**{**SO400M, "layers": LAYERS}, image_size=224)
    pi3 = DiTSizes(16, 64, LAYERS, 1024, interleave=False)
    return {
        "groot head 41": partial(head, DiTSizes(32, 48, 16, 2048, interleave=True), 41, 176, False),
        "groot context 169": partial(decoder, replace(small.language, depth=LAYERS), 169),
        "groot refiner 169": partial(encoder, VisionSizes(2048, 8192, 4, 32, 1, 1), 1, 169, "refiner"),
        "groot vision 2x256": partial(encoder, vit, 2, 256, "qwen3"),
        "starvla-pi3 head 16": partial(head, pi3, 16, 320, True),
        "starvla-pi3 context 192": partial(decoder, replace(large.language, depth=LAYERS), 192),
        "starvla-pi3 vision 196": partial(encoder, vit, 1, 196, "qwen3"),
        "starvla-gr00t head 49": partial(head, DiTSizes(12, 64, 16, 2560, interleave=True), 49, 320, False),
        "pi05 vision 2x256": partial(encoder, so400m, 2, 256, "siglip"),
    }


def variants(tower: Tower, device: torch.device, only: str = "") -> dict[str, dict[Key, Launch]]:
    """Other launches of the ops that a tower runs and whose name holds `only`, one op at a time, by a name for each."""
    return {
        f"{key[0]} {'x'.join(map(str, key[1]))}: {short(other)}": {key: other}
        for key, choices in harness.launches_of(tower.run, device).items()
        for other in (choices[1:] if only in key[0] else ())
    }


def in_turn(tower: Tower, choices: Mapping[str, Mapping[Key, Launch]], turns: int = TURNS) -> dict[str, float]:
    """Microseconds a layer with each of the choices."""
    replays = {name: _captured(tower.run, forced) for name, forced in choices.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(turns):
        for name, replay in replays.items():
            times[name].append(harness.elapsed(replay) / tower.layers)
    return {name: statistics.median(found) for name, found in times.items()}


def together(choices: Mapping[str, Mapping[Key, Launch]], times: Mapping[str, float]) -> dict[Key, Launch]:
    """The best launch of each op that wins alone."""
    best: dict[Key, Launch] = {}
    least: dict[Key, float] = {}
    for name, forced in choices.items():
        for key, other in forced.items():
            if times[name] < min(least.get(key, math.inf), times["tables"] * (1.0 - GAIN)):
                best[key], least[key] = other, times[name]
    return best


def measure(name: str, builder: Builder, device: torch.device, launches: bool, only: str = "") -> dict[str, float]:
    """Prints and returns a tower's microseconds a layer: by the tables, and by every variant where they are asked for."""
    tower = builder(device)
    choices: dict[str, dict[Key, Launch]] = {"tables": {}, **(variants(tower, device, only) if launches else {})}
    times = in_turn(tower, choices)
    best = together(choices, times)
    if best:
        times |= in_turn(tower, {"tables": {}, f"{len(best)} that won, together": best})
    print(f"{name:<26}{times['tables']:8.2f} us a layer", flush=True)
    for other, us in sorted(times.items(), key=lambda entry: entry[1]):
        if other != "tables":
            print(f"    {us - times['tables']:+8.2f}  {other}", flush=True)
    return times


def _captured(run: Callable[[], torch.Tensor], forced: Mapping[Key, Launch]) -> Callable[[], None]:
    with launch.forced(forced):
        return harness.captured(run)


def _filled(made: Module, device: torch.device) -> Module:
    for name, parameter in made.requires_grad_(False).named_parameters():
        shape, wide = parameter.shape, name.startswith(("modulation_", "time_"))
        deviation = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        parameter.data = (torch.randn(shape, device=device) * deviation).to(torch.float32 if wide else torch.bfloat16)
    return made


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _valid(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, device=device) < count - count // 10).int()[None]


def main() -> None:
    """A tower after the other; each frees its weights."""
    known = towers()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("towers", nargs="*", help=f"parts of names; there are {', '.join(known)}")
    parser.add_argument("--launches", action="store_true", help="every other launch of one op at a time")
    parser.add_argument("--only", default="", help="of ops whose name holds this, such as linear.deferred")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("layers are timed on a GPU, and torch sees none: run innerloop doctor")
    device = torch.device("cuda", torch.cuda.current_device())
    wanted = [name for name in known if not options.towers or any(part in name for part in options.towers)]
    if not wanted:
        raise SystemExit(f"no tower is called {options.towers}; there are {', '.join(known)}")
    for name in wanted:
        measure(name, known[name], device, options.launches, options.only)


if __name__ == "__main__":
    main()
