"""The gRPC service with raw messages: what a robot client can send as pickle, and what an enemy would.

LeRobot's own client drives the same service in tests/peers.
"""

import pickle
import struct
import sys
import threading
import time
import types
from dataclasses import dataclass, field, make_dataclass

import grpc
import numpy as np
import pytest
from serving_fakes import FakePolicy, Running, expected, observation, wait_until

from innerloop.client.packing import MessageError
from innerloop.serve.pickles import TimedObservation, read_pickle, write_timed_actions

HELPERS = "lerobot.async_inference.helpers"
METHODS = ("Ready", "SendPolicyInstructions", "SendObservations", "GetActions")


@pytest.fixture
def helpers(monkeypatch):
    """A module under LeRobot's name with dataclasses like LeRobot's, so that pickles name them."""
    module = types.ModuleType(HELPERS)
    for name, fields in {
        "TimedObservation": [
            ("timestamp", float),
            ("timestep", int),
            ("observation", dict),
            ("must_go", bool, field(default=False)),
        ],
        "TimedAction": [("timestamp", float), ("timestep", int), ("action", object)],
        "RemotePolicyConfig": [
            *(
                ("policy_type", str),
                ("pretrained_name_or_path", str),
                ("lerobot_features", dict),
                ("actions_per_chunk", int),
            ),
            *(("device", str, field(default="cpu")), ("rename_map", dict, field(default_factory=dict))),
        ],
    }.items():
        made = make_dataclass(name, fields)
        made.__module__ = HELPERS
        setattr(module, name, made)
    for name in ("lerobot", "lerobot.async_inference"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, HELPERS, module)
    return module


FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (8,), "names": [f"j{n}" for n in range(8)]},
    "observation.images.base": {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]},
}


def raw(seen):
    """An observation as a LeRobot robot gives it, its joints in no particular order."""
    joints = {f"j{n}": float(seen["state"][n]) for n in (3, 1, 2, 0, 7, 6, 5, 4)}
    return {**seen["images"], **joints, "task": seen["prompt"]}


def framed(number, data):
    """A protobuf message of one bytes field."""
    size, length = len(data), b""
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def parts(data, size=20_000):
    """A stream of Observation messages, as send_bytes_in_chunks cuts it."""
    cuts = range(0, len(data), size)
    for index, start in enumerate(cuts):
        state = 3 if index == len(cuts) - 1 else (1 if index == 0 else 2)
        yield bytes([8, state]) + framed(2, data[start : start + size])


class Robot:
    """The four calls on a connection of its own."""

    def __init__(self, port, token=None, trusted=None):
        options = [("grpc.use_local_subchannel_pool", 1)]
        if trusted is None:
            self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
        else:
            self.channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(trusted), options)
        metadata = [("authorization", f"Bearer {token}")] if token else None
        for name in METHODS:
            kind = self.channel.stream_unary if name == "SendObservations" else self.channel.unary_unary
            method = kind(f"/transport.AsyncInference/{name}")
            setattr(self, name, lambda message, method=method, **o: method(message, timeout=10, metadata=metadata, **o))

    def start(self, helpers, policy_type="fake", chunk=10):
        self.Ready(b"")
        setup = helpers.RemotePolicyConfig(policy_type, "some/model", FEATURES, chunk)
        self.SendPolicyInstructions(framed(1, pickle.dumps(setup)))
        return self

    def observe(self, helpers, seen, timestep=0):
        timed = helpers.TimedObservation(1000.0, timestep, raw(seen), True)
        self.SendObservations(parts(pickle.dumps(timed)))


@pytest.fixture
def robots():
    made = []

    def make(server, **options):
        made.append(Robot(server.server.port, **options))
        return made[-1]

    yield make
    for robot in made:
        robot.channel.close()


def actions_in(answer, helpers, monkeypatch):
    """The TimedActions of an Actions message, read as the stock client reads them."""
    data = answer[answer.index(b"\x80\x02") :]
    assert answer == framed(1, data)
    return pickle.loads(data)


