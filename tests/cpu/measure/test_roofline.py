"""Bounds and floors from given ceilings; ceilings from this machine."""

import pytest
import torch

from innerloop.measure.ceilings import Ceilings, measure_ceilings
from innerloop.measure.cost import Cost
from innerloop.measure.roofline import device_roof, host_roof, transfer_roof

CEILINGS = Ceilings(copy=1e12, transfer=1e10, matrix={"bf16": 1e14}, launch_s=1e-6, eager_s=1e-5)


def test_compute_bandwidth_and_launch() -> None:
    heavy = device_roof(Cost(flops=10**11, bytes=10**6), 10, 2.0, CEILINGS, "bf16")
    assert (heavy.bound, heavy.floor_ms, heavy.percent) == ("compute", pytest.approx(1.0), pytest.approx(50))
    wide = device_roof(Cost(flops=10**6, bytes=10**9, unique_bytes=10**9), 10, 4.0, CEILINGS, "bf16")
    assert (wide.bound, wide.floor_ms, wide.percent) == ("bandwidth", pytest.approx(1.0), pytest.approx(25))
    many = device_roof(Cost(flops=10**6, bytes=10**6, unique_bytes=10**6), 500, 1.0, CEILINGS, "bf16")
    assert many.bound == "launch"
    assert many.percent < 1


def test_what_fits_the_cache_is_read_once() -> None:
    cost = Cost(bytes=10**9, unique_bytes=10**6)
    assert device_roof(cost, 0, 1.0, CEILINGS, "bf16", cache=10**7).floor_ms == pytest.approx(1e-3)


def test_host() -> None:
    assert transfer_roof(10**6, 0.15, CEILINGS).bound == "bandwidth"
    assert transfer_roof(10**6, 1.5, CEILINGS).bound == "host"
    assert host_roof().bound == "host"


def test_ceilings_of_this_machine() -> None:
    found = measure_ceilings(torch.device("cpu"))
    assert all(value > 0 for value in found.flat().values())
    assert {"copy_gb_s", "matrix_fp32_tflops", "launch_us"} <= set(found.flat())
