"""Copies and graph launches by CUDA's runtime, in whose place stands a library that does them on the processor."""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from innerloop.contract import InnerloopError
from innerloop.runtime import queue

SOURCE = """
#include <string.h>
static int device = 3, launched = 0;
int cudaGetDevice(int* to) { return *to = device, 0; }
int cudaSetDevice(int to) { return device = to, 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t count, int kind, void* stream) {
  const int known = stream == (void*)0x7f0000000077 || (stream == (void*)0x7f0000000088 && kind == 1);
  if (device != 1 || !known || (kind != 1 && kind != 2)) return 21;
  memcpy(to, from, count);
  return 0;
}
int cudaGraphLaunch(void* graph, void* stream) { return ++launched, graph == (void*)0x7f0000000055 ? 0 : 400; }
int launches(void) { return launched; }
"""
STREAM: Any = SimpleNamespace(device_index=1, cuda_stream=0x7F0000000077)


def graph(handle: int) -> Any:
    return SimpleNamespace(raw_cuda_graph_exec=lambda: handle)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "runtime.c").write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "runtime.so"), str(folder / "runtime.c")], check=True
    )
    return str(folder / "runtime.so")


def test_copies_and_launches_go_to_the_stream_and_the_threads_device_comes_back(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_library", lambda: library)
    made = queue.Queue(STREAM)
    host, device = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    with made:
        made.copy_in(device.ctypes.data + 10, host.ctypes.data + 10, 50)
        made.copy_out(host.ctypes.data, device.ctypes.data + 10, 5)
        launch = made.launcher(graph(0x7F0000000055))
        launch()
        launch()
    assert np.array_equal(device, np.where((np.arange(100) >= 10) & (np.arange(100) < 60), np.arange(100), 0))
    assert host[:6].tolist() == [10, 11, 12, 13, 14, 5]
    assert ctypes.CDLL(library).launches() == 2
    with pytest.raises(InnerloopError, match="cudaMemcpyAsync failed: CUDA error 21"):
        made.copy_in(device.ctypes.data, host.ctypes.data, 1)  # the thread's own device again, which is another


def test_copies_aside_go_to_their_own_stream_and_are_joined(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_library", lambda: library)
    log: list[tuple[str, Any]] = []
    event = SimpleNamespace(record=lambda stream: log.append(("record", stream.cuda_stream)))
    monkeypatch.setattr(queue.torch.cuda, "Event", lambda: event)
    stream: Any = SimpleNamespace(**vars(STREAM), wait_event=lambda event: log.append(("wait", event)))
    aside: Any = SimpleNamespace(cuda_stream=0x7F0000000088)
    made = queue.Queue(stream, aside)
    host, device = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    with made:
        made.copy_aside(device.ctypes.data, host.ctypes.data, 9)
        made.join()
    assert np.array_equal(device, host)
    assert log == [("record", 0x7F0000000088), ("wait", event)]
    alone = queue.Queue(STREAM)
    with alone:  # without another stream: in order, so that there is nothing to join
        alone.copy_aside(device.ctypes.data, host.ctypes.data + 1, 8)
        alone.join()
    assert device.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_what_cuda_refuses_is_an_error_with_its_name(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_library", lambda: library)
    with pytest.raises(InnerloopError, match="cudaGraphLaunch failed: CUDA error 400"):
        queue.Queue(STREAM).launcher(graph(1))()


def test_a_torch_without_its_runtime_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "0.7")
    with pytest.raises(InnerloopError, match=r"cudart.*0.* cannot be loaded.*CUDA build of torch"):
        queue.Queue(STREAM)
