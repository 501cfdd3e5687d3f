import math

import numpy as np
import pytest

from vit_edge import metrics
from vit_edge.metrics import PairedDrop, tango_bound

Z975 = 1.959963984540054


@pytest.mark.parametrize(
    ("b", "c", "n", "lower", "upper"),
    [
        (6, 16, 161, -0.1240, -0.0054),  # Cavo et al. 2012, in Fagerland, Lydersen & Laake, Statistical Analysis of Contingency Tables
        (1, 7, 21, -0.5172, -0.0260),  # Bentur et al. 2009, ibid.
    ],
)  # fmt: skip
def test_tango_interval_equals_published_examples(b: int, c: int, n: int, lower: float, upper: float) -> None:
    assert tango_bound(b, c, n, Z975) == pytest.approx(lower, abs=5e-5)
    assert -tango_bound(c, b, n, Z975) == pytest.approx(upper, abs=5e-5)


@pytest.mark.parametrize(("b", "c", "n"), [(0, 3, 50), (3, 0, 50), (5, 5, 1000), (300, 10, 10_000), (1, 0, 1)])
def test_bound_is_where_the_constrained_likelihood_puts_the_score(b: int, c: int, n: int) -> None:
    """The closed form of p21 against a search for the maximum of the likelihood under the constraint."""
    delta = tango_bound(b, c, n, Z975)
    p21 = np.linspace(max(0, -delta), min(1, (1 - delta) / 2), 2_000_001)[1:-1]
    likelihood = b * np.log(p21 + delta) + c * np.log(p21) + (n - b - c) * np.log1p(-2 * p21 - delta)
    best = p21[np.argmax(likelihood)]
    score = (b - c - n * delta) / math.sqrt(n * (2 * best + delta - delta**2))
    assert score == pytest.approx(Z975, rel=2e-3)


def test_bounds_of_two_models_that_never_differ_have_a_closed_form() -> None:
    z2 = metrics.Z95_ONE_SIDED**2
    drop = PairedDrop(n=400, lost=0, won=0)
    assert drop.upper95 == pytest.approx(100 * z2 / (400 + z2))
    assert drop.lower95 == -drop.upper95


@pytest.mark.parametrize(("n", "lost", "won"), [(1000, 0.02, 0.01), (300, 0.03, 0.03), (2000, 0.006, 0.004)])
def test_bounds_hold_in_95_of_100_samples(n: int, lost: float, won: float) -> None:
    rng = np.random.default_rng(0)
    samples = [PairedDrop(n, b, c) for b, c, _ in rng.multinomial(n, [lost, won, 1 - lost - won], size=2000)]
    truth = 100 * (lost - won)
    assert np.mean([truth <= sample.upper95 for sample in samples]) == pytest.approx(0.95, abs=0.015)
    assert np.mean([truth >= sample.lower95 for sample in samples]) == pytest.approx(0.95, abs=0.015)


def test_paired_drop_counts_what_only_one_of_the_two_gets_right() -> None:
    drop = metrics.paired_drop(np.array([True, True, False, True]), np.array([True, False, True, False]))
    assert (drop.lost, drop.won, drop.n, drop.points, drop.discordance) == (2, 1, 4, 25.0, 0.75)


@pytest.mark.parametrize(
    ("margin", "expected"), [(0.5, {0.01: 2500, 0.03: 7400, 0.05: 12400}), (1.0, {0.01: 600, 0.03: 1900, 0.05: 3100})]
)
def test_images_needed(margin: float, expected: dict[float, int]) -> None:
    for discordance, images in expected.items():
        assert metrics.images_needed(discordance, margin) == pytest.approx(images, abs=50)


def test_images_needed_decide_in_four_of_five_samples() -> None:
    n = metrics.images_needed(0.03, 1.0)
    assert n is not None
    rng = np.random.default_rng(0)
    samples = rng.multinomial(n, [0.015, 0.015, 0.97], size=1000)
    assert np.mean([PairedDrop(n, b, c).upper95 <= 1.0 for b, c, _ in samples]) == pytest.approx(0.8, abs=0.04)


def test_images_needed_without_any_difference_satisfies_the_interval() -> None:
    n = metrics.images_needed(0.0, 1.0)
    assert n is not None
    assert PairedDrop(n, 0, 0).upper95 <= 1.0 < PairedDrop(n - 2, 0, 0).upper95


def test_no_number_of_images_decides_a_drop_that_equals_the_margin() -> None:
    assert metrics.images_needed(0.05, 1.0, drop_points=1.0) is None


def test_mean_kl_is_in_nats_and_ignores_what_all_classes_share() -> None:
    reference = np.log(np.array([[0.5, 0.5], [0.9, 0.1]]))
    target = np.log(np.array([[0.25, 0.75], [0.9, 0.1]])) + 7
    expected = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert metrics.mean_kl(reference, target) == pytest.approx(expected)


def test_sqnr() -> None:
    signal = np.array([3.0, 4.0])
    assert metrics.sqnr_db(signal, signal * 0.9) == pytest.approx(20)
    assert metrics.sqnr_db(signal, signal) == math.inf


def test_logit_error_is_in_standard_deviations_within_an_image() -> None:
    reference = np.array([[0.0, 2.0], [100.0, 102.0]], np.float32)
    target = reference + np.array([[0.0, 0.0], [0.5, 0.0]], np.float32)
    assert metrics.logit_error(reference, target) == pytest.approx(0.5)
    assert metrics.logit_error(reference, np.full_like(reference, np.nan)) == math.inf


def test_percentiles_are_in_the_unit_of_the_latencies() -> None:
    assert metrics.percentiles(np.arange(101.0)) == {"p50": 50, "p90": 90, "p99": 99, "n": 101}


def test_chance_of_at_least_is_the_binomial_tail() -> None:
    exact = 1 - 0.995**300 - 300 * 0.005 * 0.995**299
    assert metrics.chance_of_at_least(2, 300, 0.005) == pytest.approx(exact)
    assert metrics.chance_of_at_least(0, 300, 0.005) == 1
