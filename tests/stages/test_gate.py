import dataclasses
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import MakeBundle
from tests.tiny_model import TinyModel, digits
from vit_edge import bundle, evaluation
from vit_edge.bundle import Trust
from vit_edge.errors import UserError
from vit_edge.recipe import Limits
from vit_edge.report.schema import Report
from vit_edge.stages import gate
from vit_edge.stages.bench import bench_bundles
from vit_edge.stages.gate import gate_bundle
from vit_edge.stages.predict import predict_images

LOOSE = [("recipe", {"max_drop_points": 5.0, "min_relative_top1": None})]


@pytest.fixture(params=["ort_bundle", "openvino_bundle"])
def any_bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_a_sound_bundle_passes_every_check(any_bundle: Path) -> None:
    gated = gate_bundle(any_bundle, limits=LOOSE)
    report = gated.report
    assert (report.verdict, report.exit_code, report.blame) == ("pass", 0, None)
    assert [check.name for check in report.checks] == ["integrity", "parity", "coverage", "accuracy", "latency"]
    assert {check.verdict for check in report.checks} == {"pass"}
    assert report.accuracy is not None
    assert report.accuracy.target_top1 > 0.9
    assert gated.answers["int8"].shape == gated.answers["f32"].shape == (597,)


def test_int8_is_timed_beside_every_float_precision_of_the_device(openvino_bundle: Path) -> None:
    report = gate_bundle(openvino_bundle).report
    assert report.latency is not None
    assert report.parity is not None
    timed = [one.name for one in report.latency.artefacts]
    assert timed[:2] == ["int8", "f32"]
    assert timed[1:] == [one.precision for one in report.parity.floats]
    best = min(report.latency.artefacts[1:], key=lambda one: one.ms["p50"])
    assert report.latency.float_precision == best.name


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_an_open_batch_is_tried_in_larger_ones_for_throughput(make_bundle: MakeBundle, runtime: str) -> None:
    report = gate_bundle(make_bundle(runtime, target_fields={"dynamic_batch": True}), limits=LOOSE).report
    assert report.latency is not None
    offline = report.latency.artefacts[0].offline
    assert offline.open_batch
    assert [way.batch for way in offline.tried][:2] == [1, 8]
    assert offline.images_per_second == max(way.images_per_second for way in offline.tried)
    assert f"images/s at batch {offline.batch}, one session, the best of 1, 8" in report.checks[-1].detail


def test_a_fixed_batch_says_what_its_throughput_was_measured_at(any_bundle: Path) -> None:
    report = gate_bundle(any_bundle, limits=LOOSE).report
    assert (
        "at the file's fixed batch of 1, one session: export --dynamic-batch allows larger ones"
        in report.checks[-1].detail
    )


def test_the_json_has_what_others_rely_on(ort_bundle: Path) -> None:
    found = json.loads(gate_bundle(ort_bundle).report.to_json())
    assert found["schema"] == "vit-edge/gate/1"
    assert found["bundle_sha256"] == bundle.read(ort_bundle).digest
    assert set(found["checks"][0]) == {"name", "verdict", "detail"}
    assert {"n", "reference_top1", "target_top1", "drop_points", "drop_lower95_one_sided", "drop_upper95_one_sided", "agreement", "images_needed"} <= set(found["accuracy"])  # fmt: skip
    assert {"target_ms", "float_ms", "float_precision", "reference_ms", "speedup_vs_float", "recommended"} <= set(found["latency"])  # fmt: skip
    assert set(found["latency"]["target_ms"]) == {"p50", "p90", "p99", "n"}
    assert (found["coverage"]["int8"], found["coverage"]["float"]) == (2, 1)
    assert len(found["coverage"]["float_nodes"]) == 1
    assert found["runtime"]["name"] == "onnxruntime"
    assert found["device"]["processor"]


def test_a_float_export_that_is_wrong_is_blamed_first(make_bundle: MakeBundle) -> None:
    wrong = TinyModel()
    wrong.head_bias = wrong.head_bias + np.linspace(0, 0.2, 10, dtype=np.float32)
    report = gate_bundle(make_bundle("onnxruntime", float_model=wrong)).report
    assert (report.verdict, report.blame) == ("fail", "parity")
    assert report.latency is not None
    assert report.latency.float_precision is None, "a wrong float artefact is nothing to compare with"


