"""The fingerprint: equal for equal bundles wherever they lie, different for any difference that acts."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from innerloop.weights import digest_json, fingerprint, open_checkpoint, processors_digest, statistics_digest
from innerloop.weights.identity import TensorDigest
from innerloop.weights.processors import ProcessorStep

PLAN = {
    "name": "p",
    "fingerprint": "",
    "buffers": [{"name": "x", "shape": [2], "address": None}],
    "stages": [{"name": "s", "reads": ["x"]}],
}
PARTS: dict[str, Any] = {
    "weights": "w",
    "statistics": "s",
    "processors": "p",
    "adapter": None,
    "precision": "bf16",
    "plan": PLAN,
    "kernels": {"innerloop": "1"},
}


def test_definition() -> None:
    text = (
        '{"adapter":null,"kernels":{"innerloop":"1"},"plan":{"buffers":[{"name":"x","shape":[2]}],"name":"p",'
        '"stages":[{"name":"s","reads":["x"]}]},"precision":"bf16","processors":"p","schema":1,"statistics":"s",'
        '"weights":"w"}'
    )
    assert fingerprint(**PARTS) == hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "W"},
        {"statistics": "S"},
        {"processors": "P"},
        {"adapter": "a"},
        {"precision": "fp32"},
        {"plan": {**PLAN, "stages": []}},
        {"plan": {**PLAN, "buffers": [{"name": "x", "shape": [3], "address": None}]}},
        {"kernels": {"innerloop": "2"}},
    ],
)
def test_every_part_counts(change: dict[str, Any]) -> None:
    assert fingerprint(**{**PARTS, **change}) != fingerprint(**PARTS)


def test_addresses_and_an_earlier_fingerprint_do_not_count() -> None:
    placed = {**PLAN, "fingerprint": "old", "buffers": [{**PLAN["buffers"][0], "address": 4096}]}
    assert fingerprint(**{**PARTS, "plan": placed}) == fingerprint(**PARTS)


def test_one_changed_statistic() -> None:
    statistics = {"action": {"mean": np.zeros(3, np.float32), "std": np.ones(3, np.float32)}}
    digest = statistics_digest(statistics)
    assert statistics_digest({"action": dict(reversed(statistics["action"].items()))}) == digest
    swapped = {"action": {"mean": statistics["action"]["std"], "std": statistics["action"]["mean"]}}
    assert statistics_digest(swapped) != digest
    statistics["action"]["std"][1] = np.nextafter(np.float32(1), np.float32(2))
    assert statistics_digest(statistics) != digest


def test_byte_order_of_the_machine_does_not_count() -> None:
    values = np.arange(3, dtype="<f4")
    assert statistics_digest({"a": {"b": values}}) == statistics_digest({"a": {"b": values.astype(">f4")}})


def test_processors_and_their_order() -> None:
    first, second = ProcessorStep("a", {"eps": 1}), ProcessorStep("b", {}, {"x.mean": np.zeros(2)})
    digest = processors_digest((first, second), None)
    assert processors_digest((second, first), None) != digest
    assert processors_digest(None, (first, second)) != digest
    assert processors_digest((ProcessorStep("a", {"eps": 2}), second), None) != digest
    assert processors_digest((first, ProcessorStep("b", {}, {"x.mean": np.ones(2)})), None) != digest


def test_two_copies_of_one_directory(lerobot: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    first = open_checkpoint(lerobot)
    digests = (statistics_digest(first.statistics), processors_digest(first.preprocessor, first.postprocessor))
    lerobot.rename(moved)
    second = open_checkpoint(moved)
    assert digests == (
        statistics_digest(second.statistics),
        processors_digest(second.preprocessor, second.postprocessor),
    )


def test_json_in_canonical_form() -> None:
    assert digest_json({"a": 1, "b": [2]}) == digest_json({"b": [2], "a": 1})
    assert digest_json({"a": "é"}) != digest_json({"a": "e"})


def test_tensors_in_any_order_and_layout() -> None:
    a, b = torch.randn(300, 7), torch.randn(4).bfloat16()

    def digest(*order: tuple[str, torch.Tensor]) -> str:
        with TensorDigest() as digest:
            for name, tensor in order:
                digest.add(name, tensor)
            return digest.hexdigest()

    assert digest(("a", a), ("b", b)) == digest(("b", b), ("a", a.T.contiguous().T))
    assert digest(("a", a), ("b", b)) != digest(("a", b), ("b", a))
    assert digest(("a", a)) != digest(("a", a.reshape(7, 300)))


def test_a_tensor_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(tensor: torch.Tensor) -> str:
        with TensorDigest() as digest:
            digest.add("t", tensor)
            return digest.hexdigest()

    tensor = torch.zeros((40 << 20) + 5, dtype=torch.uint8)
    base = digest(tensor)
    assert digest(tensor) == base
    for position in (0, (16 << 20) - 1, 16 << 20, -1):
        tensor[position] = 1
        assert digest(tensor) != base
        tensor[position] = 0
