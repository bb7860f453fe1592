"""A stage runs when, and only when, something it reads changed; skipping never changes a bit."""

from typing import Any

import numpy as np
import pytest
import torch
from loaded_policies import observe

from innerloop.contract import PlanError
from innerloop.engine import LoadedPolicy
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter


def stages(policy: LoadedPolicy, observation: dict[str, Any], seed: int, session: str) -> tuple[str, ...]:
    receipt = policy.infer(observation, seed=seed, session=session).receipt
    assert receipt is not None
    return receipt.stages


def test_refresh_by_what_changed(policy: LoadedPolicy) -> None:
    observation = observe(policy, 0)
    pi0 = policy.family.name == "pi0"
    everything = ("layout", "prompt", "vision", "context", *(("proprioception",) if pi0 else ()), "action")
    assert stages(policy, observation, 0, "refresh") == everything
    assert stages(policy, observation, 1, "refresh") == ("action",)

    frame = observe(policy, 1)["images"][policy.config.cameras[0]]
    one_image = {**observation, "images": {**observation["images"], policy.config.cameras[0]: frame}}
    after_image = ("vision", "context", *(("proprioception",) if pi0 else ()), "action")
    assert stages(policy, one_image, 1, "refresh") == after_image

    same_length = {**one_image, "prompt": "pick up the red block".replace("red", "blue")}
    ran = stages(policy, same_length, 1, "refresh")
    assert ran in (
        ("prompt", *after_image[1:]),
        ("layout", "prompt", *after_image[1:]),  # another token count
    )
    if pi0:
        new_state = {**same_length, "state": observe(policy, 2)["state"]}
        assert stages(policy, new_state, 1, "refresh") == ("proprioception", "action")


def test_skipping_gives_the_same_bits(policy: LoadedPolicy) -> None:
    """The same decisions through one interpreter that skips and one that runs everything."""
    plans = list(policy.plans.values())
    results = []
    for skip in (True, False):
        interpreter = Interpreter(plans, Arena(plans), check=True)
        rows = []
        for seed, noise in ((0, 0), (0, 1), (1, 1), (0, 0)):
            inputs = policy.processor.prepare(observe(policy, seed)).inputs
            for name, value in {**inputs, "noise": policy.processor.noise(seed=noise)}.items():
                interpreter.write(name, value)
            interpreter.run(plans[-1], skip=skip)
            rows.append(interpreter.read("actions"))
        results.append(torch.stack(rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][0], results[0][3])
    assert not torch.equal(results[0][0], results[0][1])


def test_actions_do_not_depend_on_what_ran_between(policy: LoadedPolicy) -> None:
    first = policy.infer(observe(policy, 0), seed=5).actions
    for seed in range(1, 6):
        policy.infer(observe(policy, seed), seed=seed)
    again = policy.infer(observe(policy, 0), seed=5).actions
    assert np.array_equal(first, again)


def test_capacities_agree(policy: LoadedPolicy) -> None:
    """A prompt gives the same actions at every capacity that holds it (fp32, another summation length)."""
    prepared = policy.processor.prepare(observe(policy, 3))
    inputs = {**prepared.inputs, "noise": policy.processor.noise(seed=3)}
    fits = [c for c in policy.plans if c >= prepared.context.prompt_tokens]
    outputs = [policy.runtime.decide(f"at {c}", inputs, c).outputs["actions"] for c in fits]
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=1e-5)


def test_undeclared_access_is_caught(policy: LoadedPolicy) -> None:
    from dataclasses import replace

    plan = list(policy.plans.values())[-1]
    starved = tuple(
        replace(s, reads=tuple(r for r in s.reads if r != "image_tokens")) if s.name == "context" else s
        for s in plan.stages
    )
    broken = replace(plan, stages=starved)
    interpreter = Interpreter(broken, Arena(broken))
    inputs = policy.processor.prepare(observe(policy, 0)).inputs
    for name, value in {**inputs, "noise": policy.processor.noise(seed=0)}.items():
        interpreter.write(name, value)
    with pytest.raises(PlanError, match=r"context.*image_tokens"):
        interpreter.run(broken)
