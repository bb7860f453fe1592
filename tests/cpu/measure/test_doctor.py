"""The doctor names the cause and the remedy."""

import tomllib
from pathlib import Path

import pytest
import torch

from innerloop.measure import doctor

ROOT = Path(__file__).resolve().parents[3]


def test_every_finding_of_this_machine_is_complete() -> None:
    findings = doctor.examine()
    assert {f.state for f in findings} <= {"ok", "note", "bad"}
    assert all(f.remedy for f in findings if f.state != "ok")
    assert doctor.as_json(findings)["findings"][0]["check"] == "python"


def test_a_torch_without_code_for_the_device_is_named() -> None:
    built = ["sm_80", "sm_90", "sm_100", "sm_120"]
    bad = doctor._built_for((11, 0), built)
    assert bad.state == "bad"
    assert "sm_110" in bad.remedy
    assert doctor._built_for((11, 0), [*built, "compute_120"]).state == "ok"  # PTX can be compiled for it
    assert doctor._built_for((8, 9), built).state == "ok"  # sm_80 code runs on 8.9
    assert doctor._built_for((12, 1), built).state == "ok"
    assert doctor._built_for((9, 0), ["sm_90a"]).state == "ok"


def test_switched_off_attention_is_named() -> None:
    flash, cudnn = torch._C._get_flash_sdp_enabled(), torch._C._get_cudnn_sdp_enabled()
    try:
        torch._C._set_sdp_use_flash(False)
        torch._C._set_sdp_use_cudnn(False)
        finding = doctor._attention()
    finally:
        torch._C._set_sdp_use_flash(flash)
        torch._C._set_sdp_use_cudnn(cudnn)
    assert finding.state == "bad"
    assert "enable_flash_sdp" in finding.remedy


def test_a_missing_extra_says_what_it_is_for_and_how_to_get_it() -> None:
    for module in ("no_such_module_here", "no_such_package_here.part"):
        finding = doctor._extra("lasers", doctor.Extra(("json", module), "lasers", "cutting", "pip install lasers"))
        assert (finding.state, finding.remedy) == ("note", "for cutting: pip install lasers")
        assert finding.found == f"{module} not installed"


def test_extras_are_those_of_the_package() -> None:
    """What an extra's remedy names must be what pyproject.toml installs under that name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("sentencepiece", "orbax", "serve", "sim"):
        extra = doctor.EXTRAS[name]
        assert f"'innerloop[{name}]'" in extra.remedy
        assert len(extra.modules) == len(listed[name]), name
        assert any(requirement.startswith(extra.distribution) for requirement in listed[name]), name


@pytest.mark.parametrize(("driver", "state"), [(None, "note"), ("/usr/bin/nvidia-smi", "bad")])
def test_no_gpu_is_a_fault_only_where_there_is_a_driver(
    driver: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor.shutil, "which", lambda _: driver)
    assert doctor._no_device().state == state
