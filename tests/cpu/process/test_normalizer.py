"""State: normalisation undoes itself in every mode, bins are the official ones, bad states are refused."""

from typing import Any

import numpy as np
import pytest

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process import Normalizer, discretize
from innerloop.process.state import LEROBOT, OPENPI, Convention, pad, to_state

MODES = ("IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "Q02_Q98")


def stats(width: int = 7, horizon: int | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (width,) if horizon is None else (horizon, width)
    low, span = rng.uniform(-3, 3, shape), rng.uniform(0.05, 5, shape)
    found = dict.fromkeys(("mean", "min", "q01", "q10", "q02"), low)
    return found | {"std": span} | dict.fromkeys(("max", "q99", "q90", "q98"), low + span)


@pytest.mark.parametrize("convention", [LEROBOT, OPENPI], ids=lambda c: c.name)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon", [None, 10])
def test_unnormalise_undoes_normalise(mode: str, convention: Convention, horizon: int | None) -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        normalizer = Normalizer.from_statistics("action", mode, stats(horizon=horizon, seed=seed), convention)
        actions = rng.uniform(-4, 4, (10, 7)).astype(np.float32)
        kept = actions.copy()
        back = normalizer.invert(normalizer.apply(actions))
        np.testing.assert_allclose(back, actions, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(actions, kept)
        assert back.dtype == convention.dtype


def test_the_formulas() -> None:
    given = {"mean": [10.0], "std": [5.0], "q01": [1.0], "q99": [3.0]}
    lerobot = Normalizer.from_statistics("action", "MEAN_STD", given)
    assert lerobot.invert(np.zeros(1)) == 10
    assert lerobot.apply(np.array([20.0])) == 2
    openpi = Normalizer.from_statistics("action", "MEAN_STD", given, OPENPI)
    assert openpi.invert(np.ones(1)) == 5.0 + 1e-6 + 10.0
    quantiles = Normalizer.from_statistics("action", "QUANTILES", given, OPENPI)
    assert quantiles.apply(np.array([2.0])) == (2.0 - 1.0) / (3.0 - 1.0 + 1e-6) * 2.0 - 1.0
    assert quantiles.invert(np.array([1.0])) == (3.0 - 1.0 + 1e-6) + 1.0


def test_statistics_per_step_differ_by_step() -> None:
    mean = np.arange(50.0)[:, None].repeat(14, 1)
    normalizer = Normalizer.from_statistics("action", "MEAN_STD", {"mean": mean, "std": np.full((50, 14), 2.0)})
    actions = normalizer.invert(np.ones((50, 14), np.float32))
    assert actions[0, 0] == 2
    assert actions[49, 13] == 51
    assert normalizer.horizon == 50
    assert Normalizer.from_statistics("action", "MEAN_STD", {"mean": mean[0], "std": mean[1]}).horizon is None


def test_a_constant_dimension_stays_constant() -> None:
    given = {"q01": [1.0, 0.0], "q99": [1.0, 2.0]}
    normalizer = Normalizer.from_statistics("action", "QUANTILES", given)
    np.testing.assert_allclose(normalizer.invert(normalizer.apply(np.array([1.0, 0.5]))), [1.0, 0.5], atol=1e-6)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "MEAN_STD",
        {"min": [0], "max": [1]},
        r"'action' is normalised by MEAN_STD, which needs .*mean, std.*has max, min",
    ),
    ("QUANTILES", {"mean": [0], "std": [1]}, r"needs the statistics q01, q99; .*has mean, std. Store q01, q99"),
    ("PER_CHUNK", stats(), r"'PER_CHUNK' is not known to be invertible"),
    ("Q98_Q02", stats(), r"not known to be invertible"),
    ("MEAN_STD", {"mean": [0, 1], "std": [1, -1]}, r"negative in dimension 1"),
    ("MIN_MAX", {"min": [0, 2], "max": [1, 1]}, r"max is below min in dimension 1"),
    ("MIN_MAX", {"min": [0, np.nan], "max": [1, 1]}, r"statistic min is not finite in dimension 1"),
    ("MIN_MAX", {"min": [0, 0], "max": [1]}, r"min has shape \(2,\) and max \(1,\)"),
    ("MIN_MAX", {"min": np.zeros((1, 1, 2)), "max": np.ones((1, 1, 2))}, r"shape \(1, 1, 2\), not \[dim\]"),
]


@pytest.mark.parametrize(("mode", "given", "message"), REFUSED)
def test_what_cannot_be_undone_is_refused(mode: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Normalizer.from_statistics("action", mode, given)


def test_bins_are_the_official_ones() -> None:
    edges = np.linspace(-1, 1, 257)[:-1]
    values = np.concatenate([np.random.default_rng(0).uniform(-1.5, 1.5, 5000), edges, [-1, 1, 0, -1.0001, 1.0001]])
    for dtype in (np.float32, np.float64):
        given = values.astype(dtype)
        np.testing.assert_array_equal(discretize(given), np.digitize(given, bins=edges) - 1)
    assert discretize(np.array([-2.0, -1.0, 0.0, 1.0, 2.0])) == [-1, 0, 128, 255, 255]


def test_pad_appends_zeros() -> None:
    np.testing.assert_array_equal(pad(np.array([1.0, 2.0]), 4), np.array([1, 2, 0, 0], np.float32))


BAD_STATES: list[tuple[Any, str]] = [
    (np.zeros(33), r"state has 33 values, the checkpoint takes 8"),
    (np.zeros(7), r"state has 7 values"),
    (np.zeros((1, 8)), r"shape \(1, 8\); expected \[8\] without a batch"),
    ([0, 0, 0, np.nan, 0, 0, 0, 0], r"not finite .* in dimension 3"),
    ([0, 0, 0, 0, 0, 0, 0, np.inf], r"not finite .* in dimension 7"),
    (np.full(8, 1e300), r"not finite"),
    (["a"] * 8, r"not numbers"),
    ([[1], [1, 2]], r"not an array of numbers"),
    ([None] * 8, r"not numbers"),
    (np.zeros(8, bool), r"holds bool, not numbers"),
]


@pytest.mark.parametrize(("state", "message"), BAD_STATES)
def test_bad_states_are_refused(state: Any, message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        to_state(state, 8, np.float32)


def test_states_are_copied_and_may_be_narrower_only_where_nothing_is_known() -> None:
    given = np.arange(8, dtype=np.float32)
    assert not np.shares_memory(to_state(given, 8, np.float32), given)
    assert to_state(given, 32, np.float32, exact=False).size == 8
    assert to_state([1, 2, 3], 3, np.float32).dtype == np.float32
    with pytest.raises(ObservationError, match="1 to 4"):
        to_state(given, 4, np.float32, exact=False)
    with pytest.raises(ObservationError, match="1 to 4"):
        to_state(np.zeros(0), 4, np.float32, exact=False)
