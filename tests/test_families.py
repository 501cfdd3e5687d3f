"""Six families of architectures, and ours, on the whole way: one distillation step, int8, and two runtimes' gates.

They are what `vit-edge models` says of int8: `catalogue.PROVEN_INT8` must name these and no others.
B batch, C = 3 channels, H×W image, N images, K classes.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import generate_default_cfgs, register_model
from timm.models.repvit import RepVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.conftest import QUICK, require
from tests.small_models import classifier, images, logits_of, vit, worst
from vit_edge import bundle, evaluation, metrics
from vit_edge.export.fold import deployable
from vit_edge.models import classifier as models
from vit_edge.models import zoo
from vit_edge.models.catalogue import PROVEN_INT8
from vit_edge.quantization.products import products
from vit_edge.recipe import DistillationConfig, Int8Config, Limits, ModelConfig
from vit_edge.stages import export, gate, int8
from vit_edge.target import load
from vit_edge.training.distillation import Answer, distillation_loss

SIDE = 64
RUNTIMES = ("onnxruntime", "openvino")
CLASSES = [str(k) for k in range(10)]
# Least signal to noise of int8 against float on one runtime, with weights that have learnt nothing.
LEAST_SQNR_DB = 12.0
MEMBERS = (
    ModelConfig(name="vit_ti16", width=48, depth=2, heads=3),
    ModelConfig(name="deit_ti16", width=48, depth=2, heads=3),
    ModelConfig(name="swin_small_geometry"),
    ModelConfig(name="deit3_small_geometry"),
    ModelConfig(name="resnet10t"),
    ModelConfig(name="mobilenetv3_small_050"),
    ModelConfig(name="efficientnet_lite0"),
    ModelConfig(name="repvit_small_geometry"),
)

default_cfgs = generate_default_cfgs(
    {name: {"input_size": (3, SIDE, SIDE)} for name in ("swin_small_geometry", "deit3_small_geometry", "repvit_small_geometry")}
)  # fmt: skip


@register_model
def swin_small_geometry(num_classes: int, **_: Any) -> nn.Module:
    """Two stages, each with a plain and a shifted window."""
    return SwinTransformer(
        img_size=SIDE,
        patch_size=4,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
        num_classes=num_classes,
    )


@register_model
def deit3_small_geometry(num_classes: int, **_: Any) -> nn.Module:
    return VisionTransformer(
        img_size=SIDE, patch_size=16, embed_dim=48, depth=2, num_heads=3, no_embed_class=True, init_values=0.1,
        num_classes=num_classes,
    )  # fmt: skip


@register_model
def repvit_small_geometry(num_classes: int, **_: Any) -> nn.Module:
    return RepVit(embed_dim=(16, 32), depth=(1, 1), num_classes=num_classes)


@pytest.fixture(scope="module", params=MEMBERS, ids=lambda config: config.name)
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished stages of a member: student, int8, and the reference's evaluation."""
    config, folder = request.param, tmp_path_factory.mktemp("stages")
    student = distilled(config)
    for name in ("student", "int8"):
        (folder / name).mkdir()
    models.save(folder / "student", student, config, CLASSES)
    int8.run(
        folder / "int8",
        student=folder / "student",
        calibration_NHWC=images(24, SIDE),
        config=Int8Config(minimum_images=16),
    )
    gate_NHWC = images(32, SIDE, seed=1)
    logits_NK = logits_of(student, gate_NHWC)
    evaluation.write(
        folder / "evaluation", images_NHWC=gate_NHWC, labels_N=logits_NK.argmax(1), logits_NK=logits_NK,
        names=[f"image-{i}" for i in range(len(gate_NHWC))], classes=CLASSES, data="random",
        reference=evaluation.Reference(device="test", kind="cpu", top1=1.0),
    )  # fmt: skip
    return folder


