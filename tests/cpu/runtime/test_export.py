import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from toy_plan import noise, observation, plans

from innerloop.runtime.machine import Machine
from innerloop.runtime.session import SessionError

EXAMPLE = Path(__file__).parents[3] / "examples" / "host_loop.py"


@pytest.fixture
def machine():
    made = Machine(plans())
    yield made
    made.close()


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("host_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_host_that_knows_only_the_manifest_gets_the_same_bits(machine, example):
    expected = [machine.decide("a", observation(0), 8).outputs["actions"]]
    expected.append(machine.decide("a", {"noise": noise(4)}, 8).outputs["actions"])
    with machine.export() as export:
        host = example.Host(export, 8)
        first, everything = host.decide(observation(0))
        second, ran = host.decide({"noise": noise(4)})
    assert everything == ["prompt", "patchify+vision", "toy-8/context", "action"]
    assert ran == ["action"]
    assert np.array_equal(first["actions"][0], expected[0])
    assert np.array_equal(second["actions"][0], expected[1])


def test_decisions_are_refused_while_lent_and_right_afterwards(machine, example):
    machine.decide("a", observation(0), 8)
    alone = machine.decide("a", {"noise": noise(4)}, 8).outputs["actions"]
    export = machine.export()
    for use in (lambda: machine.decide("a", {}, 8), machine.export, machine.weights_changed):
        with pytest.raises(SessionError, match="lent to another host"):
            use()
    example.Host(export, 16).decide(observation(1))
    export.windows["table"].zero_()
    export.close()
    decision = machine.decide("a", {"noise": noise(4)}, 8)
    assert decision.stages == ("action",)
    assert np.array_equal(decision.outputs["actions"], alone)


def test_windows_are_at_the_addresses_of_the_manifest(machine):
    with machine.export() as export:
        described = json.loads(json.dumps(export.manifest))
        for buffer in described["plans"]["8"]["buffers"]:
            window = export.windows[buffer["name"]]
            assert window.data_ptr() == buffer["address"]
            assert window.__dlpack__() is not None
        assert described["state"]["bytes"] == machine.account()["state"]
        assert described["graphs"]["action"]["handle"] is None  # no graph on a CPU


def test_dlpack_shares_memory(machine):
    with machine.export() as export:
        view = np.from_dlpack(export.windows["noise"])
        export.windows["noise"].fill_(3)
        assert (view == 3).all()


def test_the_example_drives_a_checkpoint(example, monkeypatch, capsys):
    checkpoint = EXAMPLE.parent / "checkpoints" / "tiny-pi05"
    monkeypatch.setattr("sys.argv", ["host_loop.py", str(checkpoint), "--decisions", "3", "--device", "cpu"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "vision" in lines[0]
    assert "vision" not in lines[1]
