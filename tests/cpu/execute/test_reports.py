"""What users of other stacks reported, as tests: stale chunks, skipped starts, wrong anchors, lost order, seams."""

from typing import Any

import numpy as np
import pytest
from toy_checkpoint import ROOT, Sizes, lerobot, normalized, observation

from bench.seams import Point, Ramp, table
from innerloop.contract import ObservationError, Previous
from innerloop.execute import MODES, Executor, Mode
from innerloop.process import Processor, flow_processor
from innerloop.simulation import episode
from innerloop.simulation.episode import Latency

JOINTS = ["pan", "lift", "elbow", "flex", "roll", "tilt", "gripper"]


def ramp(start: float = 0.0, horizon: int = 50) -> np.ndarray:
    """Moves by one a step."""
    return (start + np.arange(horizon, dtype=np.float32))[:, None]


def processor(relative: bool) -> Processor:
    """Of a checkpoint whose joints have names; all but the gripper are relative if any."""
    toy = lerobot("pi0")
    toy.step("relative_actions_processor").config.update(enabled=relative, action_names=JOINTS)
    toy.step("absolute_actions_processor").config.update(enabled=relative)
    toy.config.update(use_relative_actions=relative, action_feature_names=JOINTS)
    return flow_processor(Sizes("pi0"), toy)


def played(executor: Executor, steps: int) -> list[float]:
    return [float(action[0]) for action in (executor.next() for _ in range(steps)) if action is not None]


@pytest.mark.parametrize("mode", MODES)
def test_a_relative_chunk_is_not_anchored_again(mode: Mode) -> None:
    """lerobot#4580: offsets of one belong to the state that was observed, whatever the state is when they are executed."""
    absolute, relative = processor(False), processor(True)
    seen, later = observation(), observation()
    later["state"] = seen["state"] + 1
    offsets = absolute.finish(normalized(Sizes()), absolute.prepare(seen).context)
    context = relative.prepare(seen).context
    executor = Executor(30, mode, execute=8, blend=0)
    ticket = executor.ticket()
    relative.prepare(later)  # the robot has moved on before the chunk is decoded
    executor.answer(relative.finish(normalized(Sizes()), context), ticket)
    for offset in offsets[:8]:
        anchor = np.where([name != "gripper" for name in JOINTS], seen["state"][:7], 0)
        np.testing.assert_allclose(executor.next(), offset + anchor, atol=1e-5)


def test_a_continued_relative_chunk_is_the_same_motion_seen_from_the_new_state() -> None:
    """lerobot#2970: what is left is absolute; it is made relative to the state that the new chunk is made for."""
    relative = processor(True)
    first, later = observation(), observation()
    later["state"] = first["state"] + 0.25
    old = relative.finish(normalized(Sizes()), relative.prepare(first).context)
    there = relative.prepare(later).context
    given = relative.guidance(Previous(old[3:], delay=2), there)
    again = np.zeros((10, 32), np.float32)
    again[:7, :7] = given["previous"][:7, :7]
    np.testing.assert_allclose(relative.finish(again, there)[:7], old[3:], atol=1e-5)
    assert given["guidance"][:3].tolist() == [1.0, 1.0, pytest.approx(5 / 6)]


def test_a_delay_beyond_the_chunk_is_an_error_that_says_what_to_do() -> None:
    """lerobot#4580: 24 steps of inference against a horizon of 10."""
    one = processor(False)
    context = one.prepare(observation()).context
    with pytest.raises(ObservationError, match="delay is 24 steps, but a chunk has 10.*Execute synchronously"):
        one.guidance(Previous(np.zeros((4, 7), np.float32), delay=24), context)
    executor = Executor(30, "realtime", execute=4)
    executor.answer(ramp(horizon=10), executor.ticket())
    executor.delay.measure(24 / 30)
    played(executor, 4)
    assert (executor.delay.steps, executor.ticket().delay) == (24, 5)  # of six that are left


