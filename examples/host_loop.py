"""A control loop that knows a policy only through its exported manifest: addresses, windows, graphs.

    python examples/host_loop.py CHECKPOINT [--decisions 20] [--device cpu|cuda]

What Python does here, C, C++ or Rust can do with the same JSON: on a GPU the graph handles go to cudaGraphLaunch.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

import innerloop
from innerloop.runtime.export import Export

Value = np.ndarray | Sequence[np.ndarray]


class Host:
    """Windows by address and graphs in order; runs only the graphs that a changed input reaches."""

    def __init__(self, export: Export, capacity: int) -> None:
        described = json.loads(json.dumps(export.manifest))  # plain JSON: nothing of ours is needed beyond this line
        self.cuda = described["device"].startswith("cuda")
        self.buffers = {b["name"]: b for b in described["plans"][str(capacity)]["buffers"]}
        self.graphs = described["graphs"]
        self.order = described["order"][str(capacity)]
        self.run, self.lent = export.graphs, export.windows

    def window(self, name: str) -> Any:
        """A buffer as an array of this process: by address on a CPU, through DLPack on a GPU."""
        if self.cuda:
            return torch.utils.dlpack.from_dlpack(self.lent[name])
        buffer = self.buffers[name]
        memory = (ctypes.c_uint8 * buffer["bytes"]).from_address(buffer["address"])
        return np.frombuffer(memory, buffer["dtype"]).reshape(buffer["shape"])

    def write(self, name: str, value: Value) -> None:
        """Copies a value into a window, row by row where rows differ in length; rows may be shorter than the window's."""
        window = self.window(name)
        if isinstance(value, np.ndarray):
            self._copy(window[..., : value.shape[-1]], value)
            return
        for row, part in zip(window.reshape(len(value), -1), value, strict=True):
            self._copy(row[: part.size], part)

    def _copy(self, window: Any, value: np.ndarray) -> None:
        if self.cuda:
            window.copy_(torch.tensor(value))  # a copy: some inputs are read-only
        else:
            window[...] = value

    def decide(self, inputs: Mapping[str, Value]) -> tuple[dict[str, np.ndarray], list[str]]:
        """Writes the inputs, runs what they reach, and returns every output and the graphs that ran."""
        for name, value in inputs.items():
            self.write(name, value)
        changed, ran = set(inputs), []
        for name in self.order:
            if changed & set(self.graphs[name]["reads"]):
                self.run[name]()
                changed |= set(self.graphs[name]["writes"])
                ran.append(name)
        outputs = [name for name, buffer in self.buffers.items() if buffer["role"] == "output"]
        if self.cuda:
            return {name: self.window(name).cpu().numpy() for name in outputs}, ran
        return {name: self.window(name).copy() for name in outputs}, ran


def main() -> None:
    """Decides once from a made-up observation, then again and again from new noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--decisions", type=int, default=20)
    parser.add_argument("--device")
    options = parser.parse_args()
    policy = innerloop.load(options.checkpoint, device=options.device)
    rng = np.random.default_rng(0)
    observation = {
        "images": {name: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for name in policy.metadata["cameras"]},
        "state": np.zeros(policy.processor.widths.state, np.float32),
        "prompt": "pick up the red block",
    }
    inputs = dict(policy.processor.prepare(observation).inputs)
    capacity = policy.capacity(int(inputs["prompt_length"][0]))
    with policy.runtime.export() as export:
        host = Host(export, capacity)
        for turn in range(options.decisions):
            started = time.perf_counter()
            noise = policy.processor.noise(seed=turn)
            outputs, ran = host.decide({**inputs, "noise": noise} if turn == 0 else {"noise": noise})
            spent = 1e3 * (time.perf_counter() - started)
            print(f"{spent:8.2f} ms  {', '.join(ran)}  first action {outputs['actions'][0, 0, :3]}")
    policy.close()


if __name__ == "__main__":
    main()
