"""The three choices of kernels, and that both implementations of an op answer to the same call."""

import importlib
import inspect

import pytest
import torch

from innerloop import kernels
from innerloop.kernels import select

OPS = {
    "norm": ("rms_norm", "layer_norm", "layer_norms", "add_rms_norm", "add_layer_norm", "modulated_rms_norm", "gated_add_rms_norm",
             "modulated_layer_norm", "gated_add"),
    "rope": ("rotate_and_store",),
    "attention": ("attention", "rotary_attention", "continued", "remembered"),
    "activation": ("activate", "glu"),
    "linear": ("linear", "batched", "gated", "rotated"),
    "image": ("frames_to_patches", "planes"),
    "resample": ("resample",),
    "embedding": ("embed", "interleave"),
    "timestep": ("sincos",),
    "euler": ("project_in", "project_and_step", "guide", "impose"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "function"), [(op, f) for op, names in OPS.items() for f in names])
def test_implementations_have_one_signature(op: str, function: str) -> None:
    modules = (importlib.import_module(f"innerloop.kernels.{op}{part}") for part in ("", ".reference", ".triton"))
    public, reference, triton = (inspect.signature(getattr(m, function)) for m in modules)
    assert public == reference == triton


def test_the_choice_is_scoped() -> None:
    assert kernels.selected() == "fused"
    with kernels.use_kernels("reference"):
        assert kernels.selected() == "reference"
    assert kernels.selected() == "fused"


def test_cpu_tensors_take_the_reference() -> None:
    module = importlib.import_module("innerloop.kernels.norm.reference")
    assert select.chosen(module.rms_norm, torch.zeros(1)) is module.rms_norm


def test_device_tensors_take_the_namesake() -> None:
    reference, triton = (importlib.import_module(f"innerloop.kernels.norm.{m}") for m in ("reference", "triton"))

    class OnDevice:
        is_cuda = True

    assert select.chosen(reference.rms_norm, OnDevice()) is triton.rms_norm  # type: ignore[arg-type]
    with kernels.use_kernels("reference"):
        assert select.chosen(reference.rms_norm, OnDevice()) is reference.rms_norm  # type: ignore[arg-type]
