"""The whole of it: an observation becomes the plan's inputs and a chunk comes back in robot units."""

import copy
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image
from toy_checkpoint import Sizes, Step, is_plain, lerobot, normalized, observation, openpi

from innerloop.contract import CheckpointError, NonFiniteError, ObservationError
from innerloop.process import ActionLimitError, ActionLimits, Edge, ImageSpec, Processor, flow_processor
from innerloop.process import synthetic_processor as synthetic
from innerloop.process.pipeline import Context, Draft, Pipeline

FAMILIES = ("pi05", "pi0")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        all(np.array_equal(x, y) for x, y in zip(a[k], b[k], strict=True))
        if k == "frames"
        else np.array_equal(a[k], b[k])
        for k in a
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_the_plans(family: str) -> None:
    given = observation()
    inputs = flow_processor(Sizes(family), lerobot(family)).prepare(given).inputs
    expected = (
        {"frames", "frame_sizes", "camera_mask", "tokens", "prompt_length"}
        | {"previous", "guidance", "prefix_length"}
        | ({"state"} if family == "pi0" else set())
    )
    assert set(inputs) == expected
    frames = inputs["frames"]
    np.testing.assert_array_equal(frames[0], given["images"]["front"].reshape(-1))
    np.testing.assert_array_equal(frames[1], given["images"]["wrist"].reshape(-1))
    assert [f.dtype for f in frames] == [np.uint8] * 3
    assert inputs["frame_sizes"].tolist() == [[48, 64], [48, 64], [1, 1]]
    assert inputs["camera_mask"].tolist() == [1, 1, 0]
    assert (inputs["tokens"].shape, inputs["prompt_length"].shape) == ((64,), (1,))
    for name in expected - {"frames", "state"}:
        assert inputs[name].dtype == (np.float32 if name in ("previous", "guidance") else np.int32)
    if family == "pi0":
        assert (inputs["state"].shape, inputs["state"].dtype) == ((32,), np.float32)


def test_one_declared_camera_of_two_is_masked() -> None:
    given = observation()
    given["images"]["front"] = None
    inputs = flow_processor(Sizes(), lerobot()).prepare(given).inputs
    assert inputs["camera_mask"].tolist() == [0, 1, 0]
    assert inputs["frame_sizes"].tolist() == [[1, 1], [48, 64], [1, 1]]


@pytest.mark.parametrize("source", [lerobot, openpi])
@pytest.mark.parametrize("family", FAMILIES)
def test_actions_come_back_in_robot_units_at_the_robots_width(source: Any, family: str) -> None:
    toy, sizes = (lerobot(family) if source is lerobot else openpi()), Sizes(family)
    processor = flow_processor(sizes, toy)
    chunk = normalized(sizes)
    kept = chunk.copy()
    actions = processor.finish(chunk, processor.prepare(observation()).context)
    stats = {k: v.astype(np.float64) for k, v in toy.statistics["action"].items()}
    unit = chunk[:, :7].astype(np.float64)
    if family == "pi0":
        expected = unit * stats["std"] + stats["mean"]
    else:
        expected = (unit + 1) / 2 * (stats["q99"] - stats["q01"]) + stats["q01"]
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
    assert actions.dtype == np.float32
    np.testing.assert_array_equal(chunk, kept)


def test_a_zero_output_is_the_mean_not_zero() -> None:
    toy = lerobot("pi0")
    toy.statistics["action"].update(mean=np.full(7, 10, np.float32), std=np.full(7, 5, np.float32))
    processor = flow_processor(Sizes("pi0"), toy)
    actions = processor.finish(np.zeros((10, 32), np.float32), processor.prepare(observation()).context)
    np.testing.assert_array_equal(actions, 10)
    assert processor.describe()["action"]["units"] == "robot"


def test_statistics_per_step_and_a_narrow_robot() -> None:
    toy = lerobot("pi0")
    mean = np.arange(10, dtype=np.float32)[:, None].repeat(7, 1)
    toy.statistics["action"].update(mean=mean, std=np.ones((10, 7), np.float32))
    processor = flow_processor(Sizes("pi0"), toy)
    actions = processor.finish(np.zeros((10, 32), np.float32), processor.prepare(observation()).context)
    np.testing.assert_array_equal(actions[:, 0], np.arange(10))


def relative_processor() -> Processor:
    toy = lerobot("pi0")
    toy.step("relative_actions_processor").config.update(enabled=True)
    toy.step("absolute_actions_processor").config.update(enabled=True)
    toy.config["use_relative_actions"] = True
    return flow_processor(Sizes("pi0"), toy)


