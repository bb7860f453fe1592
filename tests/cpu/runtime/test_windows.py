import ctypes

import numpy as np
import pytest
import torch

from innerloop.contract import Buffer, ObservationError, Plan, Role, Stage
from innerloop.runtime.arena import Arena
from innerloop.runtime.machine import Machine
from innerloop.runtime.windows import SMALL


@pytest.fixture
def machine():
    """Three small inputs, each behind a stage of its own, and a large one."""
    f32 = torch.float32
    sizes = {"a": 3, "b": 5, "c": 7, "big": SMALL + 5}
    listed = [Buffer(name, (1, size), f32, Role.INPUT) for name, size in sizes.items()]
    listed += [Buffer(f"{name} out", (1, size), f32, Role.OUTPUT) for name, size in sizes.items()]
    steps = tuple(
        Stage(f"copy {name}", lambda b, name=name: b[f"{name} out"].copy_(b[name]), (name,), (f"{name} out",))
        for name in sizes
    )
    ticks = {**dict.fromkeys(sizes, "step"), "big": "observation"}
    made = Machine({1: Plan("four", {b.name: b for b in listed}, steps, ticks, "f")})
    yield made
    made.close()


def values(seed):
    rng = np.random.default_rng(seed)
    sizes = {"a": 3, "b": 5, "c": 7, "big": SMALL + 5}
    return {name: rng.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}


def copies(machine, session, inputs):
    """The decision, and how many copies into the arena it took."""
    windows = machine._windows
    calls = []
    copy = windows._copy

    def counting(start, end):
        calls.append(slice(start, end))
        copy(start, end)

    windows._copy = counting
    decision = machine.decide(session, inputs, 1)
    windows._copy = copy
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


