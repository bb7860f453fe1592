"""CUDA C++ to a loaded kernel at run time: NVRTC for the device's own architecture, the machine code kept on disk."""

import ctypes
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

from innerloop.contract.errors import InnerloopError

FRAGMENTS = Path(__file__).parent / "fragment.cuh"  # what every source begins with


_defines: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("defines", default=())


@contextmanager
def compiled_with(**defines: int) -> Iterator[None]:
    """DELAY=n: stores wait n microseconds. UNGUARDED=1: reads do not wait. For tests of dependent launch alone."""
    token = _defines.set(tuple(sorted(defines.items())))
    try:
        yield
    finally:
        _defines.reset(token)


def fixed(defines: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """What a kernel is compiled with: its own and those of `compiled_with`."""
    return (*sorted(defines.items()), *_defines.get())


def available() -> bool:
    """Whether the binding and the run-time compiler are installed."""
    try:
        _bindings()[1].nvrtcVersion()
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def machine_code(path: Path, defines: Mapping[str, int], architecture: str, written: str = "") -> bytes:
    """The cubin of a source for an architecture (sm_90), from the cache or compiled now.

    written: text between the shared fragments and the source, for what no macro can write.
    """
    source, name = FRAGMENTS.read_text() + written + path.read_text(), path.stem
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    nvrtc = _bindings()[1]
    version = "{}.{}".format(*_checked(nvrtc.nvrtcVersion(), "nvrtcVersion"))
    key = hashlib.sha256("\0".join([source, version, *options]).encode()).hexdigest()
    kept = Path.home() / ".cache" / "innerloop" / "kernels" / f"{name}-{key[:32]}.cubin"
    if kept.exists():
        return kept.read_bytes()
    code = _compile(name, source, options)
    _keep(kept, code)
    return code


@cache
def kernel(
    path: Path,
    defines: tuple[tuple[str, int], ...],
    architecture: str,
    shared_bytes: int,
    device: int,
    written: str = "",
) -> Any:
    """A CUfunction of the current context (of `device`) that may use `shared_bytes` of dynamic shared memory.

    The kernel is called what its source is called.
    """
    driver = _bindings()[0]
    code = machine_code(path, dict(defines), architecture, written)
    module = _checked(driver.cuModuleLoadData(code), "cuModuleLoadData")
    function = _checked(driver.cuModuleGetFunction(module, path.stem.encode()), "cuModuleGetFunction")
    attribute = driver.CUfunction_attribute
    # One carve-out for all: a kernel that wants another one could not start beside its predecessor.
    for what, value in (
        (attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
        (attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ):
        _checked(driver.cuFuncSetAttribute(function, what, value), "cuFuncSetAttribute")
    return function


def launch(
    function: Any,
    grid: int,
    threads: int,
    shared_bytes: int,
    cluster: int,
    dependent: bool,
    arguments: ctypes.Structure,
) -> None:
    """Launches on torch's current stream; `dependent`: may start before its predecessor ends."""
    driver = _bindings()[0]
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        attributes.append(attribute)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
        attribute.value.clusterSchedulingPolicyPreference = (
            driver.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING  # 5 % of the expert's layer
        )
        attributes.append(attribute)
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0), "cuLaunchKernelEx")


@cache
def _bindings() -> tuple[Any, Any]:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def _checked(result: tuple[Any, ...], call: str) -> Any:
    if int(result[0]) != 0:
        raise InnerloopError(f"{call} failed with {result[0].name}; run with use_kernels('reference') to do without it")
    return result[1] if len(result) == 2 else result[1:]


def _compile(name: str, source: str, options: list[str]) -> bytes:
    nvrtc = _bindings()[1]
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []), "nvrtcCreateProgram"
    )
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    if int(status) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        _checked(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        raise InnerloopError(f"kernel '{name}' does not compile with {options}: {log.decode()}")
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    _checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    _checked(nvrtc.nvrtcDestroyProgram(program), "nvrtcDestroyProgram")
    return code


def _keep(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError:
        return  # a read-only home costs a second of compiling at each start, nothing else
