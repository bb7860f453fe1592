"""Groups of dimensions: scales and their inverses, poses in the frame of the robot's own, LIBERO's gripper."""

from typing import Any

import numpy as np
import pytest

from innerloop.contract import CheckpointError
from innerloop.process import modality
from innerloop.process.pipeline import Context, Draft
from innerloop.weights.embodiments import Embodiment

RANGE = {
    "min": [-1.0, 0.0],
    "max": [1.0, 4.0],
    "q01": [-0.5, 1.0],
    "q99": [0.5, 3.0],
    "mean": [0.0, 2.0],
    "std": [0.5, 0.0],
}


def robot(state: dict[str, Any], action: dict[str, Any] | None = None, **settings: Any) -> Embodiment:
    return Embodiment(
        name=settings.pop("name", "arm"),
        index=0,
        modality={"state": state, "action": action or {"modality_keys": ["arm"]}},
        statistics={kind: {"arm": RANGE} for kind in ("state", "action", "relative_action")},
        settings=settings,
    )


def test_quantiles_or_extremes() -> None:
    keys = {"modality_keys": ["arm"]}
    (group,) = modality.states(robot(keys))
    assert group.normalize(np.float32([0.5, 5.0]), clip=False).tolist() == [0.5, 1.5]
    assert group.normalize(np.float32([0.5, 5.0]), clip=True).tolist() == [0.5, 1.0]
    (group,) = modality.states(robot(keys, use_percentiles=True))
    assert group.normalize(np.float32([0.25, 2.0]), clip=True).tolist() == [0.5, 0.0]


def test_mean_and_deviation_leave_what_never_moved() -> None:
    found = robot({"modality_keys": ["arm"], "mean_std_embedding_keys": ["arm"]})
    (group,) = modality.states(found)
    assert group.normalize(np.float32([1.0, 7.0]), clip=True).tolist() == [2.0, 7.0]
    assert group.restore(np.float32([[2.0, 7.0]])).tolist() == [[1.0, 7.0]]


def test_angles_become_sine_and_cosine() -> None:
    keys = {"modality_keys": ["arm"], "sin_cos_embedding_keys": ["arm"]}
    (group,) = modality.states(robot(keys, apply_sincos_state_encoding=True))
    assert np.allclose(group.normalize(np.float32([0.0, np.pi / 2]), clip=True), [0, 1, 1, 0], atol=1e-6)
    (group,) = modality.states(robot(keys))
    assert group.scale == "range"


def test_restore_undoes_normalize_within_the_range() -> None:
    (group,) = modality.actions(robot({"modality_keys": ["arm"]}))
    values = np.random.default_rng(0).uniform([-1, 0], [1, 4], (20, 2)).astype(np.float32)
    there = np.stack([group.normalize(row, clip=True) for row in values])
    assert np.allclose(group.restore(there), values, atol=1e-6)
    assert group.restore(np.float32([[3.0, -3.0]])).tolist() == [[1.0, 0.0]]  # clipped first


def relative(kind: str, form: str, origin: str | None = None) -> dict[str, Any]:
    return {
        "modality_keys": ["arm"],
        "action_configs": [{"rep": "RELATIVE", "type": kind, "format": form, "state_key": origin}],
    }


def test_offsets_use_their_own_extremes_and_the_state() -> None:
    found = robot(
        {"modality_keys": ["arm"]}, relative("NON_EEF", "DEFAULT"), use_relative_action=True, use_percentiles=True
    )
    (group,) = modality.actions(found)
    assert group.relative == "offset"
    assert group.second.tolist() == [1.0, 4.0]  # not the quantiles
    assert group.absolute(np.float32([[1, 2], [3, 4]]), np.float32([10, 20])).tolist() == [[11, 22], [13, 24]]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (relative("EEF", "XYZ_ROTVEC"), "only poses xyz"),
        (relative("EEF", "XYZ_ROT6D"), "pose of 2 numbers"),
        (relative("NON_EEF", "DEFAULT", "leg"), "state 'leg', which the state does not have"),
    ],
)
def test_what_is_not_known_is_refused(action: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        modality.actions(robot({"modality_keys": ["arm"]}, action, use_relative_action=True))


def test_missing_statistics_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"state\.leg.*min, max are missing"):
        modality.states(robot({"modality_keys": ["leg"]}))


