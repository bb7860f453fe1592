"""Our own client: a policy like any other, blocking and asyncio, that comes back after a break."""

import asyncio
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from serving_fakes import FakePolicy, Running, expected, observation, wait_until
from websockets.sync.server import serve

from innerloop.client import AsyncRemotePolicy, ConnectionFailed, Previous, RemoteError, RemotePolicy
from innerloop.client.packing import pack, unpack


def test_importing_the_client_brings_in_no_torch():
    code = "import sys, innerloop.client; print(sorted({'torch', 'innerloop.contract'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.parametrize("package", ["websockets", "msgpack"])
def test_a_robot_without_the_packages_is_told_which_extra_has_them(package):
    code = f"import sys; sys.modules['{package}'] = None; import innerloop.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"innerloop.client needs the package {package}: pip install 'innerloop[client]'" in done.stderr


def test_it_is_a_policy():
    with Running(FakePolicy()) as server, RemotePolicy(server.ready() and server.url, session="left-arm") as policy:
        assert policy.metadata["fingerprint"] == "f00d"
        assert policy.metadata["action_units"] == "robot"
        seen, noise = observation(3), np.full((10, 7), 0.5, np.float32)
        chunk = policy.infer(seen, noise=noise, seed=9, episode="e1")
        np.testing.assert_array_equal(chunk.actions, expected(seen, 9, noise))
        assert chunk.receipt["stages"] == ["vision", "action"]
        assert (chunk.timing["action"], chunk.weights_version, chunk.episode) == (1.5, 0, "e1")
        assert abs(chunk.timestamp - time.time()) < 5
        policy.reset()
        assert server.server.worker.policy.resets[-1] == "left-arm"


def test_a_previous_chunk_arrives_as_it_was_sent():
    class Continuing(FakePolicy):
        def infer(self, observation, *, previous=None, **options):
            self.given = previous
            return super().infer(observation, **options)

    with Running(Continuing()) as server, RemotePolicy(server.ready() and server.url) as policy:
        left = np.random.default_rng(0).standard_normal((6, 7))
        policy.infer(observation(1), previous=Previous(left, delay=3, schedule="EXP"))
        given = server.server.worker.policy.given
        assert (given.delay, given.horizon, given.schedule) == (3, None, "EXP")
        np.testing.assert_array_equal(given.actions, left.astype(np.float32))


def test_sync_and_async_get_the_same_chunk():
    async def ask(url):
        async with AsyncRemotePolicy(url) as policy:
            return [await policy.infer(observation(n), seed=n) for n in range(3)]

    with Running(FakePolicy()) as server, RemotePolicy(server.ready() and server.url) as policy:
        for number, chunk in enumerate(asyncio.run(ask(server.url))):
            np.testing.assert_array_equal(chunk.actions, policy.infer(observation(number), seed=number).actions)


def test_many_requests_at_once_on_one_connection_find_their_answers():
    async def ask(url):
        async with AsyncRemotePolicy(url) as policy:
            jobs = [policy.infer(observation(n), session=f"robot-{n}") for n in range(12)]
            return await asyncio.gather(*jobs)

    with Running(FakePolicy(delay=0.005)) as server:
        for number, chunk in enumerate(asyncio.run(ask(server.ready() and server.url))):
            np.testing.assert_array_equal(chunk.actions, expected(observation(number)))


def test_codes_of_refusals_reach_the_caller():
    async def overtake(url):
        async with AsyncRemotePolicy(url, session="one") as policy:
            jobs = [asyncio.create_task(policy.infer(observation(0)))]
            await asyncio.sleep(0.04)  # it runs
            jobs += [asyncio.create_task(policy.infer(observation(n))) for n in (1, 2)]
            return await asyncio.gather(*jobs, return_exceptions=True)

    with Running(FakePolicy(delay=0.1, check=False)) as server, RemotePolicy(server.ready() and server.url) as policy:
        with pytest.raises(RemoteError, match="deadline of 20 ms") as caught:
            policy.infer(observation(1), deadline_ms=20)
        assert caught.value.code == "late"
        first, second, third = asyncio.run(overtake(server.url))
        assert second.code == "superseded"
        np.testing.assert_array_equal(first.actions, expected(observation(0)))
        np.testing.assert_array_equal(third.actions, expected(observation(2)))


