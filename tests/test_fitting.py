"""The search on devices that are formulas: latency = overhead of each block + arithmetic."""

import pytest

from vit_edge import fitting
from vit_edge.fitting import Candidate, Line, Trial

DEPTHS, WIDTHS = (3, 6, 12), range(32, 1025, 32)


def line(depth: int) -> Line:
    """16 tokens of a transformer: 12·D² parameters a block."""
    return [
        Candidate({"depth": depth, "width": width}, 12 * depth * width**2, 16 * 12 * depth * width**2)
        for width in WIDTHS
    ]


class Device:
    """block_ms: what a block costs however narrow it is; rate: multiply-adds a millisecond."""

    def __init__(self, block_ms: float = 0.05, rate: float = 5e7):
        self.block_ms, self.rate = block_ms, rate
        self.measured: list[Candidate] = []

    def latency_ms(self, candidate: Candidate) -> float:
        return candidate.settings["depth"] * self.block_ms + candidate.multiply_adds / self.rate

    def __call__(self, candidate: Candidate) -> Trial:
        self.measured.append(candidate)
        found_ms = self.latency_ms(candidate)
        return Trial(candidate, 0.9 * found_ms, found_ms, 0.02)


@pytest.mark.parametrize("limit_ms", [0.5, 2.0, 10.0])
def test_finds_what_measuring_everything_would_find(limit_ms: float) -> None:
    lines, device = [line(depth) for depth in DEPTHS], Device()
    trials = fitting.search(lines, device, limit_ms, lambda: True)
    found = fitting.largest(trials, limit_ms)[0].candidate
    everything = [Device()(candidate) for one in lines for candidate in one]
    best = fitting.largest(everything, limit_ms)[0].candidate
    assert best.multiply_adds / found.multiply_adds <= fitting.CLOSE
    assert len(device.measured) <= 4 * len(DEPTHS)
    assert len({id(candidate) for candidate in device.measured}) == len(device.measured), "none is measured twice"


def test_where_blocks_cost_a_shallow_wide_one_holds_more_than_a_deep_narrow_one() -> None:
    trials = fitting.search([line(depth) for depth in DEPTHS], Device(block_ms=0.15), 2.0, lambda: True)
    largest = fitting.largest(trials, 2.0)
    assert largest[0].candidate.settings["depth"] == 3
    by_depth = {depth: [t for t in largest if t.candidate.settings["depth"] == depth] for depth in DEPTHS}
    widths = [by_depth[depth][0].candidate.settings["width"] for depth in DEPTHS]
    assert widths == sorted(widths, reverse=True)
    assert by_depth[3][0].candidate.capacity > by_depth[12][0].candidate.capacity


def test_where_nothing_fits_the_smallest_is_measured() -> None:
    lines, device = [line(12), line(3)], Device()
    trials = fitting.search(lines, device, 0.01, lambda: True)
    assert not fitting.largest(trials, 0.01)
    assert device.measured[-1] is lines[1][0] or lines[1][0] in device.measured


def test_everything_fits() -> None:
    lines = [line(depth) for depth in DEPTHS]
    trials = fitting.search(lines, Device(), 1e6, lambda: True)
    assert fitting.largest(trials, 1e6)[0].candidate is lines[-1][-1]


def test_when_the_time_is_up_it_goes_no_further() -> None:
    device = Device()
    trials = fitting.search([line(depth) for depth in DEPTHS], device, 2.0, lambda: len(device.measured) < 2)
    assert len(trials) <= 3


def test_noise_counts_against_a_candidate() -> None:
    candidate = line(3)[0]
    assert Trial(candidate, 1.0, 1.9, 0.02).fits(2.0)
    assert not Trial(candidate, 1.0, 1.9, 0.2).fits(2.0)
