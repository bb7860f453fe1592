"""Episodes in simulated time: latency in ticks, what each mode executes, nothing across episodes."""

from typing import Any

import numpy as np
import pytest
from toys import Counter, Numbered

from innerloop.execute import MODES, Executor
from innerloop.simulation import episode
from innerloop.simulation.episode import LIMIT, Latency, Outcome


class Diary:
    """What was executed at each tick, as (decision, row) or None."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int] | None] = []

    def world(self) -> Any:
        diary, base = self, Counter()
        step = base.step

        def noted(action: np.ndarray) -> bool:
            diary.rows.append((int(action[0]), int(action[1])) if action[3] else None)
            return step(action)

        base.step = noted  # type: ignore[method-assign]
        return base


def ran(mode: Any, delay_ms: float, execute: int | None = 8, blend: int = 0) -> tuple[list[Any], Numbered, Outcome]:
    """One episode without blending, whose means of numbers could not be read as numbers."""
    diary, policy = Diary(), Numbered()
    executor = Executor(episode.RATE, mode, execute, blend)
    return diary.rows, policy, episode.run(diary.world(), policy.infer, executor, 0, Latency(delay_ms))


@pytest.mark.parametrize(
    ("milliseconds", "ticks"), [(0.0, 0), (0.1, 1), (24.9, 1), (25.0, 1), (25.1, 2), (100.0, 4), (101.0, 5)]
)
def test_latency_is_ticks_rounded_up(milliseconds: float, ticks: int) -> None:
    rows, _, _ = ran("synchronous", milliseconds)
    assert rows[:ticks] == [None] * ticks
    assert rows[ticks : ticks + 8] == [(0, row) for row in range(8)]


def test_synchronous_stands_still_while_it_waits() -> None:
    rows, policy, outcome = ran("synchronous", 100)
    turn = [None] * 4 + [(0, row) for row in range(8)]
    assert rows[:12] == turn
    assert rows[12:24] == [None] * 4 + [(1, row) for row in range(8)]
    assert [one.tick for one in policy.asked[:3]] == [0, 12, 24]
    assert outcome.waited == sum(row is None for row in rows) == 4 * outcome.decisions
    assert outcome.ticks == LIMIT == len(rows)


@pytest.mark.parametrize("mode", ["asynchronous", "realtime", "prefix"])
def test_the_old_chunk_goes_on_and_the_new_one_is_entered_where_the_robot_is(mode: Any) -> None:
    rows, policy, outcome = ran(mode, 100)
    assert outcome.waited == 4  # before the first chunk, and never again
    assert rows[:4] == [None] * 4
    assert [one.tick for one in policy.asked[:2]] == [0, 4]  # no latency is known yet: it asks at once
    assert rows[4:8] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert rows[8] == (1, 4)  # made for tick 4, arrived at tick 8
    assert [one.tick for one in policy.asked[2:5]] == [12, 20, 28]  # then every 8 actions
    assert rows[15:17] == [(1, 11), (2, 4)]


def test_only_the_modes_that_continue_a_chunk_hand_back_what_is_left() -> None:
    for mode in MODES:
        _, policy, _ = ran(mode, 100)
        given = [one.previous for one in policy.asked]
        assert given[0] is None
        schedules = {one.schedule for one in given if one is not None}
        assert schedules == {"realtime": {"LINEAR"}, "prefix": {"PREFIX"}}.get(mode, set())
    _, policy, _ = ran("realtime", 100)
    third = policy.asked[3].previous
    assert third.delay == 4
    assert third.actions[0].tolist() == [2.0, 8.0, 20.0, 1.0]  # decision 2, made at tick 12, in its ninth row
    assert len(third.actions) == 32 - 8


def test_an_ensemble_means_over_all_that_foresaw_the_tick() -> None:
    seen = []
    world = Counter()
    step = world.step
    world.step = lambda action: seen.append(action) or step(action)  # type: ignore[method-assign,func-returns-value]
    episode.run(world, Numbered().infer, Executor(episode.RATE, "ensemble", 1), 0)  # type: ignore[arg-type]
    weights = np.exp(-0.01 * np.arange(5))
    assert seen[4][0] == pytest.approx(weights @ np.arange(5) / weights.sum(), rel=1e-5)
    assert seen[4][2] == pytest.approx(4.0)  # all agree on which tick it is


def test_jitter_is_drawn_from_the_episodes_seed() -> None:
    def waited(seed: int) -> tuple[int, list[int]]:
        policy = Numbered()
        executor = Executor(episode.RATE, "synchronous", 8)
        world: Any = Counter()
        outcome = episode.run(world, policy.infer, executor, seed, Latency(50, 200))
        return outcome.waited, [one.seed for one in policy.asked[:3]]

    assert waited(3) == waited(3)
    assert waited(3)[0] != waited(4)[0]
    assert waited(3)[1] == [3000, 3001, 3002]
    draws = [1e3 * Latency(50, 200).draw(np.random.default_rng(seed)) for seed in range(200)]
    assert 50 <= min(draws) < 80 < 220 < max(draws) <= 250


def test_a_chunk_under_way_when_an_episode_ends_is_not_executed_in_the_next() -> None:
    world: Any = Counter(length=5)
    executor, policy = Executor(episode.RATE, "asynchronous", 2, blend=0), Numbered()
    first = episode.run(world, policy.infer, executor, 0, Latency(75))
    assert first.success
    asked = len(policy.asked)
    assert first.decisions == asked == 3  # ticks 0, 3, 6: the third was still under way at tick 8
    world.length = 10_000
    diary = Diary()
    episode.run(diary.world(), policy.infer, executor, 1, Latency(75))
    assert diary.rows[:3] == [None] * 3
    assert diary.rows[3] == (asked, 0)


def test_success_ends_an_episode_and_is_counted_in_ticks() -> None:
    world: Any = Counter(length=30)
    outcome = episode.run(world, Numbered().infer, episode.executor("synchronous", 16), 7, Latency(50))
    assert (outcome.success, outcome.ticks, outcome.decisions, outcome.waited) == (True, 34, 2, 4)
    assert (world.seen, world.held) == ([7], 4)


def test_whoever_watches_sees_every_tick() -> None:
    world, seen = Counter(length=9), []
    episode.run(world, Numbered().infer, episode.executor("synchronous", 4), 0, watch=lambda _, tick: seen.append(tick))  # type: ignore[arg-type]
    assert seen == list(range(1, 10))