def test_observations_become_actions(helpers, robots, monkeypatch):
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready()).start(helpers, chunk=6)
        for number in range(3):
            seen = observation(number)
            robot.observe(helpers, seen, timestep=10 * number)
            timed = actions_in(robot.GetActions(b""), helpers, monkeypatch)
            np.testing.assert_array_equal(np.stack([a.action.numpy() for a in timed]), expected(seen)[:6])
            assert [a.timestep for a in timed] == list(range(10 * number, 10 * number + 6))
            assert [a.timestamp for a in timed] == [1000.0 + n * (1 / 30.0) for n in range(6)]


def test_the_newest_of_several_observations_is_used_and_none_is_filtered(helpers, robots, monkeypatch):
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready()).start(helpers)
        same = observation(1)
        for number in range(4):
            seen = {**same, "images": observation(number)["images"]}  # the joints stand still, the picture changes
            robot.observe(helpers, seen)
        timed = actions_in(robot.GetActions(b""), helpers, monkeypatch)
        np.testing.assert_array_equal(timed[0].action.numpy(), expected(seen)[0])
        for _ in range(3):
            robot.observe(helpers, same)
            assert len(robot.GetActions(b"")) > 100


def test_without_an_observation_the_answer_is_empty(helpers, robots, monkeypatch):
    monkeypatch.setattr("innerloop.serve.grpc.WAIT_SECONDS", 0.1)
    with Running(FakePolicy(), protocol="lerobot") as server:
        assert robots(server.ready()).start(helpers).GetActions(b"") == b""


def test_a_robot_without_a_task_is_said_once(helpers, robots, caplog):
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready()).start(helpers)
        for prompt in ("push", "", ""):
            robot.observe(helpers, observation(1, prompt=prompt))
            assert len(robot.GetActions(b"")) > 100
    assert len([line for line in caplog.messages if "sends no task" in line and "--task" in line]) == 1


def test_ready_waits_for_the_warm_up(helpers, robots):
    gate = threading.Event()

    def load():
        gate.wait(10)
        return FakePolicy()

    with Running(load, protocol="lerobot") as server:
        threading.Timer(0.4, gate.set).start()
        started = time.monotonic()
        robots(server).start(helpers)
        assert time.monotonic() - started > 0.3


def refused(call, *arguments):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    return caught.value.code().name, caught.value.details()


def test_refusals_name_what_is_wrong(helpers, robots):
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready())
        assert refused(robot.GetActions, b"") == ("FAILED_PRECONDITION", "call Ready first; restart the robot client")
        code, text = refused(lambda: robot.start(helpers, policy_type="act"))
        assert (code, "'act'" in text, "'fake'" in text) == ("INVALID_ARGUMENT", True, True)
        robot.start(helpers)
        missing = raw(observation(1))
        del missing["j4"]
        robot.SendObservations(parts(pickle.dumps(helpers.TimedObservation(1.0, 0, missing, True))))
        assert "'j4'" in refused(robot.GetActions, b"")[1]
        robot.observe(helpers, {**observation(1), "prompt": "nan"})
        assert "not finite" in refused(robot.GetActions, b"")[1]
        robot.observe(helpers, observation(1))
        assert len(robot.GetActions(b"")) > 100


def test_a_token_is_checked_before_the_message(helpers, robots):
    with Running(FakePolicy(), protocol="lerobot", token="correct horse") as server:
        server.ready()
        assert refused(robots(server).Ready, b"")[0] == "UNAUTHENTICATED"
        assert refused(robots(server, token="wrong token").SendObservations, parts(b"x"))[0] == "UNAUTHENTICATED"
        robots(server, token="correct horse").start(helpers)


