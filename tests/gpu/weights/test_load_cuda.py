"""Streaming onto a device: the same bits as on the CPU, with little scratch memory beside the final buffers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from innerloop.weights import NameTable, free_memory, load_weights
from innerloop.weights.files import open_weight_files

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TABLE = NameTable({"w": ("a", "b")}, {}, (), ())


def test_same_bits_and_digest_as_on_the_cpu(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3000, 1024), "b": torch.randn(40_000, 1024)}, tmp_path / "model.safetensors")
    source = open_weight_files(tmp_path)
    assert source is not None
    buffers = {device: torch.empty(43_000, 1024, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digests = {load_weights({"w": buffer}, source, TABLE).digest for buffer in buffers.values()}
    assert torch.equal(buffers["cuda"].cpu(), buffers["cpu"])
    assert len(digests) == 1
    assert torch.cuda.max_memory_allocated() - before <= 2 * (64 << 20)


def test_free_memory_of_the_device() -> None:
    free = free_memory(torch.device("cuda"))
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory
