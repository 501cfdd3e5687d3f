import numpy as np
import pytest
import torch

from tests.small_models import built, calibrate, classifier, cnn, images, vit
from vit_edge.errors import UserError
from vit_edge.export.fold import deployable
from vit_edge.quantization import ranges
from vit_edge.quantization.calibration import check_labels, holds_pixels, refuse_gate_images
from vit_edge.quantization.products import products
from vit_edge.quantization.ranges import PIXELS, Statistics


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_ranges_are_a_superset(kind: str) -> None:
    found = built(kind)
    for product in found.products:
        assert all(node.name in found.by_node for node in product.inputs)
        if product.kind == "conv":
            assert product.node.name in found.by_node
    assert [len(p.inputs) for p in found.products if p.kind == "attention"] == ([2] * 4 if kind == "vit" else [])


def test_every_input_lies_in_its_range() -> None:
    graph, recorded = deployable(vit()), built("vit").by_node
    seen: dict[str, torch.Tensor] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            seen[n.name] = value = super().run_node(n)
            return value

    with torch.no_grad():
        Watch(graph).run(torch.from_numpy(images(32)))
    for name, found in recorded.items():
        if found is not PIXELS:
            assert found.low == pytest.approx(float(seen[name].min()), rel=1e-4)
            assert found.high == pytest.approx(float(seen[name].max()), rel=1e-4)
            assert 0 < found.limit <= max(-found.low, found.high) * (1 + 1e-6)


def test_pixels_have_scale_one_when_no_border_is_padded() -> None:
    exact, padded = products(deployable(vit()))[0], products(deployable(cnn()))[0]
    assert holds_pixels(exact.inputs[0])
    assert built("vit").by_node[exact.inputs[0].name] == PIXELS
    assert PIXELS.scale == 1
    assert not holds_pixels(padded.inputs[0])


def test_least_noise_clips_an_outlier_that_minmax_keeps() -> None:
    statistics = Statistics()
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    statistics.update(values)
    statistics.update(torch.tensor([40.0, -3.0]))
    assert statistics.range("minmax").limit == pytest.approx(40)
    chosen = statistics.range("mse").limit
    assert 8 <= chosen < 40
    step = chosen / 127
    lost = values - (values / step).round().clamp(-127, 127) * step
    assert statistics.noise(np.array([chosen]))[0] == pytest.approx(
        float(lost.square().sum()) + (40 - chosen) ** 2, rel=0.02
    )


def test_histogram_doubles_without_losing_a_count() -> None:
    statistics = Statistics()
    for largest in (0.01, 1.0, 50.0):
        statistics.update(torch.linspace(-largest, largest, 1001))
    assert statistics.counts.sum() == 3003
    assert (statistics.low, statistics.high) == (-50, 50)
    assert 50 <= statistics.span < 100


def test_a_tensor_of_zeros_has_a_usable_scale() -> None:
    statistics = Statistics()
    statistics.update(torch.zeros(10))
    assert statistics.range("mse").scale > 0


def test_ranges_are_written_and_read(tmp_path: object) -> None:
    path = tmp_path / "ranges.json"  # type: ignore[operator]
    ranges.write(path, built("cnn").by_value)
    assert ranges.read(path) == built("cnn").by_value


def test_too_few_images_are_refused() -> None:
    with pytest.raises(UserError, match=r"7 usable images \(of 7; .*expected at least 8"):
        calibrate(deployable(cnn()), images(7), minimum_images=8)


def test_copies_and_constant_images_do_not_count() -> None:
    plain = np.full((20, 32, 32, 3), 7, np.uint8) * np.arange(20, dtype=np.uint8)[:, None, None, None]
    copies = np.repeat(images(4), 5, axis=0)
    with pytest.raises(UserError, match="4 usable images"):
        calibrate(deployable(cnn()), np.concatenate([plain, copies]), minimum_images=8)


def test_nan_in_a_weight_is_refused_and_named() -> None:
    model = cnn()
    model.backbone.get_submodule("expand")[0].weight.data[0] = float("nan")  # type: ignore[index]
    with pytest.raises(UserError, match=r"weight .*holds NaN"):
        calibrate(deployable(model), images(8), minimum_images=8)


def test_infinite_logits_are_refused() -> None:
    class Overflows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 10)

        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            return self.head(images_BCHW.mean(dim=(2, 3))).exp().exp().exp() * 1e30

    with pytest.raises(UserError, match="NaN or infinite logits"):
        calibrate(deployable(classifier(Overflows())), images(8), minimum_images=8)


def test_images_of_the_gate_are_refused() -> None:
    gate = images(6, seed=1)
    refuse_gate_images(images(10), gate)
    with pytest.raises(UserError, match="2 calibration images are also images of the gate"):
        refuse_gate_images(np.concatenate([images(10), gate[2:4]]), gate)


def test_images_of_one_class_only_are_refused() -> None:
    with pytest.raises(UserError, match="all 64 calibration images are of the class 'cat', expected images of all 2"):
        check_labels(np.ones(64, np.int64), ["dog", "cat"])
    check_labels(np.arange(64) % 2, ["dog", "cat"])
    check_labels(np.zeros(64, np.int64), ["the only one"])