def test_a_relative_chunk_keeps_its_own_anchor() -> None:
    processor, first, later = relative_processor(), observation(), observation()
    later["state"] = later["state"] + 1
    context = processor.prepare(first).context
    processor.prepare(later)
    chunk = normalized(Sizes())
    offsets = flow_processor(Sizes("pi0"), lerobot("pi0")).finish(chunk, context)
    np.testing.assert_allclose(processor.finish(chunk, context), offsets + first["state"][:7], atol=1e-6)


def test_the_state_is_written_into_the_prompt_at_its_true_width() -> None:
    processor = flow_processor(Sizes(), lerobot())
    context = processor.prepare(observation()).context
    bins = context.prompt.split("State: ")[1].removesuffix(";\nAction: ").split(" ")
    assert len(bins) == 8
    assert context.normalized_state.shape == (8,)
    expected = np.digitize(context.normalized_state, np.linspace(-1, 1, 257)[:-1]) - 1
    assert bins == [str(b) for b in expected]


@pytest.mark.parametrize("said", ["config", "caller"])
def test_an_openpi_policy_may_leave_the_state_out_of_the_prompt(said: str) -> None:
    toy, edge = (
        (openpi(discrete_state_input=False), Edge()) if said == "config" else (openpi(), Edge(state_in_prompt=False))
    )
    processor = flow_processor(Sizes(), toy, edge)
    a, b = observation(), observation()
    b["state"] = b["state"] + 0.3
    assert processor.prepare(a).context.prompt == "pick up the red block\n"
    assert same(processor.prepare(a).inputs, processor.prepare(b).inputs)
    assert processor.describe()["state"]["input"] == "none"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_caller_is_changed_and_calls_do_not_touch_each_other(family: str) -> None:
    processor, given = flow_processor(Sizes(family), lerobot(family)), observation()
    kept = copy.deepcopy(given)
    for image in given["images"].values():
        image.flags.writeable = False
    first = processor.prepare(given).inputs
    snapshot = copy.deepcopy(first)
    other = observation(prompt="put the cube into the bowl")
    other["state"] = other["state"] * -0.5
    for _ in range(20):
        processor.prepare(other)
        assert same(processor.prepare(given).inputs, snapshot)
    assert same(first, snapshot)
    np.testing.assert_array_equal(given["state"], kept["state"])
    assert all(np.array_equal(given["images"][c], kept["images"][c]) for c in kept["images"])


def test_openpi_frames_are_resized_as_openpi_does() -> None:
    given = observation()
    inputs = flow_processor(Sizes(), openpi(image_resolution=[28, 28])).prepare(given).inputs
    assert inputs["frame_sizes"].tolist()[:2] == [[28, 28], [28, 28]]
    small = Image.fromarray(given["images"]["front"]).resize((28, 21), Image.Resampling.BILINEAR)
    frame = inputs["frames"][0].reshape(28, 28, 3)
    np.testing.assert_array_equal(frame[3:24], np.asarray(small))
    assert not frame[:3].any()
    assert not frame[24:].any()
    fitting = dict(given, images=dict.fromkeys(given["images"], frame))
    again = flow_processor(Sizes(), openpi(image_resolution=[28, 28])).prepare(fitting).inputs
    np.testing.assert_array_equal(again["frames"][0], frame.reshape(-1))


def test_every_layout_of_the_same_picture_gives_the_same_inputs() -> None:
    given = observation()
    expected = flow_processor(Sizes(), lerobot()).prepare(given).inputs
    given["images"] = {
        c: (i[..., ::-1].transpose(2, 0, 1) / 255).astype(np.float32) for c, i in given["images"].items()
    }
    spec = ImageSpec(layout="CHW", color="BGR", range="unit")
    assert same(flow_processor(Sizes(), lerobot(), Edge(images=spec)).prepare(given).inputs, expected)