def test_warming_is_told_and_the_first_answer_follows_at_once():
    gate = threading.Event()

    def load():
        gate.wait(10)
        return FakePolicy()

    with Running(load) as server:
        told = []

        async def wait():
            from websockets.asyncio.client import connect

            async with connect(server.url, subprotocols=["innerloop.v1"]) as socket:
                told.append(await socket.recv())

        asyncio.run(wait())
        assert told == ['{"status": "warming"}']
        threading.Timer(0.3, gate.set).start()
        with RemotePolicy(server.url) as policy:
            np.testing.assert_array_equal(policy.infer(observation(1)).actions, expected(observation(1)))


def test_it_comes_back_when_the_server_does():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = Running(FakePolicy(), port=port)
    first.__enter__()
    first.ready()
    with RemotePolicy(first.url, patience=20) as policy:
        policy.infer(observation(1))
        first.stop()
        second = Running(FakePolicy(bias=7.0), port=port)
        threading.Timer(0.4, second.__enter__).start()
        np.testing.assert_array_equal(policy.infer(observation(2)).actions, expected(observation(2), bias=7.0))
    second.stop()


def test_it_gives_up_with_a_reason():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port} could not be reached within 0.5 s"):
        RemotePolicy(f"ws://127.0.0.1:{port}", patience=0.5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "127.0.0.1:8000", "ws://127.0.0.1:99999"])
def test_what_is_no_address_is_said_at_once(url):
    with pytest.raises(RemoteError, match=r"is no address; give ws://HOST:PORT"):
        RemotePolicy(url)

    async def ask():
        await AsyncRemotePolicy(url).connect()

    with pytest.raises(RemoteError, match=r"is no address; give ws://HOST:PORT"):
        asyncio.run(ask())


def test_who_gives_up_on_a_server_leaves_its_place_free():
    gate = threading.Event()

    def load():
        gate.wait(20)
        return FakePolicy()

    async def wait(url):
        await AsyncRemotePolicy(url, patience=0.3).connect()

    with Running(load) as server:
        for give_up in (lambda: RemotePolicy(server.url, patience=0.3), lambda: asyncio.run(wait(server.url))):
            with pytest.raises(ConnectionFailed, match=r"could not be reached within 0\.3 s"):
                give_up()
            wait_until(lambda: not server.server._connections)
        gate.set()


def test_closing_ends_a_call_under_way_for_good():
    async def leave(url):
        policy = AsyncRemotePolicy(url)
        await policy.connect()
        call = asyncio.create_task(policy.infer(observation(1)))
        await asyncio.sleep(0.05)
        await policy.close()
        with pytest.raises(ConnectionFailed, match="this client was closed"):
            await call

    with Running(FakePolicy(delay=0.5, check=False)) as server:
        policy = RemotePolicy(server.ready() and server.url)
        threading.Timer(0.05, policy.close).start()
        with pytest.raises(ConnectionFailed, match="this client was closed"):
            policy.infer(observation(1))
        asyncio.run(leave(server.url))
        wait_until(lambda: not server.server._connections)


def test_a_late_answer_without_an_id_is_not_taken_for_the_next_ones():
    """As openpi's own server answers: in order, and without saying which request an answer belongs to."""

    def answer(connection):
        connection.send(pack({}))
        for message in connection:
            number = unpack(message)["state"][0]
            time.sleep(0.4 if number == 1 else 0.0)
            connection.send(pack({"actions": np.full((2, 2), number, np.float32)}))

    async def ask(url):
        async with AsyncRemotePolicy(url, patience=0.2) as policy:
            with pytest.raises(RemoteError, match="timeout"):
                await policy.infer({"state": [1.0]})
            return await policy.infer({"state": [2.0]})

    with serve(answer, "127.0.0.1", 0) as other:
        threading.Thread(target=other.serve_forever).start()
        url = f"ws://127.0.0.1:{other.socket.getsockname()[1]}"
        with RemotePolicy(url, patience=0.2) as policy:
            with pytest.raises(RemoteError, match="timeout"):
                policy.infer({"state": [1.0]})
            assert policy.infer({"state": [2.0]}).actions[0, 0] == 2
        assert asyncio.run(ask(url)).actions[0, 0] == 2
        other.shutdown()


