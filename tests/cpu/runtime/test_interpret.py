import numpy as np
import pytest
import torch
from toy_plan import CAPACITIES, noise, observation, plans

from innerloop.contract import Buffer, ObservationError, Plan, PlanError, Role, Stage
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter

EVERYTHING = ["tables", "prompt", "patchify", "vision", "context", "action"]


@pytest.fixture
def toy():
    by_capacity = plans()
    listed = list(by_capacity.values())
    return by_capacity, Interpreter(listed, Arena(listed))


def feed(interpreter, values):
    for name, value in values.items():
        interpreter.write(name, value)


def answer(capacity, values):
    """By a fresh interpreter that skips nothing."""
    plan = plans()[capacity]
    fresh = Interpreter(plan, Arena(plan))
    feed(fresh, values)
    assert fresh.run(skip=False) == EVERYTHING
    return fresh.read("actions")


def test_a_first_run_does_everything_and_a_second_nothing(toy):
    by_capacity, interpreter = toy
    feed(interpreter, observation())
    assert interpreter.run(by_capacity[8]) == EVERYTHING
    assert interpreter.run(by_capacity[8]) == []


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        (("noise",), ["action"]),
        (("frames",), ["patchify", "vision", "context", "action"]),
        (("tokens",), ["prompt", "context", "action"]),
        (("prompt_length",), ["action"]),
    ],
)
def test_only_what_is_due_runs_and_the_answer_is_the_full_one(toy, changed, stages):
    by_capacity, interpreter = toy
    first, second = observation(0), observation(1)
    feed(interpreter, first)
    interpreter.run(by_capacity[8])
    now = {**first, **{name: second[name] for name in changed}}
    feed(interpreter, {name: now[name] for name in changed})
    assert interpreter.run(by_capacity[8]) == stages
    assert torch.equal(interpreter.read("actions"), answer(8, now))


def test_random_changes_and_capacities_always_give_the_full_answer(toy):
    by_capacity, interpreter = toy
    rng = np.random.default_rng(0)
    now = observation(0)
    feed(interpreter, now)
    for turn in range(60):
        other = observation(turn, tokens=int(rng.integers(1, 9)), size=(int(rng.integers(1, 9)), 10))
        changed = [name for name in now if rng.random() < 0.3]
        if "frames" in changed or "frame_sizes" in changed:
            changed = [*{*changed, "frames", "frame_sizes"}]
        now = {**now, **{name: other[name] for name in changed}}
        feed(interpreter, {name: now[name] for name in changed})
        capacity = CAPACITIES[int(rng.integers(3))]
        interpreter.run(by_capacity[capacity])
        assert torch.equal(interpreter.read("actions"), answer(capacity, now)), turn


def test_another_capacity_makes_its_own_context_due(toy):
    by_capacity, interpreter = toy
    feed(interpreter, observation(tokens=5))
    interpreter.run(by_capacity[8])
    assert interpreter.run(by_capacity[16]) == ["context", "action"]
    assert interpreter.run(by_capacity[16]) == []


def test_versions_rise_with_writes_and_runs(toy):
    by_capacity, interpreter = toy
    assert interpreter.version("noise") == 0
    feed(interpreter, observation())
    before = interpreter.version("noise"), interpreter.version("actions")
    interpreter.run(by_capacity[8])
    interpreter.write("noise", noise(5))
    assert interpreter.version("noise") > before[0]
    assert interpreter.version("actions") > before[1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise", np.zeros((4, 8)), "is float64, not float32"),
        ("noise", np.zeros((5, 8), np.float32), r"shape \[5, 8\], not \[1, 4, 8\]"),
        ("noise", np.zeros((4, 9), np.float32), r"shape \[4, 9\]"),
        ("noise", np.zeros((4, 0), np.float32), r"shape \[4, 0\]"),
    ],
)
def test_a_wrong_input_is_refused_by_name(toy, name, value, message):
    with pytest.raises(ObservationError, match=f"input '{name}' .*{message}"):
        toy[1].write(name, value)


@pytest.mark.parametrize("name", ["memory", "actions", "nothing"])
def test_only_inputs_can_be_written(toy, name):
    with pytest.raises(PlanError, match=f"'{name}' is not an input"):
        toy[1].write(name, np.zeros(1, np.float32))


def test_a_plan_of_somebody_else_is_refused(toy):
    with pytest.raises(PlanError, match="not one of this interpreter's plans"):
        toy[1].run(plans()[8])


def faulty(run, reads=("x",), writes=("y",)):
    sizes = {"x": Role.INPUT, "y": Role.OUTPUT, "z": Role.STATE}
    listed = {n: Buffer(n, (4,), torch.float32, role) for n, role in sizes.items()}
    plan = Plan("faulty", listed, (Stage("bad", run, reads, writes),), {"x": "step"})
    arena = Arena(plan)
    return arena, Interpreter(plan, arena)


def test_reading_what_is_not_declared_is_caught():
    _, interpreter = faulty(lambda b: b["y"].copy_(b["z"]))
    with pytest.raises(PlanError, match="'bad' touches 'z' without declaring it"):
        interpreter.run()


def test_modifying_an_input_is_caught():
    _, interpreter = faulty(lambda b: b["x"][1:].add_(1))
    with pytest.raises(PlanError, match="'bad' modifies 'x', which it only reads"):
        interpreter.run()


def test_writing_through_a_closure_is_caught():
    arenas = []
    arena, interpreter = faulty(lambda b: arenas[0].tensors["z"].mul_(1))  # the same value: only the counter tells
    arenas.append(arena)
    with pytest.raises(PlanError, match="'bad' writes 'z' without declaring it"):
        interpreter.run()


def test_writing_through_a_pointer_is_caught():
    arenas = []
    arena, interpreter = faulty(lambda b: np.copyto(arenas[0].regions["state"].numpy(), 7))  # no counter tells
    arenas.append(arena)
    with pytest.raises(PlanError, match="'bad' writes 'z' without declaring it"):
        interpreter.run()


def test_resizing_a_buffer_is_caught():
    def grow(b):
        b["y"].resize_(3)

    _, interpreter = faulty(grow)
    with pytest.raises(PlanError, match="'bad' moves or resizes 'y'"):
        interpreter.run()


def test_a_stage_may_use_what_it_declares_to_write_as_room_to_work():
    def work(b):
        b["y"].copy_(b["x"]).mul_(2)
        b["y"].add_(b["y"].clone())

    _, interpreter = faulty(work)
    interpreter.write("x", np.arange(4, dtype=np.float32))
    assert interpreter.run() == ["bad"]
    assert interpreter.read("y").tolist() == [0, 4, 8, 12]


def test_a_stage_that_fails_is_due_again():
    calls = []

    def fail_once(b):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no luck")
        b["y"].copy_(b["x"])

    _, interpreter = faulty(fail_once)
    interpreter.write("x", np.zeros(4, np.float32))
    assert interpreter.run() == ["bad"]
    interpreter.write("x", np.ones(4, np.float32))
    with pytest.raises(ValueError, match="no luck"):
        interpreter.run()
    assert interpreter.run() == ["bad"]
    assert interpreter.read("y").tolist() == [1, 1, 1, 1]
