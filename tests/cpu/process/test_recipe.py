"""The checkpoint's processor steps: understood exactly, or refused with the reason, before any weight is read."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from toy_checkpoint import Sizes, Step, Toy, lerobot, openpi

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process import ActionLimits, Edge, flow_processor

Change = Callable[[Toy], object]


def insert(toy: Toy, step: Step) -> None:
    assert toy.preprocessor is not None
    toy.preprocessor.insert(1, step)


def drop(toy: Toy, name: str) -> None:
    toy.preprocessor = [s for s in toy.preprocessor or () if s.name != name]
    toy.postprocessor = [s for s in toy.postprocessor or () if s.name != name]


def reverse(toy: Toy) -> None:
    assert toy.preprocessor is not None
    toy.preprocessor.reverse()


REFUSED: list[tuple[Change, str]] = [
    (lambda t: insert(t, Step("image_crop_resize_processor")), r"step 1 is 'image_crop_resize_processor'.*not skipped"),
    (lambda t: insert(t, Step("my.module.Custom")), r"step 1 is 'my.module.Custom'"),
    (lambda t: insert(t, t.step("normalizer_processor")), r"has the step 'normalizer_processor' twice"),
    (lambda t: drop(t, "normalizer_processor"), r"policy_preprocessor.json has no 'normalizer_processor' step"),
    (lambda t: drop(t, "unnormalizer_processor"), r"policy_postprocessor.json has no 'unnormalizer_processor' step"),
    (lambda t: drop(t, "tokenizer_processor"), r"has no 'tokenizer_processor' step"),
    (reverse, r"runs '.*' before '.*'; this policy needs it the other way"),
    (lambda t: setattr(t, "preprocessor", None), r"has no policy_preprocessor.json, so its normalisation is unknown"),
    (lambda t: setattr(t, "postprocessor", None), r"has no policy_postprocessor.json"),
    (
        lambda t: t.config.update(normalization_mapping={"STATE": "MEAN_STD", "ACTION": "QUANTILES"}),
        r"modes for STATE contradict: config.json says MEAN_STD, policy_preprocessor.json says QUANTILES",
    ),
    (
        lambda t: t.step("unnormalizer_processor").config.update(norm_map={"ACTION": "MIN_MAX"}),
        r"modes for ACTION contradict: .*QUANTILES.*policy_postprocessor.json says MIN_MAX",
    ),
    (lambda t: t.step("unnormalizer_processor").config.update(eps=1e-6), r"eps is 1e-08, the unnormaliser's 1e-06"),
    (
        lambda t: t.step("normalizer_processor").config["norm_map"].update(VISUAL="MEAN_STD"),
        r"images are normalised by MEAN_STD",
    ),
    (lambda t: t.step("tokenizer_processor").config.update(max_length=48), r"tokenizer_max_length is 64.*says 48"),
    (lambda t: t.step("tokenizer_processor").config.update(padding_side="left"), r"padding_side='left'"),
    (lambda t: t.step("device_processor").config.update(float_dtype="bfloat16"), r"casts to bfloat16"),
    (lambda t: t.config.update(use_relative_actions=True), r"contradicts itself about relative actions.*config.json"),
    (
        lambda t: t.step("absolute_actions_processor").config.update(enabled=True),
        r"absolute_actions_processor=True; set all alike",
    ),
    (
        lambda t: t.step("rename_observations_processor").config.update(rename_map={"a": "observation.images.top"}),
        r"maps 'a' to 'top', which is not a camera",
    ),
    (lambda t: t.statistics.pop("action"), r"no statistics for 'action' \(mode QUANTILES\).*for: observation.state"),
    (lambda t: t.statistics["action"].pop("q99"), r"needs the statistics q01, q99; .*Store q99"),
    (
        lambda t: t.config["output_features"]["action"].update(shape=[6]),
        r"'action' has 6 values, its statistics cover 7",
    ),
    (
        lambda t: t.statistics["action"].update(q01=np.zeros((5, 7)), q99=np.ones((5, 7))),
        r"statistics for 5 steps, the chunk has 10",
    ),
    (
        lambda t: t.statistics["observation.state"].update(q01=np.zeros((5, 8)), q99=np.ones((5, 8))),
        r"statistics per step \(5, 8\); a state has one",
    ),
    (lambda t: setattr(t, "tokenizer", None), r"no tokenizer in toy: put PaliGemma's tokenizer.json"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_checkpoint_that_contradicts_itself_is_refused(change: Change, message: str) -> None:
    toy = lerobot()
    flow_processor(Sizes(), toy)
    change(toy)
    with pytest.raises(CheckpointError, match=message):
        flow_processor(Sizes(), toy)


def test_the_sets_missing_key_and_the_keys_there_are_both_named() -> None:
    toy = lerobot()
    toy.statistics["so100.buffer.action"] = toy.statistics.pop("action")
    with pytest.raises(CheckpointError, match=r"'action'.*has statistics for: observation.state, so100.buffer.action"):
        flow_processor(Sizes(), toy)


def test_identity_has_to_be_said() -> None:
    toy = lerobot()
    toy.statistics = {}
    processor = flow_processor(Sizes(), toy, Edge(normalization="IDENTITY"))
    facts = processor.describe()
    assert facts["action"]["units"] == "as the model emits them (IDENTITY)"
    assert "'action' is not normalised" in " ".join(facts["notes"])
    with pytest.raises(
        CheckpointError, match=r"normalization='IDENTITY' was asked, but the checkpoint .* by QUANTILES"
    ):
        flow_processor(Sizes(), lerobot(), Edge(normalization="IDENTITY"))
    with pytest.raises(CheckpointError, match=r"normalization='MEAN_STD' was asked.*by QUANTILES; leave it out"):
        flow_processor(Sizes(), lerobot(), Edge(normalization="MEAN_STD"))


def test_an_openpi_directory_follows_its_family_and_says_so() -> None:
    for family, mode in (("pi05", "QUANTILES"), ("pi0", "MEAN_STD")):
        facts = flow_processor(Sizes(family), openpi()).describe()
        assert (facts["state"]["mode"], facts["action"]["mode"]) == (mode, mode)
        assert facts["image"]["resized_by"] == "host (Pillow, as openpi)"
        assert f"normalisation mode {mode} comes from openpi's default for {family}" in facts["notes"][0]
        assert facts["statistics"] == {"set": "physical-intelligence/toy", "convention": "openpi", "eps": 1e-6}
    asked = flow_processor(Sizes("pi05"), openpi(), Edge(normalization="MEAN_STD")).describe()
    assert asked["action"]["mode"] == "MEAN_STD"
    assert asked["notes"][0] == "normalisation mode MEAN_STD comes from the caller"


def test_who_decides_whether_the_state_is_in_the_prompt() -> None:
    assert "pi05_libero: state_in_prompt=False" in flow_processor(Sizes(), openpi()).describe()["notes"][1]
    for family, toy in (("pi05", lerobot()), ("pi0", lerobot("pi0")), ("pi0", openpi())):
        with pytest.raises(CheckpointError, match="is for pi05 in an openpi directory"):
            flow_processor(Sizes(family), toy, Edge(state_in_prompt=False))
    with pytest.raises(CheckpointError, match="state_in_prompt=True was asked, config.json says .*=False"):
        flow_processor(Sizes(), openpi(discrete_state_input=False), Edge(state_in_prompt=True))


def test_an_openpi_robot_may_be_narrower_than_its_statistics_when_the_caller_says_so() -> None:
    processor = flow_processor(Sizes(), openpi(), Edge(state_dim=6, action_dim=5))
    assert (processor.widths.state, processor.widths.action) == (6, 5)
    for edge in (Edge(action_dim=8), Edge(state_dim=40)):
        with pytest.raises(CheckpointError, match="does not fit"):
            flow_processor(Sizes(), openpi(), edge)
    with pytest.raises(CheckpointError, match="'action' was asked with 5 values, the checkpoint has 7"):
        flow_processor(Sizes(), lerobot(), Edge(action_dim=5))


def test_a_fine_tuned_base_keeps_its_padded_features_and_the_statistics_know_the_width() -> None:
    toy = lerobot()
    toy.config["input_features"]["observation.state"]["shape"] = [32]
    assert flow_processor(Sizes(), toy).widths.state == 8


def test_relative_actions_of_a_lerobot_checkpoint() -> None:
    toy = lerobot()
    names = ["a", "b", "c", "d", "e", "f", "gripper"]
    toy.step("relative_actions_processor").config.update(enabled=True, action_names=names)
    toy.step("absolute_actions_processor").config.update(enabled=True)
    toy.config["use_relative_actions"] = True
    assert flow_processor(Sizes(), toy).describe()["action"]["relative"] == [True] * 6 + [False]
    with pytest.raises(CheckpointError, match="has its own relative step"):
        flow_processor(Sizes(), toy, Edge(relative=(True,)))


def test_openpi_relative_masks_are_checked() -> None:
    assert flow_processor(Sizes(), openpi(), Edge(relative=(True, False))).describe()["action"]["relative"] == [
        True,
        False,
    ]
    with pytest.raises(CheckpointError, match="relative actions cover 9 dimensions"):
        flow_processor(Sizes(), openpi(), Edge(relative=(True,) * 9))


def test_wrong_arguments_are_refused_before_weights() -> None:
    with pytest.raises(ObservationError, match="rename maps camera 'a' to 'top'"):
        flow_processor(Sizes(), lerobot(), Edge(rename={"a": "top"}))
    with pytest.raises(CheckpointError, match="another model's tokenizer"):
        flow_processor(Sizes(), lerobot(), vocabulary=100)
    with pytest.raises(CheckpointError, match="no tokenizer at nowhere"):
        flow_processor(Sizes(), lerobot(), Edge(tokenizer=Path("nowhere")))
    with pytest.raises(ValueError, match="this robot needs"):
        flow_processor(Sizes(), lerobot(), Edge(limits=ActionLimits(step=np.ones(3))))
    with pytest.raises(CheckpointError, match="no processing for family 'act'"):
        flow_processor(Sizes("act"), lerobot())
