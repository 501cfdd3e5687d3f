"""What a runtime is never given to open."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.tiny_model import TinyModel
from vit_edge.errors import UserError
from vit_edge.safety import models, onnx_file, openvino_file

KNOWN = models.DOMAINS["onnxruntime"]


def saved(folder: Path, *nodes: onnx.NodeProto, constants: tuple[onnx.TensorProto, ...] = (), **more: object) -> Path:
    graph = helper.make_graph(list(nodes), "graph", [], [], list(constants))
    (folder / "int8").mkdir()
    path = folder / "int8" / "model.onnx"
    path.write_bytes(helper.make_model(graph, **more).SerializeToString())
    return path


def check(path: Path, *files: str) -> None:
    onnx_file.check(path, "int8/model.onnx", KNOWN, {"int8/model.onnx", *files})


def test_a_sound_model_is_let_through(tiny: TinyModel, tmp_path: Path) -> None:
    for int8 in (False, True):
        check(tiny.save(tmp_path / "model.onnx", int8=int8))


def node(operator: str = "Relu", **fields: object) -> onnx.NodeProto:
    return helper.make_node(operator, ["a"], ["b"], **fields)


def external(**entries: str) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize("domain", ["custom", "trt.plugins", "com.microsoft.extensions", "ai.onnx.contrib"])
def test_an_operator_of_a_foreign_domain_is_refused(tmp_path: Path, domain: str) -> None:
    with pytest.raises(UserError, match=f"an operator of the domain '{domain}'"):
        check(saved(tmp_path, node(domain=domain)))


def test_tensorrt_gets_standard_operators_alone(tmp_path: Path) -> None:
    path = saved(tmp_path, node("QGemm", domain="com.microsoft"))
    check(path)
    with pytest.raises(UserError, match=r"com\.microsoft"):
        models.check_artefact(tmp_path, "tensorrt", ["int8/model.onnx"], {"int8/model.onnx"})


def test_an_operator_that_loads_compiled_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loads compiled code"):
        check(saved(tmp_path, node("EPContext", domain="com.microsoft")))


def test_subgraphs_and_functions_are_refused(tmp_path: Path) -> None:
    body = helper.make_graph([], "body", [], [])
    with pytest.raises(UserError, match="subgraph"):
        check(saved(tmp_path, node("Loop", body=body)))
    function = helper.make_function("", "Relu", ["a"], ["b"], [node()], [helper.make_opsetid("", 20)])
    (tmp_path / "two").mkdir()
    with pytest.raises(UserError, match="functions"):
        check(saved(tmp_path / "two", node(), functions=[function]))


@pytest.mark.parametrize(
    "location", ["../../etc/passwd", "/etc/passwd", "weights/../weights.data", "other.data", "*/_ORT_MEM_ADDR_/*", "", "C:\\w"]
)  # fmt: skip
@pytest.mark.parametrize("place", ["initializer", "attribute"])
def test_weights_outside_the_bundle_are_refused(tmp_path: Path, location: str, place: str) -> None:
    tensor = external(location=location, offset="0")
    nodes = [node("Constant", value=tensor)] if place == "attribute" else []
    constants = (tensor,) if place == "initializer" else ()
    with pytest.raises(UserError, match="no file of the bundle"):
        check(saved(tmp_path, *nodes, constants=constants), "int8/weights.data")


def test_weights_in_a_file_of_the_bundle_are_let_through(tmp_path: Path) -> None:
    check(saved(tmp_path, constants=(external(location="weights.data", length="16"),)), "int8/weights.data")


def test_external_data_in_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown form"):
        check(saved(tmp_path, constants=(external(location="weights.data", basepath="/etc"),)), "int8/weights.data")


@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"\x3a\xff\xff\xff\xff\x0f", b"ORTM" * 100, b"\x3a" + b"\xff" * 20, b"\x0b\x0c"]
)
def test_what_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError):
        check(path)


def test_more_fields_than_a_model_has_are_refused_in_time(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x01" * (onnx_file.MAX_FIELDS + 1))
    with pytest.raises(UserError, match="more fields than any model"):
        check(path)


NET = '<net name="m" version="11"><layers>{}</layers></net>'
CONSTANT = '<layer id="0" type="Const" version="opset1"><data offset="{}" size="{}"/></layer>'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<!DOCTYPE net [<!ENTITY a "aaaa">]>' + NET, "document type"),
        ("<?php x?>" + NET, "processing instruction"),
        (NET.format('<layer id="0" type="X" version="extension"/>'), "none of OpenVINO's own sets"),
        (NET.format('<layer id="0" type="X"/>'), "none of OpenVINO's own sets"),
        (NET.format("<body/>"), "the body of a loop"),
        (NET.format(CONSTANT.format(8, 9)), "ends after its weights"),
        (NET.format(CONSTANT.format("-1", 9)), "a constant at"),
        (NET.format("<a>" * 100 + "</a>" * 100), "deeper"),
        ("<a/>", "root 'a'"),
        ("<net>", "no XML"),
        ("", "no XML"),
    ],
)
def test_an_openvino_model_that_is_not_plain_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    graph, weights = tmp_path / "model.xml", tmp_path / "model.bin"
    graph.write_text(text)
    weights.write_bytes(bytes(16))
    with pytest.raises(UserError, match=reason):
        openvino_file.check(graph, weights)


def test_a_sound_openvino_model_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text(NET.format(CONSTANT.format(8, 8)))
    (tmp_path / "model.bin").write_bytes(bytes(16))
    openvino_file.check(tmp_path / "model.xml", tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("runtime", "files"),
    [
        ("onnxruntime", ["model.ort"]), ("onnxruntime", ["model.xml", "model.bin"]), ("tensorrt", ["engine.plan"]),
        ("openvino", ["model.onnx"]), ("openvino", ["model.xml"]), ("openvino", ["model.xml", "other.bin"]),
        ("openvino", ["saved_model.pb"]),
    ],
)  # fmt: skip
def test_each_runtime_is_given_its_own_form_alone(tmp_path: Path, runtime: str, files: list[str]) -> None:
    with pytest.raises(UserError, match="not what the runtime opens"):
        models.check_artefact(tmp_path, runtime, files, files)


@pytest.mark.parametrize(
    ("runtime", "option"),
    [
        ("onnxruntime", "session.load_model_format"), ("onnxruntime", "ep.context_file_path"),
        ("onnxruntime", "session.model_external_initializers_file_folder_path"), ("openvino", "CACHE_DIR"),
        ("openvino", "CONFIG_FILE"), ("tensorrt", "x"),
    ],
)  # fmt: skip
def test_an_option_that_names_files_is_refused(runtime: str, option: str) -> None:
    with pytest.raises(UserError, match=option):
        models.check_options(runtime, {option: "x"})
