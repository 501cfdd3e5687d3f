from pathlib import Path

import numpy as np
import pytest
import torch

from tests.small_models import vit
from vit_edge import evaluation
from vit_edge.data import material
from vit_edge.models import classifier as models
from vit_edge.recipe import DataConfig, ModelConfig
from vit_edge.stages import reference

GEOMETRY = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=2, heads=3)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "student").mkdir()
    models.save(folder / "student", vit(), GEOMETRY, [str(digit) for digit in range(10)])
    images = material.load(DataConfig(spec="digits"), vit().image_size, None)
    reference.run(folder / "stage", student=folder / "student", teacher=None, material=images, device="cpu")
    return folder / "stage" / "evaluation"


def test_a_reference_on_a_cpu_is_marked_and_has_its_conditions(taken: Path) -> None:
    found = evaluation.read(taken).manifest.reference
    assert (found.kind, found.precision, found.clock, found.driver) == ("cpu", "f32", "wall clock", None)
    assert found.latency_ms is not None
    assert found.latency_ms["n"] > reference.WARMUP
    assert found.versions["torch"] == torch.__version__


def test_bf16_stands_beside_it_where_the_processor_has_it(taken: Path) -> None:
    found = evaluation.read(taken)
    expected = set(reference._low_precisions(torch.device("cpu")))
    assert set(found.manifest.reference.beside) == expected
    for one in found.manifest.reference.beside.values():
        assert one.n == min(reference.BESIDE_IMAGES["cpu"], found.manifest.n)
        assert 0.9 < one.agreement <= 1
        assert one.latency_ms["p50"] > 0


def test_the_logits_are_in_full_precision(taken: Path) -> None:
    found = evaluation.read(taken)
    pixels = torch.from_numpy(np.array(found.images_NHWC[:20])).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected_NK = vit().double()(pixels).numpy()
    assert np.abs(found.logits_NK[:20] - expected_NK).max() < 1e-5 * expected_NK.std()


def test_on_a_gpu_its_own_clock_is_read_and_low_precisions_stand_beside(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    (tmp_path / "student").mkdir()
    models.save(tmp_path / "student", vit(), GEOMETRY, [str(digit) for digit in range(10)])
    images = material.load(DataConfig(spec="digits"), vit().image_size, None)
    reference.run(tmp_path / "stage", student=tmp_path / "student", teacher=None, material=images, device="cuda")
    found = evaluation.read(tmp_path / "stage" / "evaluation").manifest.reference
    assert (found.kind, found.clock) == ("cuda", "cuda events")
    assert "fp16" in found.beside
    assert found.driver != "none"
