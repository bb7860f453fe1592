"""A server as a process: warm before ready, drained on SIGTERM, new weights on SIGHUP, the engine's own policy."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from serving_fakes import FakePolicy, Running, expected, observation, wait_until
from websockets.sync.client import connect

import innerloop
from innerloop import arguments
from innerloop.client import AsyncRemotePolicy, RemoteError, RemotePolicy
from innerloop.client.__main__ import check
from innerloop.contract.errors import InnerloopError
from innerloop.process import from_frame
from innerloop.serve.access import ServeError, ServeOptions
from innerloop.serve.server import Server

HERE = Path(__file__).parent
TINY = HERE.parents[2] / "examples" / "checkpoints" / "tiny-pi05"
PROGRAM = """
import pathlib, sys, time
from serving_fakes import FakePolicy
from innerloop.contract.errors import InnerloopError
from innerloop.serve.access import ServeOptions
from innerloop.serve.server import run_server

def load():
    text = pathlib.Path("weights").read_text()
    if text == "slow":
        time.sleep(60)
    if text == "unknown":
        raise InnerloopError("the checkpoint names no family; give one")
    if text == "broken":
        raise RuntimeError("the weights are broken")
    return FakePolicy(delay=float(sys.argv[2]), bias=float(text))

run_server(load, ServeOptions(port=int(sys.argv[1])))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def health(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def health_text(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    return ""


@pytest.fixture
def process(tmp_path):
    """A function (weights, delay) -> (process, port); the file `weights` is the bias that its policy adds."""
    started = []

    def start(weights="0", delay="0"):
        (tmp_path / "weights").write_text(weights)
        port = free_port()
        command = [sys.executable, "-c", PROGRAM, str(port), delay]
        environment = {"PYTHONPATH": f"{HERE}:{HERE.parents[2] / 'src'}", "PATH": "/usr/bin:/bin"}
        one = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(one)
        return one, port

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_sigterm_drains_and_sighup_replaces_the_weights(process, tmp_path):
    server, port = process(delay="0.4")
    wait_until(lambda: health(port) == 200, 30)
    with RemotePolicy(f"ws://127.0.0.1:{port}", patience=10) as policy:
        assert policy.infer(observation(1)).weights_version == 0
        (tmp_path / "weights").write_text("broken")
        server.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert policy.infer(observation(1)).weights_version == 0
        (tmp_path / "weights").write_text("5")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: policy.infer(observation(1)).weights_version == 1, 10)
        np.testing.assert_array_equal(policy.infer(observation(2)).actions, expected(observation(2), bias=5.0))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(policy.infer(observation(3))))
        asking.start()
        time.sleep(0.15)
        server.send_signal(signal.SIGTERM)
        asking.join(5)
        np.testing.assert_array_equal(answers[0].actions, expected(observation(3), bias=5.0))
    assert server.wait(10) == 0
    assert health(port) is None


def test_a_policy_that_cannot_be_loaded_ends_the_process_with_the_reason(process):
    server, _ = process(weights="broken")
    _, errors = server.communicate(timeout=30)
    assert server.returncode == 1
    assert "the weights are broken" in errors


def test_an_error_with_a_remedy_is_said_without_a_trace(process):
    server, _ = process(weights="unknown")
    _, errors = server.communicate(timeout=30)
    assert server.returncode == 1
    before_the_raise = errors.partition("failed\n")[0]
    assert "the policy could not be made ready" in before_the_raise
    assert "Traceback" not in before_the_raise


def test_a_second_signal_ends_a_server_that_still_loads(process):
    server, port = process(weights="slow")
    wait_until(lambda: health(port) == 503, 30)
    server.send_signal(signal.SIGTERM)
    wait_until(lambda: server.poll() is not None or "draining" in health_text(port), 10)
    assert server.poll() is None  # it waits for the loader
    server.send_signal(signal.SIGTERM)
    assert server.wait(5) == -signal.SIGTERM
    assert "a second signal ends at once" in server.stderr.read()


def test_a_failed_warm_up_is_told_to_clients_that_wait():
    gate = threading.Event()

    def load():
        gate.wait(10)
        raise InnerloopError("the checkpoint has no statistics")

    with Running(load) as server:
        assert health(server.server.port) == 503
        with connect(server.url) as waiting:
            gate.set()
            with pytest.raises(Exception, match="1011"):
                waiting.recv(timeout=5)
        assert health(server.server.port) == 500
        with pytest.raises(InnerloopError, match="no statistics"):
            server.ready()


def test_a_draining_server_refuses_new_work_and_finishes_the_old():
    with Running(FakePolicy(delay=0.5, check=False)) as server:
        server.ready()
        with RemotePolicy(server.url) as first, RemotePolicy(server.url, patience=1) as second:
            answers = []
            asking = threading.Thread(target=lambda: answers.append(first.infer(observation(1))))
            asking.start()
            time.sleep(0.1)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            time.sleep(0.1)
            assert health(server.server.port) == 503
            with pytest.raises(RemoteError, match="draining"):
                second.infer(observation(2))
            asking.join(5)
            stopping.join(5)
    np.testing.assert_array_equal(answers[0].actions, expected(observation(1)))


