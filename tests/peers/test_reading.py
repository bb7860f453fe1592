"""The comparison itself: it names the stage and layer that is wrong, in words and in JSON; bf16 is reported."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import innerloop
from innerloop.measure.parity import compare
from recipes.tiny.make import Recipe

RECIPE = {"cameras": 2, "chunk": 10, "steps": 5, "capacity": 64, "image_size": 56}
TOWERS = "model.paligemma_with_expert."
WRONG = {
    f"{TOWERS}paligemma.model.vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight": "vision",
    f"{TOWERS}paligemma.model.multi_modal_projector.linear.bias": "vision",
    f"{TOWERS}paligemma.model.language_model.layers.0.self_attn.v_proj.weight": "values.0",
    f"{TOWERS}paligemma.model.language_model.layers.1.self_attn.k_proj.weight": "keys.1",
    f"{TOWERS}paligemma.model.language_model.layers.0.mlp.down_proj.weight": "keys.1",
    f"{TOWERS}gemma_expert.model.layers.1.self_attn.q_proj.weight": "velocity.0",
    "model.action_out_proj.bias": "velocity.0",
}


@pytest.mark.parametrize("tensor", WRONG)
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_a_wrong_weight_is_named(sides, tmp_path, family, tensor):
    both = sides(Recipe(family, **RECIPE))
    spoiled = shutil.copytree(both.directory, tmp_path / "spoiled")
    weights = load_file(spoiled / "model.safetensors")
    weights[tensor].view(-1)[3:40] += 0.5
    save_file(weights, spoiled / "model.safetensors")
    policy = innerloop.load(spoiled, device="cpu", precision="fp32")
    observation, noise = both.observation(), both.noise(0)
    report = compare(policy, both.official, observation, noise)
    policy.close()
    assert not report.passed
    assert report.first.stage == WRONG[tensor], report.text()
    assert f"first stage that differs is {WRONG[tensor]}" in report.text()
    flat = json.loads(json.dumps(report.to_json()))
    assert flat["first"] == WRONG[tensor]
    assert [s["stage"] for s in flat["stages"] if s["equal"]][:2] == ["images", "camera_mask"]


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_wrong_statistics_are_named(sides, tmp_path, family):
    both = sides(Recipe(family, **RECIPE))
    spoiled = shutil.copytree(both.directory, tmp_path / "spoiled")
    path = next(spoiled.glob("policy_preprocessor_step_*_normalizer_processor.safetensors"))
    statistics = load_file(path)
    save_file({name: value * 1.5 if "state" in name else value for name, value in statistics.items()}, path)
    policy = innerloop.load(spoiled, device="cpu", precision="fp32")
    report = compare(policy, both.official, both.observation(), both.noise(0))
    policy.close()
    assert report.first.stage == ("tokens" if family == "pi05" else "state"), report.text()


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_a_bfloat16_checkpoint_in_fp32(sides, agree, family):
    both = sides(Recipe(family, dtype="bfloat16", **RECIPE), official="float32")
    agree(both.compare(both.observation()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_bf16(sides, family, dtype, record_property):
    both = sides(Recipe(family, dtype=dtype, **RECIPE), precision="bf16", official="bfloat16")
    report = both.compare(both.observation())
    found = report.stage("normalized")
    record_property("max_abs", found.max_abs)
    record_property("cosine", found.cosine)
    print(
        f"\n{family} bf16 against LeRobot, checkpoint {dtype}: max abs {found.max_abs:.4f}, cosine {found.cosine:.6f}"
    )
    assert report.passed, report.text()
    for layer in range(2):  # only a bfloat16 checkpoint has rounded rotary frequencies
        assert report.stage(f"keys.{layer}").relative < 0.02, report.text()
