"""Training views are a function of (seed, epoch, image) alone, and splits keep what is held out held out."""

import random

import numpy as np
import pytest
import torch

from vit_edge.data import datasets
from vit_edge.data.splits import split
from vit_edge.data.views import Views, training_loader
from vit_edge.errors import UserError
from vit_edge.preprocess import Preprocessing
from vit_edge.recipe import AugmentConfig, DataConfig

AUGMENT = AugmentConfig(shift=0.1, rotate_degrees=15, scale=0.1, flip=True, rand_augment=9, erase=0.5, crop=0.3)


def views(augment: AugmentConfig = AUGMENT, seed: int = 0) -> Views:
    data = datasets.find("digits").load()
    return Views(data.train, np.arange(40), Preprocessing(image_size=32), augment, seed)


def test_a_view_does_not_depend_on_what_was_drawn_before() -> None:
    made = views()
    first, _, _ = made[(3, 7)]
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    made[(3, 8)]
    again, label, position = views()[(3, 7)]
    assert torch.equal(first, again)
    assert first.dtype == torch.uint8
    assert first.shape == (3, 32, 32)
    assert (label, position) == (made.images.labels_N[7], 7)


def test_drawing_a_view_leaves_the_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    views()[(0, 0)]
    assert torch.equal(torch.rand(1), expected)


def test_epoch_image_and_seed_each_change_the_view() -> None:
    base = views()[(0, 0)][0]
    assert not torch.equal(base, views()[(1, 0)][0])
    assert not torch.equal(base, views(seed=1)[(0, 0)][0])


def test_without_augmentation_a_view_is_what_evaluation_sees() -> None:
    made = views(AugmentConfig(shift=0.0, scale=0.0))
    expected_HWC = Preprocessing(image_size=32).prepare(made.images.image(4))
    assert np.array_equal(made[(2, 4)][0].permute(1, 2, 0).numpy(), expected_HWC)


def test_workers_give_the_same_batches_in_the_same_order() -> None:
    batches = []
    for workers in (0, 2):
        loader, sampler = training_loader(views(), 16, 1, workers)
        sampler.epoch = 4
        batches.append(list(loader))
    assert len(batches[0]) == len(batches[1]) == 2
    for (alone, label, position), (shared, other, place) in zip(*batches, strict=True):
        assert torch.equal(alone, shared)
        assert torch.equal(label, other)
        assert torch.equal(position, place)


def test_each_epoch_has_its_own_order_of_every_image() -> None:
    _, sampler = training_loader(views(), 20, 1, 0)
    orders = []
    for sampler.epoch in (0, 1):
        orders.append([position for _, position in sampler])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


def test_what_is_skipped_is_the_start_of_the_same_epoch() -> None:
    loader, sampler = training_loader(views(), 16, 2, 0)
    whole = [position.tolist() for _, _, position in loader]
    assert [len(part) for part in whole] == [8, 8, 8, 8]
    sampler.skip = 16
    assert [position.tolist() for _, _, position in loader] == whole[2:]


def test_splits_are_disjoint_and_calibration_is_a_part_of_train() -> None:
    made = split(899, 898, DataConfig(calibration_images=64))
    assert not set(made.train) & set(made.tune)
    assert set(made.train) | set(made.tune) == set(range(899))
    assert set(made.calibration) <= set(made.train)
    assert len(made.calibration) == 64
    assert sorted(made.gate) == list(range(898))
    assert made.gate.tolist() != sorted(made.gate)


def test_fewer_training_images_keep_the_tune_split() -> None:
    few, whole = (split(1000, 10, DataConfig(train_images=count)) for count in (100, None))
    assert np.array_equal(few.tune, whole.tune)
    assert len(few.train) == 100


def test_more_training_images_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match="train_images = 950, but only 900"):
        split(1000, 10, DataConfig(train_images=950))
