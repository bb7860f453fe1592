"""A policy-shaped toy: prepared table, prompt, two vision stages, a context per capacity, an action head."""

import numpy as np
import torch

from innerloop.contract import Buffer, Plan, Role, Stage

CAPACITIES = (8, 16, 32)
CAMERAS, FRAME, WIDTH, CHUNK, ACTION, STEPS = 2, 4096, 16, 4, 8, 3
TICKS = {
    "frames": "observation",
    "frame_sizes": "observation",
    "tokens": "prompt",
    "prompt_length": "prompt",
    "noise": "step",
}


def buffers(dtype=torch.float32, batch=1):
    f32, i32 = torch.float32, torch.int32
    listed = [
        Buffer("frames", (batch, CAMERAS, FRAME), torch.uint8, Role.INPUT),
        Buffer("frame_sizes", (batch, CAMERAS, 2), i32, Role.INPUT),
        Buffer("tokens", (batch, CAPACITIES[-1]), i32, Role.INPUT),
        Buffer("prompt_length", (batch, 1), i32, Role.INPUT),
        Buffer("noise", (batch, CHUNK, ACTION), f32, Role.INPUT),
        Buffer("table", (STEPS, WIDTH), dtype, Role.STATIC),
        Buffer("prompt_tokens", (batch, CAPACITIES[-1], WIDTH), dtype, Role.STATIC),
        Buffer("patches", (batch, CAMERAS, 64), dtype, Role.SCRATCH),
        Buffer("features", (batch, CAMERAS, WIDTH), dtype, Role.SCRATCH),
        Buffer("memory", (batch, CAMERAS + CAPACITIES[-1], WIDTH), dtype, Role.STATE),
        Buffer("work", (batch, CHUNK, 64), dtype, Role.SCRATCH),
        Buffer("actions", (batch, CHUNK, ACTION), f32, Role.OUTPUT),
    ]
    return {b.name: b for b in listed}


class Weights:
    """Random matrices from one seed."""

    def __init__(self, seed=0, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape):
            return torch.randn(shape, generator=generator).mul_(shape[0] ** -0.5).to(device, dtype)

        self.dtype, self.device = dtype, device
        self.time, self.words = matrix(STEPS, WIDTH), matrix(100, WIDTH)
        self.patch, self.see, self.mix = matrix(1, 64), matrix(64, WIDTH), matrix(WIDTH, WIDTH)
        self.enter, self.widen, self.leave = matrix(ACTION, WIDTH), matrix(WIDTH, 64), matrix(64, ACTION)


def stages(w):
    def tables(b):
        b["table"].copy_(torch.tanh(w.time))

    def prompt(b):
        b["prompt_tokens"].copy_(torch.nn.functional.embedding(b["tokens"].long(), w.words))

    def patchify(b):
        used = b["frame_sizes"].prod(-1, keepdim=True) * 3
        valid = torch.arange(FRAME, device=w.device) < used
        mean = torch.where(valid, b["frames"].float(), 0).sum(-1, keepdim=True) / used / 255
        b["patches"].copy_(mean.to(w.dtype) @ w.patch)

    def vision(b):
        b["features"].copy_(torch.tanh(b["patches"] @ w.see))

    def context(capacity):
        rows = CAMERAS + capacity

        def run(b):
            x = torch.cat([b["features"], b["prompt_tokens"][:, :capacity]], dim=1)
            b["memory"][:, :rows].copy_(torch.tanh(x @ w.mix))

        reads = ("features", "prompt_tokens")
        return Stage("context", run, reads, ("memory",))

    def action(b):
        rows = torch.arange(CAMERAS + CAPACITIES[-1], device=w.device)
        valid = rows[None, None] < CAMERAS + b["prompt_length"][..., None]
        memory = torch.where(valid.mT, b["memory"], 0)
        x = b["noise"].clone()
        for step in range(STEPS):
            query = x.to(w.dtype) @ w.enter + b["table"][step]
            weight = torch.softmax(torch.where(valid, query @ memory.mT, -1e4).float(), -1).to(w.dtype)
            b["work"].copy_(torch.tanh((weight @ memory) @ w.widen))
            x = x + (b["work"] @ w.leave).float() / STEPS
        b["actions"].copy_(x)

    shared = (
        Stage("tables", tables, (), ("table",), prepare=True),
        Stage("prompt", prompt, ("tokens",), ("prompt_tokens",)),
        Stage("patchify", patchify, ("frames", "frame_sizes"), ("patches",)),
        Stage("vision", vision, ("patches",), ("features",)),
    )
    last = Stage("action", action, ("noise", "memory", "table", "prompt_length"), ("actions", "work"))
    return shared, context, last


def plans(seed=0, dtype=torch.float32, device="cpu", batch=1, fingerprint=None):
    """One plan a capacity, over the same buffers and, but for `context`, the same stages."""
    shared, context, last = stages(Weights(seed, dtype, device))
    return {
        capacity: Plan(
            f"toy-{capacity}",
            buffers(dtype, batch),
            (*shared, context(capacity), last),
            TICKS,
            f"toy weights {seed}" if fingerprint is None else fingerprint,
        )
        for capacity in CAPACITIES
    }


def observation(seed=0, tokens=5, size=(8, 10)):
    """Inputs of one robot, frames cut to the bytes in use."""
    rng = np.random.default_rng(seed)
    used = size[0] * size[1] * 3
    row = np.zeros(CAPACITIES[-1], np.int32)
    row[:tokens] = rng.integers(1, 100, tokens)
    return {
        "frames": rng.integers(0, 256, (CAMERAS, used), dtype=np.uint8),
        "frame_sizes": np.tile(np.array(size, np.int32), (CAMERAS, 1)),
        "tokens": row,
        "prompt_length": np.array([tokens], np.int32),
        "noise": noise(seed),
    }


def noise(seed=0):
    return np.random.default_rng(seed + 1000).standard_normal((CHUNK, ACTION), dtype=np.float32)


def capacity_for(tokens):
    return next(c for c in CAPACITIES if tokens <= c)
