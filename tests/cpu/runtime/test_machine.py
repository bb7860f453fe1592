import itertools
import threading
import time

import numpy as np
import pytest
import torch
from toy_plan import CAMERAS, CAPACITIES, Weights, capacity_for, noise, observation, plans, stages

from innerloop.contract import Buffer, CapsuleError, ObservationError, Plan, PlanError, Role, Stage
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter
from innerloop.runtime.machine import Machine
from innerloop.runtime.session import SessionError

EVERYTHING = ("prompt", "patchify", "vision", "context", "action")


@pytest.fixture(scope="module")
def reference():
    """(capacity, inputs, seed of the weights) -> actions, by an interpreter that skips nothing."""
    made = {}

    def answer(capacity, values, seed=0):
        key = (capacity, seed)
        if key not in made:
            plan = plans(seed)[capacity]
            made[key] = Interpreter(plan, Arena(plan))
        for name, value in values.items():
            made[key].write(name, value)
        made[key].run(skip=False)
        return made[key].read("actions")[0].numpy()

    return answer


@pytest.fixture
def machine():
    made = Machine(plans())
    yield made
    made.close()


def test_a_decision_equals_the_interpreter(machine, reference):
    decision = machine.decide("a", observation(), 8)
    assert decision.stages == EVERYTHING
    assert np.array_equal(decision.outputs["actions"], reference(8, observation()))
    assert decision.timing["run"] > 0


@pytest.mark.parametrize(
    ("changed", "stages_run"),
    [
        ((), ()),
        (("noise",), ("action",)),
        (("frames",), ("patchify", "vision", "context", "action")),
        (("frame_sizes",), ("patchify", "vision", "context", "action")),
        (("tokens",), ("prompt", "context", "action")),
        (("prompt_length",), ("action",)),
    ],
)
def test_the_bytes_decide_what_runs(machine, reference, changed, stages_run):
    first, second = observation(0), {**observation(1), "frame_sizes": np.full((CAMERAS, 2), 7, np.int32)}
    second["prompt_length"] = np.array([4], np.int32)
    machine.decide("a", first, 8)
    now = {**first, **{name: second[name] for name in changed}}
    decision = machine.decide("a", now, 8)  # everything is given again, most of it unchanged
    assert decision.stages == stages_run
    assert np.array_equal(decision.outputs["actions"], reference(8, now))


def test_inputs_left_out_keep_the_sessions_last_value(machine, reference):
    for name, seed in (("a", 0), ("b", 1)):
        machine.decide(name, observation(seed), 8)
    for name, seed in (("a", 0), ("b", 1), ("a", 0)):
        decision = machine.decide(name, {"noise": noise(9)}, 8)
        assert np.array_equal(decision.outputs["actions"], reference(8, {**observation(seed), "noise": noise(9)}))


def test_after_a_switch_of_sessions_only_the_noise_is_new(machine):
    machine.decide("a", observation(0), 8)
    machine.decide("b", observation(1), 8)
    assert machine.decide("a", {"noise": noise(9)}, 8).stages == ("action",)


def test_a_value_another_session_overwrote_is_made_again(machine, reference):
    machine.decide("a", observation(0), 8)
    machine.decide("b", observation(1), 8)
    words = observation(2)["tokens"]
    decision = machine.decide("a", {"tokens": words}, 8)
    assert decision.stages == EVERYTHING  # `features` is scratch: b's vision took its place
    assert np.array_equal(decision.outputs["actions"], reference(8, {**observation(0), "tokens": words}))


def test_the_same_question_after_another_session_gets_the_same_bits(machine):
    first = machine.decide("a", observation(0), 8)
    machine.decide("b", observation(1), 8)
    again = machine.decide("a", observation(0), 8)
    assert again.stages == ("action",)
    assert np.array_equal(first.outputs["actions"], again.outputs["actions"])


def test_sessions_capsules_and_capacities_in_any_order_give_the_full_answer(machine, reference):
    rng = np.random.default_rng(0)
    now, capsules = {}, []
    for turn in range(300):
        name = "abcd"[int(rng.integers(4))]
        action = rng.choice(["decide", "snapshot", "restore", "fork", "reset"], p=[0.7, 0.1, 0.1, 0.05, 0.05])
        if action == "decide" or name not in now:
            fresh = observation(turn, tokens=int(rng.integers(1, 9)), size=(int(rng.integers(1, 9)), 10))
            given = {n: v for n, v in fresh.items() if name not in now or rng.random() < 0.3}
            if {"frames", "frame_sizes"} & given.keys():
                given |= {n: fresh[n] for n in ("frames", "frame_sizes")}
            now[name] = {**now.get(name, {}), **given}
            capacity = CAPACITIES[int(rng.integers(3))]
            decision = machine.decide(name, given, capacity)
            assert np.array_equal(decision.outputs["actions"], reference(capacity, now[name])), turn
        elif action == "snapshot":
            capsules.append((machine.session(name).snapshot(rng.choice(["device", "host"])), now[name]))
        elif action == "restore" and capsules:
            capsule, now[name] = capsules[int(rng.integers(len(capsules)))]
            machine.session(name).restore(capsule)
        elif action == "fork":
            twin = "abcd"[int(rng.integers(4))]
            if twin != name:
                machine.session(twin).end()
                machine.session(name).fork(twin)
                now[twin] = now[name]
        elif action == "reset":
            machine.session(name).reset()
            del now[name]
    assert len(capsules) > 10