def test_every_path_gives_each_joint_its_own_value() -> None:
    """lerobot#4122: the real-time path had the joints in another order than the synchronous one."""
    one, seen = processor(True), observation()
    shuffled = dict(reversed([(key, seen[key]) for key in seen]))
    assert one.describe()["action"]["names"] == JOINTS
    maps = []
    for mode in MODES:
        executor = Executor(30, mode, execute=8)
        for _ in range(2):
            ticket = executor.ticket()
            executor.answer(one.finish(normalized(Sizes()), one.prepare(shuffled).context), ticket)
        maps.append(dict(zip(JOINTS, executor.next(), strict=True)))  # type: ignore[arg-type]
    expected = one.finish(normalized(Sizes()), one.prepare(seen).context)[0]
    for found in maps:
        assert found == pytest.approx(dict(zip(JOINTS, expected, strict=True)), abs=1e-6)
    context = one.prepare(seen).context
    back = one.guidance(Previous(one.finish(normalized(Sizes()), context)), context)["previous"]
    np.testing.assert_allclose(back[:, :7], normalized(Sizes())[:, :7], atol=1e-5)


def test_observations_that_look_alike_are_decided_on() -> None:
    """lerobot#1557: with a constant state a chunk is asked for at 25 of 50 left each time, and the queue never empties."""
    executor, left, flight = Executor(30, "asynchronous", execute=25), [], None
    executor.answer(ramp(), executor.ticket(), 0.35)
    for tick in range(300):
        if flight is not None and flight[0] == tick:
            executor.answer(ramp(), flight[1], 0.35)
            flight = None
        if flight is None and executor.due():
            left.append(len(executor))
            flight = (tick + 11, executor.ticket())  # 0.35 s at 30 Hz
        assert executor.next() is not None
    assert left[2:] == [25] * len(left[2:])  # the first two calls only tell how long one takes
    assert len(left) >= 12


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_of_the_last_episode_is_discarded_in_every_mode(mode: Mode) -> None:
    """lerobot#1116: the first action of an episode comes from an observation of it."""
    executor = Executor(30, mode, execute=4)
    executor.answer(ramp(1000), executor.ticket())
    played(executor, 4)
    late = executor.ticket()
    executor.reset()
    assert executor.due()
    assert executor.ticket().continues is None
    assert not executor.answer(ramp(2000), late)
    assert executor.answer(ramp(0), executor.ticket())
    assert played(executor, 1) == [0.0]


@pytest.mark.parametrize("mode", MODES)
def test_after_a_slow_first_call_execution_starts_at_the_first_action(mode: Mode) -> None:
    """lerobot#4223: 0.7 s at 30 Hz skipped 21 actions while the arm stood still."""
    executor = Executor(30, mode, execute=8)
    ticket = executor.ticket()
    assert played(executor, 21) == []
    executor.answer(ramp(), ticket, 0.7)
    assert executor.delay.steps == 0  # it is not counted either
    assert played(executor, 3) == [0.0, 1.0, 2.0]


def test_one_spike_is_forgotten() -> None:
    """lerobot#2541: a running maximum never forgot it."""
    executor = Executor(30, "realtime")
    executor.answer(ramp(), executor.ticket(), 3.0)  # warm-up
    steps = []
    for seconds in [0.7, *[0.3] * 100]:
        executor.answer(ramp(), executor.ticket(), seconds)
        steps.append(executor.delay.steps)
    assert steps[0] == 21
    assert steps[20] <= 10
    assert steps[-1] == 9


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_that_agrees_with_itself_has_no_seam(mode: Mode) -> None:
    """lingbot-vla#38: six steps of delay; the largest step at a change is at most 1.5 times the largest inside."""

    def infer(seen: dict[str, Any], **_: Any) -> Any:
        return Ramp().infer(seen, seed=0)

    point: Any = Point()
    executor = episode.executor(mode, 8)
    outcome = episode.run(point, infer, executor, 0, Latency(150))
    assert len(executor.joins) > 5
    assert outcome.seam is not None
    assert outcome.seam <= 1.5
    assert point.largest == pytest.approx(1.0, abs=1e-3)


def test_the_steps_of_the_delay_are_those_of_the_old_chunk() -> None:
    """lerobot#2281: five steps of delay, whatever the new chunk says."""
    executor = Executor(10, "realtime", execute=10)
    executor.delay.measure(0.5)
    executor.answer(ramp(), executor.ticket())
    before = played(executor, 10)
    ticket = executor.ticket()
    meanwhile = played(executor, ticket.delay)
    executor.answer(ramp(500), ticket)
    assert (before[-1], ticket.delay, meanwhile) == (9.0, 5, [10.0, 11.0, 12.0, 13.0, 14.0])
    assert played(executor, 1) == [505.0]


def test_the_documents_table_of_seams_is_what_its_command_prints() -> None:
    assert table() in (ROOT / "docs" / "execution.md").read_text()
