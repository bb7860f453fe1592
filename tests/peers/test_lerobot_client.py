"""LeRobot's own robot client, unchanged, drives a pretended arm from our gRPC service."""

import asyncio
import pickle
import sys
import threading
import time
import types
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("grpc")
from lerobot.robots.config import RobotConfig
from lerobot.robots.robot import Robot

from innerloop.contract import Chunk
from innerloop.serve.access import ServeOptions
from innerloop.serve.pickles import RemotePolicyConfig, TimedObservation, read_pickle, write_timed_actions
from innerloop.serve.server import Server

JOINTS = [f"joint_{number}.pos" for number in range(1, 7)]
HORIZON = 10


@RobotConfig.register_subclass("pretend_arm")
@dataclass(kw_only=True)
class PretendArmConfig(RobotConfig):
    """Six joints and one camera that need no hardware."""


class PretendArm(Robot):
    """Goes at once where it is told and remembers every action."""

    config_class = PretendArmConfig
    name = "pretend_arm"

    def __init__(self, config):
        super().__init__(config)
        self.position = dict.fromkeys(JOINTS, 0.0)
        self.applied = []
        self.connected = False

    observation_features = property(lambda self: {**dict.fromkeys(JOINTS, float), "front": (48, 64, 3)})
    action_features = property(lambda self: dict.fromkeys(JOINTS, float))
    is_connected = property(lambda self: self.connected)
    is_calibrated = property(lambda self: True)

    def connect(self, calibrate=True):
        self.connected = True

    def disconnect(self):
        self.connected = False

    def calibrate(self):
        pass

    def configure(self):
        pass

    def get_observation(self):
        frame = np.full((48, 64, 3), len(self.applied) % 256, np.uint8)
        return {**dict(reversed(self.position.items())), "front": frame}  # another order than the features have

    def send_action(self, action):
        self.position = dict(action)
        self.applied.append([action[name] for name in JOINTS])
        return action


# LeRobot finds a robot beside its configuration, in a module of the plugin's name.
PretendArmConfig.__module__ = "pretend_arm.config_pretend_arm"
sys.modules["pretend_arm"] = types.ModuleType("pretend_arm")
sys.modules["pretend_arm"].PretendArm = PretendArm


class Forward:
    """Moves joint j by j + 1 each step from where the state says it is; checks what it is given."""

    metadata: ClassVar = {"policy": "pi05", "fingerprint": "f00d", "precision": "fp32"}

    def __init__(self):
        self.seen = []

    def infer(self, observation, *, noise=None, seed=None, session="default"):
        self.seen.append(observation)
        steps = np.arange(1, HORIZON + 1, dtype=np.float32)[:, None] * np.arange(1, 7, dtype=np.float32)
        actions = observation["state"] + steps
        return Chunk(actions, actions)

    def reset(self, session="default"):
        pass


@pytest.fixture
def serving():
    """A function (policy, ...) -> (server, port); servers run beside the test until its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    async def begin(policy, options):
        server = Server(lambda: policy, ServeOptions(protocol="lerobot", port=0, http_port=0, **options))
        await server.start()
        await server.ready()
        return server

    def serve(policy, **options):
        servers.append(do(begin(policy, options)))
        return servers[-1]

    yield serve
    for server in servers:
        do(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def robot_client(tmp_path, monkeypatch):
    """A function (server, **config) -> LeRobot's RobotClient for a pretended arm."""
    monkeypatch.chdir(tmp_path)  # LeRobot's client writes its logs where it runs
    from lerobot.async_inference import robot_client as module
    from lerobot.async_inference.configs import RobotClientConfig
    from lerobot.async_inference.robot_client import RobotClient

    clients = []
    shared = module.grpc_channel_options

    def make(server, *, own_connection=True, **options):
        # every client gets its own connection, as it would in a process of its own
        apart = [("grpc.use_local_subchannel_pool", 1)] if own_connection else []
        monkeypatch.setattr(module, "grpc_channel_options", lambda **given: shared(**given) + apart)
        config = RobotClientConfig(
            policy_type=options.pop("policy_type", "pi05"),
            pretrained_name_or_path="not/used",
            robot=PretendArmConfig(id="arm", calibration_dir=tmp_path),
            actions_per_chunk=HORIZON,
            server_address=f"127.0.0.1:{server.port}",
            fps=50,
            aggregate_fn_name="latest_only",
            **options,
        )
        clients.append(RobotClient(config))
        return clients[-1]

    yield make
    for client in clients:
        if client.running:
            client.stop()