def test_a_product_that_fell_back_to_float_fails_coverage(make_bundle: MakeBundle) -> None:
    folder = make_bundle("openvino", int8={"conv_in_float": True}, expected_int8=["conv", "hidden", "head"])
    report = gate_bundle(folder, limits=LOOSE).report
    assert (report.verdict, report.blame) == ("fail", "coverage")
    assert report.coverage is not None
    assert report.coverage.missing == ["conv"]


def test_limits_say_where_they_come_from(make_bundle: MakeBundle) -> None:
    folder = make_bundle("onnxruntime", limits=Limits(max_drop_points=4.0, max_p90_ms=1e-6).model_dump())
    report = gate_bundle(folder, limits=[("command line", {"max_p90_ms": 1e-9})]).report
    origins = {one.name: (one.value, one.origin) for one in report.limits}
    assert origins["max_drop_points"] == (4.0, "bundle")
    assert origins["max_p90_ms"] == (1e-9, "command line")
    assert report.checks[-1].verdict == "fail"


def test_run_writes_what_the_pipeline_reads(openvino_bundle: Path, tmp_path: Path) -> None:
    found = gate.run(
        tmp_path / "gate", bundle=openvino_bundle, limits=Limits(max_drop_points=5, min_relative_top1=None)
    )
    assert found["verdict"] == "pass"
    folder = tmp_path / "gate"
    report = Report.model_validate_json((folder / "gate.json").read_bytes())
    assert {one.origin for one in report.limits} == {"recipe"}
    assert len(ET.parse(folder / "gate.xml").findall(".//testcase")) == 5
    assert (folder / "gate.md").read_text().startswith("# tiny on openvino: pass")
    with np.load(folder / gate.ANSWERS, allow_pickle=False) as answers:
        assert {"int8", "f32"} <= set(answers)
        answers_N = answers["int8"]
    assert answers_N.dtype == np.int64
    assert np.mean(answers_N == digits()[1][1200:]) == report.accuracy.target_top1  # type: ignore[union-attr]


def test_an_evaluation_that_travels_apart_is_given(ort_bundle: Path, tiny_evaluation: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(ort_bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns("evaluation")))
    with pytest.raises(UserError, match="travel apart"):
        gate_bundle(alone)
    assert gate_bundle(alone, reference=tiny_evaluation, limits=LOOSE).report.verdict == "pass"


def test_images_are_made_again_from_their_files(ort_bundle: Path, tiny_evaluation: Path, tmp_path: Path) -> None:
    light = Path(shutil.copytree(ort_bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns("images.npy")))
    names = json.loads((tiny_evaluation / "names.json").read_text())
    for name, image_HWC in zip(names, digits()[0][1200:], strict=True):
        Image.fromarray(image_HWC).save(tmp_path / name)
    with pytest.raises(UserError, match=r"images\.npy is missing"):
        gate_bundle(light)
    assert gate_bundle(light, images=tmp_path, limits=LOOSE).report.verdict == "pass"
    Image.fromarray(digits()[0][0]).save(tmp_path / names[3])
    with pytest.raises(UserError, match=r"images\.npy has been changed"):
        gate_bundle(light, images=tmp_path)


def test_another_students_evaluation_is_refused(ort_bundle: Path, tiny_evaluation: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_evaluation, tmp_path / "other"))
    manifest = other / "evaluation.json"
    values = json.loads(manifest.read_text())
    values["files"]["labels.npy"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match="another evaluation"):
        gate_bundle(ort_bundle, reference=other)


