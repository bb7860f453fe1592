"""The doctor names the cause and the remedy."""

import torch

from innerloop.measure import doctor


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


def test_a_missing_extra_says_what_it_is_for() -> None:
    finding = doctor._extra("lasers", "no_such_module_here", "cutting")
    assert (finding.state, "cutting" in finding.remedy) == ("note", True)
