import dataclasses

import numpy as np
import pytest
import torch
from toy_plan import noise, observation, plans

from innerloop.contract import CapsuleError
from innerloop.runtime.backing import Backing, Saved
from innerloop.runtime.machine import Machine


@pytest.fixture
def machine():
    made = Machine(plans())
    yield made
    made.close()


def act(machine, session, seed):
    decision = machine.decide(session, {"noise": noise(seed)}, 8)
    assert decision.stages == ("action",)
    return decision.outputs["actions"]


def flip(capsule):
    """A damaged capsule over the same memory sizes."""
    data = capsule.saved.backing.data.clone()
    word = capsule.saved.backing.word()
    data[1000] ^= 1
    broken = Backing(data)
    broken._word = word
    return dataclasses.replace(capsule, saved=Saved(broken, capsule.saved.contents))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_restored_session_acts_bit_for_bit_with_only_the_noise_new(machine, tier):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot(tier)
    expected = act(machine, "a", 7)
    machine.decide("a", observation(1), 16)
    machine.session("a").restore(capsule)
    assert np.array_equal(act(machine, "a", 7), expected)


def test_a_capsule_restores_into_another_session_again_and_again(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    expected = act(machine, "a", 7)
    for turn in range(3):
        machine.decide("b", observation(turn + 1), 32)
        machine.session("b").restore(capsule)
        assert np.array_equal(act(machine, "b", 7), expected)


def test_a_restored_session_still_knows_its_inputs(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    machine.decide("a", observation(1), 8)
    machine.session("a").restore(capsule)
    words = {"tokens": observation(2)["tokens"]}
    alone = Machine(plans())
    alone.decide("a", observation(0), 8)
    expected = alone.decide("a", words, 8).outputs["actions"]
    assert np.array_equal(machine.decide("a", words, 8).outputs["actions"], expected)
    alone.close()


def test_capsules_move_between_tiers(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    expected = act(machine, "a", 7)
    host = capsule.to("host")
    assert (capsule.tier, host.tier, host.bytes) == ("device", "host", capsule.bytes)
    assert capsule.to("device") is capsule
    machine.decide("a", observation(1), 8)
    machine.session("a").restore(host.to("device"), verify=True)
    assert np.array_equal(act(machine, "a", 7), expected)


def test_a_file_goes_on_in_another_machine(machine, tmp_path):
    for turn in range(3):  # content numbers that the other machine has not reached
        machine.decide("a", observation(turn), 8)
    machine.session("a").snapshot().save(tmp_path / "a.capsule")
    expected = act(machine, "a", 7)
    other = Machine(plans())
    other.decide("x", observation(5), 16)
    capsule = other.load_capsule(tmp_path / "a.capsule")
    other.session("b").restore(capsule)
    assert np.array_equal(act(other, "b", 7), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["a.capsule"]
    other.close()


def test_a_host_capsule_moves_to_another_machine_and_a_device_one_does_not(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    expected = act(machine, "a", 7)
    other = Machine(plans())
    session = other.session("b")
    with pytest.raises(CapsuleError, match=r"another runtime's device memory: move it with capsule.to\('host'\)"):
        session.restore(capsule)
    session.restore(capsule.to("host"))
    assert np.array_equal(act(other, "b", 7), expected)
    other.close()


def test_other_weights_are_refused(machine, tmp_path):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot("host")
    capsule.save(tmp_path / "a.capsule")
    other = Machine(plans(seed=1))
    with pytest.raises(CapsuleError, match="other weights or configuration"):
        other.session("a").restore(capsule)
    with pytest.raises(CapsuleError, match="other weights or configuration"):
        other.load_capsule(tmp_path / "a.capsule")
    other.close()


def test_weights_that_changed_since_are_refused(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    machine.weights_changed()
    with pytest.raises(CapsuleError, match="other weights"):
        machine.session("a").restore(capsule)


def test_another_layout_is_refused(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot("host")
    other = Machine({8: plans()[8]})
    with pytest.raises(CapsuleError, match="other buffer layout"):
        other.session("a").restore(capsule)
    other.close()


@pytest.mark.parametrize(("tier", "verify"), [("device", True), ("host", None)])
def test_damage_is_found_before_anything_changes(machine, tier, verify):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot(tier)
    machine.decide("a", observation(1), 8)
    expected = act(machine, "a", 7)
    act(machine, "a", 8)
    with pytest.raises(CapsuleError, match="damaged"):
        machine.session("a").restore(flip(capsule), verify)
    assert np.array_equal(act(machine, "a", 7), expected)


def test_a_copy_that_fails_midway_leaves_the_session_as_it_was(machine):
    machine.decide("a", observation(0), 8)
    capsule = machine.session("a").snapshot()
    machine.decide("a", observation(1), 8)
    short = Saved(Backing(torch.zeros(256, dtype=torch.uint8)), capsule.saved.contents)
    with pytest.raises(RuntimeError):
        machine.session("a").restore(dataclasses.replace(capsule, saved=short))
    alone = Machine(plans())
    alone.decide("a", observation(1), 8)
    assert np.array_equal(act(machine, "a", 7), act(alone, "a", 7))
    alone.close()


def test_every_damaged_file_is_refused(machine, tmp_path):
    machine.decide("a", observation(0), 8)
    path = tmp_path / "a.capsule"
    machine.session("a").snapshot().save(path)
    whole = path.read_bytes()
    for at in (0, 25, 60, len(whole) // 2, len(whole) - 1):
        broken = bytearray(whole)
        broken[at] ^= 1
        path.write_bytes(broken)
        with pytest.raises(CapsuleError):
            machine.load_capsule(path)
    for size in (0, 10, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CapsuleError):
            machine.load_capsule(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CapsuleError, match="cut off or damaged"):
        machine.load_capsule(path)


def test_a_policy_without_fingerprint_makes_no_files(tmp_path):
    machine = Machine(plans(fingerprint=""))
    machine.decide("a", observation(0), 8)
    with pytest.raises(CapsuleError, match="no fingerprint"):
        machine.session("a").snapshot().save(tmp_path / "a.capsule")
    machine.close()


def test_a_session_that_decided_nothing_has_no_capsule(machine):
    with pytest.raises(CapsuleError, match="decided nothing yet"):
        machine.session("a").snapshot()


def test_capsules_come_from_a_pool_and_go_back(machine):
    kept = []
    for turn in range(200):
        machine.decide("a", observation(turn), 8)
        kept = [*kept[-3:], machine.session("a").snapshot()]
    size = machine.account()["state"]
    assert machine.account()["saved_host"] <= 6 * size
    kept.clear()
    machine.session("a").end()
    assert machine.account()["saved_host_used"] == 0


def test_a_snapshot_of_unchanged_state_copies_nothing(machine):
    machine.decide("a", observation(0), 8)
    first = machine.session("a").snapshot()
    act(machine, "a", 7)
    second = machine.session("a").snapshot()
    assert first.saved.backing is second.saved.backing


def test_bytes_are_state_and_inputs(machine):
    values = observation(0)
    machine.decide("a", values, 8)
    inputs = sum(value.nbytes for value in values.values())
    assert machine.session("a").snapshot().bytes == machine.account()["state"] + inputs
