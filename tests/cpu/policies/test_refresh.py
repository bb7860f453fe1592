"""A stage runs when, and only when, something it reads changed; skipping never changes a bit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded_policies import CHECKPOINTS, course, observe

import innerloop
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

    same_length = {**one_image, "prompt": "pick up the red block".replace("pick", "push")}
    longer = {**one_image, "prompt": "pick up the red block of wood"}
    lengths = [policy.processor.prepare(o).context.prompt_tokens for o in (one_image, same_length, longer)]
    assert lengths[0] == lengths[1] < lengths[2]
    assert stages(policy, same_length, 1, "refresh") == ("prompt", *after_image[1:])
    assert stages(policy, longer, 1, "refresh") == ("layout", "prompt", *after_image[1:])

    new_state = {**longer, "state": observe(policy, 0)["state"] + 0.5}
    after_state = (
        ("proprioception", "action") if pi0 else ("prompt", "context", "action")
    )  # pi0.5 says it in the prompt
    ran = stages(policy, new_state, 1, "refresh")
    same = policy.processor.prepare(new_state).context.prompt_tokens == lengths[2]
    assert ran == (after_state if pi0 or same else ("layout", *after_state))

    some = {name: None if name != policy.config.cameras[0] else frame for name in policy.config.cameras}
    if len(some) > 1:
        assert stages(policy, {**new_state, "images": some}, 1, "refresh") == ("layout", *after_image)


def test_vision_is_under_way_before_the_host_turns_to_the_text(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = course(policy, observe(policy, 0), monkeypatch)
    assert order[:2] == ["vision", "text"]
    assert {"layout", "prompt", "context", "action"} <= set(order[2:])


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
    """A hundred decisions, five observations in turn and two robots: each repeats its first bits."""
    observations = [observe(policy, seed) for seed in range(5)]
    first: dict[int, bytes] = {}
    for call in range(100):
        which = call * 3 % 5
        session = "even" if call % 2 == 0 else "odd"
        found = policy.infer(observations[which], seed=which, session=session).actions.tobytes()
        assert first.setdefault(which, found) == found, call
    assert len(set(first.values())) == 5


def test_capacities_agree(tmp_path: Path) -> None:
    """A prompt gives the same actions at every capacity that holds it (fp32, another summation length)."""
    directory = Path(shutil.copytree(CHECKPOINTS["pi05"], tmp_path / "long"))
    for name in ("config.json", "policy_preprocessor.json"):
        text = (directory / name).read_text()
        longer = text.replace('"tokenizer_max_length": 64', '"tokenizer_max_length": 200')
        (directory / name).write_text(longer.replace('"max_length": 64', '"max_length": 200'))
    policy = innerloop.load(directory, device="cpu")
    assert list(policy.plans) == [64, 128, 200]
    prepared = policy.processor.prepare(observe(policy, 3))
    inputs = {**prepared.inputs, "noise": policy.processor.noise(seed=3)}
    outputs = [policy.runtime.decide(f"at {c}", inputs, c).outputs["actions"] for c in policy.plans]
    long = {**observe(policy, 3), "prompt": "pick up the red block, " * 12}
    receipt = policy.infer(long, seed=3).receipt
    policy.close()
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=1e-5)
    assert receipt is not None
    assert receipt.capacity == min(c for c in policy.plans if c >= receipt.prompt_tokens) > 64


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