def test_tls(helpers, robots, certificate):
    with Running(FakePolicy(), protocol="lerobot", certificate=certificate[0], private_key=certificate[1]) as server:
        server.ready()
        robot = robots(server, trusted=certificate[0].read_bytes()).start(helpers)
        robot.observe(helpers, observation(1))
        assert len(robot.GetActions(b"")) > 100
        assert refused(robots(server).Ready, b"")[0] == "UNAVAILABLE"


def test_a_robot_that_vanishes_leaves_nothing_behind(helpers, robots):
    with Running(FakePolicy(delay=0.2, check=False), protocol="lerobot") as server:
        robot = robots(server.ready()).start(helpers)
        robot.observe(helpers, observation(1))
        call = robot.channel.unary_unary("/transport.AsyncInference/GetActions").future(b"")
        wait_until(lambda: len(server.server.worker.sessions()) == 1)
        robot.channel.close()
        wait_until(lambda: not server.server.worker.sessions())
        assert call.code() is grpc.StatusCode.CANCELLED
        assert server.server._transport._robots == {}


def test_a_robot_that_leaves_between_two_calls_is_noticed_and_may_come_back(helpers, robots, monkeypatch):
    monkeypatch.setattr("innerloop.serve.grpc.GONE_SECONDS", 0.3)
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready()).start(helpers)
        robot.observe(helpers, observation(1))
        robot.GetActions(b"")
        assert len(server.server.worker.sessions()) == 1
        wait_until(lambda: not server.server.worker.sessions())
        robot.observe(helpers, observation(2))
        timed = actions_in(robot.GetActions(b""), helpers, monkeypatch)
        np.testing.assert_array_equal(timed[0].action.numpy(), expected(observation(2))[0])


def test_robots_that_left_make_room_for_new_ones(helpers, robots, monkeypatch):
    monkeypatch.setattr("innerloop.serve.grpc.GONE_SECONDS", 0.2)
    with Running(FakePolicy(), protocol="lerobot", max_clients=3) as server:
        server.ready()
        for _ in range(3):
            robots(server).start(helpers)
        assert refused(robots(server).Ready, b"") == ("RESOURCE_EXHAUSTED", "3 robots are connected")
        time.sleep(0.3)
        robots(server).start(helpers)


class Evil:
    """Pickles as a call of os.system."""

    def __reduce__(self):
        import os

        return os.system, ("touch owned-by-a-pickle",)


def bomb():
    """Lists that hold each other a thousandfold: 10^18 values in a few kilobytes."""
    out = b"\x80\x04](" + b"K\x01" * 1_500 + b"e"
    for level in range(5):
        out += b"\x94](" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 1_499 + b"e"
    return out + b"."


def tensor_views():
    """One buffer unfolded as many arrays."""
    body = b"B" + struct.pack("<I", 1 << 20) + b"\x00" * (1 << 20) + b"\x94"
    shape = b"J" + struct.pack("<i", 1 << 20) + b"\x85"
    call = b"cnumpy.core.numeric\n_frombuffer\n(h\x00cnumpy\ndtype\n(\x8c\x02u1\x89\x88tR" + shape + b"\x8c\x01CtR"
    return b"\x80\x04" + body + b"](" + call * 100 + b"e."


