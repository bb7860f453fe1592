"""Sessions and capsules in device memory, host memory and files: always the same bits."""

import gc

import numpy as np
import pytest
import torch
import toy_plan
from cuda_subjects import DEVICE, ROOT

from innerloop.runtime.machine import Machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("tier", ["device", "host", "file"])
def test_a_restored_session_acts_bit_for_bit_with_only_the_noise_new(subject, tier, tmp_path):
    inputs = subject.inputs(0)
    subject.decide("a", inputs)
    capsule = subject.machine.session("a").snapshot("host" if tier == "host" else "device")
    expected, _ = subject.decide("a", {**inputs, "noise": subject.noise(7)})
    if tier == "file":
        capsule.save(tmp_path / "a.capsule")
        capsule = subject.machine.load_capsule(tmp_path / "a.capsule")
    for seed in (1, 2):
        subject.decide("a", subject.inputs(seed))
        subject.decide("b", subject.inputs(seed + 10))
    subject.machine.session("a").restore(capsule, verify=True)
    actions, stages = subject.decide("a", {**inputs, "noise": subject.noise(7)})
    assert stages == ("action",)
    assert torch.equal(actions, expected)


def test_a_fork_and_its_origin_go_on_alone(subject):
    inputs = subject.inputs(0)
    subject.decide("a", inputs)
    twin = subject.machine.session("a").fork("b")
    subject.decide("a", subject.inputs(1))
    actions, stages = subject.decide(twin, {**inputs, "noise": subject.noise(7)})
    assert stages == ("action",)
    subject.decide("fresh", inputs)
    assert torch.equal(actions, subject.decide("fresh", {**inputs, "noise": subject.noise(7)})[0])


def test_damage_on_the_device_is_found(subject):
    subject.decide("a", subject.inputs(0))
    capsule = subject.machine.session("a").snapshot()
    capsule.verify()
    capsule.saved.backing.data[100] ^= 1
    torch.cuda.synchronize()
    with pytest.raises(Exception, match="damaged"):
        subject.machine.session("a").restore(capsule, verify=True)
    subject.machine.session("a").end()  # its own copy is the damaged one
    subject.decide("a", subject.inputs(0))


def test_parked_sessions_come_back_whole():
    machine = Machine(toy_plan.plans(device=DEVICE), DEVICE, sessions=20, resident=2)
    names = [f"robot {n}" for n in range(12)]
    for seed, name in enumerate(names):
        machine.decide(name, toy_plan.observation(seed), 8)
    account, size = machine.account(), machine.account()["state"]
    assert account["saved_device_used"] == 2 * size
    assert account["saved_host_used"] == 9 * size  # the twelfth has the arena
    for seed, name in enumerate(names):
        decision = machine.decide(name, {"noise": toy_plan.noise(50)}, 8)
        assert decision.stages == ("action",)
        alone = machine.decide("alone", {**toy_plan.observation(seed), "noise": toy_plan.noise(50)}, 8)
        assert np.array_equal(decision.outputs["actions"], alone.outputs["actions"])
    for name in machine.sessions:
        machine.session(name).end()
    assert machine.account()["saved_device_used"] == machine.account()["saved_host_used"] == 0
    machine.close()


def test_thousands_of_sessions_leave_nothing_behind():
    machine = Machine(toy_plan.plans(device=DEVICE), DEVICE)
    values = toy_plan.observation()

    def cycle(turns):
        for turn in range(turns):
            for name in (f"robot {turn}", f"other {turn}"):
                machine.decide(name, values, 8)
            for name in (f"robot {turn}", f"other {turn}"):
                machine.session(name).end()
        gc.collect()
        return torch.cuda.memory_allocated(), machine.account()

    before = cycle(20)
    assert cycle(1000) == before
    machine.close()


def test_two_policies_in_one_process_do_not_disturb_each_other(subjects):
    pair = [subjects("pi05 fp32"), subjects("pi0 fp32")]
    expected = [subject.decide("duet", subject.inputs(3))[0] for subject in pair]
    for turn in range(20):
        for subject in pair:
            subject.decide("other", subject.inputs(turn))
        for subject, answer in zip(pair, expected, strict=True):
            assert torch.equal(subject.decide("duet", subject.inputs(3))[0], answer)


def test_a_host_that_knows_only_the_manifest_gets_the_same_bits(subject):
    import importlib.util

    spec = importlib.util.spec_from_file_location("host_loop", ROOT / "examples" / "host_loop.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    inputs = subject.inputs(0)
    expected, _ = subject.decide("a", inputs)
    with subject.machine.export() as export:
        host = example.Host(export, subject.capacity(int(inputs["prompt_length"][0])))
        handles = [graph["handle"] for graph in host.graphs.values()]
        assert all(isinstance(handle, int) and handle for handle in handles)
        assert len(set(handles)) == len(handles)
        outputs, ran = host.decide(inputs)
        assert ran == host.order
    assert np.array_equal(outputs["actions"][0], expected.numpy())
    again, stages = subject.decide("a", inputs)
    assert stages == ("action",)
    assert torch.equal(again, expected)
