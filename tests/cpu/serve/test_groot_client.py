"""A ZeroMQ client that speaks GR00T's messages byte for byte as gr00t/policy/server_client.py documents them."""

import io
import threading
import time

import msgpack
import numpy as np
import pytest
import zmq
from serving_fakes import FakePolicy, Running, expected, observation, wait_until

from innerloop.serve.zmq import decode, encode


def to_bytes(value):
    """GR00T's MsgSerializer: arrays as .npy in a marked map."""

    def custom(item):
        out = io.BytesIO()
        np.save(out, item, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": out.getvalue()}

    return msgpack.packb(value, default=custom)


def from_bytes(data):
    def custom(item):
        return np.load(io.BytesIO(item["as_npy"]), allow_pickle=False) if "__ndarray_class__" in item else item

    return msgpack.unpackb(data, object_hook=custom)


class PolicyClient:
    """A REQ socket with GR00T's endpoints."""

    def __init__(self, port, api_token=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 15000)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.token = api_token

    def call(self, endpoint, data=None, requires_input=True):
        request = {"endpoint": endpoint}
        if requires_input:
            request["data"] = data
        if self.token:
            request["api_token"] = self.token
        self.socket.send(to_bytes(request))
        response = from_bytes(self.socket.recv())
        if isinstance(response, dict) and "error" in response:
            raise RuntimeError(f"Server error: {response['error']}")
        return response

    def get_action(self, observation, options=None):
        return tuple(self.call("get_action", {"observation": observation, "options": options}))

    def close(self):
        self.socket.close()
        self.context.term()


def batched(*seen):
    """Observations in GR00T's nested form with a batch and a time dimension."""
    return {
        "video": {name: np.stack([one["images"][name] for one in seen])[:, None] for name in seen[0]["images"]},
        "state": {
            "arm": np.stack([one["state"][:7] for one in seen])[:, None],
            "gripper": np.stack([one["state"][7:] for one in seen])[:, None],
        },
        "language": {"annotation.human.task_description": [[one["prompt"]] for one in seen]},
    }


GROUPS = {"state_groups": {"arm": 7, "gripper": 1}, "action_groups": {"arm": 6, "gripper": 1}}


@pytest.fixture
def serving():
    closing = []

    def make(policy, **options):
        server = Running(policy, protocol="groot", **options)
        server.__enter__()
        closing.append(server.stop)
        return server

    def client(server, **options):
        one = PolicyClient(server.server.port, **options)
        closing.insert(0, one.close)
        return one

    yield make, client
    for close in closing:
        close()


def test_actions_come_back_in_groups(serving):
    make, client = serving
    server = make(FakePolicy(**GROUPS)).ready()
    one, seen = client(server), observation(5)
    actions, info = one.get_action(batched(seen))
    want = expected(seen)
    np.testing.assert_array_equal(actions["arm"], want[None, :, :6])
    np.testing.assert_array_equal(actions["gripper"], want[None, :, 6:])
    assert actions["arm"].dtype == np.float32
    assert info["weights_version"] == 0


def test_a_batch_of_robots_and_a_seed(serving):
    make, client = serving
    one = client(make(FakePolicy()).ready())
    seen = [observation(n) for n in range(3)]
    actions, _ = one.get_action(batched(*seen), {"seed": 5})
    np.testing.assert_array_equal(actions["action"], np.stack([expected(each, 5) for each in seen]))


def test_the_flat_form_of_the_simulation_clients(serving):
    make, client = serving
    one, seen = client(make(FakePolicy()).ready()), observation(6)
    flat = {f"video.{name}": image[None, None] for name, image in seen["images"].items()}
    flat |= {"state.all": seen["state"][None, None], "annotation.human.coarse_action": (seen["prompt"],)}
    actions, _ = one.get_action(flat)
    np.testing.assert_array_equal(actions["action.action"], expected(seen)[None])


def test_ping_reset_config_and_kill(serving):
    make, client = serving
    server = make(FakePolicy(**GROUPS)).ready()
    one = client(server)
    assert one.call("ping", requires_input=False)["status"] == "ok"
    config = one.call("get_modality_config", requires_input=False)
    assert config["state"]["__ModalityConfig_class__"] is True
    assert config["state"]["as_json"]["modality_keys"] == ["arm", "gripper"]
    assert config["video"]["as_json"]["modality_keys"] == ["base", "wrist"]
    assert config["action"]["as_json"]["delta_indices"] == list(range(10))
    one.get_action(batched(observation(1)))
    resets = len(server.server.worker.policy.resets)
    assert one.call("reset", {"options": None}) == {}
    assert len(server.server.worker.policy.resets) == resets + 1
    with pytest.raises(RuntimeError, match="SIGTERM"):
        one.call("kill", requires_input=False)
    with pytest.raises(RuntimeError, match="unknown endpoint 'os.system'"):
        one.call("os.system", {})


def test_a_long_decision_blocks_no_other_robots_ping(serving):
    make, client = serving
    server = make(FakePolicy(delay=1.0, check=False)).ready()
    busy, other, answers = client(server), client(server), []
    thread = threading.Thread(target=lambda: answers.append(busy.get_action(batched(observation(1)))))
    thread.start()
    time.sleep(0.2)
    started = time.perf_counter()
    other.call("ping", requires_input=False)
    assert time.perf_counter() - started < 0.1
    assert not answers
    thread.join(5)
    np.testing.assert_array_equal(answers[0][0]["action"][0], expected(observation(1)))


def test_warm_up_answers_pings_and_holds_requests(serving):
    make, client = serving
    gate = threading.Event()

    def load():
        gate.wait(10)
        return FakePolicy()

    server = make(load)
    one = client(server)
    assert one.call("ping", requires_input=False)["message"] == "server is warming"
    threading.Timer(0.3, gate.set).start()
    actions, _ = one.get_action(batched(observation(2)))
    np.testing.assert_array_equal(actions["action"][0], expected(observation(2)))


def test_a_token_is_checked_before_anything_else(serving):
    make, client = serving
    server = make(FakePolicy(), token="correct horse").ready()
    for token in (None, "wrong token"):
        with pytest.raises(RuntimeError, match="unauthorized"):
            client(server, api_token=token).get_action(batched(observation(1)))
    assert server.server.worker.policy.calls == 2  # those of the self-check
    good = client(server, api_token="correct horse")
    np.testing.assert_array_equal(good.get_action(batched(observation(1)))[0]["action"][0], expected(observation(1)))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda o: o.pop("video"), "'video', 'state' and 'language'"),
        (lambda o: o["state"].pop("gripper"), "the state has no 'gripper'"),
        (lambda o: o["state"].update(arm=np.full((1, 1, 7), np.nan, np.float32)), "NaN or infinity"),
        (lambda o: o["video"].update(base=np.zeros((1, 2, 8, 8, 3), np.uint8)), "video.base"),
        (lambda o: o["language"].update(annotation="go"), "language"),
        (lambda o: o["state"].update(arm=np.zeros((2, 1, 7), np.float32)), "disagree about the batch"),
    ],
)
def test_a_wrong_observation_is_explained_and_the_next_is_served(serving, spoil, says):
    make, client = serving
    one, broken = client(make(FakePolicy(**GROUPS)).ready()), batched(observation(1))
    spoil(broken)
    with pytest.raises(RuntimeError, match=says):
        one.get_action(broken)
    one.get_action(batched(observation(1)))


