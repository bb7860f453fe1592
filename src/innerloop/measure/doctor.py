"""Why this machine is slow or refuses: each check names what is wrong and the remedy."""

import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

EXTRAS = {
    "sentencepiece": ("sentencepiece", "tokenizer.model files"),
    "orbax": ("orbax.checkpoint", "openpi JAX checkpoints"),
    "serve": ("websockets", "innerloop serve"),
    "triton": ("triton", "our kernels (Linux wheels of torch for CUDA bring it)"),
    "cuda": ("cuda.bindings", "the few-row kernels of the action expert (torch for CUDA 13 brings it)"),
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
    findings += [_extra(name, *what) for name, what in EXTRAS.items()]
    return findings


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Plain data, with the interpreter's path."""
    return {"python": sys.executable, "findings": [asdict(f) for f in findings]}


def _no_device() -> Finding:
    if torch.version.cuda is None:
        return Finding("gpu", "note", "torch without CUDA", "policies run on the CPU; install a CUDA build for a GPU")
    return Finding(
        "gpu",
        "bad",
        f"torch for CUDA {torch.version.cuda} sees no GPU",
        "check nvidia-smi, the driver, CUDA_VISIBLE_DEVICES",
    )


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


def _extra(name: str, module: str, use: str) -> Finding:
    top = module.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return Finding(name, "note", "not installed", f"needed for {use}")
    try:
        version = importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        version = "installed"
    return Finding(name, "ok", version)
