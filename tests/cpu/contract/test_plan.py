"""A broken plan is refused with the name of the stage and buffer."""

import pytest
import torch

from innerloop.contract import Buffer, Plan, PlanError, Role, Stage
from innerloop.contract.plan import same_buffers


def buffer(name: str, role: Role) -> Buffer:
    return Buffer(name, (2, 3), torch.float32, role)


def nothing(_: object) -> None:
    pass


def plan(stages: tuple[Stage, ...], extra: tuple[Buffer, ...] = (), **changes: object) -> Plan:
    listed = [buffer("x", Role.INPUT), buffer("h", Role.STATE), buffer("y", Role.OUTPUT), *extra]
    fields: dict[str, object] = {
        "name": "toy",
        "buffers": {b.name: b for b in listed},
        "stages": stages,
        "ticks": {"x": "observation"},
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


FIRST = Stage("first", nothing, ("x",), ("h",))
SECOND = Stage("second", nothing, ("h",), ("y",))


def test_good_plan_derives_clocks() -> None:
    tables = Stage("tables", nothing, (), ("t",), prepare=True)
    step = Stage("step", nothing, ("h", "t", "n"), ("y",))
    extra = (buffer("t", Role.STATIC), buffer("n", Role.INPUT))
    p = plan((tables, FIRST, step), extra, ticks={"x": "prompt", "n": "step"})
    assert [p.clock(s.name) for s in p.stages] == ["checkpoint", "prompt", "step"]
    assert p.readers("h") == ["step"]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((SECOND, FIRST), ("second", "h", "first")),
        ((FIRST, Stage("second", nothing, ("ghost",), ("y",))), ("second", "ghost")),
        ((FIRST, Stage("second", nothing, ("h",), ("x", "y"))), ("second", "x", "input")),
        ((FIRST, Stage("again", nothing, ("x",), ("h", "y"))), ("h", "two writers", "first", "again")),
        ((Stage("loop", nothing, ("h",), ("h", "y")),), ("loop", "h", "cycle")),
        ((FIRST,), ("y", "no stage")),
        ((FIRST, SECOND, Stage("first", nothing, ("x",), ())), ("two stages", "first")),
        ((Stage("h", nothing, ("x",), ("h", "y")),), ("h", "both a stage and a buffer")),
    ],
)
def test_broken_plans_name_stage_and_buffer(stages: tuple[Stage, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(stages)
    for word in words:
        assert word in str(caught.value)


def test_every_input_has_a_clock_and_only_inputs() -> None:
    with pytest.raises(PlanError, match="'x' has no clock"):
        plan((FIRST, SECOND), ticks={})
    with pytest.raises(PlanError, match="'h' has a clock"):
        plan((FIRST, SECOND), ticks={"x": "step", "h": "step"})
    with pytest.raises(PlanError, match="'weekly'"):
        plan((FIRST, SECOND), ticks={"x": "weekly"})


def test_a_buffer_has_one_name() -> None:
    with pytest.raises(PlanError, match="filed under"):
        plan((FIRST, SECOND), buffers={"z": buffer("x", Role.INPUT)})


def test_read_of_what_nobody_writes() -> None:
    with pytest.raises(PlanError, match="no stage writes"):
        plan((Stage("first", nothing, ("lost",), ("h", "y")),), (buffer("lost", Role.SCRATCH),))


def test_manifest_is_plain_data_with_edges_and_addresses() -> None:
    import json

    manifest = plan((FIRST, SECOND), fingerprint="f").manifest({"x": 256, "h": 512, "y": 768})
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["edges"] == [{"from": "first", "to": "second", "buffer": "h"}]
    assert [b["address"] for b in manifest["buffers"]] == [256, 512, 768]
    assert manifest["buffers"][0]["bytes"] == 24
    assert manifest["fingerprint"] == "f"


def test_plans_of_one_policy_agree_about_buffers() -> None:
    one = plan((FIRST, SECOND))
    other = plan((FIRST, SECOND), buffers={**one.buffers, "h": Buffer("h", (4,), torch.float32, Role.STATE)})
    with pytest.raises(PlanError, match="'h'"):
        same_buffers([one, other])
    assert same_buffers([one, one]) == one.buffers
