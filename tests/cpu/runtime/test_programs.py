"""Which stages are one program."""

import numpy as np
import torch
from toy_plan import plans

from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.runtime.machine import Machine


def test_stages_always_due_together_are_one_program():
    machine = Machine(plans())
    with machine.export() as host:
        assert list(host.graphs) == [
            "prompt",
            "patchify+vision",
            "toy-8/context",
            "action",
            "toy-16/context",
            "toy-32/context",
        ]


def test_a_stage_that_answers_is_a_program_of_its_own():
    """Also where it is always due with the one before it (QwenOFT, QwenFast), so that each has its own time."""
    listed = {
        "x": Buffer("x", (2,), torch.float32, Role.INPUT),
        **{name: Buffer(name, (2,), torch.float32, Role.STATE) for name in ("mixed", "memory")},
        "y": Buffer("y", (2,), torch.float32, Role.OUTPUT),
    }
    steps = (
        Stage("mix", lambda b: b["mixed"].copy_(b["x"] + 1), ("x",), ("mixed",)),
        Stage("context", lambda b: b["memory"].copy_(b["mixed"] * 2), ("mixed",), ("memory",)),
        Stage("action", lambda b: b["y"].copy_(b["memory"] + b["x"]), ("memory", "x"), ("y",)),
    )
    machine = Machine({1: Plan("p", listed, steps, {"x": "observation"})})
    decision = machine.decide("a", {"x": np.ones(2, np.float32)}, 1, profile=True)
    assert decision.outputs["y"].tolist() == [5, 5]
    assert {"mix+context", "action"} <= decision.timing.keys()
