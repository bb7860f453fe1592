"""Captured starVLA policies and the Qwen levels on a GPU, against the same goldens as on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

import innerloop
from innerloop.levels import load_level
from recipes.tiny import qwen, starvla

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GOLDEN = np.load("tests/golden/starvla.npz")
LEVELS = np.load("tests/golden/qwen.npz")
FLOAT32, BFLOAT16 = 1e-3, 0.15  # normalised actions; sums on the device are ordered otherwise


@pytest.mark.parametrize("name", sorted(set(starvla.CASES) - {"fast"}))
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", FLOAT32), ("bf16", BFLOAT16)])
def test_captured_actions(tmp_path: Path, name: str, precision: str, tolerance: float) -> None:
    run = starvla.RUNS[name]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cuda", precision=precision)
    for index, case in enumerate(starvla.CASES[name]):
        seen = starvla.observation(run, case)
        observation = {key: seen[key] for key in ("images", "state", "prompt")}
        first = policy.infer(observation, noise=starvla.noise(run, case)).normalized
        np.testing.assert_allclose(first, GOLDEN[f"{name}.{index}"], atol=tolerance, rtol=0)
        policy.infer(observation, noise=starvla.noise(run, case) + 1)
        again = policy.infer(observation, noise=starvla.noise(run, case)).normalized
        np.testing.assert_array_equal(first, again)
    policy.close()


def test_captured_answer(tmp_path: Path) -> None:
    run, case = starvla.RUNS["fast"], starvla.CASES["fast"][0]
    policy = innerloop.load(starvla.write(tmp_path, run), device="cuda", precision="fp32")
    seen = starvla.observation(run, case)
    prepared = policy.processor.prepare({key: seen[key] for key in ("images", "state", "prompt")})
    inputs = prepared.inputs | {"noise": starvla.noise(run, case)}
    decision = policy.runtime.decide("answer", inputs, policy.capacity(prepared.context.prompt_tokens))
    theirs = GOLDEN["fast.0"]
    np.testing.assert_array_equal(decision.outputs["actions"][: len(theirs)], theirs)
    policy.close()


@pytest.mark.parametrize("index", range(len(qwen.TURNS)))
def test_level_answers_from_a_captured_step(tmp_path: Path, index: int) -> None:
    turn = qwen.TURNS[index]
    level = load_level(qwen.write(tmp_path, turn.kind, turn.seed, turn.tied), device="cuda", precision="fp32")
    level.ends = frozenset()
    answer = LEVELS[f"{index}.answer"].tolist()
    assert level.answer(turn.text, qwen.pictures(turn), len(answer)) == answer
