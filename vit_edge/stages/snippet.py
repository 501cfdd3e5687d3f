"""A program of a few lines that runs a bundle's int8 model without vit-edge, to start an application from: in Python, or C++."""

import inspect
from pathlib import Path
from string import Template
from typing import Literal

from vit_edge import bundle
from vit_edge.bundle import Manifest, Trust
from vit_edge.errors import UserError
from vit_edge.stages import snippet_cpp

Language = Literal["python", "cpp"]

PROGRAM = Template("""\
# $model in int8 for $runtime. Needs: pip install $needs numpy pillow
import sys

import numpy as np
import $runtime
${also}from PIL import Image, ImageOps

CLASSES = $classes


$functions
$opening
with Image.open(sys.argv[1]) as image:
    image = resize_and_cut(to_rgb(image), $shorter, $size, Image.Resampling.$resampling)
images = np.asarray(image)[None]
${normalise}${before}logits = $running
print(CLASSES[int(logits[0].argmax())])
""")

NORMALISE = """\
images = (images.astype(np.float32) / 255 - np.float32({mean})) / np.float32({std})
images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
"""


def preparing() -> str:
    """The functions that make the model's input of an image file: those of vit_edge/pixels.py, to the letter."""
    from vit_edge.pixels import resize_and_cut, to_rgb

    return "\n\n".join(inspect.getsource(function) for function in (to_rgb, resize_and_cut))


TENSORRT = Template("""\
logger = tensorrt.Logger(tensorrt.Logger.WARNING)
builder = tensorrt.Builder(logger)
strongly_typed = getattr(tensorrt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
parser = tensorrt.OnnxParser(network, logger)
assert parser.parse_from_file($file), parser.get_error(0).desc()
config = builder.create_builder_config()
${profile}engine = tensorrt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
context = engine.create_execution_context()
""")
TENSORRT_PROFILE = Template("""\
profile = builder.create_optimization_profile()
profile.set_shape(network.get_input(0).name, *[(1, $size, $size, 3)] * 3)
config.add_optimization_profile(profile)
""")
TENSORRT_RUN = Template("""\
logits = np.empty((1, len(CLASSES)), np.float32)
given, result = network.get_input(0).name, network.get_output(0).name
${reshape}buffers = {name: cudart.cudaMalloc(array.nbytes)[1] for name, array in ((given, images), (result, logits))}
cudart.cudaMemcpy(buffers[given], images.ctypes.data, images.nbytes, cudart.cudaMemcpyKind.cudaMemcpyHostToDevice)
for name, address in buffers.items():
    context.set_tensor_address(name, address)
assert context.execute_async_v3(0)
cudart.cudaMemcpy(logits.ctypes.data, buffers[result], logits.nbytes, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)
""")


def program(bundle_path: Path, trust: Trust = Trust(), language: Language = "python") -> str:
    """The program's text, to be run where the bundle's files are.

    In Python its argument is an image file, in C++ the bytes of one that is prepared already.
    """
    with bundle.opened(bundle_path, trust) as opened:
        manifest = opened.manifest
    if manifest.target.batch != 1:
        raise UserError(
            f"the bundle takes {manifest.target.batch} images at once, the program is for one",
            "export for a target with batch: 1",
        )
    if language == "cpp":
        return snippet_cpp.program(manifest)
    opening, before, running = _session(manifest)
    preprocessing, tensorrt = manifest.preprocessing, manifest.target.runtime == "tensorrt"
    return PROGRAM.substitute(
        model=manifest.model.name,
        runtime=manifest.target.runtime,
        needs="tensorrt cuda-python" if tensorrt else manifest.target.runtime,
        also="from cuda.bindings import runtime as cudart\n" if tensorrt else "",
        classes=manifest.classes,
        functions=preparing(),
        size=preprocessing.image_size,
        shorter=round(preprocessing.image_size / preprocessing.crop),
        resampling=preprocessing.interpolation.upper(),
        opening=opening,
        before=before,
        running=running,
        normalise=""
        if manifest.input_layout == "uint8-nhwc"
        else NORMALISE.format(mean=list(preprocessing.mean), std=list(preprocessing.std)),
    )


def _session(manifest: Manifest) -> tuple[str, str, str]:
    """The lines that open the model, those that come before the expression that runs it, and that."""
    return {"onnxruntime": _onnxruntime, "openvino": _openvino, "tensorrt": _tensorrt}[manifest.target.runtime](
        manifest
    )


def _onnxruntime(manifest: Manifest) -> tuple[str, str, str]:
    target = manifest.target
    lines = ["options = onnxruntime.SessionOptions()"]
    lines += [f"options.intra_op_num_threads = {target.threads}"] if target.threads else []
    lines += ['options.add_free_dimension_override_by_name("batch", 1)'] if target.dynamic_batch else []
    lines += [f"options.add_session_config_entry({k!r}, {v!r})" for k, v in manifest.session_options.items()]
    file = manifest.int8_files[0]
    lines += [f'session = onnxruntime.InferenceSession({file!r}, options, providers=["CPUExecutionProvider"])']
    return "\n".join(lines), "", "session.run(None, {session.get_inputs()[0].name: images})[0]"


def _openvino(manifest: Manifest) -> tuple[str, str, str]:
    target, size = manifest.target, manifest.preprocessing.image_size
    settings = {"PERFORMANCE_HINT": "LATENCY", **manifest.session_options}
    settings |= {"INFERENCE_NUM_THREADS": str(target.threads)} if target.threads else {}
    lines = ["core = openvino.Core()", f"graph = core.read_model({manifest.int8_files[0]!r})"]
    lines += [f"graph.reshape([1, {size}, {size}, 3])"] if target.dynamic_batch else []
    lines += [f"model = core.compile_model(graph, {target.device!r}, {settings})"]
    return "\n".join(lines), "", "model(images)[0]"


def _tensorrt(manifest: Manifest) -> tuple[str, str, str]:
    size, is_open = manifest.preprocessing.image_size, manifest.target.dynamic_batch
    opening = TENSORRT.substitute(
        file=repr(manifest.int8_files[0]), profile=TENSORRT_PROFILE.substitute(size=size) if is_open else ""
    )
    reshape = f"context.set_input_shape(given, (1, {size}, {size}, 3))\n" if is_open else ""
    return opening, TENSORRT_RUN.substitute(reshape=reshape), "logits"
