"""train, tune and calibration: disjoint or nested as the design says, from one seeded permutation."""

from dataclasses import dataclass

import numpy as np

from vit_edge.errors import UserError
from vit_edge.recipe import DataConfig


@dataclass(frozen=True)
class Splits:
    """Indices into a data set's sides, each in random order: any prefix is a random sample.

    train, tune: disjoint, into `train`. calibration: a part of train. gate: all of `gate`.
    """

    train: np.ndarray
    tune: np.ndarray
    calibration: np.ndarray
    gate: np.ndarray


def split(train_count: int, gate_count: int, config: DataConfig) -> Splits:
    """The splits of a data set with so many images on each side. Raises UserError when too few are left to train on."""
    generator = np.random.default_rng([config.split_seed, 1])
    order = generator.permutation(train_count)
    tune_count = round(train_count * config.tune_fraction)
    train = order[tune_count:][: config.train_images]
    if config.train_images is not None and config.train_images > train_count - tune_count:
        raise UserError(
            f"train_images = {config.train_images}, but only {train_count - tune_count} are left after holding {tune_count} out to tune on",
            "ask for fewer, or lower data.tune_fraction",
        )
    return Splits(train, order[:tune_count], train[: config.calibration_images], generator.permutation(gate_count))