HOSTILE = {
    "a call of os.system": lambda: pickle.dumps(Evil()),
    "a call hidden in an observation": lambda: pickle.dumps({"a": Evil()}),
    "eval": lambda: b"cbuiltins\neval\n(\x8c\x031+1tR.",
    "a class by instance": lambda: b"(S'x'\nios\nsystem\n.",
    "getattr on an allowed name": lambda: b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
    "an extension code": lambda: b"\x80\x02\x82\x01.",
    "an unknown class of LeRobot's": lambda: f"c{HELPERS}\nFPSTracker\n)R.".encode(),
    "a bare array": lambda: pickle.dumps(np.zeros(3)),
    "an object array": lambda: pickle.dumps(np.array([{}, []], dtype=object)),
    "a list bomb": bomb,
    "a buffer unfolded a hundred times": tensor_views,
    "truncated": lambda: pickle.dumps({"a": np.zeros(100)})[:-50],
    "a length beyond the end": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"abc.",
    "a memo slot of four billion": lambda: b"\x80\x04K\x01r\xff\xff\xff\xff.",
    "a missing memo slot": lambda: b"\x80\x04h\x05.",
    "an empty stack": lambda: b"\x80\x04\x85.",
    "an empty message": lambda: b"",
    "text": lambda: b"hello",
    "a frame of another format": lambda: b"PK\x03\x04" + b"\x00" * 100,
    "many opcodes": lambda: b"\x80\x04" + b"N" * 200_000 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_by_the_reader(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MessageError):
        read_pickle(HOSTILE[name]())
    assert list(tmp_path.iterdir()) == []


def test_hostile_pickles_are_refused_by_the_service_which_lives_on(helpers, robots, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Running(FakePolicy(), protocol="lerobot", max_message=1 << 20) as server:
        robot = robots(server.ready()).start(helpers)
        for make in HOSTILE.values():
            code, text = refused(robot.SendObservations, parts(make(), size=1 << 19) if make() else iter([b""]))
            assert code == "INVALID_ARGUMENT"
            assert text
        assert refused(robot.SendPolicyInstructions, framed(1, pickle.dumps(Evil())))[0] == "INVALID_ARGUMENT"
        assert refused(robot.SendPolicyInstructions, b"\xff" * 30)[0] == "INVALID_ARGUMENT"
        assert refused(robot.SendObservations, parts(b"x" * (3 << 20), size=1 << 19)) == (
            "INVALID_ARGUMENT",
            "bad_request: the observation is larger than 1048576 bytes",
        )
        assert refused(robot.SendObservations, iter([b"\x00" * (2 << 20)]))[0] == "RESOURCE_EXHAUSTED"
        robot.observe(helpers, observation(1))
        assert len(robot.GetActions(b"")) > 100
    assert list(tmp_path.iterdir()) == []


def test_a_compressed_message_is_not_inflated(robots):
    with Running(FakePolicy(), protocol="lerobot") as server:
        robot = robots(server.ready())
        bomb = b"\x00" * (16 << 20)
        code, _ = refused(lambda: robot.SendPolicyInstructions(bomb, compression=grpc.Compression.Gzip))
        assert code in ("UNIMPLEMENTED", "INTERNAL")


@dataclass
class Other:
    """A class that no message holds."""

    x: int = 1


def test_fields_that_a_message_does_not_have_are_refused(helpers):
    extra = helpers.TimedObservation(1.0, 0, {})
    extra.command = "stop"
    with pytest.raises(MessageError, match="'command'"):
        read_pickle(pickle.dumps(extra))
    with pytest.raises(MessageError, match="Other"):
        read_pickle(pickle.dumps(helpers.TimedObservation(1.0, 0, {"a": Other()})))


def test_every_shape_of_array_survives(helpers):
    seen = {
        "c": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "big endian": np.arange(4, dtype=">f4"),
        "scalar": np.float32(2.5),
        "bool": np.array([True, False]),
        "empty": np.zeros((0, 3), np.uint8),
        "plain": [1, 2.5, True, None, "text"],
    }
    for protocol in (3, 4, 5):
        read = read_pickle(pickle.dumps(helpers.TimedObservation(5.0, 3, seen), protocol=protocol))
        assert isinstance(read, TimedObservation)
        for name, value in seen.items():
            assert np.array_equal(read.observation[name], value) or read.observation[name] == value, name


def test_what_is_written_is_what_the_stock_client_reads(helpers):
    actions = np.random.default_rng(0).standard_normal((4, 7), dtype=np.float32)
    timed = pickle.loads(write_timed_actions(actions, 50.0, 2**40, 0.5))
    assert [type(each) for each in timed] == [helpers.TimedAction] * 4
    assert [each.timestep for each in timed] == [2**40 + n for n in range(4)]
    np.testing.assert_array_equal(np.stack([each.action.numpy() for each in timed]), actions)