def distilled(config: ModelConfig) -> models.Classifier:
    """A member with seeded weights after one step of the product's own loss."""
    torch.manual_seed(0)
    student = classifier(zoo.create(config, len(CLASSES), SIDE), SIDE).train()
    teacher = vit()
    before = [parameter.detach().clone() for parameter in student.parameters()]
    pixels_BCHW = torch.from_numpy(images(16, SIDE, seed=2)).permute(0, 3, 1, 2)
    with torch.no_grad():
        teacher_BK = teacher(pixels_BCHW)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    loss = distillation_loss(student(pixels_BCHW), Answer(teacher_BK), teacher_BK.argmax(1), DistillationConfig(), 0.1)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    assert all(not torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))
    return student.eval()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_family_holds_parity_and_runs_in_int8(stages: Path, tmp_path: Path, runtime: str) -> None:
    require(runtime, runtime)
    target = load(runtime)
    target = target.model_copy(update={"threads": 1, "protocol": target.protocol.model_copy(update=QUICK)})
    export.run(
        tmp_path, student=stages / "student", int8=stages / "int8", evaluation=stages / "evaluation", target=target,
        limits=Limits(), provenance={},
    )  # fmt: skip
    report = gate.gate_bundle(tmp_path / "bundle").report
    checks = {check.name: check for check in report.checks}
    for name in ("integrity", "parity", "coverage"):
        assert checks[name].verdict == "pass", checks[name].detail
    assert report.parity is not None
    assert report.coverage is not None
    layers = json.loads((stages / "int8" / "layers.json").read_text(encoding="utf-8"))
    assert report.coverage.int8 >= sum(layer["reason"] is None for layer in layers)
    print(f"{report.model} on {runtime}: {checks['parity'].detail}; {checks['coverage'].detail}")
    assert "f32" in {entry.precision for entry in report.parity.floats}
    assert report.parity.int8_sqnr_db is None or report.parity.int8_sqnr_db > LEAST_SQNR_DB


def test_tensorrt_builds_a_family_in_int8_with_fp16_and_in_both_floats(stages: Path, tmp_path: Path) -> None:
    """On ONNX Runtime, which rounds to fp16 between the operators, the graphs answer as they should."""
    require("tensorrt_rtx_bindings", "tensorrt")
    onnxruntime = require("onnxruntime", "onnxruntime")
    target = load("tensorrt").model_copy(update={"compute_capabilities": ("8.6",)})
    export.run(
        tmp_path, student=stages / "student", int8=stages / "int8", evaluation=stages / "evaluation", target=target,
        limits=Limits(), provenance={},
    )  # fmt: skip
    opened = bundle.read(tmp_path / "bundle")
    assert list(opened.floats) == ["f32", "fp16"]
    expected_NK = evaluation.read(stages / "evaluation").logits_NK
    found = {}
    for name, files in {"int8": opened.int8, **opened.floats}.items():
        session = onnxruntime.InferenceSession(str(files[0]), providers=["CPUExecutionProvider"])
        found[name] = np.concatenate(
            [session.run(None, {"images": image})[0] for image in images(32, SIDE, seed=1)[:, None]]
        )
        assert found[name].dtype == np.float32
    assert metrics.agreement(expected_NK.argmax(1), found["fp16"].argmax(1)) >= 0.995
    assert worst(found["fp16"], expected_NK) < 0.02
    assert metrics.sqnr_db(found["f32"], found["int8"]) > LEAST_SQNR_DB


def test_parallel_branches_are_one_convolution_when_served() -> None:
    model = classifier(zoo.create(ModelConfig(name="repvit_small_geometry"), len(CLASSES), SIDE), SIDE)
    graph, images_NHWC = deployable(model), images(4, SIDE)
    names = {product.name for product in products(graph)}
    assert "stages.0.blocks.0.token_mixer" in names
    assert not any("conv1" in name and "token_mixer" in name for name in names)
    assert worst(logits_of(graph, images_NHWC), logits_of(model, images_NHWC)) < 1e-4


def test_the_list_of_models_claims_what_is_proven_here() -> None:
    shown = {pattern: [m.name for m in MEMBERS if re.fullmatch(pattern, m.name)] for pattern in PROVEN_INT8}
    assert all(len(names) == 1 for names in shown.values()), shown
    assert len(shown) == len(MEMBERS)
    assert {runtime for runtimes in PROVEN_INT8.values() for runtime in runtimes} == set(RUNTIMES)