HOSTILE_HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
HUGE_HEADER = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"


def npy(header, body=b"12345678"):
    return {
        "__ndarray_class__": True,
        "as_npy": b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body,
    }


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 100,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa4data" + b"\x91" * 5000,
        msgpack.packb([1, 2]),
        msgpack.packb({"endpoint": 5}),
        msgpack.packb({"endpoint": "get_action", "data": {"observation": npy(HOSTILE_HEADER)}}),
        msgpack.packb({"endpoint": "get_action", "data": {"observation": npy(HUGE_HEADER)}}),
        msgpack.packb({"endpoint": "get_action", "data": {"observation": npy(b"[" * 200 + b"]" * 200)}}),
        msgpack.packb(
            {"endpoint": "get_action", "data": {"observation": {"__ndarray_class__": 1, "as_npy": b"PK\x03\x04"}}}
        ),
        msgpack.packb({"endpoint": "get_action", "data": {"observation": {}, "options": {"seed": -1}}}),
    ],
)
def test_hostile_messages_get_an_error(serving, message):
    make, client = serving
    one = client(make(FakePolicy()).ready())
    one.socket.send(message)
    assert "error" in from_bytes(one.socket.recv())
    one.get_action(batched(observation(1)))


def test_an_oversized_message_is_cut_off_and_others_are_served(serving):
    make, client = serving
    server = make(FakePolicy(), max_message=200_000).ready()
    large, good = client(server), client(server)
    large.socket.setsockopt(zmq.RCVTIMEO, 300)
    large.socket.send(b"x" * 1_000_000)
    with pytest.raises(zmq.Again):
        large.socket.recv()
    good.get_action(batched(observation(1)))


def test_sessions_of_vanished_robots_end(serving):
    make, client = serving
    server = make(FakePolicy(delay=0.2, check=False), session_timeout=0.4).ready()
    gone = PolicyClient(server.server.port)
    gone.socket.send(
        to_bytes({"endpoint": "get_action", "data": {"observation": batched(observation(1)), "options": {}}})
    )
    wait_until(lambda: len(server.server.worker.sessions()) == 1)
    gone.close()
    wait_until(lambda: not server.server.worker.sessions(), 3)
    client(server).get_action(batched(observation(1)))


def test_clients_that_come_and_go_do_not_use_up_the_sessions(serving, monkeypatch):
    monkeypatch.setattr("innerloop.serve.zmq.SILENT_SECONDS", 0.0)
    make, _ = serving
    server = make(FakePolicy(), max_clients=6).ready()
    for number in range(20):
        one = PolicyClient(server.server.port)
        one.get_action(batched(observation(number)))
        one.close()
    assert len(server.server.worker.sessions()) <= 4


def test_arrays_survive_the_journey_in_both_orders():
    for array in (
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), np.float64)),
        np.float32([]),
    ):
        np.testing.assert_array_equal(decode(to_bytes({"a": array}))["a"], array)
    np.testing.assert_array_equal(from_bytes(encode({"a": np.eye(3)}))["a"], np.eye(3))
