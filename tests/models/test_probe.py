"""The few-shot probe: its closed form is scikit-learn's, its draws are nested and repeatable."""

import numpy as np
import pytest
import timm
import torch
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit_edge.data.datasets import ArrayImages
from vit_edge.errors import UserError
from vit_edge.models import probe
from vit_edge.models.classifier import Classifier
from vit_edge.models.vit import VisionTransformer, ViTConfig
from vit_edge.preprocess import Preprocessing


@pytest.mark.parametrize("count", [12, 40, 200])
@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_equals_scikit_learns_ridge(count, penalty):
    random = np.random.default_rng(0)
    features_ND, targets_NK = random.normal(3, 2, (count, 40)), np.eye(4)[random.integers(0, 4, count)]
    expected = Ridge(alpha=penalty).fit(features_ND, targets_NK)
    weights_DK, intercept_K = probe.ridge(features_ND, targets_NK, penalty)
    np.testing.assert_allclose(weights_DK, expected.coef_.T, atol=1e-5)
    np.testing.assert_allclose(intercept_K, expected.intercept_, atol=1e-5)


@pytest.mark.parametrize("count", [12, 200])
def test_the_probe_equals_scikit_learns_ridge_on_standardised_features(count):
    random = np.random.default_rng(0)
    scales_D = 10.0 ** random.uniform(-3, 3, 40)
    train_ND, test_ND = (random.normal(size=(n, 40)) * scales_D + scales_D for n in (count, 500))
    labels_N, test_labels_N = random.integers(0, 4, count), random.integers(0, 4, 500)
    theirs = make_pipeline(StandardScaler(), Ridge(alpha=1024)).fit(train_ND, np.eye(4)[labels_N])
    expected = float((theirs.predict(test_ND).argmax(axis=1) == test_labels_N).mean())
    found = probe.few_shot(train_ND, labels_N, test_ND, test_labels_N, classes=4, penalty=1024)
    assert found == pytest.approx(expected, abs=0.005)


def test_draws_are_of_each_class_nested_and_repeatable():
    labels_N = np.random.default_rng(0).integers(0, 3, 60)
    drawn = probe.draw(labels_N, ["a", "b", "c"], 5, [0, 1])
    assert drawn.shape == (5, 3)
    assert all((labels_N[shot] == [0, 1, 2]).all() for shot in drawn)
    assert len(np.unique(drawn)) == 15
    np.testing.assert_array_equal(drawn[:2], probe.draw(labels_N, ["a", "b", "c"], 5, [0, 1])[:2])
    assert (drawn != probe.draw(labels_N, ["a", "b", "c"], 5, [0, 2])).any()


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(UserError) as caught:
        probe.draw(np.array([0, 0, 1]), ["cat", "dog"], 2, [0])
    assert "'dog' has 1 training images, 2 shots" in caught.value.problem


def test_separable_features_are_told_apart_and_noise_is_not():
    random = np.random.default_rng(0)
    labels_N = np.repeat(np.arange(4), 25)
    clear_ND, noise_ND = np.eye(8)[labels_N] * 5 + random.normal(size=(100, 8)), random.normal(size=(100, 8))
    top1 = [
        probe.few_shot(part[::2], labels_N[::2], part[1::2], labels_N[1::2], classes=4, penalty=1.0)
        for part in (clear_ND, noise_ND)
    ]
    assert top1[0] > 0.9
    assert top1[1] < 0.5


def test_spread_is_the_deviation_of_a_sample():
    row = probe.Row(5, (0.5, 0.7))
    assert (row.mean, row.spread) == (pytest.approx(0.6), pytest.approx(2**0.5 / 10))
    assert probe.Row(5, (0.5,)).spread == 0


@pytest.mark.parametrize("name", ["vit", "deit", "resnet10t", "deit3"])
def test_features_are_what_the_head_reads(name):
    torch.manual_seed(0)
    if name == "resnet10t":
        backbone = timm.create_model(name, num_classes=5)
    elif name == "deit3":
        backbone = timm.create_model(
            "deit3_small_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=5
        )
    else:
        geometry = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2, "classes": 5}
        backbone = VisionTransformer(ViTConfig(**geometry, distillation_token=name == "deit"))
    classifier = Classifier(backbone, Preprocessing(image_size=32)).eval()
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)
    indices = np.arange(70)[::-1]
    found_ND = probe.features(classifier, ArrayImages(pixels_NHWC, np.zeros(70), "x"), indices, torch.device("cpu"))
    with torch.no_grad():
        logits_NK = classifier(torch.from_numpy(pixels_NHWC[::-1].copy()).permute(0, 3, 1, 2))
    if name == "deit":
        weight = torch.cat([backbone.head.weight, backbone.head_dist.weight], dim=1) / 2
        bias = (backbone.head.bias + backbone.head_dist.bias) / 2
    else:
        head = backbone.head if name == "vit" else backbone.get_classifier()
        weight, bias = head.weight, head.bias
    expected = torch.from_numpy(found_ND).float() @ weight.T + bias
    torch.testing.assert_close(expected, logits_NK, atol=1e-4, rtol=1e-4)