def drive(client, steps, seconds=20.0):
    """LeRobot's two loops, as its command line runs them, until the arm has made so many steps."""
    receiver = threading.Thread(target=client.receive_actions, daemon=True)
    control = threading.Thread(target=client.control_loop, args=("stack the cubes",), daemon=True)
    receiver.start()
    control.start()
    end = time.monotonic() + seconds
    while len(client.robot.applied) < steps and time.monotonic() < end:
        time.sleep(0.02)
    client.shutdown_event.set()
    control.join(5)
    client.stop()
    receiver.join(5)


def test_the_stock_client_drives_an_arm_through_many_chunks(serving, robot_client):
    policy = Forward()
    client = robot_client(serving(policy))
    assert client.start()
    drive(client, steps=60)
    applied = np.array(client.robot.applied)
    assert len(applied) >= 60
    assert len(policy.seen) >= 4
    assert policy.seen[0]["prompt"] == "stack the cubes"
    assert policy.seen[0]["images"]["front"].shape == (48, 64, 3)
    np.testing.assert_array_equal(applied[:, 1] / applied[:, 0], 2.0)  # joints in the order of the features' names
    np.testing.assert_array_equal(applied[:, 5] / applied[:, 0], 6.0)
    assert (np.diff(applied[:, 0]) >= 0).all()
    assert applied[0, 0] == 1.0


def test_an_unsuitable_policy_type_is_refused_at_the_start(serving, robot_client):
    assert not robot_client(serving(Forward()), policy_type="act").start()


def test_two_robots_get_their_own_actions(serving, robot_client):
    server = serving(Forward())
    first, second = robot_client(server), robot_client(server)
    second.robot.position = dict.fromkeys(JOINTS, 1000.0)
    assert first.start()
    assert second.start()
    threads = [threading.Thread(target=drive, args=(client, 30)) for client in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first.robot.applied) >= 30
    assert len(second.robot.applied) >= 30
    assert np.max(first.robot.applied) < 1000 <= np.min(second.robot.applied)


def test_two_robots_on_one_connection_are_refused_rather_than_mixed_up(serving, robot_client):
    server = serving(Forward())
    first, second = robot_client(server, own_connection=False), robot_client(server, own_connection=False)
    assert first.start()
    driving = threading.Thread(target=drive, args=(first, 40))
    driving.start()
    while not first.robot.applied:
        time.sleep(0.01)
    assert not second.start()
    driving.join()
    np.testing.assert_array_equal(np.array(first.robot.applied)[:, 5] / np.array(first.robot.applied)[:, 0], 6.0)


def test_the_sessions_of_clients_that_left_are_closed(serving, robot_client):
    server = serving(Forward())
    client = robot_client(server)
    assert client.start()
    drive(client, steps=5)
    end = time.monotonic() + 8
    while server.worker.sessions() and time.monotonic() < end:
        time.sleep(0.02)
    assert server.worker.sessions() == []


def test_our_reader_reads_their_pickles_and_they_read_ours():
    from lerobot.async_inference import helpers

    raw = {
        "front": np.arange(60, dtype=np.uint8).reshape(4, 5, 3),
        "turned": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "a.pos": 1.5,
        "b.pos": np.float32(2.5),
        "count": np.int64(4),
        "tensor": torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
        "task": "go",
    }
    for protocol in (3, 4, 5):
        theirs = helpers.TimedObservation(timestamp=12.5, observation=raw, timestep=7, must_go=True)
        ours = read_pickle(pickle.dumps(theirs, protocol=protocol))
        assert isinstance(ours, TimedObservation)
        assert (ours.timestamp, ours.timestep, ours.must_go) == (12.5, 7, True)
        for name, value in raw.items():
            if isinstance(value, str):
                assert ours.observation[name] == value
            else:
                np.testing.assert_array_equal(ours.observation[name], np.asarray(value))
    features = {"observation.state": {"dtype": "float32", "shape": (2,), "names": ["a.pos", "b.pos"]}}
    setup = read_pickle(pickle.dumps(helpers.RemotePolicyConfig("pi05", "x/y", features, 50, "cuda")))
    assert isinstance(setup, RemotePolicyConfig)
    assert setup.lerobot_features["observation.state"]["names"] == ["a.pos", "b.pos"]
    actions = np.random.default_rng(0).standard_normal((5, 6), dtype=np.float32)
    timed = pickle.loads(write_timed_actions(actions, 100.0, 40, 0.02))
    assert all(type(action) is helpers.TimedAction for action in timed)
    assert [action.get_timestep() for action in timed] == [40, 41, 42, 43, 44]
    assert timed[3].get_timestamp() == pytest.approx(100.06)
    tensor = torch.stack([action.get_action() for action in timed])
    assert tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.numpy(), actions)
