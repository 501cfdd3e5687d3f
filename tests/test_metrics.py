import math

import numpy as np
import pytest

from vit_edge import metrics
from vit_edge.metrics import PairedDrop

Z975 = 1.959963984540054


# Published 95 % intervals (two-sided) of paired differences, b and c differing of n: Tango's score as Fagerland, Lydersen
# and Laake, Statistics in Medicine 33 (2014) and Statistical Analysis of Contingency Tables, give it; the corrected ones
# as the documentation of R's ratesci 0.5 (Laud) does, whose continuity correction is one whole pair.
PUBLISHED = [
    (1, 7, 21, 0.0, False, -0.5172, -0.0260),  # Bentur et al. 2009
    (6, 16, 161, 0.0, False, -0.1240, -0.0054),  # Cavo et al. 2012
    (1, 7, 21, 0.0, True, -0.5229, -0.0262),  # "SCASu"
    (1, 7, 21, 1.0, False, -0.5613, 0.0307),  # "AS(Tango)_cc"
    (1, 7, 21, 1.0, True, -0.5683, 0.0311),  # "SCASu_cc"
]


def bound(b: int, c: int, n: int, continuity: float, skewed: bool) -> float:
    """The lower bound of (b − c)/n from metrics.null_moments, on whose moments the gate's own bounds stand."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        deviation, skew = metrics.null_moments(b, c, n, middle)
        skew = skew * (Z975**2 - 1) / 6 if skewed else 0
        is_beyond = b - c - n * middle - continuity - skew > Z975 * deviation
        low, high = (middle, high) if is_beyond else (low, middle)
    return low


@pytest.mark.parametrize(("b", "c", "n", "continuity", "skewed", "lower", "upper"), PUBLISHED)
def test_intervals_equal_published_examples(
    b: int, c: int, n: int, continuity: float, skewed: bool, lower: float, upper: float
) -> None:
    assert bound(b, c, n, continuity, skewed) == pytest.approx(lower, abs=1e-4)
    assert -bound(c, b, n, continuity, skewed) == pytest.approx(upper, abs=1e-4)


@pytest.mark.parametrize(("b", "c", "n"), [(0, 3, 50), (3, 0, 50), (5, 5, 1000), (300, 10, 10_000), (1, 0, 1)])
def test_the_null_is_where_the_constrained_likelihood_is_largest(b: int, c: int, n: int) -> None:
    """The closed form against a search for the maximum of the likelihood under the constraint."""
    for delta in (-0.03, 0.01, 0.2):
        p21 = np.linspace(max(0, -delta), min(1, (1 - delta) / 2), 2_000_001)[1:-1]
        likelihood = b * np.log(p21 + delta) + c * np.log(p21) + (n - b - c) * np.log1p(-2 * p21 - delta)
        best = p21[np.argmax(likelihood)]
        moments = {1.0: best + delta, -1.0: best, 0.0: 1 - 2 * best - delta}
        variance = sum(p * (x - delta) ** 2 for x, p in moments.items())
        deviation, skew = metrics.null_moments(b, c, n, delta)
        assert deviation == pytest.approx(math.sqrt(n * variance), rel=2e-3, abs=1e-2)
        assert skew == pytest.approx(sum(p * (x - delta) ** 3 for x, p in moments.items()) / variance, abs=2e-2)


@pytest.mark.parametrize(("lost", "won", "n"), [(0, 0, 400), (9, 4, 1000), (30, 100, 5000), (1, 0, 1), (400, 2, 500)])
def test_the_bounds_are_where_the_decisions_change(lost: int, won: int, n: int) -> None:
    drop = PairedDrop(n, lost, won)
    assert drop.lower95 <= drop.points <= drop.upper95
    for margin, beyond in ((drop.lower95 - 1e-6, True), (drop.lower95 + 1e-6, False)):
        assert bool(metrics.beyond_margin(lost, won, n, margin)) == (beyond and margin > -100)
    for margin, within in ((drop.upper95 + 1e-6, True), (drop.upper95 - 1e-6, False)):
        assert bool(metrics.within_margin(lost, won, n, margin)) == (within and margin < 100)


def test_bounds_of_two_models_that_never_differ_are_symmetrical() -> None:
    drop = PairedDrop(n=400, lost=0, won=0)
    assert drop.lower95 == pytest.approx(-drop.upper95)
    assert 100 * (1 - 0.05 ** (1 / 400)) < drop.upper95 < 0.8, (
        "a little wider than the exact bound of a rate of 0 in 400"
    )


def test_paired_drop_counts_what_only_one_of_the_two_gets_right() -> None:
    drop = metrics.paired_drop(np.array([True, True, False, True]), np.array([True, False, True, False]))
    assert (drop.lost, drop.won, drop.n, drop.points, drop.discordance) == (2, 1, 4, 25.0, 0.75)


def test_images_needed_are_about_the_normal_approximations() -> None:
    """(z95 + z80)²·discordance / margin², and a little more for the corrections."""
    for margin in (0.25, 0.5, 1.0):
        for discordance in (0.01, 0.03, 0.1):
            normal = (metrics.Z95_ONE_SIDED + metrics.Z80_POWER) ** 2 * discordance / (margin / 100) ** 2
            needed = metrics.images_needed(discordance, margin)
            assert needed is not None
            assert normal < needed < 1.05 * normal + 3 / (margin / 100)


def test_images_needed_without_any_difference_satisfy_the_interval() -> None:
    n = metrics.images_needed(0.0, 1.0)
    assert n is not None
    assert PairedDrop(n, 0, 0).upper95 <= 1.0 < PairedDrop(n - 1, 0, 0).upper95


def test_images_needed_to_show_that_a_drop_is_beyond_the_margin() -> None:
    n = metrics.images_needed(0.03, 1.0, drop_points=2.0)
    assert n is not None
    rng = np.random.default_rng(0)
    samples = rng.multinomial(n, [0.025, 0.005, 0.97], size=4000)
    assert np.mean(metrics.beyond_margin(samples[:, 0], samples[:, 1], n, 1.0)) == pytest.approx(0.8, abs=0.03)


def test_power_is_the_trinomial_sum() -> None:
    rng = np.random.default_rng(0)
    samples = rng.multinomial(800, [0.007, 0.003, 0.99], size=20_000)
    passed = np.mean(metrics.within_margin(samples[:, 0], samples[:, 1], 800, 1.5))
    assert metrics.power(800, 0.01, 1.5, 0.4) == pytest.approx(passed, abs=0.01)


def test_images_for_a_share() -> None:
    n = metrics.images_for_share(0.93, 0.9)
    assert n is not None
    right = np.random.default_rng(0).binomial(n, 0.93, 2000)
    passed = np.mean([metrics.chance_of_at_least(int(count), n, 0.9) <= 0.05 for count in right])
    assert passed == pytest.approx(0.8, abs=0.05)
    assert metrics.images_for_share(0.9, 0.9) is None


def test_holms_correction() -> None:
    assert metrics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # R's p.adjust
    assert metrics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert metrics.holm([]) == []


def test_p_of_loss_is_mcnemars_exact_test() -> None:
    assert metrics.p_of_loss(5, 0) == pytest.approx(1 / 32)
    assert metrics.p_of_loss(0, 0) == 1


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


def test_noise_is_how_far_the_statistic_of_other_runs_lies() -> None:
    rng = np.random.default_rng(0)
    runs = 5 + rng.gamma(2, 0.2, (400, 600))
    for statistic in (np.median, lambda run: np.percentile(run, 90)):
        told = np.mean([metrics.noise(run, statistic) for run in runs[:100]])
        values = np.asarray([statistic(run) for run in runs])
        assert told == pytest.approx(2.26 * np.std(values) / np.mean(values), rel=0.25)
    drifting = runs[0] * np.linspace(1, 1.2, 600)
    assert metrics.noise(drifting, np.median) > 0.03
    assert metrics.noise(np.ones(15), np.median) == 1.0


def test_noise_of_a_ratio_leaves_out_what_both_had() -> None:
    rng = np.random.default_rng(0)
    common = np.repeat(rng.gamma(2, 1, 20), 40)
    pairs_N2 = np.stack([2 * common, common], axis=1) * (1 + 0.01 * rng.normal(size=(800, 2)))
    assert metrics.noise(pairs_N2[:, 0], np.median) > 0.2
    assert metrics.noise(pairs_N2, lambda block: np.median(block[:, 0]) / np.median(block[:, 1])) < 0.01
