"""How often the gate's verdict on accuracy is wrong: gates simulated over numbers of images and shares of differing answers.

    python benchmarks/gate_simulation.py [--gates 100000]

Each gate draws how many images only the reference gets right, and how many only the target, and decides by
vit_edge/metrics.py. At a true drop equal to the margin no verdict is right: wrong passes and wrong fails, in per cent,
should each be 5 at the most. At no drop, on as many images as the gate itself asks for, it should pass in 4 of 5 cases.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vit_edge import metrics
from vit_edge.report.console import show_table

IMAGES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
DISCORDANCE_PERCENT = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
MARGIN_POINTS = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Cell:
    """What became of simulated gates: shares of them. discordance_percent: images that exactly one model gets right."""

    margin_points: float
    discordance_percent: float
    n: int
    passed: float
    failed: float


def at_the_margin(gates: int) -> Iterator[Cell]:
    """True drop equal to the margin; where fewer images differ than the margin allows there is no such case."""
    for margin in MARGIN_POINTS:
        for discordance in DISCORDANCE_PERCENT:
            for n in IMAGES if discordance >= margin else ():
                yield simulated(margin, discordance, n, margin, gates)


def at_no_drop(gates: int) -> Iterator[Cell]:
    """No true drop, on the images that the gate asks for."""
    for margin in MARGIN_POINTS:
        for discordance in DISCORDANCE_PERCENT:
            n = metrics.images_needed(discordance / 100, margin)
            assert n is not None
            yield simulated(margin, discordance, n, 0.0, gates)


def simulated(margin_points: float, discordance_percent: float, n: int, drop_points: float, gates: int) -> Cell:
    rng = np.random.default_rng((n, round(1000 * margin_points), round(1000 * discordance_percent)))
    differing = rng.binomial(n, discordance_percent / 100, gates)
    lost = rng.binomial(differing, (1 + drop_points / discordance_percent) / 2)
    won = differing - lost
    passed = metrics.within_margin(lost, won, n, margin_points)
    failed = metrics.beyond_margin(lost, won, n, margin_points)
    assert not (passed & failed).any()
    return Cell(margin_points, discordance_percent, n, float(passed.mean()), float(failed.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=100_000)
    gates = parser.parse_args().gates
    wrong, power = list(at_the_margin(gates)), list(at_no_drop(gates))
    print(f"{gates} gates a cell. True drop equal to the margin: wrong passes / wrong fails, %")
    rows = []
    for start in range(0, len(wrong), len(IMAGES)):
        row = wrong[start : start + len(IMAGES)]
        cells = [f"{100 * one.passed:.2f} / {100 * one.failed:.2f}" for one in row]
        rows.append((f"{row[0].margin_points:g}", f"{row[0].discordance_percent:g}", *cells))
    show_table(("margin", "differ %", *(str(n) for n in IMAGES)), rows)
    print(
        f"most wrong passes {100 * max(one.passed for one in wrong):.2f} %, "
        f"most wrong fails {100 * max(one.failed for one in wrong):.2f} %\n"
    )
    print("No true drop, on the images that the gate asks for: passes, %")
    rows = [
        (f"{one.margin_points:g}", f"{one.discordance_percent:g}", str(one.n), f"{100 * one.passed:.1f}")
        for one in power
    ]
    show_table(("margin", "differ %", "images", "passes"), rows)
    print(f"fewest passes {100 * min(one.passed for one in power):.1f} %")


if __name__ == "__main__":
    main()
