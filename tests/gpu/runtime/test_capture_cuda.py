"""Graphs replay what the interpreter computes, are captured before ready and never after."""

import numpy as np
import pytest
import torch
import toy_plan
from cuda_subjects import DEVICE

from innerloop.contract import Buffer, Plan, PlanError, Role, Stage
from innerloop.runtime.capture import difference
from innerloop.runtime.machine import Machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# against a run at the exact length, which sums products in another order: (absolute, relative to the largest)
EXACT = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def test_ready_means_captured_and_checked(subject):
    machine = subject.machine
    assert machine.ready
    assert machine.captures == len(machine.agreement)
    assert {"arena", "prepare", "warm-up", "capture", "self-check"} <= machine.seconds.keys()
    assert sum(machine.seconds.values()) < 30  # second start: kernels are in the cache by the second subject
    print({name: f"{value:.3g}" for name, value in machine.agreement.items()}, machine.seconds)


def test_replay_equals_the_interpreter_and_every_stage_keeps_to_what_it_declares(subject):
    for capacity in subject.plans:
        for seed, tokens in ((0, 1), (1, capacity), (2, max(capacity // 2, 1))):
            inputs = subject.inputs(seed, tokens)
            replayed, _ = subject.decide("a", inputs, capacity)
            expected = subject.interpreted(capacity, inputs, check=True)
            found, bound = difference(expected, replayed)
            assert found <= bound, (capacity, seed)


def test_shared_stages_are_captured_once(subject):
    names = set(subject.machine.agreement)
    contexts = {name for name in names if name.endswith("/context")} | ({"context"} & names)
    assert len(contexts) == len(subject.plans)
    assert sum(name.endswith("action") for name in names) == 1


def test_two_hundred_prompts_in_random_order_capture_nothing(subject, monkeypatch):
    captures = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: captures.append(1))
    before = subject.machine.captures
    lengths = np.resize(np.arange(1, subject.longest + 1), 200)
    for turn, tokens in enumerate(np.random.default_rng(0).permutation(lengths).tolist()):
        inputs = subject.inputs(turn, tokens)
        actions, _ = subject.decide("a", inputs)
        found, bound = difference(subject.interpreted(subject.capacity(tokens), inputs), actions)
        assert found <= bound, tokens
        if turn % 10:
            continue  # a new length may mean new kernels to compile
        exact = subject.interpreted(None, inputs, plan=subject.exact(tokens))
        apart = float((exact - actions).abs().max()) / max(float(exact.abs().max()), 1)
        assert apart <= EXACT[subject.dtype], (tokens, apart)
    assert captures == []
    assert subject.machine.captures == before


def test_every_frame_size_replays_the_same_graphs(subject):
    before = subject.machine.captures
    for seed, size in enumerate([(24, 32), (32, 24), (1, 1), (7, 20)]):
        inputs = subject.inputs(seed)
        sizes = np.tile(np.array(size, np.int32), (len(inputs["frame_sizes"]), 1))
        rng = np.random.default_rng(seed)
        frames = [rng.integers(0, 256, 3 * size[0] * size[1], dtype=np.uint8) for _ in sizes]
        inputs = {**inputs, "frames": frames, "frame_sizes": sizes}
        actions, _ = subject.decide("a", inputs)
        found, bound = difference(
            subject.interpreted(subject.capacity(int(inputs["prompt_length"][0])), inputs), actions
        )
        assert found <= bound, size
    assert subject.machine.captures == before


def frail(run):
    f32 = torch.float32
    listed = {"x": Buffer("x", (1, 4), f32, Role.INPUT), "y": Buffer("y", (1, 4), f32, Role.OUTPUT)}
    return {1: Plan("frail", listed, (Stage("odd one", run, ("x",), ("y",)),), {"x": "step"}, "f")}


def test_a_stage_that_counts_on_the_host_is_refused_by_name():
    calls = []

    def run(b):
        calls.append(1)
        b["y"].copy_(b["x"] * len(calls))

    with pytest.raises(PlanError, match="stage 'odd one': replay and interpreter differ"):
        Machine(frail(run), DEVICE)


def test_a_stage_that_is_another_one_while_captured_is_refused_by_name():
    def run(b):
        b["y"].copy_(b["x"]).mul_(0 if torch.cuda.is_current_stream_capturing() else 1)

    with pytest.raises(PlanError, match="stage 'odd one'"):
        Machine(frail(run), DEVICE)


def test_without_capture_the_same_bits_come_eagerly():
    plans = toy_plan.plans(device=DEVICE)
    captured, eager = Machine(plans, DEVICE), Machine(plans, DEVICE, capture=False)
    assert eager.captures == 0
    for seed in range(3):
        answers = [m.decide("a", toy_plan.observation(seed), 8).outputs["actions"] for m in (captured, eager)]
        assert np.array_equal(*answers)
    captured.close()
    eager.close()


def test_weights_changed_in_place_are_seen_by_the_graphs():
    weights, other = toy_plan.Weights(0, device=DEVICE), toy_plan.Weights(5, device=DEVICE)
    shared, context, last = toy_plan.stages(weights)
    machine = Machine({8: Plan("toy", toy_plan.buffers(), (*shared, context(8), last), toy_plan.TICKS, "f")}, DEVICE)
    expected = Machine(toy_plan.plans(5, device=DEVICE), DEVICE).decide("a", toy_plan.observation(), 8)
    machine.decide("a", toy_plan.observation(), 8)

    def swap():
        for name, value in vars(weights).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(other, name))

    machine.weights_changed(swap)
    decision = machine.decide("a", toy_plan.observation(), 8)
    assert np.array_equal(decision.outputs["actions"], expected.outputs["actions"])
    machine.close()
