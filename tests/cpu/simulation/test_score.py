"""Intervals and paired tests against published values."""

import pytest

from innerloop.simulation.score import paired, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0000),  # the mirror of 0 of 20
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024), (9, 1, 2 * 11 / 1024), (0, 6, 2 / 64)],
)
def test_the_exact_mcnemar_test_is_a_binomial_one(better: int, worse: int, p: float) -> None:
    first = [True] * better + [False] * worse + [True, True, False]
    second = [False] * better + [True] * worse + [True, True, False]
    found = paired(first, second)
    assert (found.better, found.worse, found.both, found.neither) == (better, worse, 2, 1)
    assert found.p == pytest.approx(p)
    assert ("they differ" in found.text) == (p < 0.05)


def test_pairs_need_as_many_episodes_on_both_sides() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([True], [True, False])
