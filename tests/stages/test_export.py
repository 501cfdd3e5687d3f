from pathlib import Path

import numpy as np
import pytest

from tests.conftest import require
from tests.small_models import images, logits_of, vit
from vit_edge import bundle, evaluation
from vit_edge.models import classifier as models
from vit_edge.recipe import Int8Config, Limits, ModelConfig
from vit_edge.runtimes import registry
from vit_edge.stages import export, int8
from vit_edge.target import Target, load

GEOMETRY = ModelConfig(name="vit_ti16", patch_size=8, width=48, depth=2, heads=3)
CLASSES = [str(k) for k in range(10)]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished stages: student, int8, and the reference's evaluation of 40 images."""
    folder = tmp_path_factory.mktemp("stages")
    for name in ("student", "int8"):
        (folder / name).mkdir()
    models.save(folder / "student", vit(), GEOMETRY, CLASSES)
    int8.run(folder / "int8", student=folder / "student", calibration_NHWC=images(70), config=Int8Config())
    gate_NHWC = images(40, seed=1)
    logits_NK = logits_of(vit(), gate_NHWC)
    evaluation.write(
        folder / "evaluation", images_NHWC=gate_NHWC, labels_N=logits_NK.argmax(1), logits_NK=logits_NK,
        names=[f"image-{i}" for i in range(40)], classes=CLASSES, data="random",
        reference=evaluation.Reference(device="test", kind="cpu", top1=1.0),
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("batch", [1, 4, None], ids=["1", "4", "open"])
@pytest.mark.parametrize(
    ("runtime", "library"),
    [("onnxruntime", "onnxruntime"), ("openvino", "openvino"), ("tensorrt", "tensorrt_rtx_bindings")],
)
def test_writes_a_bundle_that_holds(
    stages: Path, tmp_path: Path, runtime: str, library: str, batch: int | None
) -> None:
    """batch: None leaves it open."""
    require(library, runtime)
    fields = {"threads": 1, "batch": batch or 4, "dynamic_batch": batch is None}
    target = load(runtime).model_copy(update=fields)
    told = export.run(
        tmp_path, student=stages / "student", int8=stages / "int8", evaluation=stages / "evaluation", target=target,
        limits=Limits(max_drop_points=2.0), provenance={"recipe": "test"},
    )  # fmt: skip
    found = bundle.read(tmp_path / "bundle")
    manifest = found.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (told["runtime"], told["batch"]) == (runtime, batch or 4)
    assert told["int8_bytes"] < told["float_bytes"]
    assert manifest.target == target
    assert (manifest.model.name, manifest.model.geometry["width"]) == ("vit_ti16", 48)
    assert manifest.model.parameters == vit().parameter_count
    assert manifest.limits.max_drop_points == 2.0
    assert manifest.expected_int8 is not None
    assert {"patch_embed.proj", "blocks.0.mlp.fc2", "blocks.1.attn.k"} <= set(manifest.expected_int8)
    assert not any("/" in name for name in manifest.expected_int8)
    if runtime != "tensorrt":
        _check_runs(found, stages, target)
    if runtime != "tensorrt" and batch is None:
        _check_runs(found, stages, target.model_copy(update={"batch": 3}))


def _check_runs(found: bundle.Bundle, stages: Path, target: Target) -> None:
    runtime = registry.load(target.runtime)
    measured = evaluation.read(stages / "evaluation")
    with runtime.open(found.int8, target) as session:
        answers = session.run(np.asarray(measured.images_NHWC)).argmax(1)
        covered, described = session.coverage(), session.describe()
    assert (described["batch"], described["open_batch"]) == (target.batch, target.dynamic_batch)
    assert covered.int8_share is not None
    assert (answers == measured.labels_N).mean() > 0.9
    for name in found.manifest.expected_int8 or ():
        assert any(product.is_int8 and product.came_from(name) for product in covered.products), name
    with runtime.open(found.floats["f32"], target.model_copy(update={"precision": "f32"})) as session:
        logits_NK = session.run(np.asarray(measured.images_NHWC))
    assert np.abs(logits_NK - measured.logits_NK).max() < 1e-3 * measured.logits_NK.std()
