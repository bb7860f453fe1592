"""The memory plan: printed, summed, and refused before anything is allocated."""

import pytest
import torch

from innerloop.contract.errors import MemoryPlanError
from innerloop.weights import MemoryPlan, free_memory

GIB = 1 << 30
PLAN = MemoryPlan.of([("a.weight", 3 * GIB, "weights"), ("b.weight", GIB, "weights"), ("cache", 512 << 20, "state")])


def test_table_and_total() -> None:
    assert PLAN.total == 4 * GIB + (512 << 20)
    assert PLAN.by_role() == {"weights": 4 * GIB, "state": 512 << 20}
    lines = str(PLAN).splitlines()
    assert [line.split() for line in lines] == [
        ["weights", "(2)", "4.00", "GiB"],
        ["a.weight", "3.00", "GiB"],
        ["b.weight", "1.00", "GiB"],
        ["state", "(1)", "512.0", "MiB"],
        ["total", "4.50", "GiB"],
    ]


def test_within_cap_and_free_memory() -> None:
    PLAN.check()
    PLAN.check(cap_bytes=PLAN.total, free_bytes=PLAN.total + GIB)


def test_over_the_cap() -> None:
    with pytest.raises(
        MemoryPlanError, match=r"needs 4\.50 GiB, over the cap of 4\.00 GiB; nothing was allocated"
    ) as e:
        PLAN.check(cap_bytes=4 * GIB)
    assert "a.weight" in str(e.value), "the plan is part of the message"


def test_memory_that_is_free_but_needed_by_others() -> None:
    with pytest.raises(MemoryPlanError, match=r"but 5\.50 GiB are free and 1\.00 GiB stay in reserve"):
        PLAN.check(free_bytes=PLAN.total + GIB - 1)


def test_free_memory_of_this_machine() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 1 << 20