def test_many_prompts_in_random_order_capture_nothing_and_equal_a_fresh_run(machine, reference):
    lengths = np.random.default_rng(0).permutation(np.arange(1, 33)).tolist()
    captured = machine.captures
    for tokens in lengths:
        values = observation(tokens, tokens=tokens)
        decision = machine.decide("a", values, capacity_for(tokens))
        assert np.array_equal(decision.outputs["actions"], reference(capacity_for(tokens), values)), tokens
    assert machine.captures == captured


def test_whoever_waits_for_the_device_every_caller_gets_the_answer_to_its_own_question(machine, monkeypatch):
    expected = [machine.decide("s", observation(seed), 8).outputs["actions"] for seed in range(6)]
    pauses = itertools.cycle([0.0, 0.002, 0.0005])
    monkeypatch.setattr(machine._windows, "wait", lambda: time.sleep(next(pauses)))
    wrong = []

    def ask(who):
        for turn in range(20):
            answer = machine.decide(f"s{who % 2}", observation((who + turn) % 6), 8).outputs["actions"]
            wrong.extend([] if np.array_equal(answer, expected[(who + turn) % 6]) else [(who, turn)])

    callers = [threading.Thread(target=ask, args=(who,)) for who in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_calls_from_many_threads_get_equal_bits(machine):
    expected = machine.decide("a", observation(0), 8).outputs["actions"]
    answers = {}

    def ask(who):
        for turn in range(5):
            machine.decide(f"other {who}", observation(who + turn + 1), 8)
            answers[who, turn] = machine.decide("a", observation(0), 8).outputs["actions"]

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 100
    assert all(np.array_equal(expected, answer) for answer in answers.values())


def test_two_machines_do_not_disturb_each_other(machine, reference):
    with_others = Machine(plans(seed=5))
    for turn in range(5):
        mine = machine.decide("a", observation(turn), 8)
        theirs = with_others.decide("a", observation(turn), 8)
        assert np.array_equal(mine.outputs["actions"], reference(8, observation(turn)))
        assert np.array_equal(theirs.outputs["actions"], reference(8, observation(turn), seed=5))
    with_others.close()


def test_a_batch_takes_one_mapping_a_robot(reference):
    machine = Machine(plans(batch=2))
    rows = [observation(0), observation(1, size=(5, 3))]
    rows = [{**row, "frames": list(row["frames"])} for row in rows]  # robots may send frames of different sizes
    actions = machine.decide("pair", rows, 8).outputs["actions"]
    assert actions.shape[0] == 2
    for row, values in zip(actions, (observation(0), observation(1, size=(5, 3))), strict=True):
        np.testing.assert_allclose(row, reference(8, values), rtol=0, atol=1e-5)  # other products at another batch
    machine.close()


def test_rows_of_a_batch_must_agree(machine):
    with pytest.raises(ObservationError, match="same inputs"):
        machine.decide("a", [observation(), {"noise": noise()}], 8)


def test_frames_may_be_rows_of_different_lengths(machine, reference):
    values = observation(0)
    sizes = np.array([[8, 10], [2, 3]], np.int32)
    full = np.zeros((CAMERAS, 240), np.uint8)
    full[0], full[1, :18] = values["frames"][0], values["frames"][1, :18]
    ragged = {**values, "frame_sizes": sizes, "frames": [full[0], full[1, :18]]}
    decision = machine.decide("a", ragged, 8)
    assert np.array_equal(decision.outputs["actions"], reference(8, {**values, "frame_sizes": sizes, "frames": full}))
    again = {**ragged, "frames": [full[0].copy(), full[1, :18].copy()], "noise": noise(3)}
    assert machine.decide("a", again, 8).stages == ("action",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noise": np.zeros((4, 9), np.float32)}, "input 'noise' has shape"),
        ({"noise": np.zeros((4, 8))}, "'noise' is float64, not float32"),
        ({"speed": np.zeros(1)}, "'speed' is no input of this policy; its inputs are"),
        ({"frames": [np.zeros(3, np.uint8)]}, "was given 1 rows; it has 2"),
        ({"frames": [np.zeros((1, 3), np.uint8)] * 2}, r"a row of input 'frames' has shape \[1, 3\]"),
    ],
)
def test_a_bad_input_is_refused_and_changes_nothing(machine, values, message):
    machine.decide("a", observation(), 8)
    with pytest.raises(ObservationError, match=message):
        machine.decide("a", {"tokens": observation(1)["tokens"], **values}, 8)
    assert machine.decide("a", {}, 8).stages == ()


