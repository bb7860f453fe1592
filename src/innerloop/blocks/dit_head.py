"""What stands around the DiT in GR00T-style action heads: state token, action encoder and decoder, Euler steps from 0 to 1.

Weights come by name: parameters, or static buffers where each embodiment has weights of its own.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from innerloop.blocks import flow
from innerloop.blocks.dit import DiT, DiTSizes
from innerloop.contract import Buffer, Role, Stage
from innerloop.kernels import euler, launch, linear, skinny

Weights = Mapping[str, torch.Tensor]
TABLES = ("modulation", "action_table", "time_table", "exit_weight", "exit_bias")
STATE = ("state_in", "state_out")
# Where checkpoints keep the layers of the encoders and the decoder; those of the action encoder go by a letter or word.
PLACES = {
    "state_in": "state_encoder.layer1",
    "state_out": "state_encoder.layer2",
    "action_in": "action_encoder.{}1",
    "action_mix": "action_encoder.{}2",
    "action_out": "action_encoder.{}3",
    "decode_in": "action_decoder.layer1",
    "decode_out": "action_decoder.layer2",
}
STATE_READS = tuple(f"{name}_{kind}" for name in STATE for kind in ("weight", "bias"))


def tables(
    dit: DiT, times: torch.Tensor, inner: flow.Affine, mix: flow.Affine, decoder: flow.Affine
) -> dict[str, torch.Tensor]:
    """What depends on weights and step alone, by static buffer (`table_buffers`); inner and mix: of `flow.folded`.

    times: float32 [steps], in buckets. decoder: its first layer, which takes the DiT's output head in.
    """
    time, action = flow.folded(flow.bucket_embedding(times, dit.sizes.width), inner, mix)
    leaving = dict(zip(("exit_weight", "exit_bias"), dit.behind_head(*decoder), strict=True))
    return {"modulation": dit.tables(times), "action_table": action, "time_table": time, **leaving}


def table_buffers(sizes: DiTSizes, steps: int, action_dim: int, hidden: int, dtype: torch.dtype) -> list[Buffer]:
    """Static buffers of `tables`: float32, but what multiplies the DiT's rows."""
    shapes = {
        "modulation": (steps, sizes.table_rows, 2, sizes.width),
        "action_table": (sizes.width, action_dim),
        "time_table": (steps, sizes.width),
        "exit_weight": (hidden, sizes.width),
        "exit_bias": (hidden,),
    }
    kinds = {name: dtype if name.startswith("exit_") else torch.float32 for name in shapes}
    return [Buffer(name, shape, kinds[name], Role.STATIC) for name, shape in shapes.items()]


def memory_buffer(sizes: DiTSizes, batch: int, keys: int, dtype: torch.dtype) -> Buffer:
    """K and V of every cross block, as `DiT.remember` writes them."""
    return Buffer("memory", sizes.memory_shape(batch, keys), dtype, Role.STATE)


def state_buffers(sizes: DiTSizes, batch: int, state_dim: int, dtype: torch.dtype) -> list[Buffer]:
    """The normalised state and its token."""
    return [
        Buffer("state", (batch, state_dim), torch.float32, Role.INPUT),
        Buffer("state_token", (batch, 1, sizes.width), dtype, Role.STATE),
    ]


def tables_stage(made: Callable[[], Mapping[str, torch.Tensor]], writes: Sequence[str]) -> Stage:
    """Once a checkpoint: `made()` into static buffers."""

    def run(b: Weights) -> None:
        for name, value in made().items():
            b[name].copy_(value)

    return Stage("tables", run, (), tuple(writes), prepare=True)


def state_stage(weights: Callable[[Weights], Weights], reads: Sequence[str] = ()) -> Stage:
    """The state's token; `weights` finds STATE_READS, `reads`: those of them that are buffers."""

    def run(b: Weights) -> None:
        state_token(b["state"], weights(b), b["state_token"])

    return Stage("proprioception", run, ("state", *reads), ("state_token",))


def state_token(state: torch.Tensor, w: Weights, out: torch.Tensor) -> None:
    """Normalised state float32 [B, S] -> out [B, 1, D]."""
    hidden = euler.project_in(state[:, None], w["state_in_weight"], w["state_in_bias"], out.dtype, "relu")
    linear.into(hidden, w["state_out_weight"], w["state_out_bias"], out)


def ground(w: Weights, prefix: torch.Tensor | None, batch: int, chunk: int) -> torch.Tensor:
    """What a step's product is added to, the same in all steps: [B, n + chunk, D].

    prefix [B, n, D]: tokens before the actions, if any; below these stands, where positions are learned, w's `place`
    [rows, D].
    """
    weight, place = w["action_out_weight"], w.get("place")
    below = weight.new_zeros(chunk, len(weight)) if place is None else place[:chunk]
    below = below.expand(batch, -1, -1)
    return below.contiguous() if prefix is None else torch.cat([prefix, below], dim=1)


def step(
    dit: DiT,
    w: Weights,
    index: int,
    x: torch.Tensor,
    ground: torch.Tensor,
    memory: torch.Tensor,
    valid: torch.Tensor | Sequence[torch.Tensor],
    hold: torch.Tensor | None = None,
) -> torch.Tensor:
    """Euler step `index` of x float32 [B, chunk, A] -> x at the next time.

    ground: of the function of this name. w: tables, action_out and decode_out. memory and valid as DiT takes them. hold
    float32 [B, chunk]: how much of x a row keeps.
    """
    dt = 1.0 / len(w["time_table"])
    with launch.dependent_launch(linear.chains(ground)):
        hidden = skinny.project_in(x, w["action_table"], w["time_table"][index], ground.dtype, silu=True)
        entering = linear.deferred(hidden, w["action_out_weight"], w["action_out_bias"])
        rows = dit(ground, w["modulation"][index], memory, valid, entering)[:, -x.shape[1] :]
        hidden = linear.linear(rows, w["exit_weight"], w["exit_bias"], activation="relu")
        return euler.project_and_step(hidden, w["decode_out_weight"], w["decode_out_bias"], x, dt, hold)
