"""The worker alone: order, deadlines, batches, neighbours, episodes, vanished clients."""

import threading
import time

import numpy as np
import pytest
from serving_fakes import BatchingPolicy, FakePolicy, expected, observation, wait_until

from innerloop.contract import Previous
from innerloop.contract.errors import InnerloopError
from innerloop.process.action import ActionLimits
from innerloop.serve.metrics import Metrics
from innerloop.serve.protocol import Request
from innerloop.serve.worker import State, Worker


class Asking:
    """A worker and the answers it gave, by request number and in order."""

    def __init__(self, policy, **options):
        self.policy = policy
        self.worker = Worker(lambda: policy, Metrics(), **options)
        self.replies, self.order, self.changed = {}, [], threading.Condition()
        self.worker.start()
        wait_until(lambda: self.worker.state is State.READY)

    def ask(self, number, session="a", client=None, prompt="go", **options):
        def deliver(reply):
            with self.changed:
                assert number not in self.replies, "a request was answered twice"
                self.replies[number] = reply
                self.order.append(number)
                self.changed.notify_all()

        self.worker.submit(Request(observation(number, prompt=prompt), session, **options), client or session, deliver)

    def wait(self, count, seconds=10):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.replies) >= count, seconds), self.order
        return {number: reply.code for number, reply in self.replies.items()}


@pytest.fixture
def asking():
    made = []

    def make(policy, **options):
        made.append(Asking(policy, **options))
        return made[-1]

    yield make
    for one in made:
        one.worker.drain()
        assert one.worker.join(10)


def test_all_calls_come_from_one_thread(asking):
    one = asking(FakePolicy())
    callers = [threading.Thread(target=one.ask, args=(n, f"robot-{n}")) for n in range(20)]
    for caller in callers:
        caller.start()
    one.wait(20)
    for caller in callers:
        caller.join()
    assert len(one.policy.threads) == 1
    for number in range(20):
        np.testing.assert_array_equal(one.replies[number].chunk.actions, expected(observation(number, prompt="go")))