def test_the_first_call_is_as_fast_as_the_next():
    """Everything slow happens before the server says it is ready. One of several servers, as other work may hold one up."""

    def load():
        time.sleep(0.3)
        return FakePolicy(delay=0.002)

    def is_as_fast():
        with Running(load) as server:
            server.ready()
            with RemotePolicy(server.url) as policy:
                times = []
                for number in range(50):
                    started = time.perf_counter()
                    policy.infer(observation(number))
                    times.append(time.perf_counter() - started)
        return times[0] < 3 * np.median(times[1:]) + 0.01

    assert any(is_as_fast() for _ in range(5))


def test_a_real_checkpoint_is_served_bit_for_bit():
    def load():
        return innerloop.load(TINY, device="cpu", precision="fp32")

    local = load()
    with Running(load) as server:
        server.ready()
        with RemotePolicy(server.url, session="arm") as policy:
            assert policy.metadata["fingerprint"] == local.metadata["fingerprint"]
            random = np.random.default_rng(0)
            for seed in range(4):
                seen = {
                    "images": {
                        name: random.integers(0, 256, (120, 160, 3), np.uint8) for name in policy.metadata["cameras"]
                    },
                    "state": random.uniform(-1, 1, policy.metadata["state_dim"]).astype(np.float32),
                    "prompt": f"pick up block {seed}",
                }
                chunk = policy.infer(seen, seed=seed)
                np.testing.assert_array_equal(chunk.actions, local.infer(seen, seed=seed).actions)
                assert chunk.receipt["fingerprint"] == local.metadata["fingerprint"]
            with pytest.raises(RemoteError, match="state has 3 values"):
                policy.infer({**seen, "state": np.zeros(3, np.float32)})
        wait_until(lambda: server.server.worker.policy.runtime.sessions == ())
    local.close()


@pytest.mark.parametrize("images", [{"layout": "CHW"}, {"range": "unit"}, {"color": "BGR"}])
def test_a_robot_may_send_its_frames_as_its_edge_declares_them(tmp_path, images):
    (tmp_path / "edge.json").write_text(json.dumps({"images": images}))
    edge = arguments.edge(None, None, tmp_path / "edge.json")
    local, said = innerloop.load(TINY, device="cpu"), []
    random = np.random.default_rng(0)
    frames = {name: random.integers(0, 256, (56, 48, 3), np.uint8) for name in local.cameras}
    seen = {"images": frames, "state": np.zeros(8, np.float32), "prompt": "push"}
    sent = {**seen, "images": {name: from_frame(frame, edge.images) for name, frame in frames.items()}}
    with Running(lambda: innerloop.load(TINY, device="cpu", edge=arguments.behind_a_server(edge))) as server:
        with RemotePolicy(server.ready() and server.url) as policy:
            answer = policy.infer(sent, seed=1).actions
        assert check(server.url, None, 5.0, said.append), said
    np.testing.assert_array_equal(answer, local.infer(seen, seed=1).actions)
    local.close()


def test_robots_that_wait_together_share_a_batch_of_the_engine():
    local = innerloop.load(TINY, device="cpu", precision="fp32")

    def seen(number):
        random = np.random.default_rng(number)
        images = {name: random.integers(0, 256, (56, 56, 3), np.uint8) for name in local.metadata["cameras"]}
        return {"images": images, "state": random.uniform(-1, 1, 8).astype(np.float32), "prompt": f"block {number}"}

    async def ask(url):
        async with AsyncRemotePolicy(url) as policy:
            jobs = [policy.infer(seen(number), seed=number, session=f"robot-{number}") for number in range(5)]
            return await asyncio.gather(*jobs)

    with Running(lambda: innerloop.load(TINY, device="cpu", precision="fp32", batch=4)) as server:
        chunks = asyncio.run(ask(server.ready() and server.url))
    for number, chunk in enumerate(chunks):
        np.testing.assert_allclose(chunk.actions, local.infer(seen(number), seed=number).actions, atol=1e-4)
    local.close()


@pytest.mark.parametrize("protocol", ["openpi", "lerobot", "groot"])
def test_a_port_that_is_taken_is_named(protocol):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def start():
            await Server(FakePolicy, ServeOptions(protocol=protocol, port=port, http_port=0)).start()

        with pytest.raises(ServeError, match=f"127.0.0.1:{port} cannot be bound"):
            asyncio.run(start())


def test_a_worker_that_breaks_leaves_nobody_waiting():
    class Broken(FakePolicy):
        def reset(self, session="default"):
            raise SystemError("the fake is broken")

    with Running(Broken(check=False)) as server:
        server.ready()
        server.server.worker._seconds = None  # a fault in the worker itself
        with RemotePolicy(server.url) as policy, pytest.raises(RemoteError):
            policy.infer(observation(1))
        wait_until(lambda: health(server.server.port) == 500)
