"""Where a figure comes from: device, clocks, versions, commit, inputs, time."""

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from innerloop import __version__

_SMI_FIELDS = {
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _cpu_lines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def clocks(device: torch.device, load: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Clocks in MHz, power in watts, temperature in degrees Celsius, while `load` runs again and again.

    What cannot be read is left out.
    """
    if device.type == "cuda":
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_smi, device)
            while not reading.done():
                load()
        return reading.result()
    readings = [float(line.split(":", 1)[1]) for line in _cpu_lines() if line.startswith("cpu MHz")]
    return {"cpu_mhz": max(readings)} if readings else {}


def versions(device: torch.device) -> dict[str, str]:
    """Version of everything that can change a figure."""
    found = {"python": platform.python_version(), "os": platform.system().lower(), "machine": platform.machine()}
    for package in ("innerloop", "torch", "triton", "numpy", "pillow", "simplejpeg", "lerobot", "transformers"):
        try:
            found[package] = str(version(package))
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found |= _driver()
    return found


def commit() -> str:
    """Commit of the source tree this package runs from, "+dirty" when it differs; the version when not a checkout."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    if not _output([*git, "ls-files", here.name]):
        return f"innerloop {__version__}"
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no", "--", ":/src"])
    return _output([*git, "rev-parse", "HEAD"]) + ("+dirty" if changed else "")


def machine(device: torch.device, command: str, clocks_found: dict[str, float]) -> dict[str, Any]:
    """The fields of record.Record."""
    return {
        **software(command),
        "device": device_name(device),
        "versions": versions(device),
        "clocks": clocks_found,
    }


def software(command: str) -> dict[str, Any]:
    """Those fields of record.Record that need no device."""
    return {"command": command, "commit": commit(), "time": now(), "versions": versions(torch.device("cpu"))}


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def inputs_digest(observations: Iterable[Mapping[str, Any]], noises: Iterable[np.ndarray]) -> str:
    """Digest of what the policy was asked: every frame, state, prompt and noise, in order."""
    digest = hashlib.sha256()
    for observation in observations:
        _feed(digest, observation)
    for noise in noises:
        _feed(digest, noise)
    return digest.hexdigest()[:16]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, str):
        digest.update(value.encode())
    else:
        array = np.ascontiguousarray(value)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())


def _smi(device: torch.device) -> dict[str, float]:
    text = _query(",".join(_SMI_FIELDS.values()), device)
    readings = dict(zip(_SMI_FIELDS, text.split(","), strict=False))
    return {name: float(value) for name, value in readings.items() if value.strip().replace(".", "", 1).isdigit()}


def _driver() -> dict[str, str]:
    text = _query("driver_version", torch.device("cuda", torch.cuda.current_device()))
    return {"driver": text} if text else {}


def _query(fields: str, device: torch.device) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return _output(["nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