def test_the_latest_observation_of_a_robot_wins(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    for number in range(6):
        one.ask(number)
        time.sleep(0.01)
    assert one.wait(6) == {0: "ok", 1: "superseded", 2: "superseded", 3: "superseded", 4: "superseded", 5: "ok"}
    assert one.policy.calls == 2


def test_a_request_past_its_deadline_never_runs_and_is_told_late(asking):
    one = asking(FakePolicy(delay=0.15, check=False))
    one.ask(0, "a")
    time.sleep(0.02)
    one.ask(1, "b", deadline_ms=50)
    assert one.wait(2) == {0: "ok", 1: "late"}
    assert one.policy.calls == 1
    assert "50 ms" in one.replies[1].message


def test_an_answer_that_comes_too_late_is_dropped(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    one.ask(0, deadline_ms=30)
    assert one.wait(1) == {0: "late"}
    assert one.replies[0].chunk is None
    assert one.replies[0].server_timing["infer_ms"] >= 100


def test_the_most_urgent_request_runs_first(asking):
    one = asking(FakePolicy(delay=0.08, check=False))
    one.ask(0, "a")
    time.sleep(0.02)
    one.ask(1, "b")
    one.ask(2, "c", deadline_ms=900)
    one.ask(3, "d", deadline_ms=400)
    one.wait(4)
    assert one.order == [0, 3, 2, 1]


def test_robots_that_wait_together_share_a_batch(asking):
    one = asking(BatchingPolicy(delay=0.1))
    one.policy.sizes.clear()
    one.ask(0, "a")
    time.sleep(0.03)
    for number in range(1, 7):
        one.ask(number, f"r{number}", seed=number)
    assert set(one.wait(7).values()) == {"ok"}
    assert one.policy.sizes == [6]  # the first ran alone, at once, as a plain call
    for number in range(1, 7):
        np.testing.assert_array_equal(
            one.replies[number].chunk.actions, expected(observation(number, prompt="go"), number)
        )


def test_a_batch_is_no_larger_than_its_most_urgent_request_can_bear(asking):
    one = asking(BatchingPolicy(delay=0.0))
    one.worker._seconds.update({1: 0.001, 2: 0.001, 3: 0.2, 4: 0.2, 5: 0.2, 6: 0.2})
    one.policy.delay = 0.1
    one.ask(0, "a")
    time.sleep(0.03)
    one.policy.delay = 0.0
    for number in range(1, 7):
        one.ask(number, f"r{number}", deadline_ms=150)
    one.wait(7)
    assert one.policy.sizes[0] == 2


def test_one_bad_request_never_fails_its_neighbours(asking):
    one = asking(BatchingPolicy(delay=0.05))
    one.ask(0, "a")
    time.sleep(0.02)
    for number, prompt in enumerate(("go", "crash", "go", "refuse", "nan"), start=1):
        one.ask(number, f"r{number}", prompt=prompt)
    assert one.wait(6) == {0: "ok", 1: "ok", 2: "failed", 3: "ok", 4: "observation", 5: "non_finite"}
    np.testing.assert_array_equal(one.replies[3].chunk.actions, expected(observation(3, prompt="go")))


def test_an_answer_that_cannot_be_delivered_ends_nobody_elses(asking, caplog):
    def refuse(reply):
        raise TypeError("this cannot be packed")

    one = asking(FakePolicy())
    one.worker.submit(Request(observation(1), "bad"), "bad", refuse)
    one.ask(0, "good")
    assert one.wait(1) == {0: "ok"}
    assert one.worker.state is State.READY
    assert "the answer to session 'bad' could not be delivered" in caplog.text


def test_the_work_of_a_vanished_client_is_discarded(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    one.ask(0, "a", client="gone")
    time.sleep(0.02)
    for number in range(1, 5):
        one.ask(number, f"r{number}", client="gone")
    one.worker.leave("gone")
    started = time.monotonic()
    one.ask(9, "b")
    assert one.wait(1) == {9: "ok"}
    assert time.monotonic() - started < 0.35  # at most the call under way, then its own
    assert one.policy.calls == 2
    wait_until(lambda: [s.name for s in one.worker.sessions()] == ["b"])
    assert one.policy.open == {"b"}


def test_a_reset_makes_older_requests_and_answers_stale(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    one.ask(0, episode="first")
    time.sleep(0.02)
    one.ask(1, episode="first")
    one.worker.reset("a", "second").result(5)
    one.ask(2, episode="second")
    assert one.wait(3) == {0: "stale", 1: "stale", 2: "ok"}


def test_a_new_episode_id_resets_the_policy_and_outdates_the_old_one(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    one.ask(0, episode=1)
    time.sleep(0.02)
    one.ask(1, episode=1)
    one.ask(2, episode=2)
    assert one.wait(3) == {0: "stale", 1: "stale", 2: "ok"}
    assert one.policy.resets == ["a"]


def test_the_queue_and_the_sessions_are_bounded(asking):
    one = asking(FakePolicy(delay=0.2, check=False), capacity=3)
    for number in range(6):
        one.ask(number, f"r{number}")
        time.sleep(0.01)
    codes = one.wait(6)
    assert list(codes.values()).count("busy") == 3
    assert list(codes.values()).count("ok") == 3


def test_silent_sessions_expire(asking):
    one = asking(FakePolicy())
    one.ask(0, "a")
    one.wait(1)
    one.worker.expire(0.0)
    assert one.worker.sessions() == []
    wait_until(lambda: one.policy.open == set())


def test_a_session_that_waits_for_an_answer_does_not_expire(asking):
    one = asking(FakePolicy(delay=0.2, check=False))
    one.ask(0, "a")
    wait_until(lambda: one.policy.calls == 1)
    one.ask(1, "b")
    one.worker.expire(0.0)
    assert one.wait(2) == {0: "ok", 1: "ok"}


def test_a_client_that_keeps_renaming_its_session_makes_room_itself(asking):
    one = asking(FakePolicy(), capacity=3)
    for number, name in enumerate(("keeper", "other")):
        one.ask(number, name)
        one.wait(number + 1)
    for number in range(2, 12):
        one.ask(number, f"episode-{number}", client="renaming")
        one.wait(number + 1)
    assert set(one.wait(12).values()) == {"ok"}
    assert [session.name for session in one.worker.sessions()] == ["keeper", "other", "episode-11"]
    wait_until(lambda: one.policy.open == {"keeper", "other", "episode-11"})
    one.ask(12, "new", client="new")
    assert one.wait(13)[12] == "busy"


def test_one_slow_batch_is_forgotten_in_time(asking):
    one = asking(BatchingPolicy(delay=0.0))
    one.worker._seconds.update({2: 10.0})
    for number in range(400):
        one.ask(number, "a")
        one.wait(number + 1)
    assert one.worker._seconds[2] < 0.01


def test_limits_of_another_robot_are_refused_before_the_first_request(asking):
    limits = ActionLimits(position=np.zeros((6, 2)))
    worker = Worker(FakePolicy, Metrics(), limits=limits)
    worker.start()
    wait_until(lambda: worker.state is State.FAILED)
    assert "(6, 2)" in str(worker.failure)


def test_limits_refuse_or_clamp_before_anything_is_sent(asking):
    bounds = np.stack([np.full(7, -0.5), np.full(7, 0.5)], axis=1)
    one = asking(FakePolicy(), limits=ActionLimits(position=bounds))
    one.ask(0)
    assert one.wait(1) == {0: "limits"}
    two = asking(FakePolicy(), limits=ActionLimits(position=bounds, on_violation="clamp"))
    two.ask(0)
    assert two.wait(1) == {0: "ok"}
    assert np.abs(two.replies[0].chunk.actions).max() <= 0.5
    assert two.replies[0].violations == (np.abs(expected(observation(0, prompt="go"))) > 0.5).sum()


def test_weights_are_replaced_between_two_decisions(asking):
    one = asking(FakePolicy())
    stop, seen = threading.Event(), []

    def robot(name):
        number = 0
        while not stop.is_set():
            done = threading.Event()
            given = observation(number)
            one.worker.submit(
                Request(given, name), name, lambda r, given=given, done=done: (seen.append((given, r)), done.set())
            )
            done.wait(5)
            number += 1

    robots = [threading.Thread(target=robot, args=(f"r{n}",)) for n in range(4)]
    for thread in robots:
        thread.start()
    time.sleep(0.1)
    assert one.worker.replace(lambda: FakePolicy(bias=100.0)).result(5) == 1
    time.sleep(0.1)
    stop.set()
    for thread in robots:
        thread.join(5)
    assert {reply.weights_version for _, reply in seen} == {0, 1}
    for given, reply in seen:
        np.testing.assert_array_equal(reply.chunk.actions, expected(given, bias=100.0 * reply.weights_version))
        assert reply.chunk.receipt.weights_version == reply.weights_version


def test_weights_that_fail_their_check_are_not_taken(asking):
    class Random(FakePolicy):
        def infer(self, *arguments, **options):
            self.bias += 1
            return super().infer(*arguments, **options)

    one = asking(FakePolicy())
    with pytest.raises(InnerloopError, match="reproducible"):
        one.worker.replace(Random).result(5)
    one.ask(0)
    one.wait(1)
    assert one.replies[0].weights_version == 0
    np.testing.assert_array_equal(one.replies[0].chunk.actions, expected(observation(0, prompt="go")))


def test_drain_finishes_what_was_accepted_and_refuses_the_rest(asking):
    one = asking(FakePolicy(delay=0.1, check=False))
    one.ask(0, "a")
    one.ask(1, "b")
    done = one.worker.drain()
    one.ask(2, "c")
    done.result(5)
    assert one.wait(3) == {0: "ok", 1: "ok", 2: "draining"}
    assert one.worker.state is State.STOPPED


def test_a_policy_that_cannot_be_loaded_is_reported_to_who_waits():
    def load():
        time.sleep(0.1)
        raise InnerloopError("the checkpoint has no statistics")

    worker, replies = Worker(load, Metrics()), []
    worker.start()
    worker.submit(Request(observation(0), "a"), "a", replies.append)
    wait_until(lambda: len(replies) == 1)
    assert (replies[0].code, worker.state, str(worker.failure)) == (
        "failed",
        State.FAILED,
        "the checkpoint has no statistics",
    )


def test_a_previous_chunk_reaches_the_policy_in_a_batch_too(asking):
    class Continuing(BatchingPolicy):
        def infer(self, observation, *, previous=None, **options):
            self.given.append(previous)
            return super().infer(observation, **options)

    policy = Continuing(delay=0.05)
    policy.given = []
    one, previous = asking(policy), Previous(np.zeros((4, 7), np.float32), 2, 5)
    policy.given.clear()
    policy.sizes.clear()
    one.ask(0, "a")
    time.sleep(0.02)
    one.ask(1, "b", previous=previous)
    one.ask(2, "c")
    assert one.wait(3) == {0: "ok", 1: "ok", 2: "ok"}
    assert policy.given == [None, previous, None]
    assert policy.sizes == [2]


def test_eight_robots_in_closed_loops_get_three_times_the_throughput_of_one(asking):
    def decisions(one, robots):
        end = time.monotonic() + 0.8
        counts = [0] * robots

        def loop(robot):
            while time.monotonic() < end:
                done = threading.Event()
                one.worker.submit(
                    Request(observation(robot, size=8), f"r{robot}"), f"r{robot}", lambda _, done=done: done.set()
                )
                assert done.wait(5)
                counts[robot] += 1

        threads = [threading.Thread(target=loop, args=(robot,)) for robot in range(robots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    one = asking(BatchingPolicy(delay=0.03))
    assert decisions(one, 8) >= 3 * decisions(one, 1)