def pose(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A pose as 9 numbers whose rows are not quite orthonormal, and as a matrix."""
    first, second = np.linalg.qr(generator.standard_normal((3, 3)))[0][:2]
    place = generator.standard_normal(3)
    matrix = np.eye(4)
    matrix[:3] = np.column_stack([np.stack([first, second, np.cross(first, second)]), place])
    return np.concatenate([place, 1.3 * first, 0.7 * second + 0.2 * first]).astype(np.float32), matrix


def test_relative_poses_compose_as_matrices_do() -> None:
    generator = np.random.default_rng(1)
    (origin, base), *moved = (pose(generator) for _ in range(5))
    nine = np.zeros(9, np.float32)
    group = modality.Group("eef", 9, "range", nine, nine, "pose", reference=2)
    state = np.concatenate([np.float32([9, 9]), origin])
    got = group.absolute(np.stack([flat for flat, _ in moved]), state)
    for row, (_, turn) in zip(got, moved, strict=True):
        expected = base @ turn
        assert np.allclose(row, np.concatenate([expected[:3, 3], expected[:2, :3].ravel()]), atol=1e-5)
    again = group.relate(got, state)
    assert np.allclose(group.absolute(again, state), got, atol=1e-5)


def test_a_gripper_is_turned_round_where_the_checkpoint_says_so() -> None:
    keys = {"modality_keys": ["arm"]}
    for settings, column in (
        ({"action_decode_transform": "libero"}, 1),
        ({"libero_gripper_action": True}, 1),
        ({}, None),
    ):
        found = robot(keys, **settings)
        assert modality.gripper(found, modality.actions(found)) == column
    context = Context(np.zeros(2), 0, "", np.zeros(2))
    turned = modality.GripperStep(1).inverse(np.float32([[5, 1.0], [5, 0.2], [5, 0.5]]), context)
    assert turned.tolist() == [[5, -1], [5, 1], [5, 0]]
    assert modality.GripperStep(1).again(turned, context).tolist() == [[5, 1], [5, 0], [5, 0.5]]


def test_groups_side_by_side_keep_their_own_numbers() -> None:
    """Neighbours of one scale are computed as one; statistics by step, relative ones and angles among them."""
    generator = np.random.default_rng(2)

    def group(
        key: str, scale: modality.Scale, shape: tuple[int, ...], relative: modality.Relative = ""
    ) -> modality.Group:
        low = generator.standard_normal(shape).astype(np.float32)
        return modality.Group(key, shape[-1], scale, low, low + np.float32([0, 1, 2]), relative, reference=1)

    states = tuple(group(scale, scale, (3,)) for scale in ("range", "range", "angle", "deviation", "range"))
    actions = (
        group("a", "range", (3,)),
        group("b", "range", (3,), "offset"),
        group("c", "range", (7, 3)),
        group("d", "range", (7, 3), "offset"),
        group("e", "deviation", (3,)),
    )
    step = modality.GroupStep(states, actions, 5, True, 20)
    state = generator.standard_normal(15).astype(np.float32)
    draft = Draft({}, "", state)
    draft.raw_state = draft.state = state
    step.forward(draft)
    parts = [one.normalize(state[3 * i :][:3], True) for i, one in enumerate(states)]
    assert draft.state.tobytes() == np.concatenate(parts).tobytes()
    assert draft.inputs["state"][:18].tobytes() == draft.state.tobytes()
    chunk, context = generator.standard_normal((7, 20)).astype(np.float32), Context(state, 0, "", state)
    made = step.inverse(chunk, context)
    parts = [one.absolute(one.restore(chunk[:5, 3 * i : 3 * i + 3]), state) for i, one in enumerate(actions)]
    assert made.tobytes() == np.concatenate(parts, axis=1).tobytes()
    again = step.again(made[:4], context)
    parts = [one.rows(4).normalize(one.relate(part[:4], state), True) for one, part in zip(actions, parts, strict=True)]
    assert again.tobytes() == np.concatenate(parts, axis=1).tobytes()
