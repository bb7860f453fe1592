"""Why this machine is slow or refuses: each check names what is wrong and the remedy."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from rich.markup import escape


class Extra(NamedTuple):
    """A part that may be absent: all that is imported, the distribution whose version is shown, its use, how to get it."""

    modules: tuple[str, ...]
    distribution: str
    use: str
    remedy: str


EXTRAS = {
    "sentencepiece": Extra(
        ("sentencepiece",), "sentencepiece", "tokenizer.model files", "pip install 'innerloop[sentencepiece]'"
    ),
    "orbax": Extra(("tensorstore",), "tensorstore", "openpi's JAX checkpoints", "pip install 'innerloop[orbax]'"),
    "jpeg": Extra(("simplejpeg",), "simplejpeg", "JPEG frames decoded faster", "pip install 'innerloop[jpeg]'"),
    "opencv": Extra(
        ("cv2",), "opencv-python-headless", "GR00T's frames resized faster", "pip install 'innerloop[opencv]'"
    ),
    "serve": Extra(
        ("websockets", "msgpack", "grpc", "zmq", "prometheus_client"),
        "websockets",
        "innerloop serve",
        "pip install 'innerloop[serve]'",
    ),
    "sim": Extra(
        ("metaworld", "mujoco"), "metaworld", "innerloop eval, and the demo's film", "pip install 'innerloop[sim]'"
    ),
    "triton": Extra(
        ("triton",), "triton", "our kernels on a GPU", "pip install triton (torch's CUDA wheels for Linux bring it)"
    ),
    "cuda": Extra(
        ("cuda.bindings",),
        "cuda-bindings",
        "the action expert's few-row kernels on a GPU",
        "pip install cuda-bindings (torch's CUDA wheels bring it)",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One check: ok, note (works, with a remark) or bad; `remedy` is what to do."""

    check: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every check, in the order a person would make them."""
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        Finding("torch", "ok", torch.__version__),
    ]
    findings += [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [_no_device()]
    if torch.cuda.is_available():
        findings += [_built_for(torch.cuda.get_device_capability(), torch.cuda.get_arch_list()), _attention()]
    findings += [_extra(name, extra) for name, extra in EXTRAS.items()]
    return findings


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Plain data, with the interpreter's path."""
    return {"python": sys.executable, "findings": [asdict(f) for f in findings]}


def text(findings: list[Finding]) -> str:
    """One line a finding, in rich's markup."""
    marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]bad [/]"}
    said = [(f, f"{f.check}: {f.found}" + (f" - {f.remedy}" if f.remedy else "")) for f in findings]
    return "\n".join(f"{marks[f.state]} {escape(words)}" for f, words in said)


def _no_device() -> Finding:
    if torch.version.cuda is None:
        return Finding("gpu", "note", "torch without CUDA", "policies run on the CPU; install a CUDA build for a GPU")
    found = f"torch for CUDA {torch.version.cuda} sees no GPU"
    if shutil.which("nvidia-smi") is None:
        remedy = "policies run on the CPU; if there is an NVIDIA GPU in this machine, install its driver"
        return Finding("gpu", "note", f"{found}, and there is no NVIDIA driver", remedy)
    return Finding("gpu", "bad", found, "check nvidia-smi, the driver's version, CUDA_VISIBLE_DEVICES")


def _device(index: int) -> Finding:
    p = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found = (
        f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, "
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    )
    if free < total / 2:
        return Finding(f"gpu {index}", "note", found, "another process holds more than half of the memory")
    return Finding(f"gpu {index}", "ok", found)


def _built_for(capability: tuple[int, int], built: list[str]) -> Finding:
    """torch must carry machine code of this major architecture, or PTX to compile from."""
    major, minor = capability
    codes = [b.removeprefix("sm_").rstrip("af") for b in built if b.startswith("sm_")]
    native = any(c.isdigit() and int(c) // 10 == major and int(c) % 10 <= minor for c in codes)
    ptx = any(b.startswith("compute_") for b in built)
    found = f"sm_{major}{minor}, torch built for {' '.join(built)}"
    if native or ptx:
        return Finding("torch build", "ok", found)
    return Finding("torch build", "bad", found, f"install a torch wheel whose list has sm_{major}{minor} or PTX")


def _attention() -> Finding:
    on = [
        name
        for name, enabled in (
            ("flash", torch._C._get_flash_sdp_enabled()),
            ("cudnn", torch._C._get_cudnn_sdp_enabled()),
            ("memory-efficient", torch._C._get_mem_efficient_sdp_enabled()),
        )
        if enabled
    ]
    if "flash" in on or "cudnn" in on:
        return Finding("attention", "ok", ", ".join(on))
    return Finding(
        "attention",
        "bad",
        f"fast attention is switched off ({', '.join(on) or 'math only'})",
        "something called torch.backends.cuda.enable_flash_sdp(False); vision will be slow",
    )


def _extra(name: str, extra: Extra) -> Finding:
    absent = [module for module in extra.modules if not _there(module)]
    if absent:
        return Finding(name, "note", f"{', '.join(absent)} not installed", f"for {extra.use}: {extra.remedy}")
    try:
        return Finding(name, "ok", importlib.metadata.version(extra.distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False