@pytest.mark.parametrize("greeting", [b"\xc1", b"\x05"])
def test_a_server_of_something_else_is_said_to_be_one(greeting):
    def greet(connection):
        connection.send(greeting)

    with serve(greet, "127.0.0.1", 0) as other:
        threading.Thread(target=other.serve_forever).start()
        with pytest.raises(RemoteError, match="no openpi or innerloop server"):
            RemotePolicy(f"ws://127.0.0.1:{other.socket.getsockname()[1]}")
        other.shutdown()


def test_a_refusal_for_the_rate_finds_its_request():
    async def ask(url):
        async with AsyncRemotePolicy(url, patience=5) as policy:
            asked = (policy.infer(observation(number), session=f"s{number}") for number in range(8))
            return await asyncio.gather(*asked, return_exceptions=True)

    with Running(FakePolicy(), rate=3) as server:
        answers = asyncio.run(ask(server.ready() and server.url))
    assert [getattr(answer, "code", "ok") for answer in answers] == ["ok"] * 3 + ["rate"] * 5


def test_a_message_that_is_too_large_is_refused_once_and_for_all():
    with Running(FakePolicy(), max_message=10_000) as server, RemotePolicy(server.ready() and server.url) as policy:
        with pytest.raises(RemoteError, match="refused"):
            policy.infer(observation(1, size=100))
        assert policy.infer(observation(1, size=8)).actions.shape == (10, 7)


def test_clients_come_and_go_and_the_weights_are_loaded_once():
    loads = []

    def load():
        loads.append(1)
        return FakePolicy()

    with Running(load) as server:
        server.ready()
        for number in range(10):
            with RemotePolicy(server.url) as policy:
                np.testing.assert_array_equal(policy.infer(observation(number)).actions, expected(observation(number)))
    assert loads == [1]


def test_the_self_test_names_the_step_that_fails():
    from innerloop.client.__main__ import check

    class Wandering(FakePolicy):
        def infer(self, *arguments, **options):
            self.bias += self.metadata["drift"]
            return super().infer(*arguments, **options)

    def run(policy):
        said = []
        with Running(policy) as server:
            server.ready()
            policy.metadata["drift"] = 1.0
            passed = check(server.url, None, 2.0, said.append)
        return passed, [line.split(",")[0].split(" p50")[0] for line in said]

    assert run(FakePolicy()) == (True, ["connect: ok", "decide: ok", "finite: ok", "repeat: ok", "latency:"])
    assert run(Wandering(drift=0.0)) == (
        False,
        ["connect: ok", "decide: ok", "finite: ok", "repeat: FAILED", "latency:"],
    )
    assert run(FakePolicy(check=False))[1] == ["connect: ok", "decide: FAILED"]
    said = []
    assert not check("ws://127.0.0.1:9", None, 0.2, said.append)
    assert said[0].startswith("connect: FAILED, connection: ws://127.0.0.1:9 could not be reached")


def test_a_camera_that_the_robot_lacks_is_sent_as_none():
    class OneEyed(FakePolicy):
        def infer(self, observation, **options):
            self.missing = [name for name, picture in observation["images"].items() if picture is None]
            seen = {name: picture for name, picture in observation["images"].items() if picture is not None}
            return super().infer({**observation, "images": seen}, **options)

    with Running(OneEyed()) as server, RemotePolicy(server.ready() and server.url) as policy:
        seen = observation(1)
        policy.infer({**seen, "images": {**seen["images"], "wrist": None}})
        assert server.server.worker.policy.missing == ["wrist"]
        assert server.do(live(server))["sessions"][0]["cameras"] == ["base"]


async def live(server):
    return server.server.truth.live()