def test_a_reference_that_was_taken_again_on_the_same_images_is_held_against(
    ort_bundle: Path, tiny_evaluation: Path, tmp_path: Path
) -> None:
    again = tmp_path / "run" / "reference" / "evaluation"
    images = evaluation.read(tiny_evaluation)
    on_gpu = images.manifest.reference.model_copy(
        update={"device": "a GPU", "kind": "cuda", "latency_ms": {"p50": 1e-6, "p90": 1e-6, "p99": 1e-6, "n": 9}}
    )
    evaluation.write(
        again, images_NHWC=np.asarray(images.images_NHWC), labels_N=images.labels_N,
        logits_NK=images.logits_NK + np.float32(1e-6), names=images.names, classes=images.manifest.classes,
        data=images.manifest.data, reference=on_gpu,
    )  # fmt: skip
    limits = [*LOOSE, ("command line", {"max_vs_reference": 10.0})]
    for given in (again, again / "evaluation.json", tmp_path / "run", tmp_path / "run" / "reference"):
        report = gate_bundle(ort_bundle, reference=given, limits=limits, seconds=0.05).report
        assert (report.verdict, report.blame) == ("fail", "latency")
        assert report.reference is not None
        assert report.reference["device"] == "a GPU"


def test_a_zip_is_gated(ort_bundle: Path, tmp_path: Path) -> None:
    bundle.pack(ort_bundle, tmp_path / "b.zip")
    assert gate_bundle(tmp_path / "b.zip", limits=LOOSE).report.verdict == "pass"


def test_a_digest_that_was_published_is_held_to(ort_bundle: Path) -> None:
    digest = bundle.read(ort_bundle).digest
    assert gate_bundle(ort_bundle, trust=Trust(digest[:16]), limits=LOOSE).report.verdict == "pass"
    for other in ("0" * 64, digest[:4]):
        with pytest.raises(UserError, match="SHA-256"):
            gate_bundle(ort_bundle, trust=Trust(other))


def test_a_graph_that_takes_floats_gets_normalised_planes(ort_bundle: Path) -> None:
    opened = bundle.read(ort_bundle)
    preprocessing = opened.manifest.preprocessing.model_copy(update={"mean": (0.5, 0.0, 1.0), "std": (0.5, 1.0, 0.25)})
    manifest = opened.manifest.model_copy(update={"input_layout": "float-nchw", "preprocessing": preprocessing})
    feed = gate.graph_input(dataclasses.replace(opened, manifest=manifest))
    given = feed(np.full((2, 8, 8, 3), 255, np.uint8))
    assert (given.shape, given.dtype, given.flags.c_contiguous) == ((2, 3, 8, 8), np.float32, True)
    assert given[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]


def test_predict_prepares_images_as_the_gate_does(any_bundle: Path, tmp_path: Path) -> None:
    images_NHWC, labels_N = digits()
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(images_NHWC[number]).save(paths[-1])
    answers = predict_images(any_bundle, paths, top=5)
    assert [next(iter(found)) for found in answers] == [str(label) for label in labels_N[:3]]
    assert all(len(found) == 5 and sum(found.values()) <= 1 for found in answers)


def test_bench_times_every_artefact_of_every_bundle(ort_bundle: Path, openvino_bundle: Path) -> None:
    rows = bench_bundles([ort_bundle, openvino_bundle], seconds=0.1)
    assert [(row.target, row.artefact) for row in rows[:3]] == [
        ("onnxruntime", "int8"), ("onnxruntime", "f32"), ("openvino", "int8"),
    ]  # fmt: skip
    assert all(row.ms["n"] >= 16 and row.ms["p50"] > 0 for row in rows)


def test_a_graph_that_asks_for_more_memory_than_there_is_is_the_users_mistake(ort_bundle: Path, tmp_path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    from tests.safety import mutations
    from vit_edge.safety import names

    def huge(content: bytes) -> bytes:
        model = onnx.ModelProto.FromString(content)
        model.graph.initializer.append(numpy_helper.from_array(np.array([2**44], np.int64), "size"))
        model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["size"], ["huge"]))
        model.graph.node.append(helper.make_node("ReduceMax", ["huge"], ["largest"], keepdims=0))
        model.graph.node.append(helper.make_node("Add", [model.graph.output[0].name, "largest"], ["sum"]))
        model.graph.output[0].name = "sum"
        return bytes(model.SerializeToString())

    files = {name: (ort_bundle / name).read_bytes() for name in names.contents(ort_bundle)}
    mutations.write(tmp_path, mutations.changed(files, "int8/model.onnx", huge, seal=True))
    with pytest.raises(UserError, match="cannot run"):
        gate_bundle(tmp_path)