def test_renames_of_caller_and_checkpoint() -> None:
    toy, given = lerobot(), observation()
    expected = flow_processor(Sizes(), toy).prepare(given).inputs
    toy.step("rename_observations_processor").config["rename_map"] = {
        "observation.images.cam2": "observation.images.wrist"
    }
    renamed = dict(given, images={"top": given["images"]["front"], "hand": given["images"]["wrist"]})
    processor = flow_processor(Sizes(), toy, Edge(rename={"top": "front", "hand": "cam2"}))
    assert same(processor.prepare(renamed).inputs, expected)
    assert processor.describe()["stored_rename"] == {"cam2": "wrist"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"state": np.zeros(33)}, "state has 33 values, the checkpoint takes 8"),
    ({"state": np.full(8, np.nan)}, "state is not finite"),
    ({"prompt": ["pick"]}, "observation\\['prompt'\\] is list; pass one string"),
    ({"prompt": "pick " * 80}, "the prompt has .* tokens with its template, the checkpoint takes 64"),
    ({"images": [1]}, "observation\\['images'\\] is list"),
    ({"images": {"front": np.zeros((4, 4, 3), np.uint8)}}, "missing: wrist"),
    ({"task": "pick"}, "exactly the keys images, state, prompt; missing: none; unknown: task"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_observations_are_refused(change: dict[str, Any], message: str) -> None:
    processor = flow_processor(Sizes(), lerobot())
    with pytest.raises(ObservationError, match=message):
        processor.prepare(observation() | change)


def test_a_missing_key_and_an_image_that_vanishes() -> None:
    processor, given = flow_processor(Sizes(), lerobot()), observation()
    with pytest.raises(ObservationError, match="missing: state"):
        processor.prepare({k: v for k, v in given.items() if k != "state"})
    given["images"]["wrist"] = np.zeros((1, 64, 3), np.uint8)
    with pytest.raises(ObservationError, match="camera 'wrist': 1x64 has no pixels left when fitted into 28x28"):
        processor.prepare(given)


@pytest.mark.parametrize("given", [None, 3, "images", [1], np.zeros((2, 2))])
def test_what_is_no_observation_is_refused(given: Any) -> None:
    with pytest.raises(ObservationError, match="pass a mapping with the keys images, state, prompt"):
        flow_processor(Sizes(), lerobot()).prepare(given)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(ObservationError, match="not valid Unicode"):
        flow_processor(Sizes(), lerobot()).prepare(observation(prompt="caf\ud800"))


def test_prompts_up_to_the_capacity_fit_and_one_more_does_not() -> None:
    processor = flow_processor(Sizes("pi0"), lerobot("pi0"))
    digits = 62  # one token each, beside BOS and the newline
    assert processor.prepare(observation(prompt="")).context.prompt_tokens == 2
    assert processor.prepare(observation(prompt="7" * digits)).inputs["prompt_length"][0] == 64
    with pytest.raises(ObservationError, match="has 65 tokens with its template, the checkpoint takes 64"):
        processor.prepare(observation(prompt="7" * (digits + 1)))


def test_what_is_not_finite_never_becomes_an_action() -> None:
    processor = flow_processor(Sizes(), lerobot())
    context, chunk = processor.prepare(observation()).context, normalized(Sizes())
    chunk[2, 30] = np.nan
    with pytest.raises(NonFiniteError, match="normalised actions .* step 2, dimension 30"):
        processor.finish(chunk, context)
    chunk[2, 30] = 0
    chunk[1, 1] = 3e38
    with (
        np.errstate(over="ignore"),
        pytest.raises(NonFiniteError, match="^actions are not finite: .* step 1, dimension 1"),
    ):
        processor.finish(chunk, context)
    with pytest.raises(ValueError, match=r"shape \(3, 32\); expected \(10, 32\)"):
        processor.finish(chunk[:3], context)


def test_limits_apply_last_in_robot_units() -> None:
    toy = lerobot("pi0")
    toy.statistics["action"].update(mean=np.zeros(7, np.float32), std=np.full(7, 10, np.float32))
    chunk = np.zeros((10, 32), np.float32)
    chunk[3, 2] = 1.0
    position = np.stack([np.full(7, -5.0), np.full(7, 5.0)], 1)
    reject = flow_processor(Sizes("pi0"), toy, Edge(limits=ActionLimits(position=position)))
    context = reject.prepare(observation()).context
    with pytest.raises(ActionLimitError, match="position of joint 2 at step 3 is 10, the bound is 5"):
        reject.finish(chunk, context)
    clamp = flow_processor(Sizes("pi0"), toy, Edge(limits=ActionLimits(position=position, on_violation="clamp")))
    assert clamp.finish(chunk, context)[3, 2] == 5
    assert clamp.describe()["action"]["limits"] == "clamp"


def test_noise_is_checked_or_drawn() -> None:
    processor = flow_processor(Sizes(), lerobot())
    given = normalized(Sizes())
    taken = processor.noise(given)
    np.testing.assert_array_equal(taken, given)
    assert not np.shares_memory(taken, given)
    assert processor.noise(given.astype(np.float64)).dtype == np.float32
    np.testing.assert_array_equal(processor.noise(seed=7), processor.noise(seed=7))
    assert not np.array_equal(processor.noise(seed=7), processor.noise(seed=8))
    assert not np.array_equal(processor.noise(), processor.noise())
    for bad, message in (
        (given[:5], r"shape \(5, 32\); this checkpoint takes \(10, 32\)"),
        (given[None], r"\(1, 10, 32\)"),
        (np.zeros((10, 32), int), r"float numpy array .* got int64"),
        ([[0.0]], r"got list"),
        (np.full((10, 32), np.nan), r"not finite"),
    ):
        with pytest.raises(ObservationError, match=message):
            processor.noise(bad)
    with pytest.raises(ObservationError, match="both noise and seed"):
        processor.noise(given, seed=1)


def test_a_forked_process_does_not_draw_its_parents_noise() -> None:
    code = (
        "import os\n"
        "from innerloop.process.noise import draw_noise\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(write, draw_noise(None, 2, 2).tobytes())\n"
        "    os._exit(0)\n"
        "assert draw_noise(None, 2, 2).tobytes() != os.read(read, 16)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_shared_between_observations_cannot_be_changed() -> None:
    processor = flow_processor(Sizes(), lerobot())
    first, second = processor.prepare(observation()).inputs, processor.prepare(observation()).inputs
    for name, value in first.items():
        arrays = value if isinstance(value, tuple) else (value,)
        for array in arrays if second[name] is value else ():
            assert not array.flags.writeable, name


class Marked:
    """A step that writes down when it ran."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def forward(self, draft: Draft) -> None:
        self.log.append(f"{self.name}>")

    def inverse(self, actions: np.ndarray, context: Context) -> np.ndarray:
        self.log.append(f"<{self.name}")
        return actions


def test_inverses_run_backwards_by_construction() -> None:
    log: list[str] = []
    pipeline = Pipeline().push(Marked("a", log)).push(Marked("b", log)).push(Marked("c", log))
    draft = Draft({}, "", np.zeros(1), np.zeros(1))
    for step in pipeline.forward:
        step.forward(draft)
    for step in pipeline.inverse:
        step.inverse(np.zeros((1, 1)), Context(np.zeros(1), 0, "", np.zeros(1)))
    assert log == ["a>", "b>", "c>", "<c", "<b", "<a"]


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_is_plain_data_and_complete(family: str) -> None:
    toy = lerobot(family)
    toy.config["action_feature_names"] = list("abcdefg")
    facts = flow_processor(Sizes(family), toy).describe()
    assert is_plain(facts)
    assert facts["cameras"] == ["front", "wrist"]
    assert facts["empty_cameras"] == ["empty_camera_0"]
    assert facts["state"] | {"mode": ""} == {
        "width": 8, "padded": 32, "mode": "", "input": "prompt" if family == "pi05" else "vector",
    }  # fmt: skip
    assert facts["action"]["names"] == list("abcdefg")
    assert (facts["action"]["width"], facts["action"]["padded"], facts["action"]["horizon"]) == (7, 32, 10)
    assert facts["statistics"]["convention"] == "lerobot"


def test_unnormalised_keys_of_a_checkpoint_are_left_alone() -> None:
    toy = lerobot("pi0")
    toy.step("normalizer_processor").config["normalize_observation_keys"] = ["observation.other"]
    processor, given = flow_processor(Sizes("pi0"), toy), observation()
    np.testing.assert_array_equal(processor.prepare(given).inputs["state"][:8], given["state"])
    assert processor.describe()["state"]["mode"] == "IDENTITY"


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_need_no_files(family: str) -> None:
    sizes = Sizes(family, prompt_capacity=200)
    processor = synthetic(sizes, 1000)
    short, long = (processor.prepare(observation(prompt=p)) for p in ("pick", "pick up the block"))
    assert long.context.prompt_tokens - short.context.prompt_tokens == 3
    assert 0 < short.inputs["tokens"].max() < 1000
    chunk = normalized(sizes)
    np.testing.assert_array_equal(processor.finish(chunk, short.context), chunk)
    assert is_plain(processor.describe())


def test_host_time_of_two_frames() -> None:
    processor = flow_processor(Sizes(), lerobot())
    frames = np.random.default_rng(0).integers(0, 256, (2, 480, 640, 3), dtype=np.uint8)
    given = observation() | {"images": {"front": frames[0], "wrist": frames[1]}}
    best = 1.0
    for turn in range(100):
        given["state"] = np.random.default_rng(turn).uniform(-1, 1, 8).astype(np.float32)
        start = time.perf_counter()
        processor.prepare(given)
        best = min(best, time.perf_counter() - start)
    assert best < 3e-4


def test_a_custom_step_is_never_skipped() -> None:
    toy = lerobot()
    assert toy.postprocessor is not None
    toy.postprocessor.insert(1, Step("vla_jepa_clip_actions"))
    with pytest.raises(CheckpointError, match="policy_postprocessor.json step 1 is 'vla_jepa_clip_actions'"):
        flow_processor(Sizes(), toy)
