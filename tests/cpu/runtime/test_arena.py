import dataclasses

import pytest
import torch
from toy_plan import plans

from innerloop.contract import Buffer, MemoryPlanError, Plan, PlanError, Role, Stage
from innerloop.runtime.arena import Arena, integrity_word


def buffer(name, role=Role.SCRATCH, size=100):
    return Buffer(name, (size,), torch.float32, role)


def chain(*stages, roles=None, ticks=None, prepare=()):
    """A plan from (stage, reads, writes); buffers are scratch but for `roles`."""
    names = dict.fromkeys(n for _, reads, writes in stages for n in (*reads, *writes))
    roles = {**dict.fromkeys(ticks or (), Role.INPUT), **(roles or {})}
    return Plan(
        "chain",
        {n: buffer(n, roles.get(n, Role.SCRATCH)) for n in names},
        tuple(Stage(name, lambda b: None, reads, writes, name in prepare) for name, reads, writes in stages),
        ticks or {},
    )


def overlap(arena, a, b):
    return b in arena.layout.sharing(a)


def test_addresses_are_aligned_and_lie_inside_their_region():
    arena = Arena(list(plans().values()))
    for name, address in arena.addresses.items():
        region, _ = arena.layout.places[name]
        base = arena.regions[region]
        assert address % 256 == 0
        assert base.data_ptr() <= address
        assert address + arena.layout.buffers[name].bytes <= base.data_ptr() + base.numel()


def test_writing_one_buffer_changes_no_other_unless_they_share():
    arena = Arena(list(plans().values()))
    for name, tensor in arena.tensors.items():
        before = {other: t.clone() for other, t in arena.tensors.items()}
        tensor.fill_(1)
        for other, value in before.items():
            if other != name and not overlap(arena, name, other):
                assert torch.equal(arena.tensors[other], value), (name, other)
        tensor.zero_()


def test_state_is_one_region_and_holds_what_a_session_owns():
    arena = Arena(list(plans().values()))
    places = arena.layout.places
    assert places["memory"][0] == "state"
    assert places["prompt_tokens"][0] == "state"  # static, but of one session's prompt
    assert places["table"][0] == "static"
    assert arena.state.is_contiguous()
    assert arena.state.numel() == arena.account()["state"]


def test_the_account_adds_up():
    arena = Arena(list(plans().values()))
    account = arena.account()
    regions = {k: v for k, v in account.items() if k not in ("total", "scratch_unshared")}
    assert account["total"] == sum(regions.values()) == sum(r.numel() for r in arena.regions.values())
    assert account["scratch"] < account["scratch_unshared"]


def test_scratch_of_one_run_shares_bytes_only_when_never_alive_together():
    plan = chain(
        ("a", ("x",), ("s1",)),
        ("b", ("s1",), ("s2",)),
        ("c", ("s2",), ("s3",)),
        ("d", ("s3",), ("out",)),
        roles={"out": Role.OUTPUT},
        ticks={"x": "step"},
    )
    arena = Arena(plan)
    assert not overlap(arena, "s1", "s2")
    assert not overlap(arena, "s2", "s3")
    assert overlap(arena, "s1", "s3")


def test_scratch_whose_writer_may_be_skipped_is_never_shared():
    plan = chain(
        ("see", ("frame",), ("seen",)),
        ("join", ("seen", "words"), ("joined",)),  # due for new words while `see` is not
        ("end", ("joined",), ("out", "work")),
        roles={"out": Role.OUTPUT},
        ticks={"frame": "observation", "words": "observation"},
    )
    arena = Arena(plan)
    assert arena.layout.sharing("seen") == ()
    assert not overlap(arena, "joined", "work")


def test_lifetimes_hold_in_every_plan():
    first = [("a", ("x",), ("s1",)), ("b", ("s1",), ("t",)), ("c", ("t",), ("s2",)), ("d", ("s2",), ("out",))]
    second = [("a", ("x",), ("s1",)), ("b", ("x",), ("s2",)), ("c", ("s1", "s2"), ("t",)), ("d", ("t",), ("out",))]
    kinds = {"roles": {"out": Role.OUTPUT}, "ticks": {"x": "step"}}
    apart, both = Arena(chain(*first, **kinds)), Arena([chain(*first, **kinds), chain(*second, **kinds)])
    assert overlap(apart, "s1", "s2")
    assert not overlap(both, "s1", "s2")


def test_a_value_read_on_a_faster_clock_must_survive():
    stages = [("embed", ("words",), ("e",)), ("act", ("e", "noise"), ("out",))]
    ticks = {"words": "prompt", "noise": "step"}
    with pytest.raises(PlanError, match=r"'act' \(step clock\) reads 'e'.*'embed'.*role state or static"):
        Arena(chain(*stages, roles={"out": Role.OUTPUT}, ticks=ticks))
    Arena(chain(*stages, roles={"out": Role.OUTPUT, "e": Role.STATE}, ticks=ticks))


def test_a_prepared_stage_may_read_no_input():
    with pytest.raises(PlanError, match="'a' is marked prepare but ticks on the step clock"):
        Arena(chain(("a", ("x",), ("out",)), roles={"out": Role.OUTPUT}, ticks={"x": "step"}, prepare=("a",)))


def test_a_prepared_stage_may_not_wait_for_an_unprepared_one():
    stages = [("a", (), ("s",)), ("b", ("s",), ("out",))]
    with pytest.raises(PlanError, match="mark 'a' prepare too"):
        Arena(chain(*stages, roles={"out": Role.OUTPUT}, prepare=("b",)))


def test_plans_that_disagree_about_a_buffer_are_refused():
    one = chain(("a", ("x",), ("out",)), roles={"out": Role.OUTPUT}, ticks={"x": "step"})
    wide = {**one.buffers, "out": dataclasses.replace(one.buffers["out"], shape=(7,))}
    with pytest.raises(PlanError, match="disagree about buffer 'out'"):
        Arena([one, dataclasses.replace(one, buffers=wide)])


def test_too_little_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: pytest.fail("allocated"))
    with pytest.raises(MemoryPlanError, match="1,000 are free"):
        Arena(list(plans().values()), "cuda")


def test_the_integrity_word_sees_a_flipped_byte_and_a_moved_one():
    data = torch.randint(0, 256, (2560,), dtype=torch.uint8)
    word = integrity_word(data)
    flipped = data.clone()
    flipped[1234] ^= 1
    assert integrity_word(flipped) != word
    assert integrity_word(data.roll(4)) != word
    assert integrity_word(data.clone()) == word