def test_a_first_decision_needs_every_input(machine, reference):
    values = observation()
    missing = {name: value for name, value in values.items() if name != "tokens"}
    machine.decide("b", observation(1), 8)
    with pytest.raises(ObservationError, match="input 'tokens' was never given"):
        machine.decide("a", missing, 8)
    for _ in range(2):
        answer = machine.decide("b", {"noise": noise(2)}, 8).outputs["actions"]
        assert np.array_equal(answer, reference(8, {**observation(1), "noise": noise(2)}))
        answer = machine.decide("a", {"tokens": values["tokens"]}, 8).outputs["actions"]
        assert np.array_equal(answer, reference(8, values))


def test_an_unknown_capacity_is_refused(machine):
    with pytest.raises(ObservationError, match=r"capacity 9; there are \[8, 16, 32\]"):
        machine.decide("a", observation(), 9)


def test_a_machine_needs_a_plan():
    with pytest.raises(PlanError, match="at least one plan"):
        Machine({})


def test_prepared_stages_run_once_at_load_and_when_weights_change(reference):
    weights = Weights()
    shared, context, last = stages(weights)
    calls = []
    tables = Stage("tables", lambda b: calls.append(shared[0].run(b)), (), ("table",), prepare=True)
    plan = Plan("toy", plans()[8].buffers, (tables, *shared[1:], context(8), last), plans()[8].ticks, "one")
    machine = Machine({8: plan})
    for turn in range(3):
        machine.decide("a", observation(turn), 8)
    assert len(calls) == 1
    other = Weights(seed=5)

    def swap():
        for name, value in vars(weights).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(other, name))

    machine.decide("a", observation(0), 8)
    machine.weights_changed(swap)
    assert len(calls) == 2
    assert machine.weights_version == 1
    decision = machine.decide("a", {}, 8)
    assert decision.stages == EVERYTHING
    assert np.array_equal(decision.outputs["actions"], reference(8, observation(0), seed=5))


def test_a_swap_that_fails_leaves_nothing_computed_from_the_old_weights(machine):
    machine.decide("a", observation(), 8)
    capsule = machine.session("a").snapshot()

    def swap():
        raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        machine.weights_changed(swap, "new weights")
    assert machine.decide("a", {}, 8).stages == EVERYTHING
    with pytest.raises(CapsuleError, match="other weights"):
        machine.session("a").restore(capsule)


def test_no_decision_sees_half_of_a_swap(reference):
    weights, sets = Weights(), (Weights(0), Weights(5))
    shared, context, last = stages(weights)
    machine = Machine({8: Plan("toy", plans()[8].buffers, (*shared, context(8), last), plans()[8].ticks, "one")})
    expected = [reference(8, observation(0), seed) for seed in (0, 5)]
    wrong = []

    def load(which):
        for name, value in vars(weights).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(sets[which], name))

    def ask():
        for _ in range(20):
            answer = machine.decide(threading.current_thread().name, observation(0), 8).outputs["actions"]
            wrong.extend([answer] if not any(np.array_equal(answer, e) for e in expected) else [])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        machine.weights_changed(lambda turn=turn: load((turn + 1) % 2))
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_failing_stage_reaches_the_caller_and_leaves_the_session_usable():
    fail = [True]

    def run(b):
        if fail[0]:
            raise ValueError("no luck")
        b["y"].copy_(b["x"])

    listed = {"x": Buffer("x", (1, 2), torch.float32, Role.INPUT), "y": Buffer("y", (1, 2), torch.float32, Role.OUTPUT)}
    machine = Machine({1: Plan("frail", listed, (Stage("s", run, ("x",), ("y",)),), {"x": "step"})})
    with pytest.raises(ValueError, match="no luck"):
        machine.decide("a", {"x": np.ones(2, np.float32)}, 1)
    fail[0] = False
    decision = machine.decide("a", {}, 1)
    assert decision.stages == ("s",)
    assert decision.outputs["y"].tolist() == [1, 1]


def test_a_window_that_the_host_cannot_read_is_refused():
    listed = {"x": Buffer("x", (2,), torch.bfloat16, Role.INPUT)}
    with pytest.raises(PlanError, match="window 'x' is"):
        Machine({1: Plan("p", listed, (), {"x": "step"})})


def test_a_profiled_decision_names_the_time_of_each_program(machine):
    machine.decide("a", observation(0), 8)
    timing = machine.decide("a", observation(1), 8, profile=True).timing
    assert set(timing) == {"run", "copy_in", "prompt", "patchify+vision", "toy-8/context", "action", "reading"}
    assert all(value > 0 for value in timing.values())
    assert set(machine.decide("a", {"noise": noise(3)}, 8, profile=True).timing) == {
        "run",
        "copy_in",
        "action",
        "reading",
    }


def test_a_closed_machine_says_so(machine):
    session = machine.session("a")
    machine.close()
    machine.close()
    with pytest.raises(SessionError, match="closed"):
        machine.decide("a", observation(), 8)
    with pytest.raises(SessionError, match="ended"):
        session.reset()


def test_the_account_names_every_region(machine):
    machine.decide("a", observation(0), 8)
    machine.decide("b", observation(1), 8)
    account = machine.account()
    assert account["saved_host_used"] == account["state"]  # a's copy; b's state lies in the arena
    assert account["total"] > account["state"] > 0
