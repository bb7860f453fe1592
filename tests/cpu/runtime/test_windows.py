import numpy as np
import pytest
import torch

from innerloop.contract import Buffer, Plan, Role, Stage
from innerloop.runtime.machine import Machine
from innerloop.runtime.windows import SMALL


@pytest.fixture
def machine():
    """Three small inputs, each behind a stage of its own, and a large one."""
    f32 = torch.float32
    sizes = {"a": 3, "b": 5, "c": 7, "big": SMALL}
    listed = [Buffer(name, (1, size), f32, Role.INPUT) for name, size in sizes.items()]
    listed += [Buffer(f"{name} out", (1, size), f32, Role.OUTPUT) for name, size in sizes.items()]
    steps = tuple(
        Stage(f"copy {name}", lambda b, name=name: b[f"{name} out"].copy_(b[name]), (name,), (f"{name} out",))
        for name in sizes
    )
    made = Machine({1: Plan("four", {b.name: b for b in listed}, steps, dict.fromkeys(sizes, "step"), "f")})
    yield made
    made.close()


def values(seed):
    rng = np.random.default_rng(seed)
    sizes = {"a": 3, "b": 5, "c": 7, "big": SMALL}
    return {name: rng.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}


def copies(machine, session, inputs):
    """The decision, and how many copies into the arena it took."""
    windows = machine._windows
    calls = []
    region = windows._device

    class Counting:
        def __getitem__(self, where):
            calls.append(where)
            return region[where]

    windows._device = Counting()
    decision = machine.decide(session, inputs, 1)
    windows._device = region
    return decision, calls


def check(decision, expected):
    for name, value in expected.items():
        assert np.array_equal(decision.outputs[f"{name} out"], value), name


def test_small_neighbours_travel_in_one_copy(machine):
    decision, calls = copies(machine, "s", values(0))
    check(decision, values(0))
    assert len(calls) == 2  # a, b and c together, and the large one
    now = {**values(0), "a": values(1)["a"], "c": values(1)["c"]}
    decision, calls = copies(machine, "s", now)
    check(decision, now)
    assert len(calls) == 1
    assert decision.stages == ("copy a", "copy c")


def test_only_used_bytes_are_copied(machine):
    _, calls = copies(machine, "s", {**values(0), "big": values(0)["big"][:10]})
    assert sorted(where.stop - where.start for where in calls)[0] == 40


def test_a_copy_never_brings_along_what_another_session_staged(machine):
    machine.decide("one", values(1), 1)
    machine.decide("two", values(2), 1)
    machine.decide("one", {}, 1)
    with pytest.raises(Exception, match="no input"):
        machine.decide("two", {"b": values(3)["b"], "nonsense": values(3)["b"]}, 1)
    expected = {"one": values(1), "two": values(2)}
    rng = np.random.default_rng(0)
    for turn in range(100):
        name = ("one", "two")[int(rng.integers(2))]
        given = {n: v for n, v in values(turn + 10).items() if rng.random() < 0.4}
        expected[name] = {**expected[name], **given}
        check(machine.decide(name, given, 1), expected[name])


def test_a_shorter_row_is_another_value(machine):
    machine.decide("s", values(0), 1)
    machine.decide("s", {"big": np.zeros(20, np.float32)}, 1)
    assert machine.decide("s", {"big": np.zeros(30, np.float32)}, 1).stages == ("copy big",)
    assert machine.decide("s", {"big": np.zeros(30, np.float32)}, 1).stages == ()


def test_not_a_number_equals_itself_bit_for_bit(machine):
    machine.decide("s", {**values(0), "a": np.full(3, np.nan, np.float32)}, 1)
    assert machine.decide("s", {"a": np.full(3, np.nan, np.float32)}, 1).stages == ()


def test_values_that_are_not_contiguous_are_taken_whole(machine):
    wide = np.arange(6, dtype=np.float32)
    check(machine.decide("s", {**values(0), "a": wide[::2]}, 1), {"a": np.array([0, 2, 4], np.float32)})