def test_one_number_changed_in_place_is_seen_wherever_it_lies(machine):
    inputs = values(0)
    machine.decide("s", inputs, 1)
    for at in (0, 1, SMALL // 2, SMALL - 1, SMALL, SMALL + 4):
        assert machine.decide("s", inputs, 1).stages == ()
        inputs["big"][at] += 1
        decision = machine.decide("s", inputs, 1)
        assert decision.stages == ("copy big",)
        check(decision, inputs)
    inputs["c"][6] += 1
    check(machine.decide("s", inputs, 1), inputs)


def test_a_large_input_is_on_its_way_before_the_small_ones_are_looked_at(machine):
    windows, order = machine._windows, []
    copy, put = windows._copy, windows._put
    windows._copy = lambda start, end: (order.append("copy"), copy(start, end))
    windows._put = lambda slot, *rest: (order.append(slot.buffer.name), put(slot, *rest))
    check(machine.decide("s", values(0), 1), values(0))
    assert order == ["copy", "a", "b", "c", "copy"]


def noted(machine, order):
    """Programs that leave their name in `order` when they run."""
    names = machine._programs.names
    machine._tick.programs = [
        lambda name=name, run=run: (order.append(name), run())
        for name, run in zip(names, machine._tick.programs, strict=True)
    ]


def test_what_reads_a_large_input_alone_runs_before_the_small_ones_are_staged(machine):
    windows, order = machine._windows, []
    put = windows._put
    windows._put = lambda slot, *rest: (order.append(slot.buffer.name), put(slot, *rest))
    noted(machine, order)
    decision = machine.decide("s", values(0), 1)
    check(decision, values(0))
    assert order == ["copy big", "a", "b", "c", "copy a", "copy b", "copy c"]
    assert decision.stages == ("copy a", "copy b", "copy c", "copy big")  # by the plan


def test_the_rest_is_asked_for_when_the_device_is_at_work(machine):
    order = []
    noted(machine, order)
    small = {name: value for name, value in values(0).items() if name != "big"}
    decision = machine.decide_while("s", {"big": values(0)["big"]}, lambda: (order.append("rest"), (small, 1))[1])
    check(decision, values(0))
    assert order == ["copy big", "rest", "copy a", "copy b", "copy c"]
    assert decision.stages == ("copy a", "copy b", "copy c", "copy big")


@pytest.mark.parametrize("wrong", [{"nonsense": np.zeros(3, np.float32)}, {"c": np.zeros((2, 2), np.float32)}, None])
def test_a_rest_that_is_refused_leaves_what_came_first(machine, wrong):
    machine.decide("s", values(0), 1)
    first = {"big": values(1)["big"]}

    def rest():
        if wrong is None:
            raise ObservationError("nothing but a picture")
        return wrong, 1

    with pytest.raises(ObservationError):
        machine.decide_while("s", first, rest)
    decision = machine.decide("s", {}, 1)
    check(decision, {**values(0), **first})
    assert decision.stages == ()


def test_a_wrong_input_is_refused_before_anything_has_changed(machine):
    machine.decide("s", values(0), 1)
    with pytest.raises(ObservationError, match="no input"):
        machine.decide("s", {**values(1), "nonsense": values(1)["a"]}, 1)
    with pytest.raises(ObservationError, match="shape"):
        machine.decide("s", {**values(1), "c": np.zeros((2, 2), np.float32)}, 1)
    decision = machine.decide("s", {}, 1)
    check(decision, values(0))
    assert decision.stages == ()


def shared_scratch(wide):
    """A plan of two chains whose scratch may share bytes: a small input's first, then a large one's."""
    size = SMALL + 4
    listed = [Buffer("a", (1, 4), torch.float32, Role.INPUT), Buffer("big", (1, size), torch.float32, Role.INPUT)]
    listed += [Buffer(f"{name} work", (1, wide), torch.float32, Role.SCRATCH) for name in ("a", "big")]
    listed += [Buffer(f"{name} out", (1, 4), torch.float32, Role.OUTPUT) for name in ("a", "big")]

    def work(name):
        return lambda b: b[f"{name} work"].copy_(b[name].sum().expand(1, wide))

    def out(name):
        return lambda b: b[f"{name} out"].copy_(b[f"{name} work"][:, :4])

    steps = [
        Stage(f"{kind} {name}", run(name), reads, writes)
        for name in ("a", "big")
        for kind, run, reads, writes in (
            ("work", work, (name,), (f"{name} work",)),
            ("out", out, (f"{name} work",), (f"{name} out",)),
        )
    ]
    return Plan("shared", {b.name: b for b in listed}, tuple(steps), {"a": "step", "big": "observation"}, "f")


def test_a_step_that_shares_bytes_with_an_earlier_one_keeps_its_place():
    plan = shared_scratch(64)
    shared = Arena(plan).layout.sharing("big work")
    machine = Machine({1: plan})
    assert bool(shared) == (machine._refresh.first == ())
    assert shared == ("a work",)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        given = {"a": rng.standard_normal(4, np.float32), "big": rng.standard_normal(SMALL + 4, np.float32)}
        outputs = machine.decide("s", given, 1).outputs
        for name, value in given.items():
            assert np.array_equal(outputs[f"{name} out"], np.full(4, torch.from_numpy(value).sum())), name
    machine.close()


def test_a_decision_that_failed_after_a_large_input_left_does_not_mislead_the_next(machine):
    machine.decide("s", values(0), 1)
    windows = machine._windows
    upload, asked = windows.upload, []

    def failing(*arguments):
        asked.append(1)
        return upload(*arguments) if len(asked) == 1 else 1 / 0

    windows.upload = failing
    with pytest.raises(ZeroDivisionError):
        machine.decide("s", values(1), 1)
    del windows.upload
    check(machine.decide("s", {"a": values(2)["a"]}, 1), {**values(1), "a": values(2)["a"]})
    check(machine.decide("t", values(3), 1), values(3))
    check(machine.decide("s", {}, 1), {**values(1), "a": values(2)["a"]})


class Lanes:
    """A queue whose copies aside arrive when they are joined, and not before."""

    def __init__(self):
        self.waiting, self.aside = [], []

    def copy_in(self, device, host, count):
        ctypes.memmove(device, host, count)

    def copy_aside(self, device, host, count):
        self.aside.append(slice(device, device + count))
        self.waiting.append((device, host, count))

    def join(self):
        for copy in self.waiting:
            ctypes.memmove(*copy)
        self.waiting.clear()

    def copy_out(self, host, device, count):
        assert not self.waiting
        ctypes.memmove(host, device, count)

    stream = None


def test_what_comes_later_travels_beside_the_first_steps_and_is_waited_for(machine):
    """Over sessions in turn, with some inputs new, and without the large one, when nothing runs beside."""
    lanes = machine._windows.queue = Lanes()
    rng = np.random.default_rng(0)
    means, name = {}, ""
    for turn in range(60):
        last, name = name, ("one", "two")[int(rng.integers(2))]
        chosen = [key for key in values(0) if name not in means or rng.random() < 0.6]
        now = {key: values(turn)[key] for key in chosen}
        means.setdefault(name, {}).update(now)
        lanes.aside.clear()
        check(machine.decide(name, now, 1), means[name])
        assert not lanes.waiting
        if "big" in now and {"a", "b", "c"} & {*now}:
            assert lanes.aside
        elif "big" not in now and name == last:
            assert not lanes.aside


def test_copies_beside_are_joined_after_a_failure(machine, monkeypatch):
    lanes = machine._windows.queue = Lanes()
    machine.decide("one", values(0), 1)
    upload, calls = machine._windows.upload, []

    def fails(*given):
        upload(*given)
        calls.append(1)
        if len(calls) == 2:
            assert lanes.waiting
            raise RuntimeError("here")

    monkeypatch.setattr(machine._windows, "upload", fails)
    with pytest.raises(RuntimeError, match="here"):
        machine.decide("one", values(1), 1)
    assert not lanes.waiting
    monkeypatch.undo()
    check(machine.decide("one", values(2), 1), values(2))


def test_what_the_first_steps_read_is_not_written_beside_them():
    """A small input of theirs, among small ones that come later."""
    f32 = torch.float32
    sizes = {"a": 3, "grid": 2, "b": 5, "big": SMALL + 5}
    listed = [Buffer(name, (1, size), f32, Role.INPUT) for name, size in sizes.items()]
    listed += [Buffer("seen", (1, 1), f32, Role.STATE), Buffer("sum", (1, 1), f32, Role.OUTPUT)]

    def see(b):
        b["seen"].copy_(b["big"].sum() * b["grid"].sum())

    def add(b):
        b["sum"].copy_(b["seen"] + b["a"].sum() + b["b"].sum())

    steps = (Stage("see", see, ("big", "grid"), ("seen",)), Stage("add", add, ("seen", "a", "b"), ("sum",)))
    ticks = {"a": "step", "b": "step", "grid": "observation", "big": "observation"}
    machine = Machine({1: Plan("sum", {b.name: b for b in listed}, steps, ticks, "f")})
    lanes = machine._windows.queue = Lanes()
    slots = machine._windows._by_name
    base = machine._windows._device.data_ptr()
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}
    for new in ((), ("a", "b", "big"), ("b", "big")):
        given |= {name: given[name] + 1 for name in new}
        lanes.aside.clear()
        found = machine.decide("one", given, 1).outputs["sum"]
        expected = given["big"].sum() * given["grid"].sum() + given["a"].sum() + given["b"].sum()
        assert np.allclose(found, expected, rtol=1e-4)
        grid = range(base + slots["grid"].start, base + slots["grid"].end)
        assert lanes.aside
        assert not any(set(grid) & set(range(where.start, where.stop)) for where in lanes.aside)
    machine.close()
